// h = silu(x G_e^T) * (x U_e^T) for the experts that rows chose, NVFP4, every expert's weights streamed once.
// Source: moe_gate_up.py, which states the plan that the macros below repeat; include/experts.cuh for the format.
//
// A tile is 8 gate rows and the 8 up rows of the same channels as the 16-row operand, so that SwiGLU joins values of one
// sum. Eight warps share the columns of a tile; the sum of a value is the same for any number of rows and experts:
// inside a warp's columns the lower and the upper half of each 8 in step order, their sum, then the warps in order.
// Columns of the 8-wide operand are rows of x: all of them, held in registers, or (GATHER) those that chose the expert.

#include "stream.cuh"
#include "experts.cuh"

// K, CHANNELS     columns; gate rows, as many up rows
// EXPERTS, TOPK   experts; choices of a row
// STEPS           64-column steps of a warp
// ROWS, GROUP     most rows; most pairs of an entry of the list
// GATHER          whether rows of x are copied beside the weights
// SLOTS           pieces of a warp in shared memory
// PER_SM          blocks of a multiprocessor

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int TILES = CHANNELS / 8;
constexpr int PIECE_BYTES = STEPS * 576;
constexpr int COLUMNS = GATHER ? GROUP : ROWS;
constexpr int ROW_PITCH = STEPS * 128 + 64;  // 4 modulo 8 units of 16 bytes: no bank conflict
constexpr int SLOT_BYTES = PIECE_BYTES + (GATHER ? GROUP * ROW_PITCH : 0);
constexpr int SUMS = 16 * (COLUMNS + 1);  // floats of a warp
constexpr bool PADDED = WARPS * STEPS * 64 > K;
static_assert(WARPS * STEPS * 64 >= K && K % 16 == 0 && CHANNELS % 8 == 0 && GROUP <= 8 && (GATHER || ROWS <= 8), "plan");

using List = ExpertList<EXPERTS, TOPK, ROWS, GROUP, THREADS>;
static_assert(sizeof(List) <= LIST_BYTES && LIST_BYTES - sizeof(List) < 16, "plan");

struct Arguments {
  const u8* tape;
  const u16* x;
  const long long* ids;
  const float* scale;  // of each expert
  u16* out;            // [pair][CHANNELS]
  long long x_stride;  // in values
  int rows;
};

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) moe_gate_up_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* sums = (float*)(shared + WARPS * SLOTS * SLOT_BYTES);
  List& list = *(List*)(sums + WARPS * WARPS * SUMS);
  const u32 ring = shared_address(shared) + warp * SLOTS * SLOT_BYTES;
  const u32 barriers = shared_address((u8*)&list + LIST_BYTES) + warp * SLOTS * 8;
  const u64 policy = evict_first_policy();
  if (GATHER && PADDED)  // columns that no copy fills
    for (int i = lane; i < SLOTS * SLOT_BYTES / 4; i += 32) ((u32*)(shared + warp * SLOTS * SLOT_BYTES))[i] = 0;
  __syncwarp();
  if (lane == 0) {
    for (int i = 0; i < SLOTS; i++) barrier_init(barriers + 8 * i, 1);
    barrier_init_done();
  }
  list.clear();
  wait_for_predecessor();
  launch_dependents();  // not before: the next kernel reads what the kernels before this one wrote, without waiting

  const int column = warp * STEPS * 64;
  Words x[GATHER ? 1 : 2 * STEPS];
  if constexpr (!GATHER) {
    // rows past the last one repeat it: they spoil sums that nobody stores
    const u16* row = a.x + min(g, a.rows - 1) * a.x_stride;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) x[i] = load_columns<PADDED ? K : 1 << 30>(row, column + i * 32 + t * 8);
  }
  const int units = list.build(a.ids, a.rows) * TILES;

  int next = blockIdx.x;
  auto issue = [&](int slot) {
    if (next >= units) return;
    const int entry = next / TILES, tile = next % TILES;
    const u8* from = a.tape + (((u64)List::expert_of(list.entries[entry]) * TILES + tile) * WARPS + warp) * PIECE_BYTES;
    const u32 barrier = barriers + 8 * slot, to = ring + slot * SLOT_BYTES;
    const int live = GATHER ? List::count_of(list.entries[entry]) : 0, bytes = max(0, min(STEPS * 64, K - column)) * 2;
    barrier_expect(barrier, PIECE_BYTES + live * bytes);
    bulk_copy(to, from, PIECE_BYTES, barrier, policy);
    if (GATHER && bytes > 0)
      for (int i = 0; i < live; i++)
        bulk_copy_kept(to + PIECE_BYTES + i * ROW_PITCH, a.x + list.pair[entry * GROUP + i] / TOPK * a.x_stride + column, bytes, barrier);
    next += gridDim.x;
  };
  if (lane == 0)
    for (int i = 0; i < SLOTS; i++) issue(i);
  __syncwarp();

  int slot = 0, parity = 0, duty = 0;
#pragma unroll 1
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x, duty = (duty + 1) % WARPS) {
    const int entry = unit / TILES, live = List::count_of(list.entries[entry]);
    float even[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};
    barrier_wait(barriers + 8 * slot, parity);
    const u32 piece = ring + slot * SLOT_BYTES, row = piece + PIECE_BYTES + min(g, live - 1) * ROW_PITCH + t * 16;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const Words codes = load_shared(piece + i * 512 + lane * 16);
      const u32 scales = load_shared_word(piece + STEPS * 512 + i * 64 + lane / 2 * 4);
      if constexpr (GATHER)
        expert_step(even, odd, codes, scales, load_shared(row + i * 128), load_shared(row + i * 128 + 64));
      else
        expert_step(even, odd, codes, scales, x[2 * i], x[2 * i + 1]);
    }
    __syncwarp();
    if (lane == 0) issue(slot);
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
    // Nobody waits but the warp whose turn it is. It has been through every turn between two uses of a buffer, and
    // those who fill the buffer again have had their own turn since, so it has been read.
    float* mine = sums + (duty * WARPS + warp) * SUMS;
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (2 * t + i < COLUMNS) {
        mine[g * (COLUMNS + 1) + 2 * t + i] = even[i] + odd[i];
        mine[(g + 8) * (COLUMNS + 1) + 2 * t + i] = even[2 + i] + odd[2 + i];
      }
    if (warp != duty) {
      named_barrier_arrive(duty + 1, THREADS);
      continue;
    }
    named_barrier_sync(duty + 1, THREADS);
    const float scale = SCALE_REST * a.scale[List::expert_of(list.entries[entry])];
    for (int e = lane; e < 8 * live; e += 32) {
      const int channel = e % 8, pair = list.pair[entry * GROUP + e / 8], from = GATHER ? e / 8 : pair / TOPK;
      float gate = 0.f, up = 0.f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) {
        const float* part = sums + (duty * WARPS + i) * SUMS + from;
        gate += part[channel * (COLUMNS + 1)];
        up += part[(channel + 8) * (COLUMNS + 1)];
      }
      gate *= scale;
      up *= scale;
      a.out[(u64)pair * CHANNELS + unit % TILES * 8 + channel] = to_bf16(gate / (1.f + __expf(-gate)) * up);
    }
    __syncwarp();
  }
}
