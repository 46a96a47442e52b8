// y = x W^T for bf16, few rows: the weight is streamed once, every multiprocessor reads its share front to back.
// Source: mma.m16n8k16 with the weight as the 8-wide operand and the rows of x as the 16-tall one; linear.py, which
// writes the streamed layout, states the plan that the macros below repeat and tests the addresses of this file.
//
// A step is 32 columns. Lane (g, t) owns 8 consecutive ones, 8t .. 8t + 7, of weight row g and of rows g and g + 8 of x:
// one 16-byte read of each feeds two matrix steps. Which column is called k inside a step does not matter as long as
// both operands agree. Weight rows past the last one of a piece are read as whatever lies there: they spoil columns of
// the sums that nobody stores.
//
// The order of a value's sum is the same in every kernel here, whatever the number of rows: inside a slice of STEPS steps
// the lower and the upper half of each 32 columns in step order, their sum, then the slices in order from zero.

#include "stream.cuh"

// N, K            shape of the weight
// SPLIT           blocks of a cluster that share the columns
// SLICES, STACKS  warps that share the columns, and the rows, of a block; SLICES * STACKS = 8
// ROWS            weight rows of a warp
// PASS_ROWS       weight rows in the accumulators at one time
// STEPS           32-column steps of a warp
// CHUNK_STEPS     steps of one piece, PASS_ROWS * CHUNK_STEPS * 64 bytes copied at once
// SLOTS           pieces of a warp in shared memory
// TILES, TALL     tiles of x rows; whether a tile has 16 rows or 8
// BATCH           steps of x requested at once
// PANEL           whether this is the panel kernel; STAGE_STEPS and STAGES are its own
// PER_SM          blocks that fit on a multiprocessor together, so that the next kernel can start early

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int BLOCK_ROWS = ROWS * STACKS;
constexpr int GROUPS = (N + BLOCK_ROWS - 1) / BLOCK_ROWS;
constexpr int TAPES = GROUPS * SPLIT * WARPS;  // warps of the grid
constexpr int PASSES = (ROWS + PASS_ROWS - 1) / PASS_ROWS;
constexpr int LAST_ROWS = ROWS - (PASSES - 1) * PASS_ROWS;
constexpr int CHUNKS = STEPS / CHUNK_STEPS;
constexpr int PIECES = PASSES * CHUNKS;
constexpr int PIECE_BYTES = PASS_ROWS * CHUNK_STEPS * 64;
constexpr int WIDTHS = (PASS_ROWS + 7) / 8;  // 8-wide tiles of a pass
constexpr bool PADDED = SPLIT * SLICES * STEPS * 32 > K;
static_assert(SLICES * STACKS == WARPS && STEPS % CHUNK_STEPS == 0 && CHUNK_STEPS % BATCH == 0, "plan");
static_assert(SPLIT * SLICES * STEPS * 32 >= K && K % 16 == 0, "plan");

struct Arguments {
  const u8* tape;
  const u16* x;
  u16* out;
  long long x_stride, out_stride;  // in values
  int rows;                        // of x
};

template <bool BOTH> struct Fragment {
  Words top, bottom;
};
template <> struct Fragment<false> {
  Words top;
};

DEVICE Words load_row(const u16* row, int column) {
  if (!PADDED) return load_global(row + column);
  // no branch around a load: it would serialise the steps. The weight is zero here, but zero times NaN is not.
  Words v = load_global(row + (column < K ? column : 0));
  if (column >= K) v.x = v.y = v.z = v.w = 0;
  return v;
}

template <bool BOTH> DEVICE void load_fragment(Fragment<BOTH>& f, const u16* top, const u16* bottom, int column) {
  f.top = load_row(top, column);
  if constexpr (BOTH) f.bottom = load_row(bottom, column);
}

template <bool BOTH> DEVICE void step(float (&even)[4], float (&odd)[4], const Fragment<BOTH>& x, const Words& w) {
  if constexpr (BOTH) {
    matrix_step(even, x.top.x, x.bottom.x, x.top.y, x.bottom.y, w.x, w.y);
    matrix_step(odd, x.top.z, x.bottom.z, x.top.w, x.bottom.w, w.z, w.w);
  } else {
    matrix_step(even, x.top.x, 0, x.top.y, 0, w.x, w.y);
    matrix_step(odd, x.top.z, 0, x.top.w, 0, w.z, w.w);
  }
}

#if !PANEL
// ------------------------------------------------------------------ ring: warps share the columns

constexpr int TILE_ROWS = TALL ? 16 : 8;
// Few columns: x is read once and stays in registers while the passes go by.
constexpr bool KEEP = PASSES > 1 && CHUNKS == 1 && BATCH == CHUNK_STEPS;
constexpr int REDUCE_PASSES = PASSES == 1 || PASS_ROWS > 8 ? 1 : TALL ? 2 : 4;
constexpr int REDUCE_ROWS = REDUCE_PASSES * PASS_ROWS;
constexpr int REDUCE_WIDTHS = REDUCE_PASSES * WIDTHS;
constexpr int PITCH = (REDUCE_WIDTHS + (REDUCE_WIDTHS % 2 == 0)) * 8;  // 8 or 24 modulo 32 floats: no bank conflict
constexpr int REDUCE_BUFFERS = PASSES > REDUCE_PASSES || TILES > 1 ? 2 : 1;
constexpr int RING_BYTES = WARPS * SLOTS * PIECE_BYTES + 512;  // 512: what idle lanes read past the last row
constexpr int REDUCE_FLOATS = WARPS * TILE_ROWS * PITCH;
static_assert(TILES == 1 || PASSES == 1, "several tiles of x rows need all weight rows in the accumulators");
static_assert(REDUCE_PASSES == 1 || PASS_ROWS % 8 == 0, "plan");

// The pieces of one warp, in order, through SLOTS slots of shared memory. Its lane 0 copies; each slot has a barrier.
struct Ring {
  const u8* tape;
  u32 buffer, barriers, warp_index, parity;
  int issued, slot;
  u64 policy;

  DEVICE void issue(int into) {
    const int pass = issued / CHUNKS, chunk = issued % CHUNKS;
    const u32 bytes = (pass == PASSES - 1 ? LAST_ROWS : PASS_ROWS) * CHUNK_STEPS * 64;
    const u8* from = tape + (u64)pass * ((u64)TAPES * PASS_ROWS * STEPS * 64) + ((u64)chunk * TAPES + warp_index) * bytes;
    barrier_expect(barriers + 8 * into, bytes);
    bulk_copy(buffer + into * PIECE_BYTES, from, bytes, barriers + 8 * into, policy);
    issued++;
  }
  DEVICE void start(int lane) {
    if (lane == 0) {
      for (int i = 0; i < SLOTS; i++) barrier_init(barriers + 8 * i, 1);
      barrier_init_done();
      for (int i = 0; i < SLOTS && i < PIECES; i++) issue(i);
    }
    __syncwarp();
  }
  DEVICE u32 wait() {
    barrier_wait(barriers + 8 * slot, parity);
    return buffer + slot * PIECE_BYTES;
  }
  DEVICE void release(int lane) {
    if (PIECES > SLOTS) {
      __syncwarp();
      if (lane == 0 && issued < PIECES) issue(slot);
    }
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }
};

struct Output {
  u16* out;
  long long stride;
  float* partial;  // [row of x][weight row of the block], for the other blocks of the cluster
  int group, rows;
};

// Adds the slices of `live` weight rows from `first` on, for one tile of x rows.
DEVICE void reduce(const Output& o, const float* sums, int tile, int first, int live) {
  const int count = min(TILE_ROWS, o.rows - tile * TILE_ROWS);
#pragma unroll
  for (int stack = 0; stack < STACKS; stack++) {
    for (int e = threadIdx.x; e < count * REDUCE_ROWS; e += THREADS) {
      const int n = e % REDUCE_ROWS, m = e / REDUCE_ROWS;
      const int block_row = stack * ROWS + first + n, row = o.group * BLOCK_ROWS + block_row;
      if (n >= live || row >= N) continue;
      float value = 0.f;
#pragma unroll
      for (int slice = 0; slice < SLICES; slice++)
        value += sums[((stack * SLICES + slice) * TILE_ROWS + m) * PITCH + n];
      const int x_row = tile * TILE_ROWS + m;
      if (SPLIT > 1)
        o.partial[x_row * BLOCK_ROWS + block_row] = value;
      else
        o.out[x_row * o.stride + row] = to_bf16(value);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) linear_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int group = blockIdx.x / SPLIT, part = blockIdx.x % SPLIT, slice = warp % SLICES;
  float* sums = (float*)(shared + RING_BYTES);
  float* partial = sums + REDUCE_BUFFERS * REDUCE_FLOATS;
  u8* barriers = (u8*)(partial + (SPLIT > 1 ? TILES * TILE_ROWS * BLOCK_ROWS : 0));

  Ring ring{a.tape,
            shared_address(shared) + warp * SLOTS * PIECE_BYTES,
            shared_address(barriers) + warp * SLOTS * 8,
            blockIdx.x * WARPS + warp,
            0,
            0,
            0,
            evict_first_policy()};
  ring.start(lane);  // weights first: they do not depend on the kernel before
  launch_dependents();
  wait_for_predecessor();

  const Output output{a.out, a.out_stride, partial, group, a.rows};
  const int column = (part * SLICES + slice) * STEPS * 32 + t * 8;
  constexpr int BATCHES = CHUNK_STEPS / BATCH;
  constexpr int UNITS = CHUNKS * BATCHES * TILES;
  Fragment<TALL> x[KEEP ? 1 : 2][BATCH];
  // Rows past the last one repeat it: they spoil sums that nobody stores.
  auto request = [&](Fragment<TALL>(&to)[BATCH], int unit) {
    const int tile = unit % TILES, first = unit / TILES * BATCH;
    const u16* top = a.x + min(tile * TILE_ROWS + g, a.rows - 1) * a.x_stride;
    const u16* bottom = a.x + min(tile * TILE_ROWS + g + 8, a.rows - 1) * a.x_stride;
#pragma unroll
    for (int i = 0; i < BATCH; i++) load_fragment(to[i], top, bottom, column + (first + i) * 32);
  };
  if (KEEP) request(x[0], 0);

  int buffer = 0;
#pragma unroll 1
  for (int pass = 0; pass < PASSES; pass++) {
    const int stride = (pass == PASSES - 1 ? LAST_ROWS : PASS_ROWS) * 64;
    float acc[TILES][WIDTHS][2][4];
#pragma unroll
    for (int i = 0; i < TILES * WIDTHS * 8; i++) (&acc[0][0][0][0])[i] = 0.f;
    if (!KEEP) request(x[0], 0);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      u32 base = 0;
#pragma unroll
      for (int batch = 0; batch < BATCHES; batch++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          const int unit = (chunk * BATCHES + batch) * TILES + tile;
          if (!KEEP && unit + 1 < UNITS) request(x[(unit + 1) % 2], unit + 1);
          if (batch == 0 && tile == 0) base = ring.wait() + g * 64 + t * 16;
#pragma unroll
          for (int i = 0; i < BATCH; i++)
#pragma unroll
            for (int width = 0; width < WIDTHS; width++) {
              const Words w = load_shared(base + (batch * BATCH + i) * stride + width * 512);
              step(acc[tile][width][0], acc[tile][width][1], x[KEEP ? 0 : unit % 2][i], w);
            }
        }
      ring.release(lane);
    }
    const int turn = pass % REDUCE_PASSES, first = (pass - turn) * PASS_ROWS;
    const bool last = turn == REDUCE_PASSES - 1 || pass == PASSES - 1;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      float* mine = sums + buffer * REDUCE_FLOATS + warp * TILE_ROWS * PITCH + turn * PASS_ROWS + 2 * t;
#pragma unroll
      for (int width = 0; width < WIDTHS; width++) {
        const float(&even)[4] = acc[tile][width][0];
        const float(&odd)[4] = acc[tile][width][1];
        *(float2*)(mine + g * PITCH + width * 8) = make_float2(even[0] + odd[0], even[1] + odd[1]);
        if constexpr (TALL)
          *(float2*)(mine + (g + 8) * PITCH + width * 8) = make_float2(even[2] + odd[2], even[3] + odd[3]);
      }
      if (!last) continue;
      __syncthreads();
      reduce(output, sums + buffer * REDUCE_FLOATS, tile, first, min(REDUCE_ROWS, ROWS - first));
      if (REDUCE_BUFFERS == 2) buffer ^= 1;  // so one barrier a round is enough
    }
  }

  if constexpr (SPLIT > 1) {
    cluster_sync();
    for (int e = part * THREADS + threadIdx.x; e < a.rows * BLOCK_ROWS; e += SPLIT * THREADS) {
      const int row = group * BLOCK_ROWS + e % BLOCK_ROWS;
      float value = 0.f;
#pragma unroll
      for (int peer = 0; peer < SPLIT; peer++) value += load_peer(shared_address(partial + e), peer);
      if (row < N) a.out[e / BLOCK_ROWS * a.out_stride + row] = to_bf16(value);
    }
    cluster_sync();  // a block that ends takes its shared memory with it
  }
}

#else
// ------------------------------------------------------------------ panel: warps share the rows

// 128 weight rows at a time; x is read once a panel, not once for every 8 weight rows. A stage is STAGE_STEPS steps of all
// of them; the slices follow one another and close their sums where a warp of the ring kernel would.
constexpr int PANEL_PIECES = 2 * WARPS;
constexpr int PARTS = STEPS / STAGE_STEPS;
constexpr int PANELS = (PASSES + PANEL_PIECES - 1) / PANEL_PIECES;
constexpr int TURNS = PANELS * SLICES * PARTS;
constexpr int PIECE_SHARE = STAGE_STEPS * 512;  // bytes of 8 weight rows in a stage
constexpr int X_BYTES = TILES * 16 * STAGE_STEPS * 64;
constexpr int STAGE_BYTES = PANEL_PIECES * PIECE_SHARE + X_BYTES;
static_assert(SPLIT == 1 && STACKS == 1 && CHUNKS == 1 && PASS_ROWS == 8 && !PADDED, "plan");
static_assert(STEPS % STAGE_STEPS == 0 && STAGE_STEPS % 2 == 1, "an even stage would put rows of x into the same banks");

DEVICE void copy_weights(const Arguments& a, u32 stage, int turn, u64 policy) {
  const int panel = turn / (SLICES * PARTS), slice = turn / PARTS % SLICES, share = turn % PARTS;
  const u32 warp_index = blockIdx.x * WARPS + slice;
  for (int e = threadIdx.x; e < PANEL_PIECES * STAGE_STEPS * 32; e += THREADS) {
    const int local = e / (STAGE_STEPS * 32), inside = e % (STAGE_STEPS * 32), piece = panel * PANEL_PIECES + local;
    if (piece >= PASSES) break;
    const int rows = piece == PASSES - 1 ? LAST_ROWS : 8;
    if (inside >= rows * STAGE_STEPS * 4) continue;
    const u8* from = a.tape + (u64)piece * ((u64)TAPES * STEPS * 512) + ((u64)warp_index * STEPS + share * STAGE_STEPS) * (rows * 64);
    copy16_streamed(stage + local * PIECE_SHARE + inside * 16, from + inside * 16, policy);
  }
}

DEVICE void copy_rows(const Arguments& a, u32 stage, int turn) {
  const int column = (turn / PARTS % SLICES * STEPS + turn % PARTS * STAGE_STEPS) * 32;
  for (int e = threadIdx.x; e < TILES * 16 * STAGE_STEPS * 4; e += THREADS) {
    const int row = e / (STAGE_STEPS * 4), inside = e % (STAGE_STEPS * 4);
    copy16(stage + PANEL_PIECES * PIECE_SHARE + e * 16, a.x + min(row, a.rows - 1) * a.x_stride + column + inside * 8);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) linear_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 stages = shared_address(shared);
  const u64 policy = evict_first_policy();
  for (int turn = 0; turn < STAGES - 1 && turn < TURNS; turn++) copy_weights(a, stages + turn * STAGE_BYTES, turn, policy);
  launch_dependents();
  wait_for_predecessor();
  for (int turn = 0; turn < STAGES - 1; turn++) {
    if (turn < TURNS) copy_rows(a, stages + turn * STAGE_BYTES, turn);
    copies_commit();
  }

  float acc[TILES][2][2][4] = {}, total[TILES][2][4] = {};
#pragma unroll 1
  for (int turn = 0; turn < TURNS; turn++) {
    copies_wait<STAGES - 2>();
    __syncthreads();
    if (turn + STAGES - 1 < TURNS) {
      const u32 next = stages + (turn + STAGES - 1) % STAGES * STAGE_BYTES;
      copy_weights(a, next, turn + STAGES - 1, policy);
      copy_rows(a, next, turn + STAGES - 1);
    }
    copies_commit();
    const int first = turn / (SLICES * PARTS) * PANEL_PIECES + 2 * warp;  // this warp's pieces: first and the one after it
    const u32 stage = stages + turn % STAGES * STAGE_BYTES;
    const u32 weights = stage + 2 * warp * PIECE_SHARE + g * 64 + t * 16;
    const u32 rows = stage + PANEL_PIECES * PIECE_SHARE + g * (STAGE_STEPS * 64) + t * 16;
    const int stride_0 = first == PASSES - 1 ? LAST_ROWS * 64 : 512, stride_1 = first + 1 == PASSES - 1 ? LAST_ROWS * 64 : 512;
    if (first < PASSES) {
#pragma unroll
      for (int i = 0; i < STAGE_STEPS; i++) {
        const Words w0 = load_shared(weights + i * stride_0), w1 = load_shared(weights + PIECE_SHARE + i * stride_1);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          Fragment<true> x;
          x.top = load_shared(rows + tile * (16 * STAGE_STEPS * 64) + i * 64);
          x.bottom = load_shared(rows + tile * (16 * STAGE_STEPS * 64) + 8 * STAGE_STEPS * 64 + i * 64);
          step(acc[tile][0][0], acc[tile][0][1], x, w0);
          step(acc[tile][1][0], acc[tile][1][1], x, w1);
        }
      }
    }
    if (turn % PARTS != PARTS - 1) continue;
    const bool last = turn % (SLICES * PARTS) == SLICES * PARTS - 1;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int piece = first + half, live = piece == PASSES - 1 ? LAST_ROWS : 8;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          total[tile][half][i] += acc[tile][half][0][i] + acc[tile][half][1][i];
          acc[tile][half][0][i] = acc[tile][half][1][i] = 0.f;
          const int n = 2 * t + i % 2, m = tile * 16 + g + i / 2 * 8, row = blockIdx.x * ROWS + piece * 8 + n;
          if (last) {
            if (piece < PASSES && n < live && row < N && m < a.rows) a.out[m * a.out_stride + row] = to_bf16(total[tile][half][i]);
            total[tile][half][i] = 0.f;
          }
        }
      }
  }
}
#endif
