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
  float* system;   // [64, kPitch]: I + A without its diagonal
  float* inverse;  // [64, kPitch]
  // In shared memory or global. [64, 64] bfloat16, swizzled: (I + A)^-1 - I, and decayed q.k.
  unsigned char *T, *P;
};

// The tile of 16 columns that the 16 x 16 tile `idx` of a lower triangle, by rows, lies in.
__device__ __forceinline__ uint32_t triangle_row(uint32_t idx) {
  return (idx >= 1) + (idx >= 3) + (idx >= 6);
}

// As a tensor core takes it, which drops the low 13 bits.
__device__ __forceinline__ float round_tf32(float x) { return __uint_as_float(ptx::to_tf32(x)); }

// A lane's part of a 16 x 16 tile of A or P from the products of keys: (t, s) and (t, s + 1), t and
// s of each half and i. No branch an element: each would wait for its own loads and exponentials.
// Above the diagonal the exponential may overflow; that is selected away.
struct Pair {
  uint32_t t, s;
  float decay[2];  // from s, from s + 1
};

__device__ __forceinline__ Pair pair_of(const Prepare& x, uint32_t row, uint32_t column, int half,
                                        int i) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  const uint32_t t = row + lane / 4 + 8 * i, s = column + 8 * half + lane % 4 * 2;
  const float2 from = *reinterpret_cast<const float2*>(x.gates->decay + s);
  const float to = x.gates->decay[t];
  return {t, s, {ptx::exp2(to - from.x), ptx::exp2(to - from.y)}};
}

__device__ __forceinline__ void store_system(const Prepare& x, uint32_t row, uint32_t column,
                                             const float (&sum)[2][4], int32_t& first_bad) {
  const bool is_diagonal = row == column;
#pragma unroll
  for (int idx = 0; idx < 4; ++idx) {
    const int half = idx / 2, i = idx % 2;
    const Pair at = pair_of(x, row, column, half, i);
    const float beta = x.gates->beta[at.t];
    float value[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float y = beta * sum[half][2 * i + j] * at.decay[j];
      const bool is_before = at.s + j < at.t, is_bad = is_before && !isfinite(y);
      first_bad = min(first_bad, is_bad ? static_cast<int32_t>(at.t) : kChunk);
      value[j] = is_before && !is_bad ? y : 0.0f;
    }
    // What the substitution takes is exact, what the tensor cores take is rounded here.
    *reinterpret_cast<float2*>(x.system + at.t * kPitch + at.s) =
        is_diagonal ? make_float2(value[0], value[1])
                    : make_float2(round_tf32(value[0]), round_tf32(value[1]));
  }
}

__device__ __forceinline__ void store_pairs(const Prepare& x, uint32_t row, uint32_t column,
                                            const float (&sum)[2][4]) {
#pragma unroll
  for (int idx = 0; idx < 4; ++idx) {
    const int half = idx / 2, i = idx % 2;
    const Pair at = pair_of(x, row, column, half, i);
    const float first = at.s <= at.t ? sum[half][2 * i] * at.decay[0] : 0.0f;
    const float second = at.s + 1 <= at.t ? sum[half][2 * i + 1] * at.decay[1] : 0.0f;
    *reinterpret_cast<uint32_t*>(x.P + swizzle<kPairBytes>(at.t, at.s / 8) + at.s % 8 * 2) =
        ptx::to_bf16x2(first, second);
  }
}

// A = tril(beta_t 2^(decay_t - decay_s) k_t.k_s, -1) and P = tril(2^(decay_t - decay_s) q_t.k_s).
__device__ __forceinline__ void multiply_keys(const Prepare& x) {
  constexpr int kWarps = kPrepareThreads / 32;
  constexpr int kTiles = 10;  // 16 x 16 tiles on and below the diagonal
  constexpr int kRounds = (2 * kTiles + kWarps - 1) / kWarps;
  const uint32_t warp = threadIdx.x / kWarpSize;
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
  int32_t first_bad = kChunk;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    if (warp + r * kWarps >= 2 * kTiles) break;
    if (left[r] == k) {
      store_system(x, rows[r], columns[r], sum[r], first_bad);
    } else {
      store_pairs(x, rows[r], columns[r], sum[r]);
    }
  }
  if (first_bad < kChunk) atomicMin(&x.gates->first_bad, first_bad);
}

// The inverses of the 16 x 16 blocks on the diagonal: warp w that of block w, a lane a column, by
// forward substitution. Four rows at a time, whose sums over earlier rows do not wait for one
// another; stored at the end, since a store would hold back the loads behind it.
__device__ __forceinline__ void invert_diagonal(const Prepare& x) {
  const uint32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, column = lane;
  constexpr uint32_t kBlocks = kChunk / 16;
  if (warp == kBlocks || warp == kBlocks + 1) {
    // Beside it, zeros for the two tiles above the diagonal that a product below takes in.
    const uint32_t begin = 32 * (warp - kBlocks);
    float* to = x.inverse + (begin + lane / 2) * kPitch + begin + 16 + lane % 2 * 8;
    *reinterpret_cast<float4*>(to) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    *reinterpret_cast<float4*>(to + 4) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  if (warp >= kBlocks || column >= 16) return;
  const float* system = x.system + 16 * warp * (kPitch + 1);
  float solution[16];
#pragma unroll
  for (int first = 0; first < 16; first += 4) {
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = first + i == static_cast<int>(column) ? 1.0f : 0.0f;
#pragma unroll
    for (int s = 0; s < first; s += 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 row = *reinterpret_cast<const float4*>(system + (first + i) * kPitch + s);
        sum[i] = fmaf(-row.x, solution[s], sum[i]);
        sum[i] = fmaf(-row.y, solution[s + 1], sum[i]);
        sum[i] = fmaf(-row.z, solution[s + 2], sum[i]);
        sum[i] = fmaf(-row.w, solution[s + 3], sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 row = *reinterpret_cast<const float4*>(system + (first + i) * kPitch + first);
      if (i > 0) sum[i] = fmaf(-row.x, sum[0], sum[i]);
      if (i > 1) sum[i] = fmaf(-row.y, sum[1], sum[i]);
      if (i > 2) sum[i] = fmaf(-row.z, sum[2], sum[i]);
      solution[first + i] = sum[i];
    }
  }
  float* inverse = x.inverse + 16 * warp * (kPitch + 1) + column;
#pragma unroll
  for (int t = 0; t < 16; ++t) inverse[t * kPitch] = round_tf32(solution[t]);
}

// Fragments of float32 matrices, rounded to TF32 where they were stored, as operands. The columns
// of a (rows of b) are permuted within each 8: position c is column 2c, position c + 4 column
// 2c + 1, so that a result can be an operand a without leaving its registers.
__device__ __forceinline__ void load_tf32_a(uint32_t (&a)[4], const float* x) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  x += lane / 4 * kPitch + lane % 4 * 2;
  const float2 upper = *reinterpret_cast<const float2*>(x);
  const float2 lower = *reinterpret_cast<const float2*>(x + 8 * kPitch);
  a[0] = __float_as_uint(upper.x);
  a[1] = __float_as_uint(lower.x);
  a[2] = __float_as_uint(upper.y);
  a[3] = __float_as_uint(lower.y);
}

__device__ __forceinline__ void multiply_tf32(float (&sum)[4], const uint32_t (&a)[4],
                                              const float* b) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  b += lane % 4 * 2 * kPitch + lane / 4;
  ptx::mma_tf32(sum, a, __float_as_uint(b[0]), __float_as_uint(b[kPitch]));
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
      multiply_tf32(result[j], a, x.inverse + (begin + 8 * step) * kPitch + begin + column + 8 * j);
    }
  }
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    float* to =
        x.inverse + (middle + row + lane / 4) * kPitch + begin + column + 8 * j + lane % 4 * 2;
    *reinterpret_cast<float2*>(to) =
        make_float2(round_tf32(result[j][0]), round_tf32(result[j][1]));
    *reinterpret_cast<float2*>(to + 8 * kPitch) =
        make_float2(round_tf32(result[j][2]), round_tf32(result[j][3]));
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
  if (warp < 4) invert_corner<16, 8>(x, 32 * (warp / 2), 0, 8 * (warp % 2));
  __syncthreads();
  invert_corner<32, 8>(x, 0, 16 * (warp / 4), 8 * (warp % 4));
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
