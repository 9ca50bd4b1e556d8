// Instructions of moe_fp8_block_scale beyond those of common/ptx_sm90.cuh, in the same manner.
// Those of the section "wgmma" and `setmaxnreg` are sm_90a's.
#pragma once

#include <cstdint>

#include "common/ptx_sm90.cuh"
#include "moe_fp8_block_scale/params.h"

namespace fastkernels::ptx {

// ---- e4m3 ---------------------------------------------------------------------------------------

// "cvt": to the nearest codes, ties to even, beyond 448 to 448; the first one in the lower half.
__device__ __forceinline__ uint32_t to_e4m3x2(float low, float high) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

// "cvt", twice: the values of two codes, exactly.
__device__ __forceinline__ float2 from_e4m3x2(uint32_t codes) {
  float2 x;
  asm("{\n"
      ".reg .b32 both;\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.f16x2.e4m3x2 both, %2;\n"
      "mov.b32 {low, high}, both;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}"
      : "=f"(x.x), "=f"(x.y)
      : "h"(static_cast<uint16_t>(codes)));
  return x;
}

// ---- copies -------------------------------------------------------------------------------------

// "cp.async" of 4 bytes.
__device__ __forceinline__ void copy_word_async(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// "cp.async.mbarrier.arrive": arrives once, when this thread's copies before it are complete.
__device__ __forceinline__ void copy_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// "prefetch.tensormap": fetches a tensor map, which lies in the kernel's parameters.
__device__ __forceinline__ void prefetch_map(const moe_fp8_block_scale::TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// "cp.async.bulk.tensor", global to shared: the map's box at a column and a row; what lies outside
// the tensor are zeros. All bytes of the box count towards the barrier's phase.
__device__ __forceinline__ void box_load(uint32_t shared, const moe_fp8_block_scale::TensorMap* map,
                                         int32_t column, int32_t row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same to the blocks of the cluster whose bits are set, in each to the place and the barrier
// that have these addresses there.
__device__ __forceinline__ void box_load(uint32_t shared, const moe_fp8_block_scale::TensorMap* map,
                                         int32_t column, int32_t row, uint32_t barrier,
                                         uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

// "mbarrier.arrive" in a block of the cluster, at an address of `map_shared`. Orders what this
// thread read before; what it wrote is not made visible there, which would take a fence of all
// memory.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t mapped) {
  asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}

// "st.shared".
__device__ __forceinline__ void store_shared(uint32_t shared, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

// "st".
__device__ __forceinline__ void store(void* pointer, uint4 x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}

// ---- registers ("setmaxnreg") -------------------------------------------------------------------

// All warps of a warp group together, before they use more than they had; waits until the block's
// others have given up as many.
template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- "wgmma": products by a warp group, with operands in shared memory --------------------------

// The matrix descriptor of rows of 128 bytes one after another, from a multiple of 1024 bytes on,
// in the 128-byte swizzle: 16 bytes of row r lie at place (theirs ^ r % 8). 8 rows are 1024 bytes
// on (bits 32 to 45, in units of 16, as the address is). 2 more are the next 32 columns.
__device__ __forceinline__ uint64_t swizzled_rows(uint32_t shared) {
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 16 |
         (shared & 0x3ffff) >> 4;
}

// "wgmma.fence": before the first product over registers that were read or written otherwise.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// "wgmma.mma_async.m64n128k32": d = a b^T, or d += a b^T, of e4m3. Lane l of warp w: g = l / 4,
// c = l % 4; d[4j + 2h + i] is row 16w + 8h + g, column 8j + 2c + i.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, adds, 1, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(adds))
      : "memory");
}

// "wgmma.commit_group".
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// "wgmma.wait_group" for all groups: `d` can be read, and shared memory written.
__device__ __forceinline__ void wgmma_wait(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),
                 "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
                 "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
                 "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
                 "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
                 "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
                 "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
                 "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),
                 "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]),
                 "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
               :
               : "memory");
}

}  // namespace fastkernels::ptx
