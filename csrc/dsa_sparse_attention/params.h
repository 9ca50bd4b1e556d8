// What a dsa_sparse_attention kernel is given. One struct for CUDA; Triton and CuTe DSL kernels
// take the same fields, in the same order, as separate arguments.
#pragma once

#include <cstdint>

namespace fastkernels::dsa_sparse_attention {

constexpr int kCkv = 512;  // width of a cache row that is key and value
constexpr int kKpe = 64;   // width of its positional part
constexpr int kMaxTopk = 2048;
// Instead of a page size, where rows of both caches are evenly spaced across pages, too, and less
// than 2^31 elements apart.
constexpr int32_t kEvenRows = 0x7fffffff;

// Strides count elements.
struct Params {
  const void* q_nope;   // bfloat16 [num_tokens, num_heads, kCkv], last axis contiguous
  const void* q_pe;     // bfloat16 [num_tokens, num_heads, kKpe], last axis contiguous
  const void* ckv;      // bfloat16 [pages, page_size, kCkv], last axis contiguous
  const void* kpe;      // bfloat16 [pages, page_size, kKpe], last axis contiguous
  const void* indices;  // int32 [num_tokens, topk], contiguous in a token, not trusted
  void* output;         // bfloat16 [num_tokens, num_heads, kCkv], last axis contiguous
  void* lse;            // float32 [num_tokens, num_heads], last axis contiguous
  void* workspace;      // what one stage of a route leaves for the next
  int64_t q_nope_stride_t, q_nope_stride_h;
  int64_t q_pe_stride_t, q_pe_stride_h;
  int64_t ckv_stride_page, ckv_stride_row;
  int64_t kpe_stride_page, kpe_stride_row;
  int64_t indices_stride_t;
  int64_t output_stride_t, output_stride_h;
  int64_t lse_stride_t;
  int32_t num_tokens;
  int32_t num_heads;
  int32_t topk;       // at most kMaxTopk
  int32_t page_size;  // or kEvenRows
  int32_t num_rows;   // indices from here on are padding
  float scale_log2;   // sm_scale * log2(e)
  float lse_scale;    // 1 for base 2, ln(2) for base e
};

}  // namespace fastkernels::dsa_sparse_attention
