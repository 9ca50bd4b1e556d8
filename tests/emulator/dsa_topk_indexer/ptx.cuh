// csrc/dsa_topk_indexer/ptx.cuh on a CPU, in the manner of common/ptx_sm90.cuh beside this folder,
// with what of the real one is used here alone.
#pragma once

#include "bulk_load.cuh"
#include "common/ptx_sm90.cuh"

namespace fastkernels::ptx {

inline uint16_t e4m3_to_f16(uint32_t byte) {
  const uint32_t sign = (byte & 0x80) << 8, exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 0x7f) == 0x7f) return 0x7fff;
  if (exponent > 0) return static_cast<uint16_t>(sign | (exponent + 8) << 10 | mantissa << 7);
  if (mantissa == 0) return static_cast<uint16_t>(sign);
  const int leading = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;  // mantissa * 2^-9
  return static_cast<uint16_t>(sign | (leading + 6) << 10 | (mantissa << (10 - leading) & 0x3ff));
}

inline void convert_e4m3(uint32_t word, uint32_t* low, uint32_t* high) {
  *low = e4m3_to_f16(word & 0xff) | e4m3_to_f16(word >> 8 & 0xff) << 16;
  *high = e4m3_to_f16(word >> 16 & 0xff) | e4m3_to_f16(word >> 24) << 16;
}

inline float max_nan(float x, float y) {
  return std::isnan(x) || std::isnan(y) ? NAN : x > y ? x : y;
}

inline float from_f16(uint32_t bits) {
  const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa | 0x400), static_cast<int>(exponent) - 25);
}

inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Mma operand{d, a, b0, b1};
  emulator::Together("mma.f16", operand, [](Mma** lanes) {
    float A[16][16], B[8][16];
    auto value = [](uint32_t word, int half) { return from_f16(word >> (16 * half) & 0xffff); };
    for (int l = 0; l < kWarp; ++l) {
      const int g = l / 4, c = l % 4;
      for (int h = 0; h < 2; ++h) {
        A[g][2 * c + h] = value(lanes[l]->a[0], h);
        A[g + 8][2 * c + h] = value(lanes[l]->a[1], h);
        A[g][2 * c + 8 + h] = value(lanes[l]->a[2], h);
        A[g + 8][2 * c + 8 + h] = value(lanes[l]->a[3], h);
        B[g][2 * c + h] = value(lanes[l]->b0, h);
        B[g][2 * c + 8 + h] = value(lanes[l]->b1, h);
      }
    }
    for (int l = 0; l < kWarp; ++l) {
      for (int i = 0; i < 4; ++i) {
        const float* row = A[l / 4 + i / 2 * 8];
        const float* column = B[l % 4 * 2 + i % 2];
        float sum = lanes[l]->d[i];
        for (int k = 0; k < 16; ++k) sum += row[k] * column[k];
        lanes[l]->d[i] = sum;
      }
    }
  });
}

inline void add_shared(uint32_t shared, uint32_t x) { *emulator::Shared<uint32_t>(shared, 4) += x; }

inline uint32_t fetch_add_shared(uint32_t shared, uint32_t x) {
  uint32_t* value = emulator::Shared<uint32_t>(shared, 4);
  *value += x;
  return *value - x;
}

inline uint32_t load_cluster(uint32_t mapped) {
  emulator::Block& from = *emulator::machine().blocks[mapped >> emulator::kRankShift];
  if (emulator::machine().barrier.generation == 0) {
    emulator::Fail("a load from a block that may not have started");
  }
  if (from.alive == 0) emulator::Fail("a load from a block that has ended");
  return *emulator::SharedOf<uint32_t>(from, mapped & ((1u << emulator::kRankShift) - 1), 4);
}

}  // namespace fastkernels::ptx
