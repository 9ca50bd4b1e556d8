// Rows of a block table: which positions are candidates, and what a row returns that has no more of
// them than it may return.
#pragma once

#include <cstdint>

#include "dsa_topk_indexer/params.h"
#include "dsa_topk_indexer/ptx.cuh"

namespace fastkernels::dsa_topk_indexer {

constexpr int kWarps = FK_THREADS / 32;

// A row's entries, and its length; nothing read here is trusted.
struct Row {
  const int32_t* table;
  int64_t stride;
  const int32_t* length;
  int32_t num_pages, max_num_pages;

  __device__ __forceinline__ Row(const Params& p, int64_t row)
      : table(static_cast<const int32_t*>(p.block_table) + row * p.table_stride_b),
        stride(p.table_stride_p),
        length(static_cast<const int32_t*>(p.seq_lens) + row * p.seq_lens_stride_b),
        num_pages(p.num_pages),
        max_num_pages(p.max_num_pages) {}

  // Of a column of the table; -1 beyond it.
  __device__ __forceinline__ int32_t load_entry(int32_t column) const {
    return column < max_num_pages ? ptx::load_constant(table + column * stride) : -1;
  }

  // -1 where the page is none of the cache's.
  __device__ __forceinline__ int32_t check(int32_t entry) const {
    return static_cast<uint32_t>(entry) < static_cast<uint32_t>(num_pages) ? entry : -1;
  }

  __device__ __forceinline__ int32_t load_length() const {
    return min(max(ptx::load_constant(length), 0), max_num_pages * kPageSize);
  }
};

__device__ __forceinline__ int32_t pages_of(int32_t length) {
  return (length + kPageSize - 1) / kPageSize;
}

// Four entries from a multiple of four on, of which those in [from, end) are `values`.
__device__ __forceinline__ void store_four(int32_t* output, int32_t place, int4 values,
                                           int32_t from, int32_t end) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(output) % sizeof(int4) == 0;
  if (is_aligned && place >= from && place <= end - 4) {
    *reinterpret_cast<int4*>(output + place) = values;
    return;
  }
  const int32_t each[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Written so that nothing overflows near the largest `topk`.
    if (place >= from - i && place < end - i) output[place + i] = each[i];
  }
}

// -1 from entry `count` on; thread `number` of `total`.
__device__ __forceinline__ void store_padding(int32_t* output, int32_t count, int32_t topk,
                                              uint32_t number, uint32_t total) {
  for (int64_t place = count / 4 * 4 + int64_t{4} * number; place < topk;
       place += int64_t{4} * total) {
    store_four(output, static_cast<int32_t>(place), make_int4(-1, -1, -1, -1), count, topk);
  }
}

// All candidates of a row that may return them all, in order of position, then -1; block `part` of
// `parts`. Half a warp stores a page. `entry` and `length`: the lane's `load_entry` and the row's
// `load_length`, so that they are on their way together.
__device__ __forceinline__ void store_candidates(const Params& p, int64_t row_number,
                                                 const Row& row, int32_t entry, int32_t length,
                                                 uint32_t part, uint32_t parts) {
  const uint32_t lane = threadIdx.x % 32, warp = part * kWarps + threadIdx.x / 32;
  int32_t* output = static_cast<int32_t*>(p.output) + row_number * p.output_stride_b;
  const int32_t num_pages = pages_of(length);
  int32_t before = 0;  // pages of the cache in earlier pieces of 32 columns
  int32_t last = -1;   // the row's last page, which need not be full
  for (int32_t first = 0; first < num_pages; first += 32) {
    if (first > 0) entry = row.load_entry(first + lane);
    const int32_t page = first + static_cast<int32_t>(lane) < num_pages ? row.check(entry) : -1;
    const uint32_t valid = __ballot_sync(0xffffffffu, page >= 0);
    // 16 pairs of columns, dealt to the warps of all parts.
    for (uint32_t pair = warp; pair < 16; pair += parts * kWarps) {
      const uint32_t column = 2 * pair + lane / 16;
      const int32_t even = __shfl_sync(0xffffffffu, page, 2 * pair);
      const int32_t odd = __shfl_sync(0xffffffffu, page, 2 * pair + 1);
      if ((valid >> column & 1) == 0) continue;
      const int32_t index = (lane < 16 ? even : odd) * kPageSize + lane % 16 * 4;
      const int32_t start = (before + __popc(valid & ((1u << column) - 1))) * kPageSize;
      const int32_t here = length - (first + static_cast<int32_t>(column)) * kPageSize;
      store_four(output, start + lane % 16 * 4, make_int4(index, index + 1, index + 2, index + 3),
                 0, start + min(here, kPageSize));
    }
    before += __popc(valid);
    last = __shfl_sync(0xffffffffu, page, (num_pages - 1) % 32);
  }
  const int32_t missing = last >= 0 ? num_pages * kPageSize - length : 0;
  store_padding(output, before * kPageSize - missing, p.topk, part * FK_THREADS + threadIdx.x,
                parts * FK_THREADS);
}

}  // namespace fastkernels::dsa_topk_indexer
