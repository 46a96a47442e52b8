// y = x W^T, bf16 x and few rows: the weight is streamed once as stored, every multiprocessor reads its share front to back.
// Source: mma.m16n8k16 with the weight as the 8-wide operand and the rows of x as the 16-tall one (wgmma, which adds up
// the same way, with the two changed over); linear.py, which
// writes the streamed layout, states the plan that the macros below repeat and tests the addresses of this file.
//
// A step is 32 columns. Lane (g, t) owns 8 consecutive ones, 8t .. 8t + 7, of weight row g and of rows g and g + 8 of x:
// one 16-byte read of each feeds two matrix steps. Which column is called k inside a step does not matter as long as
// both operands agree. Weight rows past the last one of a piece repeat it: they spoil columns of the sums that nobody
// stores.
//
// The order of a value's sum is the same in every kernel here, whatever the number of rows: inside a slice of STEPS steps
// the lower and the upper half of each 32 columns in step order, their sum, then the slices in order from zero. With a scale
// for blocks of weights, such halves are added up over FLUSH steps, and their sums, each times its scale, over the slice.

#include "stream.cuh"
#include "formats.cuh"

// N, K            shape of the weight
// SPLIT           blocks of a cluster that share the columns
// SLICES, STACKS  warps that share the columns, and the rows, of a block; SLICES * STACKS = 8
// ROWS            weight rows of a warp
// PASS_ROWS       weight rows in the accumulators at one time
// STEPS           32-column steps of a warp
// CHUNK_STEPS     steps of one piece, whose PASS_ROWS weight rows are copied at once
// SLOTS           pieces of a warp in shared memory
// FORMAT          of the weights, see formats.cuh; FLUSH  steps that meet one block scale together
// TILES, TALL     tiles of x rows; whether a tile has 16 rows or 8
// BATCH           steps of x requested at once
// FORM            0: ring, 1: group, 2: spread, 3: share, 4: team; STAGE_STEPS and STAGES belong to group, spread and share
// CLUSTERS        of the spread and share kernels
// TOGETHER        passes that a warp of the spread kernel takes at a time; BUFFERS  of its sums
// WARPGROUPS      of the share kernel, 64 weight rows each
// TEAM            blocks of a cluster of the team kernel
// PER_SM          blocks that fit on a multiprocessor together, so that the next kernel can start early
// FIRST_BLOCK     one of two matrices in linear_pair.cu: the first block of the grid that has its rows; from row GAP_AT on
//                 they have their columns GAP further. Its ring form alone knows these three

#ifndef FIRST_BLOCK
#define ALONE
#define FIRST_BLOCK 0
#define GAP_AT 0
#define GAP 0
#endif

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int BLOCK_ROWS = ROWS * STACKS;
constexpr int GROUPS = (N + BLOCK_ROWS - 1) / BLOCK_ROWS;
constexpr int TAPES = GROUPS * SPLIT * WARPS;  // warps of the grid
constexpr int PASSES = (ROWS + PASS_ROWS - 1) / PASS_ROWS;
constexpr int LAST_ROWS = ROWS - (PASSES - 1) * PASS_ROWS;
constexpr int CHUNKS = STEPS / CHUNK_STEPS;
constexpr int PIECES = PASSES * CHUNKS;
constexpr int CHUNK_UNITS = CHUNK_STEPS / UNIT_STEPS;
constexpr int PIECE_BYTES = CHUNK_UNITS * unit_bytes(PASS_ROWS);
constexpr int LAST_PIECE_BYTES = CHUNK_UNITS * unit_bytes(LAST_ROWS);
constexpr int WIDTHS = (PASS_ROWS + 7) / 8;  // 8-wide tiles of a pass
constexpr bool PADDED = SPLIT * SLICES * STEPS * 32 > K;
static_assert(SLICES * STACKS == WARPS && STEPS % CHUNK_STEPS == 0 && CHUNK_STEPS % BATCH == 0, "plan");
static_assert(SPLIT * SLICES * STEPS * 32 >= K && K % 16 == 0, "plan");
static_assert(BATCH % UNIT_STEPS == 0 && (!BLOCK_SCALES || (BATCH % FLUSH == 0 && 4 % FLUSH == 0)), "plan");

struct Arguments {
  const u8* tape;
  const float* scales;  // of rows or of blocks of weights
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

#if FORM == 1 || FORM == 3
// ------------------------------------------------------------------ rows of x as the operands of warpgroups

constexpr int X_ROWS = TILES * 16;
constexpr int X_STEP = X_ROWS * 64;  // the lower halves of each 8 columns, then the upper ones

// Columns 8t .. 8t + 7 of a row go to four operands of 8 x 8, a pair of columns to each.
DEVICE void store_operands(u32 step, int row, int t, const Words& words) {
  const u32 place = step + row / 8 * 256 + row % 8 * 16 + t * 4;
  store_shared_word(place, words.x);
  store_shared_word(place + 128, words.y);
  store_shared_word(place + X_STEP / 2, words.z);
  store_shared_word(place + X_STEP / 2 + 128, words.w);
}

#endif

#if FORM == 0 || FORM == 4
// ------------------------------------------------------------------ ring: warps share the columns

constexpr int RING_BYTES = WARPS * SLOTS * PIECE_BYTES;

// The pieces of one warp, in order, through SLOTS slots of shared memory. Its lane 0 copies; each slot has a barrier.
struct Ring {
  const u8* tape;
  u32 buffer, barriers, warp_index, parity;
  int issued, slot;
  u64 policy;

  DEVICE void issue(int into) {
    const int pass = issued / CHUNKS, chunk = issued % CHUNKS;
    const u32 bytes = pass == PASSES - 1 ? LAST_PIECE_BYTES : PIECE_BYTES;
    const u8* from = tape + (u64)pass * ((u64)TAPES * CHUNKS * PIECE_BYTES) + ((u64)chunk * TAPES + warp_index) * bytes;
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
      reads_done();
      if (lane == 0 && issued < PIECES) issue(slot);
    }
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }
};
#endif

#if FORM == 0

constexpr int TILE_ROWS = TALL ? 16 : 8;
// Few columns: x is read once and stays in registers while the passes go by.
constexpr bool KEEP = PASSES > 1 && CHUNKS == 1 && BATCH == CHUNK_STEPS;
constexpr int REDUCE_PASSES = PASSES == 1 || PASS_ROWS > (TALL ? 16 : 32) ? 1 : (TALL ? 16 : 32) / PASS_ROWS;
constexpr int REDUCE_ROWS = REDUCE_PASSES * PASS_ROWS;
constexpr int REDUCE_WIDTHS = REDUCE_PASSES * WIDTHS;
constexpr int PITCH = (REDUCE_WIDTHS + (REDUCE_WIDTHS % 2 == 0)) * 8;  // 8 or 24 modulo 32 floats: no bank conflict
constexpr int REDUCE_BUFFERS = PASSES > REDUCE_PASSES || TILES > 1 ? 2 : 1;
constexpr int REDUCE_FLOATS = WARPS * TILE_ROWS * PITCH;
constexpr int BLOCK_COLUMNS = (K + 127) / 128;
// What a block needs of the scales: those of its rows, or the lines of blocks that its rows lie in.
constexpr int TABLE = ROW_SCALES ? BLOCK_ROWS : BLOCK_SCALES ? ((BLOCK_ROWS + 126) / 128 + 1) * BLOCK_COLUMNS : 0;
constexpr int SCALES = ROW_SCALES ? N : (N + 127) / 128 * BLOCK_COLUMNS;
static_assert(TILES == 1 || PASSES == 1, "several tiles of x rows need all weight rows in the accumulators");
static_assert(REDUCE_PASSES == 1 || PASS_ROWS % 8 == 0, "plan");

DEVICE int column_of(int row) { return row < GAP_AT ? row : row + GAP; }

struct Output {
  u16* out;
  long long stride;
  float* partial;  // [row of x][weight row of the block], for the other blocks of the cluster
  const float* scales;
  int group, rows;
};

// Adds the slices of `live` weight rows from `first` on, for one tile of x rows; a thread has two weight rows.
DEVICE void reduce(const Output& o, const float* sums, int tile, int first, int live) {
  constexpr int PAIRS = (REDUCE_ROWS + 1) / 2;
  const int count = min(TILE_ROWS, o.rows - tile * TILE_ROWS);
  for (int e = threadIdx.x; e < count * STACKS * PAIRS; e += THREADS) {
    const int n = e % PAIRS * 2, stack = e / PAIRS % STACKS, m = e / (PAIRS * STACKS), x_row = tile * TILE_ROWS + m;
    float2 value = make_float2(0.f, 0.f);
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      const float2 part = *(const float2*)(sums + ((stack * SLICES + slice) * TILE_ROWS + m) * PITCH + n);
      value.x += part.x;
      value.y += part.y;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int block_row = stack * ROWS + first + n + i, row = o.group * BLOCK_ROWS + block_row;
      if (n + i >= live || row >= N) continue;
      const float sum = i ? value.y : value.x;
      if (SPLIT > 1)
        o.partial[x_row * BLOCK_ROWS + block_row] = sum;
      else
        o.out[x_row * o.stride + column_of(row)] = to_bf16(ROW_SCALES ? sum * o.scales[block_row] : sum);
    }
  }
}

DEVICE void linear_block(const Arguments& a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, place = blockIdx.x - FIRST_BLOCK;
  const int group = place / SPLIT, part = place % SPLIT, slice = warp % SLICES;
  float* sums = (float*)(shared + RING_BYTES);
  float* partial = sums + REDUCE_BUFFERS * REDUCE_FLOATS;
  float* scales = partial + (SPLIT > 1 ? TILES * TILE_ROWS * BLOCK_ROWS : 0);
  u8* barriers = (u8*)(scales + (TABLE + 1) / 2 * 2);

  Ring ring{a.tape,
            shared_address(shared) + warp * SLOTS * PIECE_BYTES,
            shared_address(barriers) + warp * SLOTS * 8,
            place * WARPS + warp,
            0,
            0,
            0,
            evict_first_policy()};
  ring.start(lane);  // weights first: they do not depend on the kernel before, nor do scales
  launch_dependents();
  const int block_line = group * BLOCK_ROWS / 128;
  if constexpr (TABLE > 0) {
    const int first = ROW_SCALES ? group * BLOCK_ROWS : block_line * BLOCK_COLUMNS;
    for (int i = threadIdx.x; i < TABLE; i += THREADS) scales[i] = load_global_float(a.scales + min(first + i, SCALES - 1));
  }
  wait_for_predecessor();
  if constexpr (BLOCK_SCALES) __syncthreads();

  const Output output{a.out, a.out_stride, partial, scales, group, a.rows};
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
    const int live = pass == PASSES - 1 ? LAST_ROWS : PASS_ROWS;
    float acc[TILES][WIDTHS][2][4], scaled[BLOCK_SCALES ? TILES : 1][BLOCK_SCALES ? WIDTHS : 1][4];
#pragma unroll
    for (int i = 0; i < TILES * WIDTHS * 8; i++) (&acc[0][0][0][0])[i] = 0.f;
    int line[BLOCK_SCALES ? WIDTHS : 1][2];  // where the scales of this lane's weight rows begin
    if constexpr (BLOCK_SCALES) {
#pragma unroll
      for (int i = 0; i < TILES * WIDTHS * 4; i++) (&scaled[0][0][0])[i] = 0.f;
#pragma unroll
      for (int i = 0; i < WIDTHS * 2; i++) {
        const int row = group * BLOCK_ROWS + warp / SLICES * ROWS + pass * PASS_ROWS + i / 2 * 8 + 2 * t + i % 2;
        line[i / 2][i % 2] = (min(row, N - 1) / 128 - block_line) * BLOCK_COLUMNS;
      }
    }
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
          if (batch == 0 && tile == 0) base = ring.wait();
#pragma unroll
          for (int i = 0; i < BATCH; i += UNIT_STEPS)
#pragma unroll
            for (int width = 0; width < WIDTHS; width++) {
              float(&even)[4] = acc[tile][width][0];
              float(&odd)[4] = acc[tile][width][1];
              const Codes codes = load_codes(base + (batch * BATCH + i) / UNIT_STEPS * unit_bytes(live), live, width * 8 + g, t);
#pragma unroll
              for (int j = 0; j < UNIT_STEPS; j++) step(even, odd, x[KEEP ? 0 : unit % 2][i + j], decode(codes, j, t));
              if constexpr (BLOCK_SCALES) {
                if ((i + 1) % FLUSH) continue;
                const int at = min(((part * SLICES + slice) * STEPS + chunk * CHUNK_STEPS + batch * BATCH + i) / 4, BLOCK_COLUMNS - 1);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                  scaled[tile][width][c] = multiply_add(scales[line[width][c % 2] + at], even[c] + odd[c], scaled[tile][width][c]);
                  even[c] = odd[c] = 0.f;
                }
              }
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
        float sum[4];
#pragma unroll
        for (int c = 0; c < 4; c++)
          sum[c] = BLOCK_SCALES ? scaled[BLOCK_SCALES ? tile : 0][BLOCK_SCALES ? width : 0][c] : acc[tile][width][0][c] + acc[tile][width][1][c];
        *(float2*)(mine + g * PITCH + width * 8) = make_float2(sum[0], sum[1]);
        if constexpr (TALL) *(float2*)(mine + (g + 8) * PITCH + width * 8) = make_float2(sum[2], sum[3]);
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
      if (row < N) a.out[e / BLOCK_ROWS * a.out_stride + column_of(row)] = to_bf16(ROW_SCALES ? value * scales[e % BLOCK_ROWS] : value);
    }
    cluster_sync();  // a block that ends takes its shared memory with it
  }
}

#ifdef ALONE
extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) linear_kernel(const __grid_constant__ Arguments a) { linear_block(a); }
#endif

#elif FORM == 1
// ------------------------------------------------------------------ group: warpgroups share the rows

// 128 weight rows at a time, 64 of a warpgroup, times all rows of x in one instruction: the decoded weights are its operand
// in registers, x the one in shared memory, read once for 64 weight rows. A stage is STAGE_STEPS steps of all of them; the
// slices follow one another and close their sums where a warp of the ring kernel would. More warps fill the stages in turn:
// x has to be rearranged on its way, and the fence behind that waits for everything a warp has under way.
constexpr int CONSUMERS = WARPS, PRODUCERS = TILES <= 4 ? 8 : 4;  // sums of more rows take more than 128 registers
constexpr int PANEL_PASSES = 128 / PASS_ROWS;
constexpr int PANELS = (PASSES + PANEL_PASSES - 1) / PANEL_PASSES;
constexpr int PARTS = STEPS / STAGE_STEPS;  // stages of a slice
constexpr int TURNS = PANELS * SLICES * PARTS;
constexpr int CHUNK_STAGES = CHUNK_STEPS / STAGE_STEPS;
constexpr int STAGE_UNITS = STAGE_STEPS / UNIT_STEPS;
constexpr int SLOT_BYTES = STAGE_UNITS * unit_bytes(PASS_ROWS);  // of one pass
constexpr int X_BYTES = STAGE_STEPS * X_STEP;
constexpr int STAGE_BYTES = X_BYTES + PANEL_PASSES * SLOT_BYTES;
constexpr int X_SHARE = X_ROWS * STAGE_STEPS / 8;  // reads of 16 bytes by each lane of a producer
constexpr int X_BATCH = X_SHARE <= 16 ? X_SHARE : X_SHARE / 2;
static_assert(SPLIT == 1 && STACKS == 1 && !BLOCK_SCALES && TALL && PASS_ROWS % 8 == 0 && PASS_ROWS <= 64, "plan");
static_assert(CHUNK_STEPS % STAGE_STEPS == 0 && STAGE_STEPS % UNIT_STEPS == 0 && PANEL_PASSES <= 32 && X_SHARE % X_BATCH == 0, "plan");
static_assert(STAGES >= PRODUCERS, "a producer waits for one reading of its slot: it must not be two ahead");

// Lane i copies the stage of one pass.
DEVICE void request_weights(const Arguments& a, u32 to, u32 full, int turn, int lane, u64 policy) {
  const int panel = turn / (SLICES * PARTS), slice = turn / PARTS % SLICES, part = turn % PARTS;
  const int live = min(PANEL_PASSES, PASSES - panel * PANEL_PASSES), pass = panel * PANEL_PASSES + lane;
  const int missing = panel == PANELS - 1 ? STAGE_UNITS * (unit_bytes(PASS_ROWS) - unit_bytes(LAST_ROWS)) : 0;
  if (lane == 0) barrier_expect(full, live * SLOT_BYTES - missing);
  __syncwarp();
  if (lane >= live) return;
  const int unit = unit_bytes(pass == PASSES - 1 ? LAST_ROWS : PASS_ROWS), bytes = STAGE_UNITS * unit;
  const u64 piece = (u64)(part / CHUNK_STAGES) * TAPES + blockIdx.x * WARPS + slice;
  const u8* from = a.tape + (u64)pass * ((u64)TAPES * CHUNKS * PIECE_BYTES) + piece * (CHUNK_UNITS * unit) + part % CHUNK_STAGES * bytes;
  bulk_copy(to + lane * SLOT_BYTES, from, bytes, full, policy);
}

DEVICE void copy_rows(const Arguments& a, u32 to, u32 full, int turn, int lane) {
  const int column = (turn / PARTS % SLICES * STEPS + turn % PARTS * STAGE_STEPS) * 32 + lane % 4 * 8;
#pragma unroll 1
  for (int done = 0; done < X_SHARE; done += X_BATCH) {
    Words words[X_BATCH];  // all reads before the first store
#pragma unroll
    for (int i = 0; i < X_BATCH; i++) {
      const int at = (done + i) * 8 + lane / 4;
      // rows past the last one repeat it: they spoil sums that nobody stores
      words[i] = load_row(a.x + min(at % X_ROWS, a.rows - 1) * a.x_stride, column + at / X_ROWS * 32);
    }
#pragma unroll
    for (int i = 0; i < X_BATCH; i++) {
      const int at = (done + i) * 8 + lane / 4;
      store_operands(to + at / X_ROWS * X_STEP, at % X_ROWS, lane % 4, words[i]);
    }
  }
  operands_stored();
  __syncwarp();
  if (lane == 0) barrier_arrive(full);
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + PRODUCERS) * 32, 1) linear_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 stages = shared_address(shared);
  const u32 full = stages + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 2);  // weights and x
      barrier_init(empty + 8 * i, CONSUMERS);
    }
    barrier_init_done();
  }
  __syncthreads();
  launch_dependents();
  if (warp >= CONSUMERS) {
    const u64 policy = evict_first_policy();
    const int mine = warp - CONSUMERS;
    for (int turn = mine; turn < STAGES && turn < TURNS; turn += PRODUCERS)
      request_weights(a, stages + turn * STAGE_BYTES + X_BYTES, full + 8 * turn, turn, lane, policy);
    wait_for_predecessor();
#pragma unroll 1
    for (int turn = mine; turn < TURNS; turn += PRODUCERS) {
      const int slot = turn % STAGES;
      if (turn >= STAGES) {
        barrier_wait(empty + 8 * slot, (turn / STAGES - 1) % 2);
        request_weights(a, stages + slot * STAGE_BYTES + X_BYTES, full + 8 * slot, turn, lane, policy);
      }
      copy_rows(a, stages + slot * STAGE_BYTES, full + 8 * slot, turn, lane);
    }
    return;
  }
  wait_for_predecessor();  // it may still read what is written here

  // this lane's two weight rows of a panel; past the last pass of a panel they are dead
  const int first = warp * 16 + g, pass_0 = min(first / PASS_ROWS, PANEL_PASSES - 1), pass_1 = min((first + 8) / PASS_ROWS, PANEL_PASSES - 1);
  const int inside_0 = first % PASS_ROWS, inside_1 = (first + 8) % PASS_ROWS;
  float even[X_ROWS / 2], odd[X_ROWS / 2], total[X_ROWS / 2];
#pragma unroll
  for (int i = 0; i < X_ROWS / 2; i++) even[i] = odd[i] = total[i] = 0.f;
#pragma unroll 1
  for (int turn = 0; turn < TURNS; turn++) {
    const int slot = turn % STAGES, panel = turn / (SLICES * PARTS) * PANEL_PASSES;
    const int live_0 = panel + pass_0 == PASSES - 1 ? LAST_ROWS : PASS_ROWS, live_1 = panel + pass_1 == PASSES - 1 ? LAST_ROWS : PASS_ROWS;
    const u32 rows = stages + slot * STAGE_BYTES, weights = rows + X_BYTES;
    barrier_wait(full + 8 * slot, turn / STAGES % 2);
#pragma unroll
    for (int unit = 0; unit < STAGE_UNITS; unit++) {
      const Codes top = load_codes(weights + pass_0 * SLOT_BYTES + unit * unit_bytes(live_0), live_0, inside_0, t);
      const Codes bottom = load_codes(weights + pass_1 * SLOT_BYTES + unit * unit_bytes(live_1), live_1, inside_1, t);
#pragma unroll
      for (int j = 0; j < UNIT_STEPS; j++) {
        const Words u = decode(top, j, t), v = decode(bottom, j, t);
        const u32 at = rows + (unit * UNIT_STEPS + j) * X_STEP;
        group_begin();
        group_step<X_ROWS>(even, u.x, v.x, u.y, v.y, at);
        group_step<X_ROWS>(odd, u.z, v.z, u.w, v.w, at + X_STEP / 2);
        group_commit();
      }
    }
    group_wait();
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * slot);
    if (turn % PARTS != PARTS - 1) continue;
#pragma unroll
    for (int i = 0; i < X_ROWS / 2; i++) {
      total[i] += even[i] + odd[i];
      even[i] = odd[i] = 0.f;
    }
    if (turn % (SLICES * PARTS) != SLICES * PARTS - 1) continue;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int pass = panel + (first + 8 * half) / PASS_ROWS, inside = half ? inside_1 : inside_0;
      const int row = blockIdx.x * ROWS + pass * PASS_ROWS + inside;
      const bool stored = (first + 8 * half) / PASS_ROWS < PANEL_PASSES && pass < PASSES && row < N &&
                          inside < (pass == PASSES - 1 ? LAST_ROWS : PASS_ROWS);
      const float scale = ROW_SCALES && stored ? load_global_float(a.scales + row) : 1.f;
#pragma unroll
      for (int i = 0; i < X_ROWS / 4; i++) {
        const int m = i / 2 * 8 + 2 * t + i % 2;
        float& value = total[i / 2 * 4 + half * 2 + i % 2];
        if (stored && m < a.rows) a.out[m * a.out_stride + row] = to_bf16(ROW_SCALES ? value * scale : value);
        value = 0.f;
      }
    }
  }
}

#elif FORM == 2
// ------------------------------------------------------------------ spread: the slices lie in the blocks of a cluster

// A block has the columns of one slice: it reads x once, and a fragment of x from shared memory feeds all weight rows that a
// warp takes together, a decoded fragment of weights all rows of x. Warps go their own ways between two exchanges, one each
// ROUND passes, where the blocks of a cluster add up the slices of a share of the values.
constexpr int BLOCKS = GROUPS;          // of the plan: how the tape is cut
constexpr int TOTAL = GROUPS * PASSES;  // passes of all weight rows; pass p of block b is number p * BLOCKS + b
constexpr int SHARE = (TOTAL + CLUSTERS - 1) / CLUSTERS;
constexpr int ROUND = WARPS * TOGETHER;
constexpr int ROUNDS = (SHARE + ROUND - 1) / ROUND;
constexpr int SPREAD_WIDTHS = TOGETHER * WIDTHS;
constexpr int X_BYTES = TILES * STEPS * 1024;  // x as fragments: what a lane needs of a tile in a step is an item of 32
constexpr int LANE_ITEMS = (TILES * STEPS + WARPS - 1) / WARPS;
constexpr int X_BATCH = LANE_ITEMS <= 12 ? LANE_ITEMS : (LANE_ITEMS + 1) / 2;
constexpr int SUMS_PITCH = WARPS * SPREAD_WIDTHS * 8 + 8;  // 8 modulo 32 floats: no bank conflict
constexpr int SUMS_FLOATS = TILES * 16 * SUMS_PITCH;
constexpr int STAGE_UNITS = STAGE_STEPS / UNIT_STEPS;
constexpr int PASS_STAGES = STEPS / STAGE_STEPS;  // stages of a round
constexpr int CHUNK_STAGES = CHUNK_STEPS / STAGE_STEPS;
constexpr int SLOT_BYTES = STAGE_UNITS * unit_bytes(PASS_ROWS);  // of one pass
constexpr int STAGE_BYTES = TOGETHER * SLOT_BYTES;
constexpr int COPIES = (SLOT_BYTES / 16 + 31) / 32;  // of a lane
constexpr int QUADS = ROUND * WIDTHS * 2;          // fours of weight rows of a round
static_assert(SPLIT == 1 && STACKS == 1 && SLICES == WARPS && !BLOCK_SCALES && TALL, "plan");
static_assert(CHUNK_STEPS % STAGE_STEPS == 0 && STAGE_STEPS % UNIT_STEPS == 0 && STAGES >= 2, "plan");

// The passes a warp takes together, stage by stage, through STAGES stages of its own.
struct Stages {
  const u8* tape;
  u32 buffer;
  int first, end, slice, warp, lane;  // first, end: passes of the cluster
  int round, stage, slot;             // to be requested next
  u64 policy;

  DEVICE void request() {
    if (round < ROUNDS) {
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        const int number = first + round * ROUND + i * WARPS + warp, pass = number / BLOCKS, block = number % BLOCKS;
        if (number >= end) break;
        const int unit = unit_bytes(pass == PASSES - 1 ? LAST_ROWS : PASS_ROWS), bytes = STAGE_UNITS * unit;
        const u64 piece = (u64)(stage / CHUNK_STAGES) * TAPES + block * WARPS + slice;
        const u8* from = tape + (u64)pass * ((u64)TAPES * CHUNKS * PIECE_BYTES) + piece * (CHUNK_UNITS * unit) +
                         stage % CHUNK_STAGES * bytes + lane * 16;
        const u32 to = buffer + slot * STAGE_BYTES + i * SLOT_BYTES + lane * 16;
#pragma unroll
        for (int c = 0; c < COPIES; c++)
          if (lane * 16 + c * 512 < bytes) copy16_streamed(to + c * 512, from + c * 512, policy);
      }
      if (++stage == PASS_STAGES) stage = 0, round++;
      if (++slot == STAGES) slot = 0;
    }
    copies_commit();
  }
};

// Adds the slices of this block's share of a round's values, in order, each from the block that has it.
DEVICE void add_slices(const Arguments& a, const float* sums, int rank, int round, int first, int end) {
  for (int e = rank * THREADS + threadIdx.x; e < a.rows * QUADS; e += SLICES * THREADS) {
    const int m = e / QUADS, column = e % QUADS * 4;
    const int number = first + round * ROUND + column / (WIDTHS * 8) % TOGETHER * WARPS + column / (SPREAD_WIDTHS * 8);
    const int pass = number / BLOCKS, block = number % BLOCKS, inside = column % (WIDTHS * 8);
    const int live = pass == PASSES - 1 ? LAST_ROWS : PASS_ROWS;
    if (number >= end || inside >= live) continue;
    float parts[SLICES][4], value[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++)
      load_peer_four(parts[slice], shared_address(sums + m * SUMS_PITCH + column), slice);
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++)
#pragma unroll
      for (int c = 0; c < 4; c++) value[c] += parts[slice][c];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int row = block * ROWS + pass * PASS_ROWS + inside + c;
      if (inside + c >= live || row >= N) continue;
      a.out[m * a.out_stride + row] = to_bf16(ROW_SCALES ? value[c] * load_global_float(a.scales + row) : value[c]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) linear_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % SLICES, first = blockIdx.x / SLICES * SHARE, end = min(first + SHARE, TOTAL);
  const u32 x_items = shared_address(shared), ring = x_items + X_BYTES;
  float* sums = (float*)(shared + X_BYTES + WARPS * STAGES * STAGE_BYTES);
  Stages stages{a.tape, ring + warp * STAGES * STAGE_BYTES, first, end, rank, warp, lane, 0, 0, 0, evict_first_policy()};
  for (int i = 0; i < STAGES - 1; i++) stages.request();  // weights first: they do not depend on the kernel before
  launch_dependents();
  wait_for_predecessor();
  // Rows past the last one repeat it: they spoil sums that nobody stores. An item is the operands of its two matrix steps.
#pragma unroll
  for (int done = 0; done < LANE_ITEMS; done += X_BATCH) {
    Fragment<true> x[X_BATCH];  // all loads before the first store
#pragma unroll
    for (int i = 0; i < X_BATCH; i++) {
      const int item = min(warp + WARPS * (done + i), TILES * STEPS - 1), row = item / STEPS * 16 + g;
      const int column = (rank * STEPS + item % STEPS) * 32 + t * 8;
      load_fragment(x[i], a.x + min(row, a.rows - 1) * a.x_stride, a.x + min(row + 8, a.rows - 1) * a.x_stride, column);
    }
#pragma unroll
    for (int i = 0; i < X_BATCH; i++) {
      const int item = warp + WARPS * (done + i);
      if (item >= TILES * STEPS) break;
      const u32 to = x_items + item * 1024 + lane * 16;
      store_shared(to, Words{x[i].top.x, x[i].bottom.x, x[i].top.y, x[i].bottom.y});
      store_shared(to + 512, Words{x[i].top.z, x[i].bottom.z, x[i].top.w, x[i].bottom.w});
    }
  }
  __syncthreads();

  int slot = 0;
#pragma unroll 1
  for (int round = 0; round < ROUNDS; round++) {
    float acc[TILES][SPREAD_WIDTHS][2][4];
#pragma unroll
    for (int i = 0; i < TILES * SPREAD_WIDTHS * 8; i++) (&acc[0][0][0][0])[i] = 0.f;
    const int number = first + round * ROUND + warp;
    int live[TOGETHER];  // weight rows of each pass
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) live[i] = (number + i * WARPS) / BLOCKS == PASSES - 1 ? LAST_ROWS : PASS_ROWS;
#pragma unroll 1
    for (int stage = 0; stage < PASS_STAGES; stage++) {
      copies_wait<STAGES - 2>();
      __syncwarp();  // what other lanes copied is here, and nobody reads the stage that is requested now
      stages.request();
      const u32 base = ring + (warp * STAGES + slot) * STAGE_BYTES;
      if (++slot == STAGES) slot = 0;
      if (number >= end) continue;  // a warp that has no pass left still keeps in step
#pragma unroll
      for (int unit = 0; unit < STAGE_UNITS; unit++) {
        Codes codes[SPREAD_WIDTHS];
#pragma unroll
        for (int width = 0; width < SPREAD_WIDTHS; width++) {
          const int i = width / WIDTHS;
          codes[width] = load_codes(base + i * SLOT_BYTES + unit * unit_bytes(live[i]), live[i], width % WIDTHS * 8 + g, t);
        }
#pragma unroll
        for (int j = 0; j < UNIT_STEPS; j++) {
          Words w[SPREAD_WIDTHS];
#pragma unroll
          for (int width = 0; width < SPREAD_WIDTHS; width++) w[width] = decode(codes[width], j, t);
          const u32 at = x_items + (stage * STAGE_STEPS + unit * UNIT_STEPS + j) * 1024 + lane * 16;
#pragma unroll
          for (int tile = 0; tile < TILES; tile++) {
            const Words x = load_shared(at + tile * (STEPS * 1024)), z = load_shared(at + tile * (STEPS * 1024) + 512);
#pragma unroll
            for (int width = 0; width < SPREAD_WIDTHS; width++) {
              matrix_step(acc[tile][width][0], x.x, x.y, x.z, x.w, w[width].x, w[width].y);
              matrix_step(acc[tile][width][1], z.x, z.y, z.z, z.w, w[width].z, w[width].w);
            }
          }
        }
      }
    }
    // One buffer: the others have read its last contents. Two: they have written what is read now, and have read, before
    // that, what this round overwrites.
    if (round > 0) cluster_wait();
    if (BUFFERS == 2 && round > 0) add_slices(a, sums + (round - 1) % 2 * SUMS_FLOATS, rank, round - 1, first, end);
    float* mine = sums + (BUFFERS == 2 ? round % 2 * SUMS_FLOATS : 0) + warp * SPREAD_WIDTHS * 8 + 2 * t;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int width = 0; width < SPREAD_WIDTHS; width++) {
        const float(&even)[4] = acc[tile][width][0];
        const float(&odd)[4] = acc[tile][width][1];
        float* to = mine + (tile * 16 + g) * SUMS_PITCH + width * 8;
        *(float2*)to = make_float2(even[0] + odd[0], even[1] + odd[1]);
        *(float2*)(to + 8 * SUMS_PITCH) = make_float2(even[2] + odd[2], even[3] + odd[3]);
      }
    cluster_arrive();
    if (BUFFERS == 1) {
      cluster_wait();
      add_slices(a, sums, rank, round, first, end);
      cluster_arrive();
    }
  }
  cluster_wait();
  if (BUFFERS == 2) {
    add_slices(a, sums + (ROUNDS - 1) % 2 * SUMS_FLOATS, rank, ROUNDS - 1, first, end);
    cluster_leave();  // a block that ends takes its shared memory with it
  }
}

#elif FORM == 3
// ------------------------------------------------------------------ share: the rows of a cluster by warpgroups, slices in its blocks

// A block has the columns of one slice and the weight rows of its cluster, 64 of each warpgroup. The slice of x lies in shared
// memory as operands; the weights go from memory to the registers in which they are operands, STAGES stages of them on the
// way, and a lane finds its two weight rows by itself. Then each block sends the sums of its slice to the blocks of the
// cluster that finish those rows of x.
constexpr int SHARE_THREADS = WARPGROUPS * 128;
constexpr int SHARE_ROWS = (N + CLUSTERS - 1) / CLUSTERS;  // of a cluster
constexpr int GROUP_ROWS = WARPGROUPS * 64;
constexpr int STAGE_UNITS = STAGE_STEPS / UNIT_STEPS;
constexpr int PARTS = STEPS / STAGE_STEPS;  // stages of a slice
constexpr int X_STRIDE = WARPGROUPS * 2;  // two warps read a step of x: half of the rows, 8 at a time, every X_STRIDE-th step
constexpr int X_STEPS = (STEPS + X_STRIDE - 1) / X_STRIDE;
constexpr int X_BATCH = X_STEPS * TILES <= 16 ? X_STEPS : 16 / TILES;  // 64 registers
constexpr int OWNED_PAIRS = X_ROWS / SLICES / 2;                       // pairs of rows of x that a block finishes
constexpr int PAIR_FLOATS = GROUP_ROWS * 2;
static_assert(SPLIT == 1 && STACKS == 1 && SLICES == WARPS && !BLOCK_SCALES && TALL && SHARE_ROWS <= GROUP_ROWS, "plan");
static_assert(STEPS % STAGE_STEPS == 0 && STAGE_STEPS % UNIT_STEPS == 0 && STAGES <= PARTS, "plan");

// A weight row of this lane: its place on the tape of this block's slice.
struct Strip {
  const u8* from;
  int live, inside;

  DEVICE Strip(const u8* tape, int row, int rank) {
    const int block = row / ROWS, pass = row % ROWS / PASS_ROWS;
    inside = row % ROWS % PASS_ROWS;
    live = pass == PASSES - 1 ? LAST_ROWS : PASS_ROWS;
    from = tape + (u64)pass * ((u64)TAPES * CHUNKS * PIECE_BYTES) + (u64)(block * WARPS + rank) * (CHUNK_UNITS * unit_bytes(live));
  }
  DEVICE Codes load(int unit, int t, u64 policy) const {
    const u64 before = (u64)(unit / CHUNK_UNITS) * TAPES * CHUNK_UNITS + unit % CHUNK_UNITS;
    return load_codes(from + before * unit_bytes(live), live, inside, t, policy);
  }
};

// Adds the slices of the values that this block finishes, in order. sums: [slice][pair of rows of x][place][row of x]; places
// are weight rows 0, 8, 1, 9, .. of every 16.
DEVICE void add_slices(const Arguments& a, const float* sums, int rank, int first, int end) {
  for (int e = threadIdx.x; e < GROUP_ROWS * OWNED_PAIRS; e += SHARE_THREADS) {
    const int place = e % GROUP_ROWS, pair = e / GROUP_ROWS, m = (rank * OWNED_PAIRS + pair) * 2;
    const int row = first + place / 16 * 16 + place % 2 * 8 + place / 2 % 8;
    if (row >= end || m >= a.rows) continue;
    float2 value = make_float2(0.f, 0.f), parts[SLICES];
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++)
      parts[slice] = *(const float2*)(sums + (slice * OWNED_PAIRS + pair) * PAIR_FLOATS + place * 2);
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      value.x += parts[slice].x;
      value.y += parts[slice].y;
    }
    const float scale = ROW_SCALES ? load_global_float(a.scales + row) : 1.f;
    a.out[m * a.out_stride + row] = to_bf16(ROW_SCALES ? value.x * scale : value.x);
    if (m + 1 < a.rows) a.out[(m + 1) * a.out_stride + row] = to_bf16(ROW_SCALES ? value.y * scale : value.y);
  }
}

extern "C" __global__ void __launch_bounds__(SHARE_THREADS, 1) linear_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % SLICES, first = blockIdx.x / SLICES * SHARE_ROWS, end = min(first + SHARE_ROWS, N);
  const u32 x = shared_address(shared), sums = x + STEPS * X_STEP, received = sums + SLICES * OWNED_PAIRS * PAIR_FLOATS * 4;
  const u64 policy = evict_first_policy();

  // weight rows past the last one repeat it: they spoil sums that nobody stores
  const int row = first + warp * 16 + g;
  const Strip top(a.tape, min(row, end - 1), rank), bottom(a.tape, min(row + 8, end - 1), rank);
  Codes codes[STAGES][STAGE_UNITS][2];
  const auto request = [&](int part) {
#pragma unroll
    for (int unit = 0; unit < STAGE_UNITS; unit++) {
      codes[part % STAGES][unit][0] = top.load(part * STAGE_UNITS + unit, t, policy);
      codes[part % STAGES][unit][1] = bottom.load(part * STAGE_UNITS + unit, t, policy);
    }
  };
#pragma unroll
  for (int part = 0; part < STAGES; part++) request(part);  // weights first: they do not depend on the kernel before
  launch_dependents();
  if (threadIdx.x == 0) {
    const int pairs = max(0, min(OWNED_PAIRS, (a.rows + 1) / 2 - rank * OWNED_PAIRS));
    barrier_init(received, 1);
    barrier_init_done();
    barrier_expect(received, SLICES * pairs * PAIR_FLOATS * 4);
  }
  __syncwarp();
  cluster_arrive();
  wait_for_predecessor();

  // Rows of x past the last one repeat it, too; steps past the last one store it again.
  const int half = warp % 2 * TILES * 8;
#pragma unroll 1
  for (int done = warp / 2; done < STEPS; done += X_BATCH * X_STRIDE) {
    Words words[X_BATCH][TILES];  // all reads before the first store
#pragma unroll
    for (int i = 0; i < X_BATCH; i++)
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const u16* from = a.x + min(half + tile * 8 + g, a.rows - 1) * a.x_stride;
        words[i][tile] = load_row(from, (rank * STEPS + min(done + i * X_STRIDE, STEPS - 1)) * 32 + t * 8);
      }
#pragma unroll
    for (int i = 0; i < X_BATCH; i++)
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
        store_operands(x + min(done + i * X_STRIDE, STEPS - 1) * X_STEP, half + tile * 8 + g, t, words[i][tile]);
  }
  operands_stored();
  __syncthreads();

  float even[X_ROWS / 2], odd[X_ROWS / 2];
#pragma unroll
  for (int i = 0; i < X_ROWS / 2; i++) even[i] = odd[i] = 0.f;
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
#pragma unroll
    for (int unit = 0; unit < STAGE_UNITS; unit++)
#pragma unroll
      for (int j = 0; j < UNIT_STEPS; j++) {
        const Words u = decode(codes[part % STAGES][unit][0], j, t), v = decode(codes[part % STAGES][unit][1], j, t);
        const u32 at = x + (part * STAGE_STEPS + unit * UNIT_STEPS + j) * X_STEP;
        group_begin();
        group_step<X_ROWS>(even, u.x, v.x, u.y, v.y, at);
        group_step<X_ROWS>(odd, u.z, v.z, u.w, v.w, at + X_STEP / 2);
      }
    group_commit();
    group_wait();
    if (part + STAGES < PARTS) request(part + STAGES);
  }

  cluster_wait();  // all blocks have their barriers
  const u32 mine = sums + (rank * OWNED_PAIRS * PAIR_FLOATS + (warp * 8 + g) * 4) * 4;
#pragma unroll
  for (int j = 0; j < X_ROWS / 8; j++) {
    const int pair = j * 4 + t, owner = pair / OWNED_PAIRS;
    if (pair * 2 >= a.rows) continue;
    float values[4];
#pragma unroll
    for (int c = 0; c < 4; c++) values[c] = even[j * 4 + c] + odd[j * 4 + c];
    send_peer(peer_address(mine + pair % OWNED_PAIRS * (PAIR_FLOATS * 4), owner), values, peer_address(received, owner));
  }
  barrier_wait_cluster(received, 0);
  add_slices(a, (const float*)(shared + STEPS * X_STEP), rank, first, end);
}

#elif FORM == 4
// ------------------------------------------------------------------ team: ring blocks that share x

// With 16 rows a ring block reads as many bytes of x as of weights. Here the TEAM blocks of a cluster have the weight rows of
// all of them and a part of the slices each: x is read once for all and lies in shared memory as operands. A slice has TEAM
// warps, each with the weight rows of one block of the plan and every TEAM-th step of x. Sums go to the block whose rows they
// are of.
constexpr int PARTS = WARPS / TEAM;  // slices of a block
constexpr int X_BYTES = PARTS * STEPS * 1024;
constexpr int X_LOADS = (STEPS + TEAM - 1) / TEAM;
constexpr int PAIRS = (ROWS + 1) / 2;  // of weight rows
constexpr int SUMS = 16 * PAIRS * 2;   // of a slice
static_assert(SPLIT == 1 && SLICES == WARPS && PASSES == 1 && TILES == 1 && TALL && !BLOCK_SCALES, "plan");

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) linear_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % TEAM, member = warp / PARTS, slice = rank * PARTS + warp % PARTS;
  const int group = blockIdx.x - rank + member, own = blockIdx.x;  // past the last one are blocks that only help
  float* sums = (float*)(shared + RING_BYTES + X_BYTES);
  float* scales = sums + WARPS * SUMS;
  const u32 barriers = shared_address(scales + (ROW_SCALES ? 2 * PAIRS : 0)), received = barriers + WARPS * SLOTS * 8;
  const u32 x = shared_address(shared) + RING_BYTES + warp % PARTS * (STEPS * 1024) + lane * 16;
  Ring ring{a.tape,
            shared_address(shared) + warp * SLOTS * PIECE_BYTES,
            barriers + warp * SLOTS * 8,
            min(group, GROUPS - 1) * WARPS + slice,
            0,
            0,
            0,
            evict_first_policy()};
  ring.start(lane);  // weights first: they do not depend on the kernel before, nor do scales
  launch_dependents();
  if (threadIdx.x == 0) {
    barrier_init(received, 1);
    barrier_init_done();
    barrier_expect(received, (WARPS - PARTS) * SUMS * 4);
  }
  if constexpr (ROW_SCALES)
    for (int i = threadIdx.x; i < ROWS; i += THREADS) scales[i] = load_global_float(a.scales + min(own * ROWS + i, N - 1));
  __syncwarp();
  cluster_arrive_at_once();
  wait_for_predecessor();

  // Rows past the last one repeat it: they spoil sums that nobody stores.
  Fragment<true> words[X_LOADS];
  const u16* top = a.x + min(g, a.rows - 1) * a.x_stride;
  const u16* bottom = a.x + min(g + 8, a.rows - 1) * a.x_stride;
#pragma unroll
  for (int i = 0; i < X_LOADS; i++)
    load_fragment(words[i], top, bottom, (slice * STEPS + min(TEAM * i + member, STEPS - 1)) * 32 + t * 8);
  float acc[WIDTHS][2][4];
#pragma unroll
  for (int i = 0; i < WIDTHS * 8; i++) (&acc[0][0][0])[i] = 0.f;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll
    for (int i = chunk * CHUNK_STEPS / TEAM; i < X_LOADS && i * TEAM < (chunk + 1) * CHUNK_STEPS; i++) {
      const int step = TEAM * i + member;
      if (step < chunk * CHUNK_STEPS || step >= (chunk + 1) * CHUNK_STEPS) continue;
      store_shared(x + step * 1024, Words{words[i].top.x, words[i].bottom.x, words[i].top.y, words[i].bottom.y});
      store_shared(x + step * 1024 + 512, Words{words[i].top.z, words[i].bottom.z, words[i].top.w, words[i].bottom.w});
    }
    named_barrier_sync(1 + warp % PARTS, 32 * TEAM);
    const u32 base = ring.wait();
#pragma unroll
    for (int unit = 0; unit < CHUNK_UNITS; unit++) {
      Codes codes[WIDTHS];
#pragma unroll
      for (int width = 0; width < WIDTHS; width++) codes[width] = load_codes(base + unit * unit_bytes(ROWS), ROWS, width * 8 + g, t);
#pragma unroll
      for (int j = 0; j < UNIT_STEPS; j++) {
        const u32 at = x + (chunk * CHUNK_STEPS + unit * UNIT_STEPS + j) * 1024;
        const Words lower = load_shared(at), upper = load_shared(at + 512);
#pragma unroll
        for (int width = 0; width < WIDTHS; width++) {
          const Words w = decode(codes[width], j, t);
          matrix_step(acc[width][0], lower.x, lower.y, lower.z, lower.w, w.x, w.y);
          matrix_step(acc[width][1], upper.x, upper.y, upper.z, upper.w, w.z, w.w);
        }
      }
    }
    ring.release(lane);
  }

  cluster_wait();  // all blocks have their barriers
  const u32 mine = shared_address(sums + slice * SUMS), peer = peer_address(mine, member), counted = peer_address(received, member);
#pragma unroll
  for (int width = 0; width < WIDTHS; width++)
#pragma unroll
    for (int high = 0; high < 2; high++) {
      const int column = width * 8 + 2 * t, place = ((g + 8 * high) * (2 * PAIRS) + column) * 4;
      const float(&even)[4] = acc[width][0];
      const float(&odd)[4] = acc[width][1];
      const float values[2] = {even[2 * high] + odd[2 * high], even[2 * high + 1] + odd[2 * high + 1]};
      if (column >= ROWS || group >= GROUPS) continue;
      if (member == rank)
        store_shared_pair(mine + place, Pair{__float_as_uint(values[0]), __float_as_uint(values[1])});
      else
        send_peer(peer + place, values, counted);
    }
  __syncthreads();
  if (own >= GROUPS) return;
  barrier_wait_cluster(received, 0);
  for (int e = threadIdx.x; e < a.rows * PAIRS; e += THREADS) {
    const int n = e % PAIRS * 2, m = e / PAIRS;
    float2 value = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < SLICES; i++) {
      const float2 part = *(const float2*)(sums + i * SUMS + m * (2 * PAIRS) + n);
      value.x += part.x;
      value.y += part.y;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = own * ROWS + n + i;
      const float sum = i ? value.y : value.x;
      if (n + i < ROWS && row < N) a.out[m * a.out_stride + row] = to_bf16(ROW_SCALES ? sum * scales[n + i] : sum);
    }
  }
}
#endif
