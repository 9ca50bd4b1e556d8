// What a segment of a sequence makes of the state that it starts from, before that state is known:
// the chain (chain.cuh) without output, over the segment before a cut, from the unit matrix and
// from zeros. By the 4 state warps alone, which copy their inputs, too: two blocks an SM hide each
// other's waits.
//
// Barriers a chunk: 5 once, 1 twice.
#pragma once

#include <cstdint>

#include "gdn_prefill/chain.cuh"
#include "gdn_prefill/segments.cuh"
#include "gdn_prefill/sequence.cuh"

namespace fastkernels::gdn_prefill {

template <int kSegment, int kRows, int kStages, bool kAligned>
struct Transfer {
  using Exchange = Chain<kRows, false>;
  // How states lie in registers and where they are in memory.
  using States = Sequence<kRows, kStages, Maker::kKernel, kAligned>;
  using Workspace = Sequence<kRows, kStages, Maker::kKernel, true>;

  static constexpr int kThreads = kGroupThreads;
  static constexpr int kSlabs = 2 * kHeadSize / kRows;  // of a transfer matrix, then of a state
  static constexpr int kVTileBytes = kChunk * Exchange::kVBytes;
  static constexpr int kGatesBytes = kGatesPieces * 16;

  static constexpr int kT = kStages * kKeysBytes;
  static constexpr int kExchange = kT + kStages * kPairsBytes;
  static constexpr int kV = kExchange + Exchange::kSharedBytes;
  static constexpr int kGates = kV + kStages * kVTileBytes;
  static constexpr int kScratch = kGates + kStages * kGatesBytes;
  static constexpr int kSharedBytes = kScratch + 128;

  States states;
  bool is_matrix;

  // The whole kernel: this block's rows of what is left at its cut, `find_part` has both.
  static __device__ __forceinline__ void enter(const Params& p) {
    const Part part = find_part<kSlabs>(p);
    const uint32_t row = part.slab * kRows;
    Transfer block{{p, ptx::dynamic_shared(), part.head, part.q_head, row % kHeadSize, 0.0f, 0.0f},
                   row < kHeadSize};
    block.run(part.position);
    // One block is enough to keep the next kernel from overtaking the earlier one.
    if (blockIdx.x == 0) ptx::wait_for_dependency();
  }

 private:
  __device__ __forceinline__ void run(int32_t number) const {
    const Params& p = states.p;
    unsigned char* shared = states.shared;
    const Place cut = find_place<kThreads, kSegment, Numbering::kCuts>(
        p, number, reinterpret_cast<int32_t*>(shared + kScratch));
    if (cut.idx < 0) return;
    const SlotIndex read = load_slot(p.read_indices, p.index_words, p.read_stride, cut.seq);
    if (!is_slot(read, p.index_words, p.num_slots)) return;
    float S[Exchange::kTiles][4][4] = {};
    if (cut.idx == 0) {
      if (p.has_state) {
        States::load_state(S, states.state_at(static_cast<const float*>(p.state), read,
                                              p.state_stride_slot, p.state_stride_h));
      }
    } else if (is_matrix) {
      States::each_pair([&](int r, int j, int i, uint32_t offset) {
        const uint32_t row = states.column + offset / kHeadSize, column = offset % kHeadSize;
        S[r][j][i] = column == row ? 1.0f : 0.0f;
        S[r][j][i + 1] = column + 1 == row ? 1.0f : 0.0f;
      });
    }
    if (cut.idx > 0 || !is_matrix) {
      advance(S, segment_of<kSegment>(cut.tokens, cut.idx), first_chunk_of<kSegment>(cut, cut.idx));
    }
    ptx::launch_dependents();  // late: what waits for this kernel would only take its time
    const CutStates to = find_cut(p, number, states.head);
    Workspace::store_state(S, (is_matrix ? to.transfer : to.state) + states.column * kHeadSize);
  }

  __device__ __forceinline__ Stage stage(int32_t chunk) const {
    unsigned char* shared = states.shared;
    const int32_t i = chunk % kStages;
    return {shared + i * kKeysBytes,
            nullptr,
            shared + kV + i * kVTileBytes,
            shared + kT + i * kPairsBytes,
            nullptr,
            reinterpret_cast<ChunkGates*>(shared + kGates + i * kGatesBytes)};
  }

  __device__ __forceinline__ void copy_inputs(Chunk chunk, const Stage& to) const {
    const Params& p = states.p;
    copy_keys<kThreads, kAligned>(to.k, p.k, p.k_stride_t, states.q_head * p.k_stride_h, chunk,
                                  threadIdx.x);
    if (is_matrix) return;
    copy_values<kThreads, kRows, kAligned>(to.v, p, states.head, states.column, chunk, threadIdx.x);
  }

  // As `Sequence::copy_prepared`, but for P.
  __device__ __forceinline__ void copy_prepared(int64_t number, const Stage& to) const {
    const unsigned char* from = find_prepared(states.p, number, states.head);
    const uint32_t thread = threadIdx.x, T = ptx::shared_address(to.T) + 16 * thread;
#pragma unroll
    for (int i = 0; i < kPairsBytes / 16 / kThreads; ++i) {
      ptx::copy_async(T + 16 * kThreads * i, from + 16 * (kThreads * i + thread), 16);
    }
    if (thread < kGatesPieces) {
      ptx::copy_async(ptx::shared_address(to.gates) + 16 * thread,
                      from + kPreparedPairs + 16 * thread, 16);
    }
  }

  // Takes the state through a segment, all of whose chunks are full.
  __device__ __forceinline__ void advance(float (&S)[Exchange::kTiles][4][4], Tokens tokens,
                                          int64_t first_number) const {
    constexpr int kChunks = kSegment / kChunk;
    static_assert(kStages - 1 <= kChunks, "the first stages are all of this segment");
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) copy_inputs(states.chunk_of(tokens, i), stage(i));
    if (is_matrix) {
      auto* v = reinterpret_cast<uint4*>(states.shared + kV);
      for (uint32_t i = threadIdx.x; i < kStages * kVTileBytes / 16; i += kThreads) {
        v[i] = make_uint4(0, 0, 0, 0);
      }
    }
    const Exchange chain{states.shared + kExchange};
    chain.publish(S, 0);
    if (threadIdx.x < 2 * kRows) chain.first_bad(0)[threadIdx.x] = kChunk;
    ptx::wait_for_dependency();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      copy_prepared(first_number + i, stage(i));
      ptx::copy_commit();
    }
    ptx::copy_wait<kStages - 2>();
    ptx::barrier_sync(kChainBarrier, kThreads);

#pragma unroll 1
    for (int32_t idx = 0; idx < kChunks; ++idx) {
      const int32_t ahead = idx + kStages - 1;
      if (ahead < kChunks) {
        copy_inputs(states.chunk_of(tokens, ahead), stage(ahead));
        copy_prepared(first_number + ahead, stage(ahead));
      }
      ptx::copy_commit();
      chain.advance(S, stage(idx), idx % 2);
      ptx::copy_wait<kStages - 2>();
      ptx::barrier_sync(kChainBarrier, kThreads);
    }
  }
};

}  // namespace fastkernels::gdn_prefill
