// Tensor maps of weights, for kernels that load them in boxes.
#pragma once

#include <cstdint>

#include "moe_fp8_block_scale/params.h"

namespace fastkernels::moe_fp8_block_scale {

// The codes of all experts: [num_experts, rows, columns], last axis contiguous.
struct WeightCodes {
  const void* data;
  int64_t num_experts, rows, columns;
  int64_t stride_e, stride_n;
};

// Fills what of `product` its weights are. False, and nothing is filled, where they are not 16-byte
// pieces of one matrix that experts start in whole rows of: a kernel has to copy them byte by byte.
// Throws RuntimeError where the driver refuses them.
bool DescribeWeights(const WeightCodes& weights, ProductParams* product);

}  // namespace fastkernels::moe_fp8_block_scale
