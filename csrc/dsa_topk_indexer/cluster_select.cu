// dsa_topk_indexer, route cluster_select: one launch, a cluster of blocks for a row.
//
// Plan: the row's pages are dealt to the blocks in order, neighbours to each. A block scores its
// pages (score.cuh) into keys that stay in shared memory, and the cluster selects among them
// (select.cuh). Rows of at most `topk` positions are not scored: the cluster's warps store their
// candidates. What a row needs is on its way at once: its length, the first columns of the block
// table and the queries.
//
// Shared memory: `stages` pages, what the selection counts (25 KB and more), 4 bytes a position and
// a page.
//
// Constraints: at most 64 heads; ceil(max_num_pages / cluster) <= pages. Blocks: of a cluster
// fastest, then rows.
//
// Macros: FK_CLUSTER (1, 2, 4, 8, 16), FK_WARPS (4, 8), FK_STAGES, FK_PAGES (pages of a block, at
// most); FK_ALIGNED (cache and queries in 16-byte pieces); FK_THREADS and FK_SHARED_BYTES,
// what the launcher gives.
#include "dsa_topk_indexer/pages.cuh"
#include "dsa_topk_indexer/score.cuh"
#include "dsa_topk_indexer/select.cuh"

namespace fastkernels::dsa_topk_indexer {
namespace {

struct alignas(16) Shared {
  Selection<FK_CLUSTER, 1> selection;
  alignas(16) uint32_t keys[FK_PAGES * kPageSize];
  int32_t list[FK_PAGES];
  alignas(8) uint64_t is_full[FK_STAGES];
  uint32_t taken[FK_STAGES];
};

constexpr int kRing = FK_STAGES * kPageBytes;
static_assert(FK_THREADS == 32 * FK_WARPS && FK_SHARED_BYTES == kRing + sizeof(Shared),
              "kernels/__init__.py says otherwise");

// Pages of a block, from `first` of the row on.
struct Share {
  int32_t first, count;

  __device__ __forceinline__ Share(int32_t num_pages, uint32_t rank)
      : first(num_pages * rank / FK_CLUSTER),
        count(static_cast<int32_t>(num_pages * (rank + 1) / FK_CLUSTER) - first) {}
};

// Scores the block's share of a row, if the row has more than `topk` positions; gives its length.
template <int kHeadTiles>
__device__ __forceinline__ int32_t score(const Params& p, int64_t number, const Row& row,
                                         uint32_t rank, Shared* shared) {
  const int32_t entry = row.load_entry(threadIdx.x);
  const Query<kHeadTiles> query(p, number);
  const int32_t length = row.load_length();
  if (length <= p.topk) return length;
  const Share share(pages_of(length), rank);
  const int32_t first = share.first, last = first + share.count, thread = threadIdx.x;
  if (first <= thread && thread < last) shared->list[thread - first] = row.check(entry);
  for (int32_t i = max(first, FK_THREADS) + thread; i < last; i += FK_THREADS) {
    shared->list[i - first] = row.check(row.load_entry(i));
  }
  __syncthreads();
  const Ring<FK_STAGES> ring{ptx::dynamic_shared(), shared->is_full, shared->taken};
  ring.start(p, shared->list, share.count);
  shared->selection.clear();
  const Scorer<kHeadTiles> scorer(query);
  __syncthreads();
  ring.score(p, scorer, shared->list, share.count, length - first * kPageSize, shared->keys);
  __syncthreads();
  return length;
}

}  // namespace

extern "C" __global__ void __cluster_dims__(FK_CLUSTER, 1, 1)
    __launch_bounds__(FK_THREADS, FK_SHARED_BYTES <= 113 * 1024 ? 8 / FK_WARPS : 1)
        dsa_topk_indexer_cluster_select(const __grid_constant__ Params p) {
  const uint32_t rank = FK_CLUSTER > 1 ? ptx::cluster_rank() : 0;
  const int64_t number = blockIdx.x / FK_CLUSTER;
  const Row row(p, number);
  const int32_t entry = row.load_entry(threadIdx.x % 32);
  auto* shared = reinterpret_cast<Shared*>(ptx::dynamic_shared() + kRing);
  const int32_t length = p.num_heads <= 32 ? score<2>(p, number, row, rank, shared)
                                           : score<4>(p, number, row, rank, shared);
  if (length <= p.topk) {
    store_candidates(p, number, row, entry, length, rank, FK_CLUSTER);
    return;
  }
  shared->selection.select(
      [&](int32_t i) { return shared->keys[i]; }, Share(pages_of(length), rank).count * kPageSize,
      rank, p.topk, static_cast<int32_t*>(p.output) + number * p.output_stride_b,
      [&](int32_t i) { return shared->list[i / kPageSize] * kPageSize + i % kPageSize; });
}

}  // namespace fastkernels::dsa_topk_indexer
