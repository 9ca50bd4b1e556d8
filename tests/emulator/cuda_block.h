// A CUDA block on a CPU: every thread is a fiber, and what needs several threads (shuffles, matrix
// instructions, barriers) waits until they have come. Which warp runs next is drawn from a seed, so
// that a missing barrier shows; asynchronous copies land at once in some blocks, in others when
// they are waited for. One block runs at a time; x86-64 only.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <utility>
#include <vector>

namespace emulator {

constexpr size_t kSharedBytes = 232448;
constexpr size_t kStackBytes = 64 * 1024;
constexpr int kWarp = 32;

[[noreturn]] inline void Fail(const char* what) {
  std::fprintf(stderr, "emulator: %s\n", what);
  std::abort();
}

extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

struct Copy {
  uint32_t shared;
  const void* global;
  uint32_t bytes;

  void land() const;
};

struct Thread {
  uint3 index;
  void* stack_pointer = nullptr;
  std::vector<unsigned char> stack;
  bool is_done = false;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

// All 32 lanes meet here; the last one to come does the work of all.
struct Meeting {
  int arrived = 0;
  uint64_t generation = 0;
  const char* what = nullptr;
  void* operands[kWarp] = {};
};

struct Barrier {
  uint32_t arrived = 0, expected = 0;
  uint64_t generation = 0;
};

struct Block {
  dim3 grid, threads;
  uint3 index;
  alignas(1024) unsigned char shared[kSharedBytes];
  std::vector<Thread> fibers;
  std::vector<Meeting> warps;
  Barrier barriers[16];
  int count = 0;  // of __syncthreads_count
  Thread* current = nullptr;
  void* scheduler = nullptr;
  bool has_progress = false;
  bool lands_early = false;  // asynchronous copies: at once, or when they are waited for
  std::function<void()> kernel;
  std::mt19937 order;
};

inline Block& block() {
  static Block* b = new Block();
  return *b;
}

inline void Yield() {
  Block& b = block();
  emulator_switch(&b.current->stack_pointer, b.scheduler);
}

inline void Enter() {
  block().kernel();
  block().current->is_done = true;
  block().has_progress = true;
  Yield();
  Fail("a finished thread ran on");
}

inline uint32_t ThreadId() { return block().current->index.x; }

// Runs the grid's blocks one after the other, in an order of its own.
inline void Launch(dim3 grid, uint32_t threads, uint32_t seed, std::function<void()> kernel) {
  Block& b = block();
  b.grid = grid;
  b.threads = dim3(threads);
  b.kernel = std::move(kernel);
  b.order.seed(seed);
  if (b.fibers.size() != threads) b.fibers = std::vector<Thread>(threads);
  std::vector<uint3> indices;
  for (uint32_t z = 0; z < grid.z; ++z)
    for (uint32_t y = 0; y < grid.y; ++y)
      for (uint32_t x = 0; x < grid.x; ++x) indices.push_back({x, y, z});
  std::shuffle(indices.begin(), indices.end(), b.order);
  for (const uint3& index : indices) {
    b.index = index;
    b.lands_early = b.order() % 2 == 0;
    // Shared memory starts as NaNs of every width.
    std::memset(b.shared, 0xff, sizeof(b.shared));
    b.warps.assign(threads / kWarp, Meeting());
    for (Barrier& each : b.barriers) each = Barrier();
    for (uint32_t i = 0; i < threads; ++i) {
      Thread& t = b.fibers[i];
      t.index = {i, 0, 0};
      t.is_done = false;
      t.open.clear();
      t.groups.clear();
      if (t.stack.empty()) t.stack.resize(kStackBytes);
      auto top = reinterpret_cast<uintptr_t>(t.stack.data() + kStackBytes) & ~uintptr_t{15};
      auto* words = reinterpret_cast<void**>(top) - 8;
      for (int w = 0; w < 6; ++w) words[w] = nullptr;
      words[6] = reinterpret_cast<void*>(&Enter);
      words[7] = nullptr;
      t.stack_pointer = words;
    }
    std::vector<uint32_t> warps(threads / kWarp), slowness(threads / kWarp);
    // Some warps hardly run before they must: any, or those of the lower or of the upper half.
    const uint32_t manner = b.order() % 3;
    for (uint32_t w = 0; w < warps.size(); ++w) {
      warps[w] = w;
      const bool is_slow =
          manner == 0 ? b.order() % 2 == 0 : (2 * w < warps.size()) == (manner == 1);
      slowness[w] = is_slow ? 1024 : 1;
    }
    for (bool is_running = true; is_running;) {
      const bool must_run = !b.has_progress;
      is_running = false;
      b.has_progress = false;
      std::shuffle(warps.begin(), warps.end(), b.order);
      for (uint32_t w : warps) {
        if (!must_run && b.order() % slowness[w] != 0) {
          is_running = true;
          continue;
        }
        // A warp runs on while it gets anywhere, for a number of rounds that differs.
        for (uint32_t round = 1 + b.order() % 8; round > 0; --round) {
          for (uint32_t lane = 0; lane < kWarp; ++lane) {
            Thread& t = b.fibers[w * kWarp + lane];
            if (t.is_done) continue;
            is_running = true;
            b.current = &t;
            emulator_switch(&b.scheduler, t.stack_pointer);
          }
        }
      }
      if (is_running && must_run && !b.has_progress) Fail("deadlock");
    }
    for (const Barrier& each : b.barriers)
      if (each.arrived != 0) Fail("a block ended with threads at a barrier");
  }
}

// `work(operands)` runs once, when all lanes have come with theirs.
template <typename T, typename F>
void Together(const char* what, T& operand, F work) {
  Block& b = block();
  const uint32_t id = ThreadId();
  Meeting& m = b.warps[id / kWarp];
  if (m.arrived == 0) m.what = what;
  if (std::strcmp(m.what, what) != 0) Fail("lanes of a warp meet at different instructions");
  m.operands[id % kWarp] = &operand;
  b.has_progress = true;
  if (++m.arrived == kWarp) {
    T* lanes[kWarp];
    for (int i = 0; i < kWarp; ++i) lanes[i] = static_cast<T*>(m.operands[i]);
    work(lanes);
    m.arrived = 0;
    ++m.generation;
    return;
  }
  for (const uint64_t generation = m.generation; m.generation == generation;) Yield();
}

inline void Arrive(uint32_t id, uint32_t threads, bool waits) {
  Block& b = block();
  Barrier& barrier = b.barriers[id];
  if (barrier.arrived == 0) barrier.expected = threads;
  if (barrier.expected != threads) Fail("threads expect different numbers at a barrier");
  b.has_progress = true;
  const uint64_t generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (waits && barrier.generation == generation) Yield();
}

template <typename T>
T* Shared(uint32_t address, size_t alignment) {
  if (address % alignment != 0) Fail("misaligned shared address");
  if (address + alignment > kSharedBytes) Fail("shared address out of bounds");
  return reinterpret_cast<T*>(block().shared + address);
}

inline void Copy::land() const {
  void* to = Shared<void>(shared, 16);
  std::memset(to, 0, 16);
  std::memcpy(to, global, bytes);
}

}  // namespace emulator

#undef __launch_bounds__
#undef __noinline__
#undef __grid_constant__
#define __launch_bounds__(...)
#define __noinline__
#define __grid_constant__
#define threadIdx (emulator::block().current->index)
#define blockIdx (emulator::block().index)
#define gridDim (emulator::block().grid)
#define blockDim (emulator::block().threads)

// ---- what CUDA C++ has built in -----------------------------------------------------------------

inline void __syncthreads() { emulator::Arrive(0, emulator::block().threads.x, true); }

inline int __syncthreads_count(int predicate) {
  emulator::Block& b = emulator::block();
  b.count += predicate != 0;
  __syncthreads();
  const int result = b.count;
  __syncthreads();
  if (threadIdx.x == 0) b.count = 0;
  __syncthreads();
  return result;
}

inline void __syncwarp(unsigned = 0xffffffffu) {
  int nothing = 0;
  emulator::Together("__syncwarp", nothing, [](int**) {});
}

template <typename T, typename F>
T emulator_shuffle(const char* what, T x, F source) {
  T operand = x;
  emulator::Together(what, operand, [&](T** lanes) {
    T values[emulator::kWarp];
    for (int i = 0; i < emulator::kWarp; ++i) values[i] = *lanes[i];
    for (int i = 0; i < emulator::kWarp; ++i) *lanes[i] = values[source(i)];
  });
  return operand;
}

template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulator_shuffle("shfl.xor", x, [mask](int lane) { return lane ^ mask; });
}

template <typename T>
T __shfl_up_sync(unsigned, T x, unsigned delta) {
  return emulator_shuffle("shfl.up", x, [delta](int lane) {
    return lane >= static_cast<int>(delta) ? lane - static_cast<int>(delta) : lane;
  });
}

template <typename T>
T __shfl_sync(unsigned, T x, int source) {
  return emulator_shuffle("shfl.idx", x, [source](int) { return source & 31; });
}

inline int atomicMin(int* address, int value) {
  const int before = *address;
  if (value < before) *address = value;
  return before;
}

inline float __uint_as_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}

inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}

inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
