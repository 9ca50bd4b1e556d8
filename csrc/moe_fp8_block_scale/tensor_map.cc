#include "moe_fp8_block_scale/tensor_map.h"

#include <cuda.h>
#include <dlfcn.h>
#include <tvm/ffi/error.h>

#include <cstring>

#include "common/driver.h"
#include "common/tensor.h"

namespace fastkernels::moe_fp8_block_scale {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode FindEncode() {
  // Already open: whoever comes here has asked the driver for a device.
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void* found = driver == nullptr ? nullptr : dlsym(driver, "cuTensorMapEncodeTiled");
  if (found == nullptr) TVM_FFI_THROW(RuntimeError) << "libcuda.so.1 has no cuTensorMapEncodeTiled";
  return reinterpret_cast<Encode>(found);
}

}  // namespace

bool DescribeWeights(const WeightCodes& weights, ProductParams* product) {
  constexpr int64_t kPiece = 16;
  const int64_t between = weights.num_experts > 1 ? weights.stride_e : 0;
  if (reinterpret_cast<uintptr_t>(weights.data) % kPiece != 0 || weights.stride_n % kPiece != 0 ||
      weights.stride_n < weights.columns || weights.stride_n >= int64_t{1} << 40 ||
      between % weights.stride_n != 0) {
    return false;
  }
  const int64_t expert_rows = between / weights.stride_n;
  if (expert_rows > (kMaxInt32 - weights.rows) / weights.num_experts) return false;
  const auto columns = static_cast<cuuint64_t>(weights.columns);
  const auto rows = static_cast<cuuint64_t>((weights.num_experts - 1) * expert_rows + weights.rows);
  const cuuint64_t sizes[2] = {columns, rows};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(weights.stride_n)};
  const cuuint32_t box[2] = {kBlock, kBoxRows}, steps[2] = {1, 1};
  CUtensorMap map;
  static const Encode encode = FindEncode();
  Driver::Get().Check(
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(weights.data), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      "cuTensorMapEncodeTiled");
  static_assert(sizeof(map) == sizeof(product->weights), "a tensor map has 128 bytes");
  std::memcpy(&product->weights, &map, sizeof(map));
  product->expert_rows = static_cast<int32_t>(expert_rows);
  return true;
}

}  // namespace fastkernels::moe_fp8_block_scale
