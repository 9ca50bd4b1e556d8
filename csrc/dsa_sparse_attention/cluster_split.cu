// dsa_sparse_attention, route cluster_split: a cluster of blocks for 16 heads of a token.
//
// Plan: entries of the token's row of indices are dealt to the blocks by their places, 8 at a time,
// so that a block reads but its own and needs nobody else's to start. It finds the valid ones by
// votes (padding costs nothing wherever it stands), gathers their rows slab by slab, `stages` slabs
// on their way (gather.cuh), and attends to them (attend.cuh). Then each sends to every other,
// through distributed shared memory, that one's share of the columns, with maximum and sum
// (st.async, which counts bytes at the receiver's mbarriers: a barrier of the cluster would cost a
// fence of all memory); each adds up and stores its own.
//
// Shared memory: `stages` slabs, the exchange, the list, the queries; what other blocks send has
// room of its own where the cluster is large, so that nobody waits for the slowest before sending,
// and takes the slabs' place where it is small, so that two blocks fit an SM.
//
// Constraints: widths 512 and 64, topk at most 2048. Blocks: of a cluster fastest, then groups of
// 16 heads, then tokens.
//
// Macros: FK_CLUSTER (1, 2, 4, 8, 16), FK_SLAB (keys, 32 or 64), FK_STAGES (2, 3 or more);
// FK_ALIGNED (queries, caches and output in 16-byte pieces); FK_THREADS and FK_SHARED_BYTES, what
// the launcher gives.
#include "common/ptx_sm90.cuh"
#include "dsa_sparse_attention/attend.cuh"
#include "dsa_sparse_attention/gather.cuh"
#include "dsa_sparse_attention/params.h"

namespace fastkernels::dsa_sparse_attention {
namespace {

constexpr int kSlabBytes = FK_SLAB * kRowBytes;
constexpr bool kHasOwnRoom = FK_CLUSTER > 4;
// Scores of the next slab are made beside the output of this one: a barrier less for each, and more
// for the tensor cores to do between two. With two slabs a gather would have nowhere to go
// meanwhile.
constexpr bool kIsAhead = FK_STAGES > 2;
constexpr int kPitch = (FK_CLUSTER + 4) / 4 * 4;  // that puts heads into different banks
constexpr int kOutputBytes = 4 * kHeads * kCkv, kStatesBytes = 8 * kHeads * FK_CLUSTER;

using Heads = Attention<FK_SLAB>;

// What a block is sent, for its share of the columns: from each block partial outputs, as its lanes
// have them (`send`), in pairs of tiles; and of each head maximum and sum.
struct Received {
  float output[kHeads * kCkv];
  float2 states[kHeads][FK_CLUSTER];
};

struct alignas(16) Shared {
  unsigned char queries[kHeads * kRowBytes];
  Heads::Shared heads;
  alignas(16) float weights[kHeads][kPitch];
  uint64_t has_states, has_output;  // mbarriers of what is received
  int32_t counts[kWarps];
  int32_t list[Entries<FK_CLUSTER>::kEntries];
};

constexpr int kSlabs = FK_STAGES * kSlabBytes;
[[maybe_unused]] constexpr int kReceived = kHasOwnRoom ? kSlabs : 0;
constexpr int kShared = kSlabs + (kHasOwnRoom ? static_cast<int>(sizeof(Received)) : 0);
static_assert(sizeof(Received) == kOutputBytes + kStatesBytes && sizeof(Received) <= kSlabs &&
                  sizeof(Received) % 16 == 0,
              "it fits");
static_assert(FK_THREADS == kThreads && FK_SHARED_BYTES == kShared + sizeof(Shared),
              "kernels/__init__.py says otherwise");

__device__ __forceinline__ unsigned char* slab_of(int32_t slab) {
  return ptx::dynamic_shared() + slab % FK_STAGES * kSlabBytes;
}

__device__ __forceinline__ void copy_slab(const Params& p, const int32_t* list, int32_t slab,
                                          int32_t count) {
  const int32_t left = count - slab * FK_SLAB;
  unsigned char* to = slab_of(slab);
  list += slab * FK_SLAB;
  if (p.page_size == kEvenRows) {
    copy_keys<FK_SLAB, FK_ALIGNED, true>(p, to, list, left);
  } else {
    copy_keys<FK_SLAB, FK_ALIGNED, false>(p, to, list, left);
  }
  ptx::copy_commit();
}

// Waits for this thread's copies but for those of the newest `kPending` slabs; before the first
// gather into a used slab there is one slab more.
template <int kPending>
__device__ __forceinline__ void wait_for_slab(bool is_first) {
  if (is_first) {
    ptx::copy_wait<kPending + 1>();
  } else {
    ptx::copy_wait<kPending>();
  }
  __syncthreads();
}

// Attends to the `count` listed keys; copies of the queries are on their way.
__device__ __forceinline__ void attend(const Params& p, int32_t count, Shared* shared,
                                       Heads* heads) {
#pragma unroll 1
  for (int slab = 0; slab < FK_STAGES; ++slab) copy_slab(p, shared->list, slab, count);
  ptx::copy_wait<FK_STAGES>();
  __syncthreads();
  heads->load_queries(shared->queries);
  if constexpr (kIsAhead) {
    ptx::copy_wait<FK_STAGES - 1>();
    __syncthreads();
    heads->multiply_keys(slab_of(0), count, &shared->heads);
  }
#pragma unroll 1
  for (int32_t slab = 0; slab * FK_SLAB < count; ++slab) {
    const int32_t left = count - slab * FK_SLAB;
    // The slab before is done with, by all warps, after this.
    wait_for_slab<FK_STAGES - (kIsAhead ? 3 : 2)>(slab == 0);
    if constexpr (!kIsAhead) {
      if (slab > 0) copy_slab(p, shared->list, slab - 1 + FK_STAGES, count);
      heads->multiply_keys(slab_of(slab), left, &shared->heads);
      __syncthreads();
    }
    heads->weigh(left, p.scale_log2, &shared->heads);
    if (kIsAhead && slab > 0) copy_slab(p, shared->list, slab - 1 + FK_STAGES, count);
    __syncthreads();
    heads->add_values(slab_of(slab), left, shared->heads);
    if constexpr (kIsAhead) {
      heads->multiply_keys(slab_of(slab + 1), left - FK_SLAB, &shared->heads);
    }
  }
  heads->add_sums();
}

#if FK_CLUSTER == 1

// The output of a block that had all keys.
__device__ __forceinline__ void store_all(const Params& p, int64_t token, int32_t first_head,
                                          Shared* shared, Heads* heads) {
  __syncthreads();  // factors of the last slab have been read
  if (threadIdx.x % 16 == 0) {
    const int32_t head = threadIdx.x / 16;
    shared->heads.factors[head] = get_scale(heads->sum);
    store_lse(p, token, first_head + head, heads->maximum, heads->sum);
  }
  __syncthreads();
  heads->scale(shared->heads);
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t head = first_head + lane / 4 + 8 * half;
    if (head >= p.num_heads) break;
    uint16_t* to = output_row(p, token, head) + warp * kTiles * 8 + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float* x = heads->output[n] + 2 * half;
      store_columns<FK_ALIGNED>(to + 8 * n, x[0], x[1]);
    }
  }
}

#else

constexpr int kEach = kCkv / 8 / FK_CLUSTER;  // tiles of a block

// To each of the blocks its columns of this one's partial output, with maxima and sums before them:
// what follows from these is worked out while columns are on their way.
__device__ __forceinline__ void send(uint32_t rank, const Shared& shared, const Heads& heads) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto* received = reinterpret_cast<Received*>(ptx::dynamic_shared() + kReceived);
  const uint32_t head = threadIdx.x / 16, other = threadIdx.x % 16;
  if (other < FK_CLUSTER) {
    const uint32_t to = ptx::shared_address(&received->states[head][rank]);
    const uint32_t barrier = ptx::shared_address(&shared.has_states);
    ptx::store_async(ptx::map_shared(to, other), make_float2(heads.maximum, heads.sum),
                     ptx::map_shared(barrier, other));
  }
  const uint32_t output = ptx::shared_address(received->output) + 16 * lane;
  const uint32_t barrier = ptx::shared_address(&shared.has_output);
#pragma unroll
  for (int n = 0; n < kTiles; n += 2) {
    const uint32_t tile = warp * kTiles + n, receiver = tile / kEach;
    const uint32_t place = rank * kEach + tile % kEach;
    const uint32_t to = ptx::map_shared(output + place * (4 * kHeads * 8), receiver);
    const uint32_t to_barrier = ptx::map_shared(barrier, receiver);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // heads from 8 on: half 1
      const float* low = heads.output[n] + 2 * half;
      const float* high = heads.output[n + 1] + 2 * half;
      ptx::store_async(to + half * 512, make_float4(low[0], low[1], high[0], high[1]), to_barrier);
    }
  }
  __syncwarp();  // no lane spins while another one has yet to send
}

// This block's columns, from what the blocks have sent.
__device__ __forceinline__ void combine(const Params& p, int64_t token, int32_t first_head,
                                        uint32_t rank, Shared* shared) {
  const auto* received = reinterpret_cast<const Received*>(ptx::dynamic_shared() + kReceived);
  ptx::mbarrier_wait_cluster(ptx::shared_address(&shared->has_states), 0);
  {
    const uint32_t head = threadIdx.x / 16, sender = threadIdx.x % 16;
    const float2 state =
        sender < FK_CLUSTER ? received->states[head][sender] : make_float2(-INFINITY, -0.0f);
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
    if (sender < FK_CLUSTER) shared->weights[head][sender] = factor * get_scale(sum);
    if (rank == 0 && sender == 0) store_lse(p, token, first_head + head, maximum, sum);
  }
  __syncthreads();
  // Of two tiles in turn, two columns of a lane of the senders' warps.
  const uint32_t first_tile = threadIdx.x / 128 * 2 + threadIdx.x % 2;
  const uint32_t lane = threadIdx.x / 2 % 32, head = threadIdx.x / 64 % 2 * 8 + lane / 4;
  float weights[FK_CLUSTER];
#pragma unroll
  for (int sender = 0; sender < FK_CLUSTER; ++sender) {
    weights[sender] = shared->weights[head][sender];
  }
  ptx::mbarrier_wait_cluster(ptx::shared_address(&shared->has_output), 0);
  const float* from = received->output + 2 * threadIdx.x;
  const bool is_there = first_head + static_cast<int32_t>(head) < p.num_heads;
  uint16_t* to =
      output_row(p, token, first_head + head) + (rank * kEach + first_tile) * 8 + lane % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < kEach; tile += 4) {
    float x = 0.0f, y = 0.0f;
#pragma unroll
    for (int sender = 0; sender < FK_CLUSTER; ++sender) {
      const float2 part =
          *reinterpret_cast<const float2*>(from + (sender * kEach + tile) * kHeads * 8);
      x += weights[sender] * part.x;
      y += weights[sender] * part.y;
    }
    if (is_there) store_columns<FK_ALIGNED>(to + 8 * tile, x, y);
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

  Entries<FK_CLUSTER> entries;
  entries.load(p, token, rank);
  copy_queries<FK_ALIGNED>(p, shared->queries, token, first_head);
  ptx::copy_commit();
  if (FK_CLUSTER > 1 && threadIdx.x == 0) {
    const uint32_t has_states = ptx::shared_address(&shared->has_states);
    const uint32_t has_output = ptx::shared_address(&shared->has_output);
    ptx::mbarrier_init(has_states, 1);
    ptx::mbarrier_init(has_output, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect(has_states, kStatesBytes);
    ptx::mbarrier_arrive_expect(has_output, kOutputBytes);
  }
  const int32_t votes = entries.vote(p);
  if (threadIdx.x % 32 == 0) shared->counts[threadIdx.x / 32] = votes;
  __syncthreads();
  // Whoever sends waits for this: this block has started, and its mbarriers are there.
  if (FK_CLUSTER > 1 && kHasOwnRoom) ptx::cluster_arrive_relaxed();
  int32_t before = 0, count = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < static_cast<int>(threadIdx.x / 32) ? shared->counts[w] : 0;
    count += shared->counts[w];
  }
  entries.keep(before, shared->list);
  __syncthreads();
  Heads heads;
  attend(p, count, shared, &heads);
#if FK_CLUSTER == 1
  store_all(p, token, first_head, shared, &heads);
#else
  if (!kHasOwnRoom) ptx::cluster_arrive();  // and all have done with their slabs
  ptx::cluster_wait();
  send(rank, *shared, heads);
  combine(p, token, first_head, rank, shared);
#endif
}

}  // namespace fastkernels::dsa_sparse_attention
