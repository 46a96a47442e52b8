// The second of two kernels of a decode step with many sequences: the state. Replay of the accepted rows, one write, then the
// new rows and the gated norm that closes them. gdn_rows.cu has made the rows' operands. Source: gdn_decode.py.
//
// Of two forms the one for many units of one row, and for few units: a block a multiprocessor, RING states in shared memory, one
// worked on while the others are on their way, and one more warp that asks for them long before they are wanted. A state
// leaves through shared memory too, in whole lines: 46 us for 52 at 16 sequences of 4 rows, against a warp's 64 bytes of each
// row (H200). It is one bulk copy, though every read of it then meets two lanes on each bank: in 32 copies with gaps between
// them, each instruction of which goes through a loop over lanes, moving took longer than working.

#include "delta.cuh"
#include "delta_rule.cuh"
#include "delta_split.cuh"
#include "delta_state.cuh"

// COLS     columns of a warp, which decides the bits
// RING     states in shared memory
// SETTLED  whether slots, pending and states may be read before the predecessor has ended, as gdn_decode.cu says of its EARLY 2
// SILU     the gate's activation: silu or sigmoid

constexpr int THREADS = WORKERS + 32;  // the last warp moves what the others work on
// Shared memory, bytes from the start: states, sets, barriers. state_bytes of _delta_split.py is the end.
constexpr int FIRST_SET = RING * STATE_BYTES;
constexpr int SET_READY = FIRST_SET + 2 * SET_BYTES;  // [2] barriers each, then [RING] each
constexpr int SET_FREE = SET_READY + 16, STATE_READY = SET_FREE + 16, STATE_FREE = STATE_READY + RING * 8;

// The first lane of the last warp.
DEVICE void move(const Arguments& a, u32 base) {
  const int units = a.sequences * HEADS, stride = gridDim.x;
  const u64 policy = evict_first_policy();
  const auto request_state = [&](int unit, int at) {
    if (unit >= units) return;
    barrier_expect(base + STATE_READY + 8 * at, STATE_BYTES);
    bulk_copy(base + at * STATE_BYTES, state_of(a, unit), STATE_BYTES, base + STATE_READY + 8 * at, policy);
  };
  const auto request = [&](int unit, int set) {
    if (unit < units) request_set(a, unit, accepted_of(a, unit), base + FIRST_SET + set * SET_BYTES, base + SET_READY + 8 * set);
  };
  for (int i = 0; i < RING; i++) request_state(blockIdx.x + i * stride, i);
  if (SETTLED) wait_for_predecessor();
  request(blockIdx.x, 0);
  request(blockIdx.x + stride, 1);
  int at = 0, round = 0;
#pragma unroll 1
  for (int unit = blockIdx.x, turn = 0; unit < units; unit += stride, turn++) {
    float* const to = state_of(a, unit);
    const int accepted = accepted_of(a, unit);
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
      request(unit + 2 * stride, turn & 1);
    }
  }
  bulk_stores_wait();
}

// 512 threads for the compiler, so that it takes no more than 128 registers: blocks of gdn_rows.cu are to fit beside.
extern "C" __global__ void __launch_bounds__(512, 1) gdn_state_ring_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const u32 base = shared_address(shared);
  const Place place;
  const int units = a.sequences * HEADS, stride = gridDim.x;

  launch_dependents();
  if (place.tid == 0) {
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
  if (place.warp == STATE_WARPS) {
    if (place.lane == 0) move(a, base);
    return;
  }

  const u64 norm = load_global_u64(a.norm_weight + place.last);
  int at = 0, round = 0;
#pragma unroll 1
  for (int unit = blockIdx.x, turn = 0; unit < units; unit += stride, turn++) {
    const int set = turn & 1, b = unit / HEADS, head = unit % HEADS, accepted = accepted_of(a, unit);
    Share share;
    u8* const state = shared + at * STATE_BYTES + place.own * 4;
    barrier_wait(base + STATE_READY + 8 * at, round & 1);
    load_state(share, state, place.depth);
    const auto leave = [&] {
      operands_stored();  // and reads of this state are done (reads_done)
      barrier_arrive(base + STATE_FREE + 8 * at);
    };
    if (!accepted) leave();
    if (SETTLED && turn == 0) wait_for_predecessor();
    const Gates gates(a, place, b, head);

    barrier_wait(base + SET_READY + 8 * set, turn >> 1 & 1);
    const Rows rows(shared + FIRST_SET + set * SET_BYTES, place.own);
    rows.replay(share, accepted, place.depth);
    if (accepted) {
      store_state(state, share, place.depth);
      leave();
    }
    rows.read(share, accepted, place);
    // whoever passes has closed the unit before, so the set after this one may be written
    named_barrier_sync(1, WORKERS);
    rows.close(a, gates, norm, place, b, head);
    barrier_arrive(base + SET_FREE + 8 * set);
    if (++at == RING) at = 0, round++;
  }
}
