// The first of two kernels of a decode step with many sequences: what the delta rule takes of every pending and new row.
// Convolution and silu, unit norms, decay and beta, each once; gdn_state.cu or gdn_state_ring.cu goes on from there. Source: gdn_decode.py.
//
// A warp has a head of q, k or v of one sequence, a lane K / 32 neighbouring channels of it (V / 32), all rows. It alone reads
// and rewrites them among the kept rows, so nothing is exchanged but the sum of a norm and nobody waits for anybody.

#include "delta.cuh"
#include "delta_rule.cuh"
#include "delta_split.cuh"

// SETTLED  whether slots, pending and kept rows may be read before the predecessor has ended, as gdn_decode.cu says of its
//          EARLY 2; pending rows are convolved then too, but nothing is written

constexpr int WARPS = 4, THREADS = WARPS * 32;
constexpr int UNITS = 2 * KEY_HEADS + HEADS;  // of a sequence

// COUNT neighbouring bf16 of a row, aligned to their size.
template <int COUNT> struct Piece {
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4 || COUNT == 8, "one load");
  u32 words[COUNT > 1 ? COUNT / 2 : 1];

  DEVICE void load(const u16* from) {
    if constexpr (COUNT == 1) words[0] = load_half(from);
    if constexpr (COUNT == 2) words[0] = load_global_word(from);
    if constexpr (COUNT == 4) {
      const u64 both = load_global_u64(from);
      words[0] = (u32)both, words[1] = (u32)(both >> 32);
    }
    if constexpr (COUNT == 8) {
      const Words four = load_global(from);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    }
  }
  DEVICE void store(u16* to) const {
    if constexpr (COUNT == 1) *to = (u16)words[0];
    if constexpr (COUNT == 2) *(u32*)to = words[0];
    if constexpr (COUNT == 4) *(u64*)to = words[0] | (u64)words[1] << 32;
    if constexpr (COUNT == 8) store_words(to, Words{words[0], words[1], words[2], words[3]});
  }
  DEVICE float at(int i) const { return i % 2 ? high_half(words[i / 2]) : low_half(words[i / 2]); }
};

enum Kind { QUERY, KEY, VALUE };

template <int COUNT> DEVICE void store_floats(float* to, const float (&v)[COUNT]) {
#pragma unroll
  for (int c = 0; c < COUNT; c += COUNT < 4 ? 1 : 4) {
    if constexpr (COUNT < 4) to[c] = v[c];
    else *(Four*)(to + c) = Four{v[c], v[c + 1], v[c + 2], v[c + 3]};
  }
}

// All rows of a head, of WIDTH channels from `channel` on, of sequence b. Row t of its results goes to `to` + t WIDTH; of a
// value head decays and betas to `gates`.
template <int WIDTH, Kind KIND>
DEVICE void head_rows(const Arguments& a, int b, int head, int channel, float* to, float* gates_to) {
  constexpr int COUNT = WIDTH / 32;
  using Row = Piece<COUNT>;
  const int lane = threadIdx.x % 32;
  channel += lane * COUNT;
  to += lane * COUNT;
  float taps[COUNT][TAPS];
#pragma unroll
  for (int c = 0; c < COUNT; c++) load_four(taps[c], a.conv_weight + (long long)(channel + c) * TAPS);
  const float rate = KIND == VALUE ? expf(a.a_log[head]) : 0, bias = KIND == VALUE ? a.dt_bias[head] : 0;

  const auto mix = [&](float (&v)[COUNT], const Row (&window)[TAPS]) {
#pragma unroll
    for (int c = 0; c < COUNT; c++) {
      const float w[TAPS] = {window[0].at(c), window[1].at(c), window[2].at(c), window[3].at(c)};
      v[c] = convolved(w, taps[c]);
    }
    if constexpr (KIND != VALUE) {
      const float scale = unit_scale(v);
#pragma unroll
      for (int c = 0; c < COUNT; c++) v[c] = KIND == KEY ? unit_key(v[c], scale) : unit_query(v[c], scale);
    }
  };
  const auto shift = [](Row (&window)[TAPS]) {
#pragma unroll
    for (int i = 0; i < HISTORY; i++) window[i] = window[i + 1];
  };

  if (!SETTLED) wait_for_predecessor();
  const long long slot = load_index(a.slots + b);
  const int accepted = rows_to_replay(load_index(a.pending + b));
  u16* const raw = a.raw_rows + slot * (HISTORY + KEPT) * CHANNELS + channel;
  Row window[TAPS], kept[KEPT];
#pragma unroll
  for (int i = 0; i < HISTORY; i++) window[i].load(raw + i * CHANNELS);
#pragma unroll
  for (int t = 0; t < KEPT; t++) kept[t].load(raw + (HISTORY + t) * CHANNELS);  // those past `accepted` are not looked at
  // lane t has the gates of row t
  u16 gate_b = 0, gate_a = 0;
  if (KIND == VALUE && lane < accepted) {
    const u16* const gates = a.gate_rows + (slot * KEPT + lane) * 2 * HEADS + head;
    gate_b = load_half(gates);
    gate_a = load_half(gates + HEADS);
  }
  float replayed[KEPT][COUNT];
#pragma unroll
  for (int t = 0; t < KEPT; t++) {
    if (t < accepted) {
      window[HISTORY] = kept[t];
      if (KIND != QUERY) mix(replayed[t], window);
      shift(window);
    }
  }
  if (SETTLED) wait_for_predecessor();

  const u16* const projected = a.projected + (long long)b * ROWS * a.projected_stride;
  Row fresh[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) fresh[i].load(projected + i * a.projected_stride + channel);
  const int mine = lane - accepted;  // which of the new rows' gates
  if (KIND == VALUE && mine >= 0 && mine < ROWS) {
    const u16* const gates = projected + mine * a.projected_stride + CHANNELS + HEADS * V + head;
    gate_b = load_half(gates);
    gate_a = load_half(gates + HEADS);
  }
  if (KIND != QUERY) {
#pragma unroll
    for (int t = 0; t < KEPT; t++)
      if (t < accepted) store_floats(to + t * WIDTH, replayed[t]);
    to += accepted * WIDTH;
  }
  if (accepted) {
#pragma unroll
    for (int i = 0; i < HISTORY; i++) window[i].store(raw + i * CHANNELS);
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    fresh[i].store(raw + (HISTORY + i) * CHANNELS);
    window[HISTORY] = fresh[i];
    float v[COUNT];
    mix(v, window);
    store_floats(to + i * WIDTH, v);
    shift(window);
  }
  if (KIND == VALUE) {
    if (lane < accepted + ROWS) {
      gates_to[lane] = decay_of(gate_a, bias, rate);
      gates_to[GATES + lane] = beta_of(gate_b);
    }
    __syncwarp();  // the pending gates have been read
    if (mine >= 0 && mine < ROWS) {
      u16* const gates = a.gate_rows + (slot * KEPT + mine) * 2 * HEADS + head;
      gates[0] = gate_b;
      gates[HEADS] = gate_a;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) gdn_rows_kernel(const __grid_constant__ Arguments a) {
  launch_dependents();
  const int unit = blockIdx.x * WARPS + threadIdx.x / 32;
  const int b = unit / UNITS, which = unit % UNITS;
  if (b >= a.sequences) {
    wait_for_predecessor();
  } else if (which < 2 * KEY_HEADS) {
    const int key_head = which % KEY_HEADS;
    float* const to = a.query_key + ((long long)b * KEY_HEADS + key_head) * (ROWS + ALL) * K;
    if (which < KEY_HEADS) head_rows<K, QUERY>(a, b, key_head, which * K, to, nullptr);
    else head_rows<K, KEY>(a, b, key_head, which * K, to + ROWS * K, nullptr);
  } else {
    const int head = which - 2 * KEY_HEADS;
    float* const to = a.gates_value + ((long long)b * HEADS + head) * (2 * GATES + ALL * V);
    head_rows<V, VALUE>(a, b, head, 2 * KEY_WIDTH + head * V, to + 2 * GATES, to);
  }
}
