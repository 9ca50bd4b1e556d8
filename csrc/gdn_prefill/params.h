// What a gdn_prefill kernel is given. One struct for CUDA; Triton and CuTe DSL kernels take the
// same fields, in the same order, as separate arguments.
#pragma once

#include <cstdint>

namespace fastkernels::gdn_prefill {

constexpr int kHeadSize = 128;  // K and V
constexpr int kChunk = 64;      // tokens per triangular system

// Strides count elements. A "slot" is the first axis of the state: the sequence itself in packed
// form, what the index tensors name in pool form.
struct Params {
  const void* q;           // bfloat16 [num_tokens, num_q_heads, K], K contiguous
  const void* k;           // bfloat16 [num_tokens, num_q_heads, K], K contiguous
  const void* v;           // bfloat16 [num_tokens, num_v_heads, V], V contiguous
  const void* state;       // float32 [num_slots, num_v_heads, V, K], [V, K] contiguous; null: zeros
  const void* A_log;       // float32 [num_v_heads], contiguous
  const void* a;           // bfloat16 [num_tokens, num_v_heads], heads contiguous
  const void* dt_bias;     // float32 [num_v_heads], contiguous
  const void* b;           // bfloat16 [num_tokens, num_v_heads], heads contiguous
  const void* cu_seqlens;  // int32 or int64 [num_seqs + 1], not trusted
  const void* read_indices;   // int32 or int64 [num_seqs]; null: packed form
  const void* write_indices;  // the same dtype; null exactly where read_indices is
  void* output;               // bfloat16 [num_tokens, num_v_heads, V], V contiguous
  void* new_state;            // float32 [num_slots, num_v_heads, V, K]; equals state when in place
  void* workspace;            // what one stage of a route leaves for the next
  int64_t q_stride_t, q_stride_h;
  int64_t k_stride_t, k_stride_h;
  int64_t v_stride_t, v_stride_h;
  int64_t state_stride_slot, state_stride_h;
  int64_t a_stride_t, b_stride_t;
  int64_t cu_stride;                  // of cu_seqlens, in its own elements
  int64_t read_stride, write_stride;  // of the index tensors, in their own elements
  int64_t output_stride_t, output_stride_h;
  int64_t new_state_stride_slot, new_state_stride_h;
  int32_t num_tokens;
  int32_t num_seqs;
  int32_t num_q_heads;
  int32_t num_v_heads;
  int32_t num_slots;
  int32_t has_state;     // 0: state is null
  int32_t offset_words;  // 1: int32 offsets; 2: int64 offsets
  int32_t index_words;   // 0: packed form; 1: int32 indices; 2: int64 indices
  float scale;
};

// Chunks never cross sequences. Chunk j of sequence i, which starts at token s, is number
// s / kChunk + i + j: each has a number of its own, and all are below this bound, which follows
// from shapes alone.
constexpr int64_t chunk_bound(int64_t num_tokens, int64_t num_seqs) {
  return num_tokens / kChunk + num_seqs;
}

// Places where sequences are cut into segments of `segment` tokens; see segments.cuh. With one
// segment more for each sequence, all numbers of segments are below the sum.
constexpr int64_t cut_bound(int64_t num_tokens, int64_t segment) { return num_tokens / segment; }

}  // namespace fastkernels::gdn_prefill
