// What a warp leaves of its product in shared memory, for the kernels whose warps share the columns.
#pragma once

// A warp's sums of a tile of 16 rows, or of fewer than 9: [row][WIDTH] from `to` on. Lane (g, t) as in matrix_step; the lower
// and the upper half of each 32 columns are added up here.
template <int TILE, int WIDTH, int TIMES> DEVICE void store_sums(float* to, const float (&acc)[TIMES][2][4], int g, int t) {
  static_assert(TILE <= 8 || TILE == 16, "rows");
#pragma unroll
  for (int width = 0; width < TIMES; width++) {
    const float(&even)[4] = acc[width][0];
    const float(&odd)[4] = acc[width][1];
    float* at = to + g * WIDTH + width * 8 + 2 * t;
    if (g < TILE) *(float2*)at = make_float2(even[0] + odd[0], even[1] + odd[1]);
    if (TILE > 8) *(float2*)(at + 8 * WIDTH) = make_float2(even[2] + odd[2], even[3] + odd[3]);
  }
}

DEVICE void load_values(float (&v)[1], const float* from) { v[0] = *from; }
DEVICE void load_values(float (&v)[2], const float* from) {
  const float2 pair = *(const float2*)from;
  v[0] = pair.x;
  v[1] = pair.y;
}
DEVICE void load_values(float (&v)[4], const float* from) {
  const float4 four = *(const float4*)from;
  v[0] = four.x;
  v[1] = four.y;
  v[2] = four.z;
  v[3] = four.w;
}
