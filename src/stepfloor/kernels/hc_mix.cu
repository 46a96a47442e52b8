// gate = sigmoid(low up^T), x = mean over streams of gate * n, in one pass: a block owns the same COLUMNS channels of every
// stream, so that it finishes them itself. Source: hc_mix.py, which orders the rows of `up` that way and repeats the equations;
// rounds where the source does.
//
// Warps: STREAMS x HALVES share the rows, SLICES share the columns of a row. Sums as in linear.cu, whatever the row count.

#include "stream.cuh"
#include "formats.cuh"

// D, STREAMS, RANK  width of a stream, streams, columns of `up`
// COLUMNS           channels of a block
// SLICES            warps that share the columns of a row: 1 or 2
// FORMAT            of the weights: bf16, FP8 with a scale for each row, or MXFP8; see formats.cuh
// X_ROWS            rows at most: 1 to 8, or 16
// PER_SM            blocks that fit on a multiprocessor together

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int HALVES = WARPS / (STREAMS * SLICES);
constexpr int ROWS = COLUMNS / HALVES;  // weight rows of a warp
constexpr int STEPS = RANK / (32 * SLICES);
constexpr int WIDTHS = (ROWS + 7) / 8;
constexpr bool TALL = X_ROWS > 8;
constexpr int PIECE_BYTES = STEPS * unit_bytes(ROWS);
constexpr int PITCH = (WIDTHS + (WIDTHS % 2 == 0)) * 8;
constexpr int ROUNDS = (X_ROWS * COLUMNS + THREADS - 1) / THREADS;
static_assert(HALVES * STREAMS * SLICES == WARPS && ROWS * HALVES == COLUMNS && STEPS * 32 * SLICES == RANK, "plan");
static_assert(UNIT_STEPS == 1 && !BLOCK_SCALES, "format");
constexpr int SUMS_AT = WARPS * PIECE_BYTES + 512;  // 512: what idle lanes read past the last row
constexpr int ROW_SCALES_AT = SUMS_AT + WARPS * X_ROWS * PITCH * 4;
constexpr int BARRIERS_AT = (ROW_SCALES_AT + (ROW_SCALES ? STREAMS * COLUMNS * 4 : 0) + 7) / 8 * 8;

struct Arguments {
  const u8* tape;
  const float* row_scales;  // in the order of the tape
  const u16 *low, *normed;
  u16* out;
  int rows;
};

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) hc_mix_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 base = shared_address(shared), barrier = base + BARRIERS_AT + warp * 8;
  float* sums = (float*)(shared + SUMS_AT);
  float* row_scales = (float*)(shared + ROW_SCALES_AT);
  if (lane == 0) {
    barrier_init(barrier, 1);
    barrier_init_done();
    barrier_expect(barrier, PIECE_BYTES);
    bulk_copy(base + warp * PIECE_BYTES, a.tape + (u64)(blockIdx.x * WARPS + warp) * PIECE_BYTES, PIECE_BYTES, barrier,
              evict_first_policy());
  }
  __syncwarp();
  launch_dependents();
  if (ROW_SCALES)
    for (int i = threadIdx.x; i < STREAMS * COLUMNS; i += THREADS)
      row_scales[i] = load_global_float(a.row_scales + blockIdx.x * (STREAMS * COLUMNS) + i);
  wait_for_predecessor();

  Words x[STEPS], z[TALL ? STEPS : 1];
  // rows past the last one repeat it: they spoil sums that nobody stores
  const int column = warp % SLICES * STEPS * 32 + t * 8;
  const u16* top = a.low + min(g, a.rows - 1) * RANK + column;
  const u16* bottom = a.low + min(g + 8, a.rows - 1) * RANK + column;
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    x[i] = load_global(top + i * 32);
    if (TALL) z[i] = load_global(bottom + i * 32);
  }
  u16 n[ROUNDS][STREAMS];  // requested now, needed last
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const int e = min((int)threadIdx.x + i * THREADS, a.rows * COLUMNS - 1);
    const u16* from = a.normed + (long long)(e / COLUMNS) * (STREAMS * D) + min((int)blockIdx.x * COLUMNS + e % COLUMNS, D - 1);
#pragma unroll
    for (int s = 0; s < STREAMS; s++) n[i][s] = load_half(from + s * D);
  }

  float acc[WIDTHS][2][4];
#pragma unroll
  for (int i = 0; i < WIDTHS * 8; i++) (&acc[0][0][0])[i] = 0.f;
  const u32 weights = base + warp * PIECE_BYTES;
  barrier_wait(barrier, 0);
#pragma unroll
  for (int i = 0; i < STEPS; i++)
#pragma unroll
    for (int width = 0; width < WIDTHS; width++) {
      const Words w = decode(load_codes(weights + i * unit_bytes(ROWS), ROWS, width * 8 + g, t), 0, t);
      if constexpr (TALL) {
        matrix_step(acc[width][0], x[i].x, z[i].x, x[i].y, z[i].y, w.x, w.y);
        matrix_step(acc[width][1], x[i].z, z[i].z, x[i].w, z[i].w, w.z, w.w);
      } else {
        matrix_step(acc[width][0], x[i].x, 0, x[i].y, 0, w.x, w.y);
        matrix_step(acc[width][1], x[i].z, 0, x[i].w, 0, w.z, w.w);
      }
    }
  float* to = sums + warp * X_ROWS * PITCH + 2 * t;
#pragma unroll
  for (int width = 0; width < WIDTHS; width++) {
    const float(&even)[4] = acc[width][0];
    const float(&odd)[4] = acc[width][1];
    if (g < X_ROWS) *(float2*)(to + g * PITCH + width * 8) = make_float2(even[0] + odd[0], even[1] + odd[1]);
    if (TALL) *(float2*)(to + (g + 8) * PITCH + width * 8) = make_float2(even[2] + odd[2], even[3] + odd[3]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const int e = threadIdx.x + i * THREADS, m = e / COLUMNS, j = e % COLUMNS, to_column = blockIdx.x * COLUMNS + j;
    if (e >= a.rows * COLUMNS || to_column >= D) continue;
    float total = 0.f;
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
      float value = 0.f;
#pragma unroll
      for (int slice = 0; slice < SLICES; slice++)
        value += sums[(((s * HALVES + j / ROWS) * SLICES + slice) * X_ROWS + m) * PITCH + j % ROWS];
      if (ROW_SCALES) value *= row_scales[s * COLUMNS + j];
      const float gate = lower(to_bf16(sigmoid(lower(to_bf16(value)))));
      total += lower(to_bf16(gate * lower(n[i][s])));
    }
    a.out[(long long)m * D + to_column] = to_bf16(total / STREAMS);
  }
}
