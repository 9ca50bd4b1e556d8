// Machine code of any language, embedded in the library or compiled just in time: loading and
// launching. A plan is one (kernel, config): its variants, and the integers its grid follows from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/driver.h"

namespace fastkernels {

// How a kernel takes its parameters: one struct (CUDA), its fields one by one (CuTe DSL), or the
// fields and two scratch pointers that are null (Triton).
enum class Arguments : int64_t { kStruct = 0, kFields = 1, kFieldsAndScratch = 2 };

struct Variant {
  CUkernel kernel;
  Arguments arguments;
  uint32_t threads;
  uint32_t shared_bytes;
};

struct Plan {
  std::string label;  // operator, route and config, for errors
  std::vector<Variant> variants;
  std::vector<int64_t> tile;  // what it means is between the kernel and its operator's launcher

  // The plan of a handle that `open_plan` gave. Plans live as long as the process.
  static const Plan& Get(int64_t handle);
};

struct Grid {
  uint32_t x, y, z;
};

// Launches on `stream` in the current context; `arguments` points at one pointer per parameter.
// `is_dependent`: the kernel waits by itself for the one before (griddepcontrol), so it may start
// while that one ends. Throws RuntimeError naming the plan.
void Launch(const Plan& plan, const Variant& variant, Grid grid, CUstream stream, void** arguments,
            bool is_dependent = false);

}  // namespace fastkernels
