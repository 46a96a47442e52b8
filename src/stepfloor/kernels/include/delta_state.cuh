// What the two forms of the state's kernel share, gdn_state.cu and gdn_state_ring.cu. A unit is a head of one sequence.
// Include it after delta_rule.cuh and delta_split.cuh; includes nothing itself.
#pragma once

constexpr int STATE_WARPS = V / COLS, WORKERS = STATE_WARPS * 32;  // a warp has COLS columns of a state
constexpr int STATE_BYTES = K * V * 4;
constexpr int ROWS_AT_ONCE = WORKERS / (V / 4), CLOSED = (ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;

// Operands and results of a unit, bytes from their start; two such sets.
constexpr int QUERY_KEY = 0;                              // [ROWS + ALL][K] float: queries, then keys
constexpr int GATES_VALUE = (ROWS + ALL) * K * 4;         // decays and betas [2][GATES], values [ALL][V]
constexpr int MIXED = GATES_VALUE + (2 * GATES + ALL * V) * 4;  // [ROWS][V] float
constexpr int SQUARES = MIXED + ROWS * V * 4;             // [ROWS][HEAD_WARPS]
constexpr int SET_BYTES = (SQUARES + ROWS * HEAD_WARPS * 4 + 15) / 16 * 16;

DEVICE float* state_of(const Arguments& a, int unit) {
  return a.state + (load_index(a.slots + unit / HEADS) * HEADS + unit % HEADS) * K * V;
}
DEVICE int accepted_of(const Arguments& a, int unit) { return rows_to_replay(load_index(a.pending + unit / HEADS)); }

// By one thread: what gdn_rows.cu has made of a unit.
DEVICE void request_set(const Arguments& a, int unit, int accepted, u32 to, u32 ready) {
  const int b = unit / HEADS, head = unit % HEADS, rows = accepted + ROWS;
  const long long key_head = (long long)b * KEY_HEADS + head / GROUP, value_head = (long long)b * HEADS + head;
  const int query_key = (ROWS + rows) * K * 4, gates_value = (2 * GATES + rows * V) * 4;
  barrier_expect(ready, query_key + gates_value);
  bulk_copy_kept(to + QUERY_KEY, a.query_key + key_head * (ROWS + ALL) * K, query_key, ready);
  bulk_copy_kept(to + GATES_VALUE, a.gates_value + value_head * (2 * GATES + ALL * V), gates_value, ready);
}

// A lane's place: its columns of the state, and those it closes, of several rows.
struct Place {
  int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, depth = lane / LANES;
  int own = warp * COLS + lane % LANES * 4, last = tid % (V / 4) * 4;
};

// state: this lane's columns of the first row.
DEVICE void load_state(Share& share, const u8* state, int depth) {
#pragma unroll
  for (int i = 0; i < QUADS * 4; i++) {
    const Four four = *(const Four*)(state + state_row(i, depth) * V * 4);
    share.m[i][0] = four.x, share.m[i][1] = four.y, share.m[i][2] = four.z, share.m[i][3] = four.w;
  }
}
DEVICE void store_row(u8* to, const float (&v)[4]) { *(Four*)to = Four{v[0], v[1], v[2], v[3]}; }
DEVICE void store_state(u8* state, const Share& share, int depth) {
#pragma unroll
  for (int i = 0; i < QUADS * 4; i++) store_row(state + state_row(i, depth) * V * 4, share.m[i]);
}

// The output's gates of the rows that this lane closes, requested long before they are wanted.
struct Gates {
  u64 z[CLOSED];

  DEVICE Gates(const Arguments& a, const Place& at, int b, int head) {
#pragma unroll
    for (int i = 0; i < CLOSED; i++) {
      const int row = min(at.tid / (V / 4) + i * ROWS_AT_ONCE, ROWS - 1);
      z[i] = load_global_u64(a.projected + ((long long)b * ROWS + row) * a.projected_stride + CHANNELS + head * V + at.last);
    }
  }
};

// A unit's rows in a set of shared memory.
struct Rows {
  const float *query, *key, *decay, *beta, *value;
  float *mixed, *squares;

  DEVICE Rows(u8* set, int own) {
    query = (const float*)(set + QUERY_KEY), key = query + ROWS * K;
    decay = (const float*)(set + GATES_VALUE), beta = decay + GATES, value = beta + GATES + own;
    mixed = (float*)(set + MIXED), squares = (float*)(set + SQUARES);
  }
  DEVICE void advance(Share& share, int t, int depth) const { share.advance(key + t * K, value + t * V, decay[t], beta[t], depth); }
  DEVICE void replay(Share& share, int accepted, int depth) const {
#pragma unroll 1
    for (int t = 0; t < accepted; t++) advance(share, t, depth);
  }
  DEVICE void read(Share& share, int accepted, const Place& at) const {
#pragma unroll 1
    for (int i = 0; i < ROWS; i++) {
      advance(share, accepted + i, at.depth);
      float o[4];
      const float square = share.read(o, query + i * K, at.depth);
      if (at.depth == 0) *(Four*)(mixed + i * V + at.own) = Four{o[0], o[1], o[2], o[3]};
      if (at.lane == 0) squares[i * HEAD_WARPS + at.warp] = square;
    }
  }
  // Behind a barrier of all WORKERS.
  DEVICE void close(const Arguments& a, const Gates& gates, u64 norm, const Place& at, int b, int head) const {
    u16* const out = a.out + ((long long)b * ROWS * HEADS + head) * V + at.last;
#pragma unroll
    for (int i = 0; i < CLOSED; i++) {
      const int row = at.tid / (V / 4) + i * ROWS_AT_ONCE;
      if (row < ROWS)
        close_four(out + (long long)row * HEADS * V, mixed + row * V + at.last, gates.z[i], norm,
                   head_scale(squares + row * HEAD_WARPS, a.eps));
    }
  }
};
