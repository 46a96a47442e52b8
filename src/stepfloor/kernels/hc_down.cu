// The seam between two sub-layers: R <- R + w y, the norm of each stream, down and inject rows, silu and sigmoid.
// Source: hc_down.py, which writes the tape and repeats the equations; these kernels round where the source does.
//
// Two kernels, one after the other. The norms: a block for each stream of a row writes R and n. The product: a cluster owns
// ROWS weight rows; each of its blocks owns the columns of one stream, or of a PARTS-th of one; a warp reads its slice of n
// from the L2, once for all weight rows. More than X_ROWS rows go in turns, all in one launch: the grid is turns times clusters.
//
// The order of sums depends on the shape and PARTS, never on the number of rows: squares in units of 256 columns (8 of a lane
// in order, then a tree over lanes), units in order; products as in linear.cu; blocks of the cluster in order.

#include "stream.cuh"

// FORM          0: norms, 1: product
// STREAMS, D    streams and the width of one
// of the norms:
// WRITE         whether an output waits to be written to the streams
// of the product:
// N, RANK       weight rows with inject, without
// PARTS         blocks of a cluster for each stream
// ROWS          weight rows of a cluster
// FORMAT        of the weights: bf16, FP8 with a scale for each row, or MXFP8; see formats.cuh
// X_ROWS        rows of n of a turn at most: 1 to 8, or a multiple of 16
// PER_SM        blocks that fit on a multiprocessor together

struct Arguments {
  const u8* tape;
  const float* row_scales;  // of weight rows
  const float* scale;       // of the norm
  const u16 *residual, *y, *weights;
  u16 *new_residual, *normed, *low, *new_weights;
  int rows;
  float eps;
};

#if FORM == 0
// ------------------------------------------------------------------ norms: R and n of one stream of a row

constexpr int UNITS = D / 256;  // of a warp each
constexpr int THREADS = UNITS * 32;
static_assert(UNITS * 256 == D && THREADS <= 1024, "shape");

DEVICE Words normalise(const Words& r, float factor, const Words& a, const Words& b) {
  Words v;
  v.x = to_pair(lower(r.x) * factor * __uint_as_float(a.x), upper(r.x) * factor * __uint_as_float(a.y));
  v.y = to_pair(lower(r.y) * factor * __uint_as_float(a.z), upper(r.y) * factor * __uint_as_float(a.w));
  v.z = to_pair(lower(r.z) * factor * __uint_as_float(b.x), upper(r.z) * factor * __uint_as_float(b.y));
  v.w = to_pair(lower(r.w) * factor * __uint_as_float(b.z), upper(r.w) * factor * __uint_as_float(b.w));
  return v;
}

DEVICE float square_sum(const Words& r) {
  float sum = lower(r.x) * lower(r.x);
  sum = multiply_add(upper(r.x), upper(r.x), sum);
  sum = multiply_add(lower(r.y), lower(r.y), sum);
  sum = multiply_add(upper(r.y), upper(r.y), sum);
  sum = multiply_add(lower(r.z), lower(r.z), sum);
  sum = multiply_add(upper(r.z), upper(r.z), sum);
  sum = multiply_add(lower(r.w), lower(r.w), sum);
  return multiply_add(upper(r.w), upper(r.w), sum);
}

DEVICE void write_stream(Words& r, const Words& y, u32 weight) {
  const u32 w = weight | weight << 16;
  r.x = add_pair(r.x, multiply_pair(y.x, w));
  r.y = add_pair(r.y, multiply_pair(y.y, w));
  r.z = add_pair(r.z, multiply_pair(y.z, w));
  r.w = add_pair(r.w, multiply_pair(y.w, w));
}

extern "C" __global__ void __launch_bounds__(THREADS) hc_down_norms_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  float* squares = (float*)shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = threadIdx.x * 8;
  const int row = blockIdx.x / STREAMS, stream = blockIdx.x % STREAMS;
  const Words low = load_global(a.scale + stream * D + column), high = load_global(a.scale + stream * D + column + 4);
  launch_dependents();
  wait_for_predecessor();
  if (row >= a.rows) return;
  const long long at = (long long)row * (STREAMS * D) + stream * D + column;
  Words r = load_global(a.residual + at);
  if (WRITE) {
    const Words y = load_global(a.y + (long long)row * D + column);
    write_stream(r, y, load_half(a.weights + row * STREAMS + stream));
    store_global(a.new_residual + at, r);
  }
  const float sum = warp_sum(square_sum(r));
  if (lane == 0) squares[warp] = sum;
  __syncthreads();
  float mine = 0.f;
#pragma unroll
  for (int i = 0; i < UNITS; i++) mine += squares[i];
  store_global(a.normed + at, normalise(r, inverse_root(mine / D + a.eps), low, high));
}

#else
// ------------------------------------------------------------------ product: n is there

#include "formats.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int SPLIT = STREAMS * PARTS;
constexpr int GROUPS = (N + ROWS - 1) / ROWS;
constexpr int BLOCKS = GROUPS * SPLIT;  // of a turn
constexpr int COLUMNS = D / PARTS;
constexpr int STEPS = COLUMNS / 256;  // of 32 columns, of a warp
constexpr int WIDTHS = (ROWS + 7) / 8;
constexpr bool TALL = X_ROWS > 8;
constexpr int TILES = (X_ROWS + 15) / 16;
constexpr int PIECE_BYTES = STEPS * unit_bytes(ROWS);
constexpr int PITCH = (WIDTHS + (WIDTHS % 2 == 0)) * 8;
static_assert(COLUMNS * PARTS == D && STEPS * 256 == COLUMNS, "shape");
static_assert(X_ROWS <= 8 || X_ROWS % 16 == 0, "rows");
static_assert(UNIT_STEPS == 1 && !BLOCK_SCALES, "format");
constexpr int SUMS_AT = WARPS * PIECE_BYTES + 448;  // 448: what idle lanes read past the last weight row
constexpr int PARTIAL_AT = SUMS_AT + WARPS * X_ROWS * PITCH * 4;
constexpr int ROW_SCALES_AT = PARTIAL_AT + X_ROWS * ROWS * 4;
constexpr int BARRIERS_AT = (ROW_SCALES_AT + (ROW_SCALES ? ROWS * 4 : 0) + 7) / 8 * 8;

// One step of a warp: 32 columns of all weight rows by a tile of rows. weights: shared address of the unit
DEVICE void multiply(float (&acc)[WIDTHS][2][4], u32 weights, const Words& x, const Words& z, int g, int t) {
#pragma unroll
  for (int width = 0; width < WIDTHS; width++) {
    const Words w = decode(load_codes(weights, ROWS, width * 8 + g, t), 0, t);
    matrix_step(acc[width][0], x.x, z.x, x.y, z.y, w.x, w.y);
    matrix_step(acc[width][1], x.z, z.z, x.w, z.w, w.z, w.w);
  }
}

// A warp's sums of a tile of rows. to: its place for the tile
DEVICE void store_sums(float* to, const float (&acc)[WIDTHS][2][4], int g, int t) {
#pragma unroll
  for (int width = 0; width < WIDTHS; width++) {
    const float(&even)[4] = acc[width][0];
    const float(&odd)[4] = acc[width][1];
    float* at = to + g * PITCH + width * 8 + 2 * t;
    if (g < X_ROWS) *(float2*)at = make_float2(even[0] + odd[0], even[1] + odd[1]);
    if (TALL) *(float2*)(at + 8 * PITCH) = make_float2(even[2] + odd[2], even[3] + odd[3]);
  }
}

// The sums of the block's warps, in order.
DEVICE void add_warps(float* partial, const float* sums, int rows) {
  for (int e = threadIdx.x; e < rows * ROWS; e += THREADS) {
    float value = 0.f;
#pragma unroll
    for (int slice = 0; slice < WARPS; slice++) value += sums[(slice * X_ROWS + e / ROWS) * PITCH + e % ROWS];
    partial[e] = value;
  }
}

// The sums over the cluster, each block a share of them, and what becomes of them. first: row of the turn's first
DEVICE void add_blocks(const Arguments& a, const float* partial, const float* row_scales, int group, int rank, int first, int rows) {
  for (int e = rank * THREADS + threadIdx.x; e < rows * ROWS; e += SPLIT * THREADS) {
    const int m = e / ROWS, row = group * ROWS + e % ROWS;
    float value = 0.f;
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
      float of_stream = 0.f;
#pragma unroll
      for (int p = 0; p < PARTS; p++) of_stream += load_peer(shared_address(partial + e), s * PARTS + p);
      value += of_stream;
    }
    if (ROW_SCALES) value *= row_scales[e % ROWS];
    // the source rounds the product, divides, rounds the function
    value = lower(to_bf16(value)) / STREAMS;
    if (row < RANK)
      a.low[(first + m) * RANK + row] = to_bf16(value * sigmoid(value));
    else if (row < N)
      a.new_weights[(first + m) * STREAMS + row - RANK] = to_bf16(2.f * sigmoid(value));
  }
}

// A warp's step of x is refilled for the next tile as soon as it has been multiplied: some STEPS steps are on their way
// from the L2 all the time, with the registers of one tile.
extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) hc_down_product_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x / BLOCKS * X_ROWS, rows = min(a.rows - first, X_ROWS), place = blockIdx.x % BLOCKS;
  const int group = place / SPLIT, rank = place % SPLIT;
  const u32 base = shared_address(shared), barrier = base + BARRIERS_AT + warp * 8, weights = base + warp * PIECE_BYTES;
  float* sums = (float*)(shared + SUMS_AT);
  float* partial = (float*)(shared + PARTIAL_AT);
  float* row_scales = (float*)(shared + ROW_SCALES_AT);
  if (lane == 0) {
    barrier_init(barrier, 1);
    barrier_init_done();
    barrier_expect(barrier, PIECE_BYTES);
    bulk_copy(weights, a.tape + (u64)(place * WARPS + warp) * PIECE_BYTES, PIECE_BYTES, barrier, evict_first_policy());
  }
  __syncwarp();
  launch_dependents();
  if (ROW_SCALES)
    for (int i = threadIdx.x; i < ROWS; i += THREADS) row_scales[i] = load_global_float(a.row_scales + min(group * ROWS + i, N - 1));
  wait_for_predecessor();

  // rows past the last one repeat it: they spoil sums that nobody stores
  const u16* slice = a.normed + (long long)first * (STREAMS * D) + rank * COLUMNS + warp * (STEPS * 32) + t * 8;
  const u16* top = slice + (long long)min(g, rows - 1) * (STREAMS * D);
  const u16* bottom = slice + (long long)min(g + 8, rows - 1) * (STREAMS * D);
  Words x[STEPS], z[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    x[i] = load_global(top + i * 32);
    z[i] = TALL ? load_global(bottom + i * 32) : Words{0, 0, 0, 0};
  }
  barrier_wait(barrier, 0);
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    float acc[WIDTHS][2][4];
#pragma unroll
    for (int i = 0; i < WIDTHS * 8; i++) (&acc[0][0][0])[i] = 0.f;
    top = slice + (long long)min((tile + 1) * 16 + g, rows - 1) * (STREAMS * D);
    bottom = slice + (long long)min((tile + 1) * 16 + g + 8, rows - 1) * (STREAMS * D);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      multiply(acc, weights + i * unit_bytes(ROWS), x[i], z[i], g, t);
      if (tile == TILES - 1) continue;
      x[i] = load_global(top + i * 32);
      z[i] = load_global(bottom + i * 32);
    }
    store_sums(sums + (warp * X_ROWS + tile * 16) * PITCH, acc, g, t);
  }
  __syncthreads();
  add_warps(partial, sums, rows);
  cluster_sync();
  add_blocks(a, partial, row_scales, group, rank, first, rows);
  cluster_leave();
}
#endif
