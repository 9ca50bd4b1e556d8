// The output of a chunk of one head, of what the chain left (states.cuh) and `prepare` made:
//
//     O = d_t Q S^T + P U       warp w the columns of V from 16 w on, of all 64 tokens
//
// Rows of products are tokens here: S and U are right operands as they lie in the workspace, each
// wanted by one warp alone. Q and P come through shared memory.
//
// Barrier 0 once; those of `find_loaded`.
#pragma once

#include <cstdint>

#include "gdn_prefill/common.cuh"
#include "gdn_prefill/states.cuh"

namespace fastkernels::gdn_prefill {

template <bool kAligned>
struct Output {
  static constexpr int kThreads = 256;
  static constexpr int kP = kKeysBytes;
  static constexpr int kGates = kP + kPairsBytes;
  static constexpr int kScratch = kGates + kGatesPieces * 16;
  static constexpr int kSharedBytes = kScratch + 128;

  // The whole kernel. Blocks: heads fastest, then chunk numbers.
  static __device__ __forceinline__ void enter(const Params& p) {
    const Own only = load_only(p);
    const uint32_t head = blockIdx.x % p.num_v_heads;
    const Output block{p, ptx::dynamic_shared(), head};
    block.run(only, static_cast<int32_t>(blockIdx.x / p.num_v_heads));
  }

  const Params& p;
  unsigned char* shared;
  uint32_t head;

 private:
  __device__ __forceinline__ void run(const Own& only, int32_t number) const {
    const uint32_t q_head = gdn::find_q_head(head, p.num_v_heads, p.num_q_heads);
    const Chunk chunk = find_loaded<kThreads>(
        p, only, number, reinterpret_cast<int32_t*>(shared + kScratch), [&](Chunk at) {
          copy_keys<kThreads, kAligned>(shared, p.q, p.q_stride_t, q_head * p.q_stride_h, at,
                                        threadIdx.x);
        });
    ptx::wait_for_dependency();
    if (chunk.length == 0) return;
    const SlotIndex slot = load_slot(p.read_indices, p.index_words, p.read_stride, chunk.seq);
    if (!is_slot(slot, p.index_words, p.num_slots)) {
      finish_copies();
      return;  // padding: the chain has cleared its output
    }
    copy_pairs(number);
    multiply(number, chunk);
  }

  __device__ __forceinline__ void copy_pairs(int32_t number) const {
    const unsigned char* from = find_prepared(p, number, head);
    const uint32_t thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < kPairsBytes / 16 / kThreads; ++i) {
      const uint32_t at = 16 * (kThreads * i + thread);
      ptx::copy_async(ptx::shared_address(shared + kP) + at, from + kPairsBytes + at, 16);
    }
    if (thread < kGatesPieces) {
      ptx::copy_async(ptx::shared_address(shared + kGates) + 16 * thread,
                      from + kPreparedPairs + 16 * thread, 16);
    }
  }

  // A right operand, columns in two tiles of 8: (0, 2) and (1, 3).
  static __device__ __forceinline__ void load_fragment(uint32_t (&b)[4], const unsigned char* from,
                                                       uint32_t idx) {
    const uint4 words =
        reinterpret_cast<const uint4*>(from + idx * kFragmentBytes)[threadIdx.x % kWarpSize];
    b[0] = words.x;
    b[1] = words.y;
    b[2] = words.z;
    b[3] = words.w;
  }

  __device__ __forceinline__ void multiply(int32_t number, Chunk chunk) const {
    const uint32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const unsigned char* left = find_left(p, number, head);
    uint32_t state[kHeadSize / 16][4], update[kChunk / 16][4];
#pragma unroll
    for (int i = 0; i < kHeadSize / 16; ++i) load_fragment(state[i], left, 8 * warp + i);
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      load_fragment(update[i], left + kLeftUpdates, 4 * warp + i);
    }
    int32_t bad[2][2];  // of this lane's columns 8 * half + 2c + i
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto* rows = reinterpret_cast<const int32_t*>(left + kLeftBad);
      const int2 pair = *reinterpret_cast<const int2*>(rows + 16 * warp + 8 * half + lane % 4 * 2);
      bad[half][0] = pair.x;
      bad[half][1] = pair.y;
    }
    finish_copies();
    __syncthreads();
    const auto* gates = reinterpret_cast<const ChunkGates*>(shared + kGates);
#pragma unroll
    for (int i = 0; i < 4; ++i) bad[i / 2][i % 2] = min(bad[i / 2][i % 2], gates->first_bad);
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

}  // namespace fastkernels::gdn_prefill
