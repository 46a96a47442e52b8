// kernels/include/stream.cuh for the host: a thread stands for a lane, a std::barrier for a barrier. Slow and exact in what
// it shows: addresses, alignment, shared-memory sizes, order of sums, reads past the end, bulk copies over what a lane may still
// be reading. Not shown: other asynchrony and races.
#pragma once
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(16) Words {
  u32 x, y, z, w;
};
struct Pair {
  u32 x, y;
};
struct Index {
  int x;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float __uint_as_float(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __ffs(u32 word) { return __builtin_ffs((int)word); }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {  // without the selector's sign bits
  const u64 bytes = (u64)b << 32 | a;
  u32 v = 0;
  for (int i = 0; i < 4; i++) v |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return v;
}
inline int __popc(u32 word) { return __builtin_popcount(word); }
inline float __expf(float x) { return expf(x); }
inline u32 atomicOr(u32* at, u32 bits) { return std::atomic_ref<u32>(*at).fetch_or(bits); }

struct Warp {
  std::barrier<> sync{32};
  u32 a[32][4], b[32][2];
  float lanes[32];
};
struct Block {
  std::vector<u8> memory;
  std::barrier<> sync;
  std::vector<std::unique_ptr<Warp>> warps;
  std::mutex naming;
  std::unique_ptr<std::barrier<>> named[16];
  std::vector<std::atomic<int>> reading;  // lanes whose loads of these 16 bytes need not have ended
  Block(int threads, size_t bytes) : memory(bytes + 128, 0xff), sync(threads), reading(bytes / 16 + 1) {  // 0xff: NaN until written
    for (int i = 0; i < threads / 32; i++) warps.push_back(std::make_unique<Warp>());
  }
  std::barrier<>& barrier_of(int id, int threads) {  // of as many threads as its first use says
    const std::lock_guard<std::mutex> lock(naming);
    if (!named[id]) named[id] = std::make_unique<std::barrier<>>(threads);
    return *named[id];
  }
  u8* shared() { return (u8*)(((uintptr_t)memory.data() + 127) & ~(uintptr_t)127); }
};
struct Copy {
  u32 to;
  const void* from;
};

inline thread_local Index threadIdx, blockIdx, gridDim;
inline thread_local Block* block;
inline thread_local std::vector<u32> reads;  // of this lane, as in Block::reading
inline thread_local u8* block_shared;
inline thread_local size_t shared_size;
inline thread_local std::vector<Block*>* cluster;
inline thread_local std::barrier<>* cluster_barrier;
inline thread_local std::vector<Copy> open_copies;
inline thread_local std::vector<std::vector<Copy>> copies;
inline std::vector<std::pair<const u8*, size_t>> readable;
inline std::atomic<int> faults{0};

inline void fault(const char* what) {
  if (faults++ < 5) fprintf(stderr, "%s: block %d, thread %d\n", what, blockIdx.x, threadIdx.x);
}
inline void check_global(const void* from, size_t bytes, size_t alignment = 16) {
  bool inside = false;
  for (auto& [base, size] : readable) inside |= (const u8*)from >= base && (const u8*)from + bytes <= base + size;
  if (!inside) fault("read outside of the arguments");
  if ((uintptr_t)from % alignment) fault("global address not aligned");
}
inline void check_shared(u32 address, size_t bytes) {
  if (address % (bytes < 16 ? bytes : 16) || address + bytes > shared_size) fault("shared address");
}

inline u32 shared_address(const void* pointer) { return (u32)((u8*)pointer - block_shared); }
inline void launch_dependents() {}
inline void wait_for_predecessor() {}
inline void __syncthreads() { block->sync.arrive_and_wait(); }
inline void __syncwarp() { block->warps[threadIdx.x / 32]->sync.arrive_and_wait(); }

// A barrier: 24 bits of bytes on the way, 12 of arrivals that the phase still lacks, 12 of arrivals of a phase, 16 of
// phases that have ended.
inline std::atomic<u64>& counter(u32 barrier) { return *(std::atomic<u64>*)(block_shared + barrier); }
inline void barrier_init(u32 barrier, u32 arrivals) {
  check_shared(barrier, 8);
  counter(barrier) = (u64)arrivals << 36 | (u64)arrivals << 24;
}
inline void barrier_init_done() {}
inline void barrier_change(std::atomic<u64>& counter, int bytes, int arrivals) {
  u64 before = counter, after;
  bool ends;
  do {
    const int left = (int)(before >> 24 & 0xfff) - arrivals, on_the_way = (int)(before & 0xffffff) + bytes;
    if (left < 0) return fault("more arrivals than the barrier expects");
    if (on_the_way < 0) return fault("more bytes than the barrier expects");
    if (on_the_way >> 24) return fault("more bytes than fit this count");
    ends = left == 0 && on_the_way == 0;
    const u64 all = before >> 36 & 0xfff;
    after = ((before >> 48) + ends) << 48 | all << 36 | (ends ? all : (u64)left) << 24 | (u32)on_the_way;
  } while (!counter.compare_exchange_weak(before, after));
}
inline void barrier_change(u32 barrier, int bytes, int arrivals) { barrier_change(counter(barrier), bytes, arrivals); }
inline void barrier_expect(u32 barrier, u32 bytes) { barrier_change(barrier, bytes, 1); }
inline void barrier_expect_more(u32 barrier, u32 bytes) { barrier_change(barrier, bytes, 0); }
inline void barrier_arrive(u32 barrier) { barrier_change(barrier, 0, 1); }
inline void barrier_wait(u32 barrier, u32 parity) {
  for (int i = 0; (counter(barrier) >> 48 & 1) == parity; i++) {
    if (i == 30000) return fault("waits forever");  // half a minute at least
    if (i < 4) std::this_thread::yield();
    else std::this_thread::sleep_for(std::chrono::milliseconds(1));  // leaves the core to those waited for
  }
}
inline void barrier_wait_alone(u32 barrier, u32 parity) { barrier_wait(barrier, parity); }
inline void barrier_wait_cluster(u32 barrier, u32 parity) { barrier_wait(barrier, parity); }
inline u64 evict_first_policy() { return 0; }
inline void begin_read(u32 address) {
  reads.push_back(address / 16);
  block->reading[address / 16]++;
}
inline void end_reads() {
  for (u32 at : reads) block->reading[at]--;
  reads.clear();
}
inline void bulk_copy_kept(u32 to, const void* from, u32 bytes, u32 barrier) {
  check_global(from, bytes);
  check_shared(to, bytes);
  for (u32 at = to / 16; at < (to + bytes + 15) / 16; at++)
    if (block->reading[at]) fault("bulk copy over reads that need not have ended");
  if (bytes % 16 || bytes == 0) fault("bulk copy of a size that is not a multiple of 16");
  memcpy(block_shared + to, from, bytes);
  barrier_change(barrier, -(int)bytes, 0);
}
inline void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier, u64) { bulk_copy_kept(to, from, bytes, barrier); }
inline void copy16(u32 to, const void* from) {
  check_global(from, 16);
  check_shared(to, 16);
  open_copies.push_back({to, from});
}
inline void copy16_streamed(u32 to, const void* from, u64) { copy16(to, from); }
inline void copies_commit() {
  copies.push_back(open_copies);
  open_copies.clear();
}
template <int PENDING> void copies_wait() {  // lands as late as allowed
  for (; (int)copies.size() > PENDING; copies.erase(copies.begin()))
    for (auto& c : copies.front()) memcpy(block_shared + c.to, c.from, 16);
}
inline Words load_shared(u32 address) {
  check_shared(address, 16);
  begin_read(address);
  return *(Words*)(block_shared + address);
}
inline Words load_global(const void* from) {
  check_global(from, 16);
  return *(const Words*)from;
}
inline u32 load_shared_word(u32 address) {
  check_shared(address, 4);
  begin_read(address);
  return *(u32*)(block_shared + address);
}
template <class T> T load_scalar(const void* from) {
  check_global(from, sizeof(T), sizeof(T));
  return *(const T*)from;
}
inline Pair load_shared_pair(u32 address) {
  check_shared(address, 8);
  begin_read(address);
  return *(Pair*)(block_shared + address);
}
inline u32 load_shared_byte(u32 address) {
  check_shared(address, 1);
  begin_read(address);
  return block_shared[address];
}
inline u32 load_global_word(const void* from) { return load_scalar<u32>(from); }
inline u32 load_global_byte(const void* from) { return load_scalar<u8>(from); }
inline u64 load_global_u64(const void* from) { return load_scalar<u64>(from); }
inline Words load_global_streamed(const void* from, u64) { return load_global(from); }
inline u64 load_global_u64_streamed(const void* from, u64) { return load_global_u64(from); }
inline u16 load_half(const void* from) { return load_scalar<u16>(from); }
inline float load_global_float(const void* from) { return load_scalar<float>(from); }
inline void named_barrier_sync(int id, int threads) { block->barrier_of(id, threads).arrive_and_wait(); }
inline int __shfl_up_sync(u32, int value, int distance) {
  Warp& w = *block->warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  w.a[lane][0] = value;
  w.sync.arrive_and_wait();
  const int found = w.a[lane < distance ? lane : lane - distance][0];
  w.sync.arrive_and_wait();
  return found;
}

template <class T> T __shfl_xor_sync(u32, T value, int distance) {
  Warp& w = *block->warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  T found;
  memcpy(&w.a[lane][0], &value, 4);
  w.sync.arrive_and_wait();
  memcpy(&found, &w.a[lane ^ distance][0], 4);
  w.sync.arrive_and_wait();
  return found;
}
inline u32 __float_as_uint(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline u32 warp_max(u32 value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const u32 other = __shfl_xor_sync(~0u, value, distance);
    value = other > value ? other : value;
  }
  return value;
}
inline u32 warp_min(u32 value) { return ~warp_max(~value); }
inline u32 warp_add(u32 value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}
inline u32 warp_ballot(bool value) { return warp_add((u32)value << threadIdx.x % 32); }

inline float bf16_of(u32 word, int high) {
  const u32 bits = high ? word & 0xffff0000u : word << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
// The fragment layout of PTX ISA, mma.m16n8k16 with bf16.
inline void matrix_step(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  Warp& w = *block->warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  memcpy(w.a[lane], a, sizeof a);
  memcpy(w.b[lane], b, sizeof b);
  w.sync.arrive_and_wait();
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    for (int k = 0; k < 16; k++) {
      const int owner = k % 8 / 2;
      const u32 left = w.a[row % 8 * 4 + owner][k / 8 * 2 + row / 8], right = w.b[column * 4 + owner][k / 8];
      c[i] += bf16_of(left, k & 1) * bf16_of(right, k & 1);
    }
  }
  w.sync.arrive_and_wait();
}
// Four warps do this side by side; b is [8 columns][half of k][column][8 k] in shared memory.
template <int WIDTH> void group_step(float (&d)[WIDTH / 2], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
  Warp& w = *block->warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 a[4] = {a0, a1, a2, a3};
  check_shared(b, WIDTH * 32);
  memcpy(w.a[lane], a, sizeof a);
  w.sync.arrive_and_wait();
  for (int i = 0; i < WIDTH / 2; i++) {
    const int row = g + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
    for (int k = 0; k < 16; k++) {
      const u32 left = w.a[row % 8 * 4 + k % 8 / 2][k / 8 * 2 + row / 8];
      const u32 right = *(u32*)(block_shared + b + column / 8 * 256 + k / 8 * 128 + column % 8 * 16 + k % 8 / 2 * 4);
      d[i] += bf16_of(left, k & 1) * bf16_of(right, k & 1);
    }
  }
  w.sync.arrive_and_wait();
}
inline void group_begin() {}
inline void group_commit() {}
inline void group_wait() { end_reads(); }  // of the operands that it used
inline void operands_stored() { end_reads(); }
inline void reads_done() {
  end_reads();
  __syncwarp();
}
inline u16 to_bf16(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void store_global(void* to, const Words& v) {
  if ((uintptr_t)to % 16) fault("global address not aligned");
  *(Words*)to = v;
}
inline void store_shared(u32 address, const Words& v) {
  check_shared(address, 16);
  *(Words*)(block_shared + address) = v;
}
inline void store_shared_pair(u32 address, const Pair& v) {
  check_shared(address, 8);
  *(Pair*)(block_shared + address) = v;
}
inline void store_shared_word(u32 address, u32 v) {
  check_shared(address, 4);
  *(u32*)(block_shared + address) = v;
}
inline float lower(u32 pair) { return bf16_of(pair, 0); }
inline float upper(u32 pair) { return bf16_of(pair, 1); }
inline u32 to_pair(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
inline u32 multiply_pair(u32 a, u32 b) { return to_pair(lower(a) * lower(b), upper(a) * upper(b)); }
inline u32 add_pair(u32 a, u32 b) { return to_pair(lower(a) + lower(b), upper(a) + upper(b)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline float power_of_two(float x) { return std::exp2(x); }
inline float inverse_root(float x) { return 1.f / std::sqrt(x); }
inline float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }
inline float short_sigmoid(float x) { return sigmoid(x); }
inline float from_lane(float value, int lane) {
  Warp& w = *block->warps[threadIdx.x / 32];
  w.lanes[threadIdx.x % 32] = value;
  w.sync.arrive_and_wait();
  value = w.lanes[lane];
  w.sync.arrive_and_wait();
  return value;
}
inline u32 from_lane(u32 value, int lane) {
  u32 found;
  const float bits = from_lane(__uint_as_float(value), lane);
  memcpy(&found, &bits, 4);
  return found;
}
inline u32 kept(u32 value) { return value; }
inline float warp_sum(float value) {
  for (int distance = 16; distance > 0; distance /= 2) value += from_lane(value, threadIdx.x % 32 ^ distance);
  return value;
}
inline void cluster_arrive() {}
inline void cluster_arrive_at_once() {}
inline void cluster_wait() { cluster_barrier->arrive_and_wait(); }
inline void cluster_sync() { cluster_wait(); }
inline void cluster_leave() { cluster_wait(); }
inline u32 rotate_left(u32 word, int bits) { return word << bits | word >> (32 - bits); }
inline u32 spread_byte(u32 word, int index) { return (word >> 8 * index & 0xff) * 0x10001u; }
inline u32 select_bits(u32 a, u32 b, u32 mask) { return (a & mask) | (b & ~mask); }
inline u32 mask_or(u32 a, u32 mask, u32 b) { return (a & mask) | b; }
inline u32 twice_lower(u32 pair) { return (pair & 0xffff) * 0x10001u; }
inline u32 twice_upper(u32 pair) { return (pair >> 16) * 0x10001u; }
inline float load_peer(u32 address, u32 rank) {
  check_shared(address, 4);
  return *(float*)((*cluster)[rank]->shared() + address);
}
inline void load_peer_four(float (&v)[4], u32 address, u32 rank) {
  check_shared(address, 16);
  memcpy(v, (*cluster)[rank]->shared() + address, 16);
}
inline u32 peer_address(u32 address, u32 rank) { return rank << 24 | address; }
inline void store_remote(u32 remote, float value) {
  const u32 address = remote & 0xffffff;
  check_shared(address, 4);
  *(float*)((*cluster)[remote >> 24]->shared() + address) = value;
}
template <int COUNT> void send_peer(u32 remote, const float (&v)[COUNT], u32 remote_barrier) {
  check_shared(remote & 0xffffff, COUNT * 4);
  check_shared(remote_barrier & 0xffffff, 8);
  for (int i = 0; i < COUNT; i++) store_remote(remote + i * 4, v[i]);
  barrier_change(*(std::atomic<u64>*)((*cluster)[remote_barrier >> 24]->shared() + (remote_barrier & 0xffffff)), -4 * COUNT, 0);
}
inline void store_peer(u32 address, u32 rank, float value) { store_remote(peer_address(address, rank), value); }

// Runs a kernel, one cluster after the other. Returns the number of faults.
template <class Kernel> int run_grid(int blocks, int of_cluster, int threads, size_t shared_bytes, Kernel kernel) {
  faults = 0;
  for (int first = 0; first < blocks; first += of_cluster) {
    std::vector<std::unique_ptr<Block>> owned;
    std::vector<Block*> members;
    for (int i = 0; i < of_cluster; i++) members.push_back(owned.emplace_back(std::make_unique<Block>(threads, shared_bytes)).get());
    std::barrier<> together(threads * of_cluster);
    std::vector<std::thread> running;
    for (int i = 0; i < threads * of_cluster; i++)
      running.emplace_back([&, i] {
        threadIdx.x = i % threads;
        blockIdx.x = first + i / threads;
        gridDim.x = blocks;
        block = members[i / threads];
        block_shared = block->shared();
        shared_size = shared_bytes;
        cluster = &members;
        cluster_barrier = &together;
        kernel();
      });
    for (auto& thread : running) thread.join();
  }
  return faults;
}
