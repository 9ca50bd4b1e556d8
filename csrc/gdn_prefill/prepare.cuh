// The part of a chunk that does not need the state: by 8 warps, in shared memory.
//
// Barriers: 3 (all 8 warps), 4 (the lower 4).
#pragma once

#include <cstdint>

#include "gdn_prefill/common.cuh"

namespace fastkernels::gdn_prefill {

constexpr int kPrepareThreads = 256;
constexpr int kInverseThreads = 128;
constexpr uint32_t kPrepareBarrier = 3, kInverseBarrier = 4;

// float32 matrices [64, 64]; the pitch keeps rows 16-byte aligned and columns in different banks.
constexpr int kPitch = kChunk + 4;

struct Prepare {
  const unsigned char* q;  // [64, 128] bfloat16, swizzled
  const unsigned char* k;
  ChunkGates* gates;
  float* system;   // [64, kPitch]: I + A without its diagonal
  float* inverse;  // [64, kPitch]
  // In shared memory or global, [64, 64] bfloat16, swizzled: (I + A)^-1 - I, and decayed q.k. P
  // may be of fragments instead, see `invert`.
  unsigned char *T, *P;
};

// Which of the 8 warps this is; a block may have others below.
__device__ __forceinline__ uint32_t prepare_warp() {
  return threadIdx.x % kPrepareThreads / kWarpSize;
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

template <bool kAsFragments>
__device__ __forceinline__ void store_pairs(const Prepare& x, uint32_t row, uint32_t column,
                                            const float (&sum)[2][4]) {
  uint32_t words[4];
#pragma unroll
  for (int idx = 0; idx < 4; ++idx) {
    const int half = idx / 2, i = idx % 2;
    const Pair at = pair_of(x, row, column, half, i);
    const float first = at.s <= at.t ? sum[half][2 * i] * at.decay[0] : 0.0f;
    const float second = at.s + 1 <= at.t ? sum[half][2 * i + 1] * at.decay[1] : 0.0f;
    words[2 * i + half] = ptx::to_bf16x2(first, second);
    if constexpr (!kAsFragments) {
      *reinterpret_cast<uint32_t*>(x.P + swizzle<kPairBytes>(at.t, at.s / 8) + at.s % 8 * 2) =
          words[2 * i + half];
    }
  }
  if constexpr (kAsFragments) {
    *fragment_at(x.P, row / 16 * (kChunk / 16) + column / 16) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Two tiles of 16 x 16 on the diagonal of A = tril(beta_t 2^(decay_t - decay_s) k_t.k_s, -1), by
// each of warps 0 and 1, or one of the six below, by each of the others. On the diagonal the left
// operand is the right one, too, in another order. Not unrolled further: with all loads in front
// the products of one sum stand behind those of the other.
template <bool kOnDiagonal>
__device__ __forceinline__ void multiply_system(const Prepare& x, uint32_t upper, uint32_t lower) {
  const uint32_t k = ptx::shared_address(x.k);
  float sum[kOnDiagonal ? 2 : 1][2][4] = {};
#pragma unroll 4
  for (int step = 0; step < kHeadSize / 16; ++step) {
    uint32_t a[4], b[4];
    ptx::load_matrices(a, fragment_a<kKeyBytes>(k, lower, 2 * step));
    if constexpr (kOnDiagonal) {
      ptx::load_matrices(b, fragment_a<kKeyBytes>(k, upper, 2 * step));
      ptx::mma_bf16(sum[0][0], b, b[0], b[2]);
      ptx::mma_bf16(sum[0][1], b, b[1], b[3]);
      ptx::mma_bf16(sum[1][0], a, a[0], a[2]);
      ptx::mma_bf16(sum[1][1], a, a[1], a[3]);
    } else {
      ptx::load_matrices(b, fragment_b<kKeyBytes>(k, upper, 2 * step));
      ptx::mma_bf16(sum[0][0], a, b[0], b[1]);
      ptx::mma_bf16(sum[0][1], a, b[2], b[3]);
    }
  }
  int32_t first_bad = kChunk;
  store_system(x, kOnDiagonal ? upper : lower, upper, sum[0], first_bad);
  if constexpr (kOnDiagonal) store_system(x, lower, lower, sum[1], first_bad);
  if (first_bad < kChunk) atomicMin(&x.gates->first_bad, first_bad);
}

__device__ __forceinline__ void multiply_system(const Prepare& x) {
  const uint32_t warp = prepare_warp();
  if (warp < 2) {
    multiply_system<true>(x, 32 * warp, 32 * warp + 16);
  } else {
    const uint32_t idx = warp - 2, row = 1 + (idx >= 1) + (idx >= 3);
    multiply_system<false>(x, 16 * (idx - row * (row - 1) / 2), 16 * row);
  }
}

// P = tril(2^(decay_t - decay_s) q_t.k_s), by the upper 4 warps: two make the three tiles of a
// 32 x 32 block on the diagonal, two make a row of two tiles each of the block below, one twice.
template <bool kAsFragments>
__device__ __forceinline__ void multiply_pairs(const Prepare& x) {
  const uint32_t warp = prepare_warp() % 4;
  const bool is_below = warp >= 2;
  const uint32_t first = is_below ? 16 * warp : 32 * warp, second = first + (is_below ? 0 : 16);
  const uint32_t column = is_below ? 0 : first;
  const uint32_t q = ptx::shared_address(x.q), k = ptx::shared_address(x.k);
  float sum[3][2][4] = {};
#pragma unroll 4
  for (int step = 0; step < kHeadSize / 16; ++step) {
    uint32_t a[2][4], b[2][4];
    ptx::load_matrices(a[0], fragment_a<kKeyBytes>(q, first, 2 * step));
    ptx::load_matrices(a[1], fragment_a<kKeyBytes>(q, second, 2 * step));
    ptx::load_matrices(b[0], fragment_b<kKeyBytes>(k, column, 2 * step));
    ptx::load_matrices(b[1], fragment_b<kKeyBytes>(k, column + 16, 2 * step));
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const uint32_t (&right)[4] = b[i / 2];
      ptx::mma_bf16(sum[i][0], a[(i + 1) / 2], right[0], right[1]);
      ptx::mma_bf16(sum[i][1], a[(i + 1) / 2], right[2], right[3]);
    }
  }
  store_pairs<kAsFragments>(x, first, column, sum[0]);
  store_pairs<kAsFragments>(x, second, column, sum[1]);
  store_pairs<kAsFragments>(x, second, column + 16, sum[2]);
}

// The inverses of the 16 x 16 blocks on the diagonal: warp w that of block w, a lane a column, by
// forward substitution. Four rows at a time, whose sums over earlier rows do not wait for one
// another; stored at the end, since a store would hold back the loads behind it.
__device__ __forceinline__ void invert_diagonal(const Prepare& x) {
  const uint32_t warp = prepare_warp(), column = threadIdx.x % kWarpSize;
  if (column >= 16) return;
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
// of each block and `begin` where L begins: 16 rows from `row` on, 8 columns from `column` on, by
// one warp.
template <int kSize>
__device__ __forceinline__ void invert_corner(const Prepare& x, uint32_t begin, uint32_t row,
                                              uint32_t column, float (&result)[4]) {
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
#pragma unroll
  for (int step = 0; step < kSize / 8; ++step) {
    const float (&c)[4] = product[step];
    const uint32_t a[4] = {ptx::to_tf32(-c[0]), ptx::to_tf32(-c[2]), ptx::to_tf32(-c[1]),
                           ptx::to_tf32(-c[3])};
    multiply_tf32(result, a, x.inverse + (begin + 8 * step) * kPitch + begin + column);
  }
}

// Fills P and `inverse`, but for the lower left block of 32 x 32 and what is above the diagonal,
// and lowers `first_bad` to the first token whose row of A is not finite. All 8 warps call it,
// after a barrier that makes its inputs visible, and it ends with one; `gates` are as they stay.
// Tiles of 16 x 16 of P above the diagonal are left as they are. `kAsFragments`: P as right
// operands with a column for each token, [16 tokens][16 earlier ones].
template <bool kAsFragments = false>
__device__ __forceinline__ void invert(const Prepare& x) {
  const uint32_t warp = prepare_warp(), lane = threadIdx.x % kWarpSize;
  multiply_system(x);
  ptx::barrier_sync(kPrepareBarrier, kPrepareThreads);
  if (warp < 4) {
    invert_diagonal(x);
    ptx::barrier_sync(kInverseBarrier, kInverseThreads);
    float corner[4] = {};
    const uint32_t begin = 32 * (warp / 2), column = 8 * (warp % 2);
    invert_corner<16>(x, begin, 0, column, corner);
    float* to = x.inverse + (begin + 16 + lane / 4) * kPitch + begin + column + lane % 4 * 2;
    *reinterpret_cast<float2*>(to) = make_float2(round_tf32(corner[0]), round_tf32(corner[1]));
    *reinterpret_cast<float2*>(to + 8 * kPitch) =
        make_float2(round_tf32(corner[2]), round_tf32(corner[3]));
  } else {
    // Beside it, what is not needed for it, and zeros for the two tiles above the diagonal that the
    // last product takes in.
    if (warp < 6) {
      const uint32_t begin = 32 * (warp - 4);
      float* to = x.inverse + (begin + lane / 2) * kPitch + begin + 16 + lane % 2 * 8;
      *reinterpret_cast<float4*>(to) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      *reinterpret_cast<float4*>(to + 4) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    multiply_pairs<kAsFragments>(x);
  }
  ptx::barrier_sync(kPrepareBarrier, kPrepareThreads);
}

// Behind `invert`, all of the inverse but its identity, a thread's part at a time: `visit(t, s,
// values)` with two columns of the lower left block, which nothing else is made of, and `visit8(t,
// s, values)` with eight of those tiles that are on the diagonal or beside it in a block of 32.
template <typename F, typename F8>
__device__ __forceinline__ void each_of_inverse(const Prepare& x, F visit, F8 visit8) {
  const uint32_t warp = prepare_warp(), lane = threadIdx.x % kWarpSize;
  float corner[4] = {};
  const uint32_t row = 16 * (warp / 4), column = 8 * (warp % 4);
  invert_corner<32>(x, 0, row, column, corner);
  visit(32 + row + lane / 4, column + lane % 4 * 2, corner[0], corner[1]);
  visit(40 + row + lane / 4, column + lane % 4 * 2, corner[2], corner[3]);

  const uint32_t t = threadIdx.x % kPrepareThreads / 4, s = t / 32 * 32 + threadIdx.x % 4 * 8;
  if (s / 16 > t / 16) return;
  float values[8];
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const float2 pair = *reinterpret_cast<const float2*>(x.inverse + t * kPitch + s + j);
    values[j] = s + j == t ? 0.0f : pair.x;
    values[j + 1] = s + j + 1 == t ? 0.0f : pair.y;
  }
  visit8(t, s, values);
}

// Fills T and P, as `invert` does; both are there after the next barrier. Tiles of 16 x 16 above
// the diagonal are zeros.
__device__ __forceinline__ void prepare(const Prepare& x) {
  invert(x);
  each_of_inverse(
      x,
      [&](uint32_t t, uint32_t s, float first, float second) {
        unsigned char* to = x.T + swizzle<kPairBytes>(t, s / 8) + s % 8 * 2;
        *reinterpret_cast<uint32_t*>(to) = ptx::to_bf16x2(first, second);
      },
      [&](uint32_t t, uint32_t s, const float (&values)[8]) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = ptx::to_bf16x2(values[2 * j], values[2 * j + 1]);
        *reinterpret_cast<uint4*>(x.T + swizzle<kPairBytes>(t, s / 8)) =
            make_uint4(words[0], words[1], words[2], words[3]);
      });
  for (uint32_t i = threadIdx.x % kPrepareThreads; i < kPairsBytes / 16; i += kPrepareThreads) {
    const uint32_t row = i / (kPairBytes / 16), piece = i % (kPairBytes / 16);
    if (piece / 2 <= row / 16) continue;
    const uint32_t at = swizzle<kPairBytes>(row, piece);
    *reinterpret_cast<uint4*>(x.T + at) = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(x.P + at) = make_uint4(0, 0, 0, 0);
  }
}

// ---- for the workspace --------------------------------------------------------------------------

// Shared memory of `make_chunk`.
constexpr int kMakerQ = kKeysBytes;
constexpr int kMakerGates = kMakerQ + kKeysBytes;
constexpr int kMakerSystem = kMakerGates + kGatesPieces * 16;
constexpr int kMakerInverse = kMakerSystem + kChunk * kPitch * 4;
constexpr int kMakerBytes = kMakerInverse + kChunk * kPitch * 4;

// What the 8 warps make a chunk's T, P and gates from is on its way; a and b first, since the gates
// take a warp as long as the keys take to come.
template <bool kAligned>
__device__ __forceinline__ RawGates load_chunk(const Params& p, uint32_t head, uint32_t q_head,
                                               Chunk chunk, unsigned char* shared) {
  const uint32_t thread = threadIdx.x % kPrepareThreads;
  RawGates raw = {};
  if (thread < kWarpSize) raw = load_gates(p, head, chunk);
  copy_keys<kPrepareThreads, kAligned>(shared, p.k, p.k_stride_t, q_head * p.k_stride_h, chunk,
                                       thread);
  copy_keys<kPrepareThreads, kAligned>(shared + kMakerQ, p.q, p.q_stride_t, q_head * p.q_stride_h,
                                       chunk, thread);
  return raw;
}

// And then to the workspace. What follows may use the shared memory again after a barrier.
__device__ __forceinline__ void make_chunk(const Params& p, uint32_t head, float A_log,
                                           float dt_bias, int64_t number, int32_t length,
                                           RawGates raw, unsigned char* shared) {
  const uint32_t thread = threadIdx.x % kPrepareThreads;
  auto* gates = reinterpret_cast<ChunkGates*>(shared + kMakerGates);
  if (thread < kWarpSize) compute_gates(raw, A_log, dt_bias, length, gates);
  finish_copies();
  ptx::barrier_sync(kPrepareBarrier, kPrepareThreads);
  unsigned char* to = find_prepared(p, number, head);
  prepare({shared + kMakerQ, shared, gates, reinterpret_cast<float*>(shared + kMakerSystem),
           reinterpret_cast<float*>(shared + kMakerInverse), to, to + kPairsBytes});
  if (thread < kGatesPieces) {
    reinterpret_cast<uint4*>(to + kPreparedPairs)[thread] =
        reinterpret_cast<const uint4*>(gates)[thread];
  }
}

// The whole of it for the chunk of this number, by a block of its own.
constexpr int kPrepareScratch = kMakerBytes;
constexpr int kPrepareBytes = kPrepareScratch + 128;

template <bool kAligned>
__device__ __forceinline__ Chunk prepare_chunk(const Params& p, const Own& only, int32_t number,
                                               uint32_t head) {
  unsigned char* shared = ptx::dynamic_shared();
  const float A_log = load_head_value(p.A_log, head), dt_bias = load_head_value(p.dt_bias, head);
  const uint32_t q_head = gdn::find_q_head(head, p.num_v_heads, p.num_q_heads);
  RawGates raw = {};
  const Chunk chunk = find_loaded<kPrepareThreads>(
      p, only, number, reinterpret_cast<int32_t*>(shared + kPrepareScratch),
      [&](Chunk at) { raw = load_chunk<kAligned>(p, head, q_head, at, shared); });
  if (chunk.length > 0) {
    make_chunk(p, head, A_log, dt_bias, number, chunk.length, raw, shared);
  }
  return chunk;
}

}  // namespace fastkernels::gdn_prefill
