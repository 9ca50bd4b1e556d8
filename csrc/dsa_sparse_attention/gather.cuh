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

// The part of a row that is key and value, by a warp. It takes every eighth row, so that all pieces
// of a lane are swizzled alike.
template <bool kAligned>
__device__ __forceinline__ void copy_ckv(unsigned char* slab, uint32_t row, const uint16_t* ckv,
                                         bool is_there) {
  const uint32_t lane = threadIdx.x % 32;
  unsigned char* to = slab + place(row, lane);
  static_assert(kCkvPieces == 64, "two for each lane");
  copy_piece<kAligned>(to, ckv + 8 * lane, is_there);
  copy_piece<kAligned>(to + 16 * 32, ckv + 8 * (lane + 32), is_there);
}

// The queries of 16 heads from `head` on, zeros for those that are not there, in the places of
// keys.
template <bool kAligned>
__device__ __forceinline__ void copy_queries(const Params& p, unsigned char* to, int64_t token,
                                             int32_t head) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto* nope = static_cast<const uint16_t*>(p.q_nope) + token * p.q_nope_stride_t;
  const auto* pe = static_cast<const uint16_t*>(p.q_pe) + token * p.q_pe_stride_t;
#pragma unroll
  for (uint32_t row = warp; row < kHeads; row += kWarps) {
    const bool is_there = head + static_cast<int32_t>(row) < p.num_heads;
    const int64_t from = is_there ? head + row : head;
    copy_ckv<kAligned>(to, row, nope + from * p.q_nope_stride_h, is_there);
    if (lane < kKpePieces) {
      copy_piece<kAligned>(to + place(row, kCkvPieces + lane),
                           pe + from * p.q_pe_stride_h + 8 * lane, is_there);
    }
  }
}

// ---- which rows ---------------------------------------------------------------------------------

// A warp looks at 256 entries of the token's row, 32 at a time.
constexpr int kRounds = kMaxTopk / kThreads;
static_assert(kRounds * kThreads == kMaxTopk, "warps share out a row of any length");

struct Entries {
  int32_t index[kRounds];
  uint32_t is_valid[kRounds];  // of the warp, a bit a lane

  __device__ __forceinline__ void load(const Params& p, int64_t token) {
    const auto* row = static_cast<const int32_t*>(p.indices) + token * p.indices_stride_t;
    const int32_t first = threadIdx.x / 32 * (32 * kRounds) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int32_t at = first + 32 * i;
      index[i] = at < p.topk ? ptx::load_constant(row + at) : -1;
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

  // Of every `1 << share_log2` valid entries of the token number `rank`, to `list`. `before`: valid
  // entries of the warps before.
  __device__ __forceinline__ void keep(int32_t before, uint32_t rank, uint32_t share_log2,
                                       int32_t* list) const {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const uint32_t number = before + __popc(is_valid[i] & ((1u << lane) - 1));
      if ((is_valid[i] >> lane & 1) != 0 && (number & ((1u << share_log2) - 1)) == rank) {
        list[number >> share_log2] = index[i];
      }
      before += __popc(is_valid[i]);
    }
  }
};

// Where a row of a cache starts.
struct Cache {
  const uint16_t* base;
  int64_t stride_page, stride_row;

  // Of evenly spaced rows: one instruction.
  __device__ __forceinline__ const uint16_t* even_row(uint32_t index) const {
    const uint64_t offset = uint64_t{index} * static_cast<uint32_t>(2 * stride_row);
    return reinterpret_cast<const uint16_t*>(reinterpret_cast<const char*>(base) + offset);
  }

  __device__ __forceinline__ const uint16_t* row(const Params& p, int32_t index) const {
    if (p.page_size == kEvenRows) return even_row(index);
    const uint32_t page_size = p.page_size, page = static_cast<uint32_t>(index) / page_size;
    return base + page * stride_page + (index - page * page_size) * stride_row;
  }
};

__device__ __forceinline__ Cache get_ckv(const Params& p) {
  return {static_cast<const uint16_t*>(p.ckv), p.ckv_stride_page, p.ckv_stride_row};
}

__device__ __forceinline__ Cache get_kpe(const Params& p) {
  return {static_cast<const uint16_t*>(p.kpe), p.kpe_stride_page, p.kpe_stride_row};
}

// Keys of the list from `first` on, of which there are enough, into a slab; rows evenly spaced.
template <int kKeys, bool kAligned>
__device__ __forceinline__ void copy_all_keys(const Params& p, unsigned char* slab,
                                              const int32_t* list) {
  const uint32_t warp = threadIdx.x / 32;
#pragma unroll
  for (uint32_t i = 0; i < kKeys; i += kWarps) {
    const uint32_t row = i + warp;
    copy_ckv<kAligned>(slab, row, get_ckv(p).even_row(list[row]), true);
  }
#pragma unroll
  for (uint32_t i = 0; i < kKeys; i += kThreads / kKpePieces) {
    const uint32_t row = i + threadIdx.x / kKpePieces, piece = threadIdx.x % kKpePieces;
    copy_piece<kAligned>(slab + place(row, kCkvPieces + piece),
                         get_kpe(p).even_row(list[row]) + 8 * piece, true);
  }
}

// `left` keys at most; zeros for those beyond, but only up to a multiple of 16, of which none is
// read.
template <int kKeys, bool kAligned>
__device__ __forceinline__ void copy_some_keys(const Params& p, unsigned char* slab,
                                               const int32_t* list, int32_t left) {
  const int32_t warp = threadIdx.x / 32, end = min(kKeys, (left + 15) / 16 * 16);
#pragma unroll 1
  for (int32_t row = warp; row < end; row += kWarps) {
    const bool is_there = row < left;
    const int32_t index = is_there ? list[row] : 0;
    copy_ckv<kAligned>(slab, row, get_ckv(p).row(p, index), is_there);
  }
  const uint32_t piece = threadIdx.x % kKpePieces;
#pragma unroll 1
  for (int32_t row = threadIdx.x / kKpePieces; row < end; row += kThreads / kKpePieces) {
    const bool is_there = row < left;
    const int32_t index = is_there ? list[row] : 0;
    copy_piece<kAligned>(slab + place(row, kCkvPieces + piece),
                         get_kpe(p).row(p, index) + 8 * piece, is_there);
  }
}

}  // namespace fastkernels::dsa_sparse_attention
