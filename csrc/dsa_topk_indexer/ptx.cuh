// Instructions of dsa_topk_indexer beyond those of common/ptx_sm90.cuh, in the same manner.
#pragma once

#include <cstdint>

#include "common/ptx_sm90.cuh"

namespace fastkernels::ptx {

// "cvt", twice: four e4m3 values of a word to float16, exactly; the first two into `low`.
__device__ __forceinline__ void convert_e4m3(uint32_t word, uint32_t* low, uint32_t* high) {
  asm("{\n"
      ".reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n"
      "}"
      : "=r"(*low), "=r"(*high)
      : "r"(word));
}

// "max", with the NaN that fmaxf would drop.
__device__ __forceinline__ float max_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// "mma.m16n8k16" of float16: as `mma_bf16`.
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// "ld.global.nc".
__device__ __forceinline__ uint4 load_constant(const uint4* pointer) {
  uint4 x;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(pointer));
  return x;
}

// "cp.async.bulk" without a cache policy.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// "red", in shared memory.
__device__ __forceinline__ void add_shared(uint32_t shared, uint32_t x) {
  asm volatile("red.relaxed.cta.shared::cta.add.u32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

// "atom", in shared memory: the value before. What this thread did before is seen by whoever adds
// next.
__device__ __forceinline__ uint32_t fetch_add_shared(uint32_t shared, uint32_t x) {
  uint32_t before;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(shared), "r"(x)
               : "memory");
  return before;
}

// "ld.shared::cluster", from an address of `map_shared`.
__device__ __forceinline__ uint32_t load_cluster(uint32_t mapped) {
  uint32_t x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(mapped) : "memory");
  return x;
}

}  // namespace fastkernels::ptx
