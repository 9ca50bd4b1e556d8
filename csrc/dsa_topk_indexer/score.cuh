// Scores of a list of pages, as integers in the order of the scores, by the warps of a block.
//
// A page lies in shared memory as it does in the cache. A warp takes 8 positions for all heads, 16
// heads by 8 positions by 16 products an instruction: float16 holds e4m3 exactly, and so does
// float32 every product. Queries are converted once and stay in registers. The 128 products come in
// an order of our own, the same for both operands: lane l of a fragment has bytes 16 * (l % 4) and
// on and 64 + 16 * (l % 4) and on of its row, which are two loads of 16 bytes.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ptx_sm90.cuh"
#include "dsa_topk_indexer/pages.cuh"
#include "dsa_topk_indexer/params.h"

namespace fastkernels::dsa_topk_indexer {

constexpr int kSteps = kKeyBytes / 16;
constexpr int kEach = kPageSize / 8 / kWarps;  // tiles of 8 positions of a page, for each warp
static_assert(kEach * kWarps * 8 == kPageSize, "warps share out a page evenly");

constexpr uint32_t kInfinity = 0x7f800000;  // its bits

// The order of scores: NaN on top, +0 as -0. 0 is below every score, and what is no candidate has.
__device__ __forceinline__ uint32_t to_key(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  if (score != score) return 0xffffffffu;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ uint4 load_bytes(const unsigned char* from) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i / 4] |= uint32_t{from[i]} << (8 * (i % 4));
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// `kHeadTiles` times 16 heads of a row. Those that it does not have are zeros, with weight 0.
template <int kHeadTiles>
struct Query {
  uint4 raw[kHeadTiles][2][2];  // on their way: heads l / 4 and l / 4 + 8 of each 16
  float weights[kHeadTiles][2];
  int32_t num_heads;

  __device__ __forceinline__ Query(const Params& p, int64_t row) : num_heads(p.num_heads) {
    const auto* q = static_cast<const unsigned char*>(p.q) + row * p.q_stride_b;
    const auto* weight = static_cast<const float*>(p.weights) + row * p.weights_stride_b;
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t head = head_of(m, half);
        const unsigned char* from = q + head * p.q_stride_h + threadIdx.x % 4 * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          raw[m][half][i] = make_uint4(0, 0, 0, 0);
          if (head >= num_heads) continue;
          if constexpr (FK_ALIGNED) {
            raw[m][half][i] = ptx::load_constant(reinterpret_cast<const uint4*>(from + 64 * i));
          } else {
            raw[m][half][i] = load_bytes(from + 64 * i);
          }
        }
        weights[m][half] = head < num_heads ? ptx::load_constant(weight + head) : 0.0f;
      }
    }
  }

  static __device__ __forceinline__ int32_t head_of(int m, int half) {
    return 16 * m + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4);
  }
};

__device__ __forceinline__ uint32_t word_of(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Scores the pages it is given against one row's queries.
template <int kHeadTiles>
struct Scorer {
  uint32_t q[kHeadTiles][kSteps][4];
  float weights[kHeadTiles][2];
  int32_t num_heads;

  __device__ __forceinline__ explicit Scorer(const Query<kHeadTiles>& query)
      : num_heads(query.num_heads) {
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weights[m][half] = query.weights[m][half];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          ptx::convert_e4m3(word_of(query.raw[m][half][s / 4], s % 4), &q[m][s][half],
                            &q[m][s][half + 2]);
        }
      }
    }
  }

  // What a warp needs of a page in shared memory, in registers.
  struct Keys {
    uint4 raw[kEach][2];
    float2 scales[kEach];  // of positions 2 * (l % 4) and the next of each tile

    __device__ __forceinline__ explicit Keys(const unsigned char* page) {
      const uint32_t lane = threadIdx.x % 32;
#pragma unroll
      for (int t = 0; t < kEach; ++t) {
        const uint32_t first = first_of(t);
        const auto* row = reinterpret_cast<const uint4*>(page + (first + lane / 4) * kKeyBytes);
        raw[t][0] = row[lane % 4];
        raw[t][1] = row[lane % 4 + 4];
        scales[t] = *reinterpret_cast<const float2*>(page + kScales + 4 * (first + lane % 4 * 2));
      }
    }
  };

  static __device__ __forceinline__ uint32_t first_of(int t) {
    return (threadIdx.x / 32 * kEach + t) * 8;
  }

  // Keys of a page's positions, of which `count` are the row's. The magnitude of a finite scale
  // comes last, so that nothing overflows before the sum over heads does; its sign decides relu,
  // and an infinite or NaN scale acts where the formula has it.
  __device__ __forceinline__ void score(const Keys& keys, int32_t count, uint32_t* to) const {
    float dots[kEach][kHeadTiles][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int t = 0; t < kEach; ++t) {
        uint32_t low, high;
        ptx::convert_e4m3(word_of(keys.raw[t][s / 4], s % 4), &low, &high);
#pragma unroll
        for (int m = 0; m < kHeadTiles; ++m) ptx::mma_f16(dots[t][m], q[m][s], low, high);
      }
    }
    float scales[2 * kEach], sums[2 * kEach];
    bool is_plain = true;  // all scales are finite, and positive or +0
#pragma unroll
    for (int t = 0; t < kEach; ++t) {
      scales[2 * t] = keys.scales[t].x;
      scales[2 * t + 1] = keys.scales[t].y;
      is_plain = is_plain && __float_as_uint(scales[2 * t]) < kInfinity &&
                 __float_as_uint(scales[2 * t + 1]) < kInfinity;
    }
    if (__ballot_sync(0xffffffffu, !is_plain) == 0) {
      add_heads<true>(dots, scales, sums);
    } else {
      add_heads<false>(dots, scales, sums);
    }
    // Over the lanes with other heads of the same positions: while there are several sums, half of
    // them go to either lane.
    const uint32_t lane = threadIdx.x % 32;
    int number = 2 * kEach;
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      if (number == 1) {
        sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], distance);
        continue;
      }
      number /= 2;
      const bool is_upper = lane & distance;
#pragma unroll
      for (int i = 0; i < number; ++i) {
        const float other = is_upper ? sums[i] : sums[i + number];
        sums[i] = is_upper ? sums[i + number] : sums[i];
        sums[i] += __shfl_xor_sync(0xffffffffu, other, distance);
        scales[i] = is_upper ? scales[i + number] : scales[i];
      }
    }
    const uint32_t tile = kEach == 1 ? 0 : lane / 4 % 2, odd = lane / (4 * kEach) % 2;
    const int32_t position = first_of(tile) + lane % 4 * 2 + odd;
    const float magnitude = fabsf(scales[0]);
    const float score = magnitude < INFINITY ? sums[0] * magnitude : sums[0];
    if (lane < 8 * kEach) to[position] = position < count ? to_key(score) : 0;
  }

  // Weighted sums over this lane's heads.
  template <bool kPlain>
  __device__ __forceinline__ void add_heads(const float (&dots)[kEach][kHeadTiles][4],
                                            const float (&scales)[2 * kEach],
                                            float (&sums)[2 * kEach]) const {
#pragma unroll
    for (int n = 0; n < 2 * kEach; ++n) {
      const uint32_t bits = __float_as_uint(scales[n]);
      const bool is_finite = (bits & 0x7fffffff) < kInfinity;
      const float before = !is_finite ? scales[n] : bits >> 31 ? -1.0f : 1.0f;
      sums[n] = 0.0f;
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float dot = dots[n / 2][m][2 * half + n % 2];
          if constexpr (kPlain) {
            sums[n] += weights[m][half] * ptx::max_nan(dot, 0.0f);
          } else if (Query<kHeadTiles>::head_of(m, half) < num_heads) {
            // A head that is not there would be 0 times inf.
            sums[n] += weights[m][half] * ptx::max_nan(before * dot, 0.0f);
          }
        }
      }
    }
  }
};

// ---- pages on their way -------------------------------------------------------------------------

// A ring of `kStages` pages in shared memory: bulk copies where pages lie at multiples of 16 bytes,
// else copies by all threads, one page at a time. A page's place is free for another one as soon as
// all warps have its keys in registers; the last of them sends for that one.
template <int kStages>
struct Ring {
  unsigned char* pages;  // kStages of them
  uint64_t* is_full;     // mbarriers
  uint32_t* taken;       // by how many warps, in all

  // By one warp, before a barrier of the block.
  __device__ __forceinline__ void start(const Params& p, const int32_t* list, int32_t count) const {
    const uint32_t lane = threadIdx.x % 32;
    if (threadIdx.x / 32 != 0 || lane >= kStages) return;
    ptx::mbarrier_init(ptx::shared_address(is_full + lane), 1);
    ptx::fence_mbarrier_init();
    taken[lane] = 0;
    if (static_cast<int32_t>(lane) < count) load(p, lane, list[lane]);
  }

  __device__ __forceinline__ void load(const Params& p, uint32_t stage, int32_t page) const {
    const uint32_t barrier = ptx::shared_address(is_full + stage);
    const bool is_there = FK_ALIGNED && page >= 0;
    ptx::mbarrier_arrive_expect(barrier, is_there ? kPageBytes : 0);
    if (is_there) {
      ptx::bulk_load(ptx::shared_address(pages + stage * kPageBytes), address(p, page), kPageBytes,
                     barrier);
    }
  }

  static __device__ __forceinline__ const unsigned char* address(const Params& p, int32_t page) {
    return static_cast<const unsigned char*>(p.cache) + page * p.cache_stride_page;
  }

  // What this warp needs of the i-th listed page, once it has come.
  template <typename Keys>
  __device__ __forceinline__ Keys take(const Params& p, const int32_t* list, int32_t count,
                                       int32_t i) const {
    const uint32_t stage = i % kStages;
    unsigned char* page = pages + stage * kPageBytes;
    if constexpr (FK_ALIGNED) {
      ptx::mbarrier_wait(ptx::shared_address(is_full + stage), i / kStages % 2);
    } else {
      __syncthreads();
      for (int32_t b = threadIdx.x; list[i] >= 0 && b < kPageBytes; b += FK_THREADS) {
        page[b] = address(p, list[i])[b];
      }
      __syncthreads();
    }
    const Keys keys(page);
    if constexpr (FK_ALIGNED) {
      __syncwarp();
      if (threadIdx.x % 32 == 0 && i + kStages < count &&
          ptx::fetch_add_shared(ptx::shared_address(taken + stage), 1) % kWarps == kWarps - 1) {
        load(p, stage, list[i + kStages]);
      }
    }
    return keys;
  }

  // Keys of `count` listed pages (-1: none of the cache's), of which `length` positions are the
  // row's, to `keys`.
  template <int kHeadTiles>
  __device__ __forceinline__ void score(const Params& p, const Scorer<kHeadTiles>& scorer,
                                        const int32_t* list, int32_t count, int32_t length,
                                        uint32_t* keys) const {
    using Keys = typename Scorer<kHeadTiles>::Keys;
    if (count == 0) return;
    Keys next = take<Keys>(p, list, count, 0);
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      const Keys raw = next;
      if (i + 1 < count) next = take<Keys>(p, list, count, i + 1);
      // What lies in shared memory where no page came counts for nothing.
      scorer.score(raw, list[i] >= 0 ? length - i * kPageSize : 0, keys + i * kPageSize);
    }
  }
};

}  // namespace fastkernels::dsa_topk_indexer
