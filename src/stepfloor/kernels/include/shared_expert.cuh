// The shared expert's matrix as moe_down's kernels read it: [tile of 16 rows][step of 64 columns][codes, then powers].
// Source: _shared_expert.py, which writes it.
#pragma once

#include "e4m3.cuh"

// SHARED_K       columns, 0 without a shared expert
// SHARED_FORMAT  0 bf16, 1 E4M3 with a float32 scale for SCALE_ROWS rows and SCALE_COLUMNS columns, 2 MXFP8

constexpr int SHARED_STEPS = (SHARED_K + 63) / 64;
constexpr int SHARED_BYTES = SHARED_FORMAT == 0 ? 2048 : SHARED_FORMAT == 1 ? 1024 : 1056;  // of a tile in a step

// The shared expert's weights of this lane in a step: the lower 32 columns of rows g and g + 8, then the upper ones.
struct SharedWeights {
  Words top[2], bottom[2];
};
DEVICE SharedWeights load_shared_weights(const u8* from, int lane) {
  const Words a = load_global(from + lane * 16), b = load_global(from + 512 + lane * 16);
  if constexpr (SHARED_FORMAT == 0) {
    return {{a, b}, {load_global(from + 1024 + lane * 16), load_global(from + 1536 + lane * 16)}};
  } else {
    u32 power[4] = {E4M3_POWER, E4M3_POWER, E4M3_POWER, E4M3_POWER};
    if constexpr (SHARED_FORMAT == 2) {
      const u32 powers = load_global_word(from + 1024 + lane / 4 * 4);
#pragma unroll
      for (int i = 0; i < 4; i++) power[i] = spread_byte(powers, i) * 0x80u;
    }
    return {{decode_e4m3(a.x, a.y, power[0]), decode_e4m3(a.z, a.w, power[1])},
            {decode_e4m3(b.x, b.y, power[2]), decode_e4m3(b.z, b.w, power[3])}};
  }
}

// A step's sums of 8 rows of x, whose columns of this lane are lower and upper, before scales.
DEVICE void multiply_shared_step(float (&sum)[4], const SharedWeights& w, const Words& lower, const Words& upper) {
  float even[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};
  matrix_step(even, w.top[0].x, w.bottom[0].x, w.top[0].y, w.bottom[0].y, lower.x, lower.y);
  matrix_step(odd, w.top[0].z, w.bottom[0].z, w.top[0].w, w.bottom[0].w, lower.z, lower.w);
  matrix_step(even, w.top[1].x, w.bottom[1].x, w.top[1].y, w.bottom[1].y, upper.x, upper.y);
  matrix_step(odd, w.top[1].z, w.bottom[1].z, w.top[1].w, w.bottom[1].w, upper.z, upper.w);
#pragma unroll
  for (int i = 0; i < 4; i++) sum[i] = even[i] + odd[i];
}

// What multiplies a step's sum of a row.
DEVICE float shared_scale(const float* scales, int row, int step) {
  constexpr int LINE = (SHARED_K + SCALE_COLUMNS - 1) / SCALE_COLUMNS;
  return SHARED_FORMAT == 1 ? load_global_float(scales + row / SCALE_ROWS * LINE + step * 64 / SCALE_COLUMNS) : 1.f;
}
