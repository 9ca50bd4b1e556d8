// What kernels of the gated delta rule share: access to bfloat16, gates, slots and heads, and one
// token's step on rows of the state that lie in registers.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ptx_sm90.cuh"

namespace fastkernels::gdn {

constexpr int kHeadSize = 128;  // K and V

// ---- bfloat16 as bits ---------------------------------------------------------------------------

__device__ __forceinline__ uint16_t load_bf16(const void* base, int64_t idx) {
  return ptx::load_constant(static_cast<const uint16_t*>(base) + idx);
}

__device__ __forceinline__ float to_float(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

__device__ __forceinline__ void store_bf16(void* base, int64_t idx, float x) {
  static_cast<uint16_t*>(base)[idx] = ptx::to_bf16(x);
}

// Four consecutive values as two words, the lower index in the lower half.
template <bool kAligned>
__device__ __forceinline__ uint2 load_bf16x4(const uint16_t* x) {
  if constexpr (kAligned) {
    return ptx::load_constant(reinterpret_cast<const uint2*>(x));
  } else {
    const uint32_t high[] = {ptx::load_constant(x + 1), ptx::load_constant(x + 3)};
    return make_uint2(ptx::load_constant(x) | high[0] << 16,
                      ptx::load_constant(x + 2) | high[1] << 16);
  }
}

__device__ __forceinline__ float4 unpack(uint2 x) {
  return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u),
                     __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
}

// ---- gates --------------------------------------------------------------------------------------

struct Gates {
  float g;     // exp(-exp(A_log) * softplus(a + dt_bias))
  float beta;  // sigmoid(b)
};

// The oracle's own arithmetic, with inf * 0 = 0. A call, not inlined: kept out of the straight line
// of code that a cold instruction cache has to fetch.
static __host__ __device__ __noinline__ float exact_decay_gate(float A_log, float a,
                                                               float dt_bias) {
  const double x = static_cast<double>(a) + static_cast<double>(dt_bias);
  const double rate = exp(static_cast<double>(A_log));
  const double step = x > 20.0 ? x : log1p(exp(x));
  return static_cast<float>(exp(rate == 0.0 || step == 0.0 ? 0.0 : -rate * step));
}

static __host__ __device__ __noinline__ float accurate_decay_gate(float A_log, float a,
                                                                  float dt_bias) {
  const float x = a + dt_bias;
  const float rate_step = expf(A_log) * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
  // Its relative error (about 7 half ulps, and for x < 0 another |x| from the sum x) becomes one of
  // g, multiplied by itself: at 96 half ulps, 6e-6, that is still within the state's tolerance.
  // Beyond (g below 1e-8, or a large rate and a tiny step; also infinities and NaN) is rare.
  if (rate_step * (7.0f - fminf(x, 0.0f)) <= 96.0f) return expf(-rate_step);
  return exact_decay_gate(A_log, a, dt_bias);
}

constexpr float kLog2E = 1.4426950408889634f;

__host__ __device__ __forceinline__ Gates compute_gates(float A_log, float a, float dt_bias,
                                                        float b) {
  Gates gates;
#ifdef __CUDA_ARCH__
  gates.beta = ptx::reciprocal(1.0f + ptx::exp2(-kLog2E * b));
#else
  gates.beta = ptx::reciprocal(1.0f + expf(-b));
#endif

  // Above 20 the logarithm is below half an ulp of x, so torch's threshold needs no case here.
  const float x = a + dt_bias;
#ifdef __CUDA_ARCH__
  // What the special function unit gives is enough in the usual range, and a third of the code. Of
  // g, errors of 2^-22 in the exponentials and the logarithm and the rounding of their arguments
  // (of A_log the largest, 2^-21 where rate is 2^-20) add up to at most 7e-6.
  const float rate = ptx::exp2(kLog2E * A_log);
  const float step2 = fmaxf(x, 0.0f) * kLog2E + ptx::log2(1.0f + ptx::exp2(-kLog2E * fabsf(x)));
  if (rate >= 0x1p-20f && rate <= 16.0f && rate * step2 <= 4.0f * kLog2E) {
    gates.g = ptx::exp2(-rate * step2);
    return gates;
  }
#endif
  gates.g = accurate_decay_gate(A_log, a, dt_bias);
  return gates;
}

// ---- slots and heads ----------------------------------------------------------------------------

// Indices are unsigned throughout: that halves the work of a product with a 64-bit stride.

// An entry of an index tensor as loaded. Twice the same word where it has only one.
struct SlotIndex {
  uint32_t low, high;
};

// Entry `row` of an index tensor with `index_words` words an entry; the row itself where that is 0.
__device__ __forceinline__ SlotIndex load_slot(const void* indices, int32_t index_words,
                                               int64_t stride, uint32_t row) {
  if (index_words == 0) return {row, 0};
  const uint32_t* words = static_cast<const uint32_t*>(indices);
  words += row * stride << (index_words - 1);
  return {ptx::load_constant(words), ptx::load_constant(words + index_words - 1)};
}

// Whether the index names a slot. Indices come from the device and are not trusted: one outside the
// pool is never dereferenced.
__device__ __forceinline__ bool is_slot(SlotIndex slot, int32_t index_words, int32_t num_slots) {
  const bool is_inside = slot.low < static_cast<uint32_t>(num_slots);
  return index_words == 0 || (is_inside && (index_words == 1 || slot.high == 0));
}

// A call, like exact_decay_gate.
static __device__ __noinline__ uint32_t divide_heads(uint32_t head_idx, uint32_t num_v_heads,
                                                     uint32_t num_q_heads) {
  return head_idx / (num_v_heads / num_q_heads);
}

// The q and k head of a v head. Groups are mostly powers of two, where a shift does without the
// division that q and k would wait for.
__device__ __forceinline__ uint32_t find_q_head(uint32_t head_idx, uint32_t num_v_heads,
                                                uint32_t num_q_heads) {
  const int shift = __clz(num_q_heads) - __clz(num_v_heads);
  if (num_q_heads << shift == num_v_heads) return head_idx >> shift;
  return divide_heads(head_idx, num_v_heads, num_q_heads);
}

// ---- one step on rows in registers --------------------------------------------------------------

// `kLanes` neighbouring lanes share a row of K; each holds `kVectors` pieces of 4 columns, and
// piece i of lane l is columns 4 * (i * kLanes + l) onwards, so that an access of one piece by all
// lanes of a row is contiguous.
template <int kLanes>
constexpr int kVectors = kHeadSize / 4 / kLanes;

template <int kLanes>
struct Keys {
  uint2 q[kVectors<kLanes>];  // packed: half the registers while the loads are in flight
  uint2 k[kVectors<kLanes>];
};

__device__ __forceinline__ float dot(float4 x, float4 y, float sum) {
  sum = fmaf(x.x, y.x, sum);
  sum = fmaf(x.y, y.y, sum);
  sum = fmaf(x.z, y.z, sum);
  return fmaf(x.w, y.w, sum);
}

// A lane's pieces of a row: g S + u k^T.
template <int kLanes>
__device__ __forceinline__ void update_row(float4 (&row)[kVectors<kLanes>],
                                           const Keys<kLanes>& keys, float g, float u) {
#pragma unroll
  for (int i = 0; i < kVectors<kLanes>; ++i) {
    const float4 k = unpack(keys.k[i]);
    float4& x = row[i];
    x.x = fmaf(u, k.x, g * x.x);
    x.y = fmaf(u, k.y, g * x.y);
    x.z = fmaf(u, k.z, g * x.z);
    x.w = fmaf(u, k.w, g * x.w);
  }
}

// Advances `kRows` rows per lane: S becomes the new state and `output` the output of each row, in
// every lane of the row. Both dot products are of the old state, which spares a second sweep and a
// second reduction: S' q = g * (S q) + u * (k q). All lanes of the warp take part.
template <int kLanes, int kRows>
__device__ __forceinline__ void step_rows(float4 (&S)[kRows][kVectors<kLanes>],
                                          const Keys<kLanes>& keys, const uint16_t (&v)[kRows],
                                          Gates gates, float scale, float (&output)[kRows]) {
  constexpr int kPieces = kVectors<kLanes>;
  float S_q[kRows] = {};
  float S_k[kRows] = {};
  float k_q = 0.0f;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const float4 q = unpack(keys.q[i]);
    const float4 k = unpack(keys.k[i]);
    k_q = dot(k, q, k_q);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      S_k[r] = dot(S[r][i], k, S_k[r]);
      S_q[r] = dot(S[r][i], q, S_q[r]);
    }
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    k_q += __shfl_xor_sync(0xffffffffu, k_q, distance);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      S_k[r] += __shfl_xor_sync(0xffffffffu, S_k[r], distance);
      S_q[r] += __shfl_xor_sync(0xffffffffu, S_q[r], distance);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float u = gates.beta * fmaf(-gates.g, S_k[r], to_float(v[r]));
    output[r] = scale * fmaf(gates.g, S_q[r], u * k_q);
    update_row<kLanes>(S[r], keys, gates.g, u);
  }
}

}  // namespace fastkernels::gdn
