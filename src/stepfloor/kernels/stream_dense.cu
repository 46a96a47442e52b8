// A streamed matrix as bf16 [N, K] again, for products of many rows through the library. Source: _stream.py, which writes the
// tape and states the layout that the macros repeat. A thread moves 8 columns of a row, or twice 8: neighbours write whole
// rows and read 64 bytes of each. A weight is rounded once, where a float32 scale makes that necessary.

#include "stream.cuh"
#include "formats.cuh"

// N, K, SPLIT, SLICES, STACKS, ROWS, PASS_ROWS, STEPS, CHUNK_STEPS, FORMAT  as in linear.cu
// STREAMS, CHANNELS, COLUMNS  rows of the tape are [block][stream][COLUMNS channels]; those of the matrix [stream][CHANNELS]

constexpr int THREADS = 256;
constexpr int WARPS = 8;
constexpr int BLOCK_ROWS = ROWS * STACKS;
constexpr int TAPES = (N + BLOCK_ROWS - 1) / BLOCK_ROWS * SPLIT * WARPS;
constexpr int PASSES = (ROWS + PASS_ROWS - 1) / PASS_ROWS;
constexpr int LAST_ROWS = ROWS - (PASSES - 1) * PASS_ROWS;
constexpr int CHUNKS = STEPS / CHUNK_STEPS;
constexpr int CHUNK_UNITS = CHUNK_STEPS / UNIT_STEPS;
constexpr int WARP_UNITS = STEPS / UNIT_STEPS;
constexpr int UNITS = SPLIT * SLICES * WARP_UNITS;  // of a row

struct Arguments {
  const u8* tape;
  const float* scales;
  u16* out;
};

extern "C" __global__ void __launch_bounds__(THREADS) dense_kernel(const __grid_constant__ Arguments a) {
  const u64 e = (u64)blockIdx.x * THREADS + threadIdx.x;
  const int t = e % 4, unit = e / 4 % UNITS, row = e / 4 / UNITS;
  if (row >= STREAMS * CHANNELS) return;
  const int stream = row / CHANNELS, channel = row % CHANNELS;
  const int from = channel / COLUMNS * (STREAMS * COLUMNS) + stream * COLUMNS + channel % COLUMNS;  // row of the tape
  const int inside = from % ROWS, pass = inside / PASS_ROWS, live = pass == PASSES - 1 ? LAST_ROWS : PASS_ROWS;
  const int slice = unit / WARP_UNITS % SLICES, part = unit / WARP_UNITS / SLICES, step = unit % WARP_UNITS;
  const int tape = (from / BLOCK_ROWS * SPLIT + part) * WARPS + from % BLOCK_ROWS / ROWS * SLICES + slice;
  const u64 before = (u64)pass * TAPES * WARP_UNITS * unit_bytes(PASS_ROWS);
  const u64 piece = ((u64)(step / CHUNK_UNITS) * TAPES + tape) * CHUNK_UNITS + step % CHUNK_UNITS;
  const Codes codes = load_codes(a.tape + before + piece * unit_bytes(live), live, inside % PASS_ROWS, t, evict_first_policy());
#pragma unroll
  for (int j = 0; j < UNIT_STEPS; j++) {
    const int column = (unit * UNIT_STEPS + j) * 32 + t * 8;
    if (column >= K) continue;
    Words v = decode(codes, j, t);
    if constexpr (ROW_SCALES || BLOCK_SCALES) {
      const float scale = load_global_float(a.scales + (ROW_SCALES ? from : from / 128 * ((K + 127) / 128) + column / 128));
      v.x = to_pair(lower(v.x) * scale, upper(v.x) * scale);
      v.y = to_pair(lower(v.y) * scale, upper(v.y) * scale);
      v.z = to_pair(lower(v.z) * scale, upper(v.z) * scale);
      v.w = to_pair(lower(v.w) * scale, upper(v.w) * scale);
    }
    store_global(a.out + (u64)row * K + column, v);
  }
}
