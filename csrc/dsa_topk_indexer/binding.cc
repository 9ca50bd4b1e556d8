// dsa_topk_indexer: from tensors to launches.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <algorithm>

#include "common/cubin.h"
#include "common/scratch.h"
#include "common/served.h"
#include "common/tensor.h"
#include "dsa_topk_indexer/params.h"

namespace fastkernels::dsa_topk_indexer {
namespace {

namespace ffi = tvm::ffi;

// Variants of a plan that scores and selects in one launch, in the order of `Kernel.variants`.
enum : int { kAligned = 0, kAny = 1 };

constexpr DLDataType kE4m3{kDLFloat8_e4m3fn, 8, 1};
constexpr DLDataType kInt8{kDLInt, 8, 1};
constexpr DLDataType kUInt8{kDLUInt, 8, 1};

// ops/dsa_topk_indexer/kernels/__init__.py says what it means.
struct Tile {
  int64_t select, score, most, aside;

  explicit Tile(const Plan& plan)
      : select(plan.tile[0]), score(plan.tile[1]), most(plan.tile[2]), aside(plan.tile[3]) {}
};

constexpr int64_t kWorkspaceBytes = 64 << 20;

struct Call {
  const DLTensor *q, *cache, *weights, *seq_lens, *block_table, *output, *workspace;
};

// Fills `p` and `is_aligned` if the call is plainly legal. `is_checked`: Python has looked at it,
// so memory that may be shared is not; sizes, dtypes, strides and devices are looked at again,
// since a kernel trusts them.
bool Prepare(const Call& call, bool is_checked, Params* p, bool* is_aligned) {
  const View q(call.q), cache(call.cache), weights(call.weights), seq_lens(call.seq_lens),
      block_table(call.block_table), output(call.output);
  if (q.ndim() != 3 || cache.ndim() != 4 || block_table.ndim() != 2 || output.ndim() != 2) {
    return false;
  }
  const int64_t batch_size = q.size(0), num_heads = q.size(1), num_pages = cache.size(0);
  const int64_t max_num_pages = block_table.size(1), topk = output.size(1);
  if (batch_size > kMaxInt32 || num_heads < 1 || topk < 1 || topk > kMaxInt32 ||
      num_pages > (kMaxInt32 + 1) / kPageSize || max_num_pages > kMaxInt32 / kPageSize) {
    return false;
  }
  const bool is_byte = Equal(cache.dtype(), kInt8) || Equal(cache.dtype(), kUInt8);
  if (!(q.Is(kE4m3, {batch_size, num_heads, kKeyBytes}) && q.IsDense(1) && is_byte &&
        cache.Is(cache.dtype(), {num_pages, kPageSize, 1, kPageBytes / kPageSize}) &&
        cache.IsDense(3) && weights.Is(kFloat32, {batch_size, num_heads}) && weights.IsDense(1) &&
        seq_lens.Is(kInt32, {batch_size}) && block_table.Is(kInt32, {batch_size, max_num_pages}) &&
        output.Is(kInt32, {batch_size, topk}) && output.IsDense(1))) {
    return false;
  }
  for (const View& each : {q, cache, weights, seq_lens, block_table, output}) {
    if (!each.IsOn(output.device()) || !each.HasMemory()) return false;
  }
  if (!is_checked) {
    if (!output.IsPlainlyInjective()) return false;
    for (const View& each : {q, cache, weights, seq_lens, block_table}) {
      if (!each.IsApartFrom(output)) return false;
    }
  }

  p->q = q.pointer();
  p->cache = cache.pointer();
  p->weights = weights.pointer();
  p->seq_lens = seq_lens.pointer();
  p->block_table = block_table.pointer();
  p->output = output.pointer();
  p->workspace = nullptr;
  // Strides that are never multiplied by more than 0 may be anything; a kernel may be promised that
  // they are multiples.
  auto stride = [](const View& view, int axis) {
    return view.size(axis) > 1 ? view.stride(axis) : 0;
  };
  p->q_stride_b = stride(q, 0);
  p->q_stride_h = stride(q, 1);
  p->cache_stride_page = stride(cache, 0);
  p->weights_stride_b = stride(weights, 0);
  p->seq_lens_stride_b = stride(seq_lens, 0);
  p->table_stride_b = stride(block_table, 0);
  p->table_stride_p = stride(block_table, 1);
  p->output_stride_b = stride(output, 0);
  p->batch_size = static_cast<int32_t>(batch_size);
  p->num_heads = static_cast<int32_t>(std::min<int64_t>(num_heads, kMaxInt32));
  p->topk = static_cast<int32_t>(topk);
  p->max_num_pages = static_cast<int32_t>(max_num_pages);
  p->num_pages = static_cast<int32_t>(num_pages);
  *is_aligned = q.IsAligned(16) && cache.data() % 16 == 0 && p->cache_stride_page % 16 == 0;
  return true;
}

// The call's rows from `first` on, `count` of them.
Params RowsOf(const Params& p, int64_t first, int64_t count) {
  auto move = [first](const void* pointer, int64_t stride_bytes) {
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) + first * stride_bytes);
  };
  Params rows = p;
  rows.q = move(p.q, p.q_stride_b);
  rows.weights = move(p.weights, 4 * p.weights_stride_b);
  rows.seq_lens = move(p.seq_lens, 4 * p.seq_lens_stride_b);
  rows.block_table = move(p.block_table, 4 * p.table_stride_b);
  rows.output = move(p.output, 4 * p.output_stride_b);
  rows.batch_size = static_cast<int32_t>(count);
  return rows;
}

void LaunchOne(const Plan& plan, int variant, int64_t blocks, CUstream stream, Params* p,
               bool is_dependent) {
  const Grid grid{static_cast<uint32_t>(blocks), 1, 1};
  if (plan.variants[variant].arguments == Arguments::kStruct) {
    void* arguments[] = {p};
    Launch(plan, plan.variants[variant], grid, stream, arguments, is_dependent);
    return;
  }
  void* scratch = nullptr;
  void* arguments[] = {&p->q,
                       &p->cache,
                       &p->weights,
                       &p->seq_lens,
                       &p->block_table,
                       &p->output,
                       &p->workspace,
                       &p->q_stride_b,
                       &p->q_stride_h,
                       &p->cache_stride_page,
                       &p->weights_stride_b,
                       &p->seq_lens_stride_b,
                       &p->table_stride_b,
                       &p->table_stride_p,
                       &p->output_stride_b,
                       &p->batch_size,
                       &p->num_heads,
                       &p->topk,
                       &p->max_num_pages,
                       &p->num_pages,
                       &scratch,
                       &scratch};
  Launch(plan, plan.variants[variant], grid, stream, arguments, is_dependent);
}

// The variant that scores, in a plan of two launches: `score`, `score_any`, `select`, or in Triton
// `score_64`, `score_32`, `score_any`, `select`.
int ScoreVariant(const Plan& plan, const Params& p, bool is_aligned) {
  const int any = static_cast<int>(plan.variants.size()) - 2;
  if (!is_aligned) return any;
  if (any == 1 || p.num_heads == 64) return 0;
  return p.num_heads == 32 ? 1 : any;
}

// False: nothing was launched.
bool LaunchPlan(const Plan& plan, const Params& p, bool is_aligned, const Call& call) {
  const int64_t rows = p.batch_size;
  if (rows == 0) return true;
  const Tile tile(plan);
  const DLDevice device_id = call.output->device;
  const Device& device = Device::Get(device_id.device_id);
  auto stream = static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, device_id.device_id));
  Params all = p;
  if (tile.select == 0) {
    const int64_t blocks = rows * ((int64_t{p.topk} + kChunk - 1) / kChunk);
    if (int64_t{p.max_num_pages} * kPageSize > p.topk || blocks > kMaxInt32) return false;
    ContextGuard guard(device);
    LaunchOne(plan, 0, blocks, stream, &all, false);
    return true;
  }
  const bool is_cuda = plan.variants[0].arguments == Arguments::kStruct;
  if ((is_cuda && p.num_heads > kMaxHeads) || rows * tile.select > kMaxInt32 ||
      (tile.most > 0 && p.max_num_pages > tile.most)) {
    return false;
  }
  if (tile.score == 0) {
    ContextGuard guard(device);
    LaunchOne(plan, is_aligned ? kAligned : kAny, rows * tile.select, stream, &all, false);
    return true;
  }
  // As in ops/dsa_topk_indexer/kernels/__init__.py: `row_bytes`, `group_rows`, `workspace_bytes`.
  const int64_t keys_bytes = 4 * kPageSize * int64_t{p.max_num_pages};
  const int64_t row_bytes = keys_bytes + (2 * keys_bytes > tile.aside ? tile.aside : 0);
  const int64_t group = std::max(kWorkspaceBytes / std::max<int64_t>(row_bytes, 1), int64_t{1});
  // Where no row can be longer than `topk`, `select` alone has something to do.
  const bool is_scored = int64_t{p.max_num_pages} * kPageSize > p.topk;
  const int64_t tiles = is_scored ? (p.max_num_pages + tile.score - 1) / tile.score : 0;
  if (std::min(group, rows) * tiles > kMaxInt32) return false;
  Scratch scratch;
  const int64_t bytes = std::min(rows * row_bytes, std::max(row_bytes, kWorkspaceBytes));
  if (!scratch.Get(call.workspace, bytes, device_id)) return false;
  all.workspace = scratch.pointer();
  ContextGuard guard(device);
  for (int64_t first = 0; first < rows; first += group) {
    const int64_t count = std::min(group, rows - first);
    Params some = RowsOf(all, first, count);
    if (tiles > 0) {
      LaunchOne(plan, ScoreVariant(plan, p, is_aligned), count * tiles, stream, &some, first > 0);
    }
    LaunchOne(plan, static_cast<int>(plan.variants.size()) - 1, count * tile.select, stream, &some,
              tiles > 0);
  }
  return true;
}

// What is said instead of a plan's handle: the plan is the one remembered for these sizes; or
// nothing is launched and the checks alone are made, those of a call that Python has or has not
// looked at (for tests, on any device).
enum : int64_t { kRemembered = 0, kCheckAlone = -1, kCheckAgainAlone = -2 };

// What the dispatcher's decision follows from; see `fixed` in
// ops/dsa_topk_indexer/routes/library.py.
int64_t FindPlan(const Call& call) {
  static const Served& served = Served::Of("dsa_topk_indexer");
  if (call.q->ndim != 3 || call.cache->ndim != 4 || call.block_table->ndim != 2 ||
      call.output->ndim != 2) {
    return 0;
  }
  return served.Find(
      {call.q->shape[1], call.output->shape[1], call.cache->shape[0], call.q->device.device_id},
      {call.q->shape[0], call.block_table->shape[1]});
}

// The entry of every compiled route; top-k is the output's width. `workspace` None: allocated where
// the plan needs one. False: nothing was launched, and Python should look at the call.
bool Index(int64_t plan, ffi::AnyView q, ffi::AnyView cache, ffi::AnyView weights,
           ffi::AnyView seq_lens, ffi::AnyView block_table, ffi::AnyView output,
           ffi::AnyView workspace) {
  bool is_kind = true;
  auto get = [&](const ffi::AnyView& argument) { return GetTensor(argument, &is_kind); };
  const Call call{get(q),           get(cache),  get(weights),  get(seq_lens),
                  get(block_table), get(output), get(workspace)};
  for (const DLTensor* required :
       {call.q, call.cache, call.weights, call.seq_lens, call.block_table, call.output}) {
    is_kind = is_kind && required != nullptr;
  }
  if (!is_kind) return false;
  const bool is_launched = plan >= 0;
  if (is_launched && call.output->device.device_type != kDLCUDA) return false;
  const bool is_checked = plan > 0 || plan == kCheckAgainAlone;
  if (plan == kRemembered) {
    plan = FindPlan(call);
    if (plan == 0) return false;
  }
  Params params;
  bool is_aligned = false;
  if (!Prepare(call, is_checked, &params, &is_aligned)) return false;
  return !is_launched || LaunchPlan(Plan::Get(plan), params, is_aligned, call);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(dsa_topk_indexer, Index);

}  // namespace fastkernels::dsa_topk_indexer
