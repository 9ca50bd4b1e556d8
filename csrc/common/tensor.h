// What may be read off a tensor before a launch. A launcher says only "plainly legal" or not: the
// messages about what is wrong are Python's (core/problem.py), which looks at the call again.
#pragma once

#include <dlpack/dlpack.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>

namespace fastkernels {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

constexpr DLDataType kBFloat16{kDLBfloat, 16, 1};
constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr DLDataType kInt64{kDLInt, 64, 1};

inline bool Equal(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

// A tensor argument, null for None; `is_kind` becomes false over anything else.
inline const DLTensor* GetTensor(const tvm::ffi::AnyView& argument, bool* is_kind) {
  if (auto tensor = argument.try_cast<DLTensor*>()) return *tensor;
  *is_kind = *is_kind && argument.type_index() == tvm::ffi::TypeIndex::kTVMFFINone;
  return nullptr;
}

// A tensor argument with its address, and strides in elements (of axes of size 1: whatever they
// are, they are never multiplied by more than 0).
class View {
 public:
  explicit View(const DLTensor* t)
      : t_(t), data_(reinterpret_cast<uintptr_t>(t->data) + t->byte_offset), end_(data_) {
    int64_t last = 0;
    for (int i = 0; i < t->ndim; ++i) {
      if (t->shape[i] == 0) return;
      // Without strides, or with negative ones, Is() refuses before anybody asks for the end.
      if (t->strides != nullptr) last += (t->shape[i] - 1) * t->strides[i];
    }
    end_ += static_cast<uintptr_t>(last + 1) * (t->dtype.bits / 8);
  }

  bool Is(DLDataType dtype, std::initializer_list<int64_t> shape) const {
    return Equal(t_->dtype, dtype) && t_->ndim == static_cast<int>(shape.size()) &&
           std::equal(shape.begin(), shape.end(), t_->shape) && t_->strides != nullptr &&
           std::all_of(t_->strides, t_->strides + t_->ndim, [](int64_t s) { return s >= 0; }) &&
           data() % (dtype.bits / 8) == 0;
  }

  // The last `dense` axes are contiguous among themselves.
  bool IsDense(int dense) const {
    if (IsEmpty()) return true;
    int64_t expected = 1;
    for (int i = t_->ndim - 1; i >= t_->ndim - dense; --i) {
      if (t_->shape[i] > 1 && t_->strides[i] != expected) return false;
      expected *= t_->shape[i];
    }
    return true;
  }

  bool IsOn(DLDevice device) const {
    return t_->device.device_type == device.device_type && t_->device.device_id == device.device_id;
  }

  // Where elements exist, so does memory: a tensor that is traced, not real, has none.
  bool HasMemory() const { return data() != 0 || IsEmpty(); }

  bool IsEmpty() const { return end_ == data_; }

  int64_t size(int axis) const { return t_->shape[axis]; }
  int64_t stride(int axis) const { return t_->strides[axis]; }
  int32_t ndim() const { return t_->ndim; }
  DLDevice device() const { return t_->device; }
  DLDataType dtype() const { return t_->dtype; }
  uintptr_t data() const { return data_; }
  void* pointer() const { return reinterpret_cast<void*>(data_); }
  // One past the last byte of the last element; data() where there is none.
  uintptr_t end() const { return end_; }

  // Byte ranges that are apart; ranges that meet may still share no element.
  bool IsApartFrom(const View& other) const {
    return IsEmpty() || other.IsEmpty() || end() <= other.data() || other.end() <= data();
  }

  // The start and every row along the axes before the last are multiples of `bytes`.
  bool IsAligned(uintptr_t bytes) const {
    if (data() % bytes != 0) return false;
    for (int i = 0; i < t_->ndim - 1; ++i) {
      if (t_->shape[i] > 1 && t_->strides[i] * (t_->dtype.bits / 8) % bytes != 0) return false;
    }
    return true;
  }

  // Every element has its own address: axes nest, each stride stepping over all inner ones.
  // Other layouts may be legal; they are not recognised here.
  bool IsPlainlyInjective() const {
    int64_t reach = 0;  // elements spanned by the inner axes, less one
    for (int i = t_->ndim - 1; i >= 0; --i) {
      if (t_->shape[i] <= 1) continue;
      if (t_->strides[i] <= reach) return false;
      reach += (t_->shape[i] - 1) * t_->strides[i];
    }
    return true;
  }

 private:
  const DLTensor* t_;
  uintptr_t data_, end_;
};

}  // namespace fastkernels
