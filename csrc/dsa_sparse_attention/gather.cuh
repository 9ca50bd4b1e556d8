// Which cache rows a token names, and bringing them into shared memory.
#pragma once

#include <cstdint>

#include "common/ptx_sm90.cuh"
#include "dsa_sparse_attention/params.h"

namespace fastkernels::dsa_sparse_attention {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kHeads = 16;  // of a block: the rows of a matrix instruction

// A key in shared memory: its row of ckv, then its row of kpe, in pieces of 16 bytes. So many bytes
// are a multiple of all banks, so a piece stands where its number, exclusive-or the row's, says.
constexpr int kCkvPieces = kCkv / 8, kKpePieces = kKpe / 8;
constexpr int kPieces = kCkvPieces + kKpePieces;
constexpr int kRowBytes = 16 * kPieces;

__device__ __forceinline__ uint32_t place(uint32_t row, uint32_t piece) {
  return row * kRowBytes + ((piece ^ (row % 8)) << 4);
}

// One piece; zeros where it is not there. `from` is a legal address in any case.
template <bool kAligned>
__device__ __forceinline__ void copy_piece(unsigned char* to, const uint16_t* from, bool is_there) {
  if constexpr (kAligned) {
    ptx::copy_async(ptx::shared_address(to), from, is_there ? 16 : 0);
  } else {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = is_there ? ptx::load_constant(from + 2 * i) |
                                static_cast<uint32_t>(ptx::load_constant(from + 2 * i + 1)) << 16
                          : 0;
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// 16 rows, of which a warp takes two, 8 apart, so that all pieces of a lane are swizzled alike. Of
// these `ckv` is what lies in the lane's first piece, `kpe` what lies in the only one of a lane
// below 16: of the first row for lanes below 8, else of the second.
template <bool kAligned>
__device__ __forceinline__ void copy_rows(unsigned char* to, const uint16_t* const (&ckv)[2],
                                          const uint16_t* kpe, const bool (&is_there)[2]) {
  static_assert(kCkvPieces == 64 && kKpePieces == 8 && kWarps == 8, "what lanes and warps take");
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned char* row = to + place(warp, lane) + i * 8 * kRowBytes;
    copy_piece<kAligned>(row, ckv[i], is_there[i]);
    copy_piece<kAligned>(row + 16 * 32, ckv[i] + 8 * 32, is_there[i]);
  }
  if (lane < 16) {
    copy_piece<kAligned>(to + place(warp + lane / 8 * 8, kCkvPieces + lane % 8), kpe,
                         lane < 8 ? is_there[0] : is_there[1]);
  }
}

// The queries of 16 heads from `head` on, zeros for those that are not there, in the places of
// keys.
template <bool kAligned>
__device__ __forceinline__ void copy_queries(const Params& p, unsigned char* to, int64_t token,
                                             int32_t head) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto* nope = static_cast<const uint16_t*>(p.q_nope) + token * p.q_nope_stride_t + 8 * lane;
  const auto* pe = static_cast<const uint16_t*>(p.q_pe) + token * p.q_pe_stride_t + 8 * (lane % 8);
  const int32_t left = p.num_heads - head;
  const uint32_t rows[] = {warp, warp + 8};
  const bool is_there[] = {static_cast<int32_t>(rows[0]) < left,
                           static_cast<int32_t>(rows[1]) < left};
  const int64_t heads[] = {head + (is_there[0] ? rows[0] : 0), head + (is_there[1] ? rows[1] : 0)};
  const uint16_t* const ckv[] = {nope + heads[0] * p.q_nope_stride_h,
                                 nope + heads[1] * p.q_nope_stride_h};
  copy_rows<kAligned>(to, ckv, pe + (lane < 8 ? heads[0] : heads[1]) * p.q_pe_stride_h, is_there);
}

// ---- which rows ---------------------------------------------------------------------------------

// A block looks at every `kBlocks`-th group of 8 entries of the token's row (32 bytes, what L2
// reads at once), a warp at 256 or fewer of these, 32 at a time.
template <int kBlocks>
struct Entries {
  static constexpr int kEntries = kMaxTopk / kBlocks;
  static constexpr int kRounds = (kEntries + kThreads - 1) / kThreads;

  int32_t index[kRounds];
  uint32_t is_valid[kRounds];  // of the warp, a bit a lane

  __device__ __forceinline__ void load(const Params& p, int64_t token, uint32_t rank) {
    const uint32_t entry = threadIdx.x / 32 * (32 * kRounds) + threadIdx.x % 32;
    // A cluster of 16 has entries for half of its blocks' threads; the others get places from
    // kMaxTopk on.
    const int32_t first = (entry / 8 * kBlocks + rank) * 8 + entry % 8;
    const auto* from = static_cast<const int32_t*>(p.indices) + token * p.indices_stride_t + first;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int32_t step = i * 32 * kBlocks;
      index[i] = first + step < p.topk ? ptx::load_constant(from + step) : -1;
    }
  }

  // How many of the warp's entries are valid.
  __device__ __forceinline__ int32_t vote(const Params& p) {
    int32_t count = 0;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      is_valid[i] = __ballot_sync(
          0xffffffffu, static_cast<uint32_t>(index[i]) < static_cast<uint32_t>(p.num_rows));
      count += __popc(is_valid[i]);
    }
    return count;
  }

  // The valid ones to `list`, of which warps before have `before`.
  __device__ __forceinline__ void keep(int32_t before, int32_t* list) const {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if ((is_valid[i] >> lane & 1) != 0) {
        list[before + __popc(is_valid[i] & ((1u << lane) - 1))] = index[i];
      }
      before += __popc(is_valid[i]);
    }
  }
};

// Where a row of a cache starts, or what lies some way into it.
struct Cache {
  const uint16_t* base;
  int64_t stride_page, stride_row;

  // `kEven`: rows are evenly spaced (kEvenRows), which makes this one instruction.
  template <bool kEven>
  __device__ __forceinline__ const uint16_t* row(const Params& p, uint32_t index) const {
    if constexpr (kEven) {
      const uint64_t offset = uint64_t{index} * static_cast<uint32_t>(2 * stride_row);
      return reinterpret_cast<const uint16_t*>(reinterpret_cast<const char*>(base) + offset);
    } else {
      const uint32_t page_size = p.page_size, page = index / page_size;
      return base + page * stride_page + (index - page * page_size) * stride_row;
    }
  }
};

__device__ __forceinline__ Cache get_ckv(const Params& p, uint32_t column) {
  return {static_cast<const uint16_t*>(p.ckv) + column, p.ckv_stride_page, p.ckv_stride_row};
}

__device__ __forceinline__ Cache get_kpe(const Params& p, uint32_t column) {
  return {static_cast<const uint16_t*>(p.kpe) + column, p.kpe_stride_page, p.kpe_stride_row};
}

// The first `left` keys of the list into a slab, as many as it takes; zeros for those beyond, but
// only up to a multiple of 16, of which none is read.
template <int kKeys, bool kAligned, bool kEven>
__device__ __forceinline__ void copy_keys(const Params& p, unsigned char* slab, const int32_t* list,
                                          int32_t left) {
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Cache ckv = get_ckv(p, 8 * lane), kpe = get_kpe(p, 8 * (lane % 8));
#pragma unroll(kEven ? kKeys / 16 : 1)
  for (int32_t i = 0; i < kKeys; i += 16) {
    if (i >= left) break;
    const int32_t low = i + warp, high = low + 8;
    const bool is_there[] = {low < left, high < left};
    const int32_t indices[] = {is_there[0] ? list[low] : 0, is_there[1] ? list[high] : 0};
    const uint16_t* const rows[] = {ckv.row<kEven>(p, indices[0]), ckv.row<kEven>(p, indices[1])};
    copy_rows<kAligned>(slab + i * kRowBytes, rows,
                        kpe.row<kEven>(p, lane < 8 ? indices[0] : indices[1]), is_there);
  }
}

}  // namespace fastkernels::dsa_sparse_attention
