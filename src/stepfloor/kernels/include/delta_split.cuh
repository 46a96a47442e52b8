// What gdn_rows.cu hands to the kernel of the state. Include it after delta_rule.cuh; includes nothing itself.
#pragma once

// KEY_HEADS, HEADS, K, V  sizes; GROUP = HEADS / KEY_HEADS value heads share a key head
// ROWS, KEPT              new rows R; rows that can be pending
constexpr int GROUP = HEADS / KEY_HEADS;
constexpr int KEY_WIDTH = KEY_HEADS * K;
constexpr int CHANNELS = 2 * KEY_WIDTH + HEADS * V;
constexpr int ALL = KEPT + ROWS;
constexpr int GATES = (ALL + 3) / 4 * 4;  // so that a head's begin where a bulk copy can
static_assert(HEADS % KEY_HEADS == 0 && V % 32 == 0 && CHANNELS % 8 == 0 && ALL <= 32, "shape");

// Of keys, values and gates the replayed rows come first, then the new ones; the last may be unused.
struct Arguments {
  const u16* projected;  // [B][ROWS][projected_stride]: q, k, v before convolution; z; b; a
  float* state;          // [slots][HEADS][K][V]
  u16* raw_rows;         // [slots][HISTORY + KEPT][CHANNELS], rewritten in place
  u16* gate_rows;        // [slots][KEPT][2 HEADS], likewise
  const long long* slots;
  const long long* pending;
  const float* conv_weight;  // [CHANNELS][TAPS]
  const float* a_log;
  const float* dt_bias;
  const u16* norm_weight;
  u16* out;                    // [B][ROWS][HEADS V]
  float* query_key;            // [B][KEY_HEADS][ROWS + ALL][K]: queries, then keys
  float* gates_value;          // [B][HEADS]: decays [GATES], betas [GATES], values [ALL][V]
  long long projected_stride;  // of a row, in values
  int sequences;
  float eps;
};

DEVICE int rows_to_replay(long long pending) { return max(0, min(KEPT, (int)pending)); }
