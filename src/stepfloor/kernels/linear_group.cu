// The group form of linear.cu, which includes it: warpgroups share the rows.
//
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
