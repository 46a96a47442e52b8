// y = sum over a row's choices of w (h D_e^T) + shared gate * (shared hidden D_s^T) for many rows, NVFP4 experts, bf16 shared
// expert: the products of all pairs (row, choice), then their sums. Source: _down_many.py, which states the plan that the
// macros below repeat; include/experts.cuh for the format.
//
// Four tiles of 16 output rows are streamed at once, by eight warps: each has a tile and half of the columns, and the
// columns of h that it meets in registers. A block's units are neighbours in the list of experts, so that it changes its
// rows of h two or three times. A ninth warp asks for the weights, a tenth multiplies the shared expert's.
//
// What a pair gets from each half goes to memory, so that a value's sum is the same for any number of rows and experts, and
// the one of moe_down.cu: the lower and the upper half of each 8 columns in step order, their sum, the two halves, the
// choices in order, the shared expert's 64-column steps in order, in float32 and rounded once.
//
// Everything but h must be complete when the first kernel may start, as for moe_down.cu.

#include "stream.cuh"
#include "expert_sums.cuh"
#include "shared_expert.cuh"

// N, K            output rows; columns. SHARED_K  columns of the shared expert, 0 without one
// EXPERTS, TOPK   experts; choices of a row
// STEPS           64-column steps of half of the columns
// ROWS, GROUP     most rows; most pairs of an entry of the list
// SLOTS           units of a block in shared memory
// PER_SM          blocks of a multiprocessor

constexpr int WARPS = 8;
constexpr int WORKERS = WARPS * 32;
constexpr int THREADS = WORKERS + 32 + (SHARED_K > 0 ? 32 : 0);
constexpr int SUM_THREADS = 256;
constexpr int TOGETHER = WARPS / 2;  // tiles of a unit
constexpr int TILES = N / 16;
constexpr int UNITS = (TILES + TOGETHER - 1) / TOGETHER;
constexpr int PIECE_BYTES = piece_bytes(STEPS);
constexpr int UNIT_BYTES = WARPS * PIECE_BYTES;
constexpr int PAIRS = ROWS * TOPK;
constexpr int SHARED_LINE = 2 * PAIRS;
constexpr int WIDE = ROWS > 16 ? 4 : 1;  // values that a thread sums
constexpr bool PADDED = 2 * STEPS * 64 > K;
static_assert(2 * STEPS * 64 >= K && K % 16 == 0 && N % 16 == 0 && SHARED_K % 16 == 0 && GROUP <= 8, "plan");

using List = ExpertList<EXPERTS, TOPK, ROWS, GROUP, WORKERS>;
static_assert(sizeof(List) <= LIST_BYTES && LIST_BYTES - sizeof(List) < 16, "plan");
using Units = BlockUnits<UNITS, true>;

struct Arguments {
  const u8* tape;
  const u16* hidden;  // [pair][K]
  const long long* ids;
  const u16* weights;  // of each pair
  const float* scale;  // of each expert
  const u8* shared_tape;
  const float* shared_scale;
  const u16* shared_hidden;
  const u16* shared_gate;
  float* sums;  // [lower halves of pairs, upper halves of pairs, rows of the shared expert][N]
  u16* out;
  long long shared_stride, out_stride;  // in values
  int rows;
};

DEVICE float from_bf16(u16 value) { return __uint_as_float((u32)value << 16); }

template <int COUNT> DEVICE void load_floats(float (&v)[COUNT], const float* from) {
  static_assert(COUNT == 1 || COUNT == 4, "plan");
  if constexpr (COUNT == 1) {
    v[0] = load_global_float(from);
  } else {
    const Words w = load_global(from);
    v[0] = __uint_as_float(w.x);
    v[1] = __uint_as_float(w.y);
    v[2] = __uint_as_float(w.z);
    v[3] = __uint_as_float(w.w);
  }
}

DEVICE void ask(const Arguments& a, const List& list, u32 ring, u32 full, u32 empty, u32 ready) {
  barrier_wait_alone(ready, 0);
  const u64 policy = evict_first_policy();
  int slot = 0, parity = 1;
#pragma unroll 1
  for (Units at(list.number); at.left > 0; at.advance()) {
    const int first = at.unit * TOGETHER, bytes = min(TOGETHER, TILES - first) * 2 * PIECE_BYTES;
    const u8* from = a.tape + ((u64)List::expert_of(list.entries[at.entry]) * TILES + first) * (2 * PIECE_BYTES);
    barrier_wait_alone(empty + 8 * slot, parity);
    barrier_expect(full + 8 * slot, bytes);
    bulk_copy(ring + slot * UNIT_BYTES, from, bytes, full + 8 * slot, policy);
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }
}

// The tenth warp: a tile for 8 rows at a time.
DEVICE void multiply_shared(const Arguments& a) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int job = blockIdx.x; job < (a.rows + 7) / 8 * TILES; job += gridDim.x) {
    const int tile = job % TILES, first = job / TILES * 8;
    const u8* from = a.shared_tape + (u64)tile * SHARED_STEPS * SHARED_BYTES;
    const u16* row = a.shared_hidden + min(first + g, a.rows - 1) * a.shared_stride;
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 2
    for (int step = 0; step < SHARED_STEPS; step++, from += SHARED_BYTES) {
      const SharedWeights w = load_shared_weights(from, lane);
      const float above = shared_scale(a.shared_scale, tile * 16 + g, step), below = shared_scale(a.shared_scale, tile * 16 + g + 8, step);
      const Words x_0 = load_columns<SHARED_K>(row, step * 64 + t * 8), x_1 = load_columns<SHARED_K>(row, step * 64 + 32 + t * 8);
      float of_step[4];
      multiply_shared_step(of_step, w, x_0, x_1);
#pragma unroll
      for (int i = 0; i < 4; i++) sum[i] += __fmul_rn(of_step[i], i < 2 ? above : below);  // two roundings, as in moe_down.cu
    }
    wait_for_predecessor();  // which may still use that memory
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int m = first + 2 * t + i;
      if (m >= a.rows) continue;
      float* to = a.sums + (u64)(SHARED_LINE + m) * N + tile * 16 + g;
      to[0] = sum[i];
      to[8] = sum[2 + i];
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) moe_down_products_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  List& list = *(List*)(shared + SLOTS * UNIT_BYTES);
  const u32 ring = shared_address(shared), full = shared_address((u8*)&list + LIST_BYTES), empty = full + 8 * SLOTS;
  const u32 ready = empty + 8 * SLOTS;
  if (threadIdx.x == WORKERS) {
    make_ring(full, empty, SLOTS, WORKERS);
    barrier_init(ready, WORKERS);
    barrier_init_done();
  }
  if (warp < WARPS) list.clear();
  __syncthreads();
  if (warp == WARPS) {
    launch_dependents();
    if (lane == 0) ask(a, list, ring, full, empty, ready);
    return;
  }
  if (warp > WARPS) {
    launch_dependents();
    if constexpr (SHARED_K > 0) multiply_shared(a);
    return;
  }

  Units at(list.build(a.ids, a.rows, ready));
  if (ROWS > 1) List::sync();
  launch_dependents();
  wait_for_predecessor();

  const int column = warp % 2 * STEPS * 64 + t * 8;
  const u32 codes_at = kept(ring + warp * PIECE_BYTES + codes_in_piece(lane));
  const u32 scales_at = kept(ring + warp * PIECE_BYTES + scales_in_piece(STEPS, lane));
  Words x[2 * STEPS];
  float* to[2] = {a.sums, a.sums};  // of columns 2t and 2t + 1 of the operand
  int slot = 0, parity = 0, held = -1, live = 0;
#pragma unroll 1
  for (; at.left > 0; at.advance()) {
    if (at.entry != held) {
      held = at.entry;
      live = List::count_of(list.entries[held]);
      const u16* pairs = list.pair + held * GROUP;
      // columns of the operand past the last one repeat it: they spoil sums that nobody stores
      const u16* row = a.hidden + (u64)pairs[min(g, live - 1)] * K;
#pragma unroll
      for (int i = 0; i < 2 * STEPS; i++) x[i] = load_columns<PADDED ? K : 1 << 30>(row, column + i * 32);
#pragma unroll
      for (int i = 0; i < 2; i++) to[i] = a.sums + (u64)(warp % 2 * PAIRS + pairs[min(2 * t + i, live - 1)]) * N + g;
    }
    const int tile = at.unit * TOGETHER + warp / 2;
    ExpertSums piece;
    barrier_wait(full + 8 * slot, parity);
    const u32 codes = codes_at + slot * UNIT_BYTES, scales = scales_at + slot * UNIT_BYTES;
    if (TILES % TOGETHER == 0 || tile < TILES) {
#pragma unroll
      for (int i = 0; i < STEPS; i++) piece.add(codes, scales, i, x[2 * i], x[2 * i + 1]);
      piece.close(scales);
    }
    reads_done();
    barrier_arrive(empty + 8 * slot);  // every lane, for what it read itself
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
    if (TILES % TOGETHER == 0 || tile < TILES) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (2 * t + i >= live) continue;
        to[i][tile * 16] = piece.get(i);
        to[i][tile * 16 + 8] = piece.get(2 + i);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) moe_down_sum_kernel(const __grid_constant__ Arguments a) {
  const int item = blockIdx.x * SUM_THREADS + threadIdx.x, m = min(item / (N / WIDE), a.rows - 1), n = item % (N / WIDE) * WIDE;
  launch_dependents();
  float factor[TOPK], value[WIDE];
#pragma unroll
  for (int j = 0; j < TOPK; j++) {
    const u32 id = (u32)load_global_u64(a.ids + m * TOPK + j);
    factor[j] = from_bf16(load_half(a.weights + m * TOPK + j)) * (EXPERT_SCALES ? SCALE_REST * a.scale[id < EXPERTS ? id : EXPERTS - 1] : 1.f);
  }
  const float gate = SHARED_K > 0 ? from_bf16(load_half(a.shared_gate + m)) : 0.f;
  wait_for_predecessor();
  if (item / (N / WIDE) >= a.rows) return;
  float lower[WIDE], upper[WIDE];
#pragma unroll
  for (int i = 0; i < WIDE; i++) value[i] = 0.f;
#pragma unroll
  for (int j = 0; j < TOPK; j++) {
    load_floats(lower, a.sums + (u64)(m * TOPK + j) * N + n);
    load_floats(upper, a.sums + (u64)(PAIRS + m * TOPK + j) * N + n);
#pragma unroll
    for (int i = 0; i < WIDE; i++) value[i] = fmaf(factor[j], lower[i] + upper[i], value[i]);
  }
  if constexpr (SHARED_K > 0) {
    load_floats(lower, a.sums + (u64)(SHARED_LINE + m) * N + n);
#pragma unroll
    for (int i = 0; i < WIDE; i++) value[i] = fmaf(gate, lower[i], value[i]);
  }
#pragma unroll
  for (int i = 0; i < WIDE; i++) a.out[m * a.out_stride + n + i] = to_bf16(value[i]);
}
