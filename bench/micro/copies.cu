// How fast one SM gets tiles out of L2, by the way they are copied.
//
//     nvcc -std=c++17 -O3 -arch=sm_90a bench/micro/copies.cu -o copies && ./copies
//
// A block a SM takes steps through a ring of tiles, as the chain of gdn_prefill does with the
// inputs of its chunks, and does nothing with them; all but one tile of the ring are on their way.
// Blocks in groups of eight read the same tiles. Printed: cycles a step, and bytes a cycle and SM.
// With few blocks that is what one SM can get, at 128 what the L2 gives; a rate that grows with the
// ring is one of bytes on their way.
//
//     async     cp.async of 16 bytes, 128 threads or 256
//     bulk      cp.async.bulk of whole quarters of a tile, by one thread
//     rows      cp.async.bulk of 256 bytes or 1 KB, by 128 threads: rows of a strided tensor
//     multicast an eighth of a tile by each block of a cluster, for all eight
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../csrc/common/ptx_sm90.cuh"

namespace ptx = fastkernels::ptx;

namespace {

constexpr int kGroup = 8, kSteps = 120, kLargestTile = 45056;

enum Way { kAsync, kBulk, kRows256, kRows1024, kMulticast };

template <int kStages>
struct Ring {
  unsigned char* shared;
  int tile;
  __device__ uint32_t stage(int step) const {
    return ptx::shared_address(shared) + step % kStages * tile;
  }
  __device__ uint32_t full(int step) const {
    return ptx::shared_address(shared) + kStages * tile + 16 * (step % kStages);
  }
  __device__ uint32_t empty(int step) const { return full(step) + 8; }
};

// As ptx::bulk_load, without its policy: tiles are to stay in L2.
__device__ void bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ void multicast(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(0xff))
      : "memory");
}

__device__ void arrive_everywhere(uint32_t barrier) {
  for (uint32_t rank = 0; rank < kGroup; ++rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                     ptx::map_shared(barrier, rank))
                 : "memory");
  }
}

template <Way kWay, int kStages>
__device__ void issue(const Ring<kStages>& ring, const unsigned char* tiles, int step) {
  const unsigned char* from = tiles + int64_t{step} * ring.tile;
  const uint32_t thread = threadIdx.x;
  if constexpr (kWay == kAsync) {
    for (int at = 16 * thread; at < ring.tile; at += 16 * blockDim.x) {
      ptx::copy_async(ring.stage(step) + at, from + at, 16);
    }
    ptx::copy_commit();
  } else if constexpr (kWay == kBulk) {
    if (thread != 0) return;
    ptx::mbarrier_arrive_expect(ring.full(step), ring.tile);
    for (int i = 0; i < 4; ++i) {
      const int at = i * (ring.tile / 4);
      bulk(ring.stage(step) + at, from + at, ring.tile / 4, ring.full(step));
    }
  } else if constexpr (kWay == kRows256 || kWay == kRows1024) {
    constexpr int kRow = kWay == kRows256 ? 256 : 1024;
    if (thread == 0) ptx::mbarrier_arrive_expect(ring.full(step), ring.tile);
    __syncthreads();
    for (int at = kRow * thread; at < ring.tile; at += kRow * blockDim.x) {
      bulk(ring.stage(step) + at, from + at, kRow, ring.full(step));
    }
  } else {
    if (thread != 0) return;
    if (step >= kStages) ptx::mbarrier_wait_cluster(ring.empty(step), (step / kStages - 1) & 1);
    ptx::mbarrier_arrive_expect(ring.full(step), ring.tile);
    const int part = ring.tile / kGroup, at = ptx::cluster_rank() * part;
    multicast(ring.stage(step) + at, from + at, part, ring.full(step));
  }
}

template <Way kWay, int kStages>
__global__ void __launch_bounds__(256)
    walk(const unsigned char* all, int tile, int64_t* cycles, uint32_t* sink) {
  const Ring<kStages> ring{ptx::dynamic_shared(), tile};
  const unsigned char* tiles = all + int64_t{blockIdx.x / kGroup} * kSteps * tile;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(ring.full(i), 1);
      ptx::mbarrier_init(ring.empty(i), kGroup);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (kWay == kMulticast) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
  uint32_t sum = 0;
  const int64_t start = clock64();
  for (int i = 0; i < kStages - 1; ++i) issue<kWay, kStages>(ring, tiles, i);
  for (int step = 0; step < kSteps; ++step) {
    if (step + kStages - 1 < kSteps) {
      issue<kWay, kStages>(ring, tiles, step + kStages - 1);
    } else if (kWay == kAsync) {
      ptx::copy_commit();
    }
    if constexpr (kWay == kAsync) {
      ptx::copy_wait<kStages - 1>();
      __syncthreads();
    } else {
      ptx::mbarrier_wait(ring.full(step), step / kStages & 1);
    }
    sum +=
        *reinterpret_cast<const uint32_t*>(ring.shared + step % kStages * tile + 4 * threadIdx.x);
    __syncthreads();
    if (kWay == kMulticast && threadIdx.x == 0) arrive_everywhere(ring.empty(step));
  }
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
  if (sum == 0x12345678) *sink = sum;
  if constexpr (kWay == kMulticast) {  // nobody leaves while others write to its barriers
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

template <Way kWay, int kStages>
void measure(const char* name, int threads, int blocks, int tile, const unsigned char* data,
             int64_t* cycles, uint32_t* sink) {
  const int shared = kStages * tile + 16 * kStages + 1024;
  check(cudaFuncSetAttribute(walk<kWay, kStages>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             shared),
        "shared memory");
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kGroup;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.attrs = &cluster;
  config.numAttrs = kWay == kMulticast ? 1 : 0;
  std::vector<int64_t> found(blocks);
  double best = 1e30;
  for (int run = 0; run < 6; ++run) {  // the first one fills the L2
    check(cudaLaunchKernelEx(&config, walk<kWay, kStages>, data, tile, cycles, sink), name);
    check(cudaDeviceSynchronize(), name);
    check(cudaMemcpy(found.data(), cycles, 8 * blocks, cudaMemcpyDefault), "copy");
    if (run > 0) {
      best = std::min(best, static_cast<double>(*std::max_element(found.begin(), found.end())));
    }
  }
  std::printf(
      "%-10s %3d threads %3d blocks %d x %5d bytes: %7.0f cycles a step, %5.1f bytes a cycle\n",
      name, threads, blocks, kStages, tile, best / kSteps, tile / (best / kSteps));
}

}  // namespace

int main() {
  unsigned char* data;
  int64_t* cycles;
  uint32_t* sink;
  const size_t size = size_t{16} * kSteps * kLargestTile;
  check(cudaMalloc(&data, size), "memory");
  check(cudaMemset(data, 1, size), "memory");
  check(cudaMalloc(&cycles, 8 * 256), "memory");
  check(cudaMalloc(&sink, 4), "memory");
  const int half = kLargestTile / 2;  // 22 rows of 1 KB
  for (int blocks : {8, 16, 64, 128}) {
    measure<kAsync, 3>("async", 128, blocks, kLargestTile, data, cycles, sink);
    measure<kAsync, 3>("async", 256, blocks, kLargestTile, data, cycles, sink);
    measure<kAsync, 4>("async", 128, blocks, kLargestTile, data, cycles, sink);
    measure<kAsync, 3>("async", 128, blocks, half, data, cycles, sink);
    measure<kAsync, 2>("async", 128, blocks, half, data, cycles, sink);
    measure<kBulk, 3>("bulk", 128, blocks, kLargestTile, data, cycles, sink);
    measure<kBulk, 4>("bulk", 128, blocks, kLargestTile, data, cycles, sink);
    measure<kBulk, 2>("bulk", 128, blocks, half, data, cycles, sink);
    measure<kRows256, 3>("rows 256", 128, blocks, kLargestTile, data, cycles, sink);
    measure<kRows1024, 3>("rows 1024", 128, blocks, kLargestTile, data, cycles, sink);
    measure<kMulticast, 3>("multicast", 128, blocks, kLargestTile, data, cycles, sink);
    measure<kMulticast, 4>("multicast", 128, blocks, kLargestTile, data, cycles, sink);
  }
  return 0;
}
