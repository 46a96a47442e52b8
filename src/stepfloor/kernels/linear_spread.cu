// The spread form of linear.cu, which includes it: the slices lie in the blocks of a cluster.
//
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
