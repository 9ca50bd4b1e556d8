// csrc/common/ptx_sm90.cuh on a CPU: the same functions, each as the PTX ISA describes its
// instruction. Found instead of the real one where this folder is searched first.
#pragma once

#include <algorithm>

#include "cuda_block.h"

namespace fastkernels::ptx {

using emulator::kWarp;

// ---- arithmetic ---------------------------------------------------------------------------------

inline uint16_t to_bf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (std::isnan(x)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint32_t to_bf16x2(float low, float high) {
  return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16;
}

inline uint32_t to_tf32(float x) {
  if (!std::isfinite(x)) return __float_as_uint(x);
  return (__float_as_uint(x) + 0x1000) & 0xffffe000u;
}

inline float reciprocal(float x) { return 1.0f / x; }
inline float exp2(float x) {
  const float y = std::exp2(x);
  return std::fabs(y) < 0x1p-126f ? 0.0f : y;
}
inline float log2(float x) { return std::log2(x); }

// ---- matrices -----------------------------------------------------------------------------------

inline float from_bf16(uint32_t bits) { return __uint_as_float(bits << 16); }
inline float half_of(uint32_t word, int half) { return from_bf16(word >> (16 * half) & 0xffff); }

struct Mma {
  float* d;
  const uint32_t* a;
  uint32_t b0, b1;
};

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Mma operand{d, a, b0, b1};
  emulator::Together("mma.bf16", operand, [](Mma** lanes) {
    float A[16][16], B[16][8];
    for (int l = 0; l < kWarp; ++l) {
      const int g = l / 4, c = l % 4;
      for (int h = 0; h < 2; ++h) {
        A[g][2 * c + h] = half_of(lanes[l]->a[0], h);
        A[g + 8][2 * c + h] = half_of(lanes[l]->a[1], h);
        A[g][2 * c + 8 + h] = half_of(lanes[l]->a[2], h);
        A[g + 8][2 * c + 8 + h] = half_of(lanes[l]->a[3], h);
        B[2 * c + h][g] = half_of(lanes[l]->b0, h);
        B[2 * c + 8 + h][g] = half_of(lanes[l]->b1, h);
      }
    }
    for (int l = 0; l < kWarp; ++l) {
      for (int i = 0; i < 4; ++i) {
        const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
        float sum = lanes[l]->d[i];
        for (int k = 0; k < 16; ++k) sum += A[row][k] * B[k][column];
        lanes[l]->d[i] = sum;
      }
    }
  });
}

inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Mma operand{d, a, b0, b1};
  emulator::Together("mma.tf32", operand, [](Mma** lanes) {
    float A[16][8], B[8][8];
    auto value = [](uint32_t bits) { return __uint_as_float(bits & 0xffffe000u); };
    for (int l = 0; l < kWarp; ++l) {
      const int g = l / 4, c = l % 4;
      A[g][c] = value(lanes[l]->a[0]);
      A[g + 8][c] = value(lanes[l]->a[1]);
      A[g][c + 4] = value(lanes[l]->a[2]);
      A[g + 8][c + 4] = value(lanes[l]->a[3]);
      B[c][g] = value(lanes[l]->b0);
      B[c + 4][g] = value(lanes[l]->b1);
    }
    for (int l = 0; l < kWarp; ++l) {
      for (int i = 0; i < 4; ++i) {
        const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
        float sum = lanes[l]->d[i];
        for (int k = 0; k < 8; ++k) sum += A[row][k] * B[k][column];
        lanes[l]->d[i] = sum;
      }
    }
  });
}

struct Matrices {
  uint32_t* x;
  uint32_t address;
};

// `rows(i, r)`: the eight 16-bit values of row r of matrix i.
template <bool kTransposed>
void load_matrices_as(const char* what, uint32_t (&x)[4], uint32_t address) {
  Matrices operand{x, address};
  emulator::Together(what, operand, [](Matrices** lanes) {
    for (int i = 0; i < 4; ++i) {
      uint16_t m[8][8];
      for (int r = 0; r < 8; ++r) {
        std::memcpy(m[r], emulator::Shared<void>(lanes[8 * i + r]->address, 16), 16);
      }
      for (int l = 0; l < kWarp; ++l) {
        const int g = l / 4, c = l % 4;
        const uint32_t low = kTransposed ? m[2 * c][g] : m[g][2 * c];
        const uint32_t high = kTransposed ? m[2 * c + 1][g] : m[g][2 * c + 1];
        lanes[l]->x[i] = low | high << 16;
      }
    }
  });
}

inline void load_matrices(uint32_t (&x)[4], uint32_t address) {
  load_matrices_as<false>("ldmatrix", x, address);
}

inline void load_matrices_transposed(uint32_t (&x)[4], uint32_t address) {
  load_matrices_as<true>("ldmatrix.trans", x, address);
}

inline void store_matrices_transposed(uint32_t address, const uint32_t (&x)[4]) {
  Matrices operand{const_cast<uint32_t*>(x), address};
  emulator::Together("stmatrix.trans", operand, [](Matrices** lanes) {
    for (int i = 0; i < 4; ++i) {
      uint16_t m[8][8];
      for (int l = 0; l < kWarp; ++l) {
        const int g = l / 4, c = l % 4;
        m[2 * c][g] = static_cast<uint16_t>(lanes[l]->x[i]);
        m[2 * c + 1][g] = static_cast<uint16_t>(lanes[l]->x[i] >> 16);
      }
      for (int r = 0; r < 8; ++r) {
        std::memcpy(emulator::Shared<void>(lanes[8 * i + r]->address, 16), m[r], 16);
      }
    }
  });
}

// ---- barriers and launches ----------------------------------------------------------------------

inline void barrier_sync(uint32_t id, uint32_t threads) { emulator::Arrive(id, threads, true); }
inline void barrier_arrive(uint32_t id, uint32_t threads) { emulator::Arrive(id, threads, false); }
inline uint32_t cluster_rank() { return emulator::block().rank; }
inline void cluster_arrive() { emulator::ArriveAtCluster(); }
inline void cluster_arrive_relaxed() { emulator::ArriveAtCluster(); }
inline void cluster_wait() { emulator::WaitForCluster(); }

inline uint32_t map_shared(uint32_t address, uint32_t rank) {
  if (rank >= emulator::machine().blocks.size()) emulator::Fail("no such block in the cluster");
  return address | rank << emulator::kRankShift;
}

inline void store_async(uint32_t mapped, float2 x, uint32_t mapped_barrier) {
  emulator::Send(mapped, x, mapped_barrier);
}

inline void store_async(uint32_t mapped, float4 x, uint32_t mapped_barrier) {
  emulator::Send(mapped, x, mapped_barrier);
}

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  emulator::block().mbarriers[barrier] = {arrivals, arrivals, 0, 0};
}

inline void fence_mbarrier_init() {}

inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  emulator::TransactionBarrier& found = emulator::FindBarrier(emulator::block(), barrier);
  if (found.pending == 0) emulator::Fail("more arrivals at an mbarrier than it counts");
  found.bytes -= bytes;
  --found.pending;
  emulator::Settle(found);
}

inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::TransactionBarrier& found = emulator::FindBarrier(emulator::block(), barrier);
  while ((found.phase & 1) == (parity & 1)) emulator::Yield();
}

inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  mbarrier_wait(barrier, parity);
}

inline void launch_dependents() {}
inline void wait_for_dependency() {}

// ---- addresses ----------------------------------------------------------------------------------

inline unsigned char* dynamic_shared() { return emulator::block().shared; }

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) -
                               emulator::block().shared);
}

// ---- global memory ------------------------------------------------------------------------------

template <typename T>
T load_constant(const T* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % sizeof(T) != 0) emulator::Fail("misaligned load");
  return *pointer;
}

inline void prefetch_l2(const void*) {}

inline float4 load(const float* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) emulator::Fail("misaligned load");
  return *reinterpret_cast<const float4*>(pointer);
}

inline void store(float* pointer, float4 x) {
  if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) emulator::Fail("misaligned store");
  *reinterpret_cast<float4*>(pointer) = x;
}

// ---- asynchronous copies ------------------------------------------------------------------------

inline void copy_async(uint32_t shared, const void* global, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0) emulator::Fail("misaligned cp.async");
  const emulator::Copy copy{shared, global, bytes};
  if (emulator::block().lands_early) {
    copy.land();
  } else {
    emulator::block().current->open.push_back(copy);
  }
}

inline void copy_commit() {
  emulator::Thread& t = *emulator::block().current;
  t.groups.push_back(std::move(t.open));
  t.open.clear();
}

template <int kPending>
void copy_wait() {
  emulator::Thread& t = *emulator::block().current;
  while (t.groups.size() > kPending) {
    for (const emulator::Copy& copy : t.groups.front()) copy.land();
    t.groups.pop_front();
  }
}

}  // namespace fastkernels::ptx
