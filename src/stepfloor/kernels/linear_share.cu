// The share form of linear.cu, which includes it: the rows of a cluster by warpgroups, slices in its blocks.
//
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
