// gate = sigmoid(low up^T), x = mean over streams of gate * n, in one pass: a block owns the same COLUMNS channels of every
// stream, so that it finishes them itself. Source: hc_mix.py, which orders the rows of `up` that way and repeats the equations;
// rounds where the source does.
//
// Warps: STREAMS x HALVES share the rows, SLICES share the columns of a row. Sums as in linear.cu, whatever the row count.
// More than X_ROWS rows go in turns, all in one launch: the grid is turns times blocks.
//
// Up to 8 rows: a warp reads its slice of `low` from the L2 into registers, as every stream's warp does. More are STAGED: the
// block brings `low` to shared memory once, as the fragments that matrix steps take; a warp keeps its weights in registers,
// decoded once for all tiles of 16 rows, and its sums take the place of those weights in shared memory, so that the next
// kernel's block still fits beside this one.

#include "stream.cuh"
#include "formats.cuh"

// D, STREAMS, RANK  width of a stream, streams, columns of `up`
// COLUMNS           channels of a block, even
// SLICES            warps that share the columns of a row: 1 or 2
// FORMAT            of the weights: bf16, FP8 with a scale for each row, or MXFP8; see formats.cuh
// X_ROWS            rows of a turn at most: 1 to 8, or a multiple of 16
// PER_SM            blocks that fit on a multiprocessor together

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int HALVES = WARPS / (STREAMS * SLICES);
constexpr int BLOCKS = (D + COLUMNS - 1) / COLUMNS;  // of a turn
constexpr int ROWS = COLUMNS / HALVES;  // weight rows of a warp
constexpr int STEPS = RANK / (32 * SLICES);
constexpr int WIDTHS = (ROWS + 7) / 8;
constexpr bool STAGED = X_ROWS > 8;
constexpr int TILES = (X_ROWS + 15) / 16;
constexpr int PIECE_BYTES = STEPS * unit_bytes(ROWS);
constexpr int PITCH = (WIDTHS + (WIDTHS % 2 == 0)) * 8;
constexpr int SUMS_BYTES = X_ROWS * PITCH * 4;  // of a warp
constexpr int PAIRS = COLUMNS / 2;              // channels are finished two at a time
constexpr int ROUNDS = (X_ROWS * PAIRS + THREADS - 1) / THREADS;
static_assert(HALVES * STREAMS * SLICES == WARPS && ROWS * HALVES == COLUMNS && STEPS * 32 * SLICES == RANK, "plan");
static_assert(COLUMNS % 2 == 0 && D % 2 == 0 && (!STAGED || X_ROWS % 16 == 0), "plan");
static_assert(UNIT_STEPS == 1 && !BLOCK_SCALES, "format");
// a warp's weights, and its sums beside them or, where staged, after them
constexpr int WARP_BYTES = STAGED ? (PIECE_BYTES > SUMS_BYTES ? PIECE_BYTES : SUMS_BYTES) : PIECE_BYTES;
constexpr int SUMS_AT = STAGED ? 0 : WARPS * PIECE_BYTES + 512;  // 512: what idle lanes read past the last row
constexpr int SUMS_PITCH = STAGED ? WARP_BYTES / 4 : X_ROWS * PITCH;  // floats from warp to warp
constexpr int X_AT = WARPS * WARP_BYTES + 512 + (STAGED ? 0 : WARPS * SUMS_BYTES);
constexpr int X_STEPS = RANK / 32;
constexpr int ITEMS = TILES * X_STEPS;  // x of a tile in a step: 1 KB, 16 bytes of each lane, then 16 more
constexpr int LANE_ITEMS = STAGED ? (ITEMS + WARPS - 1) / WARPS : 1;
constexpr int ROW_SCALES_AT = X_AT + (STAGED ? ITEMS * 1024 : 0);
constexpr int BARRIERS_AT = (ROW_SCALES_AT + (ROW_SCALES ? STREAMS * COLUMNS * 4 : 0) + 7) / 8 * 8;

struct Arguments {
  const u8* tape;
  const float* row_scales;  // in the order of the tape
  const u16 *low, *normed;
  u16* out;
  int rows;
};

DEVICE void store_sums(float* to, const float (&acc)[WIDTHS][2][4], int g, int t) {
#pragma unroll
  for (int width = 0; width < WIDTHS; width++) {
    const float(&even)[4] = acc[width][0];
    const float(&odd)[4] = acc[width][1];
    float* at = to + g * PITCH + width * 8 + 2 * t;
    if (g < X_ROWS) *(float2*)at = make_float2(even[0] + odd[0], even[1] + odd[1]);
    if (STAGED) *(float2*)(at + 8 * PITCH) = make_float2(even[2] + odd[2], even[3] + odd[3]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) hc_mix_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int block = blockIdx.x % BLOCKS, first = blockIdx.x / BLOCKS * X_ROWS, rows = min(a.rows - first, X_ROWS);
  const u32 base = shared_address(shared), weights = base + warp * WARP_BYTES, barrier = base + BARRIERS_AT + warp * 8;
  float* sums = (float*)(shared + SUMS_AT);
  float* row_scales = (float*)(shared + ROW_SCALES_AT);
  if (lane == 0) {
    barrier_init(barrier, 1);
    barrier_init_done();
    barrier_expect(barrier, PIECE_BYTES);
    bulk_copy(weights, a.tape + (u64)(block * WARPS + warp) * PIECE_BYTES, PIECE_BYTES, barrier, evict_first_policy());
  }
  __syncwarp();
  launch_dependents();
  if (ROW_SCALES)
    for (int i = threadIdx.x; i < STREAMS * COLUMNS; i += THREADS)
      row_scales[i] = load_global_float(a.row_scales + block * (STREAMS * COLUMNS) + i);
  wait_for_predecessor();

  // Rows past the last one repeat it: they spoil sums that nobody stores. All loads before their first use.
  constexpr int LOADS = STAGED ? LANE_ITEMS : STEPS;
  Words x[LOADS], z[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int item = min(warp + WARPS * i, ITEMS - 1), row = (STAGED ? item / X_STEPS * 16 : 0) + g;
    const int column = (STAGED ? item % X_STEPS : warp % SLICES * STEPS + i) * 32 + t * 8;
    x[i] = load_global(a.low + (first + min(row, rows - 1)) * RANK + column);
    z[i] = STAGED ? load_global(a.low + (first + min(row + 8, rows - 1)) * RANK + column) : Words{0, 0, 0, 0};
  }
  u32 n[ROUNDS][STREAMS];  // requested now, needed last
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const int e = min((int)threadIdx.x + i * THREADS, rows * PAIRS - 1);
    const int channel = min(block * COLUMNS + e % PAIRS * 2, D - 2);
    const u16* from = a.normed + (long long)(first + e / PAIRS) * (STREAMS * D) + channel;
#pragma unroll
    for (int s = 0; s < STREAMS; s++) n[i][s] = load_global_word(from + s * D);
  }

  barrier_wait(barrier, 0);
  if constexpr (STAGED) {
    Words w[STEPS][WIDTHS];
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
      for (int width = 0; width < WIDTHS; width++)
        w[i][width] = decode(load_codes(weights + i * unit_bytes(ROWS), ROWS, width * 8 + g, t), 0, t);
#pragma unroll
    for (int i = 0; i < LANE_ITEMS; i++) {
      const int item = warp + WARPS * i;
      if (item >= ITEMS) break;
      store_shared(base + X_AT + item * 1024 + lane * 16, Words{x[i].x, z[i].x, x[i].y, z[i].y});
      store_shared(base + X_AT + item * 1024 + 512 + lane * 16, Words{x[i].z, z[i].z, x[i].w, z[i].w});
    }
    __syncthreads();  // all of `low` is here, and nobody reads weights from where sums go
    const u32 items = base + X_AT + warp % SLICES * (STEPS * 1024) + lane * 16;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      float acc[WIDTHS][2][4];
#pragma unroll
      for (int i = 0; i < WIDTHS * 8; i++) (&acc[0][0][0])[i] = 0.f;
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        const u32 at = items + (tile * X_STEPS + i) * 1024;
        const Words even = load_shared(at), odd = load_shared(at + 512);
#pragma unroll
        for (int width = 0; width < WIDTHS; width++) {
          matrix_step(acc[width][0], even.x, even.y, even.z, even.w, w[i][width].x, w[i][width].y);
          matrix_step(acc[width][1], odd.x, odd.y, odd.z, odd.w, w[i][width].z, w[i][width].w);
        }
      }
      store_sums(sums + warp * SUMS_PITCH + tile * 16 * PITCH, acc, g, t);
    }
  } else {
    float acc[WIDTHS][2][4];
#pragma unroll
    for (int i = 0; i < WIDTHS * 8; i++) (&acc[0][0][0])[i] = 0.f;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
      for (int width = 0; width < WIDTHS; width++) {
        const Words w = decode(load_codes(weights + i * unit_bytes(ROWS), ROWS, width * 8 + g, t), 0, t);
        matrix_step(acc[width][0], x[i].x, 0, x[i].y, 0, w.x, w.y);
        matrix_step(acc[width][1], x[i].z, 0, x[i].w, 0, w.z, w.w);
      }
    store_sums(sums + warp * SUMS_PITCH, acc, g, t);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const int e = threadIdx.x + i * THREADS, m = e / PAIRS, to_column = block * COLUMNS + e % PAIRS * 2;
    if (e >= rows * PAIRS || to_column >= D) continue;
    float total[2] = {0.f, 0.f};
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
      float value[2] = {0.f, 0.f};
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int j = e % PAIRS * 2 + c, of = (s * HALVES + j / ROWS) * SLICES;
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) value[c] += sums[(of + slice) * SUMS_PITCH + m * PITCH + j % ROWS];
        if (ROW_SCALES) value[c] *= row_scales[s * COLUMNS + j];
      }
      // bf16 pairs are converted in a quarter of the time of single values
      const u32 logits = to_pair(value[0], value[1]);
      const u32 gated = multiply_pair(to_pair(short_sigmoid(lower(logits)), short_sigmoid(upper(logits))), n[i][s]);
      total[0] += lower(gated);
      total[1] += upper(gated);
    }
    *(u32*)(a.out + (long long)(first + m) * D + to_column) = to_pair(total[0] / STREAMS, total[1] / STREAMS);
  }
}
