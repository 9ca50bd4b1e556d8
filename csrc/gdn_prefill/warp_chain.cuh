// The serial part without exchange between warps: one warp takes 16 rows of a head's state, all
// their columns in its registers, through the chunks of one sequence.
//
// What the operands are is said in chain.cuh; its formulas, per chunk, by each state warp for its
// rows alone:
//
//     X = S K^T                 left operands are packed from S as it lies in registers
//     Y = beta_t (V^T - d_t X)  in place
//     U = Y + Y T^T             in place; of T the 10 tiles of 16 x 16 that are not zeros
//     S' = d S + (d/d_t U) K
//
// 64, 20 and 64 matrix instructions; at least 8 independent ones stand between two of one sum, but
// for the last of T, and each product starts with what the one before has finished first. From
// shared memory come K, twice, T, V and the gates. A state warp waits for inputs alone, which stand
// for the output of the chunk before, too.
//
// Output warps make O = d_t Q S^T + P U of bfloat16 copies of S of the chunk's start and of U, of
// which there are two in turn, and store it as it lies in registers. Four warps copy inputs; with
// 64 rows they are the output warps.
//
// What is not finite needs no attention on the chain: rows of S are rows of every product, and one
// NaN of a row of U makes its whole state NaN, as it should be. It is U that must not reach earlier
// tokens of the output through 0 * NaN. An output warp looks at U, and where it holds what is no
// operand makes it again from S, K, V and T, which still lie in shared memory, and takes that out
// as chain.cuh does. (What is none in Y is none in U: the diagonal of T is zeros.)
//
// Barriers, all mbarriers at which every thread of a kind arrives once a chunk: inputs are there
// (of each stage; copying threads, when they have seen the output of the chunk before the last);
// S and U are there (two in turn; state warps, which have done with the stage before); the output
// has been made of them (two in turn; output warps).
#pragma once

#include <cstdint>

#include "gdn_prefill/chain.cuh"
#include "gdn_prefill/common.cuh"

namespace fastkernels::gdn_prefill {

template <int kRows, int kStages>
struct WarpChain {
  static_assert(kRows == 16 || kRows == 32 || kRows == 64, "a whole number of fragments");
  static_assert(kStages >= 3, "inputs are copied for a chunk, and half of one");
  static constexpr bool kWritesOutput = true;
  static constexpr int kStateWarps = kRows / 16;
  // Output warps of a state warp: so that no tensor core has more to do than that of a state warp.
  static constexpr int kShares = kRows == 16 ? 2 : 1;
  static constexpr int kOutputWarps = kStateWarps * kShares;
  // A state warp's tiles of 16 x 8.
  static constexpr int kRowTiles = 1, kColumnTiles = kHeadSize / 8;
  static constexpr int kTokenTiles = kChunk / 8;
  static constexpr int kStateThreads = 32 * kStateWarps, kOutputThreads = 32 * kOutputWarps;
  // Not by 4 more warps: with 12, state warps would not have the registers they need.
  static constexpr bool kOutputCopies = kOutputThreads == kGroupThreads;
  static constexpr int kFirstCopyThread = kStateThreads + (kOutputCopies ? 0 : kOutputThreads);
  static constexpr int kThreads = kFirstCopyThread + kGroupThreads;
  static constexpr int kVBytes = Chain<kRows>::kVBytes;

  // Of each state warp, twice: fragments of S, then of U.
  static constexpr int kUpdate = kHeadSize / 16 * kFragmentBytes;
  static constexpr int kHandedBytes = kUpdate + kChunk / 16 * kFragmentBytes;
  static constexpr int kBarriers = 2 * kStateWarps * kHandedBytes;
  static constexpr int kSharedBytes = kBarriers + 64;
  static_assert(8 * (kStages + 4) <= 64, "the barriers");

  // Shared memory, from `base` on.
  unsigned char* base;

  // Of the first element of a state warp among the block's.
  static __device__ __forceinline__ uint32_t first_element() {
    return threadIdx.x / kWarpSize * 16 * kHeadSize;
  }

  // Takes the state through `tokens`, as `Sequence::advance` does; every thread of the block.
  template <typename Block>
  __device__ __forceinline__ void advance(const Block& block,
                                          float (&S)[kRowTiles][kColumnTiles][4],
                                          const Tokens& tokens, int32_t num_chunks,
                                          int64_t first_number) const {
    if (threadIdx.x == 0) init();
    ptx::barrier_sync(kChainBarrier, kThreads);
    if (threadIdx.x < kStateThreads) {
      carry(block, S[0], num_chunks);
    } else {
      serve(block, tokens, num_chunks, first_number);
    }
  }

 private:
  using Sum = float[kTokenTiles][4];  // 16 rows, 64 tokens

  __device__ __forceinline__ uint32_t inputs_barrier(int32_t idx) const {
    return ptx::shared_address(base + kBarriers) + 8 * (idx % kStages);
  }
  __device__ __forceinline__ uint32_t handed_barrier(int32_t idx) const {
    return ptx::shared_address(base + kBarriers) + 8 * (kStages + idx % 2);
  }
  __device__ __forceinline__ uint32_t output_barrier(int32_t idx) const {
    return ptx::shared_address(base + kBarriers) + 8 * (kStages + 2 + idx % 2);
  }
  __device__ __forceinline__ void wait_for_inputs(int32_t idx) const {
    ptx::mbarrier_wait(inputs_barrier(idx), idx / kStages % 2);
  }
  __device__ __forceinline__ void wait_for_output(int32_t idx) const {
    ptx::mbarrier_wait(output_barrier(idx), idx / 2 % 2);
  }
  static __device__ __forceinline__ void arrive(uint32_t barrier) {
    ptx::mbarrier_arrive_expect(barrier, 0);
  }

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(inputs_barrier(i), kGroupThreads);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(handed_barrier(i), kStateThreads);
      ptx::mbarrier_init(output_barrier(i), kOutputThreads);
    }
  }

  __device__ __forceinline__ unsigned char* handed(uint32_t warp, int32_t idx) const {
    return base + (2 * warp + idx % 2) * kHandedBytes;
  }

  // ---- fragments --------------------------------------------------------------------------------

  // Two results of 8 columns each as one left operand.
  static __device__ __forceinline__ void pack(uint32_t (&a)[4], const float (&left)[4],
                                              const float (&right)[4]) {
    a[0] = ptx::to_bf16x2(left[0], left[1]);
    a[1] = ptx::to_bf16x2(left[2], left[3]);
    a[2] = ptx::to_bf16x2(right[0], right[1]);
    a[3] = ptx::to_bf16x2(right[2], right[3]);
  }

  static __device__ __forceinline__ void store_fragment(unsigned char* x, int idx,
                                                        const uint32_t (&a)[4]) {
    reinterpret_cast<uint4*>(x + idx * kFragmentBytes)[threadIdx.x % kWarpSize] =
        make_uint4(a[0], a[1], a[2], a[3]);
  }

  // As a left operand, or as two right ones, (0, 2) and (1, 3), whose columns are the rows.
  static __device__ __forceinline__ void load_fragment(uint32_t (&a)[4], const unsigned char* x,
                                                       int idx) {
    const uint4 words =
        reinterpret_cast<const uint4*>(x + idx * kFragmentBytes)[threadIdx.x % kWarpSize];
    a[0] = words.x;
    a[1] = words.y;
    a[2] = words.z;
    a[3] = words.w;
  }

  // K of 64 tokens and 16 columns, as right operands with a column for each token.
  static __device__ __forceinline__ void load_keys(uint32_t (&b)[4][4], const unsigned char* k,
                                                   int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::load_matrices(b[i], fragment_b<kKeyBytes>(ptx::shared_address(k), 16 * i, 2 * step));
    }
  }

  static __device__ __forceinline__ void load_first_keys(uint32_t (&b)[2][4][4],
                                                         const unsigned char* k) {
    load_keys(b[0], k, 0);
    load_keys(b[1], k, 1);
  }

  // ---- products ---------------------------------------------------------------------------------

  // sum += S K^T. `fragment(a, step)`: those of S, in order; `b`: what `load_keys` gives for steps
  // 0 and 1.
  template <typename F>
  static __device__ __forceinline__ void multiply_keys(Sum& sum, const unsigned char* k,
                                                       uint32_t (&b)[2][4][4], F fragment) {
    constexpr int kSteps = kHeadSize / 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      fragment(a, step);
      uint32_t (&now)[4][4] = b[step % 2];
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) {
        ptx::mma_bf16(sum[j], a, now[j / 2][j % 2 * 2], now[j / 2][j % 2 * 2 + 1]);
      }
      if (step + 2 < kSteps) load_keys(now, k, step + 2);
    }
  }

  // What makes Y of X, by elements of a tile of 8 tokens, and a factor for each of a lane's two.
  struct Terms {
    float values[4], decay[2];  // beta_t v, beta_t d_t
  };

  // Of two tiles, 16 tokens.
  static __device__ __forceinline__ void load_terms(Terms (&terms)[2], const Stage& x,
                                                    uint32_t warp, int step) {
    const uint32_t lane = threadIdx.x % kWarpSize, row = 16 * step + lane % 8 + lane / 16 * 8;
    uint32_t v[4];  // columns of V as rows: what the transposed load gives lies as products do
    ptx::load_matrices_transposed(
        v, ptx::shared_address(x.v) + row * kVBytes + 32 * warp + lane / 8 % 2 * 16);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t first = 16 * step + 8 * h + lane % 4 * 2;
      const float2 decays = *reinterpret_cast<const float2*>(x.gates->from_start + first);
      const float2 betas = *reinterpret_cast<const float2*>(x.gates->beta + first);
      terms[h].decay[0] = betas.x * decays.x;
      terms[h].decay[1] = betas.y * decays.y;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t word = v[2 * h + i];
        terms[h].values[2 * i] = betas.x * __uint_as_float(word << 16);
        terms[h].values[2 * i + 1] = betas.y * __uint_as_float(word & 0xffff0000u);
      }
    }
  }

  static __device__ __forceinline__ void subtract(float (&x)[4], const Terms& terms) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = fmaf(-terms.decay[i % 2], x[i], terms.values[i]);
  }

  // U = Y + Y T^T in place: `subtract(step)` makes Y of 16 tokens of X, which is wanted first.
  template <typename F>
  static __device__ __forceinline__ void multiply_system(Sum& sum, const Stage& x, F subtract) {
    constexpr int kSteps = kChunk / 16;
    const uint32_t T = ptx::shared_address(x.T);
    uint32_t y[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int tile = step; tile < kSteps; ++tile) {
        if (step == 0) {
          subtract(tile);
          pack(y[tile], sum[2 * tile], sum[2 * tile + 1]);
        }
        uint32_t b[4];
        ptx::load_matrices(b, fragment_b<kPairBytes>(T, 16 * tile, 2 * step));
        ptx::mma_bf16(sum[2 * tile], y[step], b[0], b[1]);
        ptx::mma_bf16(sum[2 * tile + 1], y[step], b[2], b[3]);
      }
    }
  }

  // K of 16 tokens and all columns, as right operands with a column for each of K.
  static __device__ __forceinline__ void load_rows(uint32_t (&b)[kColumnTiles / 2][4],
                                                   const unsigned char* k, int step) {
#pragma unroll
    for (int i = 0; i < kColumnTiles / 2; ++i) {
      ptx::load_matrices_transposed(
          b[i], fragment_a<kKeyBytes>(ptx::shared_address(k), 16 * step, 2 * i));
    }
  }

  // S += left K, of 16 tokens.
  static __device__ __forceinline__ void add_keys(float (&S)[kColumnTiles][4],
                                                  const uint32_t (&left)[4],
                                                  const uint32_t (&b)[kColumnTiles / 2][4]) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      ptx::mma_bf16(S[j], left, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }

  // ---- the chain --------------------------------------------------------------------------------

  template <typename Block>
  __device__ __forceinline__ void carry(const Block& block, float (&S)[kColumnTiles][4],
                                        int32_t num_chunks) const {
    const uint32_t warp = threadIdx.x / kWarpSize, first = threadIdx.x % 4 * 2;
    uint32_t keys[2][4][4];
    wait_for_inputs(0);
    load_first_keys(keys, block.stage(0).k);
#pragma unroll 1
    for (int32_t idx = 0; idx < num_chunks; ++idx) {
      const Stage x = block.stage(idx);
      unsigned char* to = handed(warp, idx);
      // A token whose beta or system is not finite need be no NaN of U.
      const float decay_all = x.gates->first_bad < kChunk ? NAN : x.gates->all;
      Terms terms[kChunk / 16][2];
      float rest[kTokenTiles][2];  // the decay from tokens 8 j + 2c + i to the chunk's end
      Sum sum = {};
      // Beside the first product, what the next ones want.
      multiply_keys(sum, x.k, keys, [&](uint32_t (&a)[4], int step) {
        pack(a, S[2 * step], S[2 * step + 1]);
        store_fragment(to, step, a);
        if (step < kChunk / 16) {
          load_terms(terms[step], x, warp, step);
        } else {
#pragma unroll
          for (int j = 2 * step - kTokenTiles; j < 2 * step - kTokenTiles + 2; ++j) {
            const float2 pair = *reinterpret_cast<const float2*>(x.gates->to_end + 8 * j + first);
            rest[j][0] = pair.x;
            rest[j][1] = pair.y;
          }
        }
      });
      multiply_system(sum, x, [&](int step) {
#pragma unroll
        for (int h = 0; h < 2; ++h) subtract(sum[2 * step + h], terms[step][h]);
      });
#pragma unroll
      for (int i = 0; i < 4 * kColumnTiles; ++i) S[i / 4][i % 4] *= decay_all;

      const auto scaled = [&](uint32_t (&a)[4], int step) {
        float update[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int j = 2 * step + i / 4;
          update[i / 4][i % 4] = rest[j][i % 2] * sum[j][i % 4];
        }
        pack(a, update[0], update[1]);
      };
      uint32_t a[4], columns[2][kColumnTiles / 2][4];
      load_rows(columns[0], x.k, 0);
      load_rows(columns[1], x.k, 1);
      scaled(a, 0);
      add_keys(S, a, columns[0]);
      // Beside this, the last tokens' U are finished.
#pragma unroll
      for (int step = 0; step < kChunk / 16; ++step) {
        uint32_t update[4];
        pack(update, sum[2 * step], sum[2 * step + 1]);
        store_fragment(to + kUpdate, step, update);
      }
      arrive(handed_barrier(idx));
#pragma unroll
      for (int step = 1; step < kChunk / 16 - 1; ++step) {
        load_rows(columns[(step + 1) % 2], x.k, step + 1);
        scaled(a, step);
        add_keys(S, a, columns[step % 2]);
      }
      // After the last chunk its own inputs once more: no branch.
      const int32_t next = min(idx + 1, num_chunks - 1);
      wait_for_inputs(next);
      load_first_keys(keys, block.stage(next).k);
      scaled(a, kChunk / 16 - 1);
      add_keys(S, a, columns[1]);
    }
  }

  // ---- inputs and output ------------------------------------------------------------------------

  template <typename Block>
  __device__ __forceinline__ void serve(const Block& block, const Tokens& tokens,
                                        int32_t num_chunks, int64_t first_number) const {
    const bool is_copying = threadIdx.x >= kFirstCopyThread;
    const uint32_t warp = threadIdx.x / kWarpSize - kStateWarps;
    if (is_copying) {
      ptx::wait_for_dependency();
#pragma unroll
      for (int i = 0; i < kStages - 1; ++i) {
        if (i < num_chunks) block.copy_prepared(first_number + i, block.stage(i));
        ptx::copy_commit();
      }
      ptx::copy_wait<kStages - 2>();
      arrive(inputs_barrier(0));
    }
#pragma unroll 1
    for (int32_t idx = 0; idx < num_chunks; ++idx) {
      if (is_copying) {
        // In this order: once more inputs are there, a later output could end the next phase, too,
        // before this thread has seen this one's end.
        if (idx > 0) wait_for_output(idx - 1);
        if (idx + 1 < num_chunks) {
          ptx::copy_wait<kStages - 3>();  // on their way since the chunk before
          arrive(inputs_barrier(idx + 1));
        }
      }
      ptx::mbarrier_wait(handed_barrier(idx), idx / 2 % 2);
      if (is_copying) {
        const int32_t ahead = idx + kStages - 1;
        if (ahead < num_chunks) {
          block.copy_inputs(block.chunk_of(tokens, ahead), block.stage(ahead));
          block.copy_prepared(first_number + ahead, block.stage(ahead));
        }
        ptx::copy_commit();
      }
      if (warp < kOutputWarps) {
        wait_for_inputs(idx);
        const Chunk chunk = block.chunk_of(tokens, idx);
        write_output<Block::kIsAligned>(
            block.stage(idx), warp / kShares, warp % kShares, handed(warp / kShares, idx),
            block.p.scale, block.output_at(chunk.start), block.p.output_stride_t, chunk.length);
        arrive(output_barrier(idx));
      }
    }
  }

  // Whether one of the two is not finite.
  static __device__ __forceinline__ uint32_t carries(uint32_t word) {
    return ((word & 0x7f807f80u) + 0x00800080u) & 0x80008000u;
  }

  // Tokens of 16 columns of the output, those of state warp `tile`: all 64, or of two shares one of
  // tiles 0 and 3 and one of tiles 1 and 2. `to`: the block's columns of the chunk's first token.
  template <bool kAligned>
  __device__ __forceinline__ void write_output(const Stage& x, uint32_t tile, int share,
                                               const unsigned char* from, float scale, uint16_t* to,
                                               int64_t stride_t, int32_t length) const {
    constexpr int kTiles = kChunk / 16 / kShares;
    const auto row = [&](int m) { return 16 * (kShares == 1 ? m : m == 0 ? share : 3 - share); };
    const int32_t g = threadIdx.x % kWarpSize / 4, c = threadIdx.x % 4;
    const uint32_t q = ptx::shared_address(x.q), P = ptx::shared_address(x.P);
    float sum[kTiles][2][4] = {};
#pragma unroll
    for (int step = 0; step < kHeadSize / 16; ++step) {
      uint32_t b[4];
      load_fragment(b, from, step);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        uint32_t a[4];
        ptx::load_matrices(a, fragment_a<kKeyBytes>(q, row(m), 2 * step));
#pragma unroll
        for (int h = 0; h < 2; ++h) ptx::mma_bf16(sum[m][h], a, b[h], b[h + 2]);
      }
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const float decay = x.gates->from_start[row(m) + 8 * upper + g];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][i / 2][2 * upper + i % 2] *= decay;
      }
    }

    uint32_t u[kChunk / 16][4], is_dirty = 0;
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      load_fragment(u[step], from + kUpdate, step);
#pragma unroll
      for (int i = 0; i < 4; ++i) is_dirty |= carries(u[step][i]);
    }
    const int32_t bad_chunk = x.gates->first_bad;
    int32_t bad[4] = {bad_chunk, bad_chunk, bad_chunk, bad_chunk};
    const bool has_bad = __ballot_sync(0xffffffffu, is_dirty != 0 || bad_chunk < kChunk) != 0;
    if (has_bad) clean_update(u, bad, x, tile, from);
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if (step > (kShares == 1 ? m : 2 * m + 1)) continue;
        uint32_t a[4];
        ptx::load_matrices(a, fragment_a<kPairBytes>(P, row(m), 2 * step));
        if (kShares > 1) {  // above the diagonal there may be anything
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = 16 * step > row(m) ? 0u : a[i];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) ptx::mma_bf16(sum[m][h], a, u[step][h], u[step][h + 2]);
      }
    }
    if (has_bad) {
#pragma unroll
      for (int i = 0; i < 8 * kTiles; ++i) {
        const int m = i / 8, h = i / 4 % 2, upper = i / 2 % 2;
        const bool is_bad = row(m) + 8 * upper + g >= bad[2 * h + i % 2];
        if (is_bad) sum[m][h][i % 4] = NAN;
      }
    }

    to += g * stride_t + 16 * tile + 2 * c;
    const auto store = [&](int m, int upper) {
      const int32_t t = row(m) + 8 * upper;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t word =
            ptx::to_bf16x2(scale * sum[m][h][2 * upper], scale * sum[m][h][2 * upper + 1]);
        store_pair<kAligned>(to + t * stride_t + 8 * h, word);
      }
    };
    if (length == kChunk) {  // without a branch a token
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) store(i / 2, i % 2);
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        if (row(i / 2) + 8 * (i % 2) + g < length) store(i / 2, i % 2);
      }
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void store_pair(uint16_t* to, uint32_t word) {
    if constexpr (kAligned) {
      *reinterpret_cast<uint32_t*>(to) = word;
    } else {
      to[0] = static_cast<uint16_t>(word);
      to[1] = static_cast<uint16_t>(word >> 16);
    }
  }

  // Takes out what is no operand, and lowers the first token with some, of either row.
  static __device__ __forceinline__ void take_out(Sum& sum, int32_t (&first)[2]) {
#pragma unroll
    for (int i = 0; i < 4 * kTokenTiles; ++i) {
      const int j = i / 4, upper = i % 4 / 2;
      float& y = sum[j][i % 4];
      if (magnitude(y) <= kLargestOperand) continue;
      y = 0.0f;
      first[upper] = min(first[upper], static_cast<int32_t>(8 * j + threadIdx.x % 4 * 2 + i % 2));
    }
  }

  // Makes U again, bit for bit but for what is not finite: of Y and U that is taken out. `bad`, of
  // columns 2c, 2c + 1, 2c + 8 and 2c + 9, becomes the first such token.
  static __device__ __forceinline__ void clean_update(uint32_t (&u)[kChunk / 16][4],
                                                      int32_t (&bad)[4], const Stage& x,
                                                      uint32_t tile, const unsigned char* from) {
    const uint32_t c = threadIdx.x % 4;
    uint32_t keys[2][4][4];
    load_first_keys(keys, x.k);
    Sum sum = {};
    multiply_keys(sum, x.k, keys,
                  [&](uint32_t (&a)[4], int step) { load_fragment(a, from, step); });
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      Terms terms[2];
      load_terms(terms, x, tile, step);
      subtract(sum[2 * step], terms[0]);
      subtract(sum[2 * step + 1], terms[1]);
    }
    int32_t first[2] = {kChunk, kChunk};
    take_out(sum, first);
    multiply_system(sum, x, [](int) {});
    take_out(sum, first);
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      pack(u[step], sum[2 * step], sum[2 * step + 1]);
    }
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      first[upper] = min(first[upper], __shfl_xor_sync(0xffffffffu, first[upper], 1));
      first[upper] = min(first[upper], __shfl_xor_sync(0xffffffffu, first[upper], 2));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bad[i] = min(bad[i], __shfl_sync(0xffffffffu, first[i / 2], 4 * (2 * c + i % 2)));
    }
  }
};

}  // namespace fastkernels::gdn_prefill
