// The serial part: one block carries `kRows` rows of one head's state through all chunks of one
// sequence.
//
// Everything is transposed: the rows of V are the rows of the matrix instructions, so that a result
// (the state, V - d S K^T, U) is already the next product's left operand, and K, Q, T, P are right
// operands as they lie in memory. Per chunk, with S [kRows, 128] of the chunk's start:
//
//     X = S K^T                 4 state warps, 16 tokens each
//     Y = beta_t (V^T - d_t X)  in registers; a bfloat16 copy goes to all state warps
//     U = Y + Y T^T             16 tokens each, then to all warps
//     S' = d S + (d/d_t U) K    32 columns of K each; S stays in registers, a bfloat16 copy goes to
//                               all warps
//     O = d_t S Q^T + U P^T     4 output warps, 16 tokens each, beside the state warps' work
//
// T lacks the identity of the inverse that it is, and beta is not in it: so the larger part of U is
// not rounded on its way (near-parallel keys, g = 1: error of the state 3e-3 instead of 6e-3).
//
// A token that is not finite must not reach earlier ones through 0 * NaN in the products with T and
// P: what is not finite in Y or U (as bfloat16) is taken out, and put back from that token on.
//
// Barriers a chunk: 5 (all 8 warps) once; 1 (state warps) twice; an mbarrier (U is there: every
// state thread arrives, output warps wait) once. Not `bar.arrive`, after which compute-sanitizer's
// racecheck loses track and reports what is in order.
#pragma once

#include <cstdint>

#include "gdn_prefill/common.cuh"

namespace fastkernels::gdn_prefill {

constexpr int kChainThreads = 256;
constexpr int kGroupThreads = 128;  // state warps, and output warps
constexpr uint32_t kStateBarrier = 1, kChainBarrier = 5;

// One chunk's inputs in shared memory. T, P and gates are of a stage of their own where they are
// brought from the workspace, one for all stages where the block makes them.
struct Stage {
  unsigned char *k, *q;  // [64, 128] bfloat16, swizzled
  unsigned char* v;      // [64, kRows] bfloat16, rows of kVBytes
  unsigned char *T, *P;  // [64, 64] bfloat16, swizzled
  ChunkGates* gates;
};

// Whether a value is a finite one as bfloat16, too: by the bits of its magnitude, which are in the
// order of magnitudes, NaN the largest.
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
constexpr uint32_t kLargestOperand = 0x7f7f0000u;  // 0x1.fep127f

// `kWithOutput` false: of the states alone, by the state warps alone. Nobody reads a state while
// the next one is published, so one copy of it is enough.
template <int kRows, bool kWithOutput = true>
struct Chain {
  static_assert(kRows == 16 || kRows == 32 || kRows == 64, "a whole number of fragments");
  static constexpr int kTiles = kRows / 16;
  static constexpr int kKeySteps = kHeadSize / 16;
  // Tiles of 16 x 8 of the state that a state warp has.
  static constexpr int kRowTiles = kTiles, kColumnTiles = 4;
  static constexpr bool kWritesOutput = kWithOutput;
  // State warps come first, then output warps, which copy the inputs, too.
  static constexpr int kStateThreads = kGroupThreads, kFirstCopyThread = kGroupThreads;
  static constexpr int kThreads = kChainThreads;
  // A pitch that keeps 8 rows of V in different banks.
  static constexpr int kVBytes = 2 * kRows + 16;
  static constexpr int kStateBytes = kTiles * 8 * kFragmentBytes;   // S, bfloat16
  static constexpr int kTokensBytes = kTiles * 4 * kFragmentBytes;  // Y or U
  static constexpr int kBadBytes = 2 * kRows * static_cast<int>(sizeof(int32_t));
  static constexpr int kY = (kWithOutput ? 2 : 1) * kStateBytes;
  static constexpr int kOutputBytes = kWithOutput ? kTokensBytes + kChunk * kVBytes : 0;
  static constexpr int kBad = kY + 2 * kTokensBytes + kOutputBytes;
  static constexpr int kBarrier = kBad + kBadBytes;
  static constexpr int kSharedBytes = kBarrier + (kWithOutput ? 16 : 0);

  // Shared memory of the exchange, from `base` on.
  unsigned char* base;

  // Where in the block's rows of the state a state warp's tiles begin.
  static __device__ __forceinline__ uint32_t first_element() {
    return threadIdx.x / kWarpSize * 32;
  }

  __device__ __forceinline__ unsigned char* state(uint32_t parity) const {
    return base + (kWithOutput ? parity * kStateBytes : 0);
  }
  __device__ __forceinline__ unsigned char* y() const { return base + kY; }
  __device__ __forceinline__ unsigned char* u_state() const { return y() + kTokensBytes; }
  __device__ __forceinline__ unsigned char* u_output() const { return u_state() + kTokensBytes; }
  __device__ __forceinline__ unsigned char* output() const { return u_output() + kTokensBytes; }
  // Per row of V the first token from which on it is not finite; for even and odd chunks.
  __device__ __forceinline__ int32_t* first_bad(uint32_t parity) const {
    return reinterpret_cast<int32_t*>(base + kBad) + parity * kRows;
  }

  // "U is there", of each chunk.
  __device__ __forceinline__ uint32_t update_barrier() const {
    return ptx::shared_address(base + kBarrier);
  }

  // By one thread; of use after a barrier of the block.
  __device__ __forceinline__ void init() const {
    ptx::mbarrier_init(update_barrier(), kGroupThreads);
  }

  static __device__ __forceinline__ uint4* fragment(unsigned char* x, uint32_t idx) {
    return reinterpret_cast<uint4*>(x + idx * kFragmentBytes) + threadIdx.x % kWarpSize;
  }

  static __device__ __forceinline__ void load_fragment(uint32_t (&a)[4], unsigned char* x,
                                                       uint32_t idx) {
    const uint4 words = *fragment(x, idx);
    a[0] = words.x;
    a[1] = words.y;
    a[2] = words.z;
    a[3] = words.w;
  }

  // Two results of 8 columns each as one left operand, or as two right ones, (x, z) and (y, w),
  // whose columns are the rows.
  static __device__ __forceinline__ uint4 pack(const float (&left)[4], const float (&right)[4]) {
    return make_uint4(ptx::to_bf16x2(left[0], left[1]), ptx::to_bf16x2(left[2], left[3]),
                      ptx::to_bf16x2(right[0], right[1]), ptx::to_bf16x2(right[2], right[3]));
  }

  // sum[r][h] += left [rows, 128] right^T of 16 tokens from `token` on. In two parts, since each
  // product waits for the one that it adds to.
  static __device__ __forceinline__ void multiply_state(float (&sum)[kTiles][2][4],
                                                        unsigned char* left,
                                                        const unsigned char* right,
                                                        uint32_t token) {
    const uint32_t tile = ptx::shared_address(right);
    float other[kTiles][2][4] = {};
#pragma unroll
    for (int step = 0; step < kHeadSize / 16; ++step) {
      uint32_t b[4];
      ptx::load_matrices(b, fragment_b<kKeyBytes>(tile, token, 2 * step));
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        uint32_t a[4];
        load_fragment(a, left, r * 8 + step);
        float (&part)[2][4] = step % 2 == 0 ? sum[r] : other[r];
        ptx::mma_bf16(part[0], a, b[0], b[1]);
        ptx::mma_bf16(part[1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[r][i / 4][i % 4] += other[r][i / 4][i % 4];
    }
  }

  // Of T or P 16 rows, as right operands. Zeros above the diagonal are not skipped: the last warp,
  // which the others wait for, has none.
  static __device__ __forceinline__ void load_pairs(uint32_t (&b)[4], const unsigned char* pairs,
                                                    uint32_t token, int step) {
    ptx::load_matrices(b, fragment_b<kPairBytes>(ptx::shared_address(pairs), token, 2 * step));
  }

  // sum[r][h] += left [rows, 64] right^T of 16 tokens.
  static __device__ __forceinline__ void multiply_pairs(float (&sum)[kTiles][2][4],
                                                        unsigned char* left,
                                                        const uint32_t (&right)[kChunk / 16][4]) {
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      uint32_t a[kChunk / 16][4];
#pragma unroll
      for (int step = 0; step < kChunk / 16; ++step) load_fragment(a[step], left, r * 4 + step);
#pragma unroll
      for (int step = 0; step < kChunk / 16; ++step) {
        ptx::mma_bf16(sum[r][0], a[step], right[step][0], right[step][1]);
        ptx::mma_bf16(sum[r][1], a[step], right[step][2], right[step][3]);
      }
    }
  }

  // Whether one of a lane's 8 elements of a tile is no operand. Mostly none is: one branch for all
  // of them, out of the way of the code that runs.
  static __device__ __forceinline__ bool has_bad(const float (&x)[2][4]) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = max(largest, magnitude(x[i / 4][i % 4]));
    return largest > kLargestOperand;
  }

  // Takes out what is no operand, says which, and reports since which token the two rows of V have
  // some. Tokens from `token` on.
  template <typename Told>
  __device__ __forceinline__ uint32_t take_out(float (&x)[2][4], uint32_t token, uint32_t parity,
                                               int tile, const Told& told) const {
    uint32_t elements = 0;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      int32_t first = kChunk;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& y = x[i / 2][2 * upper + i % 2];
        if (magnitude(y) <= kLargestOperand) continue;
        y = 0.0f;
        first = min(first, static_cast<int32_t>(token + threadIdx.x % 4 * 2) + i / 2 * 8 + i % 2);
        elements |= 1u << (i / 2 * 4 + 2 * upper + i % 2);
      }
      if (first == kChunk) continue;
      const uint32_t row = 16 * tile + 8 * upper + threadIdx.x % kWarpSize / 4;
      atomicMin(first_bad(parity) + row, first);
      told.bad(row, first);
    }
    return elements;
  }

  // What a state warp reads of a chunk's inputs for its first product, and the gates of a lane's
  // tokens, 16 * warp + 8 * h + 2c + i.
  struct Early {
    uint32_t keys[kHeadSize / 16][4];           // K of 16 tokens, as right operands
    uint32_t v[kTiles][4];                      // columns of V as rows, as they lie in products
    float decay[2][2], rest[2][2], beta[2][2];  // from the chunk's start, to its end
    float decay_all;
    int32_t first_bad;
  };

  template <int kFirst = 0, int kLast = kKeySteps>
  static __device__ __forceinline__ void load_keys(Early& early, const Stage& x) {
    const uint32_t token = threadIdx.x / kWarpSize * 16;
#pragma unroll
    for (int step = kFirst; step < kLast; ++step) {
      ptx::load_matrices(early.keys[step],
                         fragment_b<kKeyBytes>(ptx::shared_address(x.k), token, 2 * step));
    }
  }

  static __device__ __forceinline__ void load_rest(Early& early, const Stage& x) {
    const uint32_t lane = threadIdx.x % kWarpSize, token = threadIdx.x / kWarpSize * 16;
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      const uint32_t row = token + lane % 8 + lane / 16 * 8;
      ptx::load_matrices_transposed(
          early.v[r], ptx::shared_address(x.v) + row * kVBytes + 32 * r + lane / 8 % 2 * 16);
    }
    early.decay_all = x.gates->all;
    early.first_bad = x.gates->first_bad;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t first = token + 8 * h + lane % 4 * 2;
      const float2 decay = *reinterpret_cast<const float2*>(x.gates->from_start + first);
      const float2 rest = *reinterpret_cast<const float2*>(x.gates->to_end + first);
      const float2 beta = *reinterpret_cast<const float2*>(x.gates->beta + first);
      early.decay[h][0] = decay.x;
      early.decay[h][1] = decay.y;
      early.rest[h][0] = rest.x;
      early.rest[h][1] = rest.y;
      early.beta[h][0] = beta.x;
      early.beta[h][1] = beta.y;
    }
  }

  // What others are told of a chunk, and when: by every state warp.
  struct Output {
    const Chain& chain;

    // A row of V is not finite from token `first` on.
    __device__ __forceinline__ void bad(uint32_t /*row*/, int32_t /*first*/) const {}
    __device__ __forceinline__ void inputs_are_read() const {}
    __device__ __forceinline__ void update(uint32_t idx, uint4 words) const {
      if constexpr (kWithOutput) *fragment(chain.u_output(), idx) = words;
    }
    __device__ __forceinline__ void update_is_there() const {
      if constexpr (kWithOutput) ptx::mbarrier_arrive_expect(chain.update_barrier(), 0);
    }
    // The next chunk's inputs are wanted, and are loaded in two parts, each beside a product; there
    // must be room for the next state.
    __device__ __forceinline__ void wait_for_next() const {}
    __device__ __forceinline__ void load_first(Early& /*early*/) const {}
    __device__ __forceinline__ void wait_for_room() const {}
    __device__ __forceinline__ void load_rest(Early& /*early*/) const {}
    __device__ __forceinline__ void state(uint32_t /*idx*/, uint4 /*words*/) const {}
  };

  // A state warp's part of one chunk. S: rows g, g + 8 of each tile, columns 32 * warp + 8 * j +
  // 2c.
  __device__ __forceinline__ void advance(float (&S)[kTiles][4][4], const Stage& x,
                                          uint32_t parity) const {
    Early early;
    load_keys(early, x);
    load_rest(early, x);
    advance(S, x, parity, early, Output{*this});
  }

  // `early`: of this chunk; `told` may make it the next one's. Operands that do not
  // depend on the state are loaded a product ahead: right before their use they stood behind the
  // other warps' loads, 100 cycles each of three times a chunk.
  template <typename Told>
  __device__ __forceinline__ void advance(float (&S)[kTiles][4][4], const Stage& x, uint32_t parity,
                                          Early& early, const Told& told) const {
    constexpr int kSteps = kChunk / 16;
    constexpr bool kColumnsEarly = kTiles <= 2;  // with 64 rows registers are too few
    const uint32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const uint32_t token = 16 * warp;
    uint32_t T[kSteps][4], columns[kColumnsEarly ? kSteps : 1][2][4];
    float update[kTiles][2][4];
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      uint32_t a[kKeySteps][4];
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        load_fragment(a[step], state(parity), r * 8 + step);
      }
      // In two parts, since each product waits for the one that it adds to.
      float sum[2][2][4] = {};
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        const uint32_t (&b)[4] = early.keys[step];
        ptx::mma_bf16(sum[step % 2][0], a[step], b[0], b[1]);
        ptx::mma_bf16(sum[step % 2][1], a[step], b[2], b[3]);
      }
      if (r == 0) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) load_pairs(T[step], x.T, token, step);
        if constexpr (kColumnsEarly) load_columns(columns[0], x, 0);
        if constexpr (kColumnsEarly) load_columns(columns[1], x, 1);
      }
      float (&y)[2][4] = update[r];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int h = i / 4, upper = i % 4 / 2, j = i % 2;  // tokens, rows, column
        const uint32_t word = early.v[r][2 * h + upper];
        const float value = __uint_as_float(j == 0 ? word << 16 : word & 0xffff0000u);
        const float product = sum[0][h][i % 4] + sum[1][h][i % 4];
        y[h][i % 4] = early.beta[h][j] * fmaf(-early.decay[h][j], product, value);
      }
      if (__builtin_expect(has_bad(y), 0)) take_out(y, token, parity, r, told);
      *fragment(this->y(), r * 4 + warp) = pack(y[0], y[1]);
    }
    told.wait_for_next();
    ptx::barrier_sync(kStateBarrier, kGroupThreads);

    multiply_pairs(update, y(), T);
    if constexpr (kColumnsEarly) {
      load_columns(columns[2], x, 2);
      load_columns(columns[3], x, 3);
    }
    told.load_first(early);
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      int32_t bad[2];
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        bad[upper] = min(early.first_bad, first_bad(parity)[16 * r + 8 * upper + lane / 4]);
      }
      float scaled[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        scaled[i / 4][i % 4] = early.rest[i / 4][i % 2] * update[r][i / 4][i % 4];
      }
      if (__builtin_expect(min(bad[0], bad[1]) < kChunk || has_bad(update[r]), 0)) {
        const uint32_t elements = take_out(update[r], token, parity, r, told);
        // One NaN of a row makes its whole state NaN.
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int h = i / 4, upper = i % 4 / 2, j = i % 2;
          const bool is_bad = static_cast<int>(token + 8 * h + lane % 4 * 2 + j) >= bad[upper];
          if (is_bad || (elements >> i & 1) != 0) scaled[h][2 * upper + j] = NAN;
        }
      }
      told.update(r * 4 + warp, pack(update[r][0], update[r][1]));
      *fragment(u_state(), r * 4 + warp) = pack(scaled[0], scaled[1]);
    }
    told.update_is_there();
    if constexpr (kColumnsEarly) told.inputs_are_read();
    told.wait_for_room();
    ptx::barrier_sync(kStateBarrier, kGroupThreads);

#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 16; ++i) S[r][i / 4][i % 4] *= early.decay_all;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t (&b)[2][4] = columns[kColumnsEarly ? step : 0];
      if constexpr (!kColumnsEarly) load_columns(b, x, step);
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        uint32_t a[4];
        load_fragment(a, u_state(), r * 4 + step);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          ptx::mma_bf16(S[r][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
    if constexpr (!kColumnsEarly) told.inputs_are_read();
    told.load_rest(early);
    publish(S, parity ^ 1, told);
    // The next chunk's; this one's are read up to the block's barrier.
    if (threadIdx.x < kRows) first_bad(parity ^ 1)[threadIdx.x] = kChunk;
  }

  // K of 16 tokens and a state warp's 32 columns, as right operands with a column for each of K.
  static __device__ __forceinline__ void load_columns(uint32_t (&b)[2][4], const Stage& x,
                                                      int step) {
    const uint32_t warp = threadIdx.x / kWarpSize;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      ptx::load_matrices_transposed(
          b[j], fragment_a<kKeyBytes>(ptx::shared_address(x.k), 16 * step, 4 * warp + 2 * j));
    }
  }

  // A bfloat16 copy of the state for all warps.
  __device__ __forceinline__ void publish(const float (&S)[kTiles][4][4], uint32_t parity) const {
    publish(S, parity, Output{*this});
  }

  template <typename Told>
  __device__ __forceinline__ void publish(const float (&S)[kTiles][4][4], uint32_t parity,
                                          const Told& told) const {
    const uint32_t warp = threadIdx.x / kWarpSize;
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t idx = r * 8 + 2 * warp + j;
        const uint4 words = pack(S[r][2 * j], S[r][2 * j + 1]);
        *fragment(state(parity), idx) = words;
        told.state(idx, words);
      }
    }
  }

  // An output warp's part of one chunk: 16 tokens of `kRows` columns of the output. `to`: the
  // block's columns of the chunk's first token.
  template <bool kAligned>
  __device__ __forceinline__ void write_output(const Stage& x, uint32_t parity, float scale,
                                               uint16_t* to, int64_t stride_t,
                                               int32_t length) const {
    write_output<kAligned>(x, parity, u_output(), update_barrier(), parity, scale, to, stride_t,
                           length);
  }

  // With U at `update`, once `barrier` has completed the phase of this parity.
  template <bool kAligned>
  __device__ __forceinline__ void write_output(const Stage& x, uint32_t parity,
                                               unsigned char* update, uint32_t barrier,
                                               uint32_t phase, float scale, uint16_t* to,
                                               int64_t stride_t, int32_t length) const {
    const uint32_t warp = threadIdx.x / kWarpSize % 4, lane = threadIdx.x % kWarpSize;
    const uint32_t token = 16 * warp;
    float sum[kTiles][2][4] = {};
    multiply_state(sum, state(parity), x.q, token);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 pair =
          *reinterpret_cast<const float2*>(x.gates->from_start + token + 8 * h + lane % 4 * 2);
      const float decay[2] = {pair.x, pair.y};
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[r][h][i] *= decay[i % 2];
      }
    }
    uint32_t P[kChunk / 16][4];
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) load_pairs(P[step], x.P, token, step);
    ptx::mbarrier_wait(barrier, phase);
    multiply_pairs(sum, update, P);

    const uint32_t tile = ptx::shared_address(output());
    const int32_t bad_chunk = x.gates->first_bad;
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i / 2, upper = i % 2;
        const int32_t bad = min(bad_chunk, first_bad(parity)[16 * r + 8 * upper + lane / 4]);
        float value[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int32_t t = token + 8 * h + lane % 4 * 2 + j;
          value[j] = t >= bad ? NAN : scale * sum[r][h][2 * upper + j];
        }
        words[i] = ptx::to_bf16x2(value[0], value[1]);
      }
      const uint32_t row = token + lane % 8 + lane / 16 * 8;
      ptx::store_matrices_transposed(tile + row * kVBytes + 32 * r + lane / 8 % 2 * 16, words);
    }
    __syncwarp();
    constexpr int kPieces = kRows / 8;
#pragma unroll
    for (int i = 0; i < 16 * kPieces / 32; ++i) {
      const uint32_t idx = 32 * i + lane, row = token + idx / kPieces, piece = idx % kPieces;
      if (static_cast<int32_t>(row) < length) {
        const uint4 words = *reinterpret_cast<const uint4*>(output() + row * kVBytes + 16 * piece);
        store_piece<kAligned>(to + row * stride_t + 8 * piece, words);
      }
    }
  }
};

}  // namespace fastkernels::gdn_prefill
