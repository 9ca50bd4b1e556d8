// What a moe_fp8_block_scale kernel is given. One struct for CUDA; Triton and CuTe DSL kernels take
// the same fields, in the same order, as separate arguments.
#pragma once

#include <cstdint>

namespace fastkernels::moe_fp8_block_scale {

constexpr int kBlock = 128;  // columns of a scale; rows and columns of a weight scale
constexpr int kMaxExperts = 256;
constexpr int kMaxLocal = 256;
constexpr int kMaxTopk = 16;

// Strides count elements, those of `topk_ids` words of 4 bytes.
struct Params {
  const void* logits;        // float32 [num_tokens, num_experts], last axis contiguous; or null
  const void* bias;          // bfloat16 [num_experts], contiguous; or null
  const void* topk_ids;      // int32 or int64 [num_tokens, topk], not trusted; or null
  const void* topk_weights;  // float32 [num_tokens, topk]; or null
  const void* x;             // e4m3 [num_tokens, hidden_size], last axis contiguous
  const void* x_scale;       // float32 [hidden_size / kBlock, num_tokens]
  const void* w13;           // e4m3 [num_local, 2 * intermediate_size, hidden_size], last axis
                             // contiguous; linear rows, then those of the gate
  const void* w13_scale;     // float32, one for each kBlock x kBlock of w13, last axis contiguous
  const void* w2;            // e4m3 [num_local, hidden_size, intermediate_size], last axis
                             // contiguous
  const void* w2_scale;      // float32, one for each kBlock x kBlock of w2, last axis contiguous
  void* output;              // bfloat16 [num_tokens, hidden_size], last axis contiguous
  void* workspace;           // what one stage of a route leaves for the next
  int64_t logits_stride_t;
  int64_t ids_stride_t, ids_stride_k;
  int64_t weights_stride_t, weights_stride_k;
  int64_t x_stride_t;
  int64_t x_scale_stride_b, x_scale_stride_t;
  int64_t w13_stride_e, w13_stride_n;
  int64_t w13_scale_stride_e, w13_scale_stride_n;
  int64_t w2_stride_e, w2_stride_n;
  int64_t w2_scale_stride_e, w2_scale_stride_n;
  int64_t output_stride_t;
  int32_t num_tokens;
  int32_t slots;        // that the workspace has room for, at least num_tokens * topk
  int32_t num_experts;  // at most kMaxExperts; of no meaning with given ids
  int32_t num_local;    // at most kMaxLocal
  int32_t hidden_size, intermediate_size;  // multiples of kBlock
  int32_t topk;                            // at most kMaxTopk
  int32_t num_groups, topk_groups;
  int32_t offset;    // the first local expert
  int32_t id_words;  // of an element of topk_ids: 1 or 2, 0 where logits are given instead
  double factor;     // of weights that are computed here
};

constexpr int kBoxRows = 64;  // of weights, in a copy of wgmma_grouped

// A CUtensorMap, as the driver encodes it.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// What a product of wgmma_grouped is given.
struct ProductParams {
  // Of its weights, as one matrix of all experts' rows: kBoxRows rows of kBlock bytes in the
  // 128-byte swizzle. Of no meaning where they are copied byte by byte.
  TensorMap weights;
  int32_t expert_rows;  // from an expert's first row to the next one's
  // Regions of the workspace: `regions` of ops/moe_fp8_block_scale/kernels/__init__.py.
  const float* slot_weight;
  const int32_t* row_slot;
  const int32_t* counts;
  float* scales;
  unsigned char* codes;
  uint32_t* partials;
  Params params;
};

}  // namespace fastkernels::moe_fp8_block_scale
