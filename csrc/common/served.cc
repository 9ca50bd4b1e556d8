#include "common/served.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <map>
#include <mutex>

namespace fastkernels {
namespace {

namespace ffi = tvm::ffi;

template <typename Sizes>
Sizes Pad(const ffi::Array<int64_t>& given) {
  Sizes sizes = {};
  if (given.size() > sizes.size()) {
    TVM_FFI_THROW(ValueError) << given.size() << " sizes, at most " << sizes.size();
  }
  for (size_t i = 0; i < given.size(); ++i) sizes[i] = given[i];
  return sizes;
}

void Remember(ffi::String op, ffi::Array<int64_t> fixed, ffi::Array<int64_t> low,
              ffi::Array<int64_t> high, int64_t plan) {
  using Varying = Served::Varying;
  Served::Of(std::string(op))
      .Add(Pad<Served::Fixed>(fixed), Pad<Varying>(low), Pad<Varying>(high), plan);
}

void Forget(ffi::String op) { Served::Of(std::string(op)).Clear(); }

}  // namespace

Served& Served::Of(const std::string& op) {
  static std::mutex mutex;
  static auto* all = new std::map<std::string, Served>();  // never destroyed, as the plans
  std::lock_guard<std::mutex> lock(mutex);
  return (*all)[op];
}

void Served::Add(const Fixed& fixed, const Varying& low, const Varying& high, int64_t plan) {
  std::lock_guard<std::shared_mutex> lock(mutex_);
  std::vector<Box>& boxes = boxes_[fixed];
  for (Box& box : boxes) {
    if (box.low == low && box.high == high) {
      box.plan = plan;
      return;
    }
  }
  boxes.push_back({low, high, plan});
}

void Served::Clear() {
  std::lock_guard<std::shared_mutex> lock(mutex_);
  boxes_.clear();
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(remember, Remember);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forget, Forget);

}  // namespace fastkernels
