// dsa_sparse_attention: from tensors to launches.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>

#include "common/cubin.h"
#include "common/scratch.h"
#include "common/served.h"
#include "common/tensor.h"
#include "dsa_sparse_attention/params.h"

namespace fastkernels::dsa_sparse_attention {
namespace {

namespace ffi = tvm::ffi;

// Variants, in the order of `Kernel.variants`: of a plan that is one launch, and of one that is two
// or three.
enum : int { kAligned = 0, kAny = 1 };
enum : int { kCompact = 0, kAttend = 1, kAttendAny = 2, kMerge = 3 };

// ops/dsa_sparse_attention/kernels/__init__.py says what it means.
struct Tile {
  int64_t cluster, heads, splits;

  explicit Tile(const Plan& plan)
      : cluster(plan.tile[0]), heads(plan.tile[1]), splits(plan.tile[2]) {}
};

constexpr int64_t kParts = 1024;
constexpr int64_t kPartBytes = 4 * 16 * kCkv, kStatisticsBytes = 4 * 16 * 2;

struct Call {
  const DLTensor *q_nope, *q_pe, *ckv, *kpe, *indices;
  double sm_scale, lse_scale;
  const DLTensor *output, *lse, *workspace;
};

// Where rows are evenly spaced across pages, too, the stride of a row says all; see kEvenRows.
struct Rows {
  int64_t stride_page, stride_row;
  bool is_even;

  explicit Rows(const View& cache) : stride_page(cache.stride(0)), stride_row(cache.stride(1)) {
    if (cache.size(1) == 1) stride_row = stride_page;
    is_even = (cache.size(0) <= 1 || stride_page == cache.size(1) * stride_row) &&
              stride_row <= kMaxInt32;
  }
};

// Fills `p` and `is_aligned` if the call is plainly legal. `is_checked`: Python has looked at it,
// so memory that may be shared is not; sizes, dtypes, strides and devices are looked at again,
// since a kernel trusts them.
bool Prepare(const Call& call, bool is_checked, Params* p, bool* is_aligned) {
  const View q_nope(call.q_nope), q_pe(call.q_pe), ckv(call.ckv), kpe(call.kpe),
      indices(call.indices), output(call.output), lse(call.lse);
  if (q_nope.ndim() != 3 || ckv.ndim() != 3 || indices.ndim() != 2) return false;
  const int64_t num_tokens = q_nope.size(0), num_heads = q_nope.size(1), topk = indices.size(1);
  const int64_t num_pages = ckv.size(0), page_size = ckv.size(1);
  if (num_tokens > kMaxInt32 || num_heads < 1 || num_heads > kMaxInt32 || topk < 1 ||
      topk > kMaxTopk || page_size < 1 || page_size > kMaxInt32 || num_pages > kMaxInt32 ||
      num_pages * page_size > kMaxInt32) {
    return false;
  }
  if (!(q_nope.Is(kBFloat16, {num_tokens, num_heads, kCkv}) && q_nope.IsDense(1) &&
        q_pe.Is(kBFloat16, {num_tokens, num_heads, kKpe}) && q_pe.IsDense(1) &&
        ckv.Is(kBFloat16, {num_pages, page_size, kCkv}) && ckv.IsDense(1) &&
        kpe.Is(kBFloat16, {num_pages, page_size, kKpe}) && kpe.IsDense(1) &&
        indices.Is(kInt32, {num_tokens, topk}) && indices.IsDense(1) &&
        output.Is(kBFloat16, {num_tokens, num_heads, kCkv}) && output.IsDense(1) &&
        lse.Is(kFloat32, {num_tokens, num_heads}) && lse.IsDense(1))) {
    return false;
  }
  for (const View& each : {q_nope, q_pe, ckv, kpe, indices, output, lse}) {
    if (!each.IsOn(output.device()) || !each.HasMemory()) return false;
  }
  if (!is_checked) {
    if (!output.IsPlainlyInjective() || !lse.IsPlainlyInjective() || !output.IsApartFrom(lse)) {
      return false;
    }
    for (const View& each : {q_nope, q_pe, ckv, kpe, indices}) {
      if (!each.IsApartFrom(output) || !each.IsApartFrom(lse)) return false;
    }
  }

  p->q_nope = q_nope.pointer();
  p->q_pe = q_pe.pointer();
  p->ckv = ckv.pointer();
  p->kpe = kpe.pointer();
  p->indices = indices.pointer();
  p->output = output.pointer();
  p->lse = lse.pointer();
  p->q_nope_stride_t = q_nope.stride(0);
  p->q_nope_stride_h = q_nope.stride(1);
  p->q_pe_stride_t = q_pe.stride(0);
  p->q_pe_stride_h = q_pe.stride(1);
  const Rows of_ckv(ckv), of_kpe(kpe);
  p->ckv_stride_page = of_ckv.stride_page;
  p->ckv_stride_row = of_ckv.stride_row;
  p->kpe_stride_page = of_kpe.stride_page;
  p->kpe_stride_row = of_kpe.stride_row;
  p->indices_stride_t = indices.stride(0);
  p->output_stride_t = output.stride(0);
  p->output_stride_h = output.stride(1);
  p->lse_stride_t = lse.stride(0);
  p->num_tokens = static_cast<int32_t>(num_tokens);
  p->num_heads = static_cast<int32_t>(num_heads);
  p->topk = static_cast<int32_t>(topk);
  p->page_size = of_ckv.is_even && of_kpe.is_even ? kEvenRows : static_cast<int32_t>(page_size);
  p->num_rows = static_cast<int32_t>(num_pages * page_size);
  p->scale_log2 = static_cast<float>(call.sm_scale / std::log(2.0));
  p->lse_scale = static_cast<float>(call.lse_scale);
  *is_aligned = true;
  for (const View& each : {q_nope, q_pe, ckv, kpe, output}) {
    *is_aligned = *is_aligned && each.IsAligned(16);
  }
  return true;
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
  void* arguments[] = {&p->q_nope,
                       &p->q_pe,
                       &p->ckv,
                       &p->kpe,
                       &p->indices,
                       &p->output,
                       &p->lse,
                       &p->workspace,
                       &p->q_nope_stride_t,
                       &p->q_nope_stride_h,
                       &p->q_pe_stride_t,
                       &p->q_pe_stride_h,
                       &p->ckv_stride_page,
                       &p->ckv_stride_row,
                       &p->kpe_stride_page,
                       &p->kpe_stride_row,
                       &p->indices_stride_t,
                       &p->output_stride_t,
                       &p->output_stride_h,
                       &p->lse_stride_t,
                       &p->num_tokens,
                       &p->num_heads,
                       &p->topk,
                       &p->page_size,
                       &p->num_rows,
                       &p->scale_log2,
                       &p->lse_scale,
                       &scratch,
                       &scratch};
  Launch(plan, plan.variants[variant], grid, stream, arguments, is_dependent);
}

// `workspace_bytes` of ops/dsa_sparse_attention/kernels/__init__.py.
int64_t WorkspaceBytes(const Params& p, const Tile& tile, int64_t head_blocks) {
  int64_t parts = 0;
  if (tile.splits > 1) parts = std::min(p.num_tokens * head_blocks * tile.splits, kParts);
  int64_t total = 0;
  for (int64_t size : {int64_t{4} * p.num_tokens * p.topk, int64_t{4} * p.num_tokens,
                       kPartBytes * parts, kStatisticsBytes * parts}) {
    total += (size + 255) / 256 * 256;
  }
  return total;
}

// False: nothing was launched.
bool LaunchPlan(const Plan& plan, Params* p, bool is_aligned, const Call& call) {
  if (p->num_tokens == 0) return true;
  const Tile tile(plan);
  const int64_t head_blocks = (p->num_heads + tile.heads - 1) / tile.heads;
  const int64_t units = p->num_tokens * head_blocks;
  const DLDevice device_id = call.q_nope->device;
  const Device& device = Device::Get(device_id.device_id);
  auto stream = static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, device_id.device_id));
  p->workspace = nullptr;
  if (tile.cluster > 0) {
    const int64_t blocks = units * tile.cluster;
    if (blocks > kMaxInt32) return false;
    ContextGuard guard(device);
    LaunchOne(plan, is_aligned ? kAligned : kAny, blocks, stream, p, false);
    return true;
  }
  const int64_t splits = std::min(std::max(kParts / units, int64_t{1}), tile.splits);
  if (std::max(units * splits, int64_t{p->num_tokens} * p->num_heads) > kMaxInt32) return false;
  Scratch scratch;
  if (!scratch.Get(call.workspace, WorkspaceBytes(*p, tile, head_blocks), device_id)) return false;
  p->workspace = scratch.pointer();
  ContextGuard guard(device);
  LaunchOne(plan, kCompact, p->num_tokens, stream, p, false);
  LaunchOne(plan, is_aligned ? kAttend : kAttendAny, units * splits, stream, p, true);
  if (splits > 1) {
    LaunchOne(plan, kMerge, int64_t{p->num_tokens} * p->num_heads, stream, p, true);
  }
  return true;
}

// What is said instead of a plan's handle: the plan is the one remembered for these sizes; or
// nothing is launched and the checks alone are made, those of a call that Python has or has not
// looked at (for tests, on any device).
enum : int64_t { kRemembered = 0, kCheckAlone = -1, kCheckAgainAlone = -2 };

// What the dispatcher's decision follows from; see `fixed` in
// ops/dsa_sparse_attention/routes/library.py.
int64_t FindPlan(const Call& call) {
  static const Served& served = Served::Of("dsa_sparse_attention");
  if (call.q_nope->ndim != 3 || call.ckv->ndim != 3 || call.indices->ndim != 2) return 0;
  return served.Find({call.q_nope->shape[1], call.indices->shape[1], call.ckv->shape[1],
                      call.q_nope->device.device_id},
                     {call.q_nope->shape[0], call.ckv->shape[0]});
}

// The entry of every compiled route. `lse_scale`: 1 for base 2, ln(2) for base e. `workspace` None:
// allocated where the plan needs one. False: nothing was launched, and Python should look at the
// call.
bool Attend(int64_t plan, ffi::AnyView q_nope, ffi::AnyView q_pe, ffi::AnyView ckv,
            ffi::AnyView kpe, ffi::AnyView indices, double sm_scale, double lse_scale,
            ffi::AnyView output, ffi::AnyView lse, ffi::AnyView workspace) {
  bool is_kind = true;
  auto get = [&](const ffi::AnyView& argument) { return GetTensor(argument, &is_kind); };
  const Call call{get(q_nope), get(q_pe), get(ckv),    get(kpe), get(indices),
                  sm_scale,    lse_scale, get(output), get(lse), get(workspace)};
  for (const DLTensor* required :
       {call.q_nope, call.q_pe, call.ckv, call.kpe, call.indices, call.output, call.lse}) {
    is_kind = is_kind && required != nullptr;
  }
  if (!is_kind) return false;
  const bool is_launched = plan >= 0;
  if (is_launched && call.q_nope->device.device_type != kDLCUDA) return false;
  const bool is_checked = plan > 0 || plan == kCheckAgainAlone;
  if (plan == kRemembered) {
    plan = FindPlan(call);
    if (plan == 0) return false;
  }
  Params params;
  bool is_aligned = false;
  if (!Prepare(call, is_checked, &params, &is_aligned)) return false;
  return !is_launched || LaunchPlan(Plan::Get(plan), &params, is_aligned, call);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(dsa_sparse_attention, Attend);

}  // namespace fastkernels::dsa_sparse_attention
