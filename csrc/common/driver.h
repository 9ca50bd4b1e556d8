// The CUDA driver, found at run time: the library loads on machines without one, and needs neither
// a CUDA runtime nor torch.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fastkernels {

// The driver's entry points that we use, by their versioned names.
struct Driver {
  decltype(&cuInit) init;
  decltype(&cuDriverGetVersion) driver_get_version;
  decltype(&cuGetErrorName) get_error_name;
  decltype(&cuGetErrorString) get_error_string;
  decltype(&cuDeviceGet) device_get;
  decltype(&cuDeviceGetAttribute) device_get_attribute;
  decltype(&cuDevicePrimaryCtxRetain) primary_ctx_retain;
  decltype(&cuCtxGetCurrent) ctx_get_current;
  decltype(&cuCtxPushCurrent) ctx_push_current;
  decltype(&cuCtxPopCurrent) ctx_pop_current;
  decltype(&cuLibraryLoadData) library_load_data;
  decltype(&cuLibraryGetKernel) library_get_kernel;
  decltype(&cuKernelGetFunction) kernel_get_function;
  decltype(&cuKernelGetAttribute) kernel_get_attribute;
  decltype(&cuKernelSetAttribute) kernel_set_attribute;
  decltype(&cuLaunchKernelEx) launch_kernel_ex;

  // Throws RuntimeError where there is no driver, or one older than kMinDriverVersion.
  static const Driver& Get();

  // Throws RuntimeError naming the call and CUDA's error.
  void Check(CUresult status, const char* call) const;
};

// Machine code made by CUDA 13 loads on drivers for CUDA 13.0 (release 580) and newer.
constexpr int kMinDriverVersion = 13000;

struct Device {
  CUdevice handle;
  CUcontext primary;  // the context torch works in
  int num_sms;

  // Asks the driver once per device and process.
  static const Device& Get(int device_id);
};

// Makes a device's primary context current for a scope: tensors may lie on a device that is not
// current, and a new thread has no context at all.
class ContextGuard {
 public:
  explicit ContextGuard(const Device& device);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace fastkernels
