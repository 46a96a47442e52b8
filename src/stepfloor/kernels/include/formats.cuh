// Weights of every streamed format, from their bytes to the bf16 pairs that a matrix step takes.
// Source: E4M3 and E8M0 of the OCP formats, NVFP4; _stream.py writes the bytes read here, experts.cuh decodes FP4.
//
// A lane (g, t) owns columns 8t .. 8t + 7 of each 32-column step of weight row g, in every format. A unit is what is
// stored together: one step, or two in NVFP4: the codes of all its rows, then the rows' scales, padded to 16 bytes.
//
// Every product with x is the one that the decoded float32 weight gives, but for scales that are not powers of two: those
// multiply float32 sums, except NVFP4's, whose product with a code has at most 6 significant bits.
//
// No #pragma once: linear_pair.cu includes this for each of its matrices, in a namespace of its own.

#include "e4m3.cuh"
#include "experts.cuh"

// FORMAT  one of these numbers
constexpr int BF16 = 0;
constexpr int FP8 = 1;        // a float32 scale for each row
constexpr int FP8_BLOCK = 2;  // a float32 scale for 128 rows and 128 columns
constexpr int MXFP8 = 3;      // a power of two for each step of a row
constexpr int NVFP4 = 4;      // an E4M3 scale for 16 columns of a row, and a float32 scale

constexpr int UNIT_STEPS = FORMAT == NVFP4 ? 2 : 1;
constexpr int CODE_BYTES = FORMAT == BF16 ? 64 : 32;  // of a weight row in a unit
constexpr int SCALE_BYTES = FORMAT == MXFP8 ? 1 : FORMAT == NVFP4 ? 4 : 0;
constexpr bool ROW_SCALES = FORMAT == FP8 || FORMAT == NVFP4;
constexpr bool BLOCK_SCALES = FORMAT == FP8_BLOCK;

DEVICE constexpr int unit_bytes(int rows) { return rows * CODE_BYTES + (rows * SCALE_BYTES + 15) / 16 * 16; }

// What a lane reads of one weight row in a unit.
struct Codes {
  Words words;  // bf16 uses all four, the others two
  u32 scale;
};

// unit: shared address; rows: weight rows of the unit; row: this lane's. Rows past the last one repeat it: behind the unit lies
// what another copy may be writing.
DEVICE Codes load_codes(u32 unit, int rows, int row, int t) {
  Codes c;
  row = min(row, rows - 1);
  if constexpr (FORMAT == BF16) {
    c.words = load_shared(unit + row * 64 + t * 16);
  } else {
    const Pair pair = load_shared_pair(unit + row * 32 + t * 8);
    c.words.x = pair.x;
    c.words.y = pair.y;
    if constexpr (FORMAT == MXFP8) c.scale = load_shared_byte(unit + rows * 32 + row);
    if constexpr (FORMAT == NVFP4) c.scale = load_shared_word(unit + rows * 32 + row * 4);
  }
  return c;
}

// The same from global memory.
DEVICE Codes load_codes(const u8* unit, int rows, int row, int t, u64 policy) {
  Codes c;
  if constexpr (FORMAT == BF16) {
    c.words = load_global_streamed(unit + row * 64 + t * 16, policy);
  } else {
    const u64 pair = load_global_u64_streamed(unit + row * 32 + t * 8, policy);
    c.words.x = (u32)pair;
    c.words.y = (u32)(pair >> 32);
    if constexpr (FORMAT == MXFP8) c.scale = load_global_byte(unit + rows * 32 + row);
    if constexpr (FORMAT == NVFP4) c.scale = load_global_word(unit + rows * 32 + row * 4);
  }
  return c;
}

// The 8 columns of this lane in a step of the unit, as bf16 pairs.
DEVICE Words decode(const Codes& c, int step, int t) {
  if constexpr (FORMAT == BF16) {
    return c.words;
  } else if constexpr (FORMAT == NVFP4) {
    u32 pairs[4];
    const u32 scale = decode_scale(c.scale, step * 2 + t / 2);
    if (step == 0)
      decode_eight<0>(c.words.x, c.words.y, scale, pairs);
    else
      decode_eight<1>(c.words.x, c.words.y, scale, pairs);
    return Words{pairs[0], pairs[1], pairs[2], pairs[3]};
  } else {
    const u32 power = FORMAT == MXFP8 ? c.scale * 0x00800080u : E4M3_POWER;  // a stored power has it already
    return decode_e4m3(c.words.x, c.words.y, power);
  }
}
