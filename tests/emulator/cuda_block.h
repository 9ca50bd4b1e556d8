// A CUDA block on a CPU: every thread is a fiber, and what needs several threads (shuffles, matrix
// instructions, barriers) waits until they have come. Which warp runs next is drawn from a seed, so
// that a missing barrier shows; asynchronous copies, and stores to other blocks of a cluster, land
// at once in some blocks, in others when they are waited for. One block, or the blocks of one
// cluster, run at a time; x86-64 only.
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
#include <map>
#include <memory>
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
  bool has_arrived = false;         // at the cluster's barrier, and has not waited yet
  uint64_t cluster_generation = 0;  // in which it has
  int registers = 0;                // beyond those it started with
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

// An mbarrier; `bytes` are those that have come beyond those expected.
struct TransactionBarrier {
  int64_t arrivals = 0, pending = 0, bytes = 0;
  uint32_t phase = 0;
};

struct Block {
  dim3 grid, threads;
  uint3 index;
  uint32_t rank;       // in its cluster
  uint32_t alive = 0;  // threads that have not ended
  alignas(1024) unsigned char shared[kSharedBytes];
  std::vector<Thread> fibers;
  std::vector<Meeting> warps;
  Barrier barriers[16];
  std::map<uint32_t, TransactionBarrier> mbarriers;  // by shared address
  int count = 0;                                     // of __syncthreads_count
  Thread* current = nullptr;
  bool lands_early = false;  // asynchronous copies: at once, or when they are waited for
  int spare_registers = 0;   // that threads have given up
};

// What runs: the blocks of a cluster.
struct Machine {
  std::vector<std::unique_ptr<Block>> blocks;
  Block* current = nullptr;
  Barrier barrier;                          // of the cluster
  std::vector<std::function<void()>> sent;  // stores to other blocks, on their way
  void* scheduler = nullptr;
  bool has_progress = false;
  std::function<void()> kernel;
  std::mt19937 order;
};

inline Machine& machine() {
  static Machine* m = new Machine();
  return *m;
}

inline Block& block() { return *machine().current; }

inline void Yield() { emulator_switch(&block().current->stack_pointer, machine().scheduler); }

// The cluster's barrier opens once all threads that have not ended have arrived.
inline void OpenCluster() {
  Machine& m = machine();
  uint32_t alive = 0;
  for (const auto& each : m.blocks) alive += each->alive;
  if (m.barrier.arrived < alive || m.barrier.arrived == 0) return;
  m.barrier.arrived = 0;
  ++m.barrier.generation;
}

inline void Enter() {
  machine().kernel();
  Thread& t = *block().current;
  if (t.has_arrived) Fail("a thread ended between arriving at the cluster's barrier and waiting");
  bool is_copying = !t.open.empty();
  for (const auto& group : t.groups) is_copying = is_copying || !group.empty();
  if (is_copying) Fail("a thread ended with copies on their way");
  t.is_done = true;
  --block().alive;
  OpenCluster();
  machine().has_progress = true;
  Yield();
  Fail("a finished thread ran on");
}

inline uint32_t ThreadId() { return block().current->index.x; }

inline void Start(Block& b, uint32_t threads) {
  // Shared memory starts as NaNs of every width.
  std::memset(b.shared, 0xff, sizeof(b.shared));
  b.warps.assign(threads / kWarp, Meeting());
  for (Barrier& each : b.barriers) each = Barrier();
  b.mbarriers.clear();
  b.spare_registers = 0;
  b.alive = threads;
  if (b.fibers.size() != threads) b.fibers = std::vector<Thread>(threads);
  for (uint32_t i = 0; i < threads; ++i) {
    Thread& t = b.fibers[i];
    std::vector<unsigned char> stack = std::move(t.stack);
    t = Thread();
    t.index = {i, 0, 0};
    t.stack = std::move(stack);
    if (t.stack.empty()) t.stack.resize(kStackBytes);
    auto top = reinterpret_cast<uintptr_t>(t.stack.data() + kStackBytes) & ~uintptr_t{15};
    auto* words = reinterpret_cast<void**>(top) - 8;
    for (int w = 0; w < 6; ++w) words[w] = nullptr;
    words[6] = reinterpret_cast<void*>(&Enter);
    words[7] = nullptr;
    t.stack_pointer = words;
  }
}

// Runs the grid's clusters of `cluster` blocks along x one after the other, in an order of its own.
inline void Launch(dim3 grid, uint32_t threads, uint32_t cluster, uint32_t seed,
                   std::function<void()> kernel) {
  Machine& m = machine();
  if (grid.x % cluster != 0) Fail("the grid is no multiple of the cluster");
  m.kernel = std::move(kernel);
  m.order.seed(seed);
  while (m.blocks.size() < cluster) m.blocks.push_back(std::make_unique<Block>());
  m.blocks.resize(cluster);
  std::vector<uint3> indices;
  for (uint32_t z = 0; z < grid.z; ++z)
    for (uint32_t y = 0; y < grid.y; ++y)
      for (uint32_t x = 0; x < grid.x; x += cluster) indices.push_back({x, y, z});
  std::shuffle(indices.begin(), indices.end(), m.order);
  struct Warp {
    uint32_t rank, number, slowness;
  };
  for (const uint3& index : indices) {
    m.barrier = Barrier();
    std::vector<Warp> warps;
    for (uint32_t rank = 0; rank < cluster; ++rank) {
      Block& b = *m.blocks[rank];
      b.grid = grid;
      b.threads = dim3(threads);
      b.index = {index.x + rank, index.y, index.z};
      b.rank = rank;
      b.lands_early = m.order() % 2 == 0;
      Start(b, threads);
      // Some warps hardly run before they must: any, or those of the lower or of the upper half;
      // in a cluster some blocks, too.
      const uint32_t manner = m.order() % 3;
      const uint32_t late = cluster > 1 && m.order() % 4 == 0 ? 64 : 1;
      for (uint32_t w = 0; w < threads / kWarp; ++w) {
        const bool is_slow =
            manner == 0 ? m.order() % 2 == 0 : (2 * w < threads / kWarp) == (manner == 1);
        warps.push_back({rank, w, late * (is_slow ? 1024 : 1)});
      }
    }
    for (bool is_running = true; is_running;) {
      const bool must_run = !m.has_progress;
      is_running = false;
      m.has_progress = false;
      // Stores to other blocks land in any order, at the latest when nothing else is left to do.
      while (!m.sent.empty() && (must_run || m.order() % 4 == 0)) {
        std::swap(m.sent[m.order() % m.sent.size()], m.sent.back());
        const std::function<void()> land = std::move(m.sent.back());
        m.sent.pop_back();
        land();
        m.has_progress = true;
      }
      std::shuffle(warps.begin(), warps.end(), m.order);
      for (const Warp& warp : warps) {
        m.current = m.blocks[warp.rank].get();
        if (m.current->alive == 0) continue;
        if (!must_run && m.order() % warp.slowness != 0) {
          is_running = true;
          continue;
        }
        // A warp runs on while it gets anywhere, for a number of rounds that differs.
        for (uint32_t round = 1 + m.order() % 8; round > 0; --round) {
          for (uint32_t lane = 0; lane < kWarp; ++lane) {
            Thread& t = m.current->fibers[warp.number * kWarp + lane];
            if (t.is_done) continue;
            is_running = true;
            m.current->current = &t;
            emulator_switch(&m.scheduler, t.stack_pointer);
          }
        }
      }
      if (is_running && must_run && !m.has_progress && m.sent.empty()) Fail("deadlock");
    }
    if (!m.sent.empty()) Fail("a cluster ended with stores on their way");
    for (const auto& b : m.blocks)
      for (const Barrier& each : b->barriers)
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
  machine().has_progress = true;
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
  machine().has_progress = true;
  const uint64_t generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (waits && barrier.generation == generation) Yield();
}

template <typename T>
T* SharedOf(Block& b, uint32_t address, size_t alignment) {
  if (address % alignment != 0) Fail("misaligned shared address");
  if (address + alignment > kSharedBytes) Fail("shared address out of bounds");
  return reinterpret_cast<T*>(b.shared + address);
}

template <typename T>
T* Shared(uint32_t address, size_t alignment) {
  return SharedOf<T>(block(), address, alignment);
}

// "setmaxnreg", a thread at a time: `registers` more or fewer than it started with.
inline void SetRegisters(int registers) {
  Block& b = block();
  const int more = registers - b.current->registers;
  while (more > b.spare_registers) Yield();
  b.spare_registers -= more;
  b.current->registers = registers;
  machine().has_progress = true;
}

// Addresses in another block's shared memory carry its rank above these bits.
constexpr uint32_t kRankShift = 20;

inline void ArriveAtCluster() {
  Machine& m = machine();
  Thread& t = *block().current;
  if (t.has_arrived) Fail("a thread arrived at the cluster's barrier twice");
  t.has_arrived = true;
  t.cluster_generation = m.barrier.generation;
  ++m.barrier.arrived;
  m.has_progress = true;
  OpenCluster();
}

inline void WaitForCluster() {
  Thread& t = *block().current;
  if (!t.has_arrived) Fail("a thread waits at the cluster's barrier without having arrived");
  while (machine().barrier.generation == t.cluster_generation) Yield();
  t.has_arrived = false;
}

// An mbarrier's phase ends when all have arrived and all expected bytes have come.
inline void Settle(TransactionBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
  machine().has_progress = true;
}

inline TransactionBarrier& FindBarrier(Block& b, uint32_t address) {
  const auto found = b.mbarriers.find(address);
  if (found == b.mbarriers.end()) Fail("an mbarrier that was not initialised");
  return found->second;
}

// A store to a block of the cluster; all of them have started once the cluster's barrier has
// opened.
template <typename T>
void Send(uint32_t mapped, T value, uint32_t mapped_barrier) {
  Machine& m = machine();
  if (mapped >> kRankShift != mapped_barrier >> kRankShift) Fail("an mbarrier of another block");
  Block& to = *m.blocks[mapped >> kRankShift];
  constexpr uint32_t kMask = (1u << kRankShift) - 1;
  const uint32_t address = mapped & kMask, barrier = mapped_barrier & kMask;
  if (m.barrier.generation == 0) Fail("a store to a block that may not have started");
  auto land = [&to, address, barrier, value] {
    if (to.alive == 0) Fail("a store to a block that has ended");
    std::memcpy(SharedOf<void>(to, address, sizeof(T)), &value, sizeof(T));
    TransactionBarrier& found = FindBarrier(to, barrier);
    found.bytes += sizeof(T);
    Settle(found);
  };
  if (block().lands_early) {
    land();
  } else {
    m.sent.push_back(land);
  }
}

inline void Copy::land() const {
  void* to = Shared<void>(shared, 16);
  std::memset(to, 0, 16);
  std::memcpy(to, global, bytes);
}

}  // namespace emulator

#undef __cluster_dims__
#undef __launch_bounds__
#undef __noinline__
#undef __grid_constant__
#define __cluster_dims__(...)
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
  struct Lane {
    T value;
    int source;
  } operand{x, source & 31};
  emulator::Together("shfl.idx", operand, [](Lane** lanes) {
    T values[emulator::kWarp];
    for (int i = 0; i < emulator::kWarp; ++i) values[i] = lanes[i]->value;
    for (int i = 0; i < emulator::kWarp; ++i) lanes[i]->value = values[lanes[i]->source];
  });
  return operand.value;
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
  unsigned operand = predicate;
  emulator::Together("vote.ballot", operand, [](unsigned** lanes) {
    unsigned bits = 0;
    for (int i = 0; i < emulator::kWarp; ++i) bits |= *lanes[i] << i;
    for (int i = 0; i < emulator::kWarp; ++i) *lanes[i] = bits;
  });
  return operand;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(both >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  }
  return result;
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

inline int __ffs(int x) { return __builtin_ffs(x); }

inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
