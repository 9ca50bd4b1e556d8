// gdn_prefill, route chunk_warp: a warp alone takes 16 rows of a state from chunk to chunk.
//
// Plan: `prepare` of chunk_split first; variant `chain` takes the state through each sequence,
// `rows_per_block` rows a block, one warp for each 16 of them, which exchange nothing
// (warp_chain.cuh), with `stages` chunks' inputs on their way. The second launch starts while the
// first one ends: it loads states, q, k and v before it waits.
//
// Shared memory: `Sequence::kSharedBytes`. Barriers: see warp_chain.cuh.
//
// Constraints: head size 128; num_v_heads a multiple of num_q_heads. Blocks as for chunk_split;
// in place is safe.
//
// Macros: FK_ROWS_PER_BLOCK (16, 32, 64); FK_STAGES (3, 4); FK_ALIGNED (q, k, v, output in 16-byte
// pieces, states in 8-byte pairs); FK_THREADS and FK_SHARED_BYTES, what the launcher gives.
#include "gdn_prefill/sequence.cuh"
#include "gdn_prefill/warp_chain.cuh"

namespace fastkernels::gdn_prefill {
namespace {

using Block = Sequence<FK_ROWS_PER_BLOCK, FK_STAGES, Maker::kKernel, FK_ALIGNED,
                       WarpChain<FK_ROWS_PER_BLOCK, FK_STAGES>>;
static_assert(FK_THREADS == Block::kThreads && FK_SHARED_BYTES == Block::kSharedBytes,
              "kernels/__init__.py says otherwise");

}  // namespace

extern "C" __global__ void __launch_bounds__(FK_THREADS, 1)
    gdn_prefill_chunk_warp(const __grid_constant__ Params p) {
  Block::enter(p);
}

}  // namespace fastkernels::gdn_prefill
