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

}  // namespace fastkernels::ptx
