// Thin wrappers of PTX instructions (sm_90 and later); each names its section of the PTX ISA, and
// adds nothing to what the instruction does.
#pragma once

#include <cstdint>

namespace fastkernels::ptx {

// ---- arithmetic ---------------------------------------------------------------------------------

// "cvt": to bfloat16 bits, to nearest even.
__device__ __forceinline__ uint16_t to_bf16(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// Two at once, the first in the lower half.
__device__ __forceinline__ uint32_t to_bf16x2(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// "cvt": to TF32, to nearest, ties away from zero.
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

// "rcp": 1 / x to an ulp, 0 where that is below 2^-126. On the host, for tests of what uses it, a
// division.
__host__ __device__ __forceinline__ float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
#else
  return 1.0f / x;
#endif
}

// "ex2" and "lg2": to about 2^-22, relative and absolute (in the range of its use here).
__device__ __forceinline__ float exp2(float x) {
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
}

__device__ __forceinline__ float log2(float x) {
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
}

// ---- matrices ("Warp Level Matrix Instructions") ------------------------------------------------
// Lane l of a fragment: g = l / 4, c = l % 4. Two neighbouring bfloat16 values share a register.

// "mma.m16n8k16": d += a b. a: rows (g, g + 8, g, g + 8), columns from (2c, 2c, 2c + 8, 2c + 8);
// b: rows from (2c, 2c + 8), column g; d: (g, 2c), (g, 2c + 1), (g + 8, 2c), (g + 8, 2c + 1).
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// "mma.m16n8k8" of TF32: a: (g, c), (g + 8, c), (g, c + 4), (g + 8, c + 4); b: (c, g), (c + 4, g).
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// "ldmatrix": four 8x8 matrices of 16-bit values; lanes 8i to 8i + 7 give the addresses of matrix
// i's rows. A lane receives row g, columns 2c and 2c + 1 of each.
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// The same of the transposed matrices: rows 2c and 2c + 1, column g.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// "stmatrix", the inverse of `load_matrices_transposed`.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address,
                                                          const uint32_t (&x)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
}

// ---- barriers of a block ("bar") ----------------------------------------------------------------

// "bar.sync": waits until `threads` threads have arrived at barrier `id`.
__device__ __forceinline__ void barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// "bar.arrive": arrives and does not wait.
__device__ __forceinline__ void barrier_arrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- clusters ("barrier.cluster", "mapa", "st.async") -------------------------------------------

// "%cluster_ctarank": which block of its cluster this is.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// "barrier.cluster.arrive": what this thread wrote before is visible to those that wait. Threads
// that have ended count as arrived.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// The same without that: a full fence of memory less.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// "barrier.cluster.wait": until all threads of the cluster have arrived.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// "mapa": the address that a shared address of this block has in another one of the cluster.
__device__ __forceinline__ uint32_t map_shared(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// "st.async", to such an address: the bytes count towards the phase of an mbarrier of the same
// block, which must have started and must not have ended.
__device__ __forceinline__ void store_async(uint32_t mapped, float2 x, uint32_t mapped_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(mapped),
      "f"(x.x), "f"(x.y), "r"(mapped_barrier)
      : "memory");
}

__device__ __forceinline__ void store_async(uint32_t mapped, float4 x, uint32_t mapped_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(mapped),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(mapped_barrier)
      : "memory");
}

// ---- launches that overlap ("griddepcontrol") ---------------------------------------------------

// "griddepcontrol.launch_dependents": the next kernel may start once every block has said so.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// "griddepcontrol.wait": until the kernel before is complete and its writes are visible.
__device__ __forceinline__ void wait_for_dependency() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- addresses and cache policies ---------------------------------------------------------------

// A generic pointer into shared memory as the 32-bit address that the instructions below take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The block's dynamic shared memory, 1024-byte aligned.
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char shared[];
  return shared;
}

// "createpolicy": lines accessed under this policy are the first to leave L2.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// ---- global memory. Volatile, so that loads are issued where they stand, not where they are used
// -

// "ld.global.nc": the memory is not written while the kernel runs.
__device__ __forceinline__ uint16_t load_constant(const uint16_t* pointer) {
  uint16_t x;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(pointer));
  return x;
}

__device__ __forceinline__ uint2 load_constant(const uint2* pointer) {
  uint2 x;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(pointer));
  return x;
}

__device__ __forceinline__ uint32_t load_constant(const uint32_t* pointer) {
  uint32_t x;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(pointer));
  return x;
}

__device__ __forceinline__ int32_t load_constant(const int32_t* pointer) {
  int32_t x;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(pointer));
  return x;
}

__device__ __forceinline__ float load_constant(const float* pointer) {
  float x;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(pointer));
  return x;
}

// "prefetch": the line of this address into L2; nothing waits for it.
__device__ __forceinline__ void prefetch_l2(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

// "ld".
__device__ __forceinline__ float4 load(const float* pointer) {
  float4 x;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(pointer));
  return x;
}

// "ld", passing L1 by, with an L2 cache policy.
__device__ __forceinline__ float4 load_streaming(const float* pointer, uint64_t policy) {
  float4 x;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(pointer), "l"(policy));
  return x;
}

// "st".
__device__ __forceinline__ void store(float* pointer, float4 x) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}

// "st", cache operator .cs: likely to be accessed once.
__device__ __forceinline__ void store_streaming(float* pointer, float4 x) {
  asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}

// ---- asynchronous copies ("cp.async") -----------------------------------------------------------

// "cp.async", global to shared, past L1: 16 bytes, of which only the first `bytes` are read and the
// rest are zeros.
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// "cp.async.commit_group": closes the thread's current group, which may be empty.
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// "cp.async.wait_group": until all but the newest `kPending` groups of this thread are complete.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- mbarrier ("Parallel Synchronization and Communication Instructions: mbarrier") -------------

// "mbarrier.init".
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// "membar / fence": makes mbarrier.init visible to the async proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// "mbarrier.arrive": one arrival, which also makes the phase wait for `bytes` (0 is legal).
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// "mbarrier.try_wait": returns once the phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same for what other blocks of the cluster have stored.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- bulk copies ("Data Movement and Conversion Instructions: cp.async.bulk") -------------------

// "cp.async.bulk", global to shared: addresses and `bytes` are multiples of 16; the bytes count
// towards the barrier's phase.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes,
                                          uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// "cp.async.bulk", shared to global, in the thread's current bulk group.
__device__ __forceinline__ void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}

// "cp.async.bulk.commit_group": closes the thread's current group, which may be empty.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// "cp.async.bulk.wait_group": until all but the newest `kPending` groups of this thread have read
// their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// "membar / fence": orders this thread's earlier ordinary accesses of shared memory before later
// ones by the async proxy.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace fastkernels::ptx
