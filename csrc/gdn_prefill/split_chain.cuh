// The serial part with its output in the same block, where neither waits for the other but for what
// is handed over: 4 state warps make a chunk's state and U (chain.cuh), 4 output warps its output,
// a chunk behind at most, and 4 more warps copy inputs. One barrier of all warps a chunk, as in
// `Sequence::advance`, cost the state warps 120 of 2040 cycles, and copies of the output warps 700
// of theirs.
//
// Barriers: 1 (state warps) three times a chunk. mbarriers, at which every thread of a kind arrives
// once a chunk: inputs are there (of each stage; copying threads); the state of a chunk's start is
// there, U is there (two in turn each; state warps, which have done with the chunk before); the
// output has been made of them (two in turn; output warps).
#pragma once

#include <cstdint>

#include "gdn_prefill/chain.cuh"
#include "gdn_prefill/common.cuh"

namespace fastkernels::gdn_prefill {

template <int kRows, int kStages>
struct SplitChain : Chain<kRows> {
  using States = Chain<kRows>;
  using typename States::Early;
  static_assert(kRows <= 32, "a thread has 168 registers");
  // With more, states would come twice to a barrier that the copying warps have not looked at.
  static_assert(kStages <= 3, "inputs are at most two chunks ahead");

  static constexpr int kStateThreads = kGroupThreads;
  static constexpr int kFirstCopyThread = 2 * kGroupThreads, kThreads = 3 * kGroupThreads;
  // U of odd chunks, then the barriers.
  static constexpr int kUpdate = (States::kSharedBytes + 15) / 16 * 16;
  static constexpr int kBarriers = kUpdate + States::kTokensBytes;
  static constexpr int kSharedBytes = kBarriers + 96;
  static_assert(8 * (kStages + 6) <= 96, "the barriers");

  // Takes the state through `tokens`, as `Sequence::advance` does; every thread of the block.
  template <typename Block>
  __device__ __forceinline__ void advance(const Block& block, float (&S)[kRows / 16][4][4],
                                          const Tokens& tokens, int32_t num_chunks,
                                          int64_t first_number) const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages + 6; ++i) ptx::mbarrier_init(barrier(i), kGroupThreads);
    }
    ptx::barrier_sync(kChainBarrier, kThreads);
    if (threadIdx.x < kStateThreads) {
      carry(block, S, num_chunks);
    } else if (threadIdx.x < kFirstCopyThread) {
      write(block, tokens, num_chunks);
    } else {
      bring(block, tokens, num_chunks, first_number);
    }
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int32_t i) const {
    return ptx::shared_address(this->base + kBarriers) + 8 * i;
  }
  __device__ __forceinline__ uint32_t inputs(int32_t idx) const { return barrier(idx % kStages); }
  __device__ __forceinline__ uint32_t state_barrier(int32_t idx) const {
    return barrier(kStages + idx % 2);
  }
  __device__ __forceinline__ uint32_t u_barrier(int32_t idx) const {
    return barrier(kStages + 2 + idx % 2);
  }
  __device__ __forceinline__ uint32_t output_barrier(int32_t idx) const {
    return barrier(kStages + 4 + idx % 2);
  }
  static __device__ __forceinline__ void arrive(uint32_t barrier) {
    ptx::mbarrier_arrive_expect(barrier, 0);
  }
  __device__ __forceinline__ void wait_for_inputs(int32_t idx) const {
    ptx::mbarrier_wait(inputs(idx), idx / kStages % 2);
  }
  __device__ __forceinline__ void wait_for_state(int32_t idx) const {
    ptx::mbarrier_wait(state_barrier(idx), idx / 2 % 2);
  }
  __device__ __forceinline__ void wait_for_output(int32_t idx) const {
    ptx::mbarrier_wait(output_barrier(idx), idx / 2 % 2);
  }
  __device__ __forceinline__ unsigned char* update_of(int32_t idx) const {
    return idx % 2 == 0 ? this->u_output() : this->base + kUpdate;
  }

  template <typename Block>
  struct Told {
    const SplitChain& chain;
    const Block& block;
    int32_t idx, next;  // of the chunk and of the one behind, or once more the last one

    __device__ __forceinline__ void bad(uint32_t /*row*/, int32_t /*first*/) const {}
    __device__ __forceinline__ void inputs_are_read() const {}
    __device__ __forceinline__ void update(uint32_t fragment, uint4 words) const {
      *States::fragment(chain.update_of(idx), fragment) = words;
    }
    __device__ __forceinline__ void update_is_there() const { arrive(chain.u_barrier(idx)); }
    __device__ __forceinline__ void wait_for_next() const { chain.wait_for_inputs(next); }
    __device__ __forceinline__ void load_first(Early& early) const {
      chain.template load_keys<0, States::kKeySteps / 2>(early, block.stage(next));
    }
    // What is published next lies where the output of the chunk before was made of it.
    __device__ __forceinline__ void wait_for_room() const {
      if (idx > 0) chain.wait_for_output(idx - 1);
    }
    __device__ __forceinline__ void load_rest(Early& early) const {
      chain.template load_keys<States::kKeySteps / 2>(early, block.stage(next));
      States::load_rest(early, block.stage(next));
    }
    __device__ __forceinline__ void state(uint32_t /*fragment*/, uint4 /*words*/) const {}
  };

  template <typename Block>
  __device__ __forceinline__ void carry(const Block& block, float (&S)[kRows / 16][4][4],
                                        int32_t num_chunks) const {
    this->publish(S, 0);
    if (threadIdx.x < 2 * kRows) this->first_bad(0)[threadIdx.x] = kChunk;
    arrive(state_barrier(0));
    Early early;
    wait_for_inputs(0);
    this->load_keys(early, block.stage(0));
    this->load_rest(early, block.stage(0));
    ptx::barrier_sync(kStateBarrier, kStateThreads);
#pragma unroll 1
    for (int32_t idx = 0; idx < num_chunks; ++idx) {
      States::advance(S, block.stage(idx), idx % 2, early,
                      Told<Block>{*this, block, idx, min(idx + 1, num_chunks - 1)});
      arrive(state_barrier(idx + 1));
      ptx::barrier_sync(kStateBarrier, kStateThreads);
    }
  }

  template <typename Block>
  __device__ __forceinline__ void write(const Block& block, const Tokens& tokens,
                                        int32_t num_chunks) const {
#pragma unroll 1
    for (int32_t idx = 0; idx < num_chunks; ++idx) {
      const Chunk chunk = block.chunk_of(tokens, idx);
      wait_for_inputs(idx);
      wait_for_state(idx);
      this->template write_output<Block::kIsAligned>(
          block.stage(idx), idx % 2, update_of(idx), u_barrier(idx), idx / 2 % 2, block.p.scale,
          block.output_at(chunk.start), block.p.output_stride_t, chunk.length);
      arrive(output_barrier(idx));
    }
  }

  // By the copying warps; of the first stages what does not come from the workspace is on its way.
  template <typename Block>
  __device__ __forceinline__ void bring(const Block& block, const Tokens& tokens,
                                        int32_t num_chunks, int64_t first_number) const {
    constexpr int kAhead = kStages - 1;
    ptx::wait_for_dependency();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < num_chunks) block.copy_prepared(first_number + i, block.stage(i));
      ptx::copy_commit();
    }
    ptx::copy_wait<kAhead - 1>();
    arrive(inputs(0));
#pragma unroll 1
    for (int32_t idx = 0; idx < num_chunks; ++idx) {
      // What set out a chunk ago, and not behind what waits for the output.
      if constexpr (kAhead > 1) {
        ptx::copy_wait<kAhead - 2>();
        if (idx + 1 < num_chunks) arrive(inputs(idx + 1));
      }
      const int32_t ahead = idx + kAhead;
      if (ahead < num_chunks) {
        if (idx > 0) {
          wait_for_state(idx);
          wait_for_output(idx - 1);
        }
        block.copy_inputs(block.chunk_of(tokens, ahead), block.stage(ahead));
        block.copy_prepared(first_number + ahead, block.stage(ahead));
      }
      ptx::copy_commit();
      if constexpr (kAhead == 1) {
        ptx::copy_wait<0>();
        if (idx + 1 < num_chunks) arrive(inputs(idx + 1));
      }
    }
  }
};

}  // namespace fastkernels::gdn_prefill
