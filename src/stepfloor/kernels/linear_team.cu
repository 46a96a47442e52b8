// The team form of linear.cu, which includes it: ring blocks that share x.
//
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
