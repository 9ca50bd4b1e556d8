// Sequences in segments of `kSegment` tokens, whose states are found side by side: where they lie,
// and what is left in the workspace for each place where a sequence is cut.
//
// Cut j of a sequence is between its segments j and j + 1. A sequence that starts at token s has
// its cuts numbered from s / kSegment on: the next one starts later by at least kSegment tokens a
// cut, so that each has a number of its own, below `cut_bound` (params.h). Segments are one more
// than cuts, and one where there is no token: those of sequence i are numbered from s / kSegment +
// i on.
#pragma once

#include <cstdint>

#include "gdn_prefill/common.cuh"

namespace fastkernels::gdn_prefill {

// A segment, or a cut, by its number.
struct Place {
  int32_t seq, idx;  // idx: within its sequence; below 0: nothing has the number
  int32_t num_cuts;  // of the sequence
  Tokens tokens;     // of the sequence
};

enum class Numbering { kSegments, kCuts };

template <int kSegment, Numbering kNumbering>
__device__ __forceinline__ Place place_at(Tokens tokens, int32_t seq, int32_t number) {
  constexpr bool kIsCut = kNumbering == Numbering::kCuts;
  const int32_t num_cuts = tokens.length > 0 ? (tokens.length - 1) / kSegment : 0;
  const int64_t idx = number - (tokens.start / kSegment + (kIsCut ? 0 : int64_t{seq}));
  const bool is_there = idx >= 0 && idx < num_cuts + (kIsCut ? 0 : 1);
  return {seq, is_there ? static_cast<int32_t>(idx) : -1, num_cuts, tokens};
}

// Found by all threads of the block together. `scratch`: one word a warp and those of a Place.
template <int kThreads, int kSegment, Numbering kNumbering>
__device__ __forceinline__ Place find_place(const Params& p, int32_t number, int32_t* scratch) {
  if (p.num_seqs == 1) {
    return place_at<kSegment, kNumbering>(tokens_of(p, load_own(p, 0)), 0, number);
  }
  Place* found = reinterpret_cast<Place*>(scratch + kThreads / kWarpSize);
  if (threadIdx.x == 0) found->idx = -1;
  // A segment's number is above that of its sequence by the number of cuts at most.
  const int32_t least =
      kNumbering == Numbering::kCuts ? 0 : max(number - p.num_tokens / kSegment, 0);
  int32_t before = 0;
  if (least > 0) {
    before = largest_offset<kThreads>(p, least, scratch);
    __syncthreads();
  }
  for (int32_t first = least; first < p.num_seqs; first += kThreads) {
    const Tokens tokens = find_tile<kThreads>(p, first, &before, scratch);
    const int32_t seq = first + static_cast<int32_t>(threadIdx.x);
    const Place place = place_at<kSegment, kNumbering>(tokens, seq, number);
    const bool is_found = seq < p.num_seqs && place.idx >= 0;
    if (is_found) *found = place;
    if (__syncthreads_count(is_found) > 0) break;
  }
  __syncthreads();
  return *found;
}

// The first cut of the sequence at `position`, found as above; positions are those of sequences or
// of cuts, whichever are fewer. idx 0 where there is one.
template <int kThreads, int kSegment>
__device__ __forceinline__ Place find_first_cut(const Params& p, int32_t position,
                                                int32_t* scratch) {
  if (p.num_seqs > p.num_tokens / kSegment) {
    return find_place<kThreads, kSegment, Numbering::kCuts>(p, position, scratch);
  }
  const Tokens tokens = find_tokens<kThreads>(p, position, load_own(p, position), scratch);
  return place_at<kSegment, Numbering::kCuts>(tokens, position, tokens.start / kSegment);
}

template <int kSegment>
__device__ __forceinline__ Tokens segment_of(Tokens tokens, int32_t idx) {
  const int32_t skipped = idx * kSegment;
  return {tokens.start + skipped, min(tokens.length - skipped, kSegment)};
}

template <int kSegment>
__device__ __forceinline__ int64_t first_cut_of(const Place& place) {
  return place.tokens.start / kSegment;
}

// The number of a segment's first chunk.
template <int kSegment>
__device__ __forceinline__ int64_t first_chunk_of(const Place& place, int32_t idx) {
  return place.tokens.start / kChunk + int64_t{place.seq} + int64_t{idx} * (kSegment / kChunk);
}

// ---- the workspace, behind what `prepare` leaves there ------------------------------------------

// Of each cut and head two [128, 128] float32, rows of V or, in a transfer matrix, of the K of the
// segment's start, K last; and a word for each of the blocks that share a state's rows.
//   transfer: the unit matrix, taken through the segment before the cut as a state is, but with
//             v = 0; it takes what a state S is to S transfer. Of a sequence's first segment, which
//             needs none, the state it starts from: new_state may lie over it before all have read.
//             After `chain`, where `is_off`, the state that the chain ended with.
//   state:    where the segment before the cut ends when it starts from zeros, a sequence's first
//             one from the sequence's own state; after `scan` where it ends by the matrices.
//   is_off:   after `chain`, whether that is another state than the one that the chain ended with.
constexpr int kStateFloats = kHeadSize * kHeadSize;
constexpr int kCutBytes = 2 * 4 * kStateFloats + 128;
static_assert(kCutBytes == 131200, "kernels/__init__.py has the same number");

struct CutStates {
  float *transfer, *state;
  int32_t* is_off;
};

__device__ __forceinline__ CutStates find_cut(const Params& p, int64_t number, uint32_t head) {
  const int64_t num_chunks = int64_t{p.num_tokens / kChunk} + p.num_seqs;  // `chunk_bound`
  unsigned char* base = find_prepared(p, num_chunks, 0);
  auto* transfer = reinterpret_cast<float*>(base + (number * p.num_v_heads + head) * kCutBytes);
  float* state = transfer + kStateFloats;
  return {transfer, state, reinterpret_cast<int32_t*>(state + kStateFloats)};
}

}  // namespace fastkernels::gdn_prefill
