// gdn_prefill, route chunk_cluster: one launch, a cluster of blocks for each head of a sequence.
//
// Plan: each of the `cluster` blocks takes 128 / cluster rows of one head's state through one
// sequence (chain.cuh). Beside that, 8 further warps of each make the matrices of every
// `cluster`-th chunk (prepare.cuh) and leave them in the workspace, which stays in L2, for all
// blocks; a barrier of the cluster ends a round of `cluster` chunks. The chain waits for the first
// round alone: a round takes 2 to 3 us (reckoned), the chain 1.2 us a chunk (H200, before).
//
// Not through distributed shared memory: a chunk's 11 KB would go to every block, 86 KB out of each
// at the same time; out of L2 each block takes a chunk when the chain comes to it.
//
// Shared memory: `Sequence::kSharedBytes`. Barriers: see chain.cuh and prepare.cuh; of the cluster
// one a round.
//
// Constraints: head size 128; num_v_heads a multiple of num_q_heads; blocks as for chunk_fused,
// where in place is safe, too. All blocks of a cluster have the same sequence and head, so that all
// or none of them come to its barriers.
//
// Macros: FK_CLUSTER (4, 8); FK_ALIGNED (q, k, v, output in 16-byte pieces, states in 8-byte
// pairs); FK_THREADS and FK_SHARED_BYTES, what the launcher gives.
#include "gdn_prefill/sequence.cuh"

namespace fastkernels::gdn_prefill {
namespace {

using Block = Sequence<kHeadSize / FK_CLUSTER, 2, Maker::kCluster, FK_ALIGNED>;
static_assert(FK_THREADS == Block::kThreads && FK_SHARED_BYTES == Block::kSharedBytes,
              "kernels/__init__.py says otherwise");

}  // namespace

extern "C" __global__ void __cluster_dims__(FK_CLUSTER, 1, 1) __launch_bounds__(FK_THREADS, 1)
    gdn_prefill_chunk_cluster(const __grid_constant__ Params p) {
  Block::enter(p);
}

}  // namespace fastkernels::gdn_prefill
