// One block's way through one sequence: its rows of one head's state, chunk by chunk.
#pragma once

#include <cstdint>
#include <type_traits>

#include "gdn_prefill/chain.cuh"
#include "gdn_prefill/common.cuh"
#include "gdn_prefill/prepare.cuh"

namespace fastkernels::gdn_prefill {

// Of v the block's `kRows` columns from `column` on, as `copy_keys` the keys.
template <int kThreads, int kRows, bool kAligned>
__device__ __forceinline__ void copy_values(unsigned char* tile, const Params& p, uint32_t head,
                                            uint32_t column, Chunk chunk, uint32_t thread) {
  constexpr int kVBytes = Chain<kRows>::kVBytes;
  constexpr int kPieces = kRows / 8, kRound = kThreads / kPieces;  // rows of one round
  const uint32_t row = thread / kPieces, piece = thread % kPieces;
  const uint32_t v = ptx::shared_address(tile) + row * kVBytes + 16 * piece;
  const uint16_t* from = static_cast<const uint16_t*>(p.v) +
                         (int64_t{chunk.start} + row) * p.v_stride_t + head * p.v_stride_h +
                         column + 8 * piece;
#pragma unroll kAligned ? kChunk / kRound : 1
  for (int i = 0; i < kChunk / kRound; ++i) {
    copy_piece<kAligned>(v + i * kRound * kVBytes, tile, from,
                         static_cast<int32_t>(row) + i * kRound < chunk.length);
    from += kRound * p.v_stride_t;
  }
}

// Who makes T, P and the gates of a chunk: every block, for itself; the blocks of a cluster, which
// have all rows of a head, each every kSlabs-th chunk for all of them, by 8 warps of their own, one
// round ahead of the chain; or an earlier kernel. The latter two leave them in the workspace.
enum class Maker { kBlock, kCluster, kKernel };

// Shared memory, and what fills it. `Way`: how the state passes through the chunks. No stages: it
// brings all of them itself.
template <int kRows, int kStages, Maker kMaker, bool kAligned, typename Way = Chain<kRows>>
struct Sequence {
  using Exchange = Way;
  using StateTiles = float[Exchange::kRowTiles][Exchange::kColumnTiles][4];
  static constexpr bool kIsAligned = kAligned;
  static constexpr bool kFused = kMaker == Maker::kBlock, kClustered = kMaker == Maker::kCluster;
  static constexpr int kThreads = Exchange::kThreads + (kClustered ? kPrepareThreads : 0);
  static constexpr int kSlabs = kHeadSize / kRows;
  static constexpr int kPairStages = kFused ? 1 : kStages;
  static constexpr int kVTileBytes = kChunk * Exchange::kVBytes;
  static constexpr int kGatesBytes = kGatesPieces * 16;
  static constexpr int kFloatsBytes = kFused ? kChunk * kPitch * 4 : 0;

  static constexpr int kQ = kStages * kKeysBytes;
  // Of q and P there is nothing where another kernel makes the output.
  static constexpr int kOutputStages = Exchange::kWritesOutput ? kStages : 0;
  static constexpr int kT = kQ + kOutputStages * kKeysBytes;
  static constexpr int kP = kT + kPairStages * kPairsBytes;
  static constexpr int kMade = kP + (kFused ? 1 : kOutputStages) * kPairsBytes;
  static constexpr int kExchange = kMade + (kClustered ? kMakerBytes : 0);
  static_assert(kMade % 1024 == 0, "tiles are swizzled");
  static constexpr int kV = kExchange + Exchange::kSharedBytes;
  static constexpr int kGates = kV + kStages * kVTileBytes;
  static constexpr int kSystem = kGates + kStages * kGatesBytes;
  static constexpr int kInverse = kSystem + kFloatsBytes;
  static constexpr int kScratch = kInverse + kFloatsBytes;
  static constexpr int kSharedBytes = kScratch + 128;

  const Params& p;
  unsigned char* shared;
  uint32_t head, q_head, column;  // `column`: the first of this block's rows of V
  float A_log, dt_bias;           // unless an earlier kernel has made the gates

  __device__ __forceinline__ Stage stage(int32_t chunk) const {
    const int32_t i = chunk % kStages, pair = chunk % kPairStages;
    return {shared + i * kKeysBytes,
            shared + kQ + i * kKeysBytes,
            shared + kV + i * kVTileBytes,
            shared + kT + pair * kPairsBytes,
            shared + kP + pair * kPairsBytes,
            reinterpret_cast<ChunkGates*>(shared + kGates + i * kGatesBytes)};
  }

  // By the threads from `Exchange::kFirstCopyThread` on, as all copies.
  __device__ __forceinline__ void copy_inputs(Chunk chunk, const Stage& to) const {
    const uint32_t thread = threadIdx.x - Exchange::kFirstCopyThread;
    copy_keys<kGroupThreads, kAligned>(to.k, p.k, p.k_stride_t, q_head * p.k_stride_h, chunk,
                                       thread);
    copy_keys<kGroupThreads, kAligned>(to.q, p.q, p.q_stride_t, q_head * p.q_stride_h, chunk,
                                       thread);
    copy_values<kGroupThreads>(chunk, to, thread);
  }

  // By `kCopyThreads` threads, this is number `thread`.
  template <int kCopyThreads>
  __device__ __forceinline__ void copy_values(Chunk chunk, const Stage& to, uint32_t thread) const {
    gdn_prefill::copy_values<kCopyThreads, kRows, kAligned>(to.v, p, head, column, chunk, thread);
  }

  // What the earlier kernel left: tiles as they will lie.
  __device__ __forceinline__ void copy_prepared(int64_t number, const Stage& to) const {
    const uint32_t thread = threadIdx.x - Exchange::kFirstCopyThread;
    const unsigned char* from = find_prepared(p, number, head);
    const uint32_t T = ptx::shared_address(to.T) + 16 * thread;
    const uint32_t P = ptx::shared_address(to.P) + 16 * thread;
#pragma unroll
    for (int i = 0; i < kPairsBytes / 16 / kGroupThreads; ++i) {
      const uint32_t at = 16 * kGroupThreads * i;
      ptx::copy_async(T + at, from + at + 16 * thread, 16);
      ptx::copy_async(P + at, from + kPairsBytes + at + 16 * thread, 16);
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
#pragma unroll 1  // hardly ever any: not in the way of the code that runs
    for (int64_t i = threadIdx.x; i < pieces; i += kThreads) {
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
    const uint32_t first = Exchange::first_element(), lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int r = 0; r < Exchange::kRowTiles; ++r) {
#pragma unroll
      for (int j = 0; j < Exchange::kColumnTiles; ++j) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          const uint32_t row = 16 * r + 8 * upper + lane / 4;
          visit(r, j, 2 * upper, row * kHeadSize + first + 8 * j + lane % 4 * 2);
        }
      }
    }
  }

  static __device__ __forceinline__ void load_state(StateTiles& S, const float* state) {
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

  static __device__ __forceinline__ void store_state(const StateTiles& S, float* new_state) {
    each_pair([&](int r, int j, int i, uint32_t offset) {
      if constexpr (kAligned) {
        *reinterpret_cast<float2*>(new_state + offset) = make_float2(S[r][j][i], S[r][j][i + 1]);
      } else {
        new_state[offset] = S[r][j][i];
        new_state[offset + 1] = S[r][j][i + 1];
      }
    });
  }

  // By all threads, word by word, so that a state keeps its bits. Null is zeros.
  static __device__ __forceinline__ void copy_state(float* new_state, const float* state) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < kRows * kHeadSize; i += kThreads) {
      reinterpret_cast<uint32_t*>(new_state)[i] =
          state == nullptr ? 0u : reinterpret_cast<const uint32_t*>(state)[i];
    }
  }

  // What a thread wants first of a sequence, but for what was left in the workspace, is on its way.
  __device__ __forceinline__ RawGates load_first(Tokens tokens) const {
    if (kClustered && threadIdx.x >= kChainThreads) {
      const int32_t idx = column / kRows;
      if (idx * kChunk >= tokens.length) return {};
      return load_chunk<kAligned>(p, head, q_head, chunk_of(tokens, idx), shared + kMade);
    }
    RawGates raw = {};
    if constexpr (Exchange::kWritesOutput) {
      if (threadIdx.x < Exchange::kFirstCopyThread) return raw;
      if (kFused && is_last_warp()) raw = load_gates(p, head, chunk_of(tokens, 0));
#pragma unroll
      for (int i = 0; i < kStages - 1; ++i) {
        if (i * kChunk < tokens.length) copy_inputs(chunk_of(tokens, i), stage(i));
      }
    }
    return raw;
  }

  // Takes the state through `tokens`, of which there are some, and writes their output. Their
  // `num_chunks` chunks have the numbers from `first_number` on; what `load_first` loads is on its
  // way. `done`: chunks that this block has taken a state through before.
  __device__ __forceinline__ void advance(StateTiles& S, const Tokens& tokens, int32_t num_chunks,
                                          int64_t first_number, RawGates& raw,
                                          int32_t done = 0) const {
    const bool is_state_warp = threadIdx.x < kGroupThreads;
    const Exchange chain{shared + kExchange};
    if (!is_state_warp) {
      if constexpr (!kFused) {
        static_assert(kStages - 1 <= kSlabs || !kClustered, "all of the first round");
        if constexpr (kClustered) enter_round(0, num_chunks);
        if constexpr (kMaker == Maker::kKernel) ptx::wait_for_dependency();
#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) {
          if (i < num_chunks) copy_prepared(first_number + i, stage(i));
          ptx::copy_commit();
        }
      } else {
        ptx::copy_commit();
        if (is_last_warp()) {
          compute_gates(raw, A_log, dt_bias, min(tokens.length, kChunk), stage(0).gates);
        }
      }
    }
    if (is_state_warp) {
      chain.publish(S, done % 2);
      if (threadIdx.x < 2 * kRows) chain.first_bad(0)[threadIdx.x] = kChunk;
      if (threadIdx.x == 0 && done == 0) chain.init();
      if constexpr (kClustered) enter_round(0, num_chunks);
    } else {
      ptx::copy_wait<kFused ? 0 : kStages - 2>();
    }
    ptx::barrier_sync(kChainBarrier, kChainThreads);

    for (int32_t idx = 0; idx < num_chunks; ++idx) {
      const Stage now = stage(idx);
      const int32_t ahead = idx + kStages - 1;
      const Chunk next = chunk_of(tokens, ahead);
      if constexpr (kClustered) {
        if (ahead < num_chunks && ahead % kSlabs == 0) enter_round(ahead, num_chunks);
      }
      if (!is_state_warp) {
        if (ahead < num_chunks) {
          copy_inputs(next, stage(ahead));
          if constexpr (kFused) {
            if (is_last_warp()) raw = load_gates(p, head, next);
          } else {
            copy_prepared(first_number + ahead, stage(ahead));
          }
        }
        ptx::copy_commit();
      }
      if constexpr (kFused) {
        prepare({now.q, now.k, now.gates, reinterpret_cast<float*>(shared + kSystem),
                 reinterpret_cast<float*>(shared + kInverse), now.T, now.P});
        ptx::barrier_sync(kChainBarrier, kChainThreads);
      }
      if (is_state_warp) {
        chain.advance(S, now, (done + idx) % 2);
      } else {
        if constexpr (kFused) {
          // Here, where an output warp has time: it will wait for U.
          if (is_last_warp() && ahead < num_chunks) {
            compute_gates(raw, A_log, dt_bias, next.length, stage(ahead).gates);
          }
        }
        const Chunk chunk = chunk_of(tokens, idx);
        chain.template write_output<kAligned>(now, (done + idx) % 2, p.scale,
                                              output_at(chunk.start), p.output_stride_t,
                                              chunk.length);
        ptx::copy_wait<kFused ? 0 : kStages - 2>();
      }
      ptx::barrier_sync(kChainBarrier, kChainThreads);
    }
  }

  // The whole kernel.
  static __device__ __forceinline__ void enter(const Params& p) {
    enter(p, load_only(p), blockIdx.x);
  }

  // Some rows through the sequence at a position, `find_part` has both.
  static __device__ __forceinline__ void enter(const Params& p, const Own& only, uint32_t idx) {
    constexpr bool kMakesGates = kMaker != Maker::kKernel;
    const Part part = find_part<kSlabs>(p, idx);
    Sequence block{p,
                   ptx::dynamic_shared(),
                   part.head,
                   part.q_head,
                   part.slab * kRows,
                   kMakesGates ? load_head_value(p.A_log, part.head) : 0.0f,
                   kMakesGates ? load_head_value(p.dt_bias, part.head) : 0.0f};
    block.run(only, part.position);
  }

 private:
  // The sequence at `position`; position 0 where there is none.
  __device__ __forceinline__ void run(const Own& only, int32_t position) {
    if (p.num_seqs > 0) {
      run_sequence(only, position);
    } else {
      clear_output(0, p.num_tokens);
    }
    // On every path: a block that ends must not let the next kernel overtake the earlier one.
    if constexpr (kMaker == Maker::kKernel) ptx::wait_for_dependency();
  }

  // The one that makes gates, where the block does.
  static __device__ __forceinline__ bool is_last_warp() {
    return threadIdx.x / kWarpSize == kChainThreads / kWarpSize - 1;
  }

  // Of the chain's warps, which have nothing to show to other blocks: the first chunk of a round is
  // wanted. Every thread of a cluster takes part in a round's barrier.
  __device__ __forceinline__ void enter_round(int32_t idx, int32_t num_chunks) const {
    ptx::cluster_wait();
    if (idx + kSlabs < num_chunks) ptx::cluster_arrive_relaxed();
  }

  // Of the other warps: this block's chunks, the first of which is on its way.
  __device__ __forceinline__ void make_chunks(Tokens tokens, int64_t first_number,
                                              int32_t num_chunks, RawGates raw) const {
    for (int32_t first = 0; first < num_chunks; first += kSlabs) {
      const int32_t idx = first + static_cast<int32_t>(column / kRows);
      if (idx < num_chunks) {
        const Chunk chunk = chunk_of(tokens, idx);
        if (first > 0) raw = load_chunk<kAligned>(p, head, q_head, chunk, shared + kMade);
        make_chunk(p, head, A_log, dt_bias, first_number + idx, chunk.length, raw, shared + kMade);
      }
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
  }

  __device__ __forceinline__ void run_sequence(const Own& only, int32_t position) {
    const bool is_only = p.num_seqs == 1;
    const Tokens guess = {0, is_only ? p.num_tokens : 0};
    [[maybe_unused]] RawGates raw = load_first(guess);
    Located at = {0, {0, 0}};
    if (!is_only) {
      // What the chunks will exchange is not there yet.
      at = locate<kThreads>(p, position, reinterpret_cast<int32_t*>(shared + kScratch),
                            reinterpret_cast<int32_t*>(shared + kExchange));
    }
    const int32_t seq = at.seq;
    const SlotIndex read = load_slot(p.read_indices, p.index_words, p.read_stride, seq);
    const SlotIndex write = load_slot(p.write_indices, p.index_words, p.write_stride, seq);
    const bool is_padding = !is_slot(read, p.index_words, p.num_slots);
    const bool is_state_warp = threadIdx.x < Exchange::kStateThreads;
    const float* state = nullptr;
    if (p.has_state && !is_padding) {
      state =
          state_at(static_cast<const float*>(p.state), read, p.state_stride_slot, p.state_stride_h);
    }
    StateTiles S = {};
    if (is_state_warp && state != nullptr) load_state(S, state);
    const Tokens tokens = is_only ? tokens_of(p, only) : at.tokens;
    const int64_t end = int64_t{tokens.start} + tokens.length;
    // Tokens of no sequence stand before the first and after the last.
    if (seq == 0) clear_output(0, tokens.start);
    if (seq + 1 >= p.num_seqs) clear_output(end, p.num_tokens);
    if (is_padding) clear_output(tokens.start, end);
    const bool is_idle = is_padding || tokens.length == 0;
    if (is_idle || !(tokens == guess)) finish_copies();
    if (is_padding) return;
    float* new_state = nullptr;
    if (is_slot(write, p.index_words, p.num_slots)) {
      new_state = state_at(static_cast<float*>(p.new_state), write, p.new_state_stride_slot,
                           p.new_state_stride_h);
    }
    if (tokens.length == 0) {
      if (new_state != nullptr && new_state != state) copy_state(new_state, state);
      return;
    }
    if (!(tokens == guess)) raw = load_first(tokens);

    const int32_t num_chunks = (tokens.length - 1) / kChunk + 1;
    const int64_t first_number = tokens.start / kChunk + int64_t{seq};
    if constexpr (kClustered) {
      if (threadIdx.x >= kChainThreads) {
        make_chunks(tokens, first_number, num_chunks, raw);
        return;
      }
      ptx::cluster_arrive_relaxed();
    }
    if constexpr (std::is_same_v<Exchange, Chain<kRows>>) {
      advance(S, tokens, num_chunks, first_number, raw);
    } else {
      Exchange{shared + kExchange}.advance(*this, S, tokens, num_chunks, first_number);
    }
    if (is_state_warp && new_state != nullptr) store_state(S, new_state);
  }
};

}  // namespace fastkernels::gdn_prefill
