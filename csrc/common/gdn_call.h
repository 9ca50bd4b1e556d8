// What the launchers of the gated delta rule look at before a launch: states, packed or in a pool,
// and memory that a call would write and read. Kernels are given what is filled in here.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "common/tensor.h"

namespace fastkernels::gdn {

// The tensor arguments that both operators have; null where the call has None. `new_state` null:
// the state is updated where it lies.
struct StateArguments {
  const DLTensor *state, *read_indices, *write_indices, *new_state;

  bool is_pool() const { return read_indices != nullptr; }
  bool is_updated() const { return new_state == nullptr; }
};

// Fills the fields of `Params` that are about states and indices, if they are plainly legal for
// `num_rows` rows; adds the index tensors to `given`.
template <typename Params>
bool PrepareStates(const StateArguments& call, int64_t num_rows, int64_t num_v_heads,
                   int64_t head_size, std::vector<View>* given, Params* p) {
  if (call.is_updated() && call.state == nullptr) return false;
  if (call.is_pool() && !call.is_updated()) return false;
  if (!call.is_pool() && call.write_indices != nullptr) return false;
  const View new_state(call.is_updated() ? call.state : call.new_state);
  const int64_t num_slots = call.is_pool() && new_state.ndim() == 4 ? new_state.size(0) : num_rows;
  if (num_slots > kMaxInt32 ||
      !new_state.Is(kFloat32, {num_slots, num_v_heads, head_size, head_size}) ||
      !new_state.IsDense(2)) {
    return false;
  }
  const View state(call.state == nullptr ? call.new_state : call.state);
  if (call.state != nullptr && !call.is_updated() &&
      !(state.Is(kFloat32, {num_slots, num_v_heads, head_size, head_size}) && state.IsDense(2))) {
    return false;
  }
  p->read_indices = p->write_indices = nullptr;
  p->read_stride = p->write_stride = 0;
  p->index_words = 0;
  if (call.is_pool()) {
    const View read(call.read_indices);
    const bool is_wide = Equal(read.dtype(), kInt64);
    const DLDataType dtype = is_wide ? kInt64 : kInt32;
    const View write(call.write_indices == nullptr ? call.read_indices : call.write_indices);
    // Two index tensors of different widths are legal, and not served here.
    if (!read.Is(dtype, {num_rows}) || !write.Is(dtype, {num_rows})) return false;
    given->push_back(read);
    given->push_back(write);
    p->read_indices = read.pointer();
    p->write_indices = write.pointer();
    p->read_stride = read.stride(0);
    p->write_stride = write.stride(0);
    p->index_words = is_wide ? 2 : 1;
  }
  p->state = call.state == nullptr ? nullptr : state.pointer();
  p->new_state = new_state.pointer();
  p->state_stride_slot = state.stride(0);
  p->state_stride_h = state.stride(1);
  p->new_state_stride_slot = new_state.stride(0);
  p->new_state_stride_h = new_state.stride(1);
  p->num_slots = static_cast<int32_t>(num_slots);
  p->has_state = call.state != nullptr;
  return true;
}

// All memory is there and on one device, and, unless Python has looked (`is_checked`), what is
// written is apart from everything else.
inline bool IsSoundMemory(const StateArguments& call, const std::vector<View>& given,
                          const View& output, bool is_checked) {
  const View new_state(call.is_updated() ? call.state : call.new_state);
  const View state(call.state == nullptr ? call.new_state : call.state);
  const DLDevice device = output.device();
  for (const View& each : given) {
    if (!each.IsOn(device) || !each.HasMemory()) return false;
  }
  for (const View& each : {state, new_state, output}) {
    if (!each.IsOn(device) || !each.HasMemory()) return false;
  }
  if (is_checked) return true;
  if (!output.IsPlainlyInjective() || !new_state.IsPlainlyInjective()) return false;
  for (const View& each : given) {
    if (!each.IsApartFrom(output) || !each.IsApartFrom(new_state)) return false;
  }
  if (!output.IsApartFrom(new_state)) return false;
  const bool is_read_apart = !call.is_updated() && call.state != nullptr;
  return !is_read_apart || (state.IsApartFrom(new_state) && state.IsApartFrom(output));
}

}  // namespace fastkernels::gdn
