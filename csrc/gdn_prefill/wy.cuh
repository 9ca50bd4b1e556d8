// The part of a chunk that does not need the state, in WY form, in which the chain has two products
// left: with T the inverse of I + A (prepare.cuh),
//
//     U  = T diag(beta) V - (T diag(beta d) K) S^T        d: decays from the chunk's start
//     S' = d_all S + (diag(d_rest) U)^T K
//     O  = scale (d Q S^T + P U)                          off the chain
//
// The identity is left out of T and added in float32. What is left in the workspace are operands
// and results of those products as a lane holds them, so that nothing has to pass through shared
// memory on its way to the chain's registers.
#pragma once

#include <cstdint>

#include "gdn_prefill/chain.cuh"
#include "gdn_prefill/common.cuh"
#include "gdn_prefill/prepare.cuh"
#include "gdn_prefill/ptx.cuh"

namespace fastkernels::gdn_prefill {

// ---- the workspace ------------------------------------------------------------------------------

// Per chunk number and v head; 16 x 16 fragments of bfloat16, 16 bytes a lane:
//
//     keys     -T diag(beta d) K, right operands: [16 tokens each][16 channels of K each]
//     columns  K, right operands with a column for each channel: [16 channels][16 tokens]
//     pairs    P, right operands: [16 tokens][16 tokens up to these]
//     gates    ChunkGates
//     queries  Q, right operands: [16 tokens][16 channels]
//     values   (T diag(beta) V)^T, as results: [16 rows of V][16 tokens]
//     is_made  1 once all of it is there
constexpr int kWyKeys = 0;
constexpr int kWyColumns = kWyKeys + 4 * 8 * kFragmentBytes;
constexpr int kWyPairs = kWyColumns + 8 * 4 * kFragmentBytes;
constexpr int kWyGates = kWyPairs + 4 * 4 * kFragmentBytes;
constexpr int kWyQueries = (kWyGates + kGatesPieces * 16 + 127) / 128 * 128;
constexpr int kWyValues = kWyQueries + 4 * 8 * kFragmentBytes;
constexpr int kWyFlags = kWyValues + 8 * 4 * kFragmentBytes;
constexpr int kWyBytes = kWyFlags + 128;
static_assert(kWyBytes == 75008, "kernels/__init__.py has the same number");

__device__ __forceinline__ unsigned char* find_wy(const Params& p, int64_t number, uint32_t head) {
  return static_cast<unsigned char*>(p.workspace) + (number * p.num_v_heads + head) * kWyBytes;
}

// `chunk_bound`.
__device__ __forceinline__ int64_t num_numbers(const Params& p) {
  return int64_t{p.num_tokens / kChunk} + p.num_seqs;
}

__device__ __forceinline__ uint32_t* is_made(unsigned char* entry) {
  return reinterpret_cast<uint32_t*>(entry + kWyFlags);
}

// Behind the first entry's flag: what is handed out to blocks next.
constexpr int kWyQueue = 4, kWyQueueWords = 3;
__device__ __forceinline__ uint32_t* wy_queue(const Params& p) {
  return is_made(find_wy(p, 0, 0)) + kWyQueue;
}

// ---- one chunk, by 8 warps ----------------------------------------------------------------------

// Shared memory: that of `make_chunk`; behind the products with q the scaled inverses lie over q,
// and V over A.
constexpr int kMakerScaled = kMakerQ;
constexpr int kMakerValues = (kMakerSystem + 255) / 256 * 256;
static_assert(kMakerValues + kKeysBytes <= kMakerInverse, "V lies over A");

// Of a word of two bfloat16 bits 15 and 31, where the halves are not finite.
__device__ __forceinline__ uint32_t carries(uint32_t word) {
  return ((word & 0x7f807f80u) + 0x00800080u) & 0x80008000u;
}

// The word with zeros for halves that are not finite.
__device__ __forceinline__ uint32_t keep_finite(uint32_t word) {
  const uint32_t is_bad = carries(word);
  return word & ~((is_bad >> 15) * 0xffffu);
}

// T diag(beta d) and behind it T diag(beta), without the identity, as tiles [64, 64]. By selection
// above the diagonal, where a gate may be NaN; tiles of 16 x 16 there are left as they are.
__device__ __forceinline__ void scale_inverse(const Prepare& x, unsigned char* to) {
  const auto scales = [&](uint32_t s, float (&keys)[2], float (&values)[2]) {
    const float2 beta = *reinterpret_cast<const float2*>(x.gates->beta + s);
    const float2 decay = *reinterpret_cast<const float2*>(x.gates->from_start + s);
    values[0] = beta.x;
    values[1] = beta.y;
    keys[0] = beta.x * decay.x;
    keys[1] = beta.y * decay.y;
  };
  each_of_inverse(
      x,
      [&](uint32_t t, uint32_t s, float first, float second) {
        float keys[2], values[2];
        scales(s, keys, values);
        unsigned char* at = to + swizzle<kPairBytes>(t, s / 8) + s % 8 * 2;
        *reinterpret_cast<uint32_t*>(at) = ptx::to_bf16x2(keys[0] * first, keys[1] * second);
        *reinterpret_cast<uint32_t*>(at + kPairsBytes) =
            ptx::to_bf16x2(values[0] * first, values[1] * second);
      },
      [&](uint32_t t, uint32_t s, const float (&entries)[8]) {
        uint32_t words[2][4];
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          float scale[2][2];
          scales(s + j, scale[0], scale[1]);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float first = s + j < t ? scale[i][0] * entries[j] : 0.0f;
            const float second = s + j + 1 < t ? scale[i][1] * entries[j + 1] : 0.0f;
            words[i][j / 2] = ptx::to_bf16x2(first, second);
          }
        }
        unsigned char* at = to + swizzle<kPairBytes>(t, s / 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          *reinterpret_cast<uint4*>(at + i * kPairsBytes) =
              make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
        }
      });
}

__device__ __forceinline__ float low_half(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_half(uint32_t word) {
  return __uint_as_float(word & 0xffff0000u);
}

// `queries`, four fragments a warp.
__device__ __forceinline__ void copy_queries(const unsigned char* q_tile, unsigned char* entry) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t idx = 4 * prepare_warp() + i;
    uint32_t b[4];
    ptx::load_matrices(
        b, fragment_b<kKeyBytes>(ptx::shared_address(q_tile), idx / 8 * 16, idx % 8 * 2));
    *fragment_at(entry + kWyQueries, idx) = make_uint4(b[0], b[1], b[2], b[3]);
  }
}

// `keys` and `columns` of 16 channels, those of this warp.
__device__ __forceinline__ void make_keys(const unsigned char* k_tile, const unsigned char* scaled,
                                          const ChunkGates& gates, unsigned char* entry) {
  constexpr int kSteps = kChunk / 16;
  const uint32_t warp = prepare_warp(), lane = threadIdx.x % kWarpSize;
  const uint32_t k = ptx::shared_address(k_tile), T = ptx::shared_address(scaled);
  uint32_t columns[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t (&b)[4] = columns[step];
    ptx::load_matrices_transposed(b, fragment_a<kKeyBytes>(k, 16 * step, 2 * warp));
    *fragment_at(entry + kWyColumns, kSteps * warp + step) = make_uint4(b[0], b[1], b[2], b[3]);
    // A key that is not finite would reach earlier tokens through 0 * NaN; later ones count as not
    // finite anyway (`first_bad`), itself has it below.
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = keep_finite(b[i]);
  }
#pragma unroll
  for (int tile = 0; tile < kSteps; ++tile) {
    float sum[2][4] = {};
#pragma unroll
    for (int step = 0; step <= tile; ++step) {
      uint32_t a[4];
      ptx::load_matrices(a, fragment_a<kPairBytes>(T, 16 * tile, 2 * step));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        ptx::mma_bf16(sum[h], a, columns[step][2 * h], columns[step][2 * h + 1]);
      }
    }
    uint32_t own[4];  // of tokens g and g + 8, then of the upper 8 channels
    ptx::load_matrices(own, fragment_a<kKeyBytes>(k, 16 * tile, 2 * warp));
    uint32_t words[4];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const uint32_t t = 16 * tile + 8 * upper + lane / 4;
      const float scale = gates.beta[t] * gates.from_start[t];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t word = own[2 * h + upper];
        words[2 * upper + h] = ptx::to_bf16x2(-fmaf(scale, low_half(word), sum[h][2 * upper]),
                                              -fmaf(scale, high_half(word), sum[h][2 * upper + 1]));
      }
    }
    *fragment_at(entry + kWyKeys, 8 * tile + warp) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// `values` of 16 rows of V, those of this warp. Of a row with a value that is not finite all are
// NaN from that token on.
__device__ __forceinline__ void make_values(const unsigned char* v_tile,
                                            const unsigned char* scaled, const ChunkGates& gates,
                                            unsigned char* entry) {
  constexpr int kSteps = kChunk / 16;
  const uint32_t warp = prepare_warp(), lane = threadIdx.x % kWarpSize;
  const uint32_t v = ptx::shared_address(v_tile), T = ptx::shared_address(scaled);
  uint32_t rows[kSteps][4], is_dirty = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::load_matrices_transposed(rows[step], fragment_b<kKeyBytes>(v, 16 * step, 2 * warp));
#pragma unroll
    for (int i = 0; i < 4; ++i) is_dirty |= carries(rows[step][i]);
  }
  int32_t first_bad[2] = {kChunk, kChunk};  // of rows g and g + 8
  const bool has_bad = __ballot_sync(0xffffffffu, is_dirty != 0) != 0;
  if (has_bad) {
#pragma unroll
    for (int i = 4 * 2 * kSteps - 1; i >= 0; --i) {
      const int step = i / 8, part = i / 2 % 4, half = i % 2;
      const int32_t t = 16 * step + part / 2 * 8 + lane % 4 * 2 + half;
      const bool is_bad = (carries(rows[step][part]) >> (16 * half + 15) & 1) != 0;
      if (is_bad) first_bad[part % 2] = min(first_bad[part % 2], t);
    }
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      int32_t& first = first_bad[upper];
      first = min(first, __shfl_xor_sync(0xffffffffu, first, 1));
      first = min(first, __shfl_xor_sync(0xffffffffu, first, 2));
    }
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) rows[i / 4][i % 4] = keep_finite(rows[i / 4][i % 4]);
  }
#pragma unroll
  for (int tile = 0; tile < kSteps; ++tile) {
    float sum[2][4] = {};
#pragma unroll
    for (int step = 0; step <= tile; ++step) {
      uint32_t b[4];
      ptx::load_matrices(b, fragment_b<kPairBytes>(T, 16 * tile, 2 * step));
#pragma unroll
      for (int h = 0; h < 2; ++h) ptx::mma_bf16(sum[h], rows[step], b[2 * h], b[2 * h + 1]);
    }
    uint32_t words[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t t = 16 * tile + 8 * h + lane % 4 * 2;
      const float2 beta = *reinterpret_cast<const float2*>(gates.beta + t);
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const uint32_t word = rows[tile][2 * h + upper];
        const float first = fmaf(beta.x, low_half(word), sum[h][2 * upper]);
        const float second = fmaf(beta.y, high_half(word), sum[h][2 * upper + 1]);
        words[2 * h + upper] = ptx::to_bf16x2(t >= first_bad[upper] ? NAN : first,
                                              t + 1 >= first_bad[upper] ? NAN : second);
      }
    }
    *fragment_at(entry + kWyValues, kSteps * warp + tile) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// All of an entry that does not need the state; what `load_chunk` loads is on its way. Shared
// memory is free again after a barrier.
template <bool kAligned>
__device__ __forceinline__ void make_wy(const Params& p, uint32_t head, Chunk chunk,
                                        const RawGates& raw, unsigned char* entry,
                                        unsigned char* shared) {
  const uint32_t thread = threadIdx.x % kPrepareThreads;
  if (thread < 2 * chunk.length) {  // wanted soon, and far away
    ptx::prefetch_l2(static_cast<const uint16_t*>(p.v) +
                     (int64_t{chunk.start} + thread / 2) * p.v_stride_t + head * p.v_stride_h +
                     thread % 2 * 64);
  }
  auto* gates = reinterpret_cast<ChunkGates*>(shared + kMakerGates);
  if (thread < kWarpSize) {
    compute_gates(raw, load_head_value(p.A_log, head), load_head_value(p.dt_bias, head),
                  chunk.length, gates);
  }
  finish_copies();
  ptx::barrier_sync(kPrepareBarrier, kPrepareThreads);
  const Prepare x{shared + kMakerQ,
                  shared,
                  gates,
                  reinterpret_cast<float*>(shared + kMakerSystem),
                  reinterpret_cast<float*>(shared + kMakerInverse),
                  nullptr,
                  entry + kWyPairs};
  copy_queries(shared + kMakerQ, entry);
  invert<true>(x);
  unsigned char* scaled = shared + kMakerScaled;
  scale_inverse(x, scaled);
  if (thread < kGatesPieces) {
    reinterpret_cast<uint4*>(entry + kWyGates)[thread] =
        reinterpret_cast<const uint4*>(gates)[thread];
  }
  ptx::barrier_sync(kPrepareBarrier, kPrepareThreads);
  copy_keys<kPrepareThreads, kAligned>(shared + kMakerValues, p.v, p.v_stride_t,
                                       head * p.v_stride_h, chunk, thread);
  make_keys(shared, scaled, *gates, entry);
  finish_copies();
  ptx::barrier_sync(kPrepareBarrier, kPrepareThreads);
  make_values(shared + kMakerValues, scaled + kPairsBytes, *gates, entry);
}

}  // namespace fastkernels::gdn_prefill
