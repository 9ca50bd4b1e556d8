// The serial part without the output: 4 warps take `kRows` rows of a head's state through the
// chunks of one sequence and leave, for each chunk, what its output is made of (output.cuh).
//
// The chain's formulas and exchange are those of chain.cuh; what is different is what stands beside
// them. No thread reads q or P, none writes output: of the 48 KB that the chain reads of a chunk 24
// are left, and of its accesses of shared memory, which were busy for 65 % of its time, a little
// more than half. A fifth warp brings the inputs of `kStages` chunks, K, T and the gates by bulk
// copies of what `prepare` left. A chunk's inputs are all in registers by the time U is there, and
// the next one's K comes beside the last two products.
//
// Barriers a chunk: 1 (state warps) three times. mbarriers of each stage: inputs are there (the
// copying warp's arrivals, and bytes); inputs have been read (every state thread).
#pragma once

#include <cstdint>

#include "gdn_prefill/chain.cuh"
#include "gdn_prefill/common.cuh"
#include "gdn_prefill/ptx.cuh"

namespace fastkernels::gdn_prefill {

// ---- the workspace, behind what `prepare` leaves there ------------------------------------------

// Per chunk number and v head, of each 16 rows of V: the state of the chunk's start, and U, as
// fragments of bfloat16 (`Chain::pack`); then, for each row, the first token from which on it is
// not finite, kChunk from `prepare` on. Behind all of these, per chunk number and q head, K as it
// lies in shared memory.
constexpr int kLeftUpdates = kHeadSize / 16 * 8 * kFragmentBytes;
constexpr int kLeftBad = kLeftUpdates + kHeadSize / 16 * 4 * kFragmentBytes;
constexpr int kLeftBytes = kLeftBad + kHeadSize * static_cast<int>(sizeof(int32_t));
static_assert(kLeftBytes == 49664, "kernels/__init__.py has the same number");

__device__ __forceinline__ unsigned char* find_left(const Params& p, int64_t number,
                                                    uint32_t head) {
  const int64_t num_chunks = int64_t{p.num_tokens / kChunk} + p.num_seqs;  // `chunk_bound`
  return find_prepared(p, num_chunks, 0) + (number * p.num_v_heads + head) * kLeftBytes;
}

__device__ __forceinline__ unsigned char* find_keys(const Params& p, int64_t number,
                                                    uint32_t q_head) {
  const int64_t num_chunks = int64_t{p.num_tokens / kChunk} + p.num_seqs;
  return find_left(p, num_chunks, 0) + (number * p.num_q_heads + q_head) * kKeysBytes;
}

// ---- the chain ----------------------------------------------------------------------------------

template <int kRows, int kStages>
struct StateChain : Chain<kRows, false> {
  using States = Chain<kRows, false>;
  using typename States::Early;
  // A chunk's values count as there when the next chunk's inputs have set out, and are waited for
  // while the chunk before is still being read.
  static_assert(kStages >= 3, "room for all three");

  static constexpr bool kWritesOutput = false;
  static constexpr int kStateThreads = kGroupThreads;
  // Nobody copies before what `prepare` left is there.
  static constexpr int kThreads = kStateThreads + kWarpSize, kFirstCopyThread = kThreads;
  static constexpr int kBarriers = (States::kSharedBytes + 15) / 16 * 16;
  static constexpr int kSharedBytes = kBarriers + 64;
  static_assert(16 * kStages <= 64, "the barriers");

  // Takes the state through `tokens`, as `Sequence::advance` does; every thread of the block.
  template <typename Block>
  __device__ __forceinline__ void advance(const Block& block, float (&S)[kRows / 16][4][4],
                                          const Tokens& tokens, int32_t num_chunks,
                                          int64_t first_number) const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        ptx::mbarrier_init(there(i), kWarpSize + 1);
        ptx::mbarrier_init(read(i), kStateThreads);
      }
      ptx::fence_mbarrier_init();
    }
    ptx::barrier_sync(kChainBarrier, kThreads);
    if (threadIdx.x < kStateThreads) {
      carry(block, S, num_chunks, first_number);
    } else {
      bring(block, tokens, num_chunks, first_number);
    }
  }

 private:
  __device__ __forceinline__ uint32_t there(int32_t idx) const {
    return ptx::shared_address(this->base + kBarriers) + 8 * (idx % kStages);
  }
  __device__ __forceinline__ uint32_t read(int32_t idx) const { return there(idx) + 8 * kStages; }

  // By the fifth warp. The values of a chunk are waited for when the next one's are on their way.
  template <typename Block>
  __device__ __forceinline__ void bring(const Block& block, const Tokens& tokens,
                                        int32_t num_chunks, int64_t first_number) const {
    const uint32_t lane = threadIdx.x % kWarpSize;
    ptx::wait_for_dependency();
#pragma unroll 1
    for (int32_t idx = 0; idx < num_chunks; ++idx) {
      const Stage to = block.stage(idx);
      if (idx >= kStages) ptx::mbarrier_wait(read(idx), (idx / kStages - 1) % 2);
      if (lane == 0) {
        const unsigned char* made = find_prepared(block.p, first_number + idx, block.head);
        constexpr int kGates = kGatesPieces * 16;
        ptx::mbarrier_arrive_expect(there(idx), kKeysBytes + kPairsBytes + kGates);
        ptx::bulk_load(ptx::shared_address(to.k),
                       find_keys(block.p, first_number + idx, block.q_head), kKeysBytes,
                       there(idx));
        ptx::bulk_load(ptx::shared_address(to.gates), made + kPreparedPairs, kGates, there(idx));
        ptx::bulk_load(ptx::shared_address(to.T), made, kPairsBytes, there(idx));
      }
      block.template copy_values<kWarpSize>(block.chunk_of(tokens, idx), to, lane);
      ptx::copy_commit();
      if (idx == 0) continue;
      ptx::copy_wait<1>();
      ptx::mbarrier_arrive_expect(there(idx - 1), 0);
    }
    ptx::copy_wait<0>();
    ptx::mbarrier_arrive_expect(there(num_chunks - 1), 0);
  }

  // What becomes of a chunk's way: to the workspace, and on to the next one.
  template <typename Block>
  struct Told {
    const StateChain& chain;
    const Block& block;
    int32_t idx, next;             // of the chunk and of the one behind, or once more the last one
    unsigned char *left, *behind;  // of the block's rows of this chunk and of that

    static __device__ __forceinline__ void store(unsigned char* to, uint32_t idx, uint4 words) {
      reinterpret_cast<uint4*>(to + idx * kFragmentBytes)[threadIdx.x % kWarpSize] = words;
    }

    __device__ __forceinline__ void bad(uint32_t row, int32_t first) const {
      const int64_t rows = kLeftBad - block.column / 16 * 8 * kFragmentBytes;
      atomicMin(reinterpret_cast<int32_t*>(left + rows) + block.column + row, first);
    }
    __device__ __forceinline__ void inputs_are_read() const {
      ptx::mbarrier_arrive_expect(chain.read(idx), 0);
    }
    __device__ __forceinline__ void update(uint32_t fragment, uint4 words) const {
      store(left + kLeftUpdates - block.column / 16 * 4 * kFragmentBytes, fragment, words);
    }
    __device__ __forceinline__ void update_is_there() const {}
    __device__ __forceinline__ void wait_for_next() const { chain.wait_for_inputs(next); }
    __device__ __forceinline__ void load_first(Early& early) const {
      chain.template load_keys<0, States::kKeySteps / 2>(early, block.stage(next));
    }
    __device__ __forceinline__ void wait_for_room() const {}
    __device__ __forceinline__ void load_rest(Early& early) const {
      chain.template load_keys<States::kKeySteps / 2>(early, block.stage(next));
      States::load_rest(early, block.stage(next));
    }
    // Of the chunk behind, whose start is this one's end.
    __device__ __forceinline__ void state(uint32_t fragment, uint4 words) const {
      if (behind != nullptr) store(behind, fragment, words);
    }
  };

  __device__ __forceinline__ void wait_for_inputs(int32_t idx) const {
    ptx::mbarrier_wait(there(idx), idx / kStages % 2);
  }

  template <typename Block>
  __device__ __forceinline__ void carry(const Block& block, float (&S)[kRows / 16][4][4],
                                        int32_t num_chunks, int64_t first_number) const {
    const int64_t step = int64_t{block.p.num_v_heads} * kLeftBytes;
    unsigned char* left =
        find_left(block.p, first_number, block.head) + block.column / 16 * 8 * kFragmentBytes;
    this->publish(S, 0, Told<Block>{*this, block, 0, 0, nullptr, left});
    if (threadIdx.x < 2 * kRows) this->first_bad(0)[threadIdx.x] = kChunk;
    Early early;
    wait_for_inputs(0);
    this->load_keys(early, block.stage(0));
    this->load_rest(early, block.stage(0));
    ptx::barrier_sync(kStateBarrier, kStateThreads);
#pragma unroll 1
    for (int32_t idx = 0; idx < num_chunks; ++idx) {
      const bool is_last = idx + 1 == num_chunks;
      unsigned char* behind = is_last ? nullptr : left + step;
      if (is_last) ptx::launch_dependents();  // earlier they would only take up room
      States::advance(S, block.stage(idx), idx % 2, early,
                      Told<Block>{*this, block, idx, is_last ? idx : idx + 1, left, behind});
      left = behind;
      ptx::barrier_sync(kStateBarrier, kStateThreads);
    }
  }
};

}  // namespace fastkernels::gdn_prefill
