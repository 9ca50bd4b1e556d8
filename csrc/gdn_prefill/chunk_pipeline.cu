// gdn_prefill, route chunk_pipeline: what a chunk needs and the chain through the states side by
// side, in one launch.
//
// Plan: variant `clear` zeroes the words by which blocks wait for each other; in variant
// `pipeline` blocks make the chunks' entries in the order in which the chains want them (wy.cuh),
// and take `rows_per_block` rows of a state through a sequence as entries come (pipeline.cuh). The
// second launch starts while the first one ends.
//
// Shared memory: `Pipeline::kSharedBytes`, 2 blocks an SM. Barriers: 0 and those of prepare.cuh and
// pipeline.cuh.
//
// Constraints: head size 128; num_v_heads a multiple of num_q_heads. Blocks of `clear`: an entry a
// thread; of `pipeline`: any number, best as many as are resident. In place is safe, as for
// chunk_fused.
//
// Macros: FK_CLEAR (1: that variant); FK_ROWS_PER_BLOCK (16, 32); FK_ALIGNED (q, k, v, output in
// 16-byte pieces, states in 8-byte pairs); FK_THREADS and FK_SHARED_BYTES, what the launcher gives.
#include "gdn_prefill/pipeline.cuh"

namespace fastkernels::gdn_prefill {
namespace {

#if FK_CLEAR

static_assert(FK_THREADS == kPipelineThreads && FK_SHARED_BYTES == 0,
              "kernels/__init__.py says otherwise");

__device__ __forceinline__ void clear(const Params& p) {
  ptx::launch_dependents();
  const int64_t idx = int64_t{blockIdx.x} * kPipelineThreads + threadIdx.x;
  if (idx >= num_numbers(p) * p.num_v_heads) return;
  *is_made(find_wy(p, 0, 0) + idx * kWyBytes) = 0;
  if (idx > 0) return;
#pragma unroll
  for (int i = 0; i < kWyQueueWords; ++i) wy_queue(p)[i] = 0;
}

#else

using Block = Pipeline<FK_ROWS_PER_BLOCK, FK_ALIGNED>;
static_assert(FK_THREADS == Block::kThreads && FK_SHARED_BYTES == Block::kSharedBytes,
              "kernels/__init__.py says otherwise");

#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(FK_THREADS, 2)
    gdn_prefill_chunk_pipeline(const __grid_constant__ Params p) {
#if FK_CLEAR
  clear(p);
#else
  Block::enter(p);
#endif
}

}  // namespace fastkernels::gdn_prefill
