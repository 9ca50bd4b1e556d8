// csrc/gdn_prefill/ptx.cuh on a CPU, see common/ptx_sm90.cuh.
#pragma once

#include "bulk_load.cuh"
#include "common/ptx_sm90.cuh"

namespace fastkernels::ptx {

template <typename T>
T load_l2(const T* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % sizeof(T) != 0) emulator::Fail("misaligned load");
  return *pointer;
}

inline void copy_arrive(uint32_t barrier) {
  emulator::Block& to = emulator::block();
  auto land = [&to, barrier, copies = std::move(to.current->open)] {
    for (const emulator::Copy& each : copies) {
      std::memcpy(emulator::SharedOf<void>(to, each.shared, 16), each.global, each.bytes);
    }
    emulator::TransactionBarrier& found = emulator::FindBarrier(to, barrier);
    if (found.pending == 0) emulator::Fail("more arrivals at an mbarrier than it counts");
    --found.pending;
    emulator::Settle(found);
  };
  to.current->open.clear();
  emulator::machine().has_progress = true;  // by what is on its way
  if (to.lands_early) {
    land();
  } else {
    emulator::machine().sent.push_back(land);
  }
}

inline void mbarrier_invalidate(uint32_t barrier) {
  emulator::FindBarrier(emulator::block(), barrier);
  emulator::block().mbarriers.erase(barrier);
}

inline uint4 load_shared(uint32_t shared) { return *emulator::Shared<uint4>(shared, 16); }

inline void store_shared(uint32_t shared, uint4 x) { *emulator::Shared<uint4>(shared, 16) = x; }

inline uint32_t made_here(uint32_t x) { return x; }

template <int kRegisters>
void raise_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg");
  emulator::SetRegisters(kRegisters - 128);  // kernels here start with so many
}

template <int kRegisters>
void lower_registers() {
  raise_registers<kRegisters>();
}

inline uint32_t fetch_add(uint32_t* word, uint32_t x) {
  const uint32_t before = *word;
  *word += x;
  emulator::machine().has_progress = true;
  return before;
}

inline void add_release(uint32_t* word, uint32_t x) { fetch_add(word, x); }

inline uint32_t load_acquire(const uint32_t* word) {
  emulator::Yield();
  return *static_cast<const volatile uint32_t*>(word);
}

inline void wait_at_least(const uint32_t* word, uint32_t least) {
  while (*static_cast<const volatile uint32_t*>(word) < least) emulator::Yield();
}

inline void store_release(uint32_t shared, uint32_t x) {
  *emulator::Shared<uint32_t>(shared, 4) = x;
  emulator::machine().has_progress = true;
}

inline uint32_t wait_shared_at_least(uint32_t shared, uint32_t least) {
  const volatile uint32_t* word = emulator::Shared<uint32_t>(shared, 4);
  while (*word < least) emulator::Yield();
  return *word;
}

}  // namespace fastkernels::ptx
