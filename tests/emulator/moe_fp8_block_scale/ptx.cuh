// csrc/moe_fp8_block_scale/ptx.cuh on a CPU, in the manner of common/ptx_sm90.cuh beside this
// folder. Products read shared memory through their descriptors, when they are issued or when they
// are waited for, as the seed says.
#pragma once

#include "common/ptx_sm90.cuh"
#include "moe_fp8_block_scale/params.h"

namespace fastkernels::ptx {

// ---- e4m3 ---------------------------------------------------------------------------------------

inline float from_e4m3(uint32_t code) {
  static const std::vector<float> all = [] {
    std::vector<float> values;
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, mantissa = i & 7;
      const float size = exponent > 0 ? std::ldexp(8.0f + mantissa, exponent - 10)
                                      : std::ldexp(static_cast<float>(mantissa), -9);
      const float value = (i & 0x7f) == 0x7f ? NAN : size;
      values.push_back(i & 0x80 ? -value : value);
    }
    return values;
  }();
  return all[code];
}

inline uint32_t to_e4m3(float x) {
  if (std::isnan(x)) return 0x7f;
  const uint32_t sign = std::signbit(x) ? 0x80 : 0;
  const float size = std::min(std::fabs(x), 448.0f);
  if (size < 0x1p-6f) return sign | static_cast<uint32_t>(std::nearbyint(size * 0x1p9f));
  int exponent;
  const float fraction = std::frexp(size, &exponent);                          // of [0.5, 1)
  const auto steps = static_cast<uint32_t>(std::nearbyint(fraction * 16.0f));  // 8 to 16
  return sign | (static_cast<uint32_t>(exponent + 6) * 8 + steps - 8);
}

inline uint32_t to_e4m3x2(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }

inline float2 from_e4m3x2(uint32_t codes) {
  return {from_e4m3(codes & 0xff), from_e4m3(codes >> 8 & 0xff)};
}

// ---- copies -------------------------------------------------------------------------------------

// When ordinary writes (those of cp.async are) to each 1024 bytes of a block's shared memory came
// last, and how many there were when a thread last fenced them from the async proxy.
struct Writes {
  uint64_t count = 0;
  uint64_t last[emulator::kSharedBytes / 1024 + 1] = {};
  std::map<const emulator::Thread*, uint64_t> fenced;

  void note(uint32_t shared) { last[shared / 1024] = ++count; }
};

inline Writes& writes_of(const emulator::Block& block) {
  static std::map<const emulator::Block*, Writes> all;
  return all[&block];
}

inline void fence_async_shared() {
  Writes& writes = writes_of(emulator::block());
  writes.fenced[emulator::block().current] = writes.count;
}

struct WordCopy {
  uint32_t shared;
  const void* global;
};

// Of a thread, since it arrived last.
inline std::vector<WordCopy>& open_words() {
  static std::map<const emulator::Thread*, std::vector<WordCopy>> all;
  return all[emulator::block().current];
}

inline void copy_word_async(uint32_t shared, const void* global) {
  if (reinterpret_cast<uintptr_t>(global) % 4 != 0) emulator::Fail("misaligned cp.async");
  open_words().push_back({shared, global});
}

inline void copy_arrive(uint32_t barrier) {
  emulator::Block& to = emulator::block();
  auto land = [&to, barrier, copies = std::move(to.current->open),
               words = std::move(open_words())] {
    for (const emulator::Copy& each : copies) {
      std::memcpy(emulator::SharedOf<void>(to, each.shared, 16), each.global, each.bytes);
      writes_of(to).note(each.shared);
    }
    for (const WordCopy& each : words) {
      std::memcpy(emulator::SharedOf<void>(to, each.shared, 4), each.global, 4);
    }
    emulator::TransactionBarrier& found = emulator::FindBarrier(to, barrier);
    if (found.pending == 0) emulator::Fail("more arrivals at an mbarrier than it counts");
    --found.pending;
    emulator::Settle(found);
  };
  to.current->open.clear();
  open_words().clear();
  emulator::machine().has_progress = true;  // by what is on its way
  if (to.lands_early) {
    land();
  } else {
    emulator::machine().sent.push_back(land);
  }
}

// A tensor map here: where a matrix of bytes lies, and the box.
struct Matrix {
  const unsigned char* data;
  int64_t columns, rows, stride_rows;
  int64_t box_columns, box_rows;
};

inline void prefetch_map(const moe_fp8_block_scale::TensorMap*) {}

inline void box_load(uint32_t shared, const moe_fp8_block_scale::TensorMap* map, int32_t column,
                     int32_t row, uint32_t barrier, uint16_t blocks) {
  Matrix from;
  std::memcpy(&from, map, sizeof(from));
  if (shared % 1024 != 0 || from.box_columns != 128) {
    emulator::Fail("a box that the 128-byte swizzle is not made for");
  }
  auto land = [=](emulator::Block& to) {
    if (to.alive == 0) emulator::Fail("a box for a block that has ended");
    for (int64_t r = 0; r < from.box_rows; ++r) {
      for (int64_t i = 0; i < 128; ++i) {
        const bool is_inside = row + r >= 0 && row + r < from.rows && column + i < from.columns;
        const auto address = static_cast<uint32_t>(shared + r * 128 + i);
        *emulator::SharedOf<unsigned char>(to, address ^ (address >> 7 & 7) << 4, 1) =
            is_inside ? from.data[(row + r) * from.stride_rows + column + i] : 0;
      }
    }
    emulator::TransactionBarrier& found = emulator::FindBarrier(to, barrier);
    found.bytes += 128 * from.box_rows;
    emulator::Settle(found);
  };
  emulator::Machine& m = emulator::machine();
  const bool is_at_once = emulator::block().lands_early;
  m.has_progress = true;  // by what is on its way
  for (size_t rank = 0; rank < m.blocks.size(); ++rank) {
    if ((blocks >> rank & 1) == 0) continue;
    emulator::Block* to = m.blocks[rank].get();
    if (to != m.current && m.barrier.generation == 0) {
      emulator::Fail("a box for a block that may not have started");
    }
    if (is_at_once) {
      land(*to);
    } else {
      m.sent.push_back([land, to] { land(*to); });
    }
  }
  if (blocks >> m.blocks.size() != 0) emulator::Fail("no such block in the cluster");
}

inline void box_load(uint32_t shared, const moe_fp8_block_scale::TensorMap* map, int32_t column,
                     int32_t row, uint32_t barrier) {
  box_load(shared, map, column, row, barrier, static_cast<uint16_t>(1u << emulator::block().rank));
}

inline void mbarrier_arrive_cluster(uint32_t mapped) {
  emulator::Machine& m = emulator::machine();
  emulator::Block& to = *m.blocks[mapped >> emulator::kRankShift];
  if (&to != m.current && m.barrier.generation == 0) {
    emulator::Fail("an arrival at a block that may not have started");
  }
  if (to.alive == 0) emulator::Fail("an arrival at a block that has ended");
  emulator::TransactionBarrier& found =
      emulator::FindBarrier(to, mapped & ((1u << emulator::kRankShift) - 1));
  if (found.pending == 0) emulator::Fail("more arrivals at an mbarrier than it counts");
  --found.pending;
  emulator::Settle(found);
}

inline void store_shared(uint32_t shared, uint32_t x) {
  writes_of(emulator::block()).note(shared);
  *emulator::Shared<uint32_t>(shared, 4) = x;
}

inline void store(void* pointer, uint4 x) {
  if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) emulator::Fail("misaligned store");
  std::memcpy(pointer, &x, 16);
}

// ---- registers ----------------------------------------------------------------------------------

template <int kRegisters>
void raise_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg");
}

template <int kRegisters>
void lower_registers() {
  raise_registers<kRegisters>();
}

// ---- wgmma --------------------------------------------------------------------------------------

inline uint64_t swizzled_rows(uint32_t shared) {
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 16 |
         (shared & 0x3ffff) >> 4;
}

// 32 bytes of a row of an operand, as the hardware finds them: the swizzle is of the address, not
// of the row, and the stride is one of 8 rows.
struct Operand {
  uint32_t start, stride;

  explicit Operand(uint64_t descriptor)
      : start((descriptor & 0x3fff) << 4), stride((descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) emulator::Fail("an operand that is not in the 128-byte swizzle");
    if ((descriptor >> 49 & 7) != 0) emulator::Fail("an operand with a base offset");
  }

  void read(uint32_t row, float (&x)[32]) const {
    for (uint32_t i = 0; i < 32; ++i) {
      const uint32_t address = start + row / 8 * stride + row % 8 * 128 + i;
      x[i] = from_e4m3(*emulator::Shared<uint8_t>(address ^ (address >> 7 & 7) << 4, 1));
    }
  }
};

// A warp's part of a product: 16 rows.
struct Product {
  float* d[kWarp];
  uint64_t a, b;
  uint32_t warp;  // of its group
  bool adds;

  void make() const {
    const Operand rows(a), columns(b);
    float A[16][32], B[128][32];
    for (uint32_t r = 0; r < 16; ++r) rows.read(16 * warp + r, A[r]);
    for (uint32_t n = 0; n < 128; ++n) columns.read(n, B[n]);
    for (int l = 0; l < kWarp; ++l) {
      for (int i = 0; i < 64; ++i) {
        const int row = l / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + l % 4 * 2 + i % 2;
        float sum = 0.0f;
        for (int k = 0; k < 32; ++k) sum += A[row][k] * B[column][k];
        d[l][i] = adds ? d[l][i] + sum : sum;
      }
    }
  }
};

struct WarpProducts {
  std::vector<Product> issued;
  bool is_fenced = false, is_committed = true;
};

inline WarpProducts& warp_products() {
  static std::map<std::pair<const emulator::Block*, uint32_t>, WarpProducts> all;
  return all[{&emulator::block(), emulator::ThreadId() / kWarp}];
}

inline void wgmma_fence() {
  int nothing = 0;
  emulator::Together("wgmma.fence", nothing, [](int**) { warp_products().is_fenced = true; });
}

struct ProductOperand {
  float* d;
  uint64_t a, b;
  bool adds;
  uint64_t fenced;

  void check(uint64_t descriptor, uint32_t rows) const {
    const Operand operand(descriptor);
    for (uint32_t r = 0; r < rows; r += 8) {
      const uint32_t page = (operand.start + r / 8 * operand.stride) / 1024;
      if (writes_of(emulator::block()).last[page] > fenced) {
        emulator::Fail("an operand that no fence keeps from ordinary writes");
      }
    }
  }
};

inline void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b, bool adds) {
  ProductOperand operand{d, a, b, adds,
                         writes_of(emulator::block()).fenced[emulator::block().current]};
  emulator::Together("wgmma.mma_async", operand, [](ProductOperand** lanes) {
    Product product;
    product.a = lanes[0]->a;
    product.b = lanes[0]->b;
    product.adds = lanes[0]->adds;
    product.warp = emulator::ThreadId() / kWarp % 4;
    for (int l = 0; l < kWarp; ++l) {
      if (lanes[l]->a != product.a || lanes[l]->b != product.b || lanes[l]->adds != product.adds) {
        emulator::Fail("lanes of a warp give other operands of a product");
      }
      lanes[l]->check(product.a, 64);
      lanes[l]->check(product.b, 128);
      product.d[l] = lanes[l]->d;
    }
    WarpProducts& own = warp_products();
    if (!own.is_fenced) emulator::Fail("a product without a wgmma.fence before it");
    own.is_committed = false;
    // Products are made in their order: none at once after one that was put off.
    if (own.issued.empty() && emulator::machine().order() % 2 == 0) {
      product.make();
    } else {
      own.issued.push_back(product);
    }
  });
}

inline void wgmma_commit() {
  int nothing = 0;
  emulator::Together("wgmma.commit_group", nothing,
                     [](int**) { warp_products().is_committed = true; });
}

inline void wgmma_wait(float (&)[64]) {
  // Others may go on for a while.
  for (uint32_t rounds = emulator::machine().order() % 4; rounds > 0; --rounds) {
    emulator::machine().has_progress = true;
    emulator::Yield();
  }
  int nothing = 0;
  emulator::Together("wgmma.wait_group", nothing, [](int**) {
    WarpProducts& own = warp_products();
    if (!own.is_committed) emulator::Fail("a wait for products that no group has");
    for (const Product& each : own.issued) each.make();
    own = WarpProducts();
  });
}

}  // namespace fastkernels::ptx
