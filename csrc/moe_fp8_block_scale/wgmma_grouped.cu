// moe_fp8_block_scale, route wgmma_grouped: the two grouped products for many tokens, on WGMMA.
//
// Plan: persistent blocks of a producer warp group and two consumer groups. A tile is FK_TOKENS
// tokens of an expert (rows) by 256 rows of its weights (columns): of the first product 128 columns
// of C, the linear and the gate rows of 64 of them for each consumer group; of the second one 128
// columns of the output for each group. Per step of 128 columns of the operands the producers copy
// the tokens' rows, gathered by index, and the weights into a ring of stages, with
// cp.async and in the 128-byte swizzle; a consumer group makes m64n128 products of each 64 tokens
// that the tile has, and adds them to float32 sums with the step's scales, while the other group
// has the tensor core. No sum is longer than 128 products there: Hopper adds e4m3 products with
// about 14 bits. SwiGLU and the codes of C with a scale for each token and 128 columns are made in
// registers.
//
// Tiles of an expert's same weights are next to one another, so that weights leave DRAM once. What
// a tile computes does not depend on who computes it, nor its rows on one another: equal calls give
// equal bits, and a token the same ones among others.
//
// Shared memory: as many stages (kStageBytes) as fit, then `Shared`. Registers: 224 of a consumer.
//
// Constraints: sm_90a. Grid: any number of blocks along x. Each waits by itself (griddepcontrol).
//
// Macros: FK_TOKENS (64 or 128), FK_CODES (of C: 1, or 2 with that of the remainder), FK_GEMM1 or
// FK_GEMM2, one of them 1; FK_ALIGNED (tensors of the caller in 16-byte pieces, else byte by byte);
// FK_THREADS and FK_SHARED_BYTES, what the launcher gives.
#include "moe_fp8_block_scale/params.h"
#include "moe_fp8_block_scale/ptx.cuh"

namespace fastkernels::moe_fp8_block_scale {
namespace {

constexpr int kGroupThreads = 128;
constexpr int kConsumers = 2;  // groups
constexpr int kConsumerWarps = 4 * kConsumers;
// A block's pool is what it is launched with: 65536 / FK_THREADS registers a thread, in units of 8.
// More would be waited for without end.
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (1 + kConsumers) * 168);

constexpr int kTokens = FK_TOKENS;
constexpr int kWaves = kTokens / 64;             // products a step of a consumer group
constexpr int kColumns = 128;                    // of a tile, for each consumer group
constexpr int kRowBytes = kBlock;                // of an operand in a step
constexpr int kParts = FK_GEMM1 ? 1 : FK_CODES;  // of the tokens' operand: C has two codes
constexpr int kPartBytes = kTokens * kRowBytes;
constexpr int kWeightBytes = kConsumers * kColumns * kRowBytes;
constexpr int kCluster = FK_CLUSTER;
constexpr int kTileTokens = kCluster * kTokens;  // that have the same weights
constexpr int kStageBytes = kParts * kPartBytes + kWeightBytes;
constexpr int kStages = FK_SHARED_BYTES / kStageBytes;  // the rest is less than one more

struct alignas(16) Shared {
  uint64_t is_full[kStages], is_free[kStages];
  float token_scale[kStages][kTokens];
  float weight_scale[kStages][2];      // of the linear and the gate rows, or of either group's
  float largest[kConsumers][kTokens];  // of C, by group and row
  int32_t rows[kMaxLocal], tiles[kMaxLocal];  // of an expert and those before it
};

static_assert(FK_GEMM1 + FK_GEMM2 == 1 && FK_THREADS == (1 + kConsumers) * kGroupThreads &&
                  FK_SHARED_BYTES == kStages * kStageBytes + sizeof(Shared),
              "kernels/__init__.py says otherwise");

__device__ __forceinline__ Shared* shared() {
  return reinterpret_cast<Shared*>(ptx::dynamic_shared() + kStages * kStageBytes);
}

__device__ __forceinline__ int32_t rank_in_cluster() {
  return kCluster == 1 ? 0 : static_cast<int32_t>(ptx::cluster_rank());
}

// ---- tiles --------------------------------------------------------------------------------------

struct Tile {
  int32_t expert, column;  // which 256 rows of the weights
  int32_t first, count;    // rows of the workspace, at most kTokens
};

// The first warp adds up what the experts before each one have, and itself.
__device__ __forceinline__ void count_tiles(const int32_t* counts, int32_t num_local) {
  constexpr int kEach = kMaxLocal / 32;
  const int32_t lane = threadIdx.x;
  int32_t rows[kEach], tiles[kEach], all_rows = 0, all_tiles = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int32_t expert = lane * kEach + i;
    const int32_t count = expert < num_local ? counts[expert] : 0;
    rows[i] = all_rows += count;
    tiles[i] = all_tiles += (count + kTileTokens - 1) / kTileTokens;
  }
  int32_t rows_before = all_rows, tiles_before = all_tiles;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other_rows = __shfl_up_sync(0xffffffffu, rows_before, step);
    const int32_t other_tiles = __shfl_up_sync(0xffffffffu, tiles_before, step);
    if (lane >= step) {
      rows_before += other_rows;
      tiles_before += other_tiles;
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    shared()->rows[lane * kEach + i] = rows_before - all_rows + rows[i];
    shared()->tiles[lane * kEach + i] = tiles_before - all_tiles + tiles[i];
  }
}

__device__ __forceinline__ Tile locate(int32_t tile, int32_t columns) {
  const Shared* found = shared();
  int32_t expert = 0;
#pragma unroll
  for (int step = kMaxLocal / 2; step > 0; step /= 2) {
    if (found->tiles[expert + step - 1] * columns <= tile) expert += step;
  }
  const int32_t tiles_before = expert > 0 ? found->tiles[expert - 1] : 0;
  const int32_t rows_before = expert > 0 ? found->rows[expert - 1] : 0;
  const int32_t parts = found->tiles[expert] - tiles_before;
  const int32_t within = tile - tiles_before * columns, column = within / parts;
  // The blocks of a cluster share the tile's tokens evenly, in units of 64.
  const int32_t first = rows_before + within % parts * kTileTokens;
  const int32_t all = min(found->rows[expert] - first, kTileTokens);
  const int32_t share = (all + 64 * kCluster - 1) / (64 * kCluster) * 64;
  const int32_t mine = rank_in_cluster() * share;
  return {expert, column, first + mine, max(min(all - mine, share), 0)};
}

// The tiles of a cluster, and the steps of each.
struct Schedule {
  int32_t columns, steps, tiles;

  __device__ __forceinline__ explicit Schedule(const Params& p) {
    const int32_t hidden = p.hidden_size / kBlock, intermediate = p.intermediate_size / kBlock;
    columns = FK_GEMM1 ? intermediate : (hidden + kConsumers - 1) / kConsumers;
    steps = FK_GEMM1 ? hidden : intermediate;
    tiles = shared()->tiles[kMaxLocal - 1] * columns;
  }

  static __device__ __forceinline__ int32_t first() { return blockIdx.x / kCluster; }
  static __device__ __forceinline__ int32_t stride() { return gridDim.x / kCluster; }
};

// The steps of one tile after another, in a ring of stages.
struct Ring {
  uint32_t stage = 0, round = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      ++round;
    }
  }

  __device__ __forceinline__ uint32_t tokens() const {
    return ptx::shared_address(ptx::dynamic_shared()) + stage * kStageBytes;
  }
  __device__ __forceinline__ uint32_t weights() const { return tokens() + kParts * kPartBytes; }

  __device__ __forceinline__ void wait_full() const {
    ptx::mbarrier_wait(ptx::shared_address(&shared()->is_full[stage]), round & 1);
  }
  __device__ __forceinline__ void wait_free() const {
    ptx::mbarrier_wait(ptx::shared_address(&shared()->is_free[stage]), (round & 1) ^ 1);
  }
};

// ---- producers ----------------------------------------------------------------------------------

constexpr int kPieces = kRowBytes / 16;               // of a row, one for each thread
constexpr int kRowsAtOnce = kGroupThreads / kPieces;  // rows that the group copies at once
constexpr int kTokenRows = kTokens / kRowsAtOnce;     // of a thread
constexpr bool kIsAsync = FK_ALIGNED;
constexpr int kBoxes = kConsumers * kColumns / kBoxRows;
static_assert(kBoxes * kBoxRows * kRowBytes == kWeightBytes, "else a stage never fills");

// 16 bytes of a tensor of the caller.
__device__ __forceinline__ void copy_piece(uint32_t to, const unsigned char* from) {
  if constexpr (kIsAsync) {
    ptx::copy_async(to, from, 16);
  } else {
#pragma unroll 1
    for (int i = 0; i < 16; i += 4) {
      const uint32_t high = from[i + 3];
      ptx::store_shared(to + i, from[i] | from[i + 1] << 8 | from[i + 2] << 16 | high << 24);
    }
  }
}

__device__ __forceinline__ void copy_number(float* to, const float* from) {
  if constexpr (kIsAsync) {
    ptx::copy_word_async(ptx::shared_address(to), from);
  } else {
    ptx::store_shared(ptx::shared_address(to), __float_as_uint(*from));
  }
}

// The weights of a product.
struct Weights {
  const unsigned char* codes;
  const float* scale;
  int64_t stride_e, stride_n, scale_stride_e, scale_stride_n;

  __device__ __forceinline__ explicit Weights(const Params& p)
      : codes(static_cast<const unsigned char*>(FK_GEMM1 ? p.w13 : p.w2)),
        scale(static_cast<const float*>(FK_GEMM1 ? p.w13_scale : p.w2_scale)),
        stride_e(FK_GEMM1 ? p.w13_stride_e : p.w2_stride_e),
        stride_n(FK_GEMM1 ? p.w13_stride_n : p.w2_stride_n),
        scale_stride_e(FK_GEMM1 ? p.w13_scale_stride_e : p.w2_scale_stride_e),
        scale_stride_n(FK_GEMM1 ? p.w13_scale_stride_n : p.w2_scale_stride_n) {}

  // The expert's first row of a box: group 0's linear and gate rows, then group 1's; or neighbours.
  static __device__ __forceinline__ int32_t row(const Params& p, const Tile& tile, int32_t box) {
    if (FK_GEMM1) {
      return tile.column * kBlock + box / 2 * kBoxRows + box % 2 * p.intermediate_size;
    }
    return (tile.column * kBoxes + box) * kBoxRows;
  }
};

// What a producer thread copies of a tile, a step at a time: a piece of every 16th row of tokens;
// one thread the weights, or, byte by byte, all threads.
class Source {
 public:
  __device__ __forceinline__ Source(const ProductParams& product, const Tile& tile)
      : product_(product), tile_(tile) {
    const Params& p = product.params;
    const Weights weights(p);
    const int32_t thread = threadIdx.x, row = thread / kPieces, piece = thread % kPieces * 16;
    to_ = row * kRowBytes + (piece ^ row % 8 * 16);
#if FK_GEMM1
    const int32_t* slots = product.row_slot + tile.first;
    // Of the rows that a warp copies each lane knows one's token; see `copy_tokens`.
    const int32_t known = thread / 32 * 4 + thread % 4 + thread % 32 / 4 * kRowsAtOnce;
    token_ = known < tile.count ? slots[known] / p.topk : 0;
    if (thread < tile.count) {
      token_scale_ =
          static_cast<const float*>(p.x_scale) + slots[thread] / p.topk * p.x_scale_stride_t;
    }
    const int32_t scales = 2, scale_row = tile.column + thread * (p.intermediate_size / kBlock);
#else
    codes_ = product.codes + int64_t{tile.first + row} * 2 * p.intermediate_size;
    if (thread < tile.count) {
      token_scale_ = product.scales + int64_t{tile.first + thread} * (p.intermediate_size / kBlock);
    }
    const int32_t scale_row = tile.column * kConsumers + thread;
    const int32_t scales = min(p.hidden_size / kColumns - tile.column * kConsumers, kConsumers);
#endif
    if (thread < scales) {
      weight_scale_ =
          weights.scale + tile.expert * weights.scale_stride_e + scale_row * weights.scale_stride_n;
    }
  }

  __device__ __forceinline__ void copy_step(const Ring& ring, int32_t step) {
    const int32_t thread = threadIdx.x, row = thread / kPieces;
    const uint32_t barrier = ptx::shared_address(&shared()->is_full[ring.stage]);
    if (kIsAsync && thread == 0) load_boxes(ring, step, barrier);
#pragma unroll 4
    for (int i = 0; i < kTokenRows; ++i) {
      copy_tokens(i, step, row + i * kRowsAtOnce < tile_.count, ring.tokens() + to_);
    }
    if (token_scale_ != nullptr) {
      copy_number(&shared()->token_scale[ring.stage][thread], token_scale_);
      token_scale_ += FK_GEMM1 ? product_.params.x_scale_stride_b : 1;
    }
    if (weight_scale_ != nullptr) {
      copy_number(&shared()->weight_scale[ring.stage][thread], weight_scale_++);
    }
    if constexpr (kIsAsync) {
      ptx::copy_arrive(barrier);
    } else {
      copy_weights(ring, step);
      ptx::mbarrier_arrive_expect(barrier, 0);
    }
  }

 private:
  // Each block of the cluster loads its share for all of them.
  __device__ __forceinline__ void load_boxes(const Ring& ring, int32_t step,
                                             uint32_t barrier) const {
    ptx::mbarrier_arrive_expect(barrier, kWeightBytes);
    const int32_t expert_row = tile_.expert * product_.expert_rows;
#pragma unroll
    for (int i = 0; i < kBoxes / kCluster; ++i) {
      const int32_t box = rank_in_cluster() * (kBoxes / kCluster) + i;
      const int32_t row = expert_row + Weights::row(product_.params, tile_, box);
      const uint32_t to = ring.weights() + box * kBoxRows * kRowBytes;
      if constexpr (kCluster == 1) {
        ptx::box_load(to, &product_.weights, step * kBlock, row, barrier);
      } else {
        ptx::box_load(to, &product_.weights, step * kBlock, row, barrier, (1 << kCluster) - 1);
      }
    }
  }

  __device__ __forceinline__ void copy_weights(const Ring& ring, int32_t step) const {
    const Params& p = product_.params;
    const Weights weights(p);
    const unsigned char* expert = weights.codes + tile_.expert * weights.stride_e + step * kBlock +
                                  threadIdx.x % kPieces * 16;
#pragma unroll 1
    for (int32_t row = threadIdx.x / kPieces; row < kBoxes * kBoxRows; row += kRowsAtOnce) {
      const int32_t from = Weights::row(p, tile_, row / kBoxRows) + row % kBoxRows;
      if (FK_GEMM2 && from >= p.hidden_size) break;
      copy_piece(ring.weights() + to_ + (row - threadIdx.x / kPieces) * kRowBytes,
                 expert + from * weights.stride_n);
    }
  }

  // Of the i-th row, if there is one, to where the first one goes.
  __device__ __forceinline__ void copy_tokens(int i, int32_t step, bool is_row, uint32_t to) const {
    const Params& p = product_.params;
    const int32_t column = step * kBlock + threadIdx.x % kPieces * 16;
    to += i * kRowsAtOnce * kRowBytes;
#if FK_GEMM1
    const int64_t token = __shfl_sync(0xffffffffu, token_, 4 * i + threadIdx.x % 32 / kPieces);
    const auto* x = static_cast<const unsigned char*>(p.x);
    if (is_row) copy_piece(to, x + token * p.x_stride_t + column);
#else
    const int64_t size = p.intermediate_size;
    const unsigned char* from = codes_ + i * kRowsAtOnce * 2 * size + column;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (is_row) copy_piece(to + part * kPartBytes, from + part * size);
    }
#endif
  }

  const ProductParams& product_;
  const Tile tile_;
  uint32_t to_;  // in a tile of rows
#if FK_GEMM1
  int32_t token_;
#else
  const unsigned char* codes_;
#endif
  const float *token_scale_ = nullptr, *weight_scale_ = nullptr;  // null: another thread's
};

// ---- consumers ----------------------------------------------------------------------------------

// A consumer thread: it has rows `row()` and 8 more of each 64, and of each 8 columns 2.
struct Consumer {
  int32_t group, warp, lane;

  __device__ __forceinline__ Consumer()
      : group(__shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0) - 1),  // known to be uniform
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  __device__ __forceinline__ int32_t row() const { return warp * 16 + lane / 4; }

  // Of the weights' rows, in the second product those of the output.
  __device__ __forceinline__ int64_t first_column(const Tile& tile) const {
    return (int64_t{tile.column} * kConsumers + group) * kColumns;
  }

  // How many times 64 rows of a tile are wanted; none where the group has no columns.
  __device__ __forceinline__ int32_t waves(const Tile& tile, int32_t hidden_size) const {
    return FK_GEMM1 || first_column(tile) < hidden_size ? (tile.count + 63) / 64 : 0;
  }

  // Adds up the steps of a tile. The ring moves on.
  __device__ __forceinline__ void add_up(float (&sums)[kWaves][64], int32_t steps, int32_t waves,
                                         Ring* ring) const {
    for (int32_t step = 0; step < steps; ++step) {
      ring->wait_full();
      ptx::fence_async_shared();  // what cp.async wrote, before products read it
      if (waves == 0) release(*ring);
      const uint64_t weights = ptx::swizzled_rows(ring->weights() + group * kColumns * kRowBytes);
      const float* token_scale = &shared()->token_scale[ring->stage][row()];
      const float* weight_scale = shared()->weight_scale[ring->stage];
      const float first = weight_scale[FK_GEMM1 ? 0 : group];
      const float second = weight_scale[FK_GEMM1 ? 1 : group];
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        if (wave >= waves) break;
        float products[64];
        ptx::wgmma_fence();
#pragma unroll
        for (int part = kParts - 1; part >= 0; --part) {  // remainders first: they are small
          const uint64_t tokens =
              ptx::swizzled_rows(ring->tokens() + part * kPartBytes + wave * 64 * kRowBytes);
#pragma unroll
          for (int k = 0; k < kRowBytes / 32; ++k) {
            ptx::wgmma_e4m3(products, tokens + 2 * k, weights + 2 * k, part < kParts - 1 || k > 0);
          }
        }
        ptx::wgmma_commit();
        const float low = token_scale[wave * 64], high = token_scale[wave * 64 + 8];
        ptx::wgmma_wait(products);
        if (wave == waves - 1) release(*ring);
        const float scales[2][2] = {{low * first, high * first}, {low * second, high * second}};
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          sums[wave][i] = fmaf(products[i], scales[i / 32][i / 2 % 2], sums[wave][i]);
        }
      }
      ring->advance();
    }
  }

 private:
  __device__ __forceinline__ void release(const Ring& ring) const {
    const uint32_t barrier = ptx::shared_address(&shared()->is_free[ring.stage]);
    __syncwarp();
    if constexpr (kCluster == 1) {
      if (lane == 0) ptx::mbarrier_arrive_expect(barrier, 0);
    } else {
      if (lane < kCluster) ptx::mbarrier_arrive_cluster(ptx::map_shared(barrier, lane));
    }
  }
};

#if FK_GEMM1

constexpr float kLargestCode = 448.0f;
constexpr float kSmallestScale = 0x1p-120f;  // below it scales are not divided by

// silu(gate) * linear. Where exp2 overflows, gate is multiplied by 0.
__device__ __forceinline__ float swiglu(float linear, float gate) {
  constexpr float kLog2E = 1.44269504f;
  return gate * ptx::reciprocal(1.0f + ptx::exp2(-kLog2E * gate)) * linear;
}

// Four lanes have two neighbouring columns each of 8 times 8 columns, as words of two codes; each
// gets 16 neighbouring codes, 16 bytes from column 16 * (lane % 4) on.
__device__ __forceinline__ uint4 gather_codes(const uint32_t (&pairs)[8], int32_t lane) {
  uint32_t words[4];  // of columns 16m: theirs below, those 8 columns on above
#pragma unroll
  for (int m = 0; m < 4; ++m) words[m] = pairs[2 * m] | pairs[2 * m + 1] << 16;
  // A transposition: word m of lane c becomes word c of lane m.
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool is_upper = lane & bit;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      if (m & bit) continue;
      const uint32_t sent = is_upper ? words[m] : words[m + bit];
      const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, bit);
      (is_upper ? words[m] : words[m + bit]) = got;
    }
  }
  constexpr uint32_t kLower = 0x5410, kUpper = 0x7632;  // halves of two words
  return {__byte_perm(words[0], words[1], kLower), __byte_perm(words[2], words[3], kLower),
          __byte_perm(words[0], words[1], kUpper), __byte_perm(words[2], words[3], kUpper)};
}

// C of a tile, its scales and its codes.
__device__ __forceinline__ void finish(const ProductParams& product, const Tile& tile,
                                       const Consumer& me, float (&sums)[kWaves][64],
                                       int32_t waves) {
  const Params& p = product.params;
  auto& largest = shared()->largest;
  ptx::barrier_sync(1, kConsumers * kGroupThreads);  // that of the tile before has been read
#pragma unroll
  for (int wave = 0; wave < kWaves; ++wave) {
    if (wave >= waves) break;
    float most[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      sums[wave][i] = swiglu(sums[wave][i], sums[wave][i + 32]);
      most[i / 2 % 2] = fmaxf(most[i / 2 % 2], fabsf(sums[wave][i]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = fmaxf(most[half], __shfl_xor_sync(0xffffffffu, most[half], 1));
      most[half] = fmaxf(most[half], __shfl_xor_sync(0xffffffffu, most[half], 2));
      if (me.lane % 4 == 0) largest[me.group][wave * 64 + me.row() + 8 * half] = most[half];
    }
  }
  ptx::barrier_sync(1, kConsumers * kGroupThreads);
#pragma unroll
  for (int wave = 0; wave < kWaves; ++wave) {
    if (wave >= waves) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = wave * 64 + me.row() + 8 * half;
      const float most = fmaxf(largest[0][row], largest[1][row]);
      // The codes are those of what the scale makes of C, whatever rounded it.
      const float scale = fmaxf(most * (1.0f / kLargestCode), kSmallestScale);
      const float inverse = ptx::reciprocal(scale);
      uint32_t codes[8], rests[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float low = sums[wave][4 * j + 2 * half] * inverse;
        const float high = sums[wave][4 * j + 2 * half + 1] * inverse;
        codes[j] = ptx::to_e4m3x2(low, high);
        if constexpr (FK_CODES == 2) {
          const float2 coded = ptx::from_e4m3x2(codes[j]);
          rests[j] = ptx::to_e4m3x2(low - coded.x, high - coded.y);
        }
      }
      const bool is_row = row < tile.count;
      unsigned char* to = product.codes + int64_t{tile.first + row} * 2 * p.intermediate_size +
                          tile.column * kBlock + me.group * 64 + me.lane % 4 * 16;
      const uint4 mine = gather_codes(codes, me.lane);
      if (is_row) ptx::store(to, mine);
      if constexpr (FK_CODES == 2) {
        const uint4 rest = gather_codes(rests, me.lane);
        if (is_row) ptx::store(to + p.intermediate_size, rest);
      }
      if (is_row && me.group == 0 && me.lane % 4 == 0) {
        product.scales[int64_t{tile.first + row} * (p.intermediate_size / kBlock) + tile.column] =
            scale;
      }
    }
  }
}

#else

// The weighted partial outputs of a tile, as bfloat16: of a token with one local expert that is the
// output, of others it costs less than 1 part in 400.
__device__ __forceinline__ void finish(const ProductParams& product, const Tile& tile,
                                       const Consumer& me, const float (&sums)[kWaves][64],
                                       int32_t waves) {
  const int32_t hidden_size = product.params.hidden_size;
  const int64_t first_column = me.first_column(tile);
  // Of 16 columns a lane has the words of 2 and of 2 more, 8 columns on; of two neighbouring lanes
  // one gets the lower and one the upper words of both.
  const bool is_upper = me.lane % 2;
  auto row_of = [&](int wave, int half) { return wave * 64 + me.row() + 8 * half; };
  // Before the first store, which no load is moved across: 2 latencies, not 8.
  int32_t slots[kWaves][2];
  float weights[kWaves][2];
#pragma unroll
  for (int i = 0; i < 2 * kWaves; ++i) {
    const int32_t row = row_of(i / 2, i % 2);
    slots[i / 2][i % 2] = row < tile.count ? product.row_slot[tile.first + row] : -1;
  }
#pragma unroll
  for (int i = 0; i < 2 * kWaves; ++i) {
    const int32_t slot = slots[i / 2][i % 2];
    weights[i / 2][i % 2] = slot >= 0 ? product.slot_weight[slot] : 0.0f;
  }
#pragma unroll
  for (int wave = 0; wave < kWaves; ++wave) {
    if (wave >= waves) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = row_of(wave, half);
      const bool is_row = row < tile.count;
      const float weight = weights[wave][half];
      uint32_t* to = product.partials +
                     (int64_t{tile.first + row} * hidden_size + first_column) / 2 +
                     me.lane % 4 / 2 * 2 + is_upper * 4;
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 2) {
        const float* of = &sums[wave][4 * j + 2 * half];
        const uint32_t lower = ptx::to_bf16x2(of[0] * weight, of[1] * weight);
        const uint32_t upper = ptx::to_bf16x2(of[4] * weight, of[5] * weight);
        const uint32_t got = __shfl_xor_sync(0xffffffffu, is_upper ? lower : upper, 1);
        const uint2 words = is_upper ? uint2{got, upper} : uint2{lower, got};
        if (is_row) *reinterpret_cast<uint2*>(to + 4 * j) = words;
      }
    }
  }
}

#endif

// All threads of the cluster, once they have written what the others read.
__device__ __forceinline__ void meet() {
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

}  // namespace

extern "C" __global__ void __cluster_dims__(FK_CLUSTER, 1, 1) __launch_bounds__(FK_THREADS, 1)
    moe_fp8_block_scale_wgmma_grouped(const __grid_constant__ ProductParams product) {
  const Params& p = product.params;
  if (threadIdx.x == 0) {
    if (kIsAsync) ptx::prefetch_map(&product.weights);
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared()->is_full[stage]), kGroupThreads + kIsAsync);
      ptx::mbarrier_init(ptx::shared_address(&shared()->is_free[stage]), kConsumerWarps * kCluster);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::wait_for_dependency();
  ptx::launch_dependents();
  if (threadIdx.x < 32) count_tiles(product.counts, p.num_local);
  meet();

  Ring ring;
  if (threadIdx.x < kGroupThreads) {
    ptx::lower_registers<kProducerRegisters>();
    const Schedule schedule(p);
    for (int32_t number = schedule.first(); number < schedule.tiles; number += schedule.stride()) {
      Source source(product, locate(number, schedule.columns));
      for (int32_t step = 0; step < schedule.steps; ++step) {
        ring.wait_free();
        source.copy_step(ring, step);
        ring.advance();
      }
    }
    // No block ends before its copies, nor before the others of its cluster are done with it: they
    // have sent it weights, and free its stages.
    for (int stage = 0; stage < kStages; ++stage) {
      ring.wait_free();
      ring.advance();
    }
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    const Consumer me;
    const Schedule schedule(p);
    for (int32_t number = schedule.first(); number < schedule.tiles; number += schedule.stride()) {
      const int32_t waves =
          __shfl_sync(0xffffffffu, me.waves(locate(number, schedule.columns), p.hidden_size), 0);
      float sums[kWaves][64];
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[wave][i] = 0.0f;
      }
      me.add_up(sums, schedule.steps, waves, &ring);
      // Found again, rather than kept in registers that the sums need.
      finish(product, locate(number, schedule.columns), me, sums, waves);
    }
  }
}

}  // namespace fastkernels::moe_fp8_block_scale
