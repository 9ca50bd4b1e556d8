// From segment to segment of a sequence: S <- S transfer + state, with the float32 matrices that
// transfer.cuh leaves at each cut; S lies where `state` was. Rows of V are independent: a block
// takes 16 of a head's through all cuts of its sequence.
//
// The products are of bfloat16 halves: x = high + low + at most 2^-17 |x|, and of a product all but
// low * low is computed, so that a step is off by 2^-15 of |S| |transfer| at most, where the
// matrices themselves are off by some 2^-9.
//
// Each of 8 warps makes 16 columns. So every element of `transfer` is wanted by one lane alone and
// goes from memory to its registers; which columns and which rows a place in a fragment stands for
// is chosen for these loads: column 16 w + 2 g + j of operand b is column g of its tile j, and row
// 16 s + 4 c + i is row 2 c + i (+ 6 from i = 2 on) of step s. Then a lane's results are 4
// neighbouring columns, which are its part of the next left operand, too.
//
// Barrier 0 once a cut.
#pragma once

#include <cstdint>

#include "gdn_prefill/segments.cuh"

namespace fastkernels::gdn_prefill {

template <int kSegment>
struct Scan {
  static constexpr int kThreads = 256;
  static constexpr int kRows = 16;
  static constexpr int kSlabs = kHeadSize / kRows;
  static constexpr int kSteps = kHeadSize / 16;  // of a product
  static constexpr int kOperandBytes = kSteps * 32 * 16;
  // For even and odd cuts the high and the low half of S as left operands, 16 bytes a lane and
  // step.
  static constexpr int kScratch = 2 * 2 * kOperandBytes;
  static constexpr int kSharedBytes = kScratch + 128;

  // Four rows of two columns in each step.
  using Loaded = float2[kSteps][4];
  // The same as operands b of two tiles.
  using Halves = uint32_t[kSteps][2][2];

  static __device__ __forceinline__ void enter(const Params& p) {
    const Part part = find_part<kSlabs>(p);
    run(p, part);
    // One block is enough to keep the next kernel from overtaking the earlier one; others that have
    // nothing to do make room.
    if (blockIdx.x == 0) ptx::wait_for_dependency();
  }

 private:
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % kWarpSize; }
  static __device__ __forceinline__ uint32_t warp() { return threadIdx.x / kWarpSize; }

  static __device__ __forceinline__ void load(Loaded& x, const float* transfer) {
    const float* from = transfer + lane() % 4 * 4 * kHeadSize + 16 * warp() + lane() / 4 * 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[step][i] = *reinterpret_cast<const float2*>(from + (16 * step + i) * kHeadSize);
      }
    }
  }

  // Two values as bfloat16, and what is missing.
  static __device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
    high = ptx::to_bf16x2(x, y);
    low = ptx::to_bf16x2(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
  }

  static __device__ __forceinline__ void split(const Loaded& x, Halves& high, Halves& low) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float2(&rows)[4] = x[step];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        split(rows[2 * i].x, rows[2 * i + 1].x, high[step][0][i], low[step][0][i]);
        split(rows[2 * i].y, rows[2 * i + 1].y, high[step][1][i], low[step][1][i]);
      }
    }
  }

  // The first cut of the sequence at `position`; positions are those of sequences or of cuts,
  // whichever are fewer.
  static __device__ __forceinline__ Place find_first(const Params& p, int32_t position,
                                                     int32_t* scratch) {
    if (p.num_seqs > p.num_tokens / kSegment) {
      return find_place<kThreads, kSegment, Numbering::kCuts>(p, position, scratch);
    }
    const Tokens tokens = find_tokens<kThreads>(p, position, load_own(p, position), scratch);
    return place_at<kSegment, Numbering::kCuts>(tokens, position, tokens.start / kSegment);
  }

  static __device__ __forceinline__ void run(const Params& p, const Part& part) {
    unsigned char* shared = ptx::dynamic_shared();
    const Place first = find_first(p, part.position, reinterpret_cast<int32_t*>(shared + kScratch));
    // The state at the first cut is there.
    if (first.idx != 0 || first.num_cuts < 2) return;
    const int64_t number = first.tokens.start / kSegment;
    const SlotIndex read = load_slot(p.read_indices, p.index_words, p.read_stride, first.seq);
    if (!is_slot(read, p.index_words, p.num_slots)) return;

    // This lane's 4 columns of rows g and g + 8.
    const uint32_t offset =
        (part.slab * kRows + lane() / 4) * kHeadSize + 16 * warp() + lane() % 4 * 4;
    auto rows_of = [&](int32_t idx) { return find_cut(p, number + idx, part.head).state + offset; };
    ptx::wait_for_dependency();
    Loaded next;
    load(next, find_cut(p, number + 1, part.head).transfer);
    float4 S[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) S[i] = ptx::load(rows_of(0) + 8 * i * kHeadSize);

    for (int32_t idx = 1; idx < first.num_cuts; ++idx) {
      float* rows = rows_of(idx);
      float4 end[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) end[i] = ptx::load(rows + 8 * i * kHeadSize);

      auto* operands = reinterpret_cast<uint4*>(shared + idx % 2 * 2 * kOperandBytes) + lane();
      uint4 high, low;
      split(S[0].x, S[0].y, high.x, low.x);
      split(S[1].x, S[1].y, high.y, low.y);
      split(S[0].z, S[0].w, high.z, low.z);
      split(S[1].z, S[1].w, high.w, low.w);
      operands[2 * warp() * kWarpSize] = high;
      operands[(2 * warp() + 1) * kWarpSize] = low;

      Halves right_high, right_low;
      split(next, right_high, right_low);
      if (idx + 1 < first.num_cuts) {
        load(next, find_cut(p, number + idx + 1, part.head).transfer);
      }
      __syncthreads();

      // Three sums, since each product waits for the one that it adds to.
      float sum[3][2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint4 halves[2] = {operands[2 * step * kWarpSize],
                                 operands[(2 * step + 1) * kWarpSize]};
        const uint32_t left_high[4] = {halves[0].x, halves[0].y, halves[0].z, halves[0].w};
        const uint32_t left_low[4] = {halves[1].x, halves[1].y, halves[1].z, halves[1].w};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t (&b)[2] = right_high[step][j];
          ptx::mma_bf16(sum[0][j], left_high, b[0], b[1]);
          ptx::mma_bf16(sum[1][j], left_low, b[0], b[1]);
          ptx::mma_bf16(sum[2][j], left_high, right_low[step][j][0], right_low[step][j][1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        auto total = [&](int j, int column) {
          const int k = 2 * i + column;
          return sum[0][j][k] + (sum[1][j][k] + sum[2][j][k]);
        };
        S[i].x = end[i].x + total(0, 0);
        S[i].y = end[i].y + total(1, 0);
        S[i].z = end[i].z + total(0, 1);
        S[i].w = end[i].w + total(1, 1);
        ptx::store(rows + 8 * i * kHeadSize, S[i]);
      }
    }
  }
};

}  // namespace fastkernels::gdn_prefill
