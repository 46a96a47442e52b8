// The seam between two sub-layers: R <- R + w y, the norm of each stream, down and inject rows, silu and sigmoid.
// Source: hc_down.py, which writes the tape and repeats the equations; these kernels round where the source does.
//
// Two kernels, one after the other. The norms: a block for each stream of a row writes R and n. The product: a cluster owns
// ROWS weight rows, or twice as many; each of its blocks owns the columns of one stream, or of a PARTS-th of one, or of half of
// that; a warp reads its slice of n from the L2, once for all weight rows. Each block sends its sums to the block of the cluster
// that ends them, so nobody waits for a barrier of the cluster, nor fetches.
// More than X_ROWS rows go in turns, all in one launch: the grid is turns times clusters.
//
// The order of sums depends on the shape and PARTS, never on the number of rows: squares in units of 256 columns (8 of a lane
// in order, then a tree over lanes), units in order; products as in linear.cu, four slices in order, then pairs of such fours,
// then the parts of a stream in order, then the streams.

#include "stream.cuh"

// FORM          0: norms, 1: product
// STREAMS, D    streams and the width of one
// of the norms:
// WRITE         whether an output waits to be written to the streams
// of the product:
// N, RANK       weight rows with inject, without
// PARTS         pieces of a stream's columns
// HALVES        blocks of a cluster for a part, and groups of ROWS weight rows of a cluster: 1 or 2
// ROWS          weight rows of a group
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
// ------------------------------------------------------------------ product

#include "formats.cuh"
#include "sums.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int SPLIT = STREAMS * PARTS;
constexpr int CLUSTER = SPLIT * HALVES;
constexpr int GROUPS = (N + ROWS - 1) / ROWS;
constexpr int BLOCKS = (GROUPS + HALVES - 1) / HALVES * CLUSTER;  // of a turn
constexpr int COLUMNS = D / PARTS;
constexpr int STEPS = COLUMNS / 256;  // of 32 columns, of a warp
constexpr int SLICES = WARPS / HALVES;
constexpr int WIDTHS = (ROWS + 7) / 8;
constexpr bool TALL = X_ROWS > 8 * HALVES;
constexpr int TILE_ROWS = TALL ? 16 : 8;
constexpr int LIVE_ROWS = X_ROWS < TILE_ROWS ? X_ROWS : TILE_ROWS;
constexpr int TILES = (X_ROWS + TILE_ROWS - 1) / TILE_ROWS;
constexpr int TEAM_TILES = (TILES + HALVES - 1) / HALVES;
constexpr bool HELD = !TALL && HALVES == 1 && STEPS * WIDTHS <= 15;  // weights wait in registers: 60 of them, for few rows of x
constexpr int PIECE_BYTES = STEPS * unit_bytes(ROWS);
constexpr int PITCH = (WIDTHS + (WIDTHS % 2 == 0)) * 8;
constexpr int ROW_VALUES = HALVES * ROWS;  // of the product, that a cluster ends
constexpr int OWNED_ROWS = (X_ROWS + CLUSTER - 1) / CLUSTER;
constexpr int OWNED = OWNED_ROWS * ROW_VALUES;  // that a block ends
constexpr int VECTOR = ROWS % 4 == 0 ? 4 : 1;   // values sent at a time
static_assert(COLUMNS * PARTS == D && STEPS * 256 == COLUMNS && (HALVES == 1 || HALVES == 2), "shape");
static_assert(X_ROWS <= 8 || X_ROWS % 16 == 0, "rows");
static_assert(UNIT_STEPS == 1 && !BLOCK_SCALES, "format");
constexpr int SUMS_AT = WARPS * PIECE_BYTES + 448;  // 448: what idle lanes read past the last weight row
constexpr int INBOX_AT = (SUMS_AT + WARPS * X_ROWS * PITCH * 4 + 15) / 16 * 16;
constexpr int ROW_SCALES_AT = INBOX_AT + CLUSTER * OWNED * 4;
constexpr int BARRIERS_AT = (ROW_SCALES_AT + (ROW_SCALES ? ROW_VALUES * 4 : 0) + 7) / 8 * 8;  // of each warp's weights, of the inbox

// One step of a warp: 32 columns of all weight rows of a group by a tile of rows. unit: shared address; held: the same weights
DEVICE void multiply(float (&acc)[WIDTHS][2][4], u32 unit, const Words (&held)[WIDTHS], const Words& x, const Words& z, int g, int t) {
#pragma unroll
  for (int width = 0; width < WIDTHS; width++) {
    const Words w = HELD ? held[width] : decode(load_codes(unit, ROWS, width * 8 + g, t), 0, t);
    matrix_step(acc[width][0], x.x, z.x, x.y, z.y, w.x, w.y);
    matrix_step(acc[width][1], x.z, z.z, x.w, z.w, w.z, w.w);
  }
}

// Four slices of VECTOR values in order, the first slice at `from`.
DEVICE void add_slices(float (&value)[VECTOR], const float* from) {
#pragma unroll
  for (int slice = 0; slice < 4; slice++) {
    float v[VECTOR];
    load_values(v, from + slice * (X_ROWS * PITCH));
#pragma unroll
    for (int i = 0; i < VECTOR; i++) value[i] = slice == 0 ? v[i] : value[i] + v[i];
  }
}

// The block's sums, each to the block of the cluster that ends it. inbox, barrier: shared addresses
DEVICE void send_sums(const float* sums, u32 inbox, u32 barrier, int rank, int rows) {
  for (int e = threadIdx.x * VECTOR; e < rows * ROW_VALUES; e += THREADS * VECTOR) {
    const int row = e / ROW_VALUES, half = e % ROW_VALUES / ROWS, owner = e / OWNED;
    const float* from = sums + half * (SLICES * X_ROWS * PITCH) + row * PITCH + e % ROWS;
    float value[VECTOR], more[VECTOR];
    add_slices(value, from);
    if (HALVES == 1) {
      add_slices(more, from + 4 * (X_ROWS * PITCH));
#pragma unroll
      for (int i = 0; i < VECTOR; i++) value[i] += more[i];
    }
    send_peer(peer_address(inbox + (rank * OWNED + e % OWNED) * 4, owner), value, peer_address(barrier, owner));
  }
}

// What has arrived, added up over the cluster, and what becomes of it. count: values; first: row of the first of them
DEVICE void end_sums(const Arguments& a, const float* inbox, const float* row_scales, int cluster, int first, int count) {
  for (int e = threadIdx.x; e < count; e += THREADS) {
    const int m = first + e / ROW_VALUES, row = cluster * ROW_VALUES + e % ROW_VALUES;
    float value = 0.f;
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
      float of_stream = 0.f;
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        const float* from = inbox + (s * PARTS + p) * HALVES * OWNED + e;
        of_stream += HALVES == 1 ? from[0] : from[0] + from[OWNED];
      }
      value += of_stream;
    }
    if (ROW_SCALES) value *= row_scales[e % ROW_VALUES];
    // the source rounds the product, divides, rounds the function
    value = lower(to_bf16(value)) / STREAMS;
    if (row < RANK)
      a.low[m * RANK + row] = to_bf16(value * short_sigmoid(value));
    else if (row < N)
      a.new_weights[m * STREAMS + row - RANK] = to_bf16(2.f * short_sigmoid(value));
  }
}

// A warp's step of x is refilled for its next tile as soon as it has been multiplied: some STEPS steps are on their way
// from the L2 all the time, with the registers of one tile.
extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) hc_down_product_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x / BLOCKS * X_ROWS, rows = min(a.rows - first, X_ROWS), place = blockIdx.x % BLOCKS;
  const int cluster = place / CLUSTER, rank = place % CLUSTER, part = rank / HALVES;
  // a warp copies the weights of its slice for one group; with two groups, it multiplies with those of both
  const int team = warp / SLICES, slice = rank % HALVES * SLICES + warp % SLICES, group = min(cluster * HALVES + team, GROUPS - 1);
  const u32 base = shared_address(shared), barriers = base + BARRIERS_AT, inbox_barrier = barriers + WARPS * 8;
  auto piece_of = [&](int half) { return half * SLICES + warp % SLICES; };  // which warp copied it
  float* sums = (float*)(shared + SUMS_AT);
  float* inbox = (float*)(shared + INBOX_AT);
  float* row_scales = (float*)(shared + ROW_SCALES_AT);
  const int owned = min(rows * ROW_VALUES - rank * OWNED, OWNED);  // none where not positive
  if (lane == 0) {
    barrier_init(barriers + warp * 8, 1);
    if (warp == 0) barrier_init(inbox_barrier, 1);
    barrier_init_done();
    barrier_expect(barriers + warp * 8, PIECE_BYTES);
    const u64 piece = (u64)(group * SPLIT + part) * WARPS + slice;
    bulk_copy(base + warp * PIECE_BYTES, a.tape + piece * PIECE_BYTES, PIECE_BYTES, barriers + warp * 8, evict_first_policy());
    if (warp == 0 && owned > 0) barrier_expect(inbox_barrier, CLUSTER * owned * 4);
  }
  __syncwarp();
  cluster_arrive_at_once();  // the inbox can be sent to
  if (ROW_SCALES)
    for (int i = threadIdx.x; i < ROW_VALUES; i += THREADS)
      row_scales[i] = load_global_float(a.row_scales + min(cluster * ROW_VALUES + i, N - 1));
  wait_for_predecessor();

  Words x[STEPS], z[STEPS];
  // rows past the last one repeat it: they spoil sums that nobody stores
  const u16* columns = a.normed + (long long)first * (STREAMS * D) + part * COLUMNS + slice * (STEPS * 32) + t * 8;
  const u16* top = columns + (long long)min(team * TILE_ROWS + g, rows - 1) * (STREAMS * D);
  const u16* bottom = columns + (long long)min(team * TILE_ROWS + g + 8, rows - 1) * (STREAMS * D);
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    x[i] = load_global(top + i * 32);
    z[i] = TALL ? load_global(bottom + i * 32) : Words{0, 0, 0, 0};
  }
  cluster_wait();  // every barrier of every block is there
#pragma unroll
  for (int half = 0; half < HALVES; half++) barrier_wait(barriers + piece_of(half) * 8, 0);
  Words held[HELD ? STEPS : 1][WIDTHS];
  if constexpr (HELD) {
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
      for (int width = 0; width < WIDTHS; width++)
        held[i][width] = decode(load_codes(base + warp * PIECE_BYTES + i * unit_bytes(ROWS), ROWS, width * 8 + g, t), 0, t);
    __syncwarp();  // or the compiler moves these reads behind the wait for x
  }
#pragma unroll
  for (int turn = 0; turn < TEAM_TILES; turn++) {
    const int tile = turn * HALVES + team;
    float acc[HALVES][WIDTHS][2][4];
#pragma unroll
    for (int i = 0; i < HALVES * WIDTHS * 8; i++) (&acc[0][0][0][0])[i] = 0.f;
    top = columns + (long long)min((tile + HALVES) * TILE_ROWS + g, rows - 1) * (STREAMS * D);
    bottom = columns + (long long)min((tile + HALVES) * TILE_ROWS + g + 8, rows - 1) * (STREAMS * D);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
#pragma unroll
      for (int half = 0; half < HALVES; half++)
        multiply(acc[half], base + piece_of(half) * PIECE_BYTES + i * unit_bytes(ROWS), held[HELD ? i : 0], x[i], z[i], g, t);
      if (turn == TEAM_TILES - 1) continue;
      x[i] = load_global(top + i * 32);
      if (TALL) z[i] = load_global(bottom + i * 32);
    }
    if (TILES % HALVES && tile >= TILES) continue;
#pragma unroll
    for (int half = 0; half < HALVES; half++)
      store_sums<LIVE_ROWS, PITCH>(sums + (piece_of(half) * X_ROWS + tile * TILE_ROWS) * PITCH, acc[half], g, t);
  }
  __syncthreads();
  launch_dependents();  // no sooner: the next kernel's weights would share the way with those that this one waits for
  send_sums(sums, base + INBOX_AT, inbox_barrier, rank, rows);
  if (owned <= 0) return;
  barrier_wait_cluster(inbox_barrier, 0);
  end_sums(a, inbox, row_scales, cluster, first + rank * OWNED_ROWS, owned);
}
#endif
