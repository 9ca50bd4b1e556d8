// gdn_decode: from tensors to a launch.
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/cubin.h"
#include "common/gdn_call.h"
#include "common/served.h"
#include "common/tensor.h"
#include "gdn_decode/params.h"

namespace fastkernels::gdn_decode {
namespace {

namespace ffi = tvm::ffi;

// Which variant of a kernel a call may use, in the order of `Kernel.variants`.
// Where a kernel has no compact variants, kAligned serves.
enum : int { kAligned = 0, kAny = 1, kCompact = 2, kCompactPool = 3 };

constexpr int64_t kMaxGridY = 65535;

struct Call {
  const DLTensor *q, *k, *v, *A_log, *a, *dt_bias, *b;
  double scale;
  const DLTensor* output;
  gdn::StateArguments states;
};

// Fills `p` and `variant` if the call is plainly legal. `is_checked`: Python has looked at it, so
// memory that may be shared is not; sizes, dtypes, strides and devices are looked at again, since
// a kernel trusts them.
bool Prepare(const Call& call, bool is_checked, Params* p, int* variant) {
  const View q(call.q), k(call.k), v(call.v), A_log(call.A_log), a(call.a), dt_bias(call.dt_bias),
      b(call.b), output(call.output);
  if (q.ndim() != 4 || v.ndim() != 4) return false;
  const int64_t batch_size = v.size(0), num_q_heads = q.size(2), num_v_heads = v.size(2);
  if (batch_size > kMaxInt32 || num_q_heads < 1 || num_v_heads < 1 ||
      num_v_heads > kMaxInt32 / kHeadSize || num_v_heads % num_q_heads != 0) {
    return false;
  }
  if (!(q.Is(kBFloat16, {batch_size, 1, num_q_heads, kHeadSize}) && q.IsDense(1) &&
        k.Is(kBFloat16, {batch_size, 1, num_q_heads, kHeadSize}) && k.IsDense(1) &&
        v.Is(kBFloat16, {batch_size, 1, num_v_heads, kHeadSize}) && v.IsDense(1) &&
        A_log.Is(kFloat32, {num_v_heads}) && A_log.IsDense(1) &&
        a.Is(kBFloat16, {batch_size, 1, num_v_heads}) && a.IsDense(1) &&
        dt_bias.Is(kFloat32, {num_v_heads}) && dt_bias.IsDense(1) &&
        b.Is(kBFloat16, {batch_size, 1, num_v_heads}) && b.IsDense(1) &&
        output.Is(kBFloat16, {batch_size, 1, num_v_heads, kHeadSize}) && output.IsDense(1))) {
    return false;
  }
  std::vector<View> given = {q, k, v, A_log, a, dt_bias, b};
  if (!gdn::PrepareStates(call.states, batch_size, num_v_heads, kHeadSize, &given, p) ||
      !gdn::IsSoundMemory(call.states, given, output, is_checked)) {
    return false;
  }

  p->q = q.pointer();
  p->k = k.pointer();
  p->v = v.pointer();
  p->A_log = A_log.pointer();
  p->a = a.pointer();
  p->dt_bias = dt_bias.pointer();
  p->b = b.pointer();
  p->output = output.pointer();
  p->q_stride_b = q.stride(0);
  p->q_stride_h = q.stride(2);
  p->k_stride_b = k.stride(0);
  p->k_stride_h = k.stride(2);
  p->v_stride_b = v.stride(0);
  p->v_stride_h = v.stride(2);
  p->a_stride_b = a.stride(0);
  p->b_stride_b = b.stride(0);
  p->output_stride_b = output.stride(0);
  p->output_stride_h = output.stride(2);
  p->batch_size = static_cast<int32_t>(batch_size);
  p->num_q_heads = static_cast<int32_t>(num_q_heads);
  p->num_v_heads = static_cast<int32_t>(num_v_heads);
  p->scale =
      static_cast<float>(call.scale == 0.0 ? 1.0 / std::sqrt(double{kHeadSize}) : call.scale);
  const bool is_pool = call.states.is_pool();
  const View new_state(call.states.is_updated() ? call.states.state : call.states.new_state);
  const View state(p->has_state ? call.states.state : call.states.new_state);
  const bool is_aligned =
      q.IsAligned(16) && k.IsAligned(16) && state.IsAligned(16) && new_state.IsAligned(16);
  const int64_t group = num_v_heads / num_q_heads;
  p->group_shift = (group & (group - 1)) == 0 ? __builtin_ctzll(group) : -1;
  // Offsets in elements fit into 32 bits, inside a slot and from slot to slot; in packed form those
  // of a whole state, too. There is a state, heads divide by a shift, the grid holds all rows.
  constexpr uintptr_t kReach = uintptr_t{1} << 32;  // bytes
  bool is_compact = is_aligned && p->has_state && p->group_shift >= 0 && batch_size <= kMaxGridY;
  for (const View& each : {q, k, v, a, b, output}) {
    is_compact = is_compact && each.end() - each.data() <= kReach;
  }
  for (const View& each : {state, new_state}) {
    const bool is_short = each.end() - each.data() <= 4 * kReach;
    const bool has_short_slots =
        each.stride(0) < (int64_t{1} << 32) && each.stride(1) * num_v_heads < (int64_t{1} << 32);
    is_compact = is_compact && (is_short || (is_pool && has_short_slots));
  }
  if (is_compact) {
    *variant = is_pool ? kCompactPool : kCompact;
  } else {
    *variant = is_aligned ? kAligned : kAny;
  }
  return true;
}

void LaunchPlan(const Plan& plan, Params* p, int variant, DLDevice device_id) {
  const Device& device = Device::Get(device_id.device_id);
  const int64_t rows_per_block = plan.tile[0], blocks_per_sm = plan.tile[1];
  const int64_t tiles = p->num_v_heads * (kHeadSize / rows_per_block);
  Grid grid{static_cast<uint32_t>(tiles),
            static_cast<uint32_t>(std::min<int64_t>(p->batch_size, kMaxGridY)), 1};
  if (blocks_per_sm > 0) {
    grid.x = static_cast<uint32_t>(std::min(tiles * p->batch_size, blocks_per_sm * device.num_sms));
    grid.y = 1;
  }
  if (variant >= static_cast<int>(plan.variants.size())) variant = kAligned;
  auto stream = static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, device_id.device_id));
  ContextGuard guard(device);
  if (plan.variants[variant].arguments == Arguments::kStruct) {
    void* arguments[] = {p};
    Launch(plan, plan.variants[variant], grid, stream, arguments);
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
                       &p->read_indices,
                       &p->write_indices,
                       &p->output,
                       &p->new_state,
                       &p->q_stride_b,
                       &p->q_stride_h,
                       &p->k_stride_b,
                       &p->k_stride_h,
                       &p->v_stride_b,
                       &p->v_stride_h,
                       &p->state_stride_slot,
                       &p->state_stride_h,
                       &p->a_stride_b,
                       &p->b_stride_b,
                       &p->read_stride,
                       &p->write_stride,
                       &p->output_stride_b,
                       &p->output_stride_h,
                       &p->new_state_stride_slot,
                       &p->new_state_stride_h,
                       &p->batch_size,
                       &p->num_q_heads,
                       &p->num_v_heads,
                       &p->num_slots,
                       &p->has_state,
                       &p->index_words,
                       &p->scale,
                       &scratch,
                       &scratch};
  Launch(plan, plan.variants[variant], grid, stream, arguments);
}

// What is said instead of a plan's handle: the plan is the one remembered for these sizes; or
// nothing is launched and the checks alone are made, those of a call that Python has or has not
// looked at (for tests, on any device).
enum : int64_t { kRemembered = 0, kCheckAlone = -1, kCheckAgainAlone = -2 };

// What the dispatcher's decision follows from; see `fixed` in ops/gdn_decode/routes/library.py.
int64_t FindPlan(const Call& call) {
  static const Served& served = Served::Of("gdn_decode");
  if (call.q->ndim != 4 || call.v->ndim != 4) return 0;
  return served.Find({call.q->shape[2], call.v->shape[2], call.q->device.device_id,
                      call.states.is_pool(), call.states.is_updated()},
                     {call.v->shape[0]});
}

// The entry of every compiled route. `new_state` None: the state is updated where it lies.
// `scale` 0 is the default. False: nothing was launched, and Python should look at the call.
bool Decode(int64_t plan, ffi::AnyView q, ffi::AnyView k, ffi::AnyView v, ffi::AnyView state,
            ffi::AnyView A_log, ffi::AnyView a, ffi::AnyView dt_bias, ffi::AnyView b, double scale,
            ffi::AnyView read_indices, ffi::AnyView write_indices, ffi::AnyView output,
            ffi::AnyView new_state) {
  bool is_kind = true;
  auto get = [&](const ffi::AnyView& argument) { return GetTensor(argument, &is_kind); };
  const Call call{get(q),      get(k),
                  get(v),      get(A_log),
                  get(a),      get(dt_bias),
                  get(b),      scale,
                  get(output), {get(state), get(read_indices), get(write_indices), get(new_state)}};
  for (const DLTensor* required :
       {call.q, call.k, call.v, call.A_log, call.a, call.dt_bias, call.b, call.output}) {
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
  if (!is_launched) return true;
  if (params.batch_size > 0) LaunchPlan(Plan::Get(plan), &params, variant, call.q->device);
  return true;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_decode, Decode);

}  // namespace fastkernels::gdn_decode
