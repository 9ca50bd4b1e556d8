// Thin wrappers of PTX instructions that the kernels of gdn_prefill alone use, see
// common/ptx_sm90.cuh.
#pragma once

#include <cstdint>

#include "common/ptx_sm90.cuh"

namespace fastkernels::ptx {

// "cp.async.bulk", global to shared, without a cache policy: addresses and `bytes` are multiples of
// 16; the bytes count towards the barrier's phase.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// "cp.async.mbarrier.arrive": arrives once, when this thread's copies before it are complete.
__device__ __forceinline__ void copy_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// "mbarrier.inval": its memory may be used otherwise, or for another one.
__device__ __forceinline__ void mbarrier_invalidate(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// "ld", cache operator .cg: past L1, where another SM's store would not be seen. Volatile, so that
// it is issued where it stands.
__device__ __forceinline__ uint4 load_l2(const uint4* pointer) {
  uint4 x;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(pointer));
  return x;
}

// "ld.shared" and "st.shared" of 16 bytes; loads are issued where they stand.
__device__ __forceinline__ uint4 load_shared(uint32_t shared) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_shared(uint32_t shared, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}

// The same value, of which the compiler does not know where it is from: what is made of it here is
// not kept, and spilled, since long before.
__device__ __forceinline__ uint32_t made_here(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// ---- registers ("setmaxnreg", of sm_90a and sm_100a) --------------------------------------------

// All warps of a warp group together, before they use more than they had; waits until the block's
// others have given up as many.
template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters) : "memory");
}

// ---- words that blocks and warps wait for each other by ("Memory Consistency Model") ------------

// "atom", of any block: the value before. Orders nothing.
__device__ __forceinline__ uint32_t fetch_add(uint32_t* word, uint32_t x) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(x)
               : "memory");
  return before;
}

// "red": what this thread has written, or seen written, before is visible to whoever sees the sum.
__device__ __forceinline__ void add_release(uint32_t* word, uint32_t x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(x) : "memory");
}

// "ld.acquire".
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* word) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
  return x;
}

// Until another block has made it at least `least`.
__device__ __forceinline__ void wait_at_least(const uint32_t* word, uint32_t least) {
  while (load_acquire(word) < least) {
  }
}

// The same of a word in shared memory, for warps of a block; gives the value seen.
__device__ __forceinline__ void store_release(uint32_t shared, uint32_t x) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

__device__ __forceinline__ uint32_t wait_shared_at_least(uint32_t shared, uint32_t least) {
  uint32_t x;
  do {
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  } while (x < least);
  return x;
}

}  // namespace fastkernels::ptx
