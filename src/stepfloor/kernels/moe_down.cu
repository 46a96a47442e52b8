// y = sum over a row's choices of w (h D_e^T) + shared gate * (shared hidden D_s^T), NVFP4 experts, bf16 shared expert.
// Source: moe_down.py, which states the plan that the macros below repeat; include/experts.cuh for the format.
//
// A cluster owns TILES of 16 output rows. Its warps take (entry of the expert list, tile) in turn, a pair of warps one
// half of the columns each, with no barrier in between: a piece of weights and the rows of h it meets arrive in one slot.
// What a pair (row, choice) gets from each half is kept apart until the end, so that a value's sum is the same for any
// number of rows and experts: the lower and the upper half of each 8 columns in step order, their sum, the two halves,
// the choices in order, the shared expert's 64-column steps in order, in float32 and rounded once.
//
// Everything but h must be complete when this kernel may start: it is read before the wait. That holds after
// moe_gate_up.cu, which lets its successor start after its own wait, and after any kernel that never does so early.

#include "stream.cuh"
#include "experts.cuh"

// N, K            output rows; columns. SHARED_K  columns of the shared expert, 0 without one
// EXPERTS, TOPK   experts; choices of a row
// STEPS           64-column steps of half of the columns
// CLUSTER, TILES  blocks that share tiles; tiles of a cluster
// WARPS, SLOTS    warps of a block; pieces of a warp in shared memory
// ROWS, GROUP     most rows; most pairs of an entry of the list
// SPILL           whether what pairs get lies in global memory
// PER_SM          blocks of a multiprocessor

constexpr int THREADS = WARPS * 32;
constexpr int PIECE_BYTES = STEPS * 576;
constexpr int ROW_PITCH = STEPS * 128 + 64;
constexpr int SLOT_BYTES = PIECE_BYTES + GROUP * ROW_PITCH;
constexpr int PAIRS = ROWS * TOPK;
constexpr int SHARED_STEPS = (SHARED_K + 63) / 64;
constexpr int LINES = 2 * PAIRS + SHARED_STEPS * ROWS;  // of 16 sums
constexpr int OWNED = (TILES + CLUSTER - 1) / CLUSTER;  // tiles that one block adds up
constexpr int TEAMS = CLUSTER * WARPS / 2;
constexpr bool PADDED = 2 * STEPS * 64 > K;
static_assert(2 * STEPS * 64 >= K && K % 16 == 0 && N % (16 * TILES) == 0 && SHARED_K % 16 == 0 && WARPS % 2 == 0 && GROUP <= 8, "plan");

using List = ExpertList<EXPERTS, TOPK, ROWS, GROUP, THREADS>;
static_assert(sizeof(List) <= LIST_BYTES && LIST_BYTES - sizeof(List) < 16, "plan");

struct Arguments {
  const u8* tape;
  const u16* hidden;  // [pair][K]
  const long long* ids;
  const u16* weights;  // of each pair
  const float* scale;  // of each expert
  const u8* shared_tape;
  const u16* shared_hidden;
  const u16* shared_gate;
  float* spilled;  // [LINES][N]
  u16* out;
  long long shared_stride, out_stride;  // in values
  int rows;
};

DEVICE float from_bf16(u16 value) { return __uint_as_float((u32)value << 16); }

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) moe_down_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % CLUSTER, first_tile = blockIdx.x / CLUSTER * TILES;
  const int worker = rank * WARPS + warp, team = worker / 2, half = worker % 2;
  float* sums = (float*)(shared + WARPS * SLOTS * SLOT_BYTES);
  float* factor = sums + (SPILL ? 0 : OWNED * LINES * 16);
  List& list = *(List*)(factor + (PAIRS + 3) / 4 * 4);
  const u32 ring = shared_address(shared) + warp * SLOTS * SLOT_BYTES;
  const u32 barriers = shared_address((u8*)&list + LIST_BYTES) + warp * SLOTS * 8;
  const u64 policy = evict_first_policy();
  if (PADDED)  // columns that no copy fills
    for (int i = lane; i < SLOTS * SLOT_BYTES / 4; i += 32) ((u32*)(shared + warp * SLOTS * SLOT_BYTES))[i] = 0;
  __syncwarp();
  if (lane == 0) {
    for (int i = 0; i < SLOTS; i++) barrier_init(barriers + 8 * i, 1);
    barrier_init_done();
  }
  list.clear();
  const int units = list.build(a.ids, a.rows) * TILES;

  const int column = half * STEPS * 64, row_bytes = max(0, min(STEPS * 64, K - column)) * 2;
  auto issue_weights = [&](int unit, int slot) {
    const int entry = unit / TILES, tile = first_tile + unit % TILES;
    const u8* from = a.tape + (((u64)list.expert[entry] * (N / 16) + tile) * 2 + half) * PIECE_BYTES;
    barrier_expect(barriers + 8 * slot, PIECE_BYTES + list.count[entry] * row_bytes);
    bulk_copy(ring + slot * SLOT_BYTES, from, PIECE_BYTES, barriers + 8 * slot, policy);
  };
  auto issue_rows = [&](int unit, int slot) {
    const int entry = unit / TILES;
    if (row_bytes > 0)
      for (int i = 0; i < list.count[entry]; i++)
        bulk_copy_kept(ring + slot * SLOT_BYTES + PIECE_BYTES + i * ROW_PITCH, a.hidden + (u64)list.pair[entry * GROUP + i] * K + column,
                       row_bytes, barriers + 8 * slot);
  };
  if (lane == 0)
    for (int i = 0; i < SLOTS && team + i * TEAMS < units; i++) issue_weights(team + i * TEAMS, i);
  __syncwarp();
  launch_dependents();

  for (int p = threadIdx.x; p < a.rows * TOPK; p += THREADS)
    factor[p] = from_bf16(load_half(a.weights + p)) * (SCALE_REST * a.scale[list.chosen[p]]);
  cluster_sync();  // the other blocks have started
  if (SPILL) wait_for_predecessor();  // which may still use that memory
  auto put = [&](int tile, int line, int row, float value) {
    if (SPILL)
      a.spilled[(u64)line * N + (first_tile + tile) * 16 + row] = value;
    else
      store_peer(shared_address(sums + (tile / CLUSTER * LINES + line) * 16 + row), tile % CLUSTER, value);
  };
  if constexpr (SHARED_K > 0) {
#pragma unroll 1
    for (int job = worker; job < TILES * SHARED_STEPS; job += CLUSTER * WARPS) {
      const int tile = job / SHARED_STEPS, step = job % SHARED_STEPS;
      const u8* from = a.shared_tape + ((u64)(first_tile + tile) * SHARED_STEPS + step) * 2048 + lane * 16;
      const Words top_0 = load_global(from), top_1 = load_global(from + 512);
      const Words bottom_0 = load_global(from + 1024), bottom_1 = load_global(from + 1536);
#pragma unroll 1
      for (int first = 0; first < a.rows; first += 8) {
        const u16* row = a.shared_hidden + min(first + g, a.rows - 1) * a.shared_stride;
        const Words x_0 = load_columns<SHARED_K>(row, step * 64 + t * 8), x_1 = load_columns<SHARED_K>(row, step * 64 + 32 + t * 8);
        float even[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};
        matrix_step(even, top_0.x, bottom_0.x, top_0.y, bottom_0.y, x_0.x, x_0.y);
        matrix_step(odd, top_0.z, bottom_0.z, top_0.w, bottom_0.w, x_0.z, x_0.w);
        matrix_step(even, top_1.x, bottom_1.x, top_1.y, bottom_1.y, x_1.x, x_1.y);
        matrix_step(odd, top_1.z, bottom_1.z, top_1.w, bottom_1.w, x_1.z, x_1.w);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int m = first + 2 * t + i;
          if (m >= a.rows) continue;
          put(tile, 2 * PAIRS + step * ROWS + m, g, even[i] + odd[i]);
          put(tile, 2 * PAIRS + step * ROWS + m, g + 8, even[2 + i] + odd[2 + i]);
        }
      }
    }
  }
  wait_for_predecessor();
  if (lane == 0)
    for (int i = 0; i < SLOTS && team + i * TEAMS < units; i++) issue_rows(team + i * TEAMS, i);
  __syncwarp();

  int slot = 0, parity = 0;
#pragma unroll 1
  for (int unit = team; unit < units; unit += TEAMS) {
    const int entry = unit / TILES, live = list.count[entry];
    float even[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};
    barrier_wait(barriers + 8 * slot, parity);
    const u32 piece = ring + slot * SLOT_BYTES, row = piece + PIECE_BYTES + min(g, live - 1) * ROW_PITCH + t * 16;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const Words codes = load_shared(piece + i * 512 + lane * 16);
      const u32 scales = load_shared_word(piece + STEPS * 512 + i * 64 + lane / 2 * 4);
      expert_step(even, odd, codes, scales, load_shared(row + i * 128), load_shared(row + i * 128 + 64));
    }
    __syncwarp();
    if (lane == 0 && unit + SLOTS * TEAMS < units) {
      issue_weights(unit + SLOTS * TEAMS, slot);
      issue_rows(unit + SLOTS * TEAMS, slot);
    }
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (2 * t + i < live) {
        const int line = half * PAIRS + list.pair[entry * GROUP + 2 * t + i];
        put(unit % TILES, line, g, even[i] + odd[i]);
        put(unit % TILES, line, g + 8, even[2 + i] + odd[2 + i]);
      }
  }
  cluster_sync();

  for (int e = threadIdx.x; e < OWNED * a.rows * 16; e += THREADS) {
    const int row = e % 16, m = e / 16 % a.rows, owned = e / 16 / a.rows, tile = owned * CLUSTER + rank;
    if (tile >= TILES) break;
    const int n = (first_tile + tile) * 16 + row;
    auto get = [&](int line) {
      return SPILL ? load_global_float(a.spilled + (u64)line * N + n) : sums[(owned * LINES + line) * 16 + row];
    };
    float value = 0.f;
#pragma unroll
    for (int j = 0; j < TOPK; j++) value = fmaf(factor[m * TOPK + j], get(m * TOPK + j) + get(PAIRS + m * TOPK + j), value);
    if constexpr (SHARED_K > 0) {
      float sum = 0.f;
#pragma unroll
      for (int step = 0; step < SHARED_STEPS; step++) sum += get(2 * PAIRS + step * ROWS + m);
      value = fmaf(from_bf16(load_half(a.shared_gate + m)), sum, value);
    }
    a.out[m * a.out_stride + n] = to_bf16(value);
  }
}
