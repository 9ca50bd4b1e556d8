// One block's way through one sequence: its rows of one head's state, chunk by chunk.
#pragma once

#include <cstdint>

#include "gdn_prefill/chain.cuh"
#include "gdn_prefill/common.cuh"
#include "gdn_prefill/prepare.cuh"

namespace fastkernels::gdn_prefill {

// Shared memory, and what fills it. `kFused`: the block makes T, P and the gates itself, and the
// other warps' products wait for them; else an earlier kernel left them in the workspace.
template <int kRows, int kStages, bool kFused, bool kAligned>
struct Sequence {
  using Exchange = Chain<kRows>;
  static constexpr int kSlabs = kHeadSize / kRows;
  static constexpr int kPairStages = kFused ? 1 : kStages;
  static constexpr int kVTileBytes = kChunk * Exchange::kVBytes;
  static constexpr int kGatesBytes = kGatesPieces * 16;
  static constexpr int kFloatsBytes = kFused ? kChunk * kPitch * 4 : 0;

  static constexpr int kQ = kStages * kKeysBytes;
  static constexpr int kT = kQ + kStages * kKeysBytes;
  static constexpr int kP = kT + kPairStages * kPairsBytes;
  static constexpr int kExchange = kP + kPairStages * kPairsBytes;
  static constexpr int kV = kExchange + Exchange::kSharedBytes;
  static constexpr int kGates = kV + kStages * kVTileBytes;
  static constexpr int kSystem = kGates + kStages * kGatesBytes;
  static constexpr int kInverse = kSystem + kFloatsBytes;
  static constexpr int kScratch = kInverse + kFloatsBytes;
  static constexpr int kSharedBytes = kScratch + 128;

  const Params& p;
  unsigned char* shared;
  uint32_t head, q_head, column;  // `column`: the first of this block's rows of V
  float A_log, dt_bias;           // where the block makes the gates

  __device__ __forceinline__ Stage stage(int32_t chunk) const {
    const int32_t i = chunk % kStages, pair = chunk % kPairStages;
    return {shared + i * kKeysBytes,
            shared + kQ + i * kKeysBytes,
            shared + kV + i * kVTileBytes,
            shared + kT + pair * kPairsBytes,
            shared + kP + pair * kPairsBytes,
            reinterpret_cast<ChunkGates*>(shared + kGates + i * kGatesBytes)};
  }

  // By the output warps, as all copies.
  __device__ __forceinline__ void copy_inputs(Chunk chunk, const Stage& to) const {
    const uint32_t thread = threadIdx.x - kGroupThreads;
    copy_keys<kGroupThreads, kAligned>(to.k, p.k, p.k_stride_t, q_head * p.k_stride_h, chunk,
                                       thread);
    copy_keys<kGroupThreads, kAligned>(to.q, p.q, p.q_stride_t, q_head * p.q_stride_h, chunk,
                                       thread);
    constexpr int kPieces = kRows / 8, kRound = kGroupThreads / kPieces;  // rows of one round
    const uint32_t row = thread / kPieces, piece = thread % kPieces;
    const uint32_t v = ptx::shared_address(to.v) + row * Exchange::kVBytes + 16 * piece;
    const uint16_t* from = static_cast<const uint16_t*>(p.v) +
                           (int64_t{chunk.start} + row) * p.v_stride_t + head * p.v_stride_h +
                           column + 8 * piece;
#pragma unroll
    for (int i = 0; i < kChunk / kRound; ++i) {
      copy_piece<kAligned>(v + i * kRound * Exchange::kVBytes, to.v, from,
                           static_cast<int32_t>(row) + i * kRound < chunk.length);
      from += kRound * p.v_stride_t;
    }
  }

  // What the earlier kernel left: tiles as they will lie.
  __device__ __forceinline__ void copy_prepared(int64_t number, const Stage& to) const {
    const uint32_t thread = threadIdx.x - kGroupThreads;
    const unsigned char* from = find_prepared(p, number, head);
    const uint32_t T = ptx::shared_address(to.T) + 16 * thread;
    const uint32_t P = ptx::shared_address(to.P) + 16 * thread;
    constexpr int kPieces = kPairBytes / 16;
    static_assert(kGroupThreads / kPieces == 16, "a round is a row of tiles");
    const int32_t tile = ((thread % kPieces) ^ (thread / kPieces & 7)) / 2;
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      if (tile > i) continue;  // above the diagonal, where nothing was written
      ptx::copy_async(T + 16 * kPairBytes * i, from + 16 * (kGroupThreads * i + thread), 16);
      ptx::copy_async(P + 16 * kPairBytes * i,
                      from + kPairsBytes + 16 * (kGroupThreads * i + thread), 16);
    }
    if (thread < kGatesPieces) {
      ptx::copy_async(ptx::shared_address(to.gates) + 16 * thread,
                      from + kPreparedPairs + 16 * thread, 16);
    }
  }

  __device__ __forceinline__ Chunk chunk_of(Tokens tokens, int32_t idx) const {
    return {tokens.start + idx * kChunk, min(tokens.length - idx * kChunk, kChunk)};
  }

  __device__ __forceinline__ uint16_t* output_at(int64_t token) const {
    return static_cast<uint16_t*>(p.output) + token * p.output_stride_t + head * p.output_stride_h +
           column;
  }

  // Zeros for this block's columns of tokens `from` to `to`.
  __device__ __forceinline__ void clear_output(int64_t from, int64_t to) const {
    constexpr int kPieces = kRows / 8;
    const int64_t pieces = (to - from) * kPieces;
    for (int64_t i = threadIdx.x; i < pieces; i += kChainThreads) {
      store_piece<kAligned>(output_at(from + i / kPieces) + i % kPieces * 8,
                            make_uint4(0, 0, 0, 0));
    }
  }

  template <typename T>
  __device__ __forceinline__ T* state_at(T* base, SlotIndex slot, int64_t stride_slot,
                                         int64_t stride_h) const {
    return base + slot.low * stride_slot + head * stride_h + column * kHeadSize;
  }

  // A state thread's elements, in pairs: `visit(pair, offset)`.
  template <typename F>
  static __device__ __forceinline__ void each_pair(F visit) {
    const uint32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int r = 0; r < Exchange::kTiles; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          const uint32_t row = 16 * r + 8 * upper + lane / 4;
          visit(r, j, 2 * upper, row * kHeadSize + 32 * warp + 8 * j + lane % 4 * 2);
        }
      }
    }
  }

  // The sequence at `position`; position 0 where there is none.
  __device__ __forceinline__ void run(int32_t position) {
    Located at = {0, {0, 0}};
    if (p.num_seqs == 1) {
      if constexpr (kFused) prefetch_keys<kChainThreads>(p, q_head, 0);
      prefetch_rows<kChainThreads, kRows>(p, head, column);
    }
    if (p.num_seqs > 0) {
      // What the chunks will exchange is not there yet.
      at = locate<kChainThreads>(p, position, reinterpret_cast<int32_t*>(shared + kScratch),
                                 reinterpret_cast<int32_t*>(shared + kExchange));
    }
    const int32_t seq = at.seq;
    const Tokens tokens = at.tokens;
    // Tokens of no sequence stand before the first and after the last.
    if (seq == 0) clear_output(0, tokens.start);
    if (seq + 1 >= p.num_seqs) clear_output(int64_t{tokens.start} + tokens.length, p.num_tokens);
    if (p.num_seqs > 0) run(seq, tokens);
    // On every path: a block that ends must not let the next kernel overtake the earlier one.
    if constexpr (!kFused) ptx::wait_for_dependency();
  }

 private:
  __device__ __forceinline__ void run(int32_t seq, Tokens tokens) {
    const SlotIndex read = load_slot(p.read_indices, p.index_words, p.read_stride, seq);
    const SlotIndex write = load_slot(p.write_indices, p.index_words, p.write_stride, seq);
    if (!is_slot(read, p.index_words, p.num_slots)) {  // padding
      clear_output(tokens.start, int64_t{tokens.start} + tokens.length);
      return;
    }
    const float* state = nullptr;
    if (p.has_state) {
      state =
          state_at(static_cast<const float*>(p.state), read, p.state_stride_slot, p.state_stride_h);
    }
    float* new_state = nullptr;
    if (is_slot(write, p.index_words, p.num_slots)) {
      new_state = state_at(static_cast<float*>(p.new_state), write, p.new_state_stride_slot,
                           p.new_state_stride_h);
    }
    if (tokens.length == 0) {
      // Word by word, so that a state keeps its bits.
      if (new_state == nullptr || new_state == state) return;
      for (uint32_t i = threadIdx.x; i < kRows * kHeadSize; i += kChainThreads) {
        reinterpret_cast<uint32_t*>(new_state)[i] =
            state == nullptr ? 0u : reinterpret_cast<const uint32_t*>(state)[i];
      }
      return;
    }

    const Exchange chain{shared + kExchange};
    const bool is_state_warp = threadIdx.x < kGroupThreads;
    const bool is_last_warp = threadIdx.x / kWarpSize == kChainThreads / kWarpSize - 1;
    const int32_t num_chunks = (tokens.length - 1) / kChunk + 1;
    const int64_t first_number = tokens.start / kChunk + int64_t{seq};
    if (!is_state_warp) {
#pragma unroll
      for (int i = 0; i < kStages - 1; ++i) {
        if (i < num_chunks) copy_inputs(chunk_of(tokens, i), stage(i));
      }
      if constexpr (!kFused) {
        ptx::wait_for_dependency();
#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) {
          if (i < num_chunks) copy_prepared(first_number + i, stage(i));
          ptx::copy_commit();
        }
      } else {
        ptx::copy_commit();
        if (is_last_warp) {
          const Chunk chunk = chunk_of(tokens, 0);
          compute_gates(load_gates(p, head, chunk), A_log, dt_bias, chunk.length, stage(0).gates);
        }
      }
    }
    float S[Exchange::kTiles][4][4] = {};
    if (is_state_warp) {
      if (state != nullptr) {
        each_pair([&](int r, int j, int i, uint32_t offset) {
          if constexpr (kAligned) {
            const float2 pair = *reinterpret_cast<const float2*>(state + offset);
            S[r][j][i] = pair.x;
            S[r][j][i + 1] = pair.y;
          } else {
            S[r][j][i] = state[offset];
            S[r][j][i + 1] = state[offset + 1];
          }
        });
      }
      chain.publish(S, 0);
      if (threadIdx.x < 2 * kRows) chain.first_bad(0)[threadIdx.x] = kChunk;
    } else {
      ptx::copy_wait<kFused ? 0 : kStages - 2>();
    }
    __syncthreads();

    for (int32_t idx = 0; idx < num_chunks; ++idx) {
      const Stage now = stage(idx);
      const int32_t ahead = idx + kStages - 1;
      const Chunk next = chunk_of(tokens, ahead);
      [[maybe_unused]] RawGates raw = {};
      if (!is_state_warp) {
        if (ahead < num_chunks) {
          copy_inputs(next, stage(ahead));
          if constexpr (kFused) {
            if (is_last_warp) raw = load_gates(p, head, next);
          } else {
            copy_prepared(first_number + ahead, stage(ahead));
          }
        }
        ptx::copy_commit();
      }
      if constexpr (kFused) {
        prepare({now.q, now.k, now.gates, reinterpret_cast<float*>(shared + kSystem),
                 reinterpret_cast<float*>(shared + kInverse), now.T, now.P});
        __syncthreads();
      }
      if (is_state_warp) {
        chain.advance(S, now, idx % 2);
      } else {
        const Chunk chunk = chunk_of(tokens, idx);
        chain.template write_output<kAligned>(now, idx % 2, p.scale, output_at(chunk.start),
                                              p.output_stride_t, chunk.length);
        if constexpr (kFused) {
          if (is_last_warp && ahead < num_chunks) {
            compute_gates(raw, A_log, dt_bias, next.length, stage(ahead).gates);
          }
        }
        ptx::copy_wait<kFused ? 0 : kStages - 2>();
      }
      __syncthreads();
    }

    if (is_state_warp && new_state != nullptr) {
      each_pair([&](int r, int j, int i, uint32_t offset) {
        if constexpr (kAligned) {
          *reinterpret_cast<float2*>(new_state + offset) = make_float2(S[r][j][i], S[r][j][i + 1]);
        } else {
          new_state[offset] = S[r][j][i];
          new_state[offset + 1] = S[r][j][i + 1];
        }
      });
    }
  }
};

}  // namespace fastkernels::gdn_prefill
