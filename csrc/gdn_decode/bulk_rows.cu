// gdn_decode, route bulk_rows: the state passes through a ring in shared memory.
//
// Plan: persistent blocks stride over tiles of `rows_per_block` rows of one state; each warp owns
// `rows_per_block / warps` of them and its own ring of `stages` buffers with one mbarrier each, so
// no warp ever waits for another. Lane 0 brings a piece (its rows are contiguous) by one bulk copy,
// `stages` pieces ahead; 8 lanes share a row, and 4 or 8 rows are advanced at once. q, k, v and the
// gates of the next tile are loaded one tile ahead. The new state goes from registers to global
// memory, or (`bulk_store`) back to its buffer and from there by a bulk copy; then the buffer is
// refilled one tile later, when that copy has read it.
//
// Shared memory: stages * (rows_per_block * 512 + warps * 8) bytes, dynamic: the buffers, [stages]
// [warps][rows][K] float32, then the mbarriers, [stages][warps].
//
// Constraints: head size 128; num_v_heads a multiple of num_q_heads. In place is safe: a piece is
// in shared memory as a whole before any of it is stored, and no other warp touches its rows.
// Variant `any` (FK_ALIGNED=0) fills the buffers by element loads and stores elements from
// registers: a bulk copy needs 16-byte alignment.
//
// Macros: FK_ROWS_PER_BLOCK, FK_STAGES, FK_WARPS, FK_BLOCKS_PER_SM, FK_BULK_STORE, FK_ALIGNED.
#include "common/ptx_sm90.cuh"
#include "gdn_decode/common.cuh"

namespace fastkernels::gdn_decode {
namespace {

constexpr int kWarps = FK_WARPS;
constexpr int kStages = FK_STAGES;
constexpr bool kAligned = FK_ALIGNED;
constexpr bool kBulkStore = FK_BULK_STORE && kAligned;
constexpr int kLanes = 8;
constexpr int kPieces = kVectors<kLanes>;
constexpr int kTiles = kHeadSize / FK_ROWS_PER_BLOCK;
constexpr int kWarpRows = FK_ROWS_PER_BLOCK / kWarps;
constexpr int kRowStep = 32 / kLanes;
constexpr int kLaneRows = kWarpRows / kRowStep;
constexpr int kRows = kLaneRows < 2 ? kLaneRows : 2;  // rows of a lane in registers at once
constexpr int kWarpFloats = kWarpRows * kHeadSize;
constexpr uint32_t kWarpBytes = kWarpFloats * sizeof(float);
// Iterations between the last use of a buffer by the warp and its refill.
constexpr int kLag = kBulkStore ? 1 : 0;
static_assert(kTiles * FK_ROWS_PER_BLOCK == kHeadSize, "a head is a whole number of tiles");
static_assert(kLaneRows * kRowStep * kWarps == FK_ROWS_PER_BLOCK && kLaneRows % kRows == 0,
              "a warp takes whole passes of rows");
static_assert(kStages > kLag, "one buffer at least is being filled");

// The rows of one warp in one tile.
struct Piece {
  uint32_t batch_idx, head_idx, first_row;
};

// Walks over the tiles of a block. By carries, since three of these walk at different distances and
// each step would cost a division.
class Cursor {
 public:
  __device__ __forceinline__ Cursor(const Params& p, uint32_t tile)
      : pair_(split(p, tile / kTiles)), tile_(tile % kTiles) {}

  __device__ __forceinline__ bool is_inside(const Params& p) const {
    return pair_.batch_idx < static_cast<uint32_t>(p.batch_size);
  }

  // Onwards by as many tiles as `distance` stands from the first one.
  __device__ __forceinline__ void advance(const Params& p, const Cursor& distance) {
    tile_ += distance.tile_;
    pair_.head_idx += distance.pair_.head_idx + tile_ / kTiles;
    tile_ %= kTiles;
    pair_.batch_idx += distance.pair_.batch_idx;
    const uint32_t num_v_heads = p.num_v_heads;
    if (pair_.head_idx >= num_v_heads) {
      pair_.head_idx -= num_v_heads;
      ++pair_.batch_idx;
    }
  }

  __device__ __forceinline__ uint32_t batch_idx() const { return pair_.batch_idx; }

  __device__ __forceinline__ Piece piece(uint32_t warp) const {
    return {pair_.batch_idx, pair_.head_idx, tile_ * FK_ROWS_PER_BLOCK + warp * kWarpRows};
  }

 private:
  struct Pair {
    uint32_t batch_idx, head_idx;
  };

  static __device__ __forceinline__ Pair split(const Params& p, uint32_t pair) {
    const uint32_t batch_idx = pair / static_cast<uint32_t>(p.num_v_heads);
    return {batch_idx, pair - batch_idx * p.num_v_heads};
  }

  Pair pair_;
  uint32_t tile_;
};

// What a piece needs besides its state, as it lies in memory: nothing here waits for a load.
struct Operands {
  Piece piece;
  SlotIndex read_slot, write_slot;
  Keys<kLanes> keys;
  GateInputs gates;
  uint16_t v[kLaneRows];
};

__device__ __forceinline__ Operands load_operands(const Params& p, const Piece& piece,
                                                  uint32_t lane) {
  Operands x;
  x.piece = piece;
  x.read_slot = load_read_slot(p, piece.batch_idx);
  x.write_slot = load_write_slot(p, piece.batch_idx);
  x.keys = load_keys<kLanes, kAligned>(p, piece.batch_idx, find_q_head(p, piece.head_idx),
                                       lane % kLanes);
  x.gates = load_gate_inputs(p, piece.batch_idx, piece.head_idx);
  const int64_t v_idx = piece.batch_idx * p.v_stride_b + piece.head_idx * p.v_stride_h +
                        piece.first_row + lane / kLanes;
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) x.v[r] = load_bf16(p.v, v_idx + r * kRowStep);
  return x;
}

// Starts to fill a buffer with the old state of a piece, and arms its barrier. Where there is no
// state to read the phase completes at once, so that parities go on as everywhere. All lanes.
__device__ __forceinline__ void fill(const Params& p, const Piece& piece, SlotIndex slot,
                                     float* buffer, uint32_t barrier, uint32_t lane,
                                     [[maybe_unused]] uint64_t policy) {
  const bool is_read = p.has_state && is_slot(p, slot);
  const float* state = static_cast<const float*>(p.state) + slot.low * p.state_stride_slot +
                       piece.head_idx * p.state_stride_h + piece.first_row * kHeadSize;
  if constexpr (kAligned) {
    if (lane == 0) {
      ptx::mbarrier_arrive_expect(barrier, is_read ? kWarpBytes : 0);
      if (is_read) {
        ptx::bulk_load(ptx::shared_address(buffer), state, kWarpBytes, barrier, policy);
      }
    }
  } else {
    if (is_read) {
#pragma unroll 8
      for (uint32_t i = lane; i < kWarpFloats; i += 32) buffer[i] = state[i];
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive_expect(barrier, 0);
  }
}

// Computes one piece from its buffer, which holds the new state afterwards if kBulkStore.
__device__ __forceinline__ void advance(const Params& p, const Operands& x, const Gates& gates,
                                        float* buffer, uint32_t lane) {
  const uint32_t row_in_piece = lane / kLanes;
  const uint32_t column = 4 * (lane % kLanes);
  const uint32_t first_row = x.piece.first_row + row_in_piece;
  const bool is_written = is_slot(p, x.write_slot);
  const int64_t output_idx =
      x.piece.batch_idx * p.output_stride_b + x.piece.head_idx * p.output_stride_h + first_row;
  float* new_state = static_cast<float*>(p.new_state) + x.write_slot.low * p.new_state_stride_slot +
                     x.piece.head_idx * p.new_state_stride_h + first_row * kHeadSize + column;
  float* rows = buffer + row_in_piece * kHeadSize + column;
#pragma unroll
  for (int pass = 0; pass < kLaneRows; pass += kRows) {
    float4 S[kRows][kPieces];
    uint16_t v[kRows];
    float output[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      v[r] = x.v[pass + r];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int offset = (pass + r) * kRowStep * kHeadSize + 4 * i * kLanes;
        S[r][i] = p.has_state ? *reinterpret_cast<const float4*>(rows + offset)
                              : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
    step_rows<kLanes>(S, x.keys, v, gates, p.scale, output);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int offset = (pass + r) * kRowStep * kHeadSize + 4 * i * kLanes;
        if constexpr (kBulkStore) {
          *reinterpret_cast<float4*>(rows + offset) = S[r][i];
        } else if (is_written) {
          if constexpr (kAligned) {
            ptx::store(new_state + offset, S[r][i]);
          } else {
            new_state[offset] = S[r][i].x;
            new_state[offset + 1] = S[r][i].y;
            new_state[offset + 2] = S[r][i].z;
            new_state[offset + 3] = S[r][i].w;
          }
        }
      }
      if (column == 0) store_bf16(p.output, output_idx + (pass + r) * kRowStep, output[r]);
    }
  }
}

__device__ __forceinline__ void write_padding(const Params& p, const Piece& piece, uint32_t lane) {
  const int64_t output_idx =
      piece.batch_idx * p.output_stride_b + piece.head_idx * p.output_stride_h + piece.first_row;
  for (uint32_t row = lane; row < kWarpRows; row += 32) {
    store_bf16(p.output, output_idx + row, 0.0f);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps, FK_BLOCKS_PER_SM)
    gdn_decode_bulk_rows(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) float buffers[];
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t policy = ptx::evict_first_policy();
  float* const ring = buffers + warp * kWarpFloats;
  constexpr int kStageFloats = kWarps * kWarpFloats;
  const uint32_t barriers = ptx::shared_address(buffers + kStages * kStageFloats) + 8 * warp;
  constexpr uint32_t kStageBarriers = 8 * kWarps;

  if (lane == 0) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) ptx::mbarrier_init(barriers + s * kStageBarriers, 1);
    ptx::fence_mbarrier_init();
    ptx::fence_async_shared();
  }
  __syncwarp();

  const Cursor step(p, gridDim.x);
  Cursor ahead(p, blockIdx.x);  // at the tile whose operands are loaded next
  Cursor refill = ahead;        // at the tile that the next free buffer takes
  SlotIndex refill_slot;        // where the state of that tile lies

  {
    // All indices first, so that their round trips overlap.
    SlotIndex slots[kStages + 1] = {};
    Cursor cursor = refill;
#pragma unroll
    for (int s = 0; s <= kStages; ++s) {
      if (cursor.is_inside(p)) slots[s] = load_read_slot(p, cursor.batch_idx());
      cursor.advance(p, step);
    }
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      if (refill.is_inside(p)) {
        fill(p, refill.piece(warp), slots[s], ring + s * kStageFloats,
             barriers + s * kStageBarriers, lane, policy);
      }
      refill.advance(p, step);
    }
    refill_slot = slots[kStages];
  }

  Operands next = {};
  bool has_next = ahead.is_inside(p);
  if (has_next) next = load_operands(p, ahead.piece(warp), lane);
  int stage = 0;
  int refill_stage = kLag == 0 ? 0 : kStages - 1;
  uint32_t parity = 0;
  bool is_first = true;
  while (has_next) {
    const Operands now = next;
    ahead.advance(p, step);
    has_next = ahead.is_inside(p);
    if (has_next) next = load_operands(p, ahead.piece(warp), lane);
    const Gates gates = compute_gates(now.gates);
    float* const buffer = ring + stage * kStageFloats;

    // Every lane sees this phase complete before the barrier is armed again: fill() comes after the
    // __syncwarp below, so no lane can be two phases behind.
    ptx::mbarrier_wait(barriers + stage * kStageBarriers, parity);
    const bool is_read = is_slot(p, now.read_slot);
    if (is_read) {
      advance(p, now, gates, buffer, lane);
    } else {
      write_padding(p, now.piece, lane);
    }
    // The buffer's new contents are for the async proxy to read, hence each writer's fence; where
    // lanes only read, the refill that overwrites it is ordered behind them by __syncwarp alone.
    if constexpr (kBulkStore) ptx::fence_async_shared();
    __syncwarp();
    if constexpr (kBulkStore) {
      if (lane == 0) {
        if (is_read && is_slot(p, now.write_slot)) {
          float* new_state =
              static_cast<float*>(p.new_state) + now.write_slot.low * p.new_state_stride_slot +
              now.piece.head_idx * p.new_state_stride_h + now.piece.first_row * kHeadSize;
          ptx::bulk_store(new_state, ptx::shared_address(buffer), kWarpBytes);
        }
        ptx::bulk_commit();
        // All stores but the one just issued have read their buffers: the one to refill is free.
        ptx::bulk_wait_read<1>();
      }
    }

    // Without lag the buffer just used is free now; with it, that of the iteration before.
    if ((kLag == 0 || !is_first) && refill.is_inside(p)) {
      fill(p, refill.piece(warp), refill_slot, ring + refill_stage * kStageFloats,
           barriers + refill_stage * kStageBarriers, lane, policy);
      refill.advance(p, step);
      if (refill.is_inside(p)) refill_slot = load_read_slot(p, refill.batch_idx());
    }
    is_first = false;
    refill_stage = refill_stage + 1 == kStages ? 0 : refill_stage + 1;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if (stage == 0) parity ^= 1;
  }
  // Shared memory must outlive the copies that read it; kernel completion covers their writes.
  if constexpr (kBulkStore) {
    if (lane == 0) ptx::bulk_wait_read<0>();
  }
}

}  // namespace fastkernels::gdn_decode
