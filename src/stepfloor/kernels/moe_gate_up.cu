// h = silu(x G_e^T) * (x U_e^T) for the experts that rows chose, NVFP4 or FP8, every expert's weights streamed once.
// Source: moe_gate_up.py, which states the plan that the macros below repeat; include/expert_sums.cuh for the formats.
//
// A tile is 8 gate rows and the 8 up rows of the same channels as the 16-row operand, so that SwiGLU joins values of one
// sum. Eight warps share the columns of a tile; the sum of a value is the same for any number of rows and experts:
// inside a warp's columns the lower and the upper half of each 8 in step order, their sum, then the warps in order.
// Columns of the 8-wide operand are rows of x, in registers: all of them, or (GATHER) those that chose the expert. Then a
// block's tiles are neighbours, so that it changes its rows two or three times; else they are spread, so that the first
// ones are known before the list is.
//
// A ninth warp asks for everything: a tile is one copy. The eight wait for the tile, multiply, and hand over their sums;
// the kernel is bound by their instructions.

#include "stream.cuh"
#include "expert_sums.cuh"

// EXPERT_FORMAT   of the weights, see expert_sums.cuh
// K, CHANNELS     columns; gate rows, as many up rows
// EXPERTS, TOPK   experts; choices of a row
// STEPS           64-column steps of a warp
// ROWS, GROUP     most rows; most pairs of an entry of the list
// GATHER          whether rows change with the entry
// SLOTS           tiles of a block in shared memory
// PER_SM          blocks of a multiprocessor; BESIDE  threads of another kernel's blocks for which they leave registers

constexpr int WARPS = 8;
constexpr int WORKERS = WARPS * 32;
constexpr int THREADS = WORKERS + 32;
constexpr int TILES = CHANNELS / 8;
constexpr int PIECE_BYTES = piece_bytes(STEPS);
constexpr int TILE_BYTES = WARPS * PIECE_BYTES;
constexpr int COLUMNS = GATHER ? GROUP : ROWS;
constexpr int PITCH = COLUMNS == 1 ? 1 : (COLUMNS + 1) / 2 * 2;
constexpr int SUMS = 16 * PITCH;  // floats of a warp
constexpr bool PADDED = WARPS * STEPS * 64 > K;
static_assert(WARPS * STEPS * 64 >= K && K % 16 == 0 && CHANNELS % 8 == 0 && GROUP <= 8 && (GATHER || ROWS <= 8), "plan");

using List = ExpertList<EXPERTS, TOPK, ROWS, GROUP, WORKERS>;
static_assert(sizeof(List) <= LIST_BYTES && LIST_BYTES - sizeof(List) < 16, "plan");
using Tiles = BlockUnits<TILES, GATHER>;

struct Arguments {
  const u8* tape;
  const u16* x;
  const long long* ids;
  const float* scale;  // of each expert in NVFP4
  u16* out;            // [pair][CHANNELS]
  long long x_stride;  // in values
  int rows;
};

// Of one value, the warps in order.
DEVICE float sum_of_warps(const float* part) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS; i++) sum += part[i * SUMS];
  return sum;
}

// The ninth warp: tiles of the block into the ring, in turn.
DEVICE void ask(const Arguments& a, const List& list, u32 ring, u32 full, u32 empty, u32 ready) {
  const bool first_lane = threadIdx.x % 32 == 0;
  const u64 policy = evict_first_policy();
  auto copy_tile = [&](u32 expert, int tile, int slot) {
    bulk_copy(ring + slot * TILE_BYTES, a.tape + (u64)(expert * TILES + tile) * TILE_BYTES, TILE_BYTES, full + 8 * slot, policy);
  };
  int asked = 0;
  if constexpr (!GATHER) {
    // What the ring holds at first needs no list: it is on its way while the others make one.
    FirstEntries<EXPERTS, TOPK, ROWS, GROUP> entries;
    entries.start(a.ids, a.rows);
#pragma unroll 1
    for (; asked < SLOTS; asked++) {
      const int unit = blockIdx.x + asked * gridDim.x;
      const u32 expert = entries.find(unit / TILES);
      if (expert == ~0u) break;
      if (first_lane) {
        barrier_expect_more(full + 8 * asked, TILE_BYTES);
        copy_tile(expert, unit % TILES, asked);
      }
    }
  }
  if (!first_lane) return;
  barrier_wait_alone(ready, 0);
  int slot = 0, parity = 1;
#pragma unroll 1
  for (Tiles at(list.number); at.left > 0; at.advance()) {
    barrier_wait_alone(empty + 8 * slot, parity);
    barrier_expect(full + 8 * slot, asked > 0 ? 0 : TILE_BYTES);
    if (asked-- <= 0) copy_tile(List::expert_of(list.entries[at.entry]), at.unit, slot);
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + BESIDE / PER_SM, PER_SM) moe_gate_up_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* sums = (float*)(shared + SLOTS * TILE_BYTES);
  List& list = *(List*)(sums + WARPS * WARPS * SUMS);
  const u32 ring = shared_address(shared), full = shared_address((u8*)&list + LIST_BYTES), empty = full + 8 * SLOTS;
  const u32 ready = empty + 8 * SLOTS, summed = ready + 8;
  if (threadIdx.x == WORKERS) {
    make_ring(full, empty, SLOTS, WORKERS);
    barrier_init(ready, WORKERS);
    for (int i = 0; i < WARPS; i++) barrier_init(summed + 8 * i, WORKERS);
    barrier_init_done();
  }
  if (warp < WARPS) list.clear();
  __syncthreads();
  if (warp == WARPS) {
    wait_for_predecessor();
    launch_dependents();
    ask(a, list, ring, full, empty, ready);
    return;
  }

  wait_for_predecessor();
  launch_dependents();  // not before: the next kernel reads what the kernels before this one wrote, without waiting

  Words x[2 * STEPS];
  auto load_row = [&](const u16* row) {
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) x[i] = load_columns<PADDED ? K : 1 << 30>(row, warp * STEPS * 64 + i * 32 + t * 8);
  };
  // columns of the operand past the last one repeat it: they spoil sums that nobody stores
  if constexpr (!GATHER) load_row(a.x + min(g, a.rows - 1) * a.x_stride);
  Tiles at(list.build(a.ids, a.rows, ready));
  if (ROWS > 1) List::sync();  // pairs

  const u32 codes_at = kept(ring + warp * PIECE_BYTES + codes_in_piece(lane));
  const u32 scales_at = kept(ring + warp * PIECE_BYTES + scales_in_piece(STEPS, lane));
  const u32 mine = kept(warp * SUMS + g * PITCH + 2 * t);
  int slot = 0, parity = 0, duty = 0, round = 0, held = -1;
#pragma unroll 1
  for (; at.left > 0; at.advance()) {
    if (GATHER && at.entry != held) {
      held = at.entry;
      load_row(a.x + list.pair[held * GROUP + min(g, List::count_of(list.entries[held]) - 1)] / TOPK * a.x_stride);
    }
    u32 entry = 0;
    float scale = 1.f;
    if (warp == duty) {
      entry = list.entries[at.entry];
      if (EXPERT_SCALES) scale = SCALE_REST * a.scale[List::expert_of(entry)];
    }
    ExpertSums piece;
    barrier_wait(full + 8 * slot, parity);
    const u32 codes = codes_at + slot * TILE_BYTES, scales = scales_at + slot * TILE_BYTES;
#pragma unroll
    for (int i = 0; i < STEPS; i++) piece.add(codes, scales, i, x[2 * i], x[2 * i + 1]);
    piece.close(scales);
    reads_done();
    barrier_arrive(empty + 8 * slot);  // every lane, for what it read itself
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
    // A barrier for each buffer; nobody waits but the warp whose turn it is. It has been through every turn between two
    // uses of a buffer, and those who fill the buffer again have had their own turn since, so it has been read.
    if (2 * t < COLUMNS) {
      float* to = sums + duty * WARPS * SUMS + mine;
      if constexpr (COLUMNS == 1) {
        to[0] = piece.get(0);
        to[8 * PITCH] = piece.get(2);
      } else {
        *(float2*)to = make_float2(piece.get(0), piece.get(1));
        *(float2*)(to + 8 * PITCH) = make_float2(piece.get(2), piece.get(3));
      }
    }
    barrier_arrive(summed + 8 * duty);
    if (warp == duty) {
      barrier_wait(summed + 8 * warp, round);
      round ^= 1;
      for (int e = lane; e < 8 * List::count_of(entry); e += 32) {
        const int channel = e % 8, pair = list.pair[at.entry * GROUP + e / 8], column = GATHER ? e / 8 : pair / TOPK;
        const float* part = sums + duty * WARPS * SUMS + channel * PITCH + column;
        const float gate = sum_of_warps(part) * scale, up = sum_of_warps(part + 8 * PITCH) * scale;
        a.out[(u64)pair * CHANNELS + at.unit * 8 + channel] = to_bf16(gate / (1.f + __expf(-gate)) * up);
        if (GROUP <= 4) break;  // that was all
      }
      __syncwarp();
    }
    duty = (duty + 1) % WARPS;
  }
}
