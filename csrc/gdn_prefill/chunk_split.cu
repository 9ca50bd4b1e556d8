// gdn_prefill, route chunk_split: what does not need the state in a launch of its own.
//
// Plan: variant `prepare` makes T, P and the gates of every chunk of every head at once
// (prepare.cuh) and leaves them in the workspace; variant `chain` takes the state through each
// sequence (split_chain.cuh), `rows_per_block` rows a block, with `stages` chunks' inputs on their
// way. The second launch starts while the first one ends: it loads states, q, k and v before it
// waits.
//
// Shared memory: `Sequence::kSharedBytes`, `kPrepareBytes`. Barriers: see split_chain.cuh
// (chain.cuh with 64 rows) and prepare.cuh.
//
// Constraints: head size 128; num_v_heads a multiple of num_q_heads. Blocks of `prepare`: heads
// fastest, then chunk numbers; of `chain` as for chunk_fused, where in place is safe, too.
//
// Macros: FK_PREPARE (1: that variant, 0: `chain`); FK_ROWS_PER_BLOCK (16, 32, 64); FK_STAGES (2 to
// 4); FK_ALIGNED (q, k, v, output in 16-byte pieces, states in 8-byte pairs); FK_THREADS and
// FK_SHARED_BYTES, what the launcher gives.
#include <type_traits>

#include "gdn_prefill/sequence.cuh"
#include "gdn_prefill/split_chain.cuh"

namespace fastkernels::gdn_prefill {
namespace {

#if FK_PREPARE

static_assert(FK_THREADS == kPrepareThreads && FK_SHARED_BYTES == kPrepareBytes,
              "kernels/__init__.py says otherwise");

#else

// With 64 rows state warps want more registers than a thread of 12 warps has.
using Way = std::conditional_t<FK_ROWS_PER_BLOCK <= 32, SplitChain<FK_ROWS_PER_BLOCK, FK_STAGES>,
                               Chain<FK_ROWS_PER_BLOCK> >;
using Block = Sequence<FK_ROWS_PER_BLOCK, FK_STAGES, Maker::kKernel, FK_ALIGNED, Way>;
static_assert(FK_THREADS == Block::kThreads && FK_SHARED_BYTES == Block::kSharedBytes,
              "kernels/__init__.py says otherwise");

#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(FK_THREADS, FK_PREPARE ? 3 : 1)
    gdn_prefill_chunk_split(const __grid_constant__ Params p) {
#if FK_PREPARE
  const Own only = load_only(p);
  ptx::launch_dependents();
  prepare_chunk<FK_ALIGNED>(p, only, static_cast<int32_t>(blockIdx.x / p.num_v_heads),
                            blockIdx.x % p.num_v_heads);
#else
  Block::enter(p);
#endif
}

}  // namespace fastkernels::gdn_prefill
