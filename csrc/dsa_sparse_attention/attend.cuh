// Attention of 16 heads over keys in shared memory, slab by slab, by the 8 warps of a block.
//
// Scores: a warp takes 16 keys of the slab and a part of the 576 products (`kParts` parts; the
// queries of a part stay in registers), parts are added through shared memory. Weights: 16 threads
// a head. Output: a warp takes 64 columns, for all keys.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ptx_sm90.cuh"
#include "dsa_sparse_attention/gather.cuh"
#include "dsa_sparse_attention/params.h"

namespace fastkernels::dsa_sparse_attention {

constexpr int kSteps = kPieces / 2;        // of 16 products
constexpr int kTiles = kCkv / 8 / kWarps;  // of 8 columns, for each warp

template <int kKeys>
struct Attention {
  static constexpr int kGroups = kKeys / 16;
  static constexpr int kParts = kWarps / kGroups;
  static constexpr int kPartSteps = kSteps / kParts;
  static_assert(kPartSteps * kParts == kSteps, "warps share out the products evenly");

  // Pitches that put eight rows into different banks.
  static constexpr int kScorePitch = kKeys + 8;        // float32
  static constexpr int kWeightPitch = 2 * kKeys + 16;  // bytes

  struct Shared {
    float scores[kParts][kHeads][kScorePitch];
    alignas(16) unsigned char weights[kHeads * kWeightPitch];  // bfloat16
    float factors[kHeads];
  };

  // Of this thread's head (threadIdx.x / 16); base 2. The maximum is the same in all its 16
  // threads, the sum is of this one's keys until `add_sums`; see `get_scale` for its first value.
  float maximum = -INFINITY;
  float sum = -0.0f;
  // Of heads l / 4 and l / 4 + 8, columns 64 * warp + 8 * tile + 2 * (l % 4) and the next.
  float output[kTiles][4] = {};
  uint32_t queries[kPartSteps][4];

  static __device__ __forceinline__ uint32_t group() { return threadIdx.x / 32 % kGroups; }
  static __device__ __forceinline__ uint32_t part() { return threadIdx.x / 32 / kGroups; }

  // Where a lane's matrix rows of the first four steps of the warp's part lie. Four steps on are 8
  // pieces, which are swizzled alike: 128 bytes.
  static __device__ __forceinline__ void get_places(uint32_t (&places)[4], uint32_t slab,
                                                    uint32_t row, uint32_t half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) places[i] = slab + place(row, 2 * (part() * kPartSteps + i) + half);
  }

  // `from`: 16 rows in the places of keys, complete.
  __device__ __forceinline__ void load_queries(const unsigned char* from) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t places[4];
    get_places(places, ptx::shared_address(from), lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < kPartSteps; ++i) {
      ptx::load_matrices(queries[i], places[i % 4] + i / 4 * 128);
    }
  }

  // Products of the warp's part with its 16 keys, of which there are `count` in the slab.
  __device__ __forceinline__ void multiply_keys(const unsigned char* slab, int32_t count,
                                                Shared* shared) const {
    const uint32_t lane = threadIdx.x % 32, first = 16 * group();
    if (static_cast<int32_t>(first) >= count) return;
    // Of even and of odd steps: half as many products wait for one another.
    float scores[2][2][4] = {};
    uint32_t places[4];
    get_places(places, ptx::shared_address(slab), first + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < kPartSteps; ++i) {
      uint32_t keys[4];
      ptx::load_matrices(keys, places[i % 4] + i / 4 * 128);
      ptx::mma_bf16(scores[i % 2][0], queries[i], keys[0], keys[1]);
      ptx::mma_bf16(scores[i % 2][1], queries[i], keys[2], keys[3]);
    }
    auto& to = shared->scores[part()];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t key = first + 8 * n + lane % 4 * 2;
      const float (&x)[4] = scores[0][n], (&y)[4] = scores[1][n];
      *reinterpret_cast<float2*>(&to[lane / 4][key]) = make_float2(x[0] + y[0], x[1] + y[1]);
      *reinterpret_cast<float2*>(&to[lane / 4 + 8][key]) = make_float2(x[2] + y[2], x[3] + y[3]);
    }
  }

  // Scores to weights relative to the largest score so far, and what that makes of earlier ones.
  __device__ __forceinline__ void weigh(int32_t count, float scale_log2, Shared* shared) {
    constexpr int kEach = kKeys / 16;  // keys of a thread
    const uint32_t head = threadIdx.x / 16, first = threadIdx.x % 16 * kEach;
    float logits[kEach] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kEach; i += 2) {
        const float2 x = *reinterpret_cast<const float2*>(&shared->scores[part][head][first + i]);
        logits[i] += x.x;
        logits[i + 1] += x.y;
      }
    }
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const bool is_there = static_cast<int32_t>(first) + i < count;
      logits[i] = is_there ? logits[i] * scale_log2 : -INFINITY;
      largest = fmaxf(largest, logits[i]);
    }
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    largest = fmaxf(largest, maximum);
    const float shift = largest == -INFINITY ? 0.0f : largest;  // -inf - -inf would be NaN
    const float factor = ptx::exp2(maximum - shift);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      logits[i] = ptx::exp2(logits[i] - shift);
      total += logits[i];
    }
    maximum = largest;
    sum = sum * factor + total;
    auto* to = reinterpret_cast<uint32_t*>(shared->weights + head * kWeightPitch + 2 * first);
#pragma unroll
    for (int i = 0; i < kEach; i += 2) to[i / 2] = ptx::to_bf16x2(logits[i], logits[i + 1]);
    if (threadIdx.x % 16 == 0) shared->factors[head] = factor;
  }

  // Weights times the slab's `count` rows; those up to the next multiple of 16 are zeros.
  __device__ __forceinline__ void add_values(const unsigned char* slab, int32_t count,
                                             const Shared& shared) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    scale(shared);
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      if (16 * k >= count) break;
      uint32_t weights[4];
      ptx::load_matrices(weights, ptx::shared_address(shared.weights) + lane % 16 * kWeightPitch +
                                      32 * k + lane / 16 * 16);
      const uint32_t row = 16 * k + lane % 16;
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        uint32_t values[4];
        ptx::load_matrices_transposed(
            values, ptx::shared_address(slab) + place(row, warp * kTiles + n + lane / 16));
        ptx::mma_bf16(output[n], weights, values[0], values[1]);
        ptx::mma_bf16(output[n + 1], weights, values[2], values[3]);
      }
    }
  }

  // Over all keys, after the last slab.
  __device__ __forceinline__ void add_sums() {
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
  }

  // By the factor of each head; mostly all are 1.
  __device__ __forceinline__ void scale(const Shared& shared) {
    const uint32_t head = threadIdx.x % 32 / 4;
    const float low = shared.factors[head], high = shared.factors[head + 8];
    if (__ballot_sync(0xffffffffu, low != 1.0f || high != 1.0f) == 0) return;
#pragma unroll
    for (auto& tile : output) {
      tile[0] *= low;
      tile[1] *= low;
      tile[2] *= high;
      tile[3] *= high;
    }
  }
};

// What an output is multiplied by. A sum starts as -0 and is something else as soon as there was a
// key: without any the output is 0. Where all logits are -inf the sum is 0, and the output NaN, as
// the softmax is.
__device__ __forceinline__ float get_scale(float sum) {
  return __float_as_uint(sum) == 0x80000000u ? 0.0f : ptx::reciprocal(sum);
}

__device__ __forceinline__ uint16_t* output_row(const Params& p, int64_t token, int32_t head) {
  return static_cast<uint16_t*>(p.output) + token * p.output_stride_t + head * p.output_stride_h;
}

// Two neighbouring columns of the output.
template <bool kAligned>
__device__ __forceinline__ void store_columns(uint16_t* to, float x, float y) {
  if constexpr (kAligned) {
    *reinterpret_cast<uint32_t*>(to) = ptx::to_bf16x2(x, y);
  } else {
    to[0] = ptx::to_bf16(x);
    to[1] = ptx::to_bf16(y);
  }
}

// log2 of `sum` times 2^maximum, in the base asked for; -inf where there was no key.
__device__ __forceinline__ void store_lse(const Params& p, int64_t token, int32_t head,
                                          float maximum, float sum) {
  if (head >= p.num_heads) return;
  const float lse = sum == 0.0f ? -INFINITY : (maximum + ptx::log2(sum)) * p.lse_scale;
  static_cast<float*>(p.lse)[token * p.lse_stride_t + head] = lse;
}

}  // namespace fastkernels::dsa_sparse_attention
