// dsa_topk_indexer, route tiled_select: two launches, for many long rows and for any length.
//
// Plan: blocks of `score` take `pages` neighbouring pages of a row each and leave their keys in the
// workspace (score.cuh); a cluster of blocks of `select` then selects among the keys of a row
// (select.cuh), which it reads from there, from L2: every cluster barrier empties L1. `select`
// starts while `score` ends, and, where rows come in groups, `score` of the next group while
// `select` ends. Rows of at most `topk` positions are not scored; `select` stores their candidates.
//
// Shared memory: of `score` `stages` pages; of `select` what it counts (25 KB and more).
//
// Constraints: at most 64 heads. Blocks: of `score` those of a row fastest, ceil(max_num_pages /
// pages) of them; of `select` those of a cluster.
//
// Macros: FK_CLUSTER (1, 2, 4, 8, 16), FK_WARPS (of `score`: 4, 8), FK_STAGES, FK_PAGES; FK_SCORE
// or FK_SELECT, one of them 1; FK_ALIGNED (of `score`: cache and queries in 16-byte pieces);
// FK_THREADS and FK_SHARED_BYTES, what the launcher gives.
#include "dsa_topk_indexer/pages.cuh"

#if FK_SCORE
#include "dsa_topk_indexer/score.cuh"
#undef FK_CLUSTER
#define FK_CLUSTER 1
#else
#include "dsa_topk_indexer/select.cuh"
#endif

namespace fastkernels::dsa_topk_indexer {
namespace {

__device__ __forceinline__ uint32_t* keys_of(const Params& p, int64_t row) {
  return static_cast<uint32_t*>(p.workspace) + row * p.max_num_pages * kPageSize;
}

#if FK_SCORE

struct alignas(16) Shared {
  int32_t list[FK_PAGES];
  alignas(8) uint64_t is_full[FK_STAGES];
  uint32_t taken[FK_STAGES];
};

constexpr int kRing = FK_STAGES * kPageBytes;
static_assert(FK_THREADS == 32 * FK_WARPS && FK_PAGES <= FK_THREADS &&
                  FK_SHARED_BYTES == kRing + sizeof(Shared),
              "kernels/__init__.py says otherwise");

template <int kHeadTiles>
__device__ __forceinline__ void run(const Params& p) {
  const uint32_t tiles = (p.max_num_pages + FK_PAGES - 1) / FK_PAGES;
  const int64_t number = blockIdx.x / tiles;
  const int32_t first = blockIdx.x % tiles * FK_PAGES;
  const Row row(p, number);
  const int32_t entry = threadIdx.x < FK_PAGES ? row.load_entry(first + threadIdx.x) : -1;
  const Query<kHeadTiles> query(p, number);
  const int32_t length = row.load_length(), num_pages = pages_of(length);
  if (length <= p.topk || first >= num_pages) return;
  auto* shared = reinterpret_cast<Shared*>(ptx::dynamic_shared() + kRing);
  const int32_t count = min(num_pages - first, FK_PAGES);
  if (threadIdx.x < FK_PAGES) shared->list[threadIdx.x] = row.check(entry);
  __syncthreads();
  const Ring<FK_STAGES> ring{ptx::dynamic_shared(), shared->is_full, shared->taken};
  ring.start(p, shared->list, count);
  const Scorer<kHeadTiles> scorer(query);
  __syncthreads();
  ring.score(p, scorer, shared->list, count, length - first * kPageSize,
             keys_of(p, number) + int64_t{first} * kPageSize);
}

#else

using Select = Selection<FK_CLUSTER, 4>;
static_assert(FK_SHARED_BYTES == sizeof(Select), "kernels/__init__.py says otherwise");

#endif

}  // namespace

extern "C" __global__ void __cluster_dims__(FK_CLUSTER, 1, 1)
    __launch_bounds__(FK_THREADS, FK_SCORE&& FK_SHARED_BYTES <= 113 * 1024 ? 8 / FK_WARPS : 1)
        dsa_topk_indexer_tiled_select(const __grid_constant__ Params p) {
  ptx::launch_dependents();
#if FK_SCORE
  ptx::wait_for_dependency();  // `select` of the rows before has read its keys
  if (p.num_heads <= 32) {
    run<2>(p);
  } else {
    run<4>(p);
  }
#else
  auto* shared = reinterpret_cast<Select*>(ptx::dynamic_shared());
  const uint32_t rank = FK_CLUSTER > 1 ? ptx::cluster_rank() : 0;
  const int64_t number = blockIdx.x / FK_CLUSTER;
  const Row row(p, number);
  const int32_t entry = row.load_entry(threadIdx.x % 32);
  const int32_t length = row.load_length();
  if (length <= p.topk) {
    store_candidates(p, number, row, entry, length, rank, FK_CLUSTER);
    ptx::wait_for_dependency();  // who comes next relies on `score` having ended, too
    return;
  }
  shared->clear();
  const int32_t num_pages = pages_of(length);
  const int32_t first = static_cast<int64_t>(num_pages) * rank / FK_CLUSTER;
  const int32_t last = static_cast<int64_t>(num_pages) * (rank + 1) / FK_CLUSTER;
  const uint32_t* keys = keys_of(p, number) + int64_t{first} * kPageSize;
  ptx::wait_for_dependency();
  __syncthreads();
  shared->select(
      [&](int32_t i) { return keys[i]; }, (last - first) * kPageSize, rank, p.topk,
      static_cast<int32_t*>(p.output) + number * p.output_stride_b,
      [&](int32_t i) { return row.load_entry(first + i / kPageSize) * kPageSize + i % kPageSize; });
#endif
}

}  // namespace fastkernels::dsa_topk_indexer
