#include "common/driver.h"

#include <dlfcn.h>
#include <tvm/ffi/error.h>

#include <array>
#include <memory>
#include <mutex>

namespace fastkernels {
namespace {

template <typename F>
void Find(void* handle, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(handle, name));
  if (*function == nullptr) {
    TVM_FFI_THROW(RuntimeError) << "libcuda.so.1 has no " << name
                                << ": a driver for CUDA 13.0 or newer (580 or newer) is needed";
  }
}

Driver Open() {
  void* handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) TVM_FFI_THROW(RuntimeError) << "no CUDA driver: " << dlerror();
  Driver driver;
  Find(handle, "cuInit", &driver.init);
  Find(handle, "cuDriverGetVersion", &driver.driver_get_version);
  Find(handle, "cuGetErrorName", &driver.get_error_name);
  Find(handle, "cuGetErrorString", &driver.get_error_string);
  int version = 0;
  driver.Check(driver.driver_get_version(&version), "cuDriverGetVersion");
  if (version < kMinDriverVersion) {
    TVM_FFI_THROW(RuntimeError) << "the driver supports CUDA " << version / 1000 << "."
                                << version % 1000 / 10
                                << ", machine code needs 13.0 or newer (driver 580 or newer)";
  }
  Find(handle, "cuDeviceGet", &driver.device_get);
  Find(handle, "cuDeviceGetAttribute", &driver.device_get_attribute);
  Find(handle, "cuDevicePrimaryCtxRetain", &driver.primary_ctx_retain);
  Find(handle, "cuCtxGetCurrent", &driver.ctx_get_current);
  Find(handle, "cuCtxPushCurrent_v2", &driver.ctx_push_current);
  Find(handle, "cuCtxPopCurrent_v2", &driver.ctx_pop_current);
  Find(handle, "cuLibraryLoadData", &driver.library_load_data);
  Find(handle, "cuLibraryGetKernel", &driver.library_get_kernel);
  Find(handle, "cuKernelGetFunction", &driver.kernel_get_function);
  Find(handle, "cuKernelGetAttribute", &driver.kernel_get_attribute);
  Find(handle, "cuKernelSetAttribute", &driver.kernel_set_attribute);
  Find(handle, "cuLaunchKernelEx", &driver.launch_kernel_ex);
  driver.Check(driver.init(0), "cuInit");
  return driver;
}

}  // namespace

const Driver& Driver::Get() {
  static const Driver driver = Open();
  return driver;
}

void Driver::Check(CUresult status, const char* call) const {
  if (status == CUDA_SUCCESS) return;
  const char* name = nullptr;
  const char* text = nullptr;
  get_error_name(status, &name);
  get_error_string(status, &text);
  TVM_FFI_THROW(RuntimeError) << call << " gave " << (name ? name : "an unknown error") << " ("
                              << static_cast<int>(status) << "): " << (text ? text : "");
}

const Device& Device::Get(int device_id) {
  constexpr int kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<Device, kMaxDevices> devices;
  if (device_id < 0 || device_id >= kMaxDevices) {
    TVM_FFI_THROW(RuntimeError) << "device " << device_id << ", expected 0.." << kMaxDevices - 1;
  }
  std::call_once(once[device_id], [device_id] {
    const Driver& driver = Driver::Get();
    Device& device = devices[device_id];
    driver.Check(driver.device_get(&device.handle, device_id), "cuDeviceGet");
    driver.Check(driver.primary_ctx_retain(&device.primary, device.handle),
                 "cuDevicePrimaryCtxRetain");
    driver.Check(driver.device_get_attribute(
                     &device.num_sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device.handle),
                 "cuDeviceGetAttribute");
  });
  return devices[device_id];
}

ContextGuard::ContextGuard(const Device& device) {
  const Driver& driver = Driver::Get();
  CUcontext current = nullptr;
  driver.Check(driver.ctx_get_current(&current), "cuCtxGetCurrent");
  if (current == device.primary) return;
  driver.Check(driver.ctx_push_current(device.primary), "cuCtxPushCurrent");
  pushed_ = true;
}

ContextGuard::~ContextGuard() {
  if (!pushed_) return;
  CUcontext popped = nullptr;
  Driver::Get().ctx_pop_current(&popped);
}

}  // namespace fastkernels
