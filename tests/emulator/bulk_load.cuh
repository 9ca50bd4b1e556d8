// "cp.async.bulk" without a cache policy, which some operators have in a ptx.cuh of their own.
#pragma once

#include "cuda_block.h"

namespace fastkernels::ptx {

inline void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0 || bytes % 16 != 0) {
    emulator::Fail("misaligned cp.async.bulk");
  }
  emulator::Block& to = emulator::block();
  auto land = [&to, shared, global, bytes, barrier] {
    if (to.alive == 0) emulator::Fail("a bulk copy to a block that has ended");
    if (shared + bytes > emulator::kSharedBytes) emulator::Fail("bulk copy out of bounds");
    std::memcpy(emulator::SharedOf<void>(to, shared, 16), global, bytes);
    emulator::TransactionBarrier& found = emulator::FindBarrier(to, barrier);
    found.bytes += bytes;
    emulator::Settle(found);
  };
  if (to.lands_early) {
    land();
  } else {
    emulator::machine().sent.push_back(land);
  }
}

}  // namespace fastkernels::ptx
