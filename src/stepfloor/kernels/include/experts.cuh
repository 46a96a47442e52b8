// What the routed experts' kernels share: FP4 decoding into the 16-row operand, and the list of experts that rows chose.
// Source: NVFP4 (FP4 codes, an E4M3 scale for 16 columns of a row); _experts.py writes the bytes read here.
//
// A step is 64 columns of 16 weight rows: 512 bytes of codes, 16 a lane, and 64 bytes of scales, 4 for two lanes. Lane
// (g, t) owns columns 8t .. 8t + 7 of each 32, of rows g and g + 8, as in linear.cu: two words of codes for a row.
//
// Codes become bf16 by moving bits: sign to the sign, the other three to the lowest exponent bits and the highest mantissa
// bit, which is code * 2^-126. Scales are kept as the lower 5 exponent and the upper 3 mantissa bits of bf16; 2^119 goes in
// with the scale, and SCALE_REST with the tensor's scale on the sums. Every product of code and scale has at most 6
// significant bits: exact.
#pragma once

constexpr float SCALE_REST = 128.f;

// Word 0 or 1 of a row's two: its 8 codes. Each bit of the two is where a rotation brings it into place for two codes. No
// four of the patterns {15, 8, 7, 6} tile 16 bits, so three pairs are a word's own, and the fourth ones of both come from
// what both leave over, joined. The low half of a pair is the even column. _experts.py has the places.
template <int WORD> DEVICE void decode_eight(u32 first, u32 second, u32 scale, u32 (&pairs)[4]) {
  constexpr u32 PATTERN = 0x81c081c0u, FROM_FIRST = 0x60306030u;
  const u32 joined = select_bits(first, second, FROM_FIRST);
  if constexpr (WORD == 0) {
    pairs[0] = first & PATTERN;
    pairs[1] = (first << 6) & PATTERN;
    pairs[2] = rotate_left(first, 12) & PATTERN;
    pairs[3] = (joined << 4) & PATTERN;
  } else {
    pairs[0] = (second << 2) & PATTERN;
    pairs[1] = rotate_left(second, 8) & PATTERN;
    pairs[2] = rotate_left(second, 14) & PATTERN;
    pairs[3] = rotate_left(joined, 10) & PATTERN;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) pairs[i] = multiply_pair(pairs[i], scale);
}

constexpr u32 SCALE_BASE = 0x70007000u;  // 2^97: exponent bits that all scales share

DEVICE u32 decode_scale(u32 scales, int index) { return spread_byte(scales, index) * 16u + SCALE_BASE; }

// Row g, its lower and upper 32 columns, then row g + 8, as bf16 pairs. scales: bytes of row g from bits 4 and 20, those of
// row g + 8 from bits 12 and 28.
struct Decoded {
  u32 top_lower[4], top_upper[4], bottom_lower[4], bottom_upper[4];
};
DEVICE Decoded decode_step(const Words& codes, u32 scales) {
  const u32 top = mask_or(scales, 0x0ff00ff0u, SCALE_BASE), bottom = mask_or(rotate_left(scales, 24), 0x0ff00ff0u, SCALE_BASE);
  Decoded d;
  decode_eight<0>(codes.x, codes.y, twice_lower(top), d.top_lower);
  decode_eight<1>(codes.x, codes.y, twice_upper(top), d.top_upper);
  decode_eight<0>(codes.z, codes.w, twice_lower(bottom), d.bottom_lower);
  decode_eight<1>(codes.z, codes.w, twice_upper(bottom), d.bottom_upper);
  return d;
}

// One step; lower, upper: this lane's columns of a row of the 8-wide operand.
DEVICE void expert_step(float (&even)[4], float (&odd)[4], const Words& codes, u32 scales, const Words& lower, const Words& upper) {
  const Decoded d = decode_step(codes, scales);
  matrix_step(even, d.top_lower[0], d.bottom_lower[0], d.top_lower[1], d.bottom_lower[1], lower.x, lower.y);
  matrix_step(odd, d.top_lower[2], d.bottom_lower[2], d.top_lower[3], d.bottom_lower[3], lower.z, lower.w);
  matrix_step(even, d.top_upper[0], d.bottom_upper[0], d.top_upper[1], d.bottom_upper[1], upper.x, upper.y);
  matrix_step(odd, d.top_upper[2], d.bottom_upper[2], d.top_upper[3], d.bottom_upper[3], upper.z, upper.w);
}

// Zero beyond the last column: the weight is zero there, but zero times NaN is not. No branch around the load.
template <int LIMIT> DEVICE Words load_columns(const u16* row, int column) {
  Words v = load_global(row + (column < LIMIT ? column : 0));
  if (column >= LIMIT) v.x = v.y = v.z = v.w = 0;
  return v;
}

// The distinct experts of all rows, ascending but for a single row, each with up to MOST_PAIRS of the pairs (row * choices of a row + choice)
// that chose it; an expert with more has several entries. The same in every block. A row's experts must differ from each other.
template <int EXPERT_COUNT, int CHOICES, int MOST_ROWS, int MOST_PAIRS, int BLOCK_THREADS> struct ExpertList {
  static constexpr int WORDS = (MOST_ROWS + 31) / 32;
  static constexpr int PAIRS = MOST_ROWS * CHOICES;
  static constexpr int RUN = (EXPERT_COUNT + BLOCK_THREADS - 1) / BLOCK_THREADS;
  static constexpr int HELD = (PAIRS + BLOCK_THREADS - 1) / BLOCK_THREADS;
  u32 rows_of[EXPERT_COUNT * WORDS];  // bit: row
  u32 totals[31];
  u32 number;                    // of entries
  u32 entries[PAIRS];            // expert, and pairs in the upper half
  u16 first[EXPERT_COUNT];       // entry of an expert's first pairs
  u16 chosen[PAIRS];             // expert of a pair
  u16 pair[PAIRS * MOST_PAIRS];  // of an entry

  static DEVICE int expert_of(u32 entry) { return entry & 0xffff; }
  static DEVICE int count_of(u32 entry) { return entry >> 16; }

  // The threads that build the list are the block's first ones; others wait for them.
  static DEVICE void sync() { named_barrier_sync(15, BLOCK_THREADS); }

  // Before the first ids are read; build() synchronises.
  DEVICE void clear() {
    if (MOST_ROWS == 1) return;
    for (int i = threadIdx.x; i < EXPERT_COUNT * WORDS; i += BLOCK_THREADS) rows_of[i] = 0;
  }

  DEVICE int routed(int e) const {
    int n = 0;
#pragma unroll
    for (int i = 0; i < WORDS; i++) n += __popc(rows_of[e * WORDS + i]);
    return n;
  }

  // ready: a barrier of BLOCK_THREADS arrivals for others, who wait for the entries alone; or 0. Returns the number of
  // entries, which may be read afterwards. The caller synchronises before pairs are read.
  DEVICE int build(const long long* ids, int rows, u32 ready = 0) {
    if constexpr (MOST_ROWS == 1) {  // every choice is an entry
      static_assert(CHOICES <= BLOCK_THREADS, "list");
      const int j = threadIdx.x;
      if (j < CHOICES) {
        const u32 id = (u32)load_global_u64(ids + j);
        chosen[j] = id < EXPERT_COUNT ? id : EXPERT_COUNT - 1;
        entries[j] = chosen[j] | 1 << 16;
        pair[j * MOST_PAIRS] = j;
      }
      if (j == 0) number = CHOICES;
      if (ready) barrier_arrive(ready);
      sync();
      return CHOICES;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = rows * CHOICES;
    int mine[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const u32 id = (u32)load_global_u64(ids + min((int)threadIdx.x + i * BLOCK_THREADS, pairs - 1));
      mine[i] = id < EXPERT_COUNT ? id : EXPERT_COUNT - 1;
    }
    sync();
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const int p = threadIdx.x + i * BLOCK_THREADS, row = p / CHOICES;
      if (p >= pairs) continue;
      chosen[p] = mine[i];
      atomicOr(&rows_of[mine[i] * WORDS + row / 32], 1u << (row % 32));
    }
    sync();
    int needed = 0;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
      const int e = threadIdx.x * RUN + i;
      if (e < EXPERT_COUNT) needed += (routed(e) + MOST_PAIRS - 1) / MOST_PAIRS;
    }
    int sum = needed;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) totals[warp] = sum;
    sync();
    int at = sum - needed, all = 0;
#pragma unroll
    for (int i = 0; i < BLOCK_THREADS / 32; i++) {
      if (i < warp) at += totals[i];
      all += totals[i];
    }
    if (threadIdx.x == 0) number = all;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
      const int e = threadIdx.x * RUN + i;
      if (e >= EXPERT_COUNT) break;
      first[e] = at;
      for (int left = routed(e); left > 0; left -= MOST_PAIRS, at++) entries[at] = e | min(left, MOST_PAIRS) << 16;
    }
    if (ready) barrier_arrive(ready);
    sync();
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const int p = threadIdx.x + i * BLOCK_THREADS, row = p / CHOICES;
      if (p >= pairs) continue;
      int place = 0;  // how many rows before this one chose the same expert
#pragma unroll
      for (int word = 0; word < WORDS; word++) {
        const u32 others = rows_of[mine[i] * WORDS + word];
        if (word < row / 32) place += __popc(others);
        if (word == row / 32) place += __popc(others & ((1u << (row % 32)) - 1));
      }
      pair[(first[mine[i]] + place / MOST_PAIRS) * MOST_PAIRS + place % MOST_PAIRS] = p;
    }
    return all;
  }
};

// What a block does of UNITS units for each entry of the list: a run of neighbours, or every so-manieth as there are blocks.
template <int UNITS, bool NEIGHBOURS> struct BlockUnits {
  int entry, unit, left;

  DEVICE BlockUnits(int entries) {
    const u32 all = entries * UNITS;
    u32 first = blockIdx.x;
    if (NEIGHBOURS) {
      const u32 each = all / gridDim.x, more = all - each * gridDim.x;
      left = each + (first < more);
      first = first * each + (first < more ? first : more);
    } else {
      left = all > first ? (all - first - 1) / gridDim.x + 1 : 0;
    }
    entry = first / UNITS;
    unit = first % UNITS;
  }
  DEVICE void advance() {
    left--;
    unit += NEIGHBOURS ? 1 : gridDim.x % UNITS;
    if (!NEIGHBOURS) entry += gridDim.x / UNITS;
    if (unit >= UNITS) {
      unit -= UNITS;
      entry++;
    }
  }
};

// Barriers of a ring that one warp fills and others read, an arrival of each of these when it has read a slot.
DEVICE void make_ring(u32 full, u32 empty, int slots, int readers) {
  for (int i = 0; i < slots; i++) {
    barrier_init(full + 8 * i, 1);
    barrier_init(empty + 8 * i, readers);
  }
}

// The first entries of the list in ascending order, found by one warp from the ids alone, before the others have built it.
template <int EXPERT_COUNT, int CHOICES, int MOST_ROWS, int MOST_PAIRS> struct FirstEntries {
  static constexpr int HELD = (MOST_ROWS * CHOICES + 31) / 32;
  u32 held[HELD];  // experts of this lane's pairs
  u32 expert;      // of entries at .. at + number - 1
  int at, number;

  DEVICE void start(const long long* ids, int rows) {
    const int lane = threadIdx.x % 32, pairs = rows * CHOICES;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const int p = lane + i * 32;
      const u32 id = (u32)load_global_u64(ids + min(p, pairs - 1));
      held[i] = p >= pairs ? ~0u : id < EXPERT_COUNT ? id : EXPERT_COUNT - 1;
    }
    at = number = 0;
    expert = ~0u;
  }

  // The expert of an entry at or after the last one asked for; none where the list is shorter.
  DEVICE u32 find(int entry) {
    if constexpr (MOST_ROWS == 1) {  // in the order of the choices
      static_assert(HELD == 1, "list");
      return entry < CHOICES ? from_lane(held[0], entry) : ~0u;
    }
#pragma unroll 1
    while (at + number <= entry) {
      u32 least = ~0u;
#pragma unroll
      for (int i = 0; i < HELD; i++)
        if (held[i] != ~0u && (at + number == 0 || held[i] > expert)) least = held[i] < least ? held[i] : least;
      expert = warp_min(least);
      if (expert == ~0u) return expert;
      int pairs = 0;
#pragma unroll
      for (int i = 0; i < HELD; i++) pairs += held[i] == expert;
      at += number;
      number = (warp_add(pairs) + MOST_PAIRS - 1) / MOST_PAIRS;
    }
    return expert;
  }
};
