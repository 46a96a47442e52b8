// bf16 matrices of the routed experts from their tiles, for products of many rows, exact: NVFP4's code * block scale /
// SCALE_REST, E4M3's code. Source: _experts.py, which writes the tiles; include/expert_sums.cuh for the formats. A warp
// decodes one step at a time.

#include "stream.cuh"
#include "expert_sums.cuh"

// N, K, STEPS, SLICES, EXPERT_FORMAT  of the tiles
// PAIRED               whether a tile is 8 rows of the upper half of N and the 8 of the lower half that belong to them

constexpr int THREADS = 256;
constexpr int PIECE_BYTES = piece_bytes(STEPS);
static_assert(SLICES * STEPS * 64 >= K && K % 16 == 0 && N % 16 == 0, "plan");

struct Arguments {
  const u8* tape;  // of the first expert
  u16* out;        // [expert][N][K]
  int experts;
};

extern "C" __global__ void __launch_bounds__(THREADS) decode_experts_kernel(const __grid_constant__ Arguments a) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warps = gridDim.x * (THREADS / 32);
  launch_dependents();
  wait_for_predecessor();  // it may still read what is written here
  const int units = a.experts * (N / 16) * SLICES * STEPS;
  for (int unit = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; unit < units; unit += warps) {
    const int step = unit % STEPS, slice = unit / STEPS % SLICES, tile = unit / (STEPS * SLICES) % (N / 16);
    const u8* piece = a.tape + (u64)(unit / STEPS) * PIECE_BYTES;
    const Words codes = load_global(piece + step * EXPERT_STEP_CODES + lane * 16);
    u16* matrix = a.out + (u64)(unit / (STEPS * SLICES * (N / 16))) * N * K;
    const int column = (slice * STEPS + step) * 64 + t * 8;
    const int top = PAIRED ? tile * 8 + g : tile * 16 + g, bottom = top + (PAIRED ? N / 2 : 8);
    auto put = [&](const Words& eight, int row, int at) {
      if (at < K) store_global(matrix + (u64)row * K + at, eight);
    };
    if constexpr (EXPERT_FORMAT == EXPERTS_NVFP4) {
      const Decoded d = decode_step(codes, load_global_word(piece + STEPS * 512 + step * 64 + lane / 2 * 4));
      auto words = [](const u32(&pairs)[4]) { return Words{pairs[0], pairs[1], pairs[2], pairs[3]}; };
      put(words(d.top_lower), top, column);
      put(words(d.top_upper), top, column + 32);
      put(words(d.bottom_lower), bottom, column);
      put(words(d.bottom_upper), bottom, column + 32);
    } else {
      const Words below = load_global(piece + step * EXPERT_STEP_CODES + 512 + lane * 16);
      put(decode_e4m3(codes.x, codes.y, E4M3_POWER), top, column);
      put(decode_e4m3(codes.z, codes.w, E4M3_POWER), top, column + 32);
      put(decode_e4m3(below.x, below.y, E4M3_POWER), bottom, column);
      put(decode_e4m3(below.z, below.w, E4M3_POWER), bottom, column + 32);
    }
  }
}
