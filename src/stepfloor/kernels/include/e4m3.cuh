// E4M3 codes to the bf16 pairs that a matrix step takes. Source: the OCP format; _stream.py writes the words read here.
//
// A code becomes bf16 by moving bits: the sign to the sign, the others to the lowest exponent bits and the highest mantissa
// bits, which is code * 2^-120; multiplying by a power of two is exact.
#pragma once

constexpr u32 E4M3_POWER = 0x7b807b80u;  // 2^120, twice

// Four codes of a word times a power of two. Columns 0 and 1 lie where they belong; 2 and 3 in the bits between, which
// hold no second field of eight, so those come in two moves.
DEVICE void decode_four(u32 codes, u32 power, u32& first, u32& second) {
  first = multiply_pair(codes & 0x87f087f0u, power);
  second = multiply_pair(((codes << 4) & 0x80f080f0u) | ((codes >> 4) & 0x07000700u), power);
}

// Eight codes: this lane's columns of a step.
DEVICE Words decode_e4m3(u32 low, u32 high, u32 power) {
  Words v;
  decode_four(low, power, v.x, v.y);
  decode_four(high, power, v.z, v.w);
  return v;
}
