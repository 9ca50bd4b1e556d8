// Two kinds of work in one launch, of which one waits for what the other leaves in the workspace:
// entries of chunks (wy.cuh), and a state's way through a sequence, with its output (`WyChain`).
// `Pipeline` hands them out.
//
// Nothing waits for work that has not been handed out: an entry waits for nothing, and a chain for
// entries, which the first block to come makes until there are none left. So it ends whatever
// number of blocks is resident, and whatever else runs on the device.
#pragma once

#include <cstdint>

#include "gdn_prefill/chain.cuh"
#include "gdn_prefill/common.cuh"
#include "gdn_prefill/ptx.cuh"
#include "gdn_prefill/sequence.cuh"
#include "gdn_prefill/wy.cuh"

namespace fastkernels::gdn_prefill {

constexpr int kPipelineThreads = 256;

// ---- the chain ----------------------------------------------------------------------------------

// Warps 0 to 3 take the state through the chunks: warp w has tokens from 16 w on of U, and columns
// from 32 w on of the state. Warps 4 to 7 make the output, 16 tokens each, a chunk behind at most,
// and bring what both want. Of an entry
//
//     keys, values    go to registers of state warps, as soon as those of the chunk before are
//                     read; queries in the same way to registers of output warps
//     columns, pairs  and gates go through shared memory, `kStages` chunks of them. Not to
//                     registers, too: the compiler waits for all loads that are on their way at
//                     once, the newest of which had set out 200 cycles ago.
//
// Warp 4 looks for entries, how many are there stands in shared memory; warp 5 fetches entries into
// L2 again, which may have left it since they were made, each of a head's blocks a part of them: a
// product is not ahead enough of DRAM.
//
// Barriers: 5 (all warps) twice; 1 (state warps) twice a chunk. mbarriers of each stage: its inputs
// are there (output threads, by their copies), have been read (all threads); of two chunks in turn:
// the state of its start is there, U is there (state threads), both have been read (output
// threads).
template <int kRows>
struct WyChain : Chain<kRows, false> {
  using States = Chain<kRows, false>;
  using States::kKeySteps, States::kTiles;
  static constexpr bool kWritesOutput = false;  // not as `Sequence` would have it
  static constexpr int kSteps = kChunk / 16;
  static constexpr int kThreads = kPipelineThreads, kFirstCopyThread = kThreads;
  static constexpr int kStateThreads = kGroupThreads, kStateWarps = kStateThreads / kWarpSize;
  // Registers of a thread that the kernel starts with, and of one of a state warp.
  static constexpr int kAtStart = 128, kMore = kRows == 16 ? 136 : 144;
  static constexpr int kFetchAhead = 6;  // chunks

  // Shared memory: the state and U twice, for output warps; U once more, scaled.
  static constexpr int kUpdates = 2 * States::kStateBytes;
  static constexpr int kScaled = kUpdates + 2 * States::kTokensBytes;
  static constexpr int kStaging = kScaled + States::kTokensBytes;
  static constexpr int kBarriers = kStaging + kChunk * States::kVBytes;
  static constexpr int kStages = 3;
  static constexpr int kMade = kBarriers + 8 * (2 * kStages + 6);  // entries that are there
  static constexpr int kInputs = (kMade + 4 + 127) / 128 * 128;
  static constexpr int kColumnsBytes = kWyPairs - kWyColumns;
  static constexpr int kPairs = kColumnsBytes, kGates = kPairs + (kWyGates - kWyPairs);
  static constexpr int kInputsBytes = kGates + kGatesPieces * 16;
  static constexpr int kSharedBytes = kInputs + kStages * kInputsBytes;

  // Takes the state through `tokens`, as `Sequence::advance` does; every thread of the block.
  template <typename Block>
  __device__ __forceinline__ void advance(const Block& block, float (&S)[kTiles][4][4],
                                          const Tokens& tokens, int32_t num_chunks,
                                          int64_t first_number) const {
    if (threadIdx.x == 0) {
      ptx::store_release(made(), 0);
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        ptx::mbarrier_init(there(i), kThreads - kStateThreads);
        ptx::mbarrier_init(read(i), kThreads);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::mbarrier_init(state_there(i), kStateThreads);
        ptx::mbarrier_init(update_there(i), kStateThreads);
        ptx::mbarrier_init(output_made(i), kThreads - kStateThreads);
      }
    }
    ptx::barrier_sync(kChainBarrier, kThreads);
    unsigned char* entry = find_wy(block.p, first_number, block.head);
    const int64_t step = int64_t{block.p.num_v_heads} * kWyBytes;
    const uint32_t slab = block.column / 16;
    if (threadIdx.x < kStateThreads) {
      ptx::raise_registers<kMore>();
      carry(S, entry, step, slab, num_chunks);
      ptx::lower_registers<kAtStart>();
      ptx::barrier_sync(kChainBarrier, kThreads);
      if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < 2 * kStages + 6; ++i) ptx::mbarrier_invalidate(there(0) + 8 * i);
      }
      return;
    }
    ptx::lower_registers<2 * kAtStart - kMore>();
    write(block, tokens, entry, step, slab, num_chunks);
    // Nobody has kept them over that, which has few registers.
#pragma unroll
    for (int i = 0; i < 16 * kTiles; ++i) S[i / 16][i / 4 % 4][i % 4] = 0.0f;
    // Not before the state warps have given back theirs, for which they waited above.
    ptx::barrier_sync(kChainBarrier, kThreads);
    ptx::raise_registers<kAtStart>();
  }

 private:
  __device__ __forceinline__ uint32_t shared() const { return ptx::shared_address(this->base); }
  __device__ __forceinline__ uint32_t made() const { return shared() + kMade; }
  __device__ __forceinline__ uint32_t there(int32_t idx) const {
    return shared() + kBarriers + 8 * (idx % kStages);
  }
  __device__ __forceinline__ uint32_t read(int32_t idx) const { return there(idx) + 8 * kStages; }
  __device__ __forceinline__ uint32_t state_there(int32_t idx) const {
    return shared() + kBarriers + 8 * (2 * kStages + idx % 2);
  }
  __device__ __forceinline__ uint32_t update_there(int32_t idx) const {
    return state_there(idx) + 16;
  }
  __device__ __forceinline__ uint32_t output_made(int32_t idx) const {
    return state_there(idx) + 32;
  }
  __device__ __forceinline__ uint32_t inputs(int32_t idx) const {
    return shared() + kInputs + idx % kStages * kInputsBytes;
  }
  __device__ __forceinline__ const ChunkGates& gates(int32_t idx) const {
    return *reinterpret_cast<const ChunkGates*>(this->base + kInputs +
                                                idx % kStages * kInputsBytes + kGates);
  }

  static __device__ __forceinline__ uint4 load(const unsigned char* from) {
    return ptx::load_l2(reinterpret_cast<const uint4*>(from));
  }

  static __device__ __forceinline__ void spread(uint32_t (&a)[4], uint4 words) {
    a[0] = words.x;
    a[1] = words.y;
    a[2] = words.z;
    a[3] = words.w;
  }

  // sum[r][h] += the state of 16 rows times the columns of `right`; in two parts, since each
  // product waits for the one that it adds to. `state`: a lane's part of the first fragment;
  // `kAtOnce` of them are loaded at once.
  template <int kAtOnce>
  static __device__ __forceinline__ void multiply(float (&sum)[2][4], uint32_t state,
                                                  const uint4 (&right)[kKeySteps]) {
    float other[2][4] = {};
#pragma unroll
    for (int first = 0; first < kKeySteps; first += kAtOnce) {
      uint4 a[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        a[i] = ptx::load_shared(state + (first + i) * kFragmentBytes);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint4& b = right[first + i];
        uint32_t words[4];
        spread(words, a[i]);
        float (&part)[2][4] = i % 2 == 0 ? sum : other;
        ptx::mma_bf16(part[0], words, b.x, b.y);
        ptx::mma_bf16(part[1], words, b.z, b.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] += other[i / 4][i % 4];
  }

  // ---- state warps ------------------------------------------------------------------------------

  // What a state warp reads of an entry for its tokens.
  struct ForTokens {
    uint4 keys[kKeySteps], values[kTiles];
  };

  // `entry`: from 16 times the lane on.
  static __device__ __forceinline__ void load(ForTokens& x, const unsigned char* entry,
                                              uint32_t slab, uint32_t warp) {
    const unsigned char* keys = entry + kWyKeys + kKeySteps * warp * kFragmentBytes;
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) x.keys[i] = load(keys + i * kFragmentBytes);
    const unsigned char* values = entry + kWyValues + (kSteps * slab + warp) * kFragmentBytes;
#pragma unroll
    for (int r = 0; r < kTiles; ++r) x.values[r] = load(values + kSteps * r * kFragmentBytes);
  }

  // The state of the start of chunk `idx`, for all warps. `at`: a lane's part of fragment 0 of
  // either.
  static __device__ __forceinline__ void publish(const float (&S)[kTiles][4][4], uint32_t at,
                                                 uint32_t warp, int32_t idx) {
    at += idx % 2 * States::kStateBytes + 2 * warp * kFragmentBytes;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int r = i / 2, j = i % 2;
      ptx::store_shared(at + (8 * r + j) * kFragmentBytes,
                        States::pack(S[r][2 * j], S[r][2 * j + 1]));
    }
  }

  __device__ __forceinline__ void carry(float (&S)[kTiles][4][4], unsigned char* entry,
                                        int64_t step, uint32_t slab, int32_t num_chunks) const {
    const uint32_t warp = ptx::made_here(threadIdx.x / kWarpSize);
    const uint32_t lane = ptx::made_here(threadIdx.x % kWarpSize);
    const uint32_t at = ptx::made_here(shared() + 16 * lane), from = ptx::made_here(made());
    entry += 16 * lane;
    ForTokens tokens;
    publish(S, at, warp, 0);
    ptx::mbarrier_arrive_expect(state_there(0), 0);
    int32_t num_made = ptx::wait_shared_at_least(from, 1);
    load(tokens, entry, slab, warp);
    ptx::barrier_sync(kStateBarrier, kStateThreads);
#pragma unroll 1
    for (int32_t idx = 0; idx < num_chunks; ++idx) {
      ptx::mbarrier_wait(there(idx), idx / kStages % 2);
      const ChunkGates& x = gates(idx);
      // A token whose beta or system is not finite need be no NaN of U.
      const float decay = x.first_bad < kChunk ? NAN : x.all;
      float2 rest[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rest[h] = *reinterpret_cast<const float2*>(x.to_end + 16 * warp + 8 * h + lane % 4 * 2);
      }
      float U[kTiles][2][4];
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        uint32_t values[4];
        spread(values, tokens.values[r]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          U[r][i / 2][i % 2 * 2] = low_half(values[i]);
          U[r][i / 2][i % 2 * 2 + 1] = high_half(values[i]);
        }
        multiply<kKeySteps>(U[r], at + idx % 2 * States::kStateBytes + 8 * r * kFragmentBytes,
                            tokens.keys);
#pragma unroll
        for (int i = 0; i < 16; ++i) S[r][i / 4][i % 4] *= decay;  // while products are under way
      }
      entry += step;
      if (idx + 1 < num_chunks) {
        if (num_made < idx + 2) num_made = ptx::wait_shared_at_least(from, idx + 2);
        load(tokens, entry, slab, warp);
      }
      const uint32_t own = at + warp * kFragmentBytes;
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        float scaled[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 pair = rest[i / 4];
          scaled[i / 4][i % 4] = (i % 2 == 0 ? pair.x : pair.y) * U[r][i / 4][i % 4];
        }
        ptx::store_shared(own + kScaled + 4 * r * kFragmentBytes,
                          States::pack(scaled[0], scaled[1]));
      }
      uint4 columns[2][kSteps];
      const uint32_t first = inputs(idx) + 16 * lane + 2 * kSteps * warp * kFragmentBytes;
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        columns[i / kSteps][i % kSteps] = ptx::load_shared(first + i * kFragmentBytes);
      }
      ptx::barrier_sync(kStateBarrier, kStateThreads);

      uint4 update[kTiles][kSteps];
#pragma unroll
      for (int i = 0; i < kTiles * kSteps; ++i) {
        update[i / kSteps][i % kSteps] = ptx::load_shared(at + kScaled + i * kFragmentBytes);
      }
      ptx::mbarrier_arrive_expect(read(idx), 0);
      // For the output, which has done with what lies here two chunks before.
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        ptx::store_shared(own + kUpdates + idx % 2 * States::kTokensBytes + 4 * r * kFragmentBytes,
                          States::pack(U[r][0], U[r][1]));
      }
      ptx::mbarrier_arrive_expect(update_there(idx), 0);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int r = 0; r < kTiles; ++r) {
          uint32_t words[4];
          spread(words, update[r][s]);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint4 b = columns[j][s];
            ptx::mma_bf16(S[r][2 * j], words, b.x, b.y);
            ptx::mma_bf16(S[r][2 * j + 1], words, b.z, b.w);
          }
        }
      }
      if (idx > 0) ptx::mbarrier_wait(output_made(idx - 1), (idx - 1) / 2 % 2);
      publish(S, at, warp, idx + 1);
      if (idx + 1 < num_chunks) ptx::mbarrier_arrive_expect(state_there(idx + 1), 0);
      ptx::barrier_sync(kStateBarrier, kStateThreads);
    }
  }

  // ---- output warps -----------------------------------------------------------------------------

  // Until so many entries are there, and in shared memory how many are: by warp 4, a lane an entry,
  // once there is one. A look takes as long as the chain for a chunk.
  __device__ __forceinline__ void look(unsigned char* entry, int64_t step, int32_t num_made,
                                       int32_t least, int32_t num_chunks) const {
    const uint32_t lane = threadIdx.x % kWarpSize;
    while (num_made < least) {
      if (lane == 0) ptx::wait_at_least(is_made(entry + num_made * step), 1);
      __syncwarp();
      const int32_t idx = num_made + static_cast<int32_t>(lane);
      const bool is_there = idx < num_chunks && ptx::load_acquire(is_made(entry + idx * step)) != 0;
      const int32_t more = __ffs(~__ballot_sync(0xffffffffu, is_there)) - 1;
      num_made += more < 0 ? kWarpSize : more;
    }
    if (lane == 0) ptx::store_release(made(), num_made);
  }

  // Columns, pairs and gates, which lie side by side in either place.
  __device__ __forceinline__ void copy(const unsigned char* entry, int32_t idx) const {
    const uint32_t thread = threadIdx.x - kStateThreads, to = inputs(idx);
    static_assert(kInputsBytes == kWyGates + kGatesPieces * 16 - kWyColumns, "side by side");
#pragma unroll
    for (int i = 0; i <= kInputsBytes / 16 / (kThreads - kStateThreads); ++i) {
      const uint32_t offset = 16 * ((kThreads - kStateThreads) * i + thread);
      if (offset < kInputsBytes) ptx::copy_async(to + offset, entry + kWyColumns + offset, 16);
    }
    ptx::copy_arrive(there(idx));
  }

  // By a warp: this block's part of what all blocks of the head read, and its values.
  static __device__ __forceinline__ void fetch(const unsigned char* entry, uint32_t slab) {
    constexpr int kLine = 128, kLines = kWyValues / kLine, kSlabs = kHeadSize / kRows;
    const uint32_t lane = threadIdx.x % kWarpSize, part = slab / kTiles;
#pragma unroll
    for (int i = 0; i < (kLines / kSlabs + kWarpSize) / kWarpSize; ++i) {
      const uint32_t line = kSlabs * (kWarpSize * i + lane) + part;
      if (line < kLines) ptx::prefetch_l2(entry + line * kLine);
    }
    if (lane < 16 * kTiles) {
      ptx::prefetch_l2(entry + kWyValues + slab * kSteps * kFragmentBytes + lane * kLine);
    }
  }

  static __device__ __forceinline__ void load_queries(uint4 (&x)[kKeySteps],
                                                      const unsigned char* entry, uint32_t warp) {
    const unsigned char* from = entry + kWyQueries + kKeySteps * warp * kFragmentBytes;
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) x[i] = load(from + i * kFragmentBytes);
  }

  template <typename Block>
  __device__ __forceinline__ void write(const Block& block, const Tokens& tokens,
                                        unsigned char* first, int64_t step, uint32_t slab,
                                        int32_t num_chunks) const {
    constexpr int kAhead = kStages - 1;
    const uint32_t warp = ptx::made_here(threadIdx.x / kWarpSize - kStateWarps);
    const uint32_t lane = ptx::made_here(threadIdx.x % kWarpSize);
    const uint32_t at = ptx::made_here(shared() + 16 * lane);
    int32_t num_made = 0;
    const auto wait_for_entry = [&](int32_t idx) {
      if (num_made > idx) return;
      if (warp == 0) look(first, step, num_made, idx + 1, num_chunks);
      num_made = ptx::wait_shared_at_least(made(), idx + 1);
    };
    for (int32_t idx = 0; idx < min(kAhead, num_chunks); ++idx) {
      wait_for_entry(idx);
      copy(first + idx * step, idx);
    }
    const unsigned char* entry = first + 16 * lane;
    uint4 queries[kKeySteps];
    load_queries(queries, entry, warp);
#pragma unroll 1
    for (int32_t idx = 0; idx < num_chunks; ++idx) {
      const int32_t ahead = idx + kAhead, far = idx + kFetchAhead;
      if (ahead < num_chunks) {
        wait_for_entry(ahead);
        if (idx > 0) ptx::mbarrier_wait(read(ahead), (ahead / kStages - 1) % 2);
        copy(first + ahead * step, ahead);
      }
      if (warp == 1 && far < num_chunks) fetch(first + far * step, slab);
      entry += step;
      output(block, block.chunk_of(tokens, idx), idx, warp, lane, at, queries,
             idx + 1 < num_chunks ? entry : nullptr);
    }
    ptx::copy_commit();
    ptx::copy_wait<0>();
  }

  // The output of chunk `idx`; `queries` become those of the entry `next`, if there is one.
  template <typename Block>
  __device__ __forceinline__ void output(const Block& block, Chunk chunk, int32_t idx,
                                         uint32_t warp, uint32_t lane, uint32_t at,
                                         uint4 (&queries)[kKeySteps],
                                         const unsigned char* next) const {
    ptx::mbarrier_wait(there(idx), idx / kStages % 2);
    const ChunkGates& x = gates(idx);
    const int32_t first_token = 16 * warp + lane % 4 * 2;  // and 8 tokens on
    float2 decays[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      decays[h] = *reinterpret_cast<const float2*>(x.from_start + first_token + 8 * h);
    }
    const int32_t bad_chunk = x.first_bad;
    ptx::mbarrier_wait(state_there(idx), idx / 2 % 2);
    float sum[kTiles][2][4] = {};
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      multiply<2>(sum[r], at + idx % 2 * States::kStateBytes + 8 * r * kFragmentBytes, queries);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 pair = decays[i / 4];
        sum[r][i / 4][i % 4] *= i % 2 == 0 ? pair.x : pair.y;
      }
    }
    if (next != nullptr) load_queries(queries, next, warp);
    const uint32_t pairs = inputs(idx) + kPairs + 16 * lane + kSteps * warp * kFragmentBytes;
    ptx::mbarrier_wait(update_there(idx), idx / 2 % 2);
    int32_t bad[kTiles][2];  // of rows g and g + 8
    const uint32_t updates = at + kUpdates + idx % 2 * States::kTokensBytes;
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      bad[r][0] = bad[r][1] = bad_chunk;
      uint32_t a[kSteps][4], is_dirty = 0;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (s > static_cast<int>(warp)) continue;  // later tokens
        spread(a[s], ptx::load_shared(updates + (4 * r + s) * kFragmentBytes));
#pragma unroll
        for (int i = 0; i < 4; ++i) is_dirty |= carries(a[s][i]);
      }
      if (__ballot_sync(0xffffffffu, is_dirty != 0) != 0) take_out(a, bad[r], warp);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (s > static_cast<int>(warp)) continue;
        const uint4 b = ptx::load_shared(pairs + s * kFragmentBytes);
        ptx::mma_bf16(sum[r][0], a[s], b.x, b.y);
        ptx::mma_bf16(sum[r][1], a[s], b.z, b.w);
      }
    }
    ptx::mbarrier_arrive_expect(output_made(idx), 0);
    ptx::mbarrier_arrive_expect(read(idx), 0);

    unsigned char* staging = this->base + kStaging;
    const uint32_t row = 16 * warp + lane % 8 + lane / 16 * 8;
    const uint32_t to = ptx::shared_address(staging) + row * States::kVBytes + lane / 8 % 2 * 16;
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i / 2, upper = i % 2;
        float value[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const bool is_bad = first_token + 8 * h + j >= bad[r][upper];
          value[j] = is_bad ? NAN : block.p.scale * sum[r][h][2 * upper + j];
        }
        words[i] = ptx::to_bf16x2(value[0], value[1]);
      }
      ptx::store_matrices_transposed(to + 32 * r, words);
    }
    __syncwarp();
    constexpr int kPieces = kRows / 8;
    uint16_t* tokens = block.output_at(chunk.start);
#pragma unroll
    for (int i = 0; i < 16 * kPieces / kWarpSize; ++i) {
      const uint32_t piece = kWarpSize * i + lane, token = 16 * warp + piece / kPieces;
      if (static_cast<int32_t>(token) < chunk.length) {
        const uint4 words = *reinterpret_cast<const uint4*>(staging + token * States::kVBytes +
                                                            16 * (piece % kPieces));
        store_piece<Block::kIsAligned>(
            tokens + token * block.p.output_stride_t + 8 * (piece % kPieces), words);
      }
    }
    __syncwarp();
  }

  // Takes out of U what is not finite, which would reach earlier tokens through 0 * NaN. `bad`, of
  // rows g and g + 8, becomes the first such token where that is before.
  static __device__ __forceinline__ void take_out(uint32_t (&update)[kSteps][4], int32_t (&bad)[2],
                                                  uint32_t warp) {
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) {
      if (i / 4 > static_cast<int>(warp)) continue;
      uint32_t& word = update[i / 4][i % 4];
      const uint32_t is_bad = carries(word);
      const int32_t t = 16 * (i / 4) + i % 4 / 2 * 8 + threadIdx.x % 4 * 2;
      if (is_bad != 0) bad[i % 2] = min(bad[i % 2], (is_bad & 0x8000u) != 0 ? t : t + 1);
      word = keep_finite(word);
    }
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      bad[upper] = min(bad[upper], __shfl_xor_sync(0xffffffffu, bad[upper], 1));
      bad[upper] = min(bad[upper], __shfl_xor_sync(0xffffffffu, bad[upper], 2));
    }
  }
};

// ---- who does what ------------------------------------------------------------------------------

// Chunks in the order in which the chains want them: the first one of every sequence, longest
// sequences first, then every second one and so on, as long as a block has a thread for each
// sequence; beyond, by their numbers. Heads fastest.
struct Order {
  static constexpr int kBytes = 3 * kPipelineThreads * static_cast<int>(sizeof(int32_t));

  const Params& p;
  const Own& only;
  int32_t* ranked;         // seq, start and length of each sequence by its rank, in shared memory
  int32_t* scratch;        // 11 words of shared memory
  int32_t num_chunks = 0;  // of sequence threadIdx.x

  __device__ __forceinline__ bool is_ranked() const {
    return p.num_seqs > 1 && p.num_seqs <= kPipelineThreads;
  }

  // `lengths`: a word a thread, 16-byte aligned, free again afterwards.
  __device__ __forceinline__ void rank(int32_t* lengths) {
    if (!is_ranked()) return;
    const auto seq = static_cast<int32_t>(threadIdx.x);
    int32_t before = 0;
    const Tokens tokens = find_tile<kPipelineThreads>(p, 0, &before, scratch);
    lengths[seq] = tokens.length;
    __syncthreads();
    if (seq < p.num_seqs) {
      int32_t rank = 0;
      for (int32_t other = 0; other < p.num_seqs; ++other) {
        const int32_t length = lengths[other];
        rank += length > tokens.length || (length == tokens.length && other < seq);
      }
      ranked[3 * rank] = seq;
      ranked[3 * rank + 1] = tokens.start;
      ranked[3 * rank + 2] = tokens.length;
      num_chunks = (tokens.length + kChunk - 1) / kChunk;
    }
    __syncthreads();
  }

  // How far a block is in it: numbers only rise.
  struct At {
    int32_t round = 0, first = 0;  // chunks of earlier rounds
  };

  // The chunk at place `idx`, and its number; a length of 0 where there is none, or with `is_end`
  // none behind it either. By all threads together.
  __device__ __forceinline__ Chunk find(int32_t idx, At* at, int32_t* number, bool* is_end) const {
    *is_end = false;
    *number = idx;
    if (p.num_seqs == 1) {
      const Chunk chunk = chunk_at(tokens_of(p, only), 0, idx);
      // A start that is no multiple of a chunk gives numbers from there on.
      *is_end = chunk.length == 0 && int64_t{idx} * kChunk >= p.num_tokens;
      return chunk;
    }
    if (!is_ranked()) {
      *is_end = idx >= num_numbers(p);
      return *is_end ? Chunk{0, 0} : find_chunk<kPipelineThreads>(p, idx, scratch);
    }
    while (true) {
      const int32_t count = __syncthreads_count(num_chunks > at->round);
      if (count == 0) {
        *is_end = true;
        return {0, 0};
      }
      if (idx - at->first < count) break;
      at->first += count;
      ++at->round;
    }
    const int32_t* found = ranked + 3 * (idx - at->first);
    const int32_t skipped = at->round * kChunk;
    *number = found[1] / kChunk + found[0] + at->round;
    return {found[1] + skipped, min(found[2] - skipped, kChunk), found[0]};
  }
};

template <int kRows, bool kAligned>
struct Pipeline {
  using Rows = Sequence<kRows, 0, Maker::kKernel, kAligned, WyChain<kRows>>;
  static constexpr int kThreads = kPipelineThreads, kSlabs = kHeadSize / kRows;
  static constexpr int kWork =
      ((kPrepareScratch > Rows::kSharedBytes ? kPrepareScratch : Rows::kSharedBytes) + 15) / 16 *
      16;
  static constexpr int kRanked = kWork;
  static constexpr int kScratch = kRanked + Order::kBytes;
  static constexpr int kTaken = kScratch + 48;
  static constexpr int kSharedBytes = kTaken + 16;

  enum Queue : int { kBlocks = 0, kEntries = 1, kChains = 2 };

  const Params& p;
  const Own only;
  unsigned char* shared;
  Order order;

  // The whole kernel.
  static __device__ __forceinline__ void enter(const Params& p) {
    const Own only = load_only(p);
    unsigned char* shared = ptx::dynamic_shared();
    Pipeline block{p,
                   only,
                   shared,
                   {p, only, reinterpret_cast<int32_t*>(shared + kRanked),
                    reinterpret_cast<int32_t*>(shared + kScratch)}};
    block.run();
  }

 private:
  __device__ __forceinline__ void run() {
    const uint32_t num_chains = max(p.num_seqs, 1) * p.num_v_heads * kSlabs;
    const bool is_first = threadIdx.x == 0;
    // A block makes an entry, whoever it is: the chains want the first ones first. Some of those
    // that come first, which are on different SMs, take a chain then; the very first one of all
    // does not.
    int step = 1;
    uint32_t next = 0;
    if (p.num_seqs > 0) {
      order.rank(reinterpret_cast<int32_t*>(shared));
      ptx::wait_for_dependency();
      uint32_t came = is_first ? fetch(kBlocks) : 0;
      next = is_first ? fetch(kEntries) : 0;
      came = hand_out(came);
      const uint32_t of_two = 2u * p.num_v_heads * kSlabs;  // sequences
      const uint32_t most = min(min(num_chains, gridDim.x / 2), of_two);
      step = came >= 1 && came <= most ? 0 : 2;
    }
    Order::At at;
#pragma unroll 1  // each kind of work has one place in the code
    for (; step < 4; ++step) {
      if (step % 2 == 1) {
        carry_states(num_chains);
        if (p.num_seqs == 0) return;
        if (step == 1 && is_first) next = fetch(kEntries);
      } else {
        make_entries(&at, next, step == 0 ? 1 : UINT32_MAX);
      }
    }
  }

  // The next number of a queue, for all threads.
  __device__ __forceinline__ uint32_t take(Queue queue) const {
    return hand_out(threadIdx.x == 0 ? fetch(queue) : 0);
  }
  __device__ __forceinline__ uint32_t fetch(Queue queue) const {
    return ptx::fetch_add(wy_queue(p) + queue, 1);
  }
  // What the first thread has.
  __device__ __forceinline__ uint32_t hand_out(uint32_t x) const {
    auto* taken = reinterpret_cast<uint32_t*>(shared + kTaken);
    __syncthreads();
    if (threadIdx.x == 0) *taken = x;
    __syncthreads();
    return *taken;
  }

  // `visit(chunk, head, entry)` of those chunks and heads that a queue gives this block, `most` of
  // them. `next`: what it has given already; the one behind is on its way meanwhile.
  template <typename F>
  __device__ __forceinline__ void each_chunk(Queue queue, Order::At* at, uint32_t next,
                                             uint32_t most, F visit) const {
    for (uint32_t count = 0; count < most; ++count) {
      const uint32_t idx = hand_out(next);
      const uint32_t head = idx % p.num_v_heads;
      int32_t number;
      bool is_end;
      const Chunk chunk =
          order.find(static_cast<int32_t>(idx / p.num_v_heads), at, &number, &is_end);
      if (is_end) return;
      if (threadIdx.x == 0 && count + 1 < most) next = fetch(queue);
      if (chunk.length > 0) visit(chunk, head, find_wy(p, number, head));
    }
  }

  __device__ __forceinline__ uint32_t q_head_of(uint32_t head) const {
    return gdn::find_q_head(head, p.num_v_heads, p.num_q_heads);
  }

  __device__ __forceinline__ void make_entries(Order::At* at, uint32_t next, uint32_t most) const {
    each_chunk(kEntries, at, next, most, [&](Chunk chunk, uint32_t head, unsigned char* entry) {
      const RawGates raw = load_chunk<kAligned>(p, head, q_head_of(head), chunk, shared);
      make_wy<kAligned>(p, head, chunk, raw, entry, shared);
      __syncthreads();
      if (threadIdx.x == 0) ptx::add_release(is_made(entry), 1);
    });
  }

  __device__ __forceinline__ void carry_states(uint32_t num_chains) const {
    // Without a sequence there are zeros for tokens of none, and there may be no workspace.
    const bool has_queue = p.num_seqs > 0;
    uint32_t idx = has_queue ? take(kChains) : blockIdx.x;
    while (idx < num_chains) {
      Rows::enter(p, only, idx);
      idx = has_queue ? take(kChains) : idx + gridDim.x;
    }
  }
};

}  // namespace fastkernels::gdn_prefill
