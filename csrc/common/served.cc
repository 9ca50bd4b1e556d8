#include "common/served.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <map>
#include <mutex>

namespace fastkernels {
namespace {

namespace ffi = tvm::ffi;

Served::Sizes Pad(const ffi::Array<int64_t>& given) {
  Served::Sizes sizes = {};
  if (given.size() > sizes.size()) {
    TVM_FFI_THROW(ValueError) << given.size() << " sizes, at most " << sizes.size();
  }
  for (size_t i = 0; i < given.size(); ++i) sizes[i] = given[i];
  return sizes;
}

void Remember(ffi::String op, ffi::Array<int64_t> sizes, int64_t plan) {
  Served::Of(std::string(op)).Add(Pad(sizes), plan);
}

void Forget(ffi::String op) { Served::Of(std::string(op)).Clear(); }

}  // namespace

Served& Served::Of(const std::string& op) {
  static std::mutex mutex;
  static auto* all = new std::map<std::string, Served>();  // never destroyed, as the plans
  std::lock_guard<std::mutex> lock(mutex);
  return (*all)[op];
}

void Served::Add(const Sizes& sizes, int64_t plan) {
  std::lock_guard<std::shared_mutex> lock(mutex_);
  plans_[sizes] = plan;
}

void Served::Clear() {
  std::lock_guard<std::shared_mutex> lock(mutex_);
  plans_.clear();
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(remember, Remember);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forget, Forget);

}  // namespace fastkernels
