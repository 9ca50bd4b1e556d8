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

constexpr int kQ = kKeysBytes;
constexpr int kGates = kQ + kKeysBytes;
constexpr int kSystem = kGates + kGatesPieces * 16;
constexpr int kInverse = 0;  // in the place of q and k, which are not needed any more
static_assert(kChunk * kPitch * 4 <= kGates, "it fits");
constexpr int kScratch = kSystem + kChunk * kPitch * 4;
constexpr int kPrepareBytes = kScratch + 128;
static_assert(FK_THREADS == kPrepareThreads && FK_SHARED_BYTES == kPrepareBytes,
              "kernels/__init__.py says otherwise");

__device__ __forceinline__ void prepare_chunk(const Params& p, int32_t number, uint32_t head) {
  unsigned char* shared = ptx::dynamic_shared();
  const uint32_t q_head = gdn::find_q_head(head, p.num_v_heads, p.num_q_heads);
  if (p.num_seqs == 1) prefetch_keys<kPrepareThreads>(p, q_head, number * kChunk);
  const Chunk chunk =
      find_chunk<kPrepareThreads>(p, number, reinterpret_cast<int32_t*>(shared + kScratch));
  if (chunk.length == 0) return;
  copy_keys<kPrepareThreads, FK_ALIGNED>(shared, p.k, p.k_stride_t, q_head * p.k_stride_h, chunk,
                                         threadIdx.x);
  copy_keys<kPrepareThreads, FK_ALIGNED>(shared + kQ, p.q, p.q_stride_t, q_head * p.q_stride_h,
                                         chunk, threadIdx.x);
  ptx::copy_commit();
  auto* gates = reinterpret_cast<ChunkGates*>(shared + kGates);
  if (threadIdx.x < kWarpSize) {
    compute_gates(load_gates(p, head, chunk), load_head_value(p.A_log, head),
                  load_head_value(p.dt_bias, head), chunk.length, gates);
  }
  ptx::copy_wait<0>();
  __syncthreads();
  unsigned char* to = find_prepared(p, number, head);
  prepare({shared + kQ, shared, gates, reinterpret_cast<float*>(shared + kSystem),
           reinterpret_cast<float*>(shared + kInverse), to, to + kPairsBytes});
  if (threadIdx.x < kGatesPieces) {
    reinterpret_cast<uint4*>(to + kPreparedPairs)[threadIdx.x] =
        reinterpret_cast<const uint4*>(gates)[threadIdx.x];
  }
}

#else

using Block = Sequence<FK_ROWS_PER_BLOCK, FK_STAGES, false, FK_ALIGNED>;
static_assert(FK_THREADS == kChainThreads && FK_SHARED_BYTES == Block::kSharedBytes,
              "kernels/__init__.py says otherwise");

#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(FK_THREADS, FK_PREPARE ? 3 : 1)
    gdn_prefill_chunk_split(const __grid_constant__ Params p) {
#if FK_PREPARE
  ptx::launch_dependents();
  prepare_chunk(p, static_cast<int32_t>(blockIdx.x / p.num_v_heads), blockIdx.x % p.num_v_heads);
#else
  const Part part = find_part<Block::kSlabs>(p);
  Block block{
      p, ptx::dynamic_shared(), part.head, part.q_head, part.slab * FK_ROWS_PER_BLOCK, 0.0f, 0.0f};
  block.run(part.position);
#endif
}

}  // namespace fastkernels::gdn_prefill
