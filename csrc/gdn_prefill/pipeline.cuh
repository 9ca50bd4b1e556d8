// Three kinds of work in one launch, each of which waits for what another one leaves in the
// workspace: entries of chunks (wy.cuh), a state's way through a sequence (`WyChain`), and the
// output of a chunk (`WyOutput`). `Pipeline` hands them out.
//
// Nothing waits for work that has not been handed out: an entry waits for nothing, a chain for
// entries, which the first block to come makes until there are none left, and an output for chains,
// all of which have been handed out by then. So it ends whatever number of blocks is resident, and
// whatever else runs on the device.
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
// from 32 w on of the state. Operands of the first product go from the workspace to registers, as
// soon as those of the chunk before have been read; those of the second one, and the gates, through
// shared memory, `kStages` chunks of them. Not to registers, too: the compiler waits for all loads
// that are on their way at once, the newest of which had set out 200 cycles ago.
// Warp 4 waits for entries, warp 5 tells that states and U are there, and how far each is stands in
// shared memory. Warps 6 and 7 copy, and fetch entries into L2 again, which may have left it since
// they were made, each of a head's blocks a part of them: a product is not ahead enough of DRAM.
//
// Barriers: 5 (all warps) twice; 1 (state warps) twice a chunk. mbarriers of each stage: its inputs
// are there (copying threads), have been read (state threads).
template <int kRows>
struct WyChain : Chain<kRows, false> {
  using States = Chain<kRows, false>;
  using States::kKeySteps, States::kTiles;
  static constexpr bool kWritesOutput = false;
  static constexpr int kSteps = kChunk / 16;
  static constexpr int kThreads = kPipelineThreads, kFirstCopyThread = kThreads;
  static constexpr int kStateThreads = kGroupThreads, kStateWarps = kStateThreads / kWarpSize;
  static constexpr int kU = States::kStateBytes;
  static constexpr int kWords = kU + States::kTokensBytes;  // entries that are there; those left
  // Registers of a thread that the kernel starts with, and of one of a state warp.
  static constexpr int kAtStart = 128, kMore = 200;
  static constexpr int kFetchAhead = 6;  // chunks
  static constexpr int kStages = 3, kCopyThreads = 2 * kWarpSize;
  static constexpr int kBarriers = kWords + 4 * (1 + kStateWarps) + 12;
  static constexpr int kColumns = (kBarriers + 16 * kStages + 127) / 128 * 128;
  static constexpr int kColumnsBytes = kWyValues - kWyColumns;
  static constexpr int kGates = kColumns + kStages * kColumnsBytes;
  static constexpr int kGatesBytes = kGatesPieces * 16;
  static constexpr int kSharedBytes = kGates + kStages * kGatesBytes;

  // Takes the state through `tokens`, as `Sequence::advance` does; every thread of the block.
  template <typename Block>
  __device__ __forceinline__ void advance(const Block& block, float (&S)[kTiles][4][4],
                                          const Tokens& /*tokens*/, int32_t num_chunks,
                                          int64_t first_number) const {
    const uint32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    if (threadIdx.x <= kStateWarps) ptx::store_release(word(threadIdx.x), 0);
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        ptx::mbarrier_init(there(i), kCopyThreads);
        ptx::mbarrier_init(read(i), kStateThreads);
      }
    }
    ptx::barrier_sync(kChainBarrier, kThreads);
    unsigned char* entry = find_wy(block.p, first_number, block.head);
    const int64_t step = int64_t{block.p.num_v_heads} * kWyBytes;
    const uint32_t slab = block.column / 16;
    if (warp < kStateWarps) {
      ptx::raise_registers<kMore>();
      carry(S, entry, step, slab, num_chunks);
      ptx::lower_registers<kAtStart>();
      ptx::barrier_sync(kChainBarrier, kThreads);
      if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < 2 * kStages; ++i) ptx::mbarrier_invalidate(there(0) + 8 * i);
      }
      return;
    }
    ptx::lower_registers<2 * kAtStart - kMore>();
    if (warp == kStateWarps) {
      // A lane an entry, once there is one: a look takes as long as the chain for a chunk.
      for (int32_t made = 0; made < num_chunks;) {
        if (lane == 0) ptx::wait_at_least(is_made(entry + made * step), 1);
        __syncwarp();
        const int32_t idx = made + static_cast<int32_t>(lane);
        const bool is_there =
            idx < num_chunks && ptx::load_acquire(is_made(entry + idx * step)) != 0;
        const int32_t more = __ffs(~__ballot_sync(0xffffffffu, is_there)) - 1;
        made += more < 0 ? kWarpSize : more;
        if (lane == 0) ptx::store_release(word(0), made);
      }
    } else if (warp == kStateWarps + 1 && lane == 0) {
      for (uint32_t told = 0; told < static_cast<uint32_t>(num_chunks);) {
        uint32_t left = num_chunks;
        for (int w = 0; w < kStateWarps; ++w) {
          left = min(left, ptx::wait_shared_at_least(word(1 + w), told + 1));
        }
        ptx::fence_gpu();
        for (; told < left; ++told) ptx::add(slabs_left(entry + told * step), 1);
      }
    } else if (warp >= kStateWarps + 2) {
      for (int32_t idx = 0; idx < num_chunks; ++idx) {
        ptx::wait_shared_at_least(word(0), idx + 1);
        if (idx >= kStages) ptx::mbarrier_wait(read(idx), (idx / kStages - 1) % 2);
        copy(entry + idx * step, idx);
        const int32_t ahead = idx + kFetchAhead;
        if (warp == kStateWarps + 2 && ahead < num_chunks) fetch(entry + ahead * step, slab);
      }
      ptx::copy_commit();
      ptx::copy_wait<0>();
    }
    // Not before the state warps have given back theirs, for which they waited above.
    ptx::barrier_sync(kChainBarrier, kThreads);
    ptx::raise_registers<kAtStart>();
  }

 private:
  __device__ __forceinline__ uint32_t word(int i) const {
    return ptx::shared_address(this->base + kWords) + 4 * i;
  }

  __device__ __forceinline__ uint32_t there(int32_t idx) const {
    return ptx::shared_address(this->base + kBarriers) + 8 * (idx % kStages);
  }
  __device__ __forceinline__ uint32_t read(int32_t idx) const { return there(idx) + 8 * kStages; }

  // Columns and gates, by the copying warps.
  __device__ __forceinline__ void copy(const unsigned char* entry, int32_t idx) const {
    const uint32_t thread = threadIdx.x - (kThreads - kCopyThreads);
    const uint32_t base = ptx::shared_address(this->base), stage = idx % kStages;
    const uint32_t columns = base + kColumns + stage * kColumnsBytes;
    const uint32_t gates = base + kGates + stage * kGatesBytes;
#pragma unroll
    for (int i = 0; i < kColumnsBytes / 16 / kCopyThreads; ++i) {
      const uint32_t at = 16 * (kCopyThreads * i + thread);
      ptx::copy_async(columns + at, entry + kWyColumns + at, 16);
    }
    for (uint32_t i = thread; i < kGatesPieces; i += kCopyThreads) {
      ptx::copy_async(gates + 16 * i, entry + kWyGates + 16 * i, 16);
    }
    ptx::copy_arrive(there(idx));
  }

  // By a warp: this block's part of keys and columns, and its values.
  static __device__ __forceinline__ void fetch(const unsigned char* entry, uint32_t slab) {
    constexpr int kLine = 128, kPart = kWyValues / (kHeadSize / 16);  // bytes for 16 rows
    const uint32_t at = threadIdx.x % kWarpSize * kLine;
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      ptx::prefetch_l2(entry + (slab + r) * kPart + at);
      static_assert(kPart == kWarpSize * kLine, "a line a lane");
      if (at < kSteps * kFragmentBytes) {
        ptx::prefetch_l2(entry + kWyValues + (slab + r) * kSteps * kFragmentBytes + at);
      }
    }
  }

  // What a state warp reads of an entry for its tokens.
  struct ForTokens {
    uint4 keys[kKeySteps], values[kTiles];
  };
  static __device__ __forceinline__ uint4 load(const unsigned char* from) {
    return ptx::load_l2(reinterpret_cast<const uint4*>(from));
  }

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

  // A state warp's place: in shared memory, and where in fragments its lane has its part.
  struct At {
    uint32_t warp, lane, shared;

    __device__ __forceinline__ uint32_t state(int idx) const {
      return shared + idx * kFragmentBytes;
    }
    __device__ __forceinline__ uint32_t update(int idx) const { return state(idx) + kU; }
    // Of its 32 columns of a stage.
    __device__ __forceinline__ uint32_t columns(int32_t stage) const {
      return shared + kColumns + stage * kColumnsBytes + 2 * kSteps * warp * kFragmentBytes;
    }
  };

  // For the next product, and for the output.
  static __device__ __forceinline__ void publish(const At& at, const float (&S)[kTiles][4][4],
                                                 unsigned char* states) {
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t own = 2 * at.warp * kFragmentBytes;
        const uint4 words = States::pack(S[r][2 * j], S[r][2 * j + 1]);
        ptx::store_shared(at.state(8 * r + j) + own, words);
        *reinterpret_cast<uint4*>(states + (8 * r + j) * kFragmentBytes + own) = words;
      }
    }
  }

  static __device__ __forceinline__ void spread(uint32_t (&a)[4], uint4 words) {
    a[0] = words.x;
    a[1] = words.y;
    a[2] = words.z;
    a[3] = words.w;
  }

  __device__ __forceinline__ void carry(float (&S)[kTiles][4][4], unsigned char* entry,
                                        int64_t step, uint32_t slab, int32_t num_chunks) const {
    At at{threadIdx.x / kWarpSize, threadIdx.x % kWarpSize, ptx::shared_address(this->base)};
    at = {ptx::made_here(at.warp), ptx::made_here(at.lane),
          ptx::made_here(at.shared + 16 * at.lane)};
    const uint32_t made = ptx::made_here(word(0)), left = made + 4 * (1 + at.warp);
    const uint32_t states = kWyStates + slab * 8 * kFragmentBytes;
    const uint32_t updates = kWyUpdates + (slab * 4 + at.warp) * kFragmentBytes;
    entry += 16 * at.lane;
    ForTokens tokens;
    publish(at, S, entry + states);
    int32_t num_made = ptx::wait_shared_at_least(made, 1);
    load(tokens, entry, slab, at.warp);
    ptx::barrier_sync(kStateBarrier, kStateThreads);
#pragma unroll 1
    for (int32_t idx = 0; idx < num_chunks; ++idx) {
      const bool is_last = idx + 1 == num_chunks;
      const int32_t stage = idx % kStages;
      ptx::mbarrier_wait(there(idx), idx / kStages % 2);
      const auto* gates =
          reinterpret_cast<const ChunkGates*>(this->base + kGates + stage * kGatesBytes);
      // A token whose beta or system is not finite need be no NaN of U.
      const float decay = gates->first_bad < kChunk ? NAN : gates->all;
      float2 rest[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rest[h] = *reinterpret_cast<const float2*>(gates->to_end + 16 * at.warp + 8 * h +
                                                   at.lane % 4 * 2);
      }
      float U[kTiles][2][4];
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        uint4 a[kKeySteps];
#pragma unroll
        for (int s = 0; s < kKeySteps; ++s) a[s] = ptx::load_shared(at.state(8 * r + s));
        // In two parts, since each product waits for the one that it adds to.
        float other[2][4] = {};
        uint32_t values[4];
        spread(values, tokens.values[r]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          U[r][i / 2][i % 2 * 2] = low_half(values[i]);
          U[r][i / 2][i % 2 * 2 + 1] = high_half(values[i]);
        }
#pragma unroll
        for (int s = 0; s < kKeySteps; ++s) {
          uint32_t words[4];
          spread(words, a[s]);
          float (&sum)[2][4] = s % 2 == 0 ? U[r] : other;
          ptx::mma_bf16(sum[0], words, tokens.keys[s].x, tokens.keys[s].y);
          ptx::mma_bf16(sum[1], words, tokens.keys[s].z, tokens.keys[s].w);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) U[r][i / 4][i % 4] += other[i / 4][i % 4];
#pragma unroll
        for (int i = 0; i < 16; ++i) S[r][i / 4][i % 4] *= decay;  // while products are under way
      }
      if (!is_last) {
        if (num_made < idx + 2) num_made = ptx::wait_shared_at_least(made, idx + 2);
        load(tokens, entry + step, slab, at.warp);
      }
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        float scaled[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 pair = rest[i / 4];
          scaled[i / 4][i % 4] = (i % 2 == 0 ? pair.x : pair.y) * U[r][i / 4][i % 4];
        }
        ptx::store_shared(at.update(4 * r) + at.warp * kFragmentBytes,
                          States::pack(scaled[0], scaled[1]));
      }
      uint4 columns[2][kSteps];
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        columns[i / kSteps][i % kSteps] = ptx::load_shared(at.columns(stage) + i * kFragmentBytes);
      }
      ptx::mbarrier_arrive_expect(read(idx), 0);
      ptx::barrier_sync(kStateBarrier, kStateThreads);

      uint4 update[kTiles][kSteps];
#pragma unroll
      for (int i = 0; i < kTiles * kSteps; ++i) {
        update[i / kSteps][i % kSteps] = ptx::load_shared(at.update(i));
      }
      // Here, where nobody waits for it.
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        *reinterpret_cast<uint4*>(entry + updates + 4 * r * kFragmentBytes) =
            States::pack(U[r][0], U[r][1]);
      }
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
      __syncwarp();
      if (at.lane == 0) ptx::store_release(left, idx + 1);
      entry += step;
      if (!is_last) {
        publish(at, S, entry + states);
      }
      ptx::barrier_sync(kStateBarrier, kStateThreads);
    }
  }
};

// ---- the output ---------------------------------------------------------------------------------

// Of a chunk of one head: O = d_t Q S^T + P U, warp w the columns of V from 16 w on, of all 64
// tokens. Rows of products are tokens here: S and U are right operands as they lie.
template <bool kAligned>
struct WyOutput {
  static constexpr int kP = kKeysBytes;
  static constexpr int kGates = kP + kPairsBytes;
  static constexpr int kSharedBytes = kGates + kGatesPieces * 16;

  const Params& p;
  unsigned char* shared;
  uint32_t head, q_head;

  // Waits for the blocks of the chain that have the head's `num_slabs` slabs.
  __device__ __forceinline__ void make(Chunk chunk, unsigned char* entry,
                                       uint32_t num_slabs) const {
    const uint32_t thread = threadIdx.x;
    copy_keys<kPipelineThreads, kAligned>(shared, p.q, p.q_stride_t, q_head * p.q_stride_h, chunk,
                                          thread);
    if (thread == 0) ptx::wait_at_least(slabs_left(entry), num_slabs);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPairsBytes / 16 / kPipelineThreads; ++i) {
      const uint32_t at = 16 * (kPipelineThreads * i + thread);
      ptx::copy_async(ptx::shared_address(shared + kP) + at, entry + kWyP + at, 16);
    }
    if (thread < kGatesPieces) {
      ptx::copy_async(ptx::shared_address(shared + kGates) + 16 * thread,
                      entry + kWyGates + 16 * thread, 16);
    }
    multiply(chunk, entry);
  }

 private:
  // Two right operands of 8 columns each: words 0 and 2, and words 1 and 3.
  static __device__ __forceinline__ void load(uint32_t (&b)[4], unsigned char* from, uint32_t idx) {
    const uint4 words = ptx::load_l2(fragment_at(from, idx));
    b[0] = words.x;
    b[1] = words.y;
    b[2] = words.z;
    b[3] = words.w;
  }

  // Takes out what is not finite, which would reach earlier tokens through 0 * NaN. `bad`, of
  // columns 8 h + 2c + i, becomes the first such token where that is before.
  static __device__ __forceinline__ void take_out(uint32_t (&update)[kChunk / 16][4],
                                                  int32_t (&bad)[2][2]) {
    const uint32_t c = threadIdx.x % 4;
    int32_t first[2] = {kChunk, kChunk};  // of rows g and g + 8 of U^T
#pragma unroll
    for (int i = 0; i < 4 * kChunk / 16; ++i) {
      uint32_t& word = update[i / 4][i % 4];
      const uint32_t is_bad = carries(word);
      const int32_t t = 16 * (i / 4) + i % 4 / 2 * 8 + 2 * c;
      if (is_bad != 0) first[i % 2] = min(first[i % 2], (is_bad & 0x8000u) != 0 ? t : t + 1);
      word = keep_finite(word);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      first[h] = min(first[h], __shfl_xor_sync(0xffffffffu, first[h], 1));
      first[h] = min(first[h], __shfl_xor_sync(0xffffffffu, first[h], 2));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int32_t& each = bad[i / 2][i % 2];
      each = min(each, __shfl_sync(0xffffffffu, first[i / 2], 4 * (2 * c + i % 2)));
    }
  }

  __device__ __forceinline__ void multiply(Chunk chunk, unsigned char* entry) const {
    const uint32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    uint32_t state[kHeadSize / 16][4], update[kChunk / 16][4], is_dirty = 0;
#pragma unroll
    for (int i = 0; i < kHeadSize / 16; ++i) load(state[i], entry + kWyStates, 8 * warp + i);
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      load(update[i], entry + kWyUpdates, 4 * warp + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) is_dirty |= carries(update[i][j]);
    }
    finish_copies();
    __syncthreads();
    const auto* gates = reinterpret_cast<const ChunkGates*>(shared + kGates);
    const int32_t first_bad = gates->first_bad;
    int32_t bad[2][2] = {{first_bad, first_bad}, {first_bad, first_bad}};
    if (__ballot_sync(0xffffffffu, is_dirty != 0) != 0) take_out(update, bad);
    const uint32_t q = ptx::shared_address(shared), P = ptx::shared_address(shared + kP);
    uint16_t* output = static_cast<uint16_t*>(p.output) + head * p.output_stride_h + 16 * warp;
#pragma unroll
    for (int tile = 0; tile < kChunk / 16; ++tile) {
      if (16 * tile >= chunk.length) break;
      float sum[2][4] = {};
#pragma unroll
      for (int step = 0; step < kHeadSize / 16; ++step) {
        uint32_t a[4];
        ptx::load_matrices(a, fragment_a<kKeyBytes>(q, 16 * tile, 2 * step));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::mma_bf16(sum[half], a, state[step][half], state[step][half + 2]);
        }
      }
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const float decay = gates->from_start[16 * tile + 8 * upper + lane / 4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i / 2][2 * upper + i % 2] *= decay;
      }
#pragma unroll
      for (int step = 0; step <= tile; ++step) {
        uint32_t a[4];
        ptx::load_matrices(a, fragment_a<kPairBytes>(P, 16 * tile, 2 * step));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::mma_bf16(sum[half], a, update[step][half], update[step][half + 2]);
        }
      }
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int32_t t = 16 * tile + 8 * upper + static_cast<int32_t>(lane / 4);
        uint32_t words[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float value[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            value[i] = t >= bad[half][i] ? NAN : p.scale * sum[half][2 * upper + i];
          }
          words[half] = ptx::to_bf16x2(value[0], value[1]);
        }
        store(output + (int64_t{chunk.start} + t) * p.output_stride_t, words, t < chunk.length);
      }
    }
  }

  // Of one token the columns 8 * half + 2c and the next one. Two neighbours exchange halves, so
  // that each has four columns in a row, and a token's 32 bytes leave at once.
  static __device__ __forceinline__ void store(uint16_t* to, const uint32_t (&words)[2],
                                               bool is_there) {
    const uint32_t lane = threadIdx.x % kWarpSize;
    const bool is_odd = lane % 2 != 0;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, is_odd ? words[0] : words[1], 1);
    if (!is_there) return;
    const uint2 four = is_odd ? make_uint2(other, words[1]) : make_uint2(words[0], other);
    to += (is_odd ? 8 : 0) + lane % 4 / 2 * 4;
    if constexpr (kAligned) {
      *reinterpret_cast<uint2*>(to) = four;
    } else {
      const uint32_t each[2] = {four.x, four.y};
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = static_cast<uint16_t>(each[i / 2] >> (i % 2 * 16));
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
  using Chunks = WyOutput<kAligned>;
  static constexpr int kThreads = kPipelineThreads, kSlabs = kHeadSize / kRows;
  static constexpr int kWork = (kPrepareScratch + 15) / 16 * 16;
  static_assert(Rows::kSharedBytes <= kWork && Chunks::kSharedBytes <= kWork, "room for each");
  static constexpr int kRanked = kWork;
  static constexpr int kScratch = kRanked + Order::kBytes;
  static constexpr int kTaken = kScratch + 48;
  static constexpr int kSharedBytes = kTaken + 16;

  enum Queue : int { kBlocks = 0, kEntries = 1, kChains = 2, kOutputs = 3 };

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
    for (; step < 5; ++step) {
      if (step % 2 == 1) {
        carry_states(num_chains);
        if (p.num_seqs == 0) return;
        if (step == 1 && is_first) next = fetch(kEntries);
      } else if (step < 4) {
        make_entries(&at, next, step == 0 ? 1 : UINT32_MAX);
      } else {
        make_output();
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

  __device__ __forceinline__ void make_output() const {
    Order::At at;
    const uint32_t next = threadIdx.x == 0 ? fetch(kOutputs) : 0;
    each_chunk(
        kOutputs, &at, next, UINT32_MAX, [&](Chunk chunk, uint32_t head, unsigned char* entry) {
          const SlotIndex slot = load_slot(p.read_indices, p.index_words, p.read_stride, chunk.seq);
          // The chain of a padding sequence has cleared its output, and leaves no states.
          if (!is_slot(slot, p.index_words, p.num_slots)) return;
          Chunks{p, shared, head, q_head_of(head)}.make(chunk, entry, kSlabs);
        });
  }
};

}  // namespace fastkernels::gdn_prefill
