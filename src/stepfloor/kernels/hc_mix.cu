// gate = sigmoid(low up^T), x = mean over streams of gate * n, in one pass: a block owns the same COLUMNS channels of every
// stream, so that it finishes them itself. Source: hc_mix.py, which orders the rows of `up` that way and repeats the equations;
// rounds where the source does.
//
// Warps: STREAMS x HALVES share the rows, SLICES share the columns of a row. Sums as in linear.cu, whatever the row count.
// More than X_ROWS rows go in turns, all in one launch: the grid is turns times blocks.
//
// The block brings `low` to shared memory once: read by every warp, its few lines of the L2 keep all multiprocessors waiting.
// A warp keeps its weights in registers, decoded while `low` is on its way, and its sums take their place in shared memory, so
// that the next kernel's block still fits beside this one.

#include "stream.cuh"
#include "formats.cuh"
#include "sums.cuh"

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
constexpr bool TALL = X_ROWS > 8;
constexpr int TILES = (X_ROWS + 15) / 16;
constexpr int PIECE_BYTES = STEPS * unit_bytes(ROWS);
constexpr int PITCH = (WIDTHS + (WIDTHS % 2 == 0)) * 8;
constexpr int SUMS_BYTES = X_ROWS * PITCH * 4;  // of a warp
constexpr int PAIRS = COLUMNS / 2;              // channels are finished two at a time
constexpr int ROUNDS = (X_ROWS * PAIRS + THREADS - 1) / THREADS;
static_assert(HALVES * STREAMS * SLICES == WARPS && ROWS * HALVES == COLUMNS && STEPS * 32 * SLICES == RANK, "plan");
static_assert(COLUMNS % 2 == 0 && D % 2 == 0 && (!TALL || X_ROWS % 16 == 0), "plan");
static_assert(UNIT_STEPS == 1 && !BLOCK_SCALES, "format");
constexpr int WARP_BYTES = PIECE_BYTES > SUMS_BYTES ? PIECE_BYTES : SUMS_BYTES;  // a warp's weights, then its sums
constexpr int X_AT = WARPS * WARP_BYTES + 512;  // 512: what idle lanes read past the last row
constexpr int X_PITCH = RANK * 2 + 64;  // bytes: two rows of four lanes lie in different banks
constexpr int COPIES = (X_ROWS * (RANK / 8) + THREADS - 1) / THREADS;  // of a thread
constexpr int ROW_SCALES_AT = X_AT + X_ROWS * X_PITCH;
constexpr int BARRIERS_AT = (ROW_SCALES_AT + (ROW_SCALES ? STREAMS * COLUMNS * 4 : 0) + 7) / 8 * 8;

struct Arguments {
  const u8* tape;
  const float* row_scales;  // in the order of the tape
  const u16 *low, *normed;
  u16* out;
  int rows;
};

// The sums of channels j and j + 1, j even, of a stream in a row.
DEVICE void load_pair(float (&v)[2], const float* sums, int stream, int j, int slice, int row) {
  auto place = [&](int i) { return sums + ((stream * HALVES + i / ROWS) * SLICES + slice) * (WARP_BYTES / 4) + row * PITCH + i % ROWS; };
  if constexpr (ROWS % 2 == 0) {
    load_values(v, place(j));
  } else {
    v[0] = *place(j);
    v[1] = *place(j + 1);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) hc_mix_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int block = blockIdx.x % BLOCKS, first = blockIdx.x / BLOCKS * X_ROWS, rows = min(a.rows - first, X_ROWS);
  const u32 base = shared_address(shared), weights = base + warp * WARP_BYTES, barrier = base + BARRIERS_AT + warp * 8;
  const float* sums = (const float*)shared;
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

  // each block begins at another place of `low`: at any time they ask for all its lines, not all of them for one
  const int items = rows * (RANK / 8), begin = block * 24 % items;
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    const int e = threadIdx.x + i * THREADS, at = e + begin < items ? e + begin : e + begin - items;
    if (e < items) copy16(base + X_AT + at / (RANK / 8) * X_PITCH + at % (RANK / 8) * 16, a.low + first * RANK + at * 8);
  }
  copies_commit();
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
  Words w[STEPS][WIDTHS];
#pragma unroll
  for (int i = 0; i < STEPS; i++)
#pragma unroll
    for (int width = 0; width < WIDTHS; width++)
      w[i][width] = decode(load_codes(weights + i * unit_bytes(ROWS), ROWS, width * 8 + g, t), 0, t);
  copies_wait<0>();
  __syncthreads();  // all of `low` is here, and nobody reads weights from where sums go
  // what lanes of rows that were not copied read spoils sums that nobody stores
  const u32 of_lane = base + X_AT + (TALL ? g : min(g, X_ROWS - 1)) * X_PITCH + warp % SLICES * (STEPS * 64) + t * 16;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    float acc[WIDTHS][2][4];
#pragma unroll
    for (int i = 0; i < WIDTHS * 8; i++) (&acc[0][0][0])[i] = 0.f;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const u32 at = of_lane + tile * 16 * X_PITCH + i * 64;
      const Words x = load_shared(at), z = TALL ? load_shared(at + 8 * X_PITCH) : Words{0, 0, 0, 0};
#pragma unroll
      for (int width = 0; width < WIDTHS; width++) {
        const Words& v = w[i][width];
        matrix_step(acc[width][0], x.x, z.x, x.y, z.y, v.x, v.y);
        matrix_step(acc[width][1], x.z, z.z, x.w, z.w, v.z, v.w);
      }
    }
    store_sums<TALL ? 16 : X_ROWS, PITCH>((float*)(shared + warp * WARP_BYTES) + tile * 16 * PITCH, acc, g, t);
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
      const int j = e % PAIRS * 2;
#pragma unroll
      for (int slice = 0; slice < SLICES; slice++) {
        float v[2];
        load_pair(v, sums, s, j, slice, m);
        value[0] += v[0];
        value[1] += v[1];
      }
      if (ROW_SCALES) {
        value[0] *= row_scales[s * COLUMNS + j];
        value[1] *= row_scales[s * COLUMNS + j + 1];
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
