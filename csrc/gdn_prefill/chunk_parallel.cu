// gdn_prefill, route chunk_parallel: segments of a sequence side by side, for few, long ones.
//
// Plan: over a segment the recurrence is S <- S A + B. After `prepare` of chunk_split, which makes
// T, P and the gates of every chunk, variant `transfer` makes A and B of every segment but the last
// one of each sequence (transfer.cuh; the first one has B alone, from the sequence's own state),
// `scan` the states at the cuts (scan.cuh), and `chain` takes every segment through the chain with
// output from its own state on, as `chunk_split` does a sequence. So it sees each of those states a
// second time, and says where it ends elsewhere than the matrices said; `mend` takes the segments
// behind such a cut through the chain again, one after the other. With fewer tokens than a segment
// has, `prepare` and `chain` are all. Each launch starts while the one before ends, and waits for
// it before it reads what was left in the workspace: all of it by then, since each launch has a
// block that waits. A kernel lets the next one in when its blocks are nearly done: what is
// resident earlier does nothing but wait.
//
// Why the matrices are not enough: what A is off by is some 1e-3 of A's rows, not of what S A is.
// Where a segment erases most of S, the former is the larger one, and no later key mends it: a
// state 1,700 times what remained ended off by 0.3 to 0.9 of that. The chain from S itself sees
// what it has left of a state and takes that away with the next key.
//
// Shared memory: `kSharedBytes` of each. Barriers: see chain.cuh, transfer.cuh and scan.cuh; 0.
//
// Constraints: head size 128; num_v_heads a multiple of num_q_heads. Blocks: `transfer` 256 / rows
// a head, `scan` 8, `chain` and `mend` 128 / rows, fastest, then heads; then numbers of cuts
// (`transfer`), sequences or, if they are fewer, numbers of cuts (`scan`, `mend`), numbers of
// segments (`chain`; at least one), see segments.cuh. In place is safe: `transfer` keeps the state
// of a sequence of several segments, which the last one overwrites.
//
// Macros: FK_TRANSFER, FK_SCAN, FK_CHAIN, FK_MEND (1: that variant); FK_ROWS_PER_BLOCK (16, 32,
// 64); FK_SEGMENT_CHUNKS (2 or more); FK_ALIGNED (q, k, v, output in 16-byte pieces, states in
// 8-byte pairs); FK_THREADS and FK_SHARED_BYTES, what the launcher gives.
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

// How far a segment's end by the chain may be from that by the matrices, in units of the former:
// of the block's rows, by the root of the sum of squares. Both are off by 2.5e-3, most of it not by
// the same: 2.5e-3 to 3.7e-3 apart where nothing is wrong. The limit of a state is 5e-3.
constexpr float kApart = 4.5e-3f;

// Segments, each as `Sequence` takes a whole sequence.
struct Segments : Sequence<FK_ROWS_PER_BLOCK, kStages, Maker::kKernel, FK_ALIGNED> {
  using Workspace = Sequence<FK_ROWS_PER_BLOCK, kStages, Maker::kKernel, true>;

  static __device__ __forceinline__ Segments of(const Params& p, const Part& part) {
    return {{p, ptx::dynamic_shared(), part.head, part.q_head, part.slab * FK_ROWS_PER_BLOCK, 0.0f,
             0.0f}};
  }

  __device__ __forceinline__ int32_t* scratch() const {
    return reinterpret_cast<int32_t*>(shared + kScratch);
  }

  // This block's rows, and its word, of a cut of the sequence.
  __device__ __forceinline__ CutStates cut_at(const Place& place, int32_t cut) const {
    CutStates at = find_cut(p, first_cut_of<kSegment>(place) + cut, head);
    at.transfer += column * kHeadSize;
    at.state += column * kHeadSize;
    at.is_off += column / FK_ROWS_PER_BLOCK;
    return at;
  }

  // Null where a sequence's state is not to be stored.
  __device__ __forceinline__ float* new_state_of(int32_t seq) const {
    const SlotIndex write = load_slot(p.write_indices, p.index_words, p.write_stride, seq);
    if (!is_slot(write, p.index_words, p.num_slots)) return nullptr;
    return state_at(static_cast<float*>(p.new_state), write, p.new_state_stride_slot,
                    p.new_state_stride_h);
  }

  // Whether the matrices said otherwise of the state S that the chain has at a cut, by all threads.
  // What is not finite in both is no difference. Scaled by a power of two, so that no square
  // overflows and none that matters vanishes.
  __device__ __forceinline__ bool is_off(const StateTiles& S, const Place& place,
                                         int32_t cut) const {
    const uint32_t warp = threadIdx.x / kWarpSize;
    const bool is_state_warp = threadIdx.x < kGroupThreads;
    auto* sums = reinterpret_cast<float2*>(scratch() + 4);  // behind each state warp's maximum
    StateTiles said = {};
    bool is_odd = false;
    if (is_state_warp) {
      Workspace::load_state(said, cut_at(place, cut).state);
      int32_t largest = 0;
      each_element([&](int r, int j, int i) {
        const uint32_t own = magnitude(S[r][j][i]), other = magnitude(said[r][j][i]);
        const bool is_finite = own < kInfinity, is_other_finite = other < kInfinity;
        is_odd |= is_finite != is_other_finite;
        if (is_finite && is_other_finite) largest = max(largest, static_cast<int32_t>(own));
      });
      largest = warp_max(largest);
      if (threadIdx.x % kWarpSize == 0) scratch()[warp] = largest;
    }
    const bool is_any_odd = __syncthreads_count(is_odd) > 0;
    if (is_state_warp) {
      const int32_t* by_warp = scratch();
      const int32_t largest = max(max(by_warp[0], by_warp[1]), max(by_warp[2], by_warp[3]));
      const float scale = __uint_as_float(max(254 - (largest >> 23), 1) << 23);
      float2 sum = {0.0f, 0.0f};  // of the difference, of S
      each_element([&](int r, int j, int i) {
        if (magnitude(S[r][j][i]) >= kInfinity) return;
        const float own = scale * S[r][j][i], apart = own - scale * said[r][j][i];
        sum.x = fmaf(apart, apart, sum.x);
        sum.y = fmaf(own, own, sum.y);
      });
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        sum.x += __shfl_xor_sync(0xffffffffu, sum.x, distance);
        sum.y += __shfl_xor_sync(0xffffffffu, sum.y, distance);
      }
      if (threadIdx.x % kWarpSize == 0) sums[warp] = sum;
    }
    __syncthreads();
    const float apart = (sums[0].x + sums[1].x) + (sums[2].x + sums[3].x);
    const float own = (sums[0].y + sums[1].y) + (sums[2].y + sums[3].y);
    return is_any_odd || apart > kApart * kApart * own;
  }

 private:
  static constexpr uint32_t kInfinity = 0x7f800000u;

  template <typename F>
  static __device__ __forceinline__ void each_element(F visit) {
#pragma unroll
    for (int r = 0; r < Exchange::kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4 * Exchange::kColumnTiles; ++i) visit(r, i / 4, i % 4);
    }
  }
};

#if FK_MEND

struct Block {
  static constexpr int kThreads = Segments::kThreads, kSharedBytes = Segments::kSharedBytes;

  static __device__ __forceinline__ void enter(const Params& p) {
    const Part part = find_part<Segments::kSlabs>(p);
    run(p, Segments::of(p, part), part.position);
    if (blockIdx.x == 0) ptx::wait_for_dependency();
  }

 private:
  static __device__ __forceinline__ void run(const Params& p, const Segments& block,
                                             int32_t position) {
    const Place place = find_first_cut<kThreads, kSegment>(p, position, block.scratch());
    if (place.idx != 0) return;
    const SlotIndex read = load_slot(p.read_indices, p.index_words, p.read_stride, place.seq);
    if (!is_slot(read, p.index_words, p.num_slots)) return;
    ptx::wait_for_dependency();
    const bool is_state_warp = threadIdx.x < kGroupThreads;
    Segments::StateTiles S = {};
    int32_t done = 0, cut = find_off(block, place, 0);
    bool is_there = false;  // S is the state at the cut
    while (cut < place.num_cuts) {
      const int32_t idx = cut + 1;  // of the segment behind
      const Tokens tokens = segment_of<kSegment>(place.tokens, idx);
      const int32_t num_chunks = (tokens.length - 1) / kChunk + 1;
      RawGates raw = block.load_first(tokens);
      if (is_state_warp && !is_there) {
        Segments::Workspace::load_state(S, block.cut_at(place, cut).transfer);
      }
      block.advance(S, tokens, num_chunks, first_chunk_of<kSegment>(place, idx), raw, done);
      if (idx == place.num_cuts) {
        float* new_state = block.new_state_of(place.seq);
        if (is_state_warp && new_state != nullptr) Segments::store_state(S, new_state);
        return;
      }
      done += num_chunks;
      // Where the segment ends as the matrices said, what `chain` made of the next one stands.
      is_there = block.is_off(S, place, idx);
      cut = is_there ? idx : find_off(block, place, idx + 1);
    }
  }

  // The first cut from `from` on that `chain` says to be off; num_cuts where there is none.
  static __device__ __forceinline__ int32_t find_off(const Segments& block, const Place& place,
                                                     int32_t from) {
    int32_t* found = block.scratch() + 16;
    if (threadIdx.x == 0) *found = place.num_cuts;
    __syncthreads();
    for (int32_t cut = from + threadIdx.x; cut < place.num_cuts; cut += kThreads) {
      if (*block.cut_at(place, cut).is_off == 0) continue;
      atomicMin(found, cut);
      break;
    }
    __syncthreads();
    return *found;
  }
};

#else

struct Block : Segments {
  static __device__ __forceinline__ void enter(const Params& p) {
    const Part part = find_part<kSlabs>(p);
    const Block block{Segments::of(p, part)};
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
    const Place segment =
        find_place<kThreads, kSegment, Numbering::kSegments>(p, number, scratch());
    if (segment.idx < 0) return;
    const int32_t seq = segment.seq, idx = segment.idx;
    const SlotIndex read = load_slot(p.read_indices, p.index_words, p.read_stride, seq);
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
    float* new_state = is_last ? new_state_of(seq) : nullptr;
    if (tokens.length == 0) {
      if (new_state != nullptr && new_state != state) copy_state(new_state, state);
      return;
    }
    const bool is_state_warp = threadIdx.x < kGroupThreads;
    StateTiles S = {};
    if (is_state_warp) {
      if (segment.num_cuts == 0) {
        if (state != nullptr) load_state(S, state);
      } else {
        const CutStates from = cut_at(segment, max(idx - 1, 0));
        ptx::wait_for_dependency();
        Workspace::load_state(S, idx == 0 ? from.transfer : from.state);
      }
    }
    advance(S, tokens, (tokens.length - 1) / kChunk + 1, first_chunk_of<kSegment>(segment, idx),
            raw);
    ptx::launch_dependents();
    if (is_state_warp && new_state != nullptr) store_state(S, new_state);
    if (is_last) return;
    const CutStates to = cut_at(segment, idx);
    const bool is_elsewhere = is_off(S, segment, idx);
    if (is_state_warp && is_elsewhere) Workspace::store_state(S, to.transfer);
    if (threadIdx.x == 0) *to.is_off = is_elsewhere;
  }
};

#endif

#endif

static_assert(FK_THREADS == Block::kThreads && FK_SHARED_BYTES == Block::kSharedBytes,
              "kernels/__init__.py says otherwise");

}  // namespace

extern "C" __global__ void __launch_bounds__(FK_THREADS, kBlocks)
    gdn_prefill_chunk_parallel(const __grid_constant__ Params p) {
  Block::enter(p);
}

}  // namespace fastkernels::gdn_prefill
