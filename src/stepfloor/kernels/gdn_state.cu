// The second of two kernels of a decode step with many sequences: the state. Replay of the accepted rows, one write, then the
// new rows and the gated norm that closes them. gdn_rows.cu has made the rows' operands. Source: gdn_decode.py.
//
// A block has a head of one sequence at a time, a warp COLS columns of it in registers, as in gdn_decode.cu; only the mean
// square of the closing norm crosses the warps. A state does not depend on anything in this step, so one more warp asks for it
// long before it is wanted: RING of them lie or are on their way in shared memory while a block works on one. They leave
// through it too, in whole lines: 46 us for 52 at 16 sequences of 4 rows, against a warp's 64 bytes of each row (H200).
//
// A state is one bulk copy, though every read of it then meets two lanes on each bank. In 32 copies with gaps between
// them, each instruction of which goes through a loop over lanes, moving took longer than working.

#include "delta.cuh"
#include "delta_rule.cuh"
#include "delta_split.cuh"

// COLS     columns of a warp, which decides the bits
// RING     states in shared memory
// SETTLED  whether slots, pending and states may be read before the predecessor has ended, as gdn_decode.cu says of its EARLY 2
// SILU     the gate's activation: silu or sigmoid

constexpr int WARPS = V / COLS, WORKERS = WARPS * 32, THREADS = WORKERS + 32;  // the last warp moves what the others work on
constexpr int STATE_BYTES = K * V * 4;
constexpr int ROWS_AT_ONCE = WORKERS / (V / 4), CLOSED = (ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;

// Operands and results of a unit, bytes from their start; two such sets.
constexpr int QUERY_KEY = 0;                              // [ROWS + ALL][K] float: queries, then keys
constexpr int GATES_VALUE = (ROWS + ALL) * K * 4;         // decays and betas [2][GATES], values [ALL][V]
constexpr int MIXED = GATES_VALUE + (2 * GATES + ALL * V) * 4;  // [ROWS][V] float
constexpr int SQUARES = MIXED + ROWS * V * 4;             // [ROWS][HEAD_WARPS]
constexpr int SET_BYTES = (SQUARES + ROWS * HEAD_WARPS * 4 + 15) / 16 * 16;
// Shared memory, bytes from the start: states, sets, barriers. state_bytes of _delta_split.py is the end.
constexpr int FIRST_SET = RING * STATE_BYTES;
constexpr int SET_READY = FIRST_SET + 2 * SET_BYTES;  // [2] barriers each, then [RING] each
constexpr int SET_FREE = SET_READY + 16, STATE_READY = SET_FREE + 16, STATE_FREE = STATE_READY + RING * 8;

// 512 threads for the compiler, so that it takes no more than 128 registers: blocks of gdn_rows.cu are to fit beside.
extern "C" __global__ void __launch_bounds__(512, 1) gdn_state_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const u32 base = shared_address(shared);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int units = a.sequences * HEADS, stride = gridDim.x;
  const auto accepted_of = [&](int unit) { return rows_to_replay(load_index(a.pending + unit / HEADS)); };

  launch_dependents();
  if (tid == 0) {
    for (int i = 0; i < 2; i++) {
      barrier_init(base + SET_READY + 8 * i, 1);
      barrier_init(base + SET_FREE + 8 * i, WORKERS);
    }
    for (int i = 0; i < RING; i++) {
      barrier_init(base + STATE_READY + 8 * i, 1);
      barrier_init(base + STATE_FREE + 8 * i, WORKERS);
    }
    barrier_init_done();
  }
  if (!SETTLED) wait_for_predecessor();
  __syncthreads();

  if (warp == WARPS) {
    // its first lane alone
    if (lane) return;
    const u64 policy = evict_first_policy();
    const auto state_of = [&](int unit) { return a.state + (load_index(a.slots + unit / HEADS) * HEADS + unit % HEADS) * K * V; };
    const auto request_state = [&](int unit, int at) {
      if (unit >= units) return;
      barrier_expect(base + STATE_READY + 8 * at, STATE_BYTES);
      bulk_copy(base + at * STATE_BYTES, state_of(unit), STATE_BYTES, base + STATE_READY + 8 * at, policy);
    };
    const auto request_set = [&](int unit, int set) {
      if (unit >= units) return;
      const int b = unit / HEADS, head = unit % HEADS, rows = accepted_of(unit) + ROWS;
      const long long key_head = (long long)b * KEY_HEADS + head / GROUP, value_head = (long long)b * HEADS + head;
      const u32 to = base + FIRST_SET + set * SET_BYTES, ready = base + SET_READY + 8 * set;
      const int query_key = (ROWS + rows) * K * 4, gates_value = (2 * GATES + rows * V) * 4;
      barrier_expect(ready, query_key + gates_value);
      bulk_copy_kept(to + QUERY_KEY, a.query_key + key_head * (ROWS + ALL) * K, query_key, ready);
      bulk_copy_kept(to + GATES_VALUE, a.gates_value + value_head * (2 * GATES + ALL * V), gates_value, ready);
    };
    for (int i = 0; i < RING; i++) request_state(blockIdx.x + i * stride, i);
    if (SETTLED) wait_for_predecessor();
    request_set(blockIdx.x, 0);
    request_set(blockIdx.x + stride, 1);
    int at = 0, round = 0;
#pragma unroll 1
    for (int unit = blockIdx.x, turn = 0; unit < units; unit += stride, turn++) {
      float* const to = state_of(unit);
      const int accepted = accepted_of(unit);
      barrier_wait_alone(base + STATE_FREE + 8 * at, round & 1);
      if (accepted) {
        bulk_store(to, base + at * STATE_BYTES, STATE_BYTES, policy);
        bulk_stores_commit();
        if (unit + RING * stride < units) bulk_stores_read();
      }
      request_state(unit + RING * stride, at);
      if (++at == RING) at = 0, round++;
      if (unit + 2 * stride < units) {
        barrier_wait_alone(base + SET_FREE + 8 * (turn & 1), turn >> 1 & 1);
        request_set(unit + 2 * stride, turn & 1);
      }
    }
    bulk_stores_wait();
    return;
  }

  const int across = lane % LANES, depth = lane / LANES;
  const int own = warp * COLS + across * 4;  // this lane's columns
  const int last = tid % (V / 4) * 4;        // and those it closes, of several rows
  const u64 norm = load_global_u64(a.norm_weight + last);
  int at = 0, round = 0;
#pragma unroll 1
  for (int unit = blockIdx.x, turn = 0; unit < units; unit += stride, turn++) {
    const int set = turn & 1, b = unit / HEADS, head = unit % HEADS;
    const int accepted = accepted_of(unit);
    Share share;
    u8* const state = shared + at * STATE_BYTES + own * 4;
    barrier_wait(base + STATE_READY + 8 * at, round & 1);
#pragma unroll
    for (int i = 0; i < QUADS * 4; i++) {
      const Four four = *(const Four*)(state + state_row(i, depth) * V * 4);
      share.m[i][0] = four.x, share.m[i][1] = four.y, share.m[i][2] = four.z, share.m[i][3] = four.w;
    }
    const auto leave = [&] {
      operands_stored();  // and reads of this state are done (reads_done)
      barrier_arrive(base + STATE_FREE + 8 * at);
    };
    if (!accepted) leave();
    if (SETTLED && turn == 0) wait_for_predecessor();
    u64 z[CLOSED];
#pragma unroll
    for (int i = 0; i < CLOSED; i++) {
      const int row = min(tid / (V / 4) + i * ROWS_AT_ONCE, ROWS - 1);
      z[i] = load_global_u64(a.projected + ((long long)b * ROWS + row) * a.projected_stride + CHANNELS + head * V + last);
    }

    barrier_wait(base + SET_READY + 8 * set, turn >> 1 & 1);
    u8* const operands = shared + FIRST_SET + set * SET_BYTES;
    const float* const query = (const float*)(operands + QUERY_KEY);
    const float* const key = query + ROWS * K;
    const float* const decay = (const float*)(operands + GATES_VALUE);
    const float* const beta = decay + GATES;
    const float* const value = beta + GATES + own;
    float* const mixed = (float*)(operands + MIXED);
    float* const squares = (float*)(operands + SQUARES);
#pragma unroll 1
    for (int t = 0; t < accepted; t++) share.advance(key + t * K, value + t * V, decay[t], beta[t], depth);
    if (accepted) {
#pragma unroll
      for (int i = 0; i < QUADS * 4; i++)
        *(Four*)(state + state_row(i, depth) * V * 4) = Four{share.m[i][0], share.m[i][1], share.m[i][2], share.m[i][3]};
      leave();
    }
#pragma unroll 1
    for (int i = 0; i < ROWS; i++) {
      const int t = accepted + i;
      share.advance(key + t * K, value + t * V, decay[t], beta[t], depth);
      float o[4];
      const float square = share.read(o, query + i * K, depth);
      if (depth == 0) *(Four*)(mixed + i * V + own) = Four{o[0], o[1], o[2], o[3]};
      if (lane == 0) squares[i * HEAD_WARPS + warp] = square;
    }
    // whoever passes has closed the unit before, so the set after this one may be written
    named_barrier_sync(1, WORKERS);
    u16* const out = a.out + ((long long)b * ROWS * HEADS + head) * V + last;
#pragma unroll
    for (int i = 0; i < CLOSED; i++) {
      const int row = tid / (V / 4) + i * ROWS_AT_ONCE;
      if (row < ROWS)
        close_four(out + (long long)row * HEADS * V, mixed + row * V + last, z[i], norm,
                   head_scale(squares + row * HEAD_WARPS, a.eps));
    }
    barrier_arrive(base + SET_FREE + 8 * set);
    if (++at == RING) at = 0, round++;
  }
}
