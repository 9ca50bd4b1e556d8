// gdn_prefill, route chunk_states: three launches, of which only the second is serial, and that has
// the states alone to do.
//
// Plan: variant `prepare` makes T, P and the gates of every chunk of every head at once
// (prepare.cuh), and leaves them and K in the workspace; variant `chain` takes the state through
// each sequence (states.cuh), `rows_per_block` rows a block, with `stages` chunks' inputs on their
// way, and leaves the state of each chunk's start and U; variant `output` makes the output of every
// chunk at once (output.cuh). Each launch starts while the one before ends.
//
// Shared memory: `kSharedBytes` of each. Barriers: see prepare.cuh, states.cuh and output.cuh.
//
// Constraints: head size 128; num_v_heads a multiple of num_q_heads. Blocks of `prepare` and
// `output`: heads fastest, then chunk numbers; of `chain` as for chunk_fused, where in place is
// safe, too.
//
// Macros: FK_PREPARE, FK_CHAIN, FK_OUTPUT (1: that variant); FK_ROWS_PER_BLOCK (16, 32, 64);
// FK_STAGES (3 or 4); FK_ALIGNED (q, k, v, output in 16-byte pieces, states in 8-byte pairs);
// FK_THREADS and FK_SHARED_BYTES, what the launcher gives.
#include "gdn_prefill/output.cuh"
#include "gdn_prefill/sequence.cuh"
#include "gdn_prefill/states.cuh"

namespace fastkernels::gdn_prefill {
namespace {

#if FK_PREPARE

struct Block {
  static constexpr int kThreads = kPrepareThreads, kSharedBytes = kPrepareBytes;

  static __device__ __forceinline__ void enter(const Params& p) {
    const Own only = load_only(p);
    ptx::launch_dependents();
    const auto number = static_cast<int32_t>(blockIdx.x / p.num_v_heads);
    const uint32_t head = blockIdx.x % p.num_v_heads;
    if (prepare_chunk<FK_ALIGNED>(p, only, number, head).length == 0) return;
    if (threadIdx.x < kHeadSize) {
      reinterpret_cast<int32_t*>(find_left(p, number, head) + kLeftBad)[threadIdx.x] = kChunk;
    }
    // Heads that share K leave it once.
    const uint32_t q_head = gdn::find_q_head(head, p.num_v_heads, p.num_q_heads);
    if (head == 0 || gdn::find_q_head(head - 1, p.num_v_heads, p.num_q_heads) != q_head) {
      const auto* keys = reinterpret_cast<const uint4*>(ptx::dynamic_shared());
      auto* to = reinterpret_cast<uint4*>(find_keys(p, number, q_head));
#pragma unroll
      for (int i = 0; i < kKeysBytes / 16 / kThreads; ++i) {
        to[kThreads * i + threadIdx.x] = keys[kThreads * i + threadIdx.x];
      }
    }
  }
};
constexpr int kBlocks = 3;

#elif FK_OUTPUT

using Block = Output<FK_ALIGNED>;
constexpr int kBlocks = 2;

#else

using Block = Sequence<FK_ROWS_PER_BLOCK, FK_STAGES, Maker::kKernel, FK_ALIGNED,
                       StateChain<FK_ROWS_PER_BLOCK, FK_STAGES> >;
constexpr int kBlocks = 1;

#endif

static_assert(FK_THREADS == Block::kThreads && FK_SHARED_BYTES == Block::kSharedBytes,
              "kernels/__init__.py says otherwise");

}  // namespace

extern "C" __global__ void __launch_bounds__(FK_THREADS, kBlocks)
    gdn_prefill_chunk_states(const __grid_constant__ Params p) {
  Block::enter(p);
}

}  // namespace fastkernels::gdn_prefill
