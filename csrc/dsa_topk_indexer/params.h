// What a dsa_topk_indexer kernel is given. One struct for CUDA; Triton kernels take the same
// fields, in the same order, as separate arguments.
#pragma once

#include <cstdint>

namespace fastkernels::dsa_topk_indexer {

constexpr int kPageSize = 64;                   // positions
constexpr int kKeyBytes = 128;                  // of a position, and of a head's query
constexpr int kScales = kPageSize * kKeyBytes;  // where a page's float32 scales start
constexpr int kPageBytes = kScales + 4 * kPageSize;
constexpr int kMaxHeads = 64;
constexpr int kChunk = 2048;  // entries of a row that a block of `pass_through` stores

// Strides count elements, those of bytes where the element is e4m3 or a cache's.
struct Params {
  const void* q;            // e4m3 [batch_size, num_heads, kKeyBytes], last axis contiguous
  const void* cache;        // bytes [num_pages, kPageBytes], contiguous in a page
  const void* weights;      // float32 [batch_size, num_heads], last axis contiguous
  const void* seq_lens;     // int32 [batch_size], not trusted
  const void* block_table;  // int32 [batch_size, max_num_pages], not trusted
  void* output;             // int32 [batch_size, topk], last axis contiguous
  void* workspace;          // uint32 [batch_size, max_num_pages * 64] of `score` for `select`
  int64_t q_stride_b, q_stride_h;
  int64_t cache_stride_page;
  int64_t weights_stride_b;
  int64_t seq_lens_stride_b;
  int64_t table_stride_b, table_stride_p;
  int64_t output_stride_b;
  int32_t batch_size;
  int32_t num_heads;  // at most kMaxHeads
  int32_t topk;
  int32_t max_num_pages;
  int32_t num_pages;  // pages from here on are no candidates
};

}  // namespace fastkernels::dsa_topk_indexer
