// What the kernels of gdn_decode share: lookup of slots and heads, and loads of a row's inputs.
#pragma once

#include <cstdint>

#include "common/gdn.cuh"
#include "common/ptx_sm90.cuh"
#include "gdn_decode/params.h"

namespace fastkernels::gdn_decode {

using namespace gdn;

// x, but the compiler does not know: what depends on it is computed after the volatile accesses
// that stand before, not hoisted ahead of them or out of a loop.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// What the gates of one head are made of, as it lies in memory: a conversion beside the load would
// wait for it, there and then.
struct GateInputs {
  float A_log, dt_bias;
  uint16_t a, b;
};

// `Offset`: int64_t, or uint32_t where the launcher saw that all offsets fit: half the
// instructions.
template <typename Offset = int64_t>
__device__ __forceinline__ GateInputs load_gate_inputs(const Params& p, uint32_t batch_idx,
                                                       uint32_t head_idx) {
  return {ptx::load_constant(static_cast<const float*>(p.A_log) + head_idx),
          ptx::load_constant(static_cast<const float*>(p.dt_bias) + head_idx),
          load_bf16(p.a, batch_idx * static_cast<Offset>(p.a_stride_b) + head_idx),
          load_bf16(p.b, batch_idx * static_cast<Offset>(p.b_stride_b) + head_idx)};
}

__device__ __forceinline__ Gates compute_gates(const GateInputs& x) {
  return gdn::compute_gates(x.A_log, to_float(x.a), x.dt_bias, to_float(x.b));
}

// ---- slots and heads ----------------------------------------------------------------------------

__device__ __forceinline__ SlotIndex load_read_slot(const Params& p, uint32_t batch_idx) {
  return gdn::load_slot(p.read_indices, p.index_words, p.read_stride, batch_idx);
}

__device__ __forceinline__ SlotIndex load_write_slot(const Params& p, uint32_t batch_idx) {
  return gdn::load_slot(p.write_indices, p.index_words, p.write_stride, batch_idx);
}

// If the index to read names no slot, the row is padding: its output is 0, and nothing else
// happens; if the one to write does not, the new state is not stored.
__device__ __forceinline__ bool is_slot(const Params& p, SlotIndex slot) {
  return gdn::is_slot(slot, p.index_words, p.num_slots);
}

__device__ __forceinline__ uint32_t find_q_head(const Params& p, uint32_t head_idx) {
  return gdn::find_q_head(head_idx, p.num_v_heads, p.num_q_heads);
}

// ---- q and k of a row ---------------------------------------------------------------------------

template <int kLanes, bool kAligned, typename Offset = int64_t>
__device__ __forceinline__ Keys<kLanes> load_keys(const Params& p, uint32_t batch_idx,
                                                  uint32_t q_head, uint32_t lane) {
  const Offset q_offset = batch_idx * static_cast<Offset>(p.q_stride_b) +
                          q_head * static_cast<Offset>(p.q_stride_h) + 4 * lane;
  const Offset k_offset = batch_idx * static_cast<Offset>(p.k_stride_b) +
                          q_head * static_cast<Offset>(p.k_stride_h) + 4 * lane;
  const uint16_t* q = static_cast<const uint16_t*>(p.q) + q_offset;
  const uint16_t* k = static_cast<const uint16_t*>(p.k) + k_offset;
  Keys<kLanes> keys;
#pragma unroll
  for (int i = 0; i < kVectors<kLanes>; ++i) {
    keys.q[i] = load_bf16x4<kAligned>(q + 4 * i * kLanes);
    keys.k[i] = load_bf16x4<kAligned>(k + 4 * i * kLanes);
  }
  return keys;
}

}  // namespace fastkernels::gdn_decode
