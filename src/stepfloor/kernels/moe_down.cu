// y = sum over a row's choices of w (h D_e^T) + shared gate * (shared hidden D_s^T), experts in NVFP4 or FP8, the shared expert in bf16 or FP8.
// Source: _down_few.py, which states the plan that the macros below repeat; include/expert_sums.cuh for the formats.
//
// A cluster owns up to TILES of 16 output rows. Its warps take (entry of the expert list, tile) in turn, with no barrier in
// between, each warp both halves of the columns or a pair of warps one half each: a piece of weights and the rows of h it
// meets arrive in one slot.
// What a pair (row, choice) gets from each half is kept apart until the end, so that a value's sum is the same for any
// number of rows and experts: the lower and the upper half of each 8 columns in step order, their sum, the two halves,
// the choices in order, the shared expert's 64-column steps in order, in float32 and rounded once.
//
// Everything but h must be complete when this kernel may start: it is read before the wait. That holds after
// moe_gate_up.cu, which lets its successor start after its own wait, and after any kernel that never does so early.

#include "stream.cuh"
#include "expert_sums.cuh"
#include "shared_expert.cuh"

// N, K            output rows; columns. SHARED_K  columns of the shared expert, 0 without one: see shared_expert.cuh
// EXPERTS, TOPK   experts; choices of a row. EXPERT_FORMAT  of their weights, see expert_sums.cuh
// STEPS           64-column steps of half of the columns
// SHARERS         warps that share a tile: 1, or 2 with half of the columns each
// CLUSTER         blocks that share tiles. CLUSTERS  of the grid, which share all tiles as evenly as they can
// WARPS, SLOTS    warps of a block; pieces of a warp in shared memory
// ROWS, GROUP     most rows; most pairs of an entry of the list
// SPILL           whether what pairs get lies in global memory
// PER_SM          blocks of a multiprocessor

constexpr int THREADS = WARPS * 32;
constexpr int HALVES = 2 / SHARERS;  // of a warp
constexpr int HALF_BYTES = piece_bytes(STEPS);
constexpr int PIECE_BYTES = HALVES * HALF_BYTES;
constexpr int ROW_PITCH = HALVES * STEPS * 128 + 64;  // 4 modulo 8 units of 16 bytes: no bank conflict
constexpr int SLOT_BYTES = PIECE_BYTES + GROUP * ROW_PITCH;
constexpr int PAIRS = ROWS * TOPK;
constexpr int SHARED_LINE = SHARERS * PAIRS;
constexpr int LINES = SHARED_LINE + SHARED_STEPS * ROWS;  // of 16 sums
constexpr int TILES = (N / 16 + CLUSTERS - 1) / CLUSTERS;  // of a cluster at most
constexpr int OWNED = (TILES + CLUSTER - 1) / CLUSTER;  // tiles that one block adds up
constexpr int TEAMS = CLUSTER * WARPS / SHARERS;
constexpr bool PADDED = 2 * STEPS * 64 > K;
static_assert(2 * STEPS * 64 >= K && K % 16 == 0 && N % 16 == 0 && CLUSTERS <= N / 16, "plan");
static_assert(SHARED_K % 16 == 0 && WARPS % SHARERS == 0 && GROUP <= 8, "plan");

using List = ExpertList<EXPERTS, TOPK, ROWS, GROUP, THREADS>;
static_assert(sizeof(List) <= LIST_BYTES && LIST_BYTES - sizeof(List) < 16, "plan");

// A tile of an entry of the list; those of a warp, or of a pair of warps, are TEAMS apart.
struct Unit {
  int tiles, entry, tile, entries_on, tiles_on;

  DEVICE Unit(int tiles, int number)
      : tiles(tiles), entry(number / tiles), tile(number % tiles), entries_on(TEAMS / tiles), tiles_on(TEAMS % tiles) {}
  DEVICE void advance() {
    entry += entries_on;
    tile += tiles_on;
    if (tile >= tiles) {
      tile -= tiles;
      entry++;
    }
  }
};

struct Arguments {
  const u8* tape;
  const u16* hidden;  // [pair][K]
  const long long* ids;
  const u16* weights;  // of each pair
  const float* scale;  // of each expert in NVFP4
  const u8* shared_tape;
  const float* shared_scale;
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
  const int rank = blockIdx.x % CLUSTER, place_of_cluster = blockIdx.x / CLUSTER;
  const int first_tile = place_of_cluster * (N / 16) / CLUSTERS, tiles = (place_of_cluster + 1) * (N / 16) / CLUSTERS - first_tile;
  const int worker = rank * WARPS + warp, team = worker / SHARERS, half = worker % SHARERS;
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
  const int entries = list.build(a.ids, a.rows);
  __syncthreads();

  // lane 0 asks for the pieces of a unit and for the rows it meets
  const int column = half * STEPS * 64, row_bytes = max(0, min(HALVES * STEPS * 64, K - column)) * 2;
  auto issue_weights = [&](const Unit& unit, int slot) {
    const u32 entry = list.entries[unit.entry], barrier = barriers + 8 * slot;
    const u32 tile = (List::expert_of(entry) * (N / 16) + first_tile + unit.tile) * SHARERS + half;
    barrier_expect(barrier, PIECE_BYTES + List::count_of(entry) * row_bytes);
    bulk_copy(ring + slot * SLOT_BYTES, a.tape + (u64)tile * PIECE_BYTES, PIECE_BYTES, barrier, policy);
  };
  auto issue_rows = [&](const Unit& unit, int slot) {
    if (row_bytes == 0) return;
    const u16* pair = list.pair + unit.entry * GROUP;
    u32 to = ring + slot * SLOT_BYTES + PIECE_BYTES;
#pragma unroll 1
    for (int left = List::count_of(list.entries[unit.entry]); left > 0; left--, to += ROW_PITCH)
      bulk_copy_kept(to, a.hidden + (u64)*pair++ * K + column, row_bytes, barriers + 8 * slot);
  };
  Unit asked(tiles, team);
  for (int i = 0; i < SLOTS; i++, asked.advance())
    if (lane == 0 && asked.entry < entries) issue_weights(asked, i);
  __syncwarp();
  launch_dependents();

  for (int p = threadIdx.x; p < a.rows * TOPK; p += THREADS)
    factor[p] = from_bf16(load_half(a.weights + p)) * (EXPERT_SCALES ? SCALE_REST * a.scale[list.chosen[p]] : 1.f);
  cluster_sync();  // the other blocks have started
  if (SPILL) wait_for_predecessor();  // which may still use that memory
  // where a tile's sums are added up: line 0, this lane's first row
  auto place = [&](int tile) {
    return SPILL ? (u64)(a.spilled + (first_tile + tile) * 16 + g)
                 : (u64)peer_address(shared_address(sums + tile / CLUSTER * LINES * 16 + g), tile % CLUSTER);
  };
  auto put = [&](u64 at, int line, float value, float below) {
    if (SPILL) {
      float* to = (float*)at + (u64)line * N;
      to[0] = value;
      to[8] = below;
    } else {
      store_remote((u32)at + line * 64, value);
      store_remote((u32)at + line * 64 + 32, below);
    }
  };
  if constexpr (SHARED_K > 0) {
#pragma unroll 1
    for (int job = worker; job < tiles * SHARED_STEPS; job += CLUSTER * WARPS) {
      const int tile = job / SHARED_STEPS, step = job % SHARED_STEPS;
      const SharedWeights w = load_shared_weights(a.shared_tape + ((u64)(first_tile + tile) * SHARED_STEPS + step) * SHARED_BYTES, lane);
      const int row = (first_tile + tile) * 16 + g;
      const float above = shared_scale(a.shared_scale, row, step), below = shared_scale(a.shared_scale, row + 8, step);
#pragma unroll 1
      for (int first = 0; first < a.rows; first += 8) {
        const u16* row = a.shared_hidden + min(first + g, a.rows - 1) * a.shared_stride;
        const Words x_0 = load_columns<SHARED_K>(row, step * 64 + t * 8), x_1 = load_columns<SHARED_K>(row, step * 64 + 32 + t * 8);
        float sum[4];
        multiply_shared_step(sum, w, x_0, x_1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int m = first + 2 * t + i;
          if (m >= a.rows) continue;
          put(place(tile), SHARED_LINE + step * ROWS + m, sum[i] * above, sum[2 + i] * below);
        }
      }
    }
  }
  wait_for_predecessor();
  Unit unit(tiles, team);
  if (lane == 0) {
    Unit first = unit;
    for (int i = 0; i < SLOTS && first.entry < entries; i++, first.advance()) issue_rows(first, i);
  }
  __syncwarp();

  // columns that no pair fills hold what was there before: they spoil sums that nobody stores
  const u32 codes_at = kept(ring + codes_in_piece(lane)), scales_at = kept(ring + scales_in_piece(STEPS, lane));
  const u32 row_at = kept(ring + PIECE_BYTES + min(g, GROUP - 1) * ROW_PITCH + t * 16);
  int slot = 0, parity = 0;
#pragma unroll 1
  for (; unit.entry < entries; unit.advance(), asked.advance()) {
    const int live = List::count_of(list.entries[unit.entry]);
    ExpertSums halves[HALVES];
    barrier_wait(barriers + 8 * slot, parity);
    const u32 piece = slot * SLOT_BYTES;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        const u32 x = row_at + piece + (h * STEPS + i) * 128, at = piece + h * HALF_BYTES;
        halves[h].add(codes_at + at, scales_at + at, i, load_shared(x), load_shared(x + 64));
      }
#pragma unroll
    for (int h = 0; h < HALVES; h++) halves[h].close(scales_at + piece + h * HALF_BYTES);
    reads_done();
    if (lane == 0 && asked.entry < entries) {
      issue_weights(asked, slot);
      issue_rows(asked, slot);
    }
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
    const u64 at = place(unit.tile);
    auto sum = [&](int i) { return HALVES == 1 ? halves[0].get(i) : halves[0].get(i) + halves[HALVES - 1].get(i); };
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (2 * t + i < live) put(at, half * PAIRS + list.pair[unit.entry * GROUP + 2 * t + i], sum(i), sum(2 + i));
  }
  cluster_sync();

  for (int e = threadIdx.x; e < OWNED * a.rows * 16; e += THREADS) {
    const int row = e % 16, m = e / 16 % a.rows, owned = e / 16 / a.rows, tile = owned * CLUSTER + rank;
    if (tile >= tiles) break;
    const int n = (first_tile + tile) * 16 + row;
    auto get = [&](int line) {
      return SPILL ? load_global_float(a.spilled + (u64)line * N + n) : sums[(owned * LINES + line) * 16 + row];
    };
    auto pair_sum = [&](int pair) { return SHARERS == 1 ? get(pair) : get(pair) + get(PAIRS + pair); };
    float value = 0.f;
#pragma unroll
    for (int j = 0; j < TOPK; j++) value = fmaf(factor[m * TOPK + j], pair_sum(m * TOPK + j), value);
    if constexpr (SHARED_K > 0) {
      float sum = 0.f;
#pragma unroll
      for (int step = 0; step < SHARED_STEPS; step++) sum += get(SHARED_LINE + step * ROWS + m);
      value = fmaf(from_bf16(load_half(a.shared_gate + m)), sum, value);
    }
    a.out[m * a.out_stride + n] = to_bf16(value);
  }
}
