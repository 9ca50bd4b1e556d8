// Scratch memory of a call: the caller's workspace, or memory of its own until the launches are in
// the stream.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/optional.h>

#include <cstdint>

#include "common/tensor.h"

namespace fastkernels {

class Scratch {
 public:
  // False where the caller's workspace is too small, not 256-byte aligned or elsewhere. Without
  // one, memory from the allocator that the tensors come from, in the order of the current stream.
  bool Get(const DLTensor* given, int64_t bytes, DLDevice device) {
    if (bytes == 0) return true;
    if (given == nullptr) {
      allocated_ = tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, tvm::ffi::Shape({bytes}),
                                                  DLDataType{kDLUInt, 8, 1}, device);
      pointer_ = (*allocated_).data_ptr();
      return true;
    }
    const View view(given);
    pointer_ = view.pointer();
    return view.IsOn(device) && view.IsAligned(256) &&
           static_cast<int64_t>(view.end() - view.data()) >= bytes;
  }

  // Null where no bytes were asked for.
  void* pointer() const { return pointer_; }

 private:
  tvm::ffi::Optional<tvm::ffi::Tensor> allocated_;
  void* pointer_ = nullptr;
};

}  // namespace fastkernels
