// The second of two kernels of a decode step with many sequences: the state. Replay of the accepted rows, one write, then the
// new rows and the gated norm that closes them. gdn_rows.cu has made the rows' operands. Source: gdn_decode.py.
//
// A block has a head of one sequence at a time, a warp COLS columns of it in registers, as in gdn_decode.cu; only the mean
// square of the closing norm crosses the warps. Two blocks share a multiprocessor: one works while the other's state is on its
// way. A state depends on nothing in this step: the first is asked for before the kernel before has ended, the next one as soon
// as one is in registers. It leaves in whole lines, a part at a time through a place of its own, since the next is on its way
// to where it lay: 46 us for 52 at 16 sequences of 4 rows, against a warp's 64 bytes of each row (H200).
//
// A state is one bulk copy, though every read of it then meets two lanes on each bank. In 32 copies with gaps between
// them, each instruction of which goes through a loop over lanes, moving took longer than working. No warp is set apart to
// ask: 18 warps on a multiprocessor would have 96 registers a thread, 16 have 128.

#include "delta.cuh"
#include "delta_rule.cuh"
#include "delta_split.cuh"

// COLS     columns of a warp, which decides the bits
// SETTLED  whether slots, pending and states may be read before the predecessor has ended, as gdn_decode.cu says of its EARLY 2
// HALVES   parts of a state, as it leaves, that its QUADS are cut in: 1 or 2
// SILU     the gate's activation: silu or sigmoid

constexpr int WARPS = V / COLS, THREADS = WARPS * 32;
constexpr int STATE_BYTES = K * V * 4;
constexpr int ROWS_AT_ONCE = THREADS / (V / 4), CLOSED = (ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;

// Operands and results of a unit, bytes from their start; two such sets.
constexpr int QUERY_KEY = 0;                              // [ROWS + ALL][K] float: queries, then keys
constexpr int GATES_VALUE = (ROWS + ALL) * K * 4;         // decays and betas [2][GATES], values [ALL][V]
constexpr int MIXED = GATES_VALUE + (2 * GATES + ALL * V) * 4;  // [ROWS][V] float
constexpr int SQUARES = MIXED + ROWS * V * 4;             // [ROWS][HEAD_WARPS]
constexpr int SET_BYTES = (SQUARES + ROWS * HEAD_WARPS * 4 + 15) / 16 * 16;
constexpr int STATE_PARTS = QUADS * HALVES, PART_ROWS = K / STATE_PARTS, PART_BYTES = PART_ROWS * V * 4;  // as it leaves
static_assert(DEPTH % HALVES == 0, "plan");
// Shared memory, bytes from the start: a state, a part of one, sets, barriers. state_bytes of _delta_split.py is the end.
constexpr int LEAVING = STATE_BYTES;
constexpr int FIRST_SET = LEAVING + PART_BYTES;
constexpr int SET_READY = FIRST_SET + 2 * SET_BYTES;  // [2] barriers
constexpr int STATE_READY = SET_READY + 16, STATE_FREE = STATE_READY + 8;

DEVICE void store_four(u8* to, const float (&v)[4]) { *(Four*)to = Four{v[0], v[1], v[2], v[3]}; }

struct Unit {
  int number;
  float* state;
  int accepted;

  // Past the last one it is the last one again.
  DEVICE Unit(const Arguments& a, int number) : number(number) {
    const int last = min(number, a.sequences * HEADS - 1), b = last / HEADS;
    state = a.state + (load_index(a.slots + b) * HEADS + last % HEADS) * K * V;
    accepted = rows_to_replay(load_index(a.pending + b));
  }
};

// What one thread asks for.
struct Mover {
  const Arguments& a;
  u32 base;
  u64 policy;

  DEVICE void request_state(const Unit& unit) const {
    barrier_expect(base + STATE_READY, STATE_BYTES);
    bulk_copy(base, unit.state, STATE_BYTES, base + STATE_READY, policy);
  }
  // Rows of a state from `row` on.
  DEVICE void store_rows(const Unit& unit, int row, u32 from, u32 bytes) const {
    bulk_store(unit.state + row * V, from, bytes, policy);
    bulk_stores_commit();
  }
  DEVICE void request_set(const Unit& unit, int set) const {
    const int b = unit.number / HEADS, head = unit.number % HEADS, rows = unit.accepted + ROWS;
    const long long key_head = (long long)b * KEY_HEADS + head / GROUP, value_head = (long long)b * HEADS + head;
    const u32 to = base + FIRST_SET + set * SET_BYTES, ready = base + SET_READY + 8 * set;
    const int query_key = (ROWS + rows) * K * 4, gates_value = (2 * GATES + rows * V) * 4;
    barrier_expect(ready, query_key + gates_value);
    bulk_copy_kept(to + QUERY_KEY, a.query_key + key_head * (ROWS + ALL) * K, query_key, ready);
    bulk_copy_kept(to + GATES_VALUE, a.gates_value + value_head * (2 * GATES + ALL * V), gates_value, ready);
  }
};

extern "C" __global__ void __launch_bounds__(256, 2) gdn_state_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const u32 base = shared_address(shared);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int units = a.sequences * HEADS, stride = gridDim.x;
  const Mover mover{a, base, evict_first_policy()};

  launch_dependents();
  if (!SETTLED) wait_for_predecessor();
  Unit unit(a, blockIdx.x), next(a, blockIdx.x + stride);
  if (tid == 0) {
    for (int i = 0; i < 2; i++) barrier_init(base + SET_READY + 8 * i, 1);
    barrier_init(base + STATE_READY, 1);
    barrier_init(base + STATE_FREE, THREADS);
    barrier_init_done();
    mover.request_state(unit);
  }
  if (SETTLED && blockIdx.x < stride / 2) {
    // blocks of gdn_rows.cu leave room for one block of two: the other's state and the next one come as far as the L2
    const Unit other(a, blockIdx.x + stride / 2);
    for (int i = tid * 128; i < STATE_BYTES; i += THREADS * 128) {
      call_into_l2((const u8*)other.state + i);
      if (next.number < units) call_into_l2((const u8*)next.state + i);
    }
  }
  __syncthreads();
  if (SETTLED && warp == 0) wait_for_predecessor();
  if (tid == 0) {
    mover.request_set(unit, 0);
    if (next.number < units) mover.request_set(next, 1);
  }
  __syncwarp();

  const int across = lane % LANES, depth = lane / LANES;
  const int own = warp * COLS + across * 4;  // this lane's columns
  const int last = tid % (V / 4) * 4;        // and those it closes, of several rows
  const u64 norm = load_global_u64(a.norm_weight + last);
#pragma unroll 1
  for (int turn = 0; unit.number < units; turn++) {
    const int set = turn & 1, b = unit.number / HEADS, head = unit.number % HEADS, accepted = unit.accepted;
    const bool more = next.number < units;
    const Unit after(a, next.number + stride);
    Share share;
    u8* const state = shared + own * 4;
    barrier_wait(base + STATE_READY, turn & 1);
#pragma unroll
    for (int i = 0; i < QUADS * 4; i++) {
      const Four four = *(const Four*)(state + state_row(i, depth) * V * 4);
      share.m[i][0] = four.x, share.m[i][1] = four.y, share.m[i][2] = four.z, share.m[i][3] = four.w;
    }
    if (more) {
      operands_stored();  // reads of this state are done (reads_done)
      barrier_arrive(base + STATE_FREE);
      if (tid == 0) {
        barrier_wait_alone(base + STATE_FREE, turn & 1);
        mover.request_state(next);
      }
      __syncwarp();
    }
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
    if (accepted && more) {
#pragma unroll
      for (int part = 0; part < STATE_PARTS; part++) {
        if (tid == 0) bulk_stores_read();
        __syncthreads();
        if (depth * HALVES / DEPTH == part % HALVES) {
#pragma unroll
          for (int i = part / HALVES * 4; i < part / HALVES * 4 + 4; i++)
            store_four(shared + LEAVING + (state_row(i, depth) - part * PART_ROWS) * V * 4 + own * 4, share.m[i]);
        }
        operands_stored();
        __syncthreads();
        if (tid == 0) mover.store_rows(unit, part * PART_ROWS, base + LEAVING, PART_BYTES);
        __syncwarp();
      }
    } else if (accepted) {
      // leaves from where it came
#pragma unroll
      for (int i = 0; i < QUADS * 4; i++) store_four(state + state_row(i, depth) * V * 4, share.m[i]);
      operands_stored();
      __syncthreads();
      if (tid == 0) mover.store_rows(unit, 0, base, STATE_BYTES);
      __syncwarp();
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
    const bool again = after.number < units;  // another set is to lie where this one does
    if (again) operands_stored();             // reads of this set are done (reads_done)
    // whoever passes has closed the unit before, so the set after this one may be written
    __syncthreads();
    if (again && tid == 0) mover.request_set(after, set);
    __syncwarp();
    u16* const out = a.out + ((long long)b * ROWS * HEADS + head) * V + last;
#pragma unroll
    for (int i = 0; i < CLOSED; i++) {
      const int row = tid / (V / 4) + i * ROWS_AT_ONCE;
      if (row < ROWS)
        close_four(out + (long long)row * HEADS * V, mixed + row * V + last, z[i], norm,
                   head_scale(squares + row * HEAD_WARPS, a.eps));
    }
    unit = next;
    next = after;
  }
  if (tid == 0) bulk_stores_wait();
}
