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

// Lane j has choice j of a row, by falling likelihood; of equals the lower expert comes first.
struct Choice {
  u32 expert;
  u32 key;     // bits of its likelihood, and one
  float part;  // of the sum of all likelihoods, to be added over lanes
};

// room: 64 words of shared memory.
DEVICE Choice choose(const u16* logits, u32* room) {
  const int lane = threadIdx.x % 32;
  float likely[HELD];
  Choice found{0, 1, 0.f};
  float top = -3.4e38f;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    likely[i] = value_of(logits + min(i * 32 + lane, EXPERTS - 1));
    top = fmaxf(top, likely[i]);
  }
  // as integers of the same order
  const u32 bits = __float_as_uint(top), largest = warp_max(bits >> 31 ? ~bits : bits | 1u << 31);
  top = __uint_as_float(largest >> 31 ? largest & ~(1u << 31) : ~largest);
  // Likelihoods are not negative, so their bits have their order. Zero is no expert; one that is not a number is least.
  u32 keys[HELD], most = 0;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const bool exists = i * 32 + lane < EXPERTS;
    likely[i] = exists ? expf(likely[i] - top) : 0.f;
    found.part += fmaxf(likely[i], 0.f);
    keys[i] = !exists ? 0 : likely[i] >= 0.f ? __float_as_uint(likely[i]) + 1 : 1;
    most = keys[i] > most ? keys[i] : most;
  }
  // What is chosen is not below the last of the TOPK largest lanes: a dozen candidates, whom the lanes then rank.
  int above = 0;
#pragma unroll
  for (int other = 0; other < 32; other++) above += from_lane(most, other) > most;
  const u32 least = warp_min(above < TOPK ? most : ~0u);
  int candidates = 0;  // in the order of their experts
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const u32 taken = warp_ballot(keys[i] >= least);
    const int place = candidates + __popc(taken & ((1u << lane) - 1));
    if (keys[i] >= least && place < 32) {
      room[place] = keys[i];
      room[32 + place] = i * 32 + lane;
    }
    candidates += __popc(taken);
  }
  if (candidates <= 32) {
    __syncwarp();
    const u32 key = lane < candidates ? room[lane] : 0, expert = room[32 + lane];
    int rank = 0;
#pragma unroll 1
    for (int first = 0; first < candidates; first += 8)
#pragma unroll
      for (int i = 0; i < 8; i++) rank += from_lane(key, first + i) >= key + (first + i >= lane);
    __syncwarp();
    if (rank < TOPK) {
      room[rank] = key;
      room[32 + rank] = expert;
    }
    __syncwarp();
    if (lane < TOPK) {
      found.key = room[lane];
      found.expert = room[32 + lane];
    }
    return found;
  }
  // many equals
#pragma unroll 1
  for (int j = 0; j < TOPK; j++) {
    u32 best = 0;
    int place = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (keys[i] > best) {
        best = keys[i];
        place = i;
      }
    const u32 key = warp_max(best), expert = warp_min(best == key ? (u32)(place * 32 + lane) : ~0u);
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (i * 32 + lane == (int)expert) keys[i] = 0;
    if (lane == j) {
      found.key = key;
      found.expert = expert;
    }
  }
  return found;
}

// The weight of this lane's choice, not rounded yet.
DEVICE float weight_of(const Choice& choice) {
  const float sum = warp_sum(choice.part);
  float weight = threadIdx.x % 32 < TOPK ? __uint_as_float(choice.key - 1) / sum : 0.f;
  if (RENORMALIZE) weight /= warp_sum(weight);
  return weight;
}

extern "C" __global__ void __launch_bounds__(THREADS) moe_route_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
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
  const Choice choice = choose(products, (u32*)shared);
  const float weight = weight_of(choice);
  if (lane < TOPK) {
    a.ids[(u64)row * TOPK + lane] = choice.expert;
    a.weights[(u64)row * TOPK + lane] = to_bf16(weight);
  }
}
