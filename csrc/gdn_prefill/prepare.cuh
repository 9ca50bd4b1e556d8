// The part of a chunk that does not need the state: by one block of 8 warps, in shared memory.
#pragma once

#include <cstdint>

#include "gdn_prefill/common.cuh"

namespace fastkernels::gdn_prefill {

constexpr int kPrepareThreads = 256;

// float32 matrices [64, 64]; the pitch keeps rows 16-byte aligned and columns in different banks.
constexpr int kPitch = kChunk + 4;

struct Prepare {
  const unsigned char* q;  // [64, 128] bfloat16, swizzled
  const unsigned char* k;
  ChunkGates* gates;
  float* system;     // [64, kPitch]: I + A without its diagonal
  float* inverse;    // [64, kPitch]
  unsigned char* T;  // [64, 64] bfloat16, swizzled: (I + A)^-1 - I
  unsigned char* P;  // [64, 64] bfloat16, swizzled: decayed q.k
};

// The tile of 16 columns that the 16 x 16 tile `idx` of a lower triangle, by rows, lies in.
__device__ __forceinline__ uint32_t triangle_row(uint32_t idx) {
  return (idx >= 1) + (idx >= 3) + (idx >= 6);
}

// A = tril(beta_t 2^(decay_t - decay_s) k_t.k_s, -1) and P = tril(2^(decay_t - decay_s) q_t.k_s).
__device__ __forceinline__ void multiply_keys(const Prepare& x) {
  constexpr int kWarps = kPrepareThreads / 32;
  constexpr int kTiles = 10;  // 16 x 16 tiles on and below the diagonal
  constexpr int kRounds = (2 * kTiles + kWarps - 1) / kWarps;
  const uint32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const uint32_t q = ptx::shared_address(x.q), k = ptx::shared_address(x.k);
  uint32_t rows[kRounds], columns[kRounds], left[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const uint32_t idx = min(warp + r * kWarps, 2u * kTiles - 1);  // what is too much, twice
    const uint32_t in_triangle = idx % kTiles, row = triangle_row(in_triangle);
    rows[r] = 16 * row;
    columns[r] = 16 * (in_triangle - row * (row + 1) / 2);
    left[r] = idx < kTiles ? k : q;
  }
  float sum[kRounds][2][4] = {};
#pragma unroll
  for (int step = 0; step < kHeadSize / 16; ++step) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      uint32_t a[4], b[4];
      ptx::load_matrices(a, fragment_a<kKeyBytes>(left[r], rows[r], 2 * step));
      ptx::load_matrices(b, fragment_b<kKeyBytes>(k, columns[r], 2 * step));
      ptx::mma_bf16(sum[r][0], a, b[0], b[1]);
      ptx::mma_bf16(sum[r][1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const bool is_system = left[r] == k;
    if (warp + r * kWarps >= 2 * kTiles) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t t = rows[r] + lane / 4 + 8 * i;
        const uint32_t s = columns[r] + 8 * half + lane % 4 * 2;
        const float decay = x.gates->decay[t], beta = x.gates->beta[t];
        float value[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          // Masked before the exponential, which overflows above the diagonal.
          const bool is_before = s + j + (is_system ? 1 : 0) <= t;
          value[j] =
              is_before ? sum[r][half][2 * i + j] * ptx::exp2(decay - x.gates->decay[s + j]) : 0.0f;
          if (is_system) {
            value[j] *= beta;
            if (!isfinite(value[j])) {
              value[j] = 0.0f;
              atomicMin(&x.gates->first_bad, static_cast<int>(t));
            }
          }
        }
        if (is_system) {
          *reinterpret_cast<float2*>(x.system + t * kPitch + s) = make_float2(value[0], value[1]);
        } else {
          *reinterpret_cast<uint32_t*>(x.P + swizzle<kPairBytes>(t, s / 8) + s % 8 * 2) =
              ptx::to_bf16x2(value[0], value[1]);
        }
      }
    }
  }
}

// The inverses of the 16 x 16 blocks on the diagonal: warp w that of block w, a lane a column, by
// forward substitution.
__device__ __forceinline__ void invert_diagonal(const Prepare& x) {
  const uint32_t block = threadIdx.x / kWarpSize, column = threadIdx.x % kWarpSize;
  if (block >= kChunk / 16 || column >= 16) return;
  const float* system = x.system + 16 * block * (kPitch + 1);
  float solution[16];
#pragma unroll
  for (int t = 0; t < 16; ++t) {
    float sum = t == static_cast<int>(column) ? 1.0f : 0.0f;
#pragma unroll
    for (int s = 0; s < t; s += 4) {
      const float4 row = *reinterpret_cast<const float4*>(system + t * kPitch + s);
      sum = fmaf(-row.x, solution[s], sum);
      if (s + 1 < t) sum = fmaf(-row.y, solution[s + 1], sum);
      if (s + 2 < t) sum = fmaf(-row.z, solution[s + 2], sum);
      if (s + 3 < t) sum = fmaf(-row.w, solution[s + 3], sum);
    }
    solution[t] = sum;
    x.inverse[(16 * block + t) * kPitch + 16 * block + column] = sum;
  }
}

// Fragments of float32 matrices as TF32 operands. The columns of a (rows of b) are permuted within
// each 8: position c is column 2c, position c + 4 column 2c + 1, so that a result can be an operand
// a without leaving its registers.
__device__ __forceinline__ void load_tf32_a(uint32_t (&a)[4], const float* x) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  x += lane / 4 * kPitch + lane % 4 * 2;
  const float2 upper = *reinterpret_cast<const float2*>(x);
  const float2 lower = *reinterpret_cast<const float2*>(x + 8 * kPitch);
  a[0] = ptx::to_tf32(upper.x);
  a[1] = ptx::to_tf32(lower.x);
  a[2] = ptx::to_tf32(upper.y);
  a[3] = ptx::to_tf32(lower.y);
}

__device__ __forceinline__ void multiply_tf32(float (&sum)[4], const uint32_t (&a)[4],
                                              const float* b) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  b += lane % 4 * 2 * kPitch + lane / 4;
  ptx::mma_tf32(sum, a, ptx::to_tf32(b[0]), ptx::to_tf32(b[kPitch]));
}

// Of the inverse of [[L, 0], [A, D]] the lower left block, -D^-1 A L^-1, where `kSize` is the size
// of each block: 16 rows from `row` on, `kColumns` columns from `column` on, by one warp.
template <int kSize, int kColumns>
__device__ __forceinline__ void invert_corner(const Prepare& x, uint32_t begin, uint32_t row,
                                              uint32_t column) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  const uint32_t middle = begin + kSize;
  float product[kSize / 8][4] = {};  // 16 rows of D^-1 A
#pragma unroll
  for (int step = 0; step < kSize / 8; ++step) {
    if (8 * step >= row + 16) break;  // D^-1 is lower triangular
    uint32_t a[4];
    load_tf32_a(a, x.inverse + (middle + row) * kPitch + middle + 8 * step);
#pragma unroll
    for (int j = 0; j < kSize / 8; ++j) {
      multiply_tf32(product[j], a, x.system + (middle + 8 * step) * kPitch + begin + 8 * j);
    }
  }
  float result[kColumns / 8][4] = {};
#pragma unroll
  for (int step = 0; step < kSize / 8; ++step) {
    const float (&c)[4] = product[step];
    const uint32_t a[4] = {ptx::to_tf32(-c[0]), ptx::to_tf32(-c[2]), ptx::to_tf32(-c[1]),
                           ptx::to_tf32(-c[3])};
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      // L^-1 is lower triangular, too.
      if (8 * step + 8 <= column + 8 * j) continue;
      multiply_tf32(result[j], a, x.inverse + (begin + 8 * step) * kPitch + begin + column + 8 * j);
    }
  }
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    float* to =
        x.inverse + (middle + row + lane / 4) * kPitch + begin + column + 8 * j + lane % 4 * 2;
    *reinterpret_cast<float2*>(to) = make_float2(result[j][0], result[j][1]);
    *reinterpret_cast<float2*>(to + 8 * kPitch) = make_float2(result[j][2], result[j][3]);
  }
}

// Fills T and P, and lowers `first_bad` to the first token whose row of A is not finite. All
// threads of the block call it, after a barrier that makes its inputs visible; they see the result
// after the next one. Tiles of 16 x 16 above the diagonal are not written.
__device__ __forceinline__ void prepare(const Prepare& x) {
  const uint32_t warp = threadIdx.x / kWarpSize;
  multiply_keys(x);
  __syncthreads();
  invert_diagonal(x);
  __syncthreads();
  if (warp < 2) invert_corner<16, 16>(x, 32 * warp, 0, 0);
  __syncthreads();
  if (warp < 4) invert_corner<32, 16>(x, 0, 16 * (warp / 2), 16 * (warp % 2));
  __syncthreads();
  const uint32_t t = threadIdx.x / 4, s = threadIdx.x % 4 * 16;
  if (s > t) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t column = s + 8 * i + 2 * j;
      const float2 pair = *reinterpret_cast<const float2*>(x.inverse + t * kPitch + column);
      words[j] = ptx::to_bf16x2(column == t ? 0.0f : pair.x, column + 1 == t ? 0.0f : pair.y);
    }
    *reinterpret_cast<uint4*>(x.T + swizzle<kPairBytes>(t, s / 8 + i)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace fastkernels::gdn_prefill
