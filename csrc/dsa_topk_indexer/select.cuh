// The `topk` largest of a row's keys, exactly, by the blocks of a cluster: each has the keys of
// neighbouring positions, so that the order of blocks, warps and lanes is that of positions.
//
// Three digits of 11, 11 and 10 bits are counted, each among the keys that agree with the threshold
// in the digits before, so that no key is ever put aside and nothing can overflow. Counts of 2048
// values stay where they were made, with their sums over 32 values; every block adds up all blocks'
// sums, finds the 32 values with the threshold, and adds up those: one barrier of the cluster a
// digit. Then each block counts what it takes, and stores it behind what those before it take: keys
// above the threshold first, then the first ones of those at it, all in order of position.
#pragma once

#include <cstdint>

#include "common/ptx_sm90.cuh"
#include "dsa_topk_indexer/pages.cuh"
#include "dsa_topk_indexer/params.h"

namespace fastkernels::dsa_topk_indexer {

constexpr int kDigits = 3;
constexpr int kValues = 2048;
constexpr int kGroup = 32;  // values whose counts are added up
constexpr int kGroups = kValues / kGroup;

__device__ __forceinline__ constexpr int shift_of(int digit) {
  return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}

// A place in a descending order of counts: `above` of what was asked for come before `value`, which
// counts `here`.
struct Place {
  uint32_t value, above, here;
};

// Lane l has the counts of values 2 * (31 - l) + 1 and 2 * (31 - l), or the first of them alone, of
// values 31 - l; they sum up to at least `wanted`.
template <bool kPairs>
__device__ __forceinline__ Place find(uint32_t high, uint32_t low, uint32_t wanted) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t total = high + low;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t before = __shfl_up_sync(0xffffffffu, total, distance);
    total += lane >= distance ? before : 0;
  }
  const uint32_t above = total - high - low;
  const bool is_high = above + high >= wanted;
  const uint32_t hits = __ballot_sync(0xffffffffu, total >= wanted);
  const int source = 31 - __clz(hits & (~hits + 1));  // the first lane that reaches it
  const uint32_t value = kPairs ? 2 * (31 - lane) + is_high : 31 - lane;
  return {__shfl_sync(0xffffffffu, value, source),
          __shfl_sync(0xffffffffu, is_high ? above : above + high, source),
          __shfl_sync(0xffffffffu, is_high ? high : low, source)};
}

// `kAtOnce`: keys that a thread has on their way. More code is a price where one row is all there
// is: every block reads it from memory first.
template <int kCluster, int kAtOnce>
struct Selection {
  uint32_t counts[kDigits][kValues];
  uint32_t sums[kDigits][kGroups];
  uint32_t parts[2][kWarps][kGroups];  // of the warps, each over some of the blocks
  uint32_t warps[kWarps][2];           // what each warp takes: above the threshold, at it
  uint32_t taken[2];                   // and the block

  __device__ __forceinline__ void clear() {
    uint32_t* all = counts[0];
    for (uint32_t i = threadIdx.x; i < kDigits * kValues; i += FK_THREADS) all[i] = 0;
  }

  static __device__ __forceinline__ void arrive() {
    if constexpr (kCluster > 1) ptx::cluster_arrive();
  }

  static __device__ __forceinline__ void wait() {
    if constexpr (kCluster > 1) {
      ptx::cluster_wait();
    } else {
      __syncthreads();
    }
  }

  // A word of this struct in a block of the cluster.
  static __device__ __forceinline__ uint32_t load(const uint32_t* word, uint32_t rank) {
    if constexpr (kCluster == 1) return *word;
    return ptx::load_cluster(ptx::map_shared(ptx::shared_address(word), rank));
  }

  // Calls `work(key, i)` with this thread's keys, in any order; all lanes of a warp together.
  template <typename Keys, typename Work>
  static __device__ __forceinline__ void for_each(const Keys& keys, int32_t first, int32_t last,
                                                  int32_t step, const Work& work) {
    // By what is left: an index beyond the last key may not fit into 32 bits.
#pragma unroll 1
    for (int32_t left = last - first; left > 0; left -= kAtOnce * step) {
      uint32_t each[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        each[n] = n * step < left ? keys(last - left + n * step) : 0;
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (n * step < left) work(each[n], last - left + n * step);
      }
    }
  }

  template <typename Keys>
  __device__ __forceinline__ void count(const Keys& keys, int32_t num_keys, int digit,
                                        uint32_t prefix) {
    const uint32_t lane = threadIdx.x % 32;
    const int shift = shift_of(digit), before = digit == 0 ? 0 : shift_of(digit - 1);
    const uint32_t mask = digit == 0 ? kValues - 1 : (1u << (before - shift)) - 1;
    for_each(keys, threadIdx.x, num_keys, FK_THREADS, [&](uint32_t key, int32_t) {
      const bool is_in = digit == 0 || key >> before == prefix;
      const uint32_t value = key >> shift & mask;
      const uint32_t in = __ballot_sync(0xffffffffu, is_in);
      if (in == 0) return;
      // One addition for all that agree with the last of them: rows of equal scores would add to
      // one word lane by lane.
      const int leader = 31 - __clz(in);
      const uint32_t its = __shfl_sync(0xffffffffu, value, leader);
      const bool agrees = is_in && value == its;
      const uint32_t agreeing = __ballot_sync(0xffffffffu, agrees);
      const bool leads = static_cast<int>(lane) == leader;
      if (leads || (is_in && !agrees)) {
        ptx::add_shared(ptx::shared_address(&counts[digit][value]), leads ? __popc(agreeing) : 1);
      }
    });
    __syncthreads();
    constexpr int kThreads = FK_THREADS / kGroups, kPart = kGroup / kThreads;
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kPart; i += 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(&counts[digit][threadIdx.x * kPart + i]);
      sum += x.x + x.y + x.z + x.w;
    }
#pragma unroll
    for (int distance = 1; distance < kThreads; distance *= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (threadIdx.x % kThreads == 0) sums[digit][threadIdx.x / kThreads] = sum;
  }

  // Where the threshold lies among the digit's values, with counts of all blocks.
  __device__ __forceinline__ Place search(int digit, uint32_t wanted) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t high = 0, low = 0;
    for (uint32_t rank = warp; rank < kCluster; rank += kWarps) {
      high += load(&sums[digit][63 - 2 * lane], rank);
      low += load(&sums[digit][62 - 2 * lane], rank);
    }
    add_parts(0, &high, &low);
    const Place group = find<true>(high, low, wanted);
    uint32_t here = 0, none = 0;
    for (uint32_t rank = warp; rank < kCluster; rank += kWarps) {
      here += load(&counts[digit][group.value * kGroup + 31 - lane], rank);
    }
    add_parts(1, &here, &none);
    Place place = find<false>(here, 0, wanted - group.above);
    place.value += group.value * kGroup;
    place.above += group.above;
    return place;
  }

  // Each lane's two numbers, summed over the warps that have read any.
  __device__ __forceinline__ void add_parts(int which, uint32_t* x, uint32_t* y) {
    constexpr int kReaders = kCluster < kWarps ? kCluster : kWarps;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t (&all)[kWarps][kGroups] = parts[which];
    if (warp < kReaders) {
      all[warp][lane] = *x;
      all[warp][lane + 32] = *y;
    }
    __syncthreads();
    *x = *y = 0;
#pragma unroll
    for (int w = 0; w < kReaders; ++w) {
      *x += all[w][lane];
      *y += all[w][lane + 32];
    }
  }

  // Stores the row's entries. This block has `num_keys` keys, a multiple of 32; `index(i)` is what
  // stands for key i in the output. All blocks together have at least `topk` keys; those that are 0
  // are no candidates. `clear` came before, and a barrier of the block after it.
  template <typename Keys, typename Index>
  __device__ __forceinline__ void select(const Keys& keys, int32_t num_keys, uint32_t rank,
                                         int32_t topk, int32_t* output, const Index& index) {
    uint32_t prefix = 0, wanted = topk;
    int shift = 32;
#pragma unroll 1
    for (int digit = 0; digit < kDigits; ++digit) {
      count(keys, num_keys, digit, prefix);
      arrive();
      wait();
      const Place place = search(digit, wanted);
      const int bits = (digit == 0 ? 32 : shift_of(digit - 1)) - shift_of(digit);
      prefix = (digit == 0 ? 0 : prefix << bits) | place.value;
      wanted -= place.above;
      shift = shift_of(digit);
      if (place.here == wanted) break;  // all of them are taken, whatever their lower digits
    }
    take(keys, num_keys, rank, topk, output, index, prefix, shift, wanted);
  }

  template <typename Keys, typename Index>
  __device__ __forceinline__ void take(const Keys& keys, int32_t num_keys, uint32_t rank,
                                       int32_t topk, int32_t* output, const Index& index,
                                       uint32_t prefix, int shift, uint32_t wanted) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, below = (1u << lane) - 1;
    // Each warp has neighbouring keys.
    const int32_t each = (num_keys / 32 + kWarps - 1) / kWarps * 32;
    const int32_t first = warp * each, last = min(first + each, num_keys);
    uint32_t above = 0, at = 0;
    for_each(keys, first + lane, last, 32, [&](uint32_t key, int32_t) {
      above += __popc(__ballot_sync(0xffffffffu, key >> shift > prefix));
      at += __popc(__ballot_sync(0xffffffffu, key != 0 && key >> shift == prefix));
    });
    if (lane == 0) {
      warps[warp][0] = above;
      warps[warp][1] = at;
    }
    __syncthreads();
    uint32_t block[2] = {}, before[2] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        before[i] += w < static_cast<int>(warp) ? warps[w][i] : 0;
        block[i] += warps[w][i];
      }
    }
    if (threadIdx.x < 2) taken[threadIdx.x] = threadIdx.x == 0 ? block[0] : block[1];
    arrive();
    wait();
    uint32_t total[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t its = lane < kCluster ? load(&taken[i], lane) : 0;
      uint32_t sum = its;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t others = __shfl_up_sync(0xffffffffu, sum, distance);
        sum += lane >= distance ? others : 0;
      }
      total[i] = __shfl_sync(0xffffffffu, sum, 31);
      before[i] += __shfl_sync(0xffffffffu, sum - its, rank);
    }
    arrive();  // nothing of another block is read from here on
    const uint32_t at_end = min(wanted, total[1]);
    for_each(keys, first + lane, last, 32, [&](uint32_t key, int32_t i) {
      const bool is_above = key >> shift > prefix;
      const bool is_at = key != 0 && key >> shift == prefix;
      const uint32_t all_above = __ballot_sync(0xffffffffu, is_above);
      const uint32_t all_at = __ballot_sync(0xffffffffu, is_at);
      const uint32_t place_at = before[1] + __popc(all_at & below);
      if (is_above) output[before[0] + __popc(all_above & below)] = index(i);
      if (is_at && place_at < at_end) output[total[0] + place_at] = index(i);
      before[0] += __popc(all_above);
      before[1] += __popc(all_at);
    });
    store_padding(output, total[0] + at_end, topk, rank * FK_THREADS + threadIdx.x,
                  kCluster * FK_THREADS);
    wait();  // and nothing of this one once all have said so
  }
};

}  // namespace fastkernels::dsa_topk_indexer
