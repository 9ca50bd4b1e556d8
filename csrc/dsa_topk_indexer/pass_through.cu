// dsa_topk_indexer, route pass_through: rows that return all their candidates, in one launch of
// nothing but stores.
//
// Plan: blocks of a row deal its columns out among their warps; each warp counts the cache's pages
// among the columns before its own by votes. A length and 32 entries are on their way together, and
// a block waits for nothing else: no shared memory, no barrier.
//
// Constraints: max_num_pages * 64 <= topk. Blocks: of a row fastest, ceil(topk / kChunk) of them.
//
// Macros: FK_THREADS, what the launcher gives.
#include "dsa_topk_indexer/pages.cuh"

namespace fastkernels::dsa_topk_indexer {

extern "C" __global__ void __launch_bounds__(FK_THREADS)
    dsa_topk_indexer_pass_through(const __grid_constant__ Params p) {
  const uint32_t parts = (p.topk - 1) / kChunk + 1;
  const uint32_t part = parts == 1 ? 0 : blockIdx.x % parts;
  const int64_t number = parts == 1 ? blockIdx.x : blockIdx.x / parts;
  const Row row(p, number);
  const int32_t entry = row.load_entry(threadIdx.x % 32);
  const int32_t length = row.load_length();
  store_candidates(p, number, row, entry, length, part, parts);
}

}  // namespace fastkernels::dsa_topk_indexer
