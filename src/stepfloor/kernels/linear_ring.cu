// The ring form of linear.cu, which includes it: warps share the columns.

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
