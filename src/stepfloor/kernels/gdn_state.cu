// The second of two kernels of a decode step with many sequences: the state. Replay of the accepted rows, one write, then the
// new rows and the gated norm that closes them. gdn_rows.cu has made the rows' operands. Source: gdn_decode.py.
//
// Of two forms the one for several rows: two blocks share a multiprocessor, so that one works while the other's state is on its
// way (gdn_state_ring.cu is the other). A block has a head of one sequence at a time, a warp COLS columns of it in registers,
// as in gdn_decode.cu; only the mean square of the closing norm crosses the warps. A state depends on nothing in this step:
// the first is asked for before the kernel before has ended, the next one as soon as one is in registers. It leaves in whole
// lines, a part at a time through a place of its own, since the next is on its way to where it lay. No warp is set apart to
// ask: 18 warps on a multiprocessor would have 96 registers a thread, 16 have 128.

#include "delta.cuh"
#include "delta_rule.cuh"
#include "delta_split.cuh"
#include "delta_state.cuh"

// COLS     columns of a warp, which decides the bits
// SETTLED  whether slots, pending and states may be read before the predecessor has ended, as gdn_decode.cu says of its EARLY 2
// HALVES   parts of a state, as it leaves, that its QUADS are cut in: 1 or 2
// SILU     the gate's activation: silu or sigmoid

constexpr int THREADS = WORKERS;
constexpr int STATE_PARTS = QUADS * HALVES, PART_ROWS = K / STATE_PARTS, PART_BYTES = PART_ROWS * V * 4;  // as it leaves
static_assert(DEPTH % HALVES == 0, "plan");
// Shared memory, bytes from the start: a state, a part of one, sets, barriers. state_bytes of _delta_split.py is the end.
constexpr int LEAVING = STATE_BYTES;
constexpr int FIRST_SET = LEAVING + PART_BYTES;
constexpr int SET_READY = FIRST_SET + 2 * SET_BYTES;  // [2] barriers
constexpr int STATE_READY = SET_READY + 16, STATE_FREE = STATE_READY + 8;

// A unit, whose slot and pending rows are loaded long before they are wanted.
struct Unit {
  int number;
  float* state;
  int accepted;

  // Past the last one it is the last one again.
  DEVICE Unit(const Arguments& a, int number) : number(number) {
    const int last = min(number, a.sequences * HEADS - 1);
    state = state_of(a, last);
    accepted = accepted_of(a, last);
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
  DEVICE void request(const Unit& unit, int set) const {
    request_set(a, unit.number, unit.accepted, base + FIRST_SET + set * SET_BYTES, base + SET_READY + 8 * set);
  }
};

extern "C" __global__ void __launch_bounds__(256, 2) gdn_state_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const u32 base = shared_address(shared);
  const Place place;
  const int units = a.sequences * HEADS, stride = gridDim.x;
  const Mover mover{a, base, evict_first_policy()};
  const bool moves = place.tid == 0;

  launch_dependents();
  if (!SETTLED) wait_for_predecessor();
  Unit unit(a, blockIdx.x), next(a, blockIdx.x + stride);
  if (moves) {
    for (int i = 0; i < 2; i++) barrier_init(base + SET_READY + 8 * i, 1);
    barrier_init(base + STATE_READY, 1);
    barrier_init(base + STATE_FREE, THREADS);
    barrier_init_done();
    mover.request_state(unit);
  }
  if (SETTLED && blockIdx.x < stride / 2) {
    // blocks of gdn_rows.cu leave room for one block of two: the other's state and the next one come as far as the L2
    const Unit other(a, blockIdx.x + stride / 2);
    for (int i = place.tid * 128; i < STATE_BYTES; i += THREADS * 128) {
      call_into_l2((const u8*)other.state + i);
      if (next.number < units) call_into_l2((const u8*)next.state + i);
    }
  }
  __syncthreads();
  if (SETTLED && place.warp == 0) wait_for_predecessor();
  if (moves) {
    mover.request(unit, 0);
    if (next.number < units) mover.request(next, 1);
  }
  __syncwarp();

  const u64 norm = load_global_u64(a.norm_weight + place.last);
#pragma unroll 1
  for (int turn = 0; unit.number < units; turn++) {
    const int set = turn & 1, b = unit.number / HEADS, head = unit.number % HEADS, accepted = unit.accepted;
    const bool more = next.number < units;
    const Unit after(a, next.number + stride);
    Share share;
    u8* const state = shared + place.own * 4;
    barrier_wait(base + STATE_READY, turn & 1);
    load_state(share, state, place.depth);
    if (more) {
      operands_stored();  // reads of this state are done (reads_done)
      barrier_arrive(base + STATE_FREE);
      if (moves) {
        barrier_wait_alone(base + STATE_FREE, turn & 1);
        mover.request_state(next);
      }
      __syncwarp();
    }
    if (SETTLED && turn == 0) wait_for_predecessor();
    const Gates gates(a, place, b, head);

    barrier_wait(base + SET_READY + 8 * set, turn >> 1 & 1);
    const Rows rows(shared + FIRST_SET + set * SET_BYTES, place.own);
    rows.replay(share, accepted, place.depth);
    if (accepted && more) {
#pragma unroll
      for (int part = 0; part < STATE_PARTS; part++) {
        if (moves) bulk_stores_read();
        __syncthreads();
        if (place.depth * HALVES / DEPTH == part % HALVES) {
#pragma unroll
          for (int i = part / HALVES * 4; i < part / HALVES * 4 + 4; i++)
            store_row(shared + LEAVING + (state_row(i, place.depth) - part * PART_ROWS) * V * 4 + place.own * 4, share.m[i]);
        }
        operands_stored();
        __syncthreads();
        if (moves) mover.store_rows(unit, part * PART_ROWS, base + LEAVING, PART_BYTES);
        __syncwarp();
      }
    } else if (accepted) {
      // leaves from where it came
      store_state(state, share, place.depth);
      operands_stored();
      __syncthreads();
      if (moves) mover.store_rows(unit, 0, base, STATE_BYTES);
      __syncwarp();
    }
    rows.read(share, accepted, place);
    const bool again = after.number < units;  // another set is to lie where this one does
    if (again) operands_stored();             // reads of this set are done (reads_done)
    // whoever passes has closed the unit before, so the set after this one may be written
    __syncthreads();
    if (again && moves) mover.request(after, set);
    __syncwarp();
    rows.close(a, gates, norm, place, b, head);
    unit = next;
    next = after;
  }
  if (moves) bulk_stores_wait();
}
