// One decode step of a gated delta net for B sequences: replay of the rows the last step accepted, one write of the state,
// then R new rows that leave the state in memory alone. Source: gdn_decode.py, whose reference this follows rounding for
// rounding; the float32 sums of the recurrence have another order.
//
// A warp owns COLS columns of one head's state [K, V] in registers and never asks another warp about them: a row is two sums
// over K across the lanes. PARTS blocks share a head, and only the mean square of the closing norm crosses them.
//
// A value depends on COLS alone, not on B, R or PARTS, and a replayed row leaves the bits it left as a new row's: every
// operation of the recurrence is written out, so that no compiler contracts it differently in two places.
//
// raw_rows and gate_rows are rewritten in place, and the q and k channels of a key head are read by PARTS blocks of each of
// its value heads. JOINED puts them all in one cluster; each arrives when it has read and waits before it writes.
//
// A cluster takes one key head of one sequence (one value head, if not JOINED). Many sequences are several waves of clusters, each
// with the latency of its rows: then gdn_rows.cu and gdn_state.cu are faster, with the same bits.
//
// EARLY 3 does everything that the rows of this step do not take part in before the predecessor has ended: it reads the
// state, replays the pending rows, writes the state and the history. A kernel that writes before it waits needs a reason.
// Whoever else touches state, kept rows, slots or pending ran before something that is no dependent launch (a copy, a
// plain kernel, the start of a graph), and that one before this kernel: such a thing begins when all before it has ended
// and can be read, so nobody is left to race with. Without it a chain of dependent launches orders nothing before the
// wait: its kernels may all be resident at once, each waiting for the one before.

#include "delta.cuh"
#include "delta_rule.cuh"

// KEY_HEADS, HEADS, K, V  sizes; GROUP = HEADS / KEY_HEADS value heads share a key head
// ROWS, KEPT           new rows R; rows that can be pending
// COLS                    columns of a warp; PARTS  blocks of a head
// JOINED                  whether a cluster holds all blocks of a key head, or only those of one value head, which is right
//                         only if rows are written to other tensors than they are read from
// EARLY                   what happens before the predecessor has ended: 0 nothing, 1 the state is called into the L2, which
//                         is right whoever still writes it, 2 state and kept rows are read, 3 the pending rows are
//                         replayed too, and state and history written; 2 and 3 are right only if slots, pending, state
//                         and kept rows are settled, as said above
// PASSING                 whether a written state leaves the L2 before other lines
// SILU                    the gate's activation: silu or sigmoid
// PER_SM                  blocks a multiprocessor should hold

constexpr int GROUP = HEADS / KEY_HEADS;
constexpr int WIDTH = V / PARTS;  // columns of a block
constexpr int WARPS = WIDTH / COLS;
constexpr int THREADS = WARPS * 32;
constexpr int CLUSTER = PARTS * (JOINED ? GROUP : 1);
constexpr int UNITS = JOINED ? KEY_HEADS : HEADS;  // clusters of one sequence
constexpr int KEY_WIDTH = KEY_HEADS * K;
constexpr int CHANNELS = 2 * KEY_WIDTH + HEADS * V;
constexpr int OWN = 2 * K + WIDTH;  // channels a block convolves
constexpr int PAIRS = OWN / 2;
constexpr int PIECES = OWN / 8;  // of 16 bytes
constexpr int KEY_PIECES = 2 * K / 8;
constexpr int PAIR_TURNS = (PAIRS + THREADS - 1) / THREADS;
constexpr int ALL = KEPT + ROWS;
static_assert(HEADS % KEY_HEADS == 0 && V % (COLS * PARTS) == 0, "shape");
static_assert(WIDTH % 8 == 0 && CHANNELS % 8 == 0 && (HEADS * V) % 8 == 0 && ALL <= 32, "shape");

// Shared memory, bytes from the start; shared_bytes of _delta_fused.py is the end.
constexpr int STAGE = 0;                                  // [HISTORY + KEPT][OWN] bf16: the history, then pending rows
constexpr int FRESH = STAGE + (HISTORY + KEPT) * OWN * 2;  // [ROWS][OWN] bf16: new rows
constexpr int GATE = FRESH + ROWS * OWN * 2;               // [ROWS][WIDTH] bf16: z
constexpr int QUERY = GATE + ROWS * WIDTH * 2;           // [ROWS][K] float
constexpr int KEY = QUERY + ROWS * K * 4;                // [ALL][K]
constexpr int VALUE = KEY + ALL * K * 4;                 // [ALL][WIDTH]
constexpr int MIXED = VALUE + ALL * WIDTH * 4;           // [ROWS][WIDTH]
constexpr int SQUARES = MIXED + ROWS * WIDTH * 4;        // [ROWS][HEAD_WARPS]
constexpr int DECAY = SQUARES + ROWS * HEAD_WARPS * 4;   // [ALL]
constexpr int BETA = DECAY + ALL * 4;                    // [ALL]

struct Arguments {
  const u16* projected;   // [B][ROWS][projected_stride]
  float* state;           // [slots][HEADS][K][V]
  const u16* raw_from;    // [slots][HISTORY + KEPT][CHANNELS]
  u16* raw_to;
  const u16* gates_from;  // [slots][KEPT][2 HEADS]
  u16* gates_to;
  const long long* slots;
  const long long* pending;
  const float* conv_weight;  // [CHANNELS][TAPS]
  const float* a_log;
  const float* dt_bias;
  const u16* norm_weight;
  u16* out;                     // [B][ROWS][HEADS V]
  long long projected_stride;  // of a row, in values
  long long num_slots;
  int sequences;
  float eps;
};

// The first channel of a piece of 8 of a block, among all channels.
DEVICE int channel_of(int piece, int key_head, int column) {
  if (piece < K / 8) return key_head * K + piece * 8;
  if (piece < KEY_PIECES) return KEY_WIDTH + key_head * K + piece * 8 - K;
  return 2 * KEY_WIDTH + column + piece * 8 - 2 * K;
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) gdn_decode_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) u8 shared[];
  float* const query = (float*)(shared + QUERY);
  float* const key = (float*)(shared + KEY);
  float* const value = (float*)(shared + VALUE);
  float* const mixed = (float*)(shared + MIXED);
  float* const squares = (float*)(shared + SQUARES);
  float* const decay = (float*)(shared + DECAY);
  float* const beta = (float*)(shared + BETA);

  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int rank = blockIdx.x % CLUSTER, part = rank % PARTS;
  const int across = lane % LANES, depth = lane / LANES;
  const int own = warp * COLS + across * 4;  // this lane's columns of the block
  // THREADS is a multiple of WIDTH / 4: a thread closes the same columns of several rows
  const int last = tid % (WIDTH / 4) * 4;
  const int unit = blockIdx.x / CLUSTER, b = unit / UNITS;
  const int head = JOINED ? unit % UNITS * GROUP + rank / PARTS : unit % UNITS, key_head = head / GROUP;
  const int column = head * V + part * WIDTH;  // of this block, among the HEADS * V

  launch_dependents();
  float taps[PAIR_TURNS][2][4];
  u64 norm = 0;
  const auto load_taps = [&] {
#pragma unroll
    for (int turn = 0; turn < PAIR_TURNS; turn++) {
      const int pair = min(tid + turn * THREADS, PAIRS - 1);
      const int channel = channel_of(pair / 4, key_head, column) + pair % 4 * 2;
      load_four(taps[turn][0], a.conv_weight + (long long)channel * TAPS);
      load_four(taps[turn][1], a.conv_weight + (long long)channel * TAPS + TAPS);
    }
  };
  const auto load_norm = [&] { norm = load_global_u64(a.norm_weight + part * WIDTH + last); };
  load_taps();
  if (EARLY < 3) load_norm();
  const float rate = expf(a.a_log[head]), bias = a.dt_bias[head];

  if (EARLY == 1) {
    // this may be the slot of an earlier step; then the wrong lines come, and no harm
    const long long guess = max(0ll, min(a.num_slots - 1, load_index(a.slots + b)));
    for (int i = tid; i < K * WIDTH / 8; i += THREADS)  // a sector of 32 bytes each
      call_into_l2(a.state + ((guess * HEADS + head) * K + i / (WIDTH / 8)) * V + part * WIDTH + i % (WIDTH / 8) * 8);
  }
  const u16* const projected = a.projected + (long long)b * ROWS * a.projected_stride;
  const auto request_new_rows = [&] {
    for (int i = tid; i < ROWS * PIECES; i += THREADS)
      copy16(FRESH + shared_address(shared) + i * 16,
             projected + i / PIECES * a.projected_stride + channel_of(i % PIECES, key_head, column));
    for (int i = tid; i < ROWS * WIDTH / 8; i += THREADS)
      copy16(GATE + shared_address(shared) + i * 16,
             projected + i / (WIDTH / 8) * a.projected_stride + CHANNELS + column + i % (WIDTH / 8) * 8);
  };
  if (EARLY < 2) wait_for_predecessor();
  const long long slot = load_index(a.slots + b), asked = load_index(a.pending + b);
  if (EARLY < 2) request_new_rows();  // while the slot is on its way
  const int accepted = max(0, min(KEPT, (int)asked));
  float* const state = a.state + (slot * HEADS + head) * K * V + part * WIDTH + own;
  Share share;
#pragma unroll
  for (int i = 0; i < QUADS * 4; i++) load_four(share.m[i], state + state_row(i, depth) * V);
  const u16* const raw_from = a.raw_from + slot * (HISTORY + KEPT) * CHANNELS;
  for (int i = tid; i < (HISTORY + accepted) * PIECES; i += THREADS)
    copy16(STAGE + shared_address(shared) + i * 16,
           raw_from + i / PIECES * CHANNELS + channel_of(i % PIECES, key_head, column));
  if (EARLY == 2) {
    wait_for_predecessor();
    request_new_rows();
  }

  // Convolution, norms and gates of rows from .. to - 1, the replayed ones first; what was requested before arrives here.
  const auto prepare = [&](int from, int to, bool reading) {
    copies_commit();
    if (tid >= from && tid < to) {
      const u16* gates = tid < accepted ? a.gates_from + (slot * KEPT + tid) * 2 * HEADS
                                        : projected + (tid - accepted) * a.projected_stride + CHANNELS + HEADS * V;
      beta[tid] = beta_of(load_half(gates + head));
      decay[tid] = decay_of(load_half(gates + HEADS + head), bias, rate);
    }
    copies_wait<0>();
    __syncthreads();
    if (CLUSTER > 1 && reading) cluster_arrive_apart();  // this block has read all rows that others may overwrite
#pragma unroll
    for (int turn = 0; turn < PAIR_TURNS; turn++) {
      const int pair = tid + turn * THREADS;
      if (pair < PAIRS) {
        const u32* raw = (const u32*)(shared + STAGE) + pair;
        float even[TAPS], odd[TAPS];
        const auto take = [&](int i, u32 word) { even[i] = low_half(word), odd[i] = high_half(word); };
#pragma unroll
        for (int i = 0; i < HISTORY; i++) take(i + 1, raw[(from + i) * PAIRS]);
#pragma unroll 2
        for (int t = from; t < to; t++) {
#pragma unroll
          for (int i = 0; i < HISTORY; i++) even[i] = even[i + 1], odd[i] = odd[i + 1];
          take(HISTORY, raw[(t < accepted ? t + HISTORY : t - accepted + HISTORY + KEPT) * PAIRS]);
          const float low = convolved(even, taps[turn][0]), high = convolved(odd, taps[turn][1]);
          float* to_row;
          if (pair < K / 2) {
            if (t < accepted) continue;  // replayed rows are not read
            to_row = query + (t - accepted) * K + pair * 2;
          } else if (pair < K) {
            to_row = key + t * K + pair * 2 - K;
          } else {
            to_row = value + t * WIDTH + pair * 2 - 2 * K;
          }
          to_row[0] = low;
          to_row[1] = high;
        }
      }
    }
    __syncthreads();
    const int queries = max(0, to - max(from, accepted));  // a replayed row has none
    for (int i = warp; i < to - from + queries; i += WARPS) {
      const bool is_key = i < to - from;
      float* row = is_key ? key + (from + i) * K : query + (i - (to - from)) * K;
      float v[K / 32];
#pragma unroll
      for (int j = 0; j < K / 32; j++) v[j] = row[lane * (K / 32) + j];
      const float scale = unit_scale(v);
#pragma unroll
      for (int j = 0; j < K / 32; j++) row[lane * (K / 32) + j] = is_key ? unit_key(v[j], scale) : unit_query(v[j], scale);
    }
    __syncthreads();
  };
  prepare(0, EARLY == 3 ? accepted : accepted + ROWS, true);

#pragma unroll 1
  for (int t = 0; t < accepted; t++) share.advance(key + t * K, value + t * WIDTH + own, decay[t], beta[t], depth);
  if (accepted) {
#pragma unroll
    for (int i = 0; i < QUADS * 4; i++) {
      float* const to = state + state_row(i, depth) * V;
      if (PASSING) store_four_passing(to, share.m[i]);
      else store_four(to, share.m[i]);
    }
  }

  if (CLUSTER > 1) cluster_wait_apart();  // all of them have read, and their shared memory exists
  u16* const raw_to = a.raw_to + slot * (HISTORY + KEPT) * CHANNELS;
  const auto write_rows = [&](int from, int to) {
    for (int i = from * PIECES + tid; i < to * PIECES; i += THREADS) {
      const int row = i / PIECES, piece = i % PIECES;
      const bool mine = JOINED ? piece % CLUSTER == rank : head % GROUP == 0 && piece % PARTS == part;
      if (piece >= KEY_PIECES || mine)
        store_words(raw_to + row * CHANNELS + channel_of(piece, key_head, column),
                    load_shared(STAGE + shared_address(shared) + (i + (row < HISTORY ? accepted : KEPT) * PIECES) * 16));
    }
  };
  write_rows(0, HISTORY);
  if (EARLY == 3) {
    load_norm();
    load_taps();  // again: the registers were needed for the replay
    wait_for_predecessor();
    request_new_rows();
    prepare(accepted, accepted + ROWS, false);
  }
  write_rows(HISTORY, HISTORY + ROWS);
  if (part == 0 && tid < 2 * ROWS) {
    const int row = tid / 2, at = tid % 2 * HEADS + head;
    a.gates_to[(slot * KEPT + row) * 2 * HEADS + at] =
        load_half(projected + row * a.projected_stride + CHANNELS + HEADS * V + at);
  }

#pragma unroll 1
  for (int i = 0; i < ROWS; i++) {
    const int t = accepted + i;
    share.advance(key + t * K, value + t * WIDTH + own, decay[t], beta[t], depth);
    float o[4];
    const float square = share.read(o, query + i * K, depth);
    if (depth == 0) *(Four*)(mixed + i * WIDTH + own) = Four{o[0], o[1], o[2], o[3]};
    const int place = i * HEAD_WARPS + part * WARPS + warp;
    if (PARTS == 1) {
      if (lane == 0) squares[place] = square;
    } else if (lane < PARTS) {
      // a lane for every block of this head, this one included
      store_peer(SQUARES + shared_address(shared) + place * 4, rank - part + lane, square);
    }
  }
  if (PARTS > 1) {
    cluster_arrive_apart();
    cluster_wait_apart();
  } else {
    __syncthreads();
  }
  for (int i = tid; i < ROWS * (WIDTH / 4); i += THREADS) {
    const int row = i / (WIDTH / 4);
    close_four(a.out + ((long long)b * ROWS + row) * HEADS * V + column + last, mixed + row * WIDTH + last,
               *(const u64*)(shared + GATE + (row * WIDTH + last) * 2), norm, head_scale(squares + row * HEAD_WARPS, a.eps));
  }
}
