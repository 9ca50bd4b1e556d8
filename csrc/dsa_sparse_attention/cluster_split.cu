// dsa_sparse_attention, route cluster_split: a cluster of blocks for 16 heads of a token.
//
// Plan: every block reads the token's whole row of indices and finds the valid ones by votes, so
// that padding costs nothing wherever it stands. Valid entry number n goes to block n % share;
// `share`, a power of two, is as large as leaves each of them more than half of `min_keys`, and the
// rest of the cluster ends at once. A block gathers its rows slab by slab, `stages` slabs on their
// way (gather.cuh), and attends to them (attend.cuh). Then each sends to every other, through
// distributed shared memory, that one's share of the columns, with maximum and sum (st.async, which
// counts bytes at the receiver's mbarrier: a barrier of the cluster would cost a fence of all
// memory); each adds up and stores its own.
//
// Shared memory: `stages` slabs, the exchange, the list, the queries; what other blocks send has
// room of its own where the cluster is large, so that nobody waits for the slowest before sending,
// and takes the slabs' place where it is small, so that two blocks fit an SM.
//
// Constraints: widths 512 and 64, topk at most 2048. Blocks: of a cluster fastest, then groups of
// 16 heads, then tokens.
//
// Macros: FK_CLUSTER (1, 2, 4, 8, 16), FK_SLAB (keys, 32 or 64), FK_STAGES (2, 3 or more),
// FK_MIN_KEYS (16 or more); FK_ALIGNED (queries, caches and output in 16-byte pieces); FK_THREADS
// and FK_SHARED_BYTES, what the launcher gives.
#include "common/ptx_sm90.cuh"
#include "dsa_sparse_attention/attend.cuh"
#include "dsa_sparse_attention/gather.cuh"
#include "dsa_sparse_attention/params.h"

namespace fastkernels::dsa_sparse_attention {
namespace {

constexpr int kSlabBytes = FK_SLAB * kRowBytes;
// Of the token's valid entries that a block may have to list.
constexpr int kListed = kMaxTopk / FK_CLUSTER > FK_MIN_KEYS ? kMaxTopk / FK_CLUSTER : FK_MIN_KEYS;
constexpr bool kHasOwnRoom = FK_CLUSTER > 4;

using Heads = Attention<FK_SLAB>;

// What a block is sent, for its share of the columns: from each block partial outputs, in tiles of
// 8 columns; and of each head maximum and sum.
struct Received {
  float output[kHeads * kCkv];
  float2 states[kHeads][FK_CLUSTER];
};

struct alignas(16) Shared {
  unsigned char queries[kHeads * kRowBytes];
  Heads::Shared heads;
  float weights[kHeads][FK_CLUSTER + 1];  // a pitch that puts heads into different banks
  uint64_t has_all;                       // the mbarrier of what is received
  int32_t counts[kWarps];
  int32_t list[kListed];
};

constexpr int kSlabs = FK_STAGES * kSlabBytes;
[[maybe_unused]] constexpr int kReceived = kHasOwnRoom ? kSlabs : 0;
constexpr int kShared = kSlabs + (kHasOwnRoom ? static_cast<int>(sizeof(Received)) : 0);
static_assert(sizeof(Received) % 16 == 0 && sizeof(Received) <= kSlabs, "it fits");
static_assert(FK_THREADS == kThreads && FK_SHARED_BYTES == kShared + sizeof(Shared),
              "kernels/__init__.py says otherwise");

__device__ __forceinline__ void copy_slab(const Params& p, const int32_t* list, int32_t slab,
                                          int32_t count) {
  const int32_t left = count - slab * FK_SLAB;
  unsigned char* to = ptx::dynamic_shared() + slab % FK_STAGES * kSlabBytes;
  list += slab * FK_SLAB;
  if (left >= FK_SLAB && p.page_size == kEvenRows) {
    copy_all_keys<FK_SLAB, FK_ALIGNED>(p, to, list);
  } else {
    copy_some_keys<FK_SLAB, FK_ALIGNED>(p, to, list, left);
  }
  ptx::copy_commit();
}

// Attends to the `count` listed keys.
__device__ __forceinline__ void attend(const Params& p, int32_t count, Shared* shared,
                                       Heads* heads) {
#pragma unroll 1
  for (int slab = 0; slab < FK_STAGES; ++slab) copy_slab(p, shared->list, slab, count);
  for (int32_t slab = 0; slab * FK_SLAB < count; ++slab) {
    if (slab == 0) {
      ptx::copy_wait<FK_STAGES - 1>();
    } else {
      ptx::copy_wait<FK_STAGES - 2>();
    }
    __syncthreads();
    // The slab before is done with, by all warps.
    if (slab > 0) copy_slab(p, shared->list, slab - 1 + FK_STAGES, count);
    const unsigned char* keys = ptx::dynamic_shared() + slab % FK_STAGES * kSlabBytes;
    const int32_t left = count - slab * FK_SLAB;
    heads->multiply_keys(keys, left, &shared->heads);
    __syncthreads();
    heads->weigh(left, p.scale_log2, &shared->heads);
    __syncthreads();
    heads->add_values(keys, left, shared->heads);
  }
}

// The output of a block that had all `count` keys.
__device__ __forceinline__ void store_all(const Params& p, int64_t token, int32_t first_head,
                                          int32_t count, Shared* shared, Heads* heads) {
  __syncthreads();  // factors of the last slab have been read
  if (threadIdx.x % 16 == 0) {
    const int32_t head = threadIdx.x / 16;
    // Where all logits are -inf the sum is 0, and the output NaN, as the softmax is.
    shared->heads.factors[head] = count == 0 ? 0.0f : ptx::reciprocal(heads->sum);
    store_lse(p, token, first_head + head, heads->maximum, heads->sum);
  }
  __syncthreads();
  heads->scale(shared->heads);
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int32_t head = first_head + lane / 4, column = (warp * kTiles + n) * 8 + lane % 4 * 2;
    const float (&x)[4] = heads->output[n];
    store_columns<FK_ALIGNED>(p, token, head, column, x[0], x[1]);
    store_columns<FK_ALIGNED>(p, token, head + 8, column, x[2], x[3]);
  }
}

#if FK_CLUSTER > 1

// To each of the blocks, `1 << share_log2` many, its columns of this one's partial output.
__device__ __forceinline__ void send(uint32_t rank, uint32_t share_log2, const Shared& shared,
                                     const Heads& heads) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto* received = reinterpret_cast<Received*>(ptx::dynamic_shared() + kReceived);
  const uint32_t each_log2 = 6 - share_log2;  // of the tiles of a block
  static_assert(kCkv / 8 == 1 << 6, "so many tiles");
  const uint32_t output = ptx::shared_address(received->output);
  const uint32_t barrier = ptx::shared_address(&shared.has_all);
  // Neighbouring lanes have two columns each of two tiles: one takes all four of the first, one
  // those of the second, so that a store is of 16 bytes.
  const bool is_second = lane % 2 != 0;
#pragma unroll
  for (int n = 0; n < kTiles; n += 2) {
    const uint32_t tile = warp * kTiles + n + is_second, receiver = tile >> each_log2;
    const uint32_t place = (rank << each_log2) + (tile & ((1u << each_log2) - 1));
    const uint32_t to = ptx::map_shared(
        output + 4 * ((place * kHeads + lane / 4) * 8 + lane % 4 / 2 * 4), receiver);
    const uint32_t to_barrier = ptx::map_shared(barrier, receiver);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* first = heads.output[n] + 2 * half;
      const float* second = heads.output[n + 1] + 2 * half;
      const float x = __shfl_xor_sync(0xffffffffu, is_second ? first[0] : second[0], 1);
      const float y = __shfl_xor_sync(0xffffffffu, is_second ? first[1] : second[1], 1);
      const float4 four = is_second ? make_float4(x, y, second[0], second[1])
                                    : make_float4(first[0], first[1], x, y);
      ptx::store_async(to + half * (4 * 8 * 8), four, to_barrier);  // heads from 8 on: half 1
    }
  }
  const uint32_t head = threadIdx.x / 16, receiver = threadIdx.x % 16;
  if (receiver >> share_log2 == 0) {
    const uint32_t to = ptx::shared_address(&received->states[head][rank]);
    ptx::store_async(ptx::map_shared(to, receiver), make_float2(heads.maximum, heads.sum),
                     ptx::map_shared(barrier, receiver));
  }
}

// This block's columns, from what the blocks have sent.
__device__ __forceinline__ void combine(const Params& p, int64_t token, int32_t first_head,
                                        uint32_t rank, uint32_t share_log2, Shared* shared) {
  const uint32_t share = 1u << share_log2;
  const auto* received = reinterpret_cast<const Received*>(ptx::dynamic_shared() + kReceived);
  {
    const uint32_t head = threadIdx.x / 16, sender = threadIdx.x % 16;
    const float2 state =
        sender < share ? received->states[head][sender] : make_float2(-INFINITY, 0.0f);
    float maximum = state.x;
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, distance));
    }
    const float shift = maximum == -INFINITY ? 0.0f : maximum;
    const float factor = ptx::exp2(state.x - shift);
    float sum = factor * state.y;
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    // Where all logits are -inf the sum is 0, and the output NaN, as the softmax is.
    if (sender < share) shared->weights[head][sender] = factor * ptx::reciprocal(sum);
    if (rank == 0 && sender == 0) store_lse(p, token, first_head + head, maximum, sum);
  }
  __syncthreads();
  const uint32_t each = kCkv / 8 >> share_log2;
  for (uint32_t i = threadIdx.x; i < each * kHeads * 4; i += kThreads) {
    const uint32_t tile = i / (4 * kHeads), head = i / 4 % kHeads, pair = i % 4;
    float x = 0.0f, y = 0.0f;
    for (uint32_t sender = 0; sender < share; ++sender) {
      const float2 part = *reinterpret_cast<const float2*>(
          &received->output[((sender * each + tile) * kHeads + head) * 8 + 2 * pair]);
      const float weight = shared->weights[head][sender];
      x += weight * part.x;
      y += weight * part.y;
    }
    store_columns<FK_ALIGNED>(p, token, first_head + head, (rank * each + tile) * 8 + 2 * pair, x,
                              y);
  }
}

#endif

}  // namespace

extern "C" __global__ void __cluster_dims__(FK_CLUSTER, 1, 1)
    __launch_bounds__(FK_THREADS, FK_SLAB == 32 && FK_SHARED_BYTES <= 113 * 1024 ? 2 : 1)
        dsa_sparse_attention_cluster_split(const __grid_constant__ Params p) {
  auto* shared = reinterpret_cast<Shared*>(ptx::dynamic_shared() + kShared);
  const uint32_t rank = FK_CLUSTER > 1 ? ptx::cluster_rank() : 0;
  const uint32_t number = blockIdx.x / FK_CLUSTER;
  const uint32_t groups = (p.num_heads + kHeads - 1) / kHeads;
  // Mostly there is one group, and the indices would wait for the division.
  const uint32_t group = groups == 1 ? 0 : number % groups;
  const int64_t token = groups == 1 ? number : number / groups;
  const int32_t first_head = group * kHeads;

  Entries entries;
  entries.load(p, token);
  const uint32_t has_all = ptx::shared_address(&shared->has_all);
  if (FK_CLUSTER > 1 && threadIdx.x == 0) {
    ptx::mbarrier_init(has_all, 1);
    ptx::fence_mbarrier_init();
  }
  copy_queries<FK_ALIGNED>(p, shared->queries, token, first_head);
  ptx::copy_commit();
  const int32_t votes = entries.vote(p);
  if (threadIdx.x % 32 == 0) shared->counts[threadIdx.x / 32] = votes;
  __syncthreads();
  int32_t before = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < static_cast<int>(threadIdx.x / 32) ? shared->counts[w] : 0;
    total += shared->counts[w];
  }
  uint32_t share_log2 = 0;
  while (1 << share_log2 < FK_CLUSTER && FK_MIN_KEYS << share_log2 < total) ++share_log2;
  if (rank >> share_log2 != 0) {
    ptx::copy_wait<0>();
    return;
  }
  entries.keep(before, rank, share_log2, shared->list);
  ptx::copy_wait<0>();
  __syncthreads();
  // Whoever sends waits for this: this block has started, and its mbarrier is there.
  if (FK_CLUSTER > 1 && kHasOwnRoom && share_log2 > 0) ptx::cluster_arrive_relaxed();
  Heads heads;
  heads.load_queries(shared->queries);
  const int32_t share = 1 << share_log2;
  attend(p, (total - static_cast<int32_t>(rank) + share - 1) >> share_log2, shared, &heads);
  if (share == 1) {
    store_all(p, token, first_head, total, shared, &heads);
    return;
  }
#if FK_CLUSTER > 1
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(has_all, 4 * kHeads * kCkv + 8 * kHeads * share);
  }
  if (!kHasOwnRoom) ptx::cluster_arrive();  // and all have done with their slabs
  ptx::cluster_wait();
  send(rank, share_log2, *shared, heads);
  ptx::mbarrier_wait_cluster(has_all, 0);
  combine(p, token, first_head, rank, share_log2, shared);
#endif
}

}  // namespace fastkernels::dsa_sparse_attention
