// From segment to segment of a sequence: S <- S transfer + state, with the float32 matrices that
// transfer.cuh leaves at each cut; S lies where `state` was. Rows of V are independent: a block
// takes 16 of a head's through all cuts of its sequence.
//
// The products are of three bfloat16 pieces, which together are a float32, and all of them above
// 2^-27 are computed: a step is off by the rounding of float32 sums, in units of |S| |transfer|.
// Two pieces (2^-17) would not do: where a segment erases nearly all of a large state, S transfer
// is smaller by as much, and later segments cannot mend what is left (a state 17,000 times what
// remains: off by 3.7e-2, with three pieces by 3.6e-3). What `transfer` itself is off by is left.
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
  static constexpr int kPieces = 3;
  // For even and odd cuts the pieces of S as left operands, 16 bytes a lane and step.
  static constexpr int kScratch = 2 * kPieces * kOperandBytes;
  static constexpr int kSharedBytes = kScratch + 128;

  // Four rows of two columns in each step.
  using Loaded = float2[kSteps][4];
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

  // Two values as bfloat16, what is missing of them, and what then is.
  static __device__ __forceinline__ void split(float x, float y, uint32_t (&pieces)[kPieces]) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      pieces[i] = ptx::to_bf16x2(x, y);
      x -= __uint_as_float(pieces[i] << 16);
      y -= __uint_as_float(pieces[i] & 0xffff0000u);
    }
  }

  static __device__ __forceinline__ void run(const Params& p, const Part& part) {
    unsigned char* shared = ptx::dynamic_shared();
    const Place first = find_first_cut<kThreads, kSegment>(
        p, part.position, reinterpret_cast<int32_t*>(shared + kScratch));
    // The state at the first cut is there.
    if (first.idx != 0 || first.num_cuts < 2) return;
    const int64_t number = first_cut_of<kSegment>(first);
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

      auto* operands =
          reinterpret_cast<uint4*>(shared + idx % 2 * kPieces * kOperandBytes) + lane();
      uint32_t own[4][kPieces];
      split(S[0].x, S[0].y, own[0]);
      split(S[1].x, S[1].y, own[1]);
      split(S[0].z, S[0].w, own[2]);
      split(S[1].z, S[1].w, own[3]);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        operands[(kPieces * warp() + i) * kWarpSize] =
            make_uint4(own[0][i], own[1][i], own[2][i], own[3][i]);
      }

      Loaded transfer;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) transfer[step][i] = next[step][i];
      }
      if (idx + 1 < first.num_cuts) {
        load(next, find_cut(p, number + idx + 1, part.head).transfer);
      } else {
        ptx::launch_dependents();  // with a cut left to go
      }
      __syncthreads();

      // Sums of products of one size; a sum of several waits for itself no longer than one of one.
      float sum[kPieces][2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const float2(&x)[4] = transfer[step];
        uint32_t left[kPieces][4], right[2][2][kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const uint4 piece = operands[(kPieces * step + i) * kWarpSize];
          left[i][0] = piece.x, left[i][1] = piece.y, left[i][2] = piece.z, left[i][3] = piece.w;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          split(x[2 * i].x, x[2 * i + 1].x, right[0][i]);
          split(x[2 * i].y, x[2 * i + 1].y, right[1][i]);
        }
#pragma unroll
        for (int size = 0; size < kPieces; ++size) {
#pragma unroll
          for (int i = 0; i <= size; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              ptx::mma_bf16(sum[size][j], left[i], right[j][0][size - i], right[j][1][size - i]);
            }
          }
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
