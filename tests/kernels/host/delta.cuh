// kernels/include/delta.cuh for the host; see stream.cuh beside it.
#pragma once
#include <optional>

#include "stream.cuh"


inline thread_local std::optional<std::barrier<>::arrival_token> arrived;

inline void check_range(const void* pointer, size_t bytes) {
  bool inside = false;
  for (auto& [base, size] : readable) inside |= (const u8*)pointer >= base && (const u8*)pointer + bytes <= base + size;
  if (!inside) fault("outside of the arguments");
  if ((uintptr_t)pointer % bytes) fault("alignment");
}
template <class T> T checked(const T* pointer) {
  check_range(pointer, sizeof(T));
  return *pointer;
}
inline long long load_index(const long long* pointer) { return checked(pointer); }
inline void load_four(float (&v)[4], const float* pointer) {
  check_range(pointer, 16);
  memcpy(v, pointer, 16);
}
inline void store_four(float* pointer, const float (&v)[4]) {
  check_range(pointer, 16);
  memcpy(pointer, v, 16);
}
inline void store_words(void* pointer, const Words& v) {
  check_range(pointer, 16);
  memcpy(pointer, &v, 16);
}
inline void store_four_passing(float* pointer, const float (&v)[4]) { store_four(pointer, v); }
inline void bulk_store(void* to, u32 from, u32 bytes, u64) {
  check_shared(from, bytes);
  check_global(to, bytes);
  memcpy(to, block_shared + from, bytes);
}
inline void bulk_stores_commit() {}
inline void bulk_stores_read() {}
inline void bulk_stores_wait() {}
inline void call_into_l2(const void* pointer) { check_range(pointer, 32); }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }

inline float times(float a, float b) { return a * b; }
inline float plus(float a, float b) { return a + b; }
inline float times_plus(float a, float b, float c) { return std::fma(a, b, c); }
inline float over(float a, float b) { return a / b; }
inline float root(float a) { return std::sqrt(a); }
inline float low_half(u32 pair) { return bf16_of(pair, 0); }
inline float high_half(u32 pair) { return bf16_of(pair, 1); }
inline float rounded(float value) { return bf16_of(to_bf16(value), 0); }

template <int COUNT> void add_across(float (&v)[COUNT], int mask) {
  static_assert(COUNT <= 4);
  Warp& w = *block->warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  memcpy(w.a[lane], v, sizeof v);
  w.sync.arrive_and_wait();
  float other[COUNT];
  memcpy(other, w.a[lane ^ mask], sizeof other);
  for (int i = 0; i < COUNT; i++) v[i] += other[i];
  w.sync.arrive_and_wait();
}

inline void cluster_arrive_apart() { arrived.emplace(cluster_barrier->arrive()); }
inline void cluster_wait_apart() { cluster_barrier->wait(std::move(*arrived)); }
