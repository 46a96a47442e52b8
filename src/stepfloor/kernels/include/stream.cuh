// What decode kernels share: bulk copies into a ring that one warp owns, programmatic dependent launch, bf16 matrix steps.
// Source: PTX ISA 9.0 (cp.async.bulk, mbarrier, griddepcontrol, mma.m16n8k16). Includes nothing, so that NVRTC needs no
// toolkit headers; compute capability 9.0 and later.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

struct alignas(16) Words {
  u32 x, y, z, w;
};
struct Pair {
  u32 x, y;
};

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// ------------------------------------------------------------------ programmatic dependent launch

// The next kernel's blocks may start once every block of this one has said so; its own wait still covers our stores.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Everything the kernels before this one wrote is visible afterwards. A kernel launched without the attribute passes at once.
DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ------------------------------------------------------------------ barriers of bulk copies

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
DEVICE void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// More bytes of the current phase, without an arrival.
DEVICE void barrier_expect_more(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// By all lanes of a warp, which go on together. Were each to leave a loop of its own, the compiler might take them to be
// together when they are not: matrix steps then read registers of lanes that lag behind, once in ten thousand sums.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!__all_sync(~0u, done));
}

// By one lane.
DEVICE void barrier_wait_alone(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same for what other blocks of the cluster sent.
DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ------------------------------------------------------------------ copies and loads

// Weights are read once a step: they leave the L2 first, so that activations stay.
DEVICE u64 evict_first_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Before shared memory that this warp has read goes to a bulk copy again. Neither a barrier's arrival nor the copy waits for
// loads that the warp has only issued: behind stores to a slow memory they wait longer than a copy takes, and read the next piece.
DEVICE void reads_done() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

// Both addresses and the size are multiples of 16 bytes.
DEVICE void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// The same for what other blocks read too.
DEVICE void bulk_copy_kept(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

DEVICE void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void copy16_streamed(u32 to, const void* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}

DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

DEVICE Words load_shared(u32 address) {
  Words v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

// Through the L2: the L1 may hold what an earlier kernel of the chain read here before the last one wrote it.
DEVICE Words load_global(const void* pointer) {
  Words v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer));
  return v;
}

DEVICE u32 load_shared_word(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

DEVICE Pair load_shared_pair(u32 address) {
  Pair v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

// Of all 32 lanes.
DEVICE u32 warp_max(u32 v) { return __reduce_max_sync(~0u, v); }
DEVICE u32 warp_min(u32 v) { return __reduce_min_sync(~0u, v); }
DEVICE u32 warp_add(u32 v) { return __reduce_add_sync(~0u, v); }
DEVICE u32 warp_ballot(bool v) { return __ballot_sync(~0u, v); }

DEVICE u32 load_shared_byte(u32 address) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

DEVICE u32 load_global_word(const void* pointer) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(pointer));
  return v;
}

DEVICE u32 load_global_byte(const void* pointer) {
  u32 v;
  asm volatile("ld.global.cg.u8 %0, [%1];" : "=r"(v) : "l"(pointer));
  return v;
}

DEVICE u64 load_global_u64(const void* pointer) {
  u64 v;
  asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(pointer));
  return v;
}

// Weights, by evict_first_policy.
DEVICE Words load_global_streamed(const void* pointer, u64 policy) {
  Words v;
  asm volatile("ld.global.cg.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer), "l"(policy));
  return v;
}
DEVICE u64 load_global_u64_streamed(const void* pointer, u64 policy) {
  u64 v;
  asm volatile("ld.global.cg.L2::cache_hint.u64 %0, [%1], %2;" : "=l"(v) : "l"(pointer), "l"(policy));
  return v;
}

DEVICE u16 load_half(const void* pointer) {
  u16 v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(pointer));
  return v;
}

DEVICE void store_shared(u32 address, const Words& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

DEVICE void store_shared_pair(u32 address, const Pair& v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

DEVICE void store_shared_word(u32 address, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory"); }

DEVICE void store_global(void* pointer, const Words& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

DEVICE float load_global_float(const void* pointer) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(pointer) : "memory");
  return v;
}

// ------------------------------------------------------------------ barriers of some warps for others

// Counts this warp in at barrier `id` (1 to 15) and waits until all are.
DEVICE void named_barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ------------------------------------------------------------------ arithmetic

DEVICE u32 rotate_left(u32 word, int bits) { return __funnelshift_l(word, word, bits); }

// Bits of `a` where the mask has ones, of `b` elsewhere; bits of the mask in `a`, and those of `b`. In C++ they are two
// operations more often than one.
DEVICE u32 select_bits(u32 a, u32 b, u32 mask) {
  u32 v;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(v) : "r"(a), "r"(b), "r"(mask));
  return v;
}
DEVICE u32 mask_or(u32 a, u32 mask, u32 b) {
  u32 v;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(a), "r"(mask), "r"(b));
  return v;
}

// Byte `index` of a word in both halves, zero-extended.
DEVICE u32 spread_byte(u32 word, int index) { return __byte_perm(word, 0, index * 0x0101 + 0x4040); }

// One half of a pair in both; as an operand of multiply_pair it costs nothing.
DEVICE u32 twice_lower(u32 pair) {
  u32 v;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(v) : "r"(pair));
  return v;
}
DEVICE u32 twice_upper(u32 pair) {
  u32 v;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(v) : "r"(pair));
  return v;
}

// c[16, 8] += a[16, 16] b[16, 8], bf16 operands. Lane (g, t) = (lane / 4, lane % 4): a0, a2 hold row g, a1, a3 row g + 8;
// b0, b1 hold column g; c[0..1] are row g, columns 2t and 2t + 1, c[2..3] the same of row g + 8.
DEVICE void matrix_step(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same by the four warps of a warpgroup, compute capability 9.0: d[64, ROWS] += a[64, 16] b[16, ROWS]. Each warp has 16
// rows of a and d, laid out as above; d[4j ..] are the columns 8j ... b lies in shared memory as [8 columns][half of k]
// [column][8 k], 128 bytes a block of 8 x 8. Its sums have the bits of matrix_step:
// benchmarks.linear checks it on the device.
#define LIST_8(X, i) X(i), X(i + 1), X(i + 2), X(i + 3), X(i + 4), X(i + 5), X(i + 6), X(i + 7)
#define IN_OUT(i) "+f"(d[i])
#define GROUP_STEP(SIZE, REGISTERS, A0, A1, A2, A3, B, ...)                                                                    \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #SIZE "k16.f32.bf16.bf16 {" REGISTERS "}, {%" #A0 ", %" #A1 ", %" #A2       \
               ", %" #A3 "}, %" #B ", 1, 1, 1, 0;"                                                                                \
               : __VA_ARGS__                                                                                                      \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(operand))
#define REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGISTERS_16 REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_24 REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS_32 REGISTERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_40 REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
template <int WIDTH> DEVICE void group_step(float (&d)[WIDTH / 2], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
  // no swizzle; 128 bytes from one half of k to the other, 256 from 8 columns to the next. In a cluster the bits of an address
  // from 24 on name the block: the descriptor has no room for them.
  const u64 operand = (u64)(b >> 4 & 0x3fff) | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
  static_assert(WIDTH == 16 || WIDTH == 32 || WIDTH == 48 || WIDTH == 64 || WIDTH == 80, "columns");
  if constexpr (WIDTH == 16) GROUP_STEP(16, REGISTERS_8, 8, 9, 10, 11, 12, LIST_8(IN_OUT, 0));
  if constexpr (WIDTH == 32) GROUP_STEP(32, REGISTERS_16, 16, 17, 18, 19, 20, LIST_8(IN_OUT, 0), LIST_8(IN_OUT, 8));
  if constexpr (WIDTH == 48)
    GROUP_STEP(48, REGISTERS_24, 24, 25, 26, 27, 28, LIST_8(IN_OUT, 0), LIST_8(IN_OUT, 8), LIST_8(IN_OUT, 16));
  if constexpr (WIDTH == 64)
    GROUP_STEP(64, REGISTERS_32, 32, 33, 34, 35, 36, LIST_8(IN_OUT, 0), LIST_8(IN_OUT, 8), LIST_8(IN_OUT, 16), LIST_8(IN_OUT, 24));
  if constexpr (WIDTH == 80)
    GROUP_STEP(80, REGISTERS_40, 40, 41, 42, 43, 44, LIST_8(IN_OUT, 0), LIST_8(IN_OUT, 8), LIST_8(IN_OUT, 16), LIST_8(IN_OUT, 24),
               LIST_8(IN_OUT, 32));
}
// Before the first group_step and after registers that it takes were written.
DEVICE void group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All steps so far are done: their sums may be read, their operands overwritten.
DEVICE void group_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Stores to shared memory so far are seen by group_step after the next barrier. Waits for all that this warp has under way.
DEVICE void operands_stored() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Nearest even, once.
DEVICE u16 to_bf16(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Two bf16 in a word, each operation rounded: .rn forbids their fusion.
DEVICE u32 multiply_pair(u32 a, u32 b) {
  u32 v;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
DEVICE u32 add_pair(u32 a, u32 b) {
  u32 v;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
// One rounding, wherever the compiler puts it.
DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float lower(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float upper(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE u32 to_pair(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

// Within 2^-22 of the value; 0 below x = -126.
DEVICE float power_of_two(float x) {
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}
DEVICE float inverse_root(float x) { return rsqrtf(x); }
DEVICE float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
// In 4 instructions for some 20, within 2^-20 of the value down to x = -87 and 0 below -88: for what is rounded to bf16 next.
DEVICE float short_sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

// ------------------------------------------------------------------ warp

// The same bits in every lane: each step adds a pair of lanes, in whichever order.
DEVICE float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}
DEVICE float from_lane(float value, int lane) { return __shfl_sync(~0u, value, lane); }
DEVICE u32 from_lane(u32 value, int lane) { return __shfl_sync(~0u, value, lane); }

// The same value, which the compiler then keeps in its register: others it computes again at every use to save one.
DEVICE u32 kept(u32 value) { return from_lane(value, threadIdx.x % 32); }

// ------------------------------------------------------------------ cluster

// What a block wrote before it arrives is there for the others after their wait. Work between the two overlaps the barrier;
// stores to global memory belong there, since arriving waits for those before it.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The same for barriers that barrier_init_done has published: orders nothing else, and waits for no store.
DEVICE void cluster_arrive_at_once() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// The last barrier: a block that ends takes its shared memory with it. Orders nothing.
DEVICE void cluster_leave() {
  cluster_arrive_at_once();
  cluster_wait();
}

// A float of another block of the cluster, at the address it has in this one.
DEVICE float load_peer(u32 address, u32 rank) {
  u32 remote;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
  return value;
}

DEVICE void load_peer_four(float (&v)[4], u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(remote)
               : "memory");
}

// The same in two steps, for several stores to one block.
DEVICE u32 peer_address(u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
DEVICE void store_remote(u32 remote, float value) { asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory"); }

// Where load_peer would read. The other block must have started, and must not end before a cluster_sync.
DEVICE void store_peer(u32 address, u32 rank, float value) { store_remote(peer_address(address, rank), value); }

// Stores that count as bytes of a barrier of that block: whoever waits there sees the values. Both from peer_address.
DEVICE void send_peer(u32 remote, const float (&v)[1], u32 remote_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(remote), "f"(v[0]), "r"(remote_barrier)
               : "memory");
}
DEVICE void send_peer(u32 remote, const float (&v)[2], u32 remote_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(remote), "f"(v[0]), "f"(v[1]),
               "r"(remote_barrier)
               : "memory");
}
DEVICE void send_peer(u32 remote, const float (&v)[4], u32 remote_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote), "f"(v[0]),
               "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(remote_barrier)
               : "memory");
}
