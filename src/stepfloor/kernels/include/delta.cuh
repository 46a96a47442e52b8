// What the delta net's kernels add to stream.cuh: bf16 pairs, products that are never contracted, exchanges inside a warp,
// a cluster barrier in two halves. Source: PTX ISA 9.0; compute capability 9.0 and later.
#pragma once

#include "stream.cuh"

// ------------------------------------------------------------------ loads and stores, all through the L2

DEVICE long long load_index(const long long* pointer) {
  long long v;
  asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(v) : "l"(pointer));
  return v;
}

DEVICE void load_four(float (&v)[4], const float* pointer) {
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(pointer));
}

DEVICE void store_four(float* pointer, const float (&v)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}

// Leaves the L2 before other lines: nobody reads a state again before the next step.
DEVICE void store_four_passing(float* pointer, const float (&v)[4]) {
  asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}

DEVICE void store_words(void* pointer, const Words& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

DEVICE void call_into_l2(const void* pointer) { asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer)); }

// From shared memory, which a generic store has written, after operands_stored of the writer. Sizes as for bulk_copy.
DEVICE void bulk_store(void* to, u32 from, u32 bytes, u64 policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to), "r"(from), "r"(bytes),
               "l"(policy)
               : "memory");
}
DEVICE void bulk_stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Those of this thread: shared memory has been read; they have been done.
DEVICE void bulk_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void bulk_stores_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ------------------------------------------------------------------ arithmetic that rounds where it is written

DEVICE float times(float a, float b) { return __fmul_rn(a, b); }
DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }
DEVICE float times_plus(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float over(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float root(float a) { return __fsqrt_rn(a); }

DEVICE float low_half(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
// By the conversion of a pair, whose upper half is where a float has its bits.
DEVICE float rounded(float value) { return __uint_as_float(to_pair(0.0f, value)); }

// ------------------------------------------------------------------ warp and cluster

// Adds what the lane `mask` away holds: both sides get the same sum, since a + b is b + a.
template <int COUNT> DEVICE void add_across(float (&v)[COUNT], int mask) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) v[i] = plus(v[i], __shfl_xor_sync(0xffffffffu, v[i], mask));
}

// Like those of stream.cuh, for warps whose threads may come one by one.
DEVICE void cluster_arrive_apart() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
DEVICE void cluster_wait_apart() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
