// A warp's sums for a piece of an expert's matrix, 16 weight rows by STEPS times 64 columns, in every format that is tiled.
// Source: _experts.py writes the bytes read here; experts.cuh for NVFP4 and what lane (g, t) owns.
//
// A piece is the codes of its steps, then their scales. A step of E4M3 is 1 KB of codes, 16 bytes a lane for row g and 16
// for row g + 8, lower 32 columns first. float32 scales multiply float32 sums: of a row at the end of the piece, of a block
// after each step, which lies in one block, as do the 8 rows above and the 8 below.
#pragma once

#include "e4m3.cuh"
#include "experts.cuh"

// EXPERT_FORMAT  one of these numbers
constexpr int EXPERTS_NVFP4 = 0;      // the expert's own scale is left to the caller
constexpr int EXPERTS_FP8_ROWS = 1;   // 16 float32, rows g then rows g + 8
constexpr int EXPERTS_FP8_BLOCKS = 2;  // two float32 a step, padded to 16 bytes

constexpr bool EXPERT_SCALES = EXPERT_FORMAT == EXPERTS_NVFP4;
constexpr int EXPERT_STEP_CODES = EXPERT_FORMAT == EXPERTS_NVFP4 ? 512 : 1024;

DEVICE constexpr int piece_bytes(int steps) {
  return steps * EXPERT_STEP_CODES + (EXPERT_FORMAT == EXPERTS_NVFP4      ? steps * 64
                                      : EXPERT_FORMAT == EXPERTS_FP8_ROWS ? 64
                                                                          : (steps * 8 + 15) / 16 * 16);
}

// Where a lane's codes and scales begin in a piece.
DEVICE int codes_in_piece(int lane) { return lane * 16; }
DEVICE int scales_in_piece(int steps, int lane) {
  return steps * EXPERT_STEP_CODES + (EXPERT_FORMAT == EXPERTS_NVFP4      ? lane / 2 * 4
                                      : EXPERT_FORMAT == EXPERTS_FP8_ROWS ? lane / 4 * 4
                                                                          : 0);
}

struct ExpertSums {
  float even[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f}, scaled[4] = {0.f, 0.f, 0.f, 0.f};

  // Step i of a piece whose codes and scales begin there; lower, upper: this lane's columns of x.
  DEVICE void add(u32 codes, u32 scales, int i, const Words& lower, const Words& upper) {
    const Words top = load_shared(codes + i * EXPERT_STEP_CODES);
    if constexpr (EXPERT_FORMAT == EXPERTS_NVFP4) {
      expert_step(even, odd, top, load_shared_word(scales + i * 64), lower, upper);
    } else {
      const Words bottom = load_shared(codes + i * EXPERT_STEP_CODES + 512);
      multiply(decode_e4m3(top.x, top.y, E4M3_POWER), decode_e4m3(bottom.x, bottom.y, E4M3_POWER), lower);
      multiply(decode_e4m3(top.z, top.w, E4M3_POWER), decode_e4m3(bottom.z, bottom.w, E4M3_POWER), upper);
      if constexpr (EXPERT_FORMAT == EXPERTS_FP8_BLOCKS) {
        const Pair factors = load_shared_pair(scales + i * 8);
#pragma unroll
        for (int c = 0; c < 4; c++) {
          scaled[c] = multiply_add(__uint_as_float(c < 2 ? factors.x : factors.y), even[c] + odd[c], scaled[c]);
          even[c] = odd[c] = 0.f;
        }
      }
    }
  }

  // After the last step, before the piece is given back.
  DEVICE void close(u32 scales) {
    if constexpr (EXPERT_FORMAT == EXPERTS_FP8_ROWS) {
      const float above = __uint_as_float(load_shared_word(scales)), below = __uint_as_float(load_shared_word(scales + 32));
#pragma unroll
      for (int c = 0; c < 4; c++) scaled[c] = (even[c] + odd[c]) * (c < 2 ? above : below);
    }
  }

  // Of this lane's rows g (c = 0, 1) and g + 8 (2, 3), columns 2t and 2t + 1 of x.
  DEVICE float get(int c) const { return EXPERT_FORMAT == EXPERTS_NVFP4 ? even[c] + odd[c] : scaled[c]; }

private:
  DEVICE void multiply(const Words& top, const Words& bottom, const Words& x) {
    matrix_step(even, top.x, bottom.x, top.y, bottom.y, x.x, x.y);
    matrix_step(odd, top.z, bottom.z, top.w, bottom.w, x.z, x.w);
  }
};
