// gdn_prefill, route chunk_split: what does not need the state in a launch of its own.
//
// Plan: variant `prepare` makes T, P and the gates of every chunk of every head at once
// (prepare.cuh) and leaves them in the workspace; variant `chain` takes the state through each
// sequence (chain.cuh), `rows_per_block` rows a block, with `stages` chunks' inputs on their way.
// The second launch starts while the first one ends: it loads states, q, k and v before it waits.
//
// Shared memory: `Sequence::kSharedBytes`, `kPrepareBytes`. Barriers: see chain.cuh and
// prepare.cuh.
//
// Constraints: head size 128; num_v_heads a multiple of num_q_heads. Blocks of `prepare`: heads
// fastest, then chunk numbers; of `chain` as for chunk_fused, where in place is safe, too.
//
// Macros: FK_PREPARE (1: that variant, 0: `chain`); FK_ROWS_PER_BLOCK (16, 32, 64); FK_STAGES (2 to
// 4); FK_ALIGNED (q, k, v, output in 16-byte pieces, states in 8-byte pairs); FK_THREADS and
// FK_SHARED_BYTES, what the launcher gives.
#include "gdn_prefill/sequence.cuh"

namespace fastkernels::gdn_prefill {
namespace {

#if FK_PREPARE

constexpr int kScratch = kMakerBytes;
constexpr int kPrepareBytes = kScratch + 128;
static_assert(FK_THREADS == kPrepareThreads && FK_SHARED_BYTES == kPrepareBytes,
              "kernels/__init__.py says otherwise");

__device__ __forceinline__ void prepare_chunk(const Params& p, const Own& only, int32_t number,
                                              uint32_t head) {
  unsigned char* shared = ptx::dynamic_shared();
  const float A_log = load_head_value(p.A_log, head), dt_bias = load_head_value(p.dt_bias, head);
  const uint32_t q_head = gdn::find_q_head(head, p.num_v_heads, p.num_q_heads);
  const bool is_only = p.num_seqs == 1;
  Chunk guess = {0, 0};
  RawGates raw = {};
  if (is_only) {
    guess = {number * kChunk, min(p.num_tokens - number * kChunk, kChunk)};
    raw = load_chunk<FK_ALIGNED>(p, head, q_head, guess, shared);
  }
  const Chunk chunk = is_only ? chunk_at(tokens_of(p, only), 0, number)
                              : find_chunk<kPrepareThreads>(
                                    p, number, reinterpret_cast<int32_t*>(shared + kScratch));
  if (!(chunk == guess) || chunk.length == 0) {
    finish_copies();
    if (chunk.length == 0) return;
    raw = load_chunk<FK_ALIGNED>(p, head, q_head, chunk, shared);
  }
  make_chunk(p, head, A_log, dt_bias, number, chunk.length, raw, shared);
}

#else

using Block = Sequence<FK_ROWS_PER_BLOCK, FK_STAGES, Maker::kKernel, FK_ALIGNED>;
static_assert(FK_THREADS == kChainThreads && FK_SHARED_BYTES == Block::kSharedBytes,
              "kernels/__init__.py says otherwise");

#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(FK_THREADS, FK_PREPARE ? 3 : 1)
    gdn_prefill_chunk_split(const __grid_constant__ Params p) {
#if FK_PREPARE
  const Own only = load_only(p);
  ptx::launch_dependents();
  prepare_chunk(p, only, static_cast<int32_t>(blockIdx.x / p.num_v_heads),
                blockIdx.x % p.num_v_heads);
#else
  Block::enter(p);
#endif
}

}  // namespace fastkernels::gdn_prefill
