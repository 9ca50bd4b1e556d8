// gdn_prefill: from tensors to launches.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/cubin.h"
#include "common/gdn_call.h"
#include "common/scratch.h"
#include "common/served.h"
#include "common/tensor.h"
#include "gdn_prefill/params.h"

namespace fastkernels::gdn_prefill {
namespace {

namespace ffi = tvm::ffi;

// Variants of a kernel, in the order of `Kernel.variants`: one launch has two; two launches have
// four, those of the first launch first; chunk_states has two more behind, chunk_parallel five. Of
// chunk_pipeline's three the first one is the first launch's.
enum : int { kAligned = 0, kAny = 1 };
enum : int { kClear = 0, kPipeline = 1 };
constexpr size_t kPipelineVariants = 3;
enum : int { kPrepare = 0, kChain = 2, kOutput = 4, kTransfer = 4, kScan = 6, kMend = 7 };
constexpr size_t kSplitVariants = 4;

struct Call {
  const DLTensor *q, *k, *v, *A_log, *a, *dt_bias, *b, *cu_seqlens;
  double scale;
  const DLTensor *output, *workspace;
  gdn::StateArguments states;
};

// Fills `p` and `variant` if the call is plainly legal. `is_checked`: Python has looked at it, so
// memory that may be shared is not; sizes, dtypes, strides and devices are looked at again, since
// a kernel trusts them.
bool Prepare(const Call& call, bool is_checked, Params* p, int* variant) {
  const View q(call.q), k(call.k), v(call.v), A_log(call.A_log), a(call.a), dt_bias(call.dt_bias),
      b(call.b), cu_seqlens(call.cu_seqlens), output(call.output);
  if (q.ndim() != 3 || v.ndim() != 3 || cu_seqlens.ndim() != 1) return false;
  const int64_t num_tokens = v.size(0), num_seqs = cu_seqlens.size(0) - 1;
  const int64_t num_q_heads = q.size(1), num_v_heads = v.size(1);
  if (num_tokens > kMaxInt32 - kChunk || num_seqs < 0 || num_seqs > kMaxInt32 - 1 ||
      num_q_heads < 1 || num_v_heads < 1 || num_v_heads > kMaxInt32 / kHeadSize ||
      num_v_heads % num_q_heads != 0) {
    return false;
  }
  const bool is_wide = Equal(cu_seqlens.dtype(), kInt64);
  if (!(q.Is(kBFloat16, {num_tokens, num_q_heads, kHeadSize}) && q.IsDense(1) &&
        k.Is(kBFloat16, {num_tokens, num_q_heads, kHeadSize}) && k.IsDense(1) &&
        v.Is(kBFloat16, {num_tokens, num_v_heads, kHeadSize}) && v.IsDense(1) &&
        A_log.Is(kFloat32, {num_v_heads}) && A_log.IsDense(1) &&
        a.Is(kBFloat16, {num_tokens, num_v_heads}) && a.IsDense(1) &&
        dt_bias.Is(kFloat32, {num_v_heads}) && dt_bias.IsDense(1) &&
        b.Is(kBFloat16, {num_tokens, num_v_heads}) && b.IsDense(1) &&
        cu_seqlens.Is(is_wide ? kInt64 : kInt32, {num_seqs + 1}) && cu_seqlens.IsDense(1) &&
        output.Is(kBFloat16, {num_tokens, num_v_heads, kHeadSize}) && output.IsDense(1))) {
    return false;
  }
  std::vector<View> given = {q, k, v, A_log, a, dt_bias, b, cu_seqlens};
  if (!gdn::PrepareStates(call.states, num_seqs, num_v_heads, kHeadSize, &given, p) ||
      !gdn::IsSoundMemory(call.states, given, output, is_checked)) {
    return false;
  }

  // With one token its stride says nothing, not even about alignment; kernels may still compute the
  // address of a token that is not there.
  auto step = [](const View& each) { return each.size(0) > 1 ? each.stride(0) : 0; };
  p->q = q.pointer();
  p->k = k.pointer();
  p->v = v.pointer();
  p->A_log = A_log.pointer();
  p->a = a.pointer();
  p->dt_bias = dt_bias.pointer();
  p->b = b.pointer();
  p->cu_seqlens = cu_seqlens.pointer();
  p->output = output.pointer();
  p->q_stride_t = step(q);
  p->q_stride_h = q.stride(1);
  p->k_stride_t = step(k);
  p->k_stride_h = k.stride(1);
  p->v_stride_t = step(v);
  p->v_stride_h = v.stride(1);
  p->a_stride_t = a.stride(0);
  p->b_stride_t = b.stride(0);
  p->cu_stride = cu_seqlens.stride(0);
  p->output_stride_t = step(output);
  p->output_stride_h = output.stride(1);
  p->num_tokens = static_cast<int32_t>(num_tokens);
  p->num_seqs = static_cast<int32_t>(num_seqs);
  p->num_q_heads = static_cast<int32_t>(num_q_heads);
  p->num_v_heads = static_cast<int32_t>(num_v_heads);
  p->offset_words = is_wide ? 2 : 1;
  p->scale =
      static_cast<float>(call.scale == 0.0 ? 1.0 / std::sqrt(double{kHeadSize}) : call.scale);
  const View new_state(call.states.is_updated() ? call.states.state : call.states.new_state);
  const View state(p->has_state ? call.states.state : call.states.new_state);
  bool is_aligned = true;
  for (const View& each : {q, k, v, output, state, new_state}) {
    is_aligned = is_aligned && each.IsAligned(16);
  }
  *variant = is_aligned ? kAligned : kAny;
  return true;
}

// What a plan asks for with a problem: blocks of each launch, along x, and bytes of workspace.
struct Layout {
  int64_t prepare = 0, chain, output = 0, transfer = 0, scan = 0, mend = 0;
  int64_t bytes;
};

// `plan.tile` is rows of V a block; bytes of workspace for each chunk of each head, 0 where the
// plan has none; for chunk_states also bytes for each chunk of each query head, or for
// chunk_parallel the chunks of a segment, and bytes for each cut of each head.
Layout LayOut(const Plan& plan, const Params& p) {
  const int64_t slabs = kHeadSize / plan.tile[0], entry_bytes = plan.tile[1];
  const int64_t chunks = entry_bytes > 0 ? chunk_bound(p.num_tokens, p.num_seqs) : 0;
  const bool has_output = plan.tile.size() == 3, is_parallel = plan.tile.size() == 4;
  const int64_t cuts = is_parallel ? cut_bound(p.num_tokens, plan.tile[2] * kChunk) : 0;
  const int64_t heads = p.num_v_heads;
  Layout layout;
  layout.prepare = chunks * heads;
  // Slabs of rows fastest, then heads, then sequences, or numbers of segments; one for stray tokens
  // where there are none.
  layout.chain = std::max<int64_t>(p.num_seqs + cuts, 1) * heads * slabs;
  layout.transfer = cuts * heads * 2 * slabs;
  layout.scan = std::min<int64_t>(p.num_seqs, cuts) * heads * (kHeadSize / 16);
  layout.output = has_output ? layout.prepare : 0;
  layout.mend = std::min<int64_t>(p.num_seqs, cuts) * heads * slabs;
  layout.bytes = layout.prepare * entry_bytes;
  if (has_output) layout.bytes += chunks * p.num_q_heads * plan.tile[2];
  if (is_parallel) layout.bytes += cuts * heads * plan.tile[3];
  return layout;
}

void LaunchOne(const Plan& plan, int variant, Grid grid, CUstream stream, Params* p,
               bool is_dependent) {
  if (plan.variants[variant].arguments == Arguments::kStruct) {
    void* arguments[] = {p};
    Launch(plan, plan.variants[variant], grid, stream, arguments, is_dependent);
    return;
  }
  void* scratch = nullptr;
  void* arguments[] = {&p->q,
                       &p->k,
                       &p->v,
                       &p->state,
                       &p->A_log,
                       &p->a,
                       &p->dt_bias,
                       &p->b,
                       &p->cu_seqlens,
                       &p->read_indices,
                       &p->write_indices,
                       &p->output,
                       &p->new_state,
                       &p->workspace,
                       &p->q_stride_t,
                       &p->q_stride_h,
                       &p->k_stride_t,
                       &p->k_stride_h,
                       &p->v_stride_t,
                       &p->v_stride_h,
                       &p->state_stride_slot,
                       &p->state_stride_h,
                       &p->a_stride_t,
                       &p->b_stride_t,
                       &p->cu_stride,
                       &p->read_stride,
                       &p->write_stride,
                       &p->output_stride_t,
                       &p->output_stride_h,
                       &p->new_state_stride_slot,
                       &p->new_state_stride_h,
                       &p->num_tokens,
                       &p->num_seqs,
                       &p->num_q_heads,
                       &p->num_v_heads,
                       &p->num_slots,
                       &p->has_state,
                       &p->offset_words,
                       &p->index_words,
                       &p->scale,
                       &scratch,
                       &scratch};
  Launch(plan, plan.variants[variant], grid, stream, arguments, is_dependent);
}

// False: nothing was launched.
bool LaunchPlan(const Plan& plan, Params* p, int variant, const Call& call) {
  const Layout layout = LayOut(plan, *p);
  if (std::max({layout.prepare, layout.chain, layout.transfer}) > kMaxInt32) return false;
  if (p->num_tokens == 0 && p->num_seqs == 0) return true;
  const DLDevice device_id = call.q->device;
  Scratch scratch;
  if (!scratch.Get(call.workspace, layout.bytes, device_id)) return false;
  p->workspace = scratch.pointer();
  const Device& device = Device::Get(device_id.device_id);
  auto stream = static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, device_id.device_id));
  ContextGuard guard(device);
  // Each launch but the first waits for the one before by itself.
  bool is_dependent = false;
  auto launch = [&](int which, int64_t blocks) {
    if (blocks == 0) return;
    LaunchOne(plan, which, {static_cast<uint32_t>(blocks), 1, 1}, stream, p, is_dependent);
    is_dependent = true;
  };
  if (plan.variants.size() == kPipelineVariants) {
    const int64_t entries = layout.prepare, threads = plan.variants[kClear].threads;
    launch(kClear, (entries + threads - 1) / threads);
    launch(kPipeline + variant, std::min<int64_t>(entries + layout.chain, 2 * device.num_sms));
    return true;
  }
  if (plan.variants.size() < kSplitVariants) {
    launch(variant, layout.chain);
    return true;
  }
  launch(kPrepare + variant, layout.prepare);
  launch(kTransfer + variant, layout.transfer);
  launch(kScan, layout.scan);
  launch(kChain + variant, layout.chain);
  launch(kOutput + variant, layout.output);
  launch(kMend + variant, layout.mend);
  return true;
}

// What is said instead of a plan's handle: the plan is the one remembered for these sizes; or
// nothing is launched and the checks alone are made, those of a call that Python has or has not
// looked at (for tests, on any device).
enum : int64_t { kRemembered = 0, kCheckAlone = -1, kCheckAgainAlone = -2 };

// What the dispatcher's decision follows from; see `fixed` in ops/gdn_prefill/routes/library.py.
int64_t FindPlan(const Call& call) {
  static const Served& served = Served::Of("gdn_prefill");
  if (call.q->ndim != 3 || call.v->ndim != 3 || call.cu_seqlens->ndim != 1) return 0;
  return served.Find({call.q->shape[1], call.v->shape[1], call.q->device.device_id,
                      call.states.is_pool(), call.states.is_updated()},
                     {call.v->shape[0], call.cu_seqlens->shape[0] - 1});
}

// The entry of every compiled route. `new_state` None: the state is updated where it lies.
// `scale` 0 is the default. `workspace` None: allocated where the plan needs one. False: nothing
// was launched, and Python should look at the call.
bool Prefill(int64_t plan, ffi::AnyView q, ffi::AnyView k, ffi::AnyView v, ffi::AnyView state,
             ffi::AnyView A_log, ffi::AnyView a, ffi::AnyView dt_bias, ffi::AnyView b,
             ffi::AnyView cu_seqlens, double scale, ffi::AnyView read_indices,
             ffi::AnyView write_indices, ffi::AnyView output, ffi::AnyView new_state,
             ffi::AnyView workspace) {
  bool is_kind = true;
  auto get = [&](const ffi::AnyView& argument) { return GetTensor(argument, &is_kind); };
  const Call call{
      get(q),         get(k),
      get(v),         get(A_log),
      get(a),         get(dt_bias),
      get(b),         get(cu_seqlens),
      scale,          get(output),
      get(workspace), {get(state), get(read_indices), get(write_indices), get(new_state)}};
  for (const DLTensor* required : {call.q, call.k, call.v, call.A_log, call.a, call.dt_bias, call.b,
                                   call.cu_seqlens, call.output}) {
    is_kind = is_kind && required != nullptr;
  }
  if (!is_kind) return false;
  const bool is_launched = plan >= 0;
  if (is_launched && call.q->device.device_type != kDLCUDA) return false;
  const bool is_checked = plan > 0 || plan == kCheckAgainAlone;
  if (plan == kRemembered) {
    plan = FindPlan(call);
    if (plan == 0) return false;
  }
  Params params;
  int variant = kAny;
  if (!Prepare(call, is_checked, &params, &variant)) return false;
  return !is_launched || LaunchPlan(Plan::Get(plan), &params, variant, call);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_prefill, Prefill);

}  // namespace fastkernels::gdn_prefill
