// Attention of a decode step's rows that keep all their positions, with the output gate. Rows that select are left alone.
// Source: qsa_attend.py, which has the operator; _attend.py states the plan that the macros below repeat.
//
// A unit is one key head of up to TILE rows of a sequence, which share what they read. A cluster has a unit, its blocks every
// CLUSTER-th piece of 64 positions. At the end each block sends its sums to those who join them, in the order of
// blocks: a block joins 32 dimensions of some query heads. Pieces and their order follow from a row's own position,
// and a piece in which a row keeps nothing changes none of its bits, so a row has the same ones alone and beside others.
//
// In a block a warp has 8 or 16 of a piece's positions for the scores, and 32 of the dimensions for the values. A first piece
// of earlier steps' keys and values is requested before the kernels before this one have ended.

#include "stream.cuh"
#include "e4m3.cuh"

// HEADS, KV_HEADS  query heads and key heads of a row
// DIM              values of a head
// RATIO, TOPK      positions of a block; blocks that a row may keep without selecting
// PAGE             positions of a page
// FP8              whether keys and values are E4M3
// TILE             most rows of a unit
// CLUSTER          blocks of a cluster; PER_SM  blocks of a multiprocessor
// OVER             whether what other blocks send lies over the pieces: they then wait for each other first

constexpr int PIECE = 64;
constexpr int WARPS = DIM / 32;
constexpr int THREADS = WARPS * 32;
constexpr int GROUP = HEADS / KV_HEADS;      // query heads that share a key head
constexpr int M = TILE * GROUP;              // rows of the products: query heads of the unit
constexpr int TILES = (M + 15) / 16;         // of the matrix unit
constexpr int SCORERS = TILES > 2 ? WARPS / 2 : WARPS;  // warps that score; each reads all queries, so fewer of many
constexpr int PARTS = PIECE / 8;             // 8-position parts of a piece
constexpr int NUMBERS = PARTS / SCORERS;     // of them, those that a warp scores
constexpr int BYTES = FP8 ? 1 : 2;           // of a cached value
// Rows lie so far apart that the lanes of a load meet every bank once.
constexpr int KEY_PITCH = DIM * BYTES + (FP8 ? 32 : 64);
constexpr int VALUE_PITCH = DIM * BYTES + 16;
constexpr int JOINED = (M + 7) / 8 * WARPS;             // 8 query heads' 32 dimensions each
constexpr int OWN = (JOINED + CLUSTER - 1) / CLUSTER;   // of them, those that a block joins
constexpr int TURNS = (OWN * 64 + THREADS - 1) / THREADS;  // of four dimensions a thread
constexpr int RECEIVED = CLUSTER * OWN * 1024;
constexpr int VALUES_AT = PIECE * KEY_PITCH;
constexpr int QUERIES_AT = VALUES_AT + PIECE * VALUE_PITCH;
constexpr int WEIGHTS_AT = QUERIES_AT + TILES * DIM * 32;  // both as matrix steps take them: 16 bytes a lane
constexpr int BARRIER_AT = WEIGHTS_AT + TILES * PIECE * 32;
constexpr int FLOATS_AT = BARRIER_AT + 16;
constexpr int FLOATS_END = FLOATS_AT + ((2 * PARTS + 2 * CLUSTER) * M * 4 + 15) / 16 * 16;
constexpr int RECEIVED_AT = OVER ? 0 : FLOATS_END;
static_assert(FLOATS_END + (OVER ? 0 : RECEIVED) == SHARED_BYTES && (!OVER || RECEIVED <= QUERIES_AT), "plan");
static_assert(DIM % 32 == 0 && NUMBERS * SCORERS * 8 == PIECE && (NUMBERS == 1 || NUMBERS % 2 == 0) && PIECE <= THREADS, "plan");
static_assert(M <= THREADS, "plan");

struct Arguments {
  const u16* q;     // [sequence][row][HEADS][DIM]
  const u16* gate;  // as q
  const long long* slots;
  const long long* first;
  const u8* keys;  // [page][PAGE][KV_HEADS][DIM]
  const u8* values;
  const long long* page_table;  // [slot][pages]
  u16* out;                     // as q
  int sequences, rows, pages;
  float scale;  // of a score, times log2(e): weights are powers of two
};

constexpr u32 NONE = 0xff800000u;  // minus infinity

// What scores are taken from: not minus infinity, of which a query head that keeps nothing so far has only scores.
DEVICE float finite(float largest) { return largest == __uint_as_float(NONE) ? 0.f : largest; }

// Two codes, the upper bytes of both halves, as a pair of bf16; the lower bytes count nothing.
DEVICE u32 widen_pair(u32 codes) {
  return multiply_pair(mask_or(codes >> 4, 0x07f007f0u, codes & 0x80008000u), E4M3_POWER);
}

// What a unit attends to.
struct Unit {
  int sequence, kv, row, count;  // rows row ... row + count - 1, which keep all positions up to their own; none if 0
  int before;                    // positions that earlier steps wrote
  int kept;                      // positions that the last row keeps
  const long long* page_table;   // of the sequence

  DEVICE Unit(const Arguments& a, int number) {
    const int of_tile = a.sequences * KV_HEADS;
    row = number / of_tile * TILE;
    sequence = number % of_tile / KV_HEADS;
    kv = number % KV_HEADS;
    before = (int)load_global_u64(a.first + sequence);
    page_table = a.page_table + load_global_u64(a.slots + sequence) * a.pages;
    const int fewer = (TOPK + 1) * RATIO - 1;  // the first position that has more than TOPK complete blocks
    count = max(0, min(min(TILE, a.rows - row), fewer - before - row));
    kept = before + row + count;
  }

  // How many positions query head m keeps.
  DEVICE int kept_by(int m) const {
    const int of = m / GROUP;
    return of < count ? kept - (count - 1 - of) : 0;
  }

  // Where position j lies in the cache; past the last one, where that lies.
  DEVICE u32 place(const Arguments& a, int j) const {
    j = min(j, kept - 1);
    return (u32)load_global_u64(page_table + min(j / PAGE, a.pages - 1)) * PAGE + j % PAGE;
  }
};

// Requests one piece of keys or values: a warp PIECE / WARPS of its rows from first_row on, a lane 16 bytes of each.
DEVICE void request(u32 to, int pitch, const u8* from, int kv, u32 places, int first_row) {
  constexpr int PARTS = DIM * BYTES / 16, AT_ONCE = PARTS < 32 ? 32 / PARTS : 1;
  static_assert(PARTS <= 32, "a row of a head has more bytes than a warp copies at once");
  const int lane = threadIdx.x % 32, part = lane % PARTS, among = lane / PARTS;
#pragma unroll
  for (int i = 0; i < PIECE / WARPS; i += AT_ONCE) {
    const u32 place = from_lane(places, i + among);
    copy16(to + (first_row + i + among) * pitch + part * 16, from + ((u64)place * KV_HEADS + kv) * (DIM * BYTES) + part * 16);
  }
}

// Of a warp's positions, for all query heads: what keys and queries give, of every 8 positions and tile.
DEVICE void score(float (&scores)[NUMBERS][TILES][4], u32 key_tile, u32 queries) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int s = 0; s < DIM / 32; s++) {
    Words k[NUMBERS];
#pragma unroll
    for (int n = 0; n < NUMBERS; n++) {
      const u32 at = key_tile + ((warp * NUMBERS + n) * 8 + g) * KEY_PITCH + (s * 32 + t * 8) * BYTES;
      if constexpr (FP8) {
        const Pair codes = load_shared_pair(at);
        k[n] = {widen_pair(__byte_perm(codes.x, 0, 0x1000)), widen_pair(__byte_perm(codes.x, 0, 0x3020)),
                widen_pair(__byte_perm(codes.y, 0, 0x1000)), widen_pair(__byte_perm(codes.y, 0, 0x3020))};
      } else {
        k[n] = load_shared(at);
      }
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const u32 at = queries + ((i * WARPS + s) * 64 + lane) * 16;
      const Words q = load_shared(at), then = load_shared(at + 512);
#pragma unroll
      for (int n = 0; n < NUMBERS; n++) matrix_step(scores[n][i], q.x, q.y, q.z, q.w, k[n].x, k[n].y);
#pragma unroll
      for (int n = 0; n < NUMBERS; n++) matrix_step(scores[n][i], then.x, then.y, then.z, then.w, k[n].z, k[n].w);
    }
  }
}

// Scales them, for powers of two; positions that a query head does not keep get none. Notes the largest of every 8.
DEVICE void limit(float (&scores)[NUMBERS][TILES][4], const Unit& unit, int piece, float scale, float* part_max) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int m = i * 16 + half * 8 + g;
      const int kept = unit.kept_by(min(m, M - 1)) - piece * PIECE;
#pragma unroll
      for (int n = 0; n < NUMBERS; n++) {
        const int column = (warp * NUMBERS + n) * 8 + 2 * t;
        float* pair = scores[n][i] + 2 * half;
        pair[0] = column < kept ? pair[0] * scale : __uint_as_float(NONE);
        pair[1] = column + 1 < kept ? pair[1] * scale : __uint_as_float(NONE);
        float largest = fmaxf(pair[0], pair[1]);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        if (t == 0 && m < M) part_max[(warp * NUMBERS + n) * M + m] = largest;
      }
    }
  }
}

// Scores to weights, in bf16 as matrix steps take them, and of every 8 their sum, not rounded.
DEVICE void weigh(const float (&scores)[NUMBERS][TILES][4], const float (&most)[TILES][2], float* part_sum, u32 weights) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    u32 pair[NUMBERS][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int m = i * 16 + half * 8 + g;
      const float from = finite(most[i][half]);
#pragma unroll
      for (int n = 0; n < NUMBERS; n++) {
        const float low = power_of_two(scores[n][i][2 * half] - from), high = power_of_two(scores[n][i][2 * half + 1] - from);
        float sum = low + high;
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (t == 0 && m < M) part_sum[(warp * NUMBERS + n) * M + m] = sum;
        pair[n][half] = to_pair(low, high);
      }
    }
    // of a step's 16 positions, the lower half first
    const u32 to = weights + (i * (PIECE / 16) * 32 + lane) * 16;
    if constexpr (NUMBERS % 2 == 0) {
#pragma unroll
      for (int n = 0; n < NUMBERS; n += 2)
        store_shared(to + (warp * NUMBERS + n) / 2 * 512, {pair[n][0], pair[n][1], pair[n + 1][0], pair[n + 1][1]});
    } else {
      store_shared_pair(to + warp / 2 * 512 + warp % 2 * 8, {pair[0][0], pair[0][1]});
    }
  }
}

// Adds a piece's values, weighed, to a warp's dimensions.
DEVICE void add_values(float (&sums)[TILES][4][4], u32 value_tile, u32 weights) {
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
  for (int s = 0; s < PIECE / 16; s++) {
    // Of 4 dimensions at 4 positions: the pairs of positions that a step takes, for a step of each dimension.
    u32 v[2][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 at = value_tile + (s * 16 + half * 8 + 2 * t) * VALUE_PITCH;
      if constexpr (FP8) {
        const u32 even = load_shared_word(at), odd = load_shared_word(at + VALUE_PITCH);
        v[half][0] = widen_pair(__byte_perm(even, odd, 0x4404));
        v[half][1] = widen_pair(__byte_perm(even, odd, 0x5515));
        v[half][2] = widen_pair(__byte_perm(even, odd, 0x6626));
        v[half][3] = widen_pair(__byte_perm(even, odd, 0x7737));
      } else {
        const Pair even = load_shared_pair(at), odd = load_shared_pair(at + VALUE_PITCH);
        v[half][0] = __byte_perm(even.x, odd.x, 0x5410);
        v[half][1] = __byte_perm(even.x, odd.x, 0x7632);
        v[half][2] = __byte_perm(even.y, odd.y, 0x5410);
        v[half][3] = __byte_perm(even.y, odd.y, 0x7632);
      }
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const Words p = load_shared(weights + ((i * (PIECE / 16) + s) * 32 + lane) * 16);
#pragma unroll
      for (int j = 0; j < 4; j++) matrix_step(sums[i][j], p.x, p.y, p.z, p.w, v[0][j], v[1][j]);
    }
  }
}

// Sends a block's sums to those who join them, and what it took them from and their weights' sums to all.
DEVICE void send(const float (&sums)[TILES][4][4], float own_most, float own_sum, int rank, u32 received, u32 arrived, float* all_max,
                 float* all_sum) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int m = i * 16 + half * 8 + g, part = (2 * i + half) * WARPS + warp, to = part % CLUSTER;
      if (m >= M) continue;
      const u32 remote = peer_address(received + ((rank * OWN + part / CLUSTER) * 8 + g) * 128 + t * 16, to);
      const u32 counted = peer_address(arrived, to);
#pragma unroll
      for (int column = 0; column < 2; column++) {
        const int of = 2 * half + column;
        const float four[4] = {sums[i][0][of], sums[i][1][of], sums[i][2][of], sums[i][3][of]};
        send_peer(remote + column * 64, four, counted);
      }
    }
  }
  if (threadIdx.x < M) {
    const float largest[1] = {own_most}, sum[1] = {own_sum};
#pragma unroll
    for (int to = 0; to < CLUSTER; to++) {
      const u32 counted = peer_address(arrived, to);
      send_peer(peer_address(shared_address(all_max + rank * M + threadIdx.x), to), largest, counted);
      send_peer(peer_address(shared_address(all_sum + rank * M + threadIdx.x), to), sum, counted);
    }
  }
}

// The block's own share of the result, four dimensions a thread and turn, once all that is sent has arrived. `head` is the unit's
// first query head, `count` its rows.
DEVICE void join(const Arguments& a, u64 head, int count, int rank, u32 arrived, int parity, const u8* received, const float* all_max,
                 const float* all_sum) {
  auto part_of = [&](int turn) { return (turn * THREADS + threadIdx.x) / 64 * CLUSTER + rank; };
  auto head_of = [&](int turn) { return part_of(turn) / WARPS * 8 + threadIdx.x % 64 / 8; };
  auto place_of = [&](int turn) {
    const int m = head_of(turn), dimension = part_of(turn) % WARPS * 32 + threadIdx.x % 4 * 8 + threadIdx.x % 8 / 4 * 4;
    return (head + m / GROUP * HEADS + m % GROUP) * DIM + dimension;
  };
  auto live = [&](int turn) { return part_of(turn) < JOINED && head_of(turn) < count * GROUP; };
  u64 gates[TURNS];
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) gates[turn] = live(turn) ? load_global_u64(a.gate + place_of(turn)) : 0;
  barrier_wait_cluster(arrived, parity);
  __syncwarp();
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    if (!live(turn)) continue;
    const int m = head_of(turn), four = turn * THREADS + threadIdx.x;
    float largest = __uint_as_float(NONE);
#pragma unroll
    for (int from = 0; from < CLUSTER; from++) largest = fmaxf(largest, all_max[from * M + m]);
    float sum = 0.f, joined[4] = {};
#pragma unroll
    for (int from = 0; from < CLUSTER; from++) {
      const float worth = power_of_two(all_max[from * M + m] - largest);  // 0 of a block in which it keeps nothing
      const float4 part = *(const float4*)(received + from * OWN * 1024 + four * 16);
      sum += all_sum[from * M + m] * worth;
      joined[0] += part.x * worth;
      joined[1] += part.y * worth;
      joined[2] += part.z * worth;
      joined[3] += part.w * worth;
    }
    const float whole = 1.f / sum;
    u32 pair[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 bits = (u32)(gates[turn] >> 32 * j);
      const u32 opened = to_pair(short_sigmoid(lower(bits)), short_sigmoid(upper(bits)));
      pair[j] = multiply_pair(to_pair(joined[2 * j] * whole, joined[2 * j + 1] * whole), opened);
    }
    *(u64*)(a.out + place_of(turn)) = (u64)pair[1] << 32 | pair[0];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) qsa_attend_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % CLUSTER;
  const u32 key_tile = shared_address(shared), value_tile = key_tile + VALUES_AT;
  const u32 queries = key_tile + QUERIES_AT, weights = key_tile + WEIGHTS_AT;
  const u32 received = key_tile + RECEIVED_AT, arrived = key_tile + BARRIER_AT;
  float* const part_max = (float*)(shared + FLOATS_AT);  // [part][M]
  float* const part_sum = part_max + PARTS * M;
  float* const all_max = part_sum + PARTS * M;  // [block of the cluster][M]
  float* const all_sum = all_max + CLUSTER * M;
  constexpr int OWN_ROWS = PIECE / WARPS;
  const int units = a.sequences * KV_HEADS * ((a.rows + TILE - 1) / TILE), step = gridDim.x / CLUSTER;
  u32 expected = CLUSTER * M * 8;  // bytes that this block receives for a unit
  for (int part = rank; part < JOINED; part += CLUSTER) expected += CLUSTER * min(8, M - part / WARPS * 8) * 128;
  int parity = 0;
  bool met = false;  // the other blocks have started
  if (threadIdx.x == 0) {
    barrier_init(arrived, 1);
    barrier_init_done();
    barrier_expect(arrived, expected);
  }
  cluster_arrive_at_once();
#pragma unroll 1
  for (int number = blockIdx.x / CLUSTER; number < units; number += step) {
    const Unit unit(a, number);
    if (unit.count == 0) continue;
    const int pieces = (unit.kept + PIECE - 1) / PIECE;
    const u64 head = ((u64)unit.sequence * a.rows + unit.row) * HEADS + unit.kv * GROUP;  // of the first row

    auto places_of = [&](int piece) { return unit.place(a, piece * PIECE + warp * OWN_ROWS + lane % OWN_ROWS); };
    auto request_keys = [&](u32 places) { request(key_tile, KEY_PITCH, a.keys, unit.kv, places, warp * OWN_ROWS); };
    auto request_values = [&](u32 places) { request(value_tile, VALUE_PITCH, a.values, unit.kv, places, warp * OWN_ROWS); };
    u32 places = rank < pieces ? places_of(rank) : 0;
    if ((rank + 1) * PIECE > unit.before) wait_for_predecessor();  // positions of this step
    if (rank < pieces) {
      request_keys(places);
      copies_commit();
      request_values(places);
      copies_commit();
    }
    wait_for_predecessor();
    launch_dependents();  // not before: see moe_gate_up.cu
    if (rank < pieces) {
      // A lane's 8 dimensions of 32 are operands of two steps, for queries and keys alike.
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        auto eight = [&](int m) {
          m = min(m, unit.count * GROUP - 1);  // past the last query head it is repeated: nobody stores what comes of it
          return load_global(a.q + (head + m / GROUP * HEADS + m % GROUP) * DIM + warp * 32 + t * 8);
        };
        const Words low = eight(i * 16 + g), high = eight(i * 16 + g + 8);
        const u32 to = queries + ((i * WARPS + warp) * 64 + lane) * 16;
        store_shared(to, {low.x, high.x, low.y, high.y});
        store_shared(to + 512, {low.z, high.z, low.w, high.w});
      }
    }

    float sums[TILES][4][4] = {};  // of dimensions 32 warp + 8 t + 4 half + i: [tile][i], two rows of two halves
    float most[TILES][2], fade[TILES][2];  // of the same rows: the largest score so far, what sums so far are worth
#pragma unroll
    for (int i = 0; i < TILES; i++) most[i][0] = most[i][1] = __uint_as_float(NONE);
    float own_most = __uint_as_float(NONE), own_sum = 0.f;  // of query head threadIdx.x
#pragma unroll 1
    for (int piece = rank; piece < pieces; piece += CLUSTER) {
      const bool another = piece + CLUSTER < pieces;
      copies_wait<1>();
      __syncthreads();  // keys are there
      if (another) places = places_of(piece + CLUSTER);
      float scores[NUMBERS][TILES][4] = {};
      if (warp < SCORERS) {
        score(scores, key_tile, queries);
        limit(scores, unit, piece, a.scale, part_max);
      }
      __syncthreads();  // keys are read, values of the piece before too
      if (another) request_keys(places);
      copies_commit();
      float own_fade = 1.f;
      if (threadIdx.x < M) {
        float largest = own_most;
#pragma unroll
        for (int n = 0; n < PARTS; n++) largest = fmaxf(largest, part_max[n * M + threadIdx.x]);
        own_fade = power_of_two(own_most - finite(largest));
        own_most = largest;
      }
#pragma unroll
      for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int m = min(i * 16 + half * 8 + g, M - 1);
          float largest = fmaxf(part_max[t * M + m], part_max[(t + 4) * M + m]);
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
          largest = fmaxf(most[i][half], fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)));
          fade[i][half] = power_of_two(most[i][half] - finite(largest));
          most[i][half] = largest;
        }
      }
      if (warp < SCORERS) {
        weigh(scores, most, part_sum, weights);
      }
      copies_wait<1>();  // values of this piece; the keys of the next one are on their way
      __syncthreads();
      if (threadIdx.x < M) {
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < PARTS; n++) sum += part_sum[n * M + threadIdx.x];
        own_sum = own_sum * own_fade + sum;
      }
#pragma unroll
      for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
          for (int of = 0; of < 4; of++) sums[i][j][of] *= fade[i][of / 2];
        }
      }
      add_values(sums, value_tile + (warp * 32 + g * 4) * BYTES, weights);
      __syncthreads();  // values are read
      if (another) request_values(places);
      copies_commit();
    }

    if (OVER) {
      if (!met) cluster_wait();
      cluster_sync();  // all pieces are read
    } else if (!met) {
      cluster_wait();
    }
    met = true;
    send(sums, own_most, own_sum, rank, received, arrived, all_max, all_sum);

    join(a, head, unit.count, rank, arrived, parity, shared + RECEIVED_AT, all_max, all_sum);
    if (number + step < units) {
      if (threadIdx.x == 0) barrier_expect(arrived, expected);
      cluster_sync();  // the others may send again
      parity ^= 1;
    }
  }
  wait_for_predecessor();  // who had nothing to do too: the next kernel relies on this one for those before it
  if (!met) cluster_wait();
}
