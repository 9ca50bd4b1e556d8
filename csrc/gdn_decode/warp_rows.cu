// gdn_decode, route warp_rows: the state passes through registers once.
//
// Plan: `lanes_per_row` neighbouring lanes share a row of K and each holds `rows_per_lane` rows. A
// thread issues every load before it uses any, so that a block waits for one round trip to memory
// (for two in pool form, where the state's address is itself loaded). Both dot products run over
// the old state and are reduced by one round of shuffles.
//
// At one row the time is that of fetching and issuing the instructions before the last load, and
// from 16 rows on the kernel is near the issue limit as well as that of memory: variant `compact`
// exists to have few of them (batch 1: 430 -> 254 executed, 2.32 -> 2.18 us on an H200; batch 64:
// 19.7 -> 18.9).
//
// Shared memory: none. Barriers: none.
//
// Constraints: head size 128; num_v_heads a multiple of num_q_heads. In place is safe: a row is
// rewritten only by the lanes that read it, after the shuffles that all of its loads precede.
//
// Macros: FK_LANES_PER_ROW, FK_ROWS_PER_LANE, FK_WARPS; FK_STREAMING (1: state loads pass L1 by and
// leave L2 first; 2: state stores are marked as used once, too); FK_ALIGNED (16-byte accesses);
// FK_COMPACT (what `is_compact` in binding.cc promises); FK_POOL (1: pool form; with FK_COMPACT 0:
// packed form).
#include <type_traits>

#include "common/ptx_sm90.cuh"
#include "gdn_decode/common.cuh"

namespace fastkernels::gdn_decode {
namespace {

constexpr int kLanes = FK_LANES_PER_ROW;
constexpr int kRows = FK_ROWS_PER_LANE;
constexpr int kThreads = 32 * FK_WARPS;
constexpr bool kAligned = FK_ALIGNED;
constexpr bool kCompact = FK_COMPACT;
constexpr bool kPacked = kCompact && !FK_POOL;
using Offset = std::conditional_t<kCompact, uint32_t, int64_t>;
// A pool may be larger than 32-bit offsets reach: one more instruction.
using SlotOffset = std::conditional_t<kPacked, uint32_t, uint64_t>;
using SlotStride = std::conditional_t<kCompact, uint32_t, uint64_t>;
constexpr int kPieces = kVectors<kLanes>;
constexpr int kRowStep = kThreads / kLanes;  // between the rows of one lane
constexpr int kTiles = kHeadSize / (kRowStep * kRows);
static_assert(kTiles * kRowStep * kRows == kHeadSize, "a head is a whole number of blocks");

__device__ __forceinline__ float4 load_state(const float* x, [[maybe_unused]] uint64_t policy) {
  if constexpr (!kAligned) {
    return make_float4(x[0], x[1], x[2], x[3]);
  } else if constexpr (FK_STREAMING >= 1) {
    return ptx::load_streaming(x, policy);
  } else {
    return ptx::load(x);
  }
}

__device__ __forceinline__ void store_state(float* x, float4 value) {
  if constexpr (!kAligned) {
    x[0] = value.x;
    x[1] = value.y;
    x[2] = value.z;
    x[3] = value.w;
  } else if constexpr (FK_STREAMING >= 2) {
    ptx::store_streaming(x, value);
  } else {
    ptx::store(x, value);
  }
}

// Where a slot's rows of this thread begin.
__device__ __forceinline__ SlotOffset state_offset(SlotIndex slot, int64_t slot_stride,
                                                   Offset in_slot) {
  return slot.low * static_cast<SlotOffset>(static_cast<SlotStride>(slot_stride)) + in_slot;
}

// This block's rows of one batch row.
__device__ __forceinline__ void advance(const Params& p, uint32_t batch_idx) {
  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t head_idx = blockIdx.x / kTiles;
  const uint32_t first_row = blockIdx.x % kTiles * (kRowStep * kRows) + threadIdx.x / kLanes;
  const uint32_t in_head = first_row * kHeadSize + 4 * lane;

  SlotIndex read_slot = {batch_idx, 0};
  SlotIndex write_slot = read_slot;
  if constexpr (!kPacked) {
    read_slot = load_read_slot(p, batch_idx);
    write_slot = load_write_slot(p, batch_idx);
  }
  GateInputs gate_inputs = load_gate_inputs<Offset>(p, batch_idx, head_idx);
  const uint32_t q_head = kCompact ? head_idx >> p.group_shift : find_q_head(p, head_idx);
  const Keys<kLanes> keys = load_keys<kLanes, kAligned, Offset>(p, batch_idx, q_head, lane);
  const Offset v_idx = batch_idx * static_cast<Offset>(p.v_stride_b) +
                       head_idx * static_cast<Offset>(p.v_stride_h) + first_row;
  uint16_t v[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) v[r] = load_bf16(p.v, v_idx + r * kRowStep);
  const Offset output_idx = batch_idx * static_cast<Offset>(p.output_stride_b) +
                            head_idx * static_cast<Offset>(p.output_stride_h) + first_row;

  if (!kPacked && !is_slot(p, read_slot)) {
    if (lane == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) store_bf16(p.output, output_idx + r * kRowStep, 0.0f);
    }
    return;
  }
  float4 S[kRows][kPieces];
  if (kCompact || p.has_state) {
    const uint64_t policy = FK_STREAMING >= 1 ? ptx::evict_first_policy() : 0;
    const Offset in_slot = head_idx * static_cast<Offset>(p.state_stride_h) + in_head;
    const float* state =
        static_cast<const float*>(p.state) + state_offset(read_slot, p.state_stride_slot, in_slot);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        S[r][i] = load_state(state + r * kRowStep * kHeadSize + 4 * i * kLanes, policy);
      }
    }
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) S[r][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  // Used from here on: else the scheduler places the use of what came first ahead of later loads,
  // which would then wait for a whole round trip.
  asm volatile(""
               : "+f"(gate_inputs.A_log), "+f"(gate_inputs.dt_bias), "+h"(gate_inputs.a),
                 "+h"(gate_inputs.b));

  float output[kRows];
  step_rows<kLanes>(S, keys, v, compute_gates(gate_inputs), p.scale, output);

  if (kPacked || is_slot(p, write_slot)) {
    const Offset in_slot = head_idx * static_cast<Offset>(p.new_state_stride_h) + in_head;
    float* new_state = static_cast<float*>(p.new_state) +
                       state_offset(write_slot, p.new_state_stride_slot, in_slot);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        store_state(new_state + r * kRowStep * kHeadSize + 4 * i * kLanes, S[r][i]);
      }
    }
  }
  if (lane == 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) store_bf16(p.output, output_idx + r * kRowStep, output[r]);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    gdn_decode_warp_rows(const __grid_constant__ Params p) {
  if constexpr (kCompact) {
    advance(p, blockIdx.y);
  } else {
    const uint32_t batch_size = p.batch_size;
    for (uint32_t batch_idx = blockIdx.y; batch_idx < batch_size; batch_idx += gridDim.y) {
      advance(p, batch_idx);
    }
  }
}

}  // namespace fastkernels::gdn_decode
