// The arithmetic of the delta net that its kernels share, so that they can stand in for each other: a value has the same bits
// from each. Include it after delta.cuh and after the macros K, V, COLS, SILU are there; includes nothing itself.
#pragma once

constexpr int TAPS = 4, HISTORY = TAPS - 1;
constexpr int LANES = COLS / 4;    // side by side; the others are further down
constexpr int DEPTH = 32 / LANES;  // lanes that share a column
constexpr int QUADS = K / (4 * DEPTH);
constexpr int HEAD_WARPS = V / COLS;
static_assert(V % COLS == 0 && K % (4 * DEPTH) == 0 && K % 32 == 0 && COLS >= 8 && COLS <= 32, "shape");

struct alignas(16) Four {
  float x, y, z, w;
};

DEVICE float logistic(float x) { return over(1.0f, plus(1.0f, expf(-x))); }
DEVICE float swish(float x) { return over(x, plus(1.0f, expf(-x))); }
// What is rounded to bf16 next; 2^-20 of the value off.
DEVICE float short_swish(float x) { return times(x, short_sigmoid(x)); }

// ------------------------------------------------------------------ a row's operands

// A channel after convolution and silu; w is the window, oldest row first.
DEVICE float convolved(const float (&w)[TAPS], const float (&taps)[TAPS]) {
  float sum = times(w[0], taps[0]);
#pragma unroll
  for (int i = 1; i < TAPS; i++) sum = plus(sum, times(w[i], taps[i]));
  return rounded(short_swish(rounded(sum)));
}

// What makes a query or a key of K values a unit vector; a lane passes its K / 32 neighbours.
DEVICE float unit_scale(const float (&v)[K / 32]) {
  float sum[1] = {0};
#pragma unroll
  for (int j = 0; j < K / 32; j++) sum[0] = times_plus(v[j], v[j], sum[0]);
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) add_across(sum, mask);
  return over(1.0f, root(plus(sum[0], 1e-6f)));
}

DEVICE float unit_key(float v, float scale) { return times(v, scale); }
DEVICE float unit_query(float v, float scale) { return over(times(v, scale), root((float)K)); }

// rate is the exponential of the head's a_log.
DEVICE float decay_of(u16 gate, float bias, float rate) {
  const float a = plus(low_half(gate), bias);
  return expf(-times(rate, a > 20.0f ? a : log1pf(expf(a))));
}
DEVICE float beta_of(u16 gate) { return rounded(logistic(low_half(gate))); }

// ------------------------------------------------------------------ the state

// Row of the state where the i-th four of a lane's values lie.
DEVICE int state_row(int i, int depth) { return i / 4 * DEPTH * 4 + depth * 4 + i % 4; }

// One row of the delta rule on this lane's share of the state; e and o of these columns end in every lane that holds them.
struct Share {
  float m[QUADS * 4][4];

  DEVICE void advance(const float* key, const float* value, float decay, float beta, int depth) {
    float k[QUADS * 4], e[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      const Four four = *(const Four*)(key + (i * DEPTH + depth) * 4);
      k[4 * i] = four.x, k[4 * i + 1] = four.y, k[4 * i + 2] = four.z, k[4 * i + 3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < QUADS * 4; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        m[i][c] = times(m[i][c], decay);
        e[c] = times_plus(k[i], m[i][c], e[c]);
      }
    }
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) add_across(e, mask);
    const Four v = *(const Four*)value;
    const float u[4] = {times(beta, plus(v.x, -e[0])), times(beta, plus(v.y, -e[1])), times(beta, plus(v.z, -e[2])),
                        times(beta, plus(v.w, -e[3]))};
#pragma unroll
    for (int i = 0; i < QUADS * 4; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) m[i][c] = times_plus(k[i], u[c], m[i][c]);
    }
  }

  // o = query m, rounded as it is kept, and the sum of squares over this warp's columns, in every lane.
  DEVICE float read(float (&o)[4], const float* query, int depth) const {
#pragma unroll
    for (int c = 0; c < 4; c++) o[c] = 0;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      const Four four = *(const Four*)(query + (i * DEPTH + depth) * 4);
      const float q[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int c = 0; c < 4; c++) o[c] = times_plus(q[j], m[4 * i + j][c], o[c]);
      }
    }
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) add_across(o, mask);
    float sum[1] = {0};
#pragma unroll
    for (int c = 0; c < 4; c++) {
      o[c] = rounded(o[c]);
      sum[0] = times_plus(o[c], o[c], sum[0]);
    }
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) add_across(sum, mask);
    return sum[0];
  }
};

// ------------------------------------------------------------------ the gated norm

// What scales a head's values; squares has a sum for each of its warps.
DEVICE float head_scale(const float* squares, float eps) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < HEAD_WARPS; j++) sum = plus(sum, squares[j]);
  return over(1.0f, root(plus(over(sum, (float)V), eps)));
}

// Four neighbours of a row, gated, to the four at `to`; z and norm have four bf16 each.
DEVICE void close_four(u16* to, const float* mixed, u64 z, u64 norm, float scale) {
  u16 y[4];
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const float gate = low_half((u32)(z >> 16 * c));
    const float act = SILU ? swish(gate) : logistic(gate);
    const float weight = low_half((u32)(norm >> 16 * c));
    y[c] = to_bf16(times(rounded(times(weight, rounded(times(mixed[c], scale)))), act));
  }
  ((u32*)to)[0] = y[0] | (u32)y[1] << 16;
  ((u32*)to)[1] = y[2] | (u32)y[3] << 16;
}
