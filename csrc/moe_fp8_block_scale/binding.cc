// moe_fp8_block_scale: from tensors to launches.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <algorithm>

#include "common/cubin.h"
#include "common/scratch.h"
#include "common/served.h"
#include "common/tensor.h"
#include "moe_fp8_block_scale/params.h"
#include "moe_fp8_block_scale/tensor_map.h"

namespace fastkernels::moe_fp8_block_scale {
namespace {

namespace ffi = tvm::ffi;

constexpr DLDataType kE4m3{kDLFloat8_e4m3fn, 8, 1};

// Variants, in the order of `Kernel.variants`; the second one of a stage assumes nothing.
enum : int { kRoute = 0, kList = 2, kGemm1 = 3, kGemm2 = 5, kCombine = 7 };

// ops/moe_fp8_block_scale/kernels/__init__.py says what it means.
struct Tile {
  int64_t rows, tokens, outs, blocks, cluster, chunk, partial_bytes;

  explicit Tile(const Plan& plan)
      : rows(plan.tile[0]),
        tokens(plan.tile[1]),
        outs(plan.tile[2]),
        blocks(plan.tile[3]),
        cluster(plan.tile[4]),
        chunk(plan.tile[5]),
        partial_bytes(plan.tile[6]) {}
};

constexpr int64_t kColumns = 512, kScaled = 32, kGroups = 8;

struct Call {
  const DLTensor *logits, *bias, *x, *x_scale, *w13, *w13_scale, *w2, *w2_scale;
  int64_t offset;
  double factor;
  int64_t topk, num_groups, topk_groups;
  const DLTensor *topk_ids, *topk_weights, *output, *workspace;
};

// Which stages may take their first variant.
struct Suited {
  bool route, gemm1, gemm2, combine;
};

bool IsCount(int64_t value, int64_t most) { return value >= 1 && value <= most; }

// The routing's arguments: logits and bias, or ids and weights.
bool PrepareRouting(const Call& call, int64_t num_tokens, Params* p) {
  if (call.topk_ids != nullptr) {
    const View ids(call.topk_ids), weights(call.topk_weights);
    const DLDataType kind = Equal(ids.dtype(), kInt64) ? kInt64 : kInt32;
    if (call.logits != nullptr || call.bias != nullptr || !ids.Is(kind, {num_tokens, call.topk}) ||
        !weights.Is(kFloat32, {num_tokens, call.topk})) {
      return false;
    }
    p->id_words = kind.bits / 32;
    p->topk_ids = ids.pointer();
    p->topk_weights = weights.pointer();
    p->ids_stride_t = ids.stride(0) * p->id_words;
    p->ids_stride_k = ids.stride(1) * p->id_words;
    p->weights_stride_t = weights.stride(0);
    p->weights_stride_k = weights.stride(1);
    return true;
  }
  const View logits(call.logits), bias(call.bias);
  if (logits.ndim() != 2) return false;
  const int64_t num_experts = logits.size(1);
  if (!IsCount(num_experts, kMaxExperts) || !IsCount(call.num_groups, num_experts) ||
      num_experts % call.num_groups != 0 || !IsCount(call.topk_groups, call.num_groups) ||
      call.topk > call.topk_groups * (num_experts / call.num_groups) ||
      !logits.Is(kFloat32, {num_tokens, num_experts}) || !logits.IsDense(1) ||
      !bias.Is(kBFloat16, {num_experts}) || !bias.IsDense(1)) {
    return false;
  }
  p->logits = logits.pointer();
  p->bias = bias.pointer();
  p->logits_stride_t = logits.stride(0);
  p->num_experts = static_cast<int32_t>(num_experts);
  p->num_groups = static_cast<int32_t>(call.num_groups);
  p->topk_groups = static_cast<int32_t>(call.topk_groups);
  p->factor = call.factor;
  return true;
}

// Fills `p` and `suited` if the call is plainly legal. `is_checked`: Python has looked at it, so
// memory that may be shared is not; sizes, dtypes, strides and devices are looked at again, since a
// kernel trusts them.
bool Prepare(const Call& call, bool is_checked, Params* p, Suited* suited) {
  const View x(call.x), x_scale(call.x_scale), w13(call.w13), w13_scale(call.w13_scale),
      w2(call.w2), w2_scale(call.w2_scale), output(call.output);
  if (x.ndim() != 2 || w2.ndim() != 3) return false;
  const int64_t num_tokens = x.size(0), hidden_size = x.size(1);
  const int64_t num_local = w2.size(0), intermediate_size = w2.size(2);
  if (num_tokens > kMaxInt32 || !IsCount(num_local, kMaxLocal) || !IsCount(call.topk, kMaxTopk) ||
      !IsCount(hidden_size, kMaxInt32) || hidden_size % kBlock != 0 ||
      !IsCount(intermediate_size, kMaxInt32 / 2) || intermediate_size % kBlock != 0 ||
      call.offset > kMaxInt32 || call.offset < -kMaxInt32 - 1) {
    return false;
  }
  const int64_t hidden_blocks = hidden_size / kBlock, blocks = intermediate_size / kBlock;
  if (!(x.Is(kE4m3, {num_tokens, hidden_size}) && x.IsDense(1) &&
        x_scale.Is(kFloat32, {hidden_blocks, num_tokens}) &&
        w13.Is(kE4m3, {num_local, 2 * intermediate_size, hidden_size}) && w13.IsDense(1) &&
        w13_scale.Is(kFloat32, {num_local, 2 * blocks, hidden_blocks}) && w13_scale.IsDense(1) &&
        w2.Is(kE4m3, {num_local, hidden_size, intermediate_size}) && w2.IsDense(1) &&
        w2_scale.Is(kFloat32, {num_local, hidden_blocks, blocks}) && w2_scale.IsDense(1) &&
        output.Is(kBFloat16, {num_tokens, hidden_size}) && output.IsDense(1))) {
    return false;
  }
  *p = {};
  if (!PrepareRouting(call, num_tokens, p)) return false;
  if (!is_checked && !output.IsPlainlyInjective()) return false;
  for (const DLTensor* tensor :
       {call.logits, call.bias, call.topk_ids, call.topk_weights, call.x, call.x_scale, call.w13,
        call.w13_scale, call.w2, call.w2_scale, call.output}) {
    if (tensor == nullptr) continue;
    const View each(tensor);
    if (!each.IsOn(output.device()) || !each.HasMemory()) return false;
    if (!is_checked && tensor != call.output && !each.IsApartFrom(output)) return false;
  }

  p->x = x.pointer();
  p->x_scale = x_scale.pointer();
  p->w13 = w13.pointer();
  p->w13_scale = w13_scale.pointer();
  p->w2 = w2.pointer();
  p->w2_scale = w2_scale.pointer();
  p->output = output.pointer();
  p->x_stride_t = x.stride(0);
  p->x_scale_stride_b = x_scale.stride(0);
  p->x_scale_stride_t = x_scale.stride(1);
  p->w13_stride_e = w13.stride(0);
  p->w13_stride_n = w13.stride(1);
  p->w13_scale_stride_e = w13_scale.stride(0);
  p->w13_scale_stride_n = w13_scale.stride(1);
  p->w2_stride_e = w2.stride(0);
  p->w2_stride_n = w2.stride(1);
  p->w2_scale_stride_e = w2_scale.stride(0);
  p->w2_scale_stride_n = w2_scale.stride(1);
  p->output_stride_t = output.stride(0);
  p->num_tokens = static_cast<int32_t>(num_tokens);
  p->num_local = static_cast<int32_t>(num_local);
  p->hidden_size = static_cast<int32_t>(hidden_size);
  p->intermediate_size = static_cast<int32_t>(intermediate_size);
  p->topk = static_cast<int32_t>(call.topk);
  p->offset = static_cast<int32_t>(call.offset);
  suited->route = p->id_words > 0 || (p->num_experts == kMaxExperts && p->num_groups == kGroups);
  suited->gemm1 = x.IsAligned(16) && w13.IsAligned(16);
  suited->gemm2 = w2.IsAligned(16);
  suited->combine = output.IsAligned(16);
  return true;
}

// `product`: what a kernel in CUDA, which only products are, is given beside.
void LaunchOne(const Plan& plan, int variant, int64_t blocks, CUstream stream, Params* p,
               bool is_dependent, ProductParams* product = nullptr) {
  const Grid grid{static_cast<uint32_t>(blocks), 1, 1};
  if (plan.variants[variant].arguments == Arguments::kStruct) {
    product->params = *p;
    void* one = product;
    Launch(plan, plan.variants[variant], grid, stream, &one, is_dependent);
    return;
  }
  void* scratch = nullptr;
  void* arguments[] = {&p->logits,
                       &p->bias,
                       &p->topk_ids,
                       &p->topk_weights,
                       &p->x,
                       &p->x_scale,
                       &p->w13,
                       &p->w13_scale,
                       &p->w2,
                       &p->w2_scale,
                       &p->output,
                       &p->workspace,
                       &p->logits_stride_t,
                       &p->ids_stride_t,
                       &p->ids_stride_k,
                       &p->weights_stride_t,
                       &p->weights_stride_k,
                       &p->x_stride_t,
                       &p->x_scale_stride_b,
                       &p->x_scale_stride_t,
                       &p->w13_stride_e,
                       &p->w13_stride_n,
                       &p->w13_scale_stride_e,
                       &p->w13_scale_stride_n,
                       &p->w2_stride_e,
                       &p->w2_stride_n,
                       &p->w2_scale_stride_e,
                       &p->w2_scale_stride_n,
                       &p->output_stride_t,
                       &p->num_tokens,
                       &p->slots,
                       &p->num_experts,
                       &p->num_local,
                       &p->hidden_size,
                       &p->intermediate_size,
                       &p->topk,
                       &p->num_groups,
                       &p->topk_groups,
                       &p->offset,
                       &p->id_words,
                       &p->factor,
                       &scratch,
                       &scratch};
  Launch(plan, plan.variants[variant], grid, stream, arguments, is_dependent);
}

// The workspace, by `regions` of ops/moe_fp8_block_scale/kernels/__init__.py.
struct Regions {
  enum : int { kSlotExpert, kSlotWeight, kSlotRow, kRowSlot, kCounts, kScales, kCodes, kPartials };
  int64_t at[kPartials + 2];  // the last one: all bytes

  Regions(const Params& p, int64_t partial_bytes) {
    const int64_t slots = p.slots, list = 4 * slots;
    int64_t total = 0;
    int region = 0;
    for (int64_t size : {list, list, list, list, int64_t{4} * kMaxLocal,
                         4 * slots * (p.intermediate_size / kScaled),
                         slots * 2 * p.intermediate_size, partial_bytes * slots * p.hidden_size}) {
      at[region++] = total;
      total += (size + 255) / 256 * 256;
    }
    at[region] = total;
  }

  int64_t bytes() const { return at[kPartials + 1]; }

  void Fill(void* workspace, ProductParams* product) const {
    auto of = [&](int region) { return static_cast<char*>(workspace) + at[region]; };
    product->slot_weight = reinterpret_cast<const float*>(of(kSlotWeight));
    product->row_slot = reinterpret_cast<const int32_t*>(of(kRowSlot));
    product->counts = reinterpret_cast<const int32_t*>(of(kCounts));
    product->scales = reinterpret_cast<float*>(of(kScales));
    product->codes = reinterpret_cast<unsigned char*>(of(kCodes));
    product->partials = reinterpret_cast<uint32_t*>(of(kPartials));
  }
};

// A base that a chunk's first token is `count` strides away from; null stays null.
void Advance(const void** base, int64_t count, int64_t stride, int64_t bytes) {
  if (*base != nullptr) *base = static_cast<const char*>(*base) + count * stride * bytes;
}

// The part of a call that starts at a token.
Params ChunkOf(Params p, int64_t first, int64_t chunk) {
  p.num_tokens = static_cast<int32_t>(std::min(p.num_tokens - first, chunk));
  Advance(&p.logits, first, p.logits_stride_t, 4);
  Advance(&p.topk_ids, first, p.ids_stride_t, 4);
  Advance(&p.topk_weights, first, p.weights_stride_t, 4);
  Advance(&p.x, first, p.x_stride_t, 1);
  Advance(&p.x_scale, first, p.x_scale_stride_t, 4);
  p.output = static_cast<char*>(p.output) + first * p.output_stride_t * 2;
  return p;
}

// Blocks of a product with so many tiles: whole clusters, at most those that the device has room
// for.
int64_t ProductBlocks(int64_t tiles, const Tile& tile, const Device& device) {
  return std::min(tiles, device.num_sms * tile.blocks / tile.cluster) * tile.cluster;
}

// False: nothing was launched.
bool LaunchPlan(const Plan& plan, Params* p, Suited suited, const Call& call) {
  if (p->num_tokens == 0) return true;
  const Tile tile(plan);
  const DLDevice device_id = call.x->device;
  const Device& device = Device::Get(device_id.device_id);
  auto stream = static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, device_id.device_id));
  p->slots = static_cast<int32_t>(std::min(int64_t{p->num_tokens}, tile.chunk)) * p->topk;
  const int64_t blocks_of_token = (p->hidden_size + kColumns - 1) / kColumns;
  if (blocks_of_token > kMaxInt32 / tile.chunk) return false;
  Scratch scratch;
  const Regions regions(*p, tile.partial_bytes);
  if (!scratch.Get(call.workspace, regions.bytes(), device_id)) return false;
  p->workspace = scratch.pointer();
  ContextGuard guard(device);
  ProductParams first_product = {}, second_product = {};
  if (plan.variants[kGemm1].arguments == Arguments::kStruct) {
    const int64_t num_local = p->num_local, hidden = p->hidden_size, size = p->intermediate_size;
    suited.gemm1 = suited.gemm1 && DescribeWeights({p->w13, num_local, 2 * size, hidden,
                                                    p->w13_stride_e, p->w13_stride_n},
                                                   &first_product);
    suited.gemm2 = suited.gemm2 &&
                   DescribeWeights({p->w2, num_local, hidden, size, p->w2_stride_e, p->w2_stride_n},
                                   &second_product);
    for (ProductParams* each : {&first_product, &second_product}) {
      regions.Fill(p->workspace, each);
    }
  }
  for (int64_t first = 0; first < p->num_tokens; first += tile.chunk) {
    Params chunk = ChunkOf(*p, first, tile.chunk);
    const int64_t slots = int64_t{chunk.num_tokens} * p->topk;
    // `tiles_bound` of kernels/__init__.py.
    const int64_t tiles = slots / tile.tokens + std::min(int64_t{p->num_local}, slots);
    const int64_t columns = p->intermediate_size / tile.rows;
    const int64_t outs = (p->hidden_size + tile.outs - 1) / tile.outs;
    LaunchOne(plan, kRoute + !suited.route, chunk.num_tokens, stream, &chunk, first > 0);
    LaunchOne(plan, kList, p->num_local, stream, &chunk, true);
    LaunchOne(plan, kGemm1 + !suited.gemm1, ProductBlocks(tiles * columns, tile, device), stream,
              &chunk, true, &first_product);
    LaunchOne(plan, kGemm2 + !suited.gemm2, ProductBlocks(tiles * outs, tile, device), stream,
              &chunk, true, &second_product);
    LaunchOne(plan, kCombine + !suited.combine, chunk.num_tokens * blocks_of_token, stream, &chunk,
              true);
  }
  return true;
}

// What is said instead of a plan's handle: the plan is the one remembered for these sizes; or
// nothing is launched and the checks alone are made, those of a call that Python has or has not
// looked at (for tests, on any device).
enum : int64_t { kRemembered = 0, kCheckAlone = -1, kCheckAgainAlone = -2 };

int64_t Pair(int64_t high, int64_t low) { return high << 32 | low; }

// What the dispatcher's decision follows from; see `fixed` in
// ops/moe_fp8_block_scale/routes/library.py.
int64_t FindPlan(const Call& call, bool is_deterministic) {
  static const Served& served = Served::Of("moe_fp8_block_scale");
  if (call.x->ndim != 2 || call.w2->ndim != 3) return 0;
  const bool is_given = call.topk_ids != nullptr;
  if (!is_given && call.logits->ndim != 2) return 0;
  const int64_t num_experts = is_given ? 0 : call.logits->shape[1];
  const int64_t mode = is_given + 2 * is_deterministic;
  return served.Find(
      {Pair(num_experts, call.w2->shape[0]), Pair(call.x->shape[1], call.w2->shape[2]), call.topk,
       is_given ? 0 : Pair(call.num_groups, call.topk_groups), mode, call.x->device.device_id},
      {call.x->shape[0], 0});
}

// The entry of every compiled route. `workspace` None: allocated where the plan needs one. False:
// nothing was launched, and Python should look at the call.
bool Mix(int64_t plan, ffi::AnyView logits, ffi::AnyView bias, ffi::AnyView x, ffi::AnyView x_scale,
         ffi::AnyView w13, ffi::AnyView w13_scale, ffi::AnyView w2, ffi::AnyView w2_scale,
         int64_t offset, double factor, int64_t topk, int64_t num_groups, int64_t topk_groups,
         ffi::AnyView topk_ids, ffi::AnyView topk_weights, bool is_deterministic,
         ffi::AnyView output, ffi::AnyView workspace) {
  bool is_kind = true;
  auto get = [&](const ffi::AnyView& argument) { return GetTensor(argument, &is_kind); };
  const Call call{get(logits),    get(bias),     get(x),        get(x_scale),  get(w13),
                  get(w13_scale), get(w2),       get(w2_scale), offset,        factor,
                  topk,           num_groups,    topk_groups,   get(topk_ids), get(topk_weights),
                  get(output),    get(workspace)};
  for (const DLTensor* required :
       {call.x, call.x_scale, call.w13, call.w13_scale, call.w2, call.w2_scale, call.output}) {
    is_kind = is_kind && required != nullptr;
  }
  const bool is_given = call.topk_ids != nullptr;
  if (!is_kind || is_given != (call.topk_weights != nullptr) ||
      (!is_given && (call.logits == nullptr || call.bias == nullptr))) {
    return false;
  }
  const bool is_launched = plan >= 0;
  if (is_launched && call.x->device.device_type != kDLCUDA) return false;
  const bool is_checked = plan > 0 || plan == kCheckAgainAlone;
  if (plan == kRemembered) {
    plan = FindPlan(call, is_deterministic);
    if (plan == 0) return false;
  }
  Params params;
  Suited suited;
  if (!Prepare(call, is_checked, &params, &suited)) return false;
  return !is_launched || LaunchPlan(Plan::Get(plan), &params, suited, call);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_fp8_block_scale, Mix);

}  // namespace fastkernels::moe_fp8_block_scale
