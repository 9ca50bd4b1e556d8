// gdn_prefill, route chunk_parallel: segments of a sequence side by side, for few, long ones.
//
// Plan: over a segment the recurrence is S <- S A + B. After `prepare` of chunk_split, which makes
// T, P and the gates of every chunk, variant `transfer` makes A and B of every segment but the last
// one of each sequence (transfer.cuh; the first one has B alone, from the sequence's own state),
// `scan` the states at the cuts (scan.cuh), and `chain` takes every segment through the chain with
// output from its own state on, as `chunk_split` does a sequence. With fewer tokens than a segment
// has, `transfer` and `scan` are not launched. Each launch starts while the one before ends,
// and waits for it before it reads what was left in the workspace: all of it by then, since
// each launch has a block that waits.
//
// Shared memory: `kSharedBytes` of each. Barriers: see chain.cuh, transfer.cuh and scan.cuh.
//
// Constraints: head size 128; num_v_heads a multiple of num_q_heads. Blocks: `transfer` 256 / rows
// a head, `scan` 8, `chain` 128 / rows, fastest, then heads; then numbers of cuts (`transfer`),
// sequences or, if they are fewer, numbers of cuts (`scan`), numbers of segments (`chain`; at least
// one), see segments.cuh. In place is safe: `transfer` keeps the
// state of a sequence of several segments, which the last one overwrites.
//
// Macros: FK_TRANSFER, FK_SCAN, FK_CHAIN (1: that variant); FK_ROWS_PER_BLOCK (16, 32, 64);
// FK_SEGMENT_CHUNKS (2 or more); FK_ALIGNED (q, k, v, output in 16-byte pieces, states in 8-byte
// pairs); FK_THREADS and FK_SHARED_BYTES, what the launcher gives.
#include "gdn_prefill/scan.cuh"
#include "gdn_prefill/segments.cuh"
#include "gdn_prefill/sequence.cuh"
#include "gdn_prefill/transfer.cuh"

namespace fastkernels::gdn_prefill {
namespace {

constexpr int kSegment = FK_SEGMENT_CHUNKS * kChunk;
[[maybe_unused]] constexpr int kStages = 2;

#if FK_TRANSFER

using Block = Transfer<kSegment, FK_ROWS_PER_BLOCK, kStages, FK_ALIGNED>;
constexpr int kBlocks = 2;

#elif FK_SCAN

using Block = Scan<kSegment>;
constexpr int kBlocks = 1;

#else

constexpr int kBlocks = 1;

// One segment, as `Sequence` takes a whole sequence.
struct Block : Sequence<FK_ROWS_PER_BLOCK, kStages, Maker::kKernel, FK_ALIGNED> {
  using Workspace = Sequence<FK_ROWS_PER_BLOCK, kStages, Maker::kKernel, true>;

  static __device__ __forceinline__ void enter(const Params& p) {
    const Part part = find_part<kSlabs>(p);
    const Block block{{p, ptx::dynamic_shared(), part.head, part.q_head,
                       part.slab * FK_ROWS_PER_BLOCK, 0.0f, 0.0f}};
    if (p.num_seqs > 0) {
      block.run(part.position);
    } else if (part.position == 0) {
      block.clear_output(0, p.num_tokens);
    }
    // One block is enough to keep the next kernel from overtaking the earlier ones; others that
    // have nothing to do make room.
    if (blockIdx.x == 0) ptx::wait_for_dependency();
  }

 private:
  __device__ __forceinline__ void run(int32_t number) const {
    const Place segment = find_place<kThreads, kSegment, Numbering::kSegments>(
        p, number, reinterpret_cast<int32_t*>(shared + kScratch));
    if (segment.idx < 0) return;
    const int32_t seq = segment.seq, idx = segment.idx;
    const SlotIndex read = load_slot(p.read_indices, p.index_words, p.read_stride, seq);
    const SlotIndex write = load_slot(p.write_indices, p.index_words, p.write_stride, seq);
    const bool is_padding = !is_slot(read, p.index_words, p.num_slots);
    const bool is_last = idx == segment.num_cuts;
    const Tokens tokens = segment_of<kSegment>(segment.tokens, idx);
    const int64_t end = int64_t{tokens.start} + tokens.length;
    // Tokens of no sequence stand before the first and after the last.
    if (seq == 0 && idx == 0) clear_output(0, tokens.start);
    if (seq + 1 >= p.num_seqs && is_last) clear_output(end, p.num_tokens);
    if (is_padding) {
      clear_output(tokens.start, end);
      return;
    }
    RawGates raw = load_first(tokens);
    const float* state = nullptr;
    if (p.has_state) {
      state =
          state_at(static_cast<const float*>(p.state), read, p.state_stride_slot, p.state_stride_h);
    }
    float* new_state = nullptr;
    if (is_last && is_slot(write, p.index_words, p.num_slots)) {
      new_state = state_at(static_cast<float*>(p.new_state), write, p.new_state_stride_slot,
                           p.new_state_stride_h);
    }
    if (tokens.length == 0) {
      if (new_state != nullptr && new_state != state) copy_state(new_state, state);
      return;
    }
    const bool is_state_warp = threadIdx.x < kGroupThreads;
    float S[Exchange::kTiles][4][4] = {};
    if (is_state_warp) {
      if (segment.num_cuts == 0) {
        if (state != nullptr) load_state(S, state);
      } else {
        const int64_t cut = segment.tokens.start / kSegment + max(idx - 1, 0);
        const CutStates from = find_cut(p, cut, head);
        ptx::wait_for_dependency();
        Workspace::load_state(S, (idx == 0 ? from.transfer : from.state) + column * kHeadSize);
      }
    }
    advance(S, tokens, (tokens.length - 1) / kChunk + 1, first_chunk_of<kSegment>(segment, idx),
            raw);
    if (is_state_warp && new_state != nullptr) store_state(S, new_state);
  }
};

#endif

static_assert(FK_THREADS == Block::kThreads && FK_SHARED_BYTES == Block::kSharedBytes,
              "kernels/__init__.py says otherwise");

}  // namespace

extern "C" __global__ void __launch_bounds__(FK_THREADS, kBlocks)
    gdn_prefill_chunk_parallel(const __grid_constant__ Params p) {
#if !FK_CHAIN
  ptx::launch_dependents();
#endif
  Block::enter(p);
}

}  // namespace fastkernels::gdn_prefill
