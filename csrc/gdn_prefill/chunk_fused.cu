// gdn_prefill, route chunk_fused: one launch, and all of a chunk in one block.
//
// Plan: a block takes `rows_per_block` rows of one head's state through one sequence. Per chunk its
// 8 warps make T and P (prepare.cuh), then advance the state and write the output (chain.cuh);
// blocks of one head repeat the first part. The next chunk's inputs are on their way meanwhile.
// Where a sequence has few chunks this is faster than a second launch.
//
// Shared memory: `Sequence::kSharedBytes`. Barriers: see chain.cuh and prepare.cuh.
//
// Constraints: head size 128; num_v_heads a multiple of num_q_heads; blocks as `find_part` has
// them, for one sequence where there is none. In place is safe: a block reads its rows before it
// writes them, and no other block has them.
//
// Macros: FK_ROWS_PER_BLOCK (16, 32, 64); FK_ALIGNED (q, k, v, output in 16-byte pieces, states in
// 8-byte pairs); FK_THREADS and FK_SHARED_BYTES, what the launcher gives.
#include "gdn_prefill/sequence.cuh"

namespace fastkernels::gdn_prefill {
namespace {

using Block = Sequence<FK_ROWS_PER_BLOCK, 2, Maker::kBlock, FK_ALIGNED>;
static_assert(FK_THREADS == kChainThreads && FK_SHARED_BYTES == Block::kSharedBytes,
              "kernels/__init__.py says otherwise");
static_assert(kChainThreads == kPrepareThreads, "the same warps do both");

}  // namespace

extern "C" __global__ void __launch_bounds__(kChainThreads, 1)
    gdn_prefill_chunk_fused(const __grid_constant__ Params p) {
  Block::enter(p);
}

}  // namespace fastkernels::gdn_prefill
