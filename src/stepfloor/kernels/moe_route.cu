// Experts, weights and the shared expert's hidden row from the products of one matrix, a block for a row.
// Source: moe_route.py. Where the source rounds to bf16 (silu, weights), this rounds.

#include "stream.cuh"

// EXPERTS, TOPK, SHARED  experts; choices of a row; channels of the shared expert
// RENORMALIZE            whether a row's weights are scaled to sum to one

constexpr int THREADS = 256;
constexpr int HELD = (EXPERTS + 31) / 32;
static_assert(TOPK <= 32 && TOPK <= EXPERTS, "plan");

struct Arguments {
  const u16* products;  // [row][EXPERTS logits, SHARED gates, SHARED ups, shared gate]
  long long* ids;
  u16* weights;
  u16* hidden;       // [row][SHARED]
  u16* shared_gate;  // [row]
  long long stride;  // of products, in values
  int rows;
};

DEVICE float value_of(const u16* at) { return __uint_as_float((u32)load_half(at) << 16); }
DEVICE float rounded(float value) { return __uint_as_float((u32)to_bf16(value) << 16); }

extern "C" __global__ void __launch_bounds__(THREADS) moe_route_kernel(const __grid_constant__ Arguments a) {
  const int lane = threadIdx.x % 32, row = blockIdx.x;
  const u16* products = a.products + row * a.stride;
  launch_dependents();
  wait_for_predecessor();
  if (threadIdx.x >= 32) {
    for (int i = threadIdx.x - 32; i < SHARED; i += THREADS - 32) {
      const float gate = value_of(products + EXPERTS + i), up = value_of(products + EXPERTS + SHARED + i);
      a.hidden[(u64)row * SHARED + i] = to_bf16(rounded(gate / (1.f + expf(-gate))) * up);
    }
    if (threadIdx.x == 32) a.shared_gate[row] = to_bf16(1.f / (1.f + expf(-value_of(products + EXPERTS + 2 * SHARED))));
    return;
  }
  float likely[HELD];
  float top = -3.4e38f, sum = 0.f;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int e = i * 32 + lane;
    likely[i] = value_of(products + min(e, EXPERTS - 1));
    top = fmaxf(top, likely[i]);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    likely[i] = i * 32 + lane < EXPERTS ? expf(likely[i] - top) : -1.f;
    sum += fmaxf(likely[i], 0.f);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  int id = 0;  // of this lane's choice
  float weight = 0.f;
#pragma unroll 1
  for (int j = 0; j < TOPK; j++) {
    // the first of equals, in a tree: a chain of comparisons is most of this kernel's time
    float best[HELD];
    int place[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      best[i] = likely[i];
      place[i] = i;
    }
#pragma unroll
    for (int width = 1; width < HELD; width *= 2)
#pragma unroll
      for (int i = 0; i + width < HELD; i += 2 * width)
        if (best[i + width] > best[i]) {
          best[i] = best[i + width];
          place[i] = place[i + width];
        }
    // likelihoods are not negative, so their bits have their order; what is taken is below all of them
    const u32 bits = __float_as_uint(fmaxf(best[0], 0.f)) + (best[0] >= 0.f);
    const u32 most = warp_max(bits);
    const int where = (int)warp_min(bits == most ? (u32)(place[0] * 32 + lane) : ~0u);
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (i * 32 + lane == where) likely[i] = -1.f;
    const float chosen = __uint_as_float(most - 1);
    if (lane == j) {
      id = where;
      weight = chosen / sum;
    }
  }
  if (RENORMALIZE) {
    float all = weight;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) all += __shfl_xor_sync(~0u, all, distance);
    weight /= all;
  }
  if (lane < TOPK) {
    a.ids[(u64)row * TOPK + lane] = id;
    a.weights[(u64)row * TOPK + lane] = to_bf16(weight);
  }
}
