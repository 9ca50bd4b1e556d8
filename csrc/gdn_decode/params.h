// What a gdn_decode kernel is given. One struct for CUDA; Triton and CuTe DSL kernels take the same
// fields, in the same order, as separate arguments.
#pragma once

#include <cstdint>

namespace fastkernels::gdn_decode {

constexpr int kHeadSize = 128;  // K and V

// Strides count elements. A "slot" is the first axis of the state: the batch row itself in packed
// form, what the index tensors name in pool form.
struct Params {
  const void* q;        // bfloat16 [batch_size, num_q_heads, K], K contiguous
  const void* k;        // bfloat16 [batch_size, num_q_heads, K], K contiguous
  const void* v;        // bfloat16 [batch_size, num_v_heads, V], V contiguous
  const void* state;    // float32 [num_slots, num_v_heads, V, K], [V, K] contiguous; null: zeros
  const void* A_log;    // float32 [num_v_heads], contiguous
  const void* a;        // bfloat16 [batch_size, num_v_heads], heads contiguous
  const void* dt_bias;  // float32 [num_v_heads], contiguous
  const void* b;        // bfloat16 [batch_size, num_v_heads], heads contiguous
  const void* read_indices;   // int32 or int64 [batch_size]; null: packed form
  const void* write_indices;  // the same dtype; null exactly where read_indices is
  void* output;               // bfloat16 [batch_size, num_v_heads, V], V contiguous
  void* new_state;            // float32 [num_slots, num_v_heads, V, K]; equals state when in place
  int64_t q_stride_b, q_stride_h;
  int64_t k_stride_b, k_stride_h;
  int64_t v_stride_b, v_stride_h;
  int64_t state_stride_slot, state_stride_h;
  int64_t a_stride_b, b_stride_b;
  int64_t read_stride, write_stride;  // of the index tensors, in their own elements
  int64_t output_stride_b, output_stride_h;
  int64_t new_state_stride_slot, new_state_stride_h;
  int32_t batch_size;
  int32_t num_q_heads;
  int32_t num_v_heads;
  int32_t num_slots;
  int32_t has_state;    // 0: state is null
  int32_t index_words;  // 0: packed form; 1: int32 indices; 2: int64 indices
  float scale;
  int32_t group_shift;  // log2(num_v_heads / num_q_heads), -1 where that is none; CUDA alone has it
};

}  // namespace fastkernels::gdn_decode
