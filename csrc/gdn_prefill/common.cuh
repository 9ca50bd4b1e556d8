// What the kernels of gdn_prefill share: where sequences and chunks lie, gates of a chunk, and
// tiles of bfloat16 in shared memory.
#pragma once

#include <cstdint>

#include "common/gdn.cuh"
#include "common/ptx_sm90.cuh"
#include "gdn_prefill/params.h"

namespace fastkernels::gdn_prefill {

using namespace gdn;

constexpr uint32_t kWarpSize = 32;

// All of this thread's copies have come.
__device__ __forceinline__ void finish_copies() {
  ptx::copy_commit();
  ptx::copy_wait<0>();
}

// ---- sequences ----------------------------------------------------------------------------------

// An offset as loaded. Twice the same word where it has only one.
struct RawOffset {
  int32_t low, high;
};

__device__ __forceinline__ RawOffset load_raw_offset(const Params& p, int64_t idx) {
  const int32_t* words = static_cast<const int32_t*>(p.cu_seqlens);
  words += idx * p.cu_stride << (p.offset_words - 1);
  return {ptx::load_constant(words), ptx::load_constant(words + p.offset_words - 1)};
}

// As it counts: clamped to [0, num_tokens]. Offsets come from the device and are not trusted.
__device__ __forceinline__ int32_t clamp_offset(const Params& p, RawOffset raw) {
  if (raw.high < 0) return 0;
  const bool is_beyond = (p.offset_words == 2 && raw.high > 0) ||
                         static_cast<uint32_t>(raw.low) > static_cast<uint32_t>(p.num_tokens);
  return is_beyond ? p.num_tokens : raw.low;
}

__device__ __forceinline__ int32_t load_offset(const Params& p, int64_t idx) {
  return clamp_offset(p, load_raw_offset(p, idx));
}

__device__ __forceinline__ int32_t warp_max(int32_t x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = max(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

// A sequence's tokens: `length` of them from `start` on. An offset counts as the largest so far.
struct Tokens {
  int32_t start, length;

  __device__ __forceinline__ bool operator==(const Tokens& other) const {
    return start == other.start && length == other.length;
  }
};

// A sequence's own offsets. Those of a sequence that is the only one are on their way since a
// kernel's first instructions. Most likely they are 0 and `num_tokens`: what is wanted then is on
// its way, too, before they are there, and comes again where they say otherwise, each piece by the
// same thread to the same place. That is one access of memory less in a row.
struct Own {
  RawOffset start, next;
};

__device__ __forceinline__ Own load_own(const Params& p, int32_t seq) {
  return {load_raw_offset(p, seq), load_raw_offset(p, int64_t{seq} + 1)};
}

__device__ __forceinline__ Own load_only(const Params& p) {
  if (p.num_seqs != 1) return {};
  return load_own(p, 0);
}

// If no offset before is larger.
__device__ __forceinline__ Tokens tokens_of(const Params& p, const Own& own) {
  const int32_t start = clamp_offset(p, own.start);
  return {start, max(clamp_offset(p, own.next) - start, 0)};
}

// The largest of the first `count` offsets, found by all threads of the block together. `scratch`:
// one word a warp, in shared memory; free again after the next barrier.
template <int kThreads>
__device__ __forceinline__ int32_t largest_offset(const Params& p, int32_t count,
                                                  int32_t* scratch) {
  int32_t largest = 0;
#pragma unroll 4  // loads of a round side by side: where there are thousands of sequences
  for (int32_t i = threadIdx.x; i < count; i += kThreads) largest = max(largest, load_offset(p, i));
  largest = warp_max(largest);
  if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) largest = max(largest, scratch[w]);
  return largest;
}

// The tokens of sequence `seq`, found by all threads of the block together; `scratch` as above.
template <int kThreads>
__device__ __forceinline__ Tokens find_tokens(const Params& p, int32_t seq, const Own& own,
                                              int32_t* scratch) {
  const int32_t before = largest_offset<kThreads>(p, seq, scratch);
  const int32_t start = max(before, clamp_offset(p, own.start));
  return {start, max(clamp_offset(p, own.next) - start, 0)};
}

// The tokens of sequence `first + threadIdx.x`, none beyond the last one; by all threads of the
// block together. `before`: the largest offset before `first`, becomes that before the next tile.
// `scratch`: one word a warp, free again after the next barrier.
template <int kThreads>
__device__ __forceinline__ Tokens find_tile(const Params& p, int32_t first, int32_t* before,
                                            int32_t* scratch) {
  const int32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int32_t seq = first + threadIdx.x;
  int32_t start = seq < p.num_seqs ? load_offset(p, seq) : 0;
  const int32_t next = seq < p.num_seqs ? load_offset(p, int64_t{seq} + 1) : 0;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, start, distance);
    if (lane >= distance) start = max(start, other);
  }
  if (lane == 31) scratch[warp] = start;
  __syncthreads();
  start = max(start, *before);
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) start = max(start, scratch[w]);
    *before = max(*before, scratch[w]);
  }
  return {start, max(next - start, 0)};
}

// The sequence at a position, found by all threads of the block together.
struct Located {
  int32_t seq;
  Tokens tokens;
};

// Longest first, as long as a block has a thread for each: blocks start in the order of their
// index, and one long sequence that starts last would keep the others waiting. Beyond, as they
// come. `scratch`: one word a warp and three more; `lengths`: one word a thread, 16-byte aligned.
// Both free again after the next barrier.
template <int kThreads>
__device__ __forceinline__ Located locate(const Params& p, int32_t position, int32_t* scratch,
                                          int32_t* lengths) {
  if (p.num_seqs > kThreads) {
    return {position, find_tokens<kThreads>(p, position, load_own(p, position), scratch)};
  }
  const int32_t seq = threadIdx.x;
  int32_t before = 0;
  const Tokens tokens = find_tile<kThreads>(p, 0, &before, scratch);
  lengths[seq] = tokens.length;
  __syncthreads();
  int32_t* found = scratch + kThreads / 32;
  if (seq < p.num_seqs) {
    int32_t rank = 0;
    // Beyond the last sequence the lengths are 0 and do not count.
    for (int32_t first = 0; first < p.num_seqs; first += 4) {
      const int4 words = *reinterpret_cast<const int4*>(lengths + first);
      const int32_t others[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rank += others[i] > tokens.length || (others[i] == tokens.length && first + i < seq);
      }
    }
    if (rank == position) {
      found[0] = seq;
      found[1] = tokens.start;
      found[2] = tokens.length;
    }
  }
  __syncthreads();
  return {found[0], {found[1], found[2]}};
}

// A chunk by its number (params.h): tokens `start` to `start + length` of one sequence.
struct Chunk {
  int32_t start, length;  // length 0: no chunk has the number
  int32_t seq = 0;        // where it was found by its number

  __device__ __forceinline__ bool operator==(const Chunk& other) const {
    return start == other.start && length == other.length;
  }
};

// The chunk of this number, if it is one of sequence `seq`, whose first number is not above.
__device__ __forceinline__ Chunk chunk_at(Tokens tokens, int32_t seq, int32_t number) {
  const int64_t skipped = (number - (tokens.start / kChunk + int64_t{seq})) * kChunk;
  if (skipped < 0 || skipped >= tokens.length) return {0, 0};
  return {static_cast<int32_t>(tokens.start + skipped),
          static_cast<int32_t>(min(tokens.length - skipped, int64_t{kChunk})), seq};
}

// Found by all threads of the block together. `scratch`: one word a warp and three more. A number
// is above that of its sequence by a token's number of chunks at most: earlier sequences are passed
// over, but for their largest offset.
template <int kThreads>
__device__ __forceinline__ Chunk find_chunk(const Params& p, int32_t number, int32_t* scratch) {
  int32_t* found = scratch + kThreads / 32;
  if (threadIdx.x < 3) found[threadIdx.x] = 0;
  const int32_t least = max(number - p.num_tokens / kChunk, 0);
  int32_t before = 0;
  if (least > 0) {
    before = largest_offset<kThreads>(p, least, scratch);
    __syncthreads();
  }
  for (int32_t first = least; first < p.num_seqs; first += kThreads) {
    const Tokens tokens = find_tile<kThreads>(p, first, &before, scratch);
    // Numbers rise with the sequence: the last one whose first number is not above holds it.
    const int32_t seq = first + threadIdx.x;
    const int64_t first_number = tokens.start / kChunk + int64_t{seq};
    const bool is_reached = seq < p.num_seqs && first_number <= number;
    const int32_t num_reached = __syncthreads_count(is_reached);
    if (num_reached == 0) break;
    if (threadIdx.x == num_reached - 1) {
      const Chunk chunk = chunk_at(tokens, seq, number);
      found[0] = chunk.start;
      found[1] = chunk.length;
      found[2] = chunk.seq;
    }
    if (num_reached < kThreads) break;
  }
  __syncthreads();
  return {found[0], found[1], found[2]};
}

// The same, where `load(chunk)` sets copies on their way, by all threads: of the only sequence's
// chunk before it is certain, as `Own` says. `scratch` may lie where copies do not go.
template <int kThreads, typename F>
__device__ __forceinline__ Chunk find_loaded(const Params& p, const Own& only, int32_t number,
                                             int32_t* scratch, F load) {
  const bool is_only = p.num_seqs == 1;
  Chunk guess = {0, 0};
  if (is_only) {
    guess = {number * kChunk, min(p.num_tokens - number * kChunk, kChunk)};
    load(guess);
  }
  const Chunk chunk =
      is_only ? chunk_at(tokens_of(p, only), 0, number) : find_chunk<kThreads>(p, number, scratch);
  if (!(chunk == guess) || chunk.length == 0) {
    finish_copies();
    if (chunk.length > 0) load(chunk);
  }
  return chunk;
}

// ---- blocks -------------------------------------------------------------------------------------

// A block's part of the work, by its index or another number: slabs of rows of V fastest, then
// heads, then positions of sequences.
struct Part {
  uint32_t slab, head, q_head;
  int32_t position;
};

template <int kSlabs>
__device__ __forceinline__ Part find_part(const Params& p, uint32_t idx = blockIdx.x) {
  const uint32_t rest = idx / kSlabs;
  const uint32_t head = rest % p.num_v_heads;
  return {idx % kSlabs, head, gdn::find_q_head(head, p.num_v_heads, p.num_q_heads),
          static_cast<int32_t>(rest / p.num_v_heads)};
}

// ---- gates --------------------------------------------------------------------------------------

// log2 of a token's decay gate, at least kLeastLog: 2^-160 is 0, and one huge value must not
// swallow the others' in a sum over the chunk. NaN stays.
constexpr float kLeastLog = -160.0f;
constexpr float kLeastRateLog = -745.2f;  // below, e^A_log is 0 in float64

// A call, not inlined: two logarithms and exponentials with their special cases are 100
// instructions that hardly any token needs.
static __device__ __noinline__ float exact_log2_gate(float A_log, float x) {
  const float rate = expf(A_log);
  // For very negative x, softplus is e^x, and e^(A_log + x) neither overflows nor underflows early.
  float log_g = x < -15.0f ? -expf(A_log + x) : -rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
  // inf * 0 counts as 0, where it is 0 in the oracle's float64, too.
  if (x == -INFINITY) log_g = 0.0f;
  if (rate == 0.0f) log_g = A_log < kLeastRateLog || x < INFINITY ? 0.0f : -x;
  log_g *= kLog2E;
  return log_g < kLeastLog ? kLeastLog : log_g;
}

// By the special function unit in the usual range: relative error of the logarithm at most 2e-5,
// which long products keep.
__device__ __forceinline__ float log2_gate(float A_log, float a, float dt_bias) {
  const float x = a + dt_bias;
  const float rate = ptx::exp2(kLog2E * A_log);
  const float w = ptx::exp2(-kLog2E * fabsf(x));
  // Where 1 + w would round w away, its logarithm's series.
  const float series = kLog2E * w * (1.0f - w * (0.5f - w * (1.0f / 3 - w * 0.25f)));
  const float log2_of = w < 0x1p-6f ? series : ptx::log2(1.0f + w);
  const float log_g = -rate * fmaf(kLog2E, fmaxf(x, 0.0f), log2_of);
  if (rate >= 0x1p-20f && rate <= 0x1p10f && fabsf(x) <= 80.0f) return fmaxf(log_g, kLeastLog);
  return exact_log2_gate(A_log, x);
}

// A chunk's gates. `decay[t]`: log2 of the decay from the chunk's start through token t; behind,
// what the chain would make of it: the decay up to token t, from t to the chunk's end, and all of
// it. `first_bad`: from this token on the state is not finite; kChunk where it stays finite.
struct alignas(16) ChunkGates {
  float decay[kChunk];
  float beta[kChunk];
  int32_t first_bad;
  float all;
  alignas(16) float from_start[kChunk];
  float to_end[kChunk];
};

// What a lane computes the gates of its two tokens from: zeros beyond the chunk's end.
struct RawGates {
  uint16_t a[2], b[2];
};

__device__ __forceinline__ RawGates load_gates(const Params& p, uint32_t head, Chunk chunk) {
  RawGates raw = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t t = threadIdx.x % kWarpSize * 2 + i;
    if (t < chunk.length) {
      const int64_t token = int64_t{chunk.start} + t;
      raw.a[i] = load_bf16(p.a, token * p.a_stride_t + head);
      raw.b[i] = load_bf16(p.b, token * p.b_stride_t + head);
    }
  }
  return raw;
}

// Computed by one warp. Beyond the chunk's end beta is 0 and nothing decays.
__device__ __forceinline__ void compute_gates(const RawGates& raw, float A_log, float dt_bias,
                                              int32_t length, ChunkGates* gates) {
  const int32_t lane = threadIdx.x % kWarpSize;
  float log_g[2] = {0.0f, 0.0f};
  if (lane == 0) gates->first_bad = kChunk;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t t = 2 * lane + i;
    float beta = 0.0f;
    if (t < length) {
      log_g[i] = log2_gate(A_log, to_float(raw.a[i]), dt_bias);
      beta = ptx::reciprocal(1.0f + ptx::exp2(-kLog2E * to_float(raw.b[i])));
      if (isnan(beta) || isnan(log_g[i])) {
        beta = 0.0f;  // a column of T, where 0 * NaN would reach earlier tokens
        atomicMin(&gates->first_bad, t);
      }
    }
    gates->beta[t] = beta;
  }
  float total = log_g[0] + log_g[1];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, total, distance);
    if (lane >= distance) total += other;
  }
  const float before = __shfl_up_sync(0xffffffffu, total, 1);
  const float last = __shfl_sync(0xffffffffu, total, 31);
  const float decay[2] = {lane == 0 ? log_g[0] : before + log_g[0], total};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    gates->decay[2 * lane + i] = decay[i];
    gates->from_start[2 * lane + i] = ptx::exp2(decay[i]);
    gates->to_end[2 * lane + i] = ptx::exp2(last - decay[i]);
  }
  if (lane == 0) gates->all = ptx::exp2(last);
}

__device__ __forceinline__ float load_head_value(const void* values, uint32_t head) {
  return ptx::load_constant(static_cast<const float*>(values) + head);
}

// ---- what one stage of a route leaves for the next ----------------------------------------------

// Per chunk number and v head: T and P as `Prepare` has them, then ChunkGates.
constexpr int kPreparedPairs = 2 * kChunk * kChunk * 2;
constexpr int kGatesPieces = (sizeof(ChunkGates) + 15) / 16;
constexpr int kPreparedBytes = (kPreparedPairs + kGatesPieces * 16 + 127) / 128 * 128;
static_assert(kPreparedBytes == 17536, "kernels/__init__.py has the same number");

__device__ __forceinline__ unsigned char* find_prepared(const Params& p, int64_t number,
                                                        uint32_t head) {
  return static_cast<unsigned char*>(p.workspace) +
         (number * p.num_v_heads + head) * kPreparedBytes;
}

// ---- tiles of bfloat16 in shared memory ---------------------------------------------------------

// Rows of `kBytes`, whose 16-byte pieces are permuted so that one column of pieces lies in
// different banks: no conflicts for ldmatrix.
template <int kBytes>
__device__ __forceinline__ uint32_t swizzle(uint32_t row, uint32_t piece) {
  static_assert(kBytes % 128 == 0, "a row covers all banks");
  return row * kBytes + ((piece ^ (row & 7)) << 4);
}

constexpr int kKeyBytes = 2 * kHeadSize;  // of a row of q or k
constexpr int kPairBytes = 2 * kChunk;    // of a row of a [64, 64] matrix
constexpr int kKeysBytes = kChunk * kKeyBytes;
constexpr int kPairsBytes = kChunk * kPairBytes;

// Fragments of 16 rows and 16 columns, `row` (a multiple of 8) and `piece` (even) those of the
// upper left corner. `a`: an operand of 16 rows, or, transposed, two operands b of 8 columns each
// with rows as they lie. `b`: two operands b of 8 columns each, which are rows as they lie. A
// lane's address differs from that of piece 0 by one exclusive or, and from row to row by a
// constant.
template <int kBytes>
__device__ __forceinline__ uint32_t fragment_a(uint32_t tile, uint32_t row, uint32_t piece) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  return ((tile + swizzle<kBytes>(lane % 16, lane / 16)) ^ (piece << 4)) + row * kBytes;
}

template <int kBytes>
__device__ __forceinline__ uint32_t fragment_b(uint32_t tile, uint32_t row, uint32_t piece) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  const uint32_t first = swizzle<kBytes>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  return ((tile + first) ^ (piece << 4)) + row * kBytes;
}

// Fragments (16 rows, 16 columns) of bfloat16 operands: 16 bytes a lane.
constexpr int kFragmentBytes = 512;

__device__ __forceinline__ uint4* fragment_at(unsigned char* fragments, uint32_t idx) {
  return reinterpret_cast<uint4*>(fragments + idx * kFragmentBytes) + threadIdx.x % kWarpSize;
}

// Eight bfloat16 values that need not be aligned, to shared memory; zeros where `!is_inside`.
template <bool kAligned>
__device__ __forceinline__ void copy_piece(uint32_t shared, unsigned char* base, const uint16_t* x,
                                           bool is_inside) {
  if constexpr (kAligned) {
    ptx::copy_async(shared, x, is_inside ? 16 : 0);
  } else {
    uint32_t words[4] = {};
    if (is_inside) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t high = ptx::load_constant(x + 2 * i + 1);
        words[i] = ptx::load_constant(x + 2 * i) | high << 16;
      }
    }
    *reinterpret_cast<uint4*>(base + shared - ptx::shared_address(base)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <bool kAligned>
__device__ __forceinline__ void store_piece(uint16_t* to, uint4 words) {
  if constexpr (kAligned) {
    *reinterpret_cast<uint4*>(to) = words;
  } else {
    const uint32_t each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<uint16_t>(each[i / 2] >> (i % 2 * 16));
  }
}

// The rows of a chunk of q or k, of the head at `offset`, into a swizzled tile; rows beyond the
// chunk's end become zeros, whatever lies there. By `kThreads` threads, this is number `thread`.
template <int kThreads, bool kAligned>
__device__ __forceinline__ void copy_keys(unsigned char* tile, const void* x, int64_t stride_t,
                                          int64_t offset, Chunk chunk, uint32_t thread) {
  constexpr int kPieces = kKeyBytes / 16, kRows = kThreads / kPieces;  // of one round
  static_assert(kRows % 8 == 0, "a thread's rows are swizzled alike");
  const uint32_t row = thread / kPieces, piece = thread % kPieces;
  const uint32_t shared = ptx::shared_address(tile) + swizzle<kKeyBytes>(row, piece);
  // One pointer that moves on: an address from its row costs ten instructions a piece.
  const uint16_t* from = static_cast<const uint16_t*>(x) + (int64_t{chunk.start} + row) * stride_t +
                         offset + 8 * piece;
#pragma unroll kAligned ? kChunk / kRows : 1
  for (int i = 0; i < kChunk / kRows; ++i) {
    copy_piece<kAligned>(shared + i * kRows * kKeyBytes, tile, from,
                         static_cast<int32_t>(row) + i * kRows < chunk.length);
    from += kRows * stride_t;
  }
}

}  // namespace fastkernels::gdn_prefill
