// gdn_prefill, route recurrent: token by token in float32, for sequences of few tokens.
//
// Plan: `lanes_per_row` neighbouring lanes share a row of one head's state and each holds
// `rows_per_lane` rows in registers. A tile of tokens comes into shared memory first, one warp
// makes its gates and all of them its products k.q, and then each token costs a dot product over
// the lanes' own columns, a round of shuffles and the update: nothing is loaded from global memory
// on the way. A sequence most likely starts where its own offset says, the only one at token 0: its
// first tile is on its way before that is known, and loaded again where it is not so.
//
// Shared memory: kSharedBytes. Barriers: four a tile.
//
// Constraints: head size 128; num_v_heads a multiple of num_q_heads; blocks as `find_part` has
// them, for one sequence where there is none. Any lengths, but the time grows with the longest one.
// In place is safe: a block reads its rows before it writes them, and no other block has them.
//
// Macros: FK_LANES_PER_ROW, FK_ROWS_PER_LANE, FK_WARPS; FK_ALIGNED (q, k, v, states in 16-byte
// pieces); FK_THREADS and FK_SHARED_BYTES, what the launcher gives.
#include "gdn_prefill/common.cuh"

namespace fastkernels::gdn_prefill {
namespace {

constexpr int kLanes = FK_LANES_PER_ROW;
constexpr int kRows = FK_ROWS_PER_LANE;
constexpr int kThreads = 32 * FK_WARPS;
constexpr int kRowStep = kThreads / kLanes;  // between the rows of one lane
constexpr int kBlockRows = kRowStep * kRows;
constexpr int kSlabs = kHeadSize / kBlockRows;
static_assert(kSlabs * kBlockRows == kHeadSize, "a head is a whole number of blocks");
static_assert(kBlockRows % 8 == 0, "a token's values come in pieces of 8");
constexpr int kPieces = kVectors<kLanes>;
constexpr int kTile = 32;  // tokens
// Several rows a lane are for more sequences than run at a time, where other blocks hide a block's
// loads: as many as registers allow that hold the state and two tokens' keys, and 32 others.
constexpr int kRegisters = 4 * kRows * kPieces + 2 * 4 * kPieces + 32;
constexpr int kBlocks = kRows == 1 ? 1 : 65536 / (kThreads * kRegisters);

constexpr int kK = kTile * kKeyBytes;
constexpr int kV = kK + kTile * kKeyBytes;
constexpr int kGates = kV + kTile * kBlockRows * 2;
constexpr int kProducts = kGates + kTile * sizeof(Gates);  // k.q of each token
constexpr int kScratch = kProducts + kTile * sizeof(float);
constexpr int kSharedBytes = kScratch + 128;
static_assert(FK_THREADS == kThreads && FK_SHARED_BYTES == kSharedBytes,
              "kernels/__init__.py says otherwise");

// `kCount` pieces of 16 bytes a token, from `x` on, row after row into `to`. Rolled up, with one
// pointer that moves on: mostly there is one round, and what follows waits for the code.
template <int kCount>
__device__ __forceinline__ void copy_rows(unsigned char* to, const void* x, int64_t stride_t,
                                          int64_t offset, Chunk tile) {
  static_assert(kThreads % kCount == 0, "a round is a whole number of rows");
  constexpr int kStep = kThreads / kCount;
  const int32_t row = threadIdx.x / kCount, piece = threadIdx.x % kCount;
  const uint16_t* from =
      static_cast<const uint16_t*>(x) + (int64_t{tile.start} + row) * stride_t + offset + piece * 8;
  uint32_t shared = ptx::shared_address(to) + 16 * threadIdx.x;
#pragma unroll 1
  for (int32_t t = row; t < tile.length; t += kStep) {
    copy_piece<FK_ALIGNED>(shared, to, from, true);
    from += kStep * stride_t;
    shared += 16 * kThreads;
  }
}

__device__ __forceinline__ Keys<kLanes> load_keys(const unsigned char* shared, int32_t t) {
  const uint32_t lane = threadIdx.x % kLanes;
  const auto* q = reinterpret_cast<const uint2*>(shared + t * kKeyBytes);
  const auto* k = reinterpret_cast<const uint2*>(shared + kK + t * kKeyBytes);
  Keys<kLanes> keys;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    keys.q[i] = q[i * kLanes + lane];
    keys.k[i] = k[i * kLanes + lane];
  }
  return keys;
}

// Two sums side by side: a chain of products that add to one another takes four cycles each.
__device__ __forceinline__ float2 dot2(float4 x, float4 y, float2 sum) {
  sum.x = fmaf(x.x, y.x, sum.x);
  sum.y = fmaf(x.y, y.y, sum.y);
  sum.x = fmaf(x.z, y.z, sum.x);
  sum.y = fmaf(x.w, y.w, sum.y);
  return sum;
}

// As gdn.cuh's `step_rows`, but k.q is given: it needs no state, and here all tokens are there
// before the first one's step.
__device__ __forceinline__ void step(float4 (&S)[kRows][kPieces], const Keys<kLanes>& keys,
                                     const uint16_t (&v)[kRows], Gates gates, float k_q,
                                     float scale, float (&output)[kRows]) {
  float2 S_k[kRows] = {}, S_q[kRows] = {};
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const float4 k = unpack(keys.k[i]), q = unpack(keys.q[i]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      S_k[r] = dot2(S[r][i], k, S_k[r]);
      S_q[r] = dot2(S[r][i], q, S_q[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float of_k = S_k[r].x + S_k[r].y, of_q = S_q[r].x + S_q[r].y;
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      of_k += __shfl_xor_sync(0xffffffffu, of_k, distance);
      of_q += __shfl_xor_sync(0xffffffffu, of_q, distance);
    }
    const float u = gates.beta * fmaf(-gates.g, of_k, to_float(v[r]));
    output[r] = scale * fmaf(gates.g, of_q, u * k_q);
    update_row<kLanes>(S[r], keys, gates.g, u);
  }
}

// What a thread makes the gates of its token of a tile from.
struct RawGates {
  uint16_t a, b;
};

struct Block {
  const Params& p;
  uint32_t head, q_head, row;  // `row`: the first of this thread's rows of V
  uint32_t column;             // the first of the block's
  float A_log, dt_bias;

  __device__ __forceinline__ uint16_t* output_at(int64_t token) const {
    return static_cast<uint16_t*>(p.output) + token * p.output_stride_t + head * p.output_stride_h;
  }

  __device__ __forceinline__ void clear_output(int64_t from, int64_t to) const {
#pragma unroll 1  // hardly ever any: not in the way of the code that runs
    for (int64_t i = threadIdx.x; i < (to - from) * kBlockRows; i += kThreads) {
      output_at(from + i / kBlockRows)[column + i % kBlockRows] = 0;
    }
  }

  // A thread's elements of the state in groups of four: `visit(r, i, offset)`.
  template <typename F>
  __device__ __forceinline__ void each_piece(F visit) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        visit(r, i, (row + r * kRowStep) * kHeadSize + 4 * (i * kLanes + threadIdx.x % kLanes));
      }
    }
  }

  // Sequences as they come: those that this route is for differ by little.
  __device__ __forceinline__ void run(const Own& only, int32_t seq) const {
    unsigned char* shared = ptx::dynamic_shared();
    if (p.num_seqs == 0) {
      clear_output(0, p.num_tokens);
      return;
    }
    const bool is_only = p.num_seqs == 1;
    const Own own = is_only ? only : load_own(p, seq);
    Tokens guess = {0, p.num_tokens};
    RawGates raw = {};
    if (is_only) raw = load_tile(first_tile(guess), shared);
    const SlotIndex read = load_slot(p.read_indices, p.index_words, p.read_stride, seq);
    const SlotIndex write = load_slot(p.write_indices, p.index_words, p.write_stride, seq);
    const bool is_padding = !is_slot(read, p.index_words, p.num_slots);
    float4 S[kRows][kPieces] = {};
    if (p.has_state && !is_padding) {
      const float* state = static_cast<const float*>(p.state) + read.low * p.state_stride_slot +
                           head * p.state_stride_h;
      each_piece([&](int r, int i, uint32_t offset) {
        const float* x = state + offset;
        S[r][i] = FK_ALIGNED ? ptx::load(x) : make_float4(x[0], x[1], x[2], x[3]);
      });
    }
    Tokens tokens = tokens_of(p, own);
    if (!is_only) {
      guess = tokens;
      raw = load_tile(first_tile(guess), shared);
      tokens = find_tokens<kThreads>(p, seq, own, reinterpret_cast<int32_t*>(shared + kScratch));
    }
    const int64_t end = int64_t{tokens.start} + tokens.length;
    // Tokens of no sequence stand before the first and after the last.
    if (seq == 0) clear_output(0, tokens.start);
    if (seq + 1 >= p.num_seqs) clear_output(end, p.num_tokens);
    if (is_padding) clear_output(tokens.start, end);
    bool is_there = tokens.start == guess.start;
    if (!is_there || is_padding) {
      ptx::copy_wait<0>();
      if (is_padding) return;
    }
    for (int32_t first = 0; first < tokens.length; first += kTile) {
      const Chunk tile = {tokens.start + first, min(tokens.length - first, kTile)};
      if (!is_there) raw = load_tile(tile, shared);
      advance(S, tile, raw, shared);
      is_there = false;
    }
    ptx::copy_wait<0>();  // of a tile without a token
    if (!is_slot(write, p.index_words, p.num_slots)) return;
    float* new_state = static_cast<float*>(p.new_state) + write.low * p.new_state_stride_slot +
                       head * p.new_state_stride_h;
    each_piece([&](int r, int i, uint32_t offset) {
      float* x = new_state + offset;
      if constexpr (FK_ALIGNED) {
        ptx::store(x, S[r][i]);
      } else {
        x[0] = S[r][i].x;
        x[1] = S[r][i].y;
        x[2] = S[r][i].z;
        x[3] = S[r][i].w;
      }
    });
  }

 private:
  static __device__ __forceinline__ Chunk first_tile(Tokens tokens) {
    return {tokens.start, min(tokens.length, kTile)};
  }

  __device__ __forceinline__ RawGates load_tile(Chunk tile, unsigned char* shared) const {
    RawGates raw = {};
    if (static_cast<int32_t>(threadIdx.x) < tile.length) {
      const int64_t token = int64_t{tile.start} + threadIdx.x;
      raw = {load_bf16(p.a, token * p.a_stride_t + head),
             load_bf16(p.b, token * p.b_stride_t + head)};
    }
    copy_rows<kKeyBytes / 16>(shared, p.q, p.q_stride_t, q_head * p.q_stride_h, tile);
    copy_rows<kKeyBytes / 16>(shared + kK, p.k, p.k_stride_t, q_head * p.k_stride_h, tile);
    copy_rows<kBlockRows / 8>(shared + kV, p.v, p.v_stride_t, head * p.v_stride_h + column, tile);
    ptx::copy_commit();
    return raw;
  }

  // Over a tile that is on its way.
  __device__ __forceinline__ void advance(float4 (&S)[kRows][kPieces], Chunk tile, RawGates raw,
                                          unsigned char* shared) const {
    auto* gates = reinterpret_cast<Gates*>(shared + kGates);
    const auto* v = reinterpret_cast<const uint16_t*>(shared + kV);
    if (static_cast<int32_t>(threadIdx.x) < tile.length) {
      gates[threadIdx.x] = gdn::compute_gates(A_log, to_float(raw.a), dt_bias, to_float(raw.b));
    }
    ptx::copy_wait<0>();
    __syncthreads();
    auto* products = reinterpret_cast<float*>(shared + kProducts);
    for (int32_t first = 0; first < tile.length; first += kThreads / kLanes) {
      const int32_t t = first + threadIdx.x / kLanes;
      const Keys<kLanes> keys = load_keys(shared, min(t, tile.length - 1));
      float2 sum = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kPieces; ++i) sum = dot2(unpack(keys.k[i]), unpack(keys.q[i]), sum);
      float k_q = sum.x + sum.y;
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        k_q += __shfl_xor_sync(0xffffffffu, k_q, distance);
      }
      if (threadIdx.x % kLanes == 0 && t < tile.length) products[t] = k_q;
    }
    __syncthreads();

    Keys<kLanes> keys = load_keys(shared, 0);
    for (int32_t t = 0; t < tile.length; ++t) {
      const Keys<kLanes> next = load_keys(shared, min(t + 1, tile.length - 1));
      uint16_t values[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        values[r] = v[t * kBlockRows + row - column + r * kRowStep];
      }
      float output[kRows];
      step(S, keys, values, gates[t], products[t], p.scale, output);
      if (threadIdx.x % kLanes == 0) {
        uint16_t* to = output_at(int64_t{tile.start} + t) + row;
#pragma unroll
        for (int r = 0; r < kRows; ++r) to[r * kRowStep] = ptx::to_bf16(output[r]);
      }
      keys = next;
    }
    __syncthreads();  // before the next tile takes the place of this one
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks > 0 ? kBlocks : 1)
    gdn_prefill_recurrent(const __grid_constant__ Params p) {
  const Own only = load_only(p);
  const Part part = find_part<kSlabs>(p);
  const uint32_t column = part.slab * kBlockRows;
  const Block block{p,
                    part.head,
                    part.q_head,
                    column + threadIdx.x / kLanes,
                    column,
                    load_head_value(p.A_log, part.head),
                    load_head_value(p.dt_bias, part.head)};
  block.run(only, part.position);
}

}  // namespace fastkernels::gdn_prefill
