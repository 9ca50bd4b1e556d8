#include "common/cubin.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <deque>
#include <mutex>

// Written by the build: every embedded cubin.
extern "C" {
struct FastkernelsBlob {
  const unsigned char* data;
  uint64_t size;
};
extern const FastkernelsBlob fastkernels_blobs[];
extern const uint64_t fastkernels_num_blobs;
}

namespace fastkernels {
namespace {

namespace ffi = tvm::ffi;

// A deque: plans keep their addresses while others are added.
std::deque<Plan>& Plans() {
  static auto* plans = new std::deque<Plan>();  // never destroyed: calls may outlive static order
  return *plans;
}

std::mutex& PlansMutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

const void* BlobData(int64_t index) {
  if (index < 0 || static_cast<uint64_t>(index) >= fastkernels_num_blobs) {
    TVM_FFI_THROW(ValueError) << "binary " << index << ", the library holds "
                              << fastkernels_num_blobs;
  }
  return fastkernels_blobs[index].data;
}

Variant Load(const std::string& label, Arguments arguments, const void* cubin,
             const std::string& symbol, int64_t threads, int64_t shared_bytes) {
  const Driver& driver = Driver::Get();
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
  CUresult status =
      driver.library_load_data(&library, cubin, nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (status == CUDA_SUCCESS) {
    status = driver.library_get_kernel(&kernel, library, symbol.c_str());
  }
  if (status != CUDA_SUCCESS) {
    const char* name = nullptr;
    driver.get_error_name(status, &name);
    TVM_FFI_THROW(RuntimeError) << label << ": the machine code of " << symbol
                                << " does not load: " << (name ? name : "unknown error");
  }
  return Variant{kernel, arguments, static_cast<uint32_t>(threads),
                 static_cast<uint32_t>(shared_bytes)};
}

// Per variant: how it takes its parameters, an index into the embedded cubins or the bytes of one,
// its entry point, and the shape of a block. Returns a handle.
int64_t OpenPlan(ffi::String label, ffi::Array<int64_t> arguments, ffi::Array<ffi::Any> binaries,
                 ffi::Array<ffi::String> symbols, ffi::Array<int64_t> threads,
                 ffi::Array<int64_t> shared_bytes, ffi::Array<int64_t> tile) {
  Plan plan;
  plan.label = label;
  for (size_t i = 0; i < binaries.size(); ++i) {
    const void* cubin = nullptr;
    if (auto index = binaries[i].try_cast<int64_t>()) {
      cubin = BlobData(*index);
    } else {
      // The driver may refer to the image later: keep a copy for the life of the process.
      auto bytes = binaries[i].cast<ffi::Bytes>();
      cubin = (new std::string(bytes.data(), bytes.size()))->data();
    }
    plan.variants.push_back(Load(plan.label, static_cast<Arguments>(arguments[i]), cubin,
                                 std::string(symbols[i]), threads[i], shared_bytes[i]));
  }
  for (int64_t value : tile) plan.tile.push_back(value);
  std::lock_guard<std::mutex> lock(PlansMutex());
  Plans().push_back(std::move(plan));
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(&Plans().back()));
}

// Brings a plan onto a device, so that its first launch neither loads nor allocates: a launch may
// be captured into a graph, where loading is forbidden.
void LoadPlan(int64_t handle, int64_t device_id) {
  const Plan& plan = Plan::Get(handle);
  const Driver& driver = Driver::Get();
  const Device& device = Device::Get(static_cast<int>(device_id));
  ContextGuard guard(device);
  for (const Variant& variant : plan.variants) {
    if (variant.shared_bytes > 0) {
      driver.Check(driver.kernel_set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                               static_cast<int>(variant.shared_bytes),
                                               variant.kernel, device.handle),
                   "cuKernelSetAttribute");
    }
    // Clusters of more blocks than every device promises have to be asked for.
    constexpr int kPortableCluster = 8;
    int cluster = 0;
    driver.Check(driver.kernel_get_attribute(&cluster, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
                                             variant.kernel, device.handle),
                 "cuKernelGetAttribute");
    if (cluster > kPortableCluster) {
      driver.Check(driver.kernel_set_attribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
                                               1, variant.kernel, device.handle),
                   "cuKernelSetAttribute");
    }
    CUfunction function = nullptr;
    driver.Check(driver.kernel_get_function(&function, variant.kernel), "cuKernelGetFunction");
  }
}

int64_t DriverVersion() {
  const Driver& driver = Driver::Get();
  int version = 0;
  driver.Check(driver.driver_get_version(&version), "cuDriverGetVersion");
  return version;
}

ffi::String Version() { return FASTKERNELS_VERSION; }

int64_t NumBinaries() { return static_cast<int64_t>(fastkernels_num_blobs); }

}  // namespace

const Plan& Plan::Get(int64_t handle) {
  return *reinterpret_cast<const Plan*>(static_cast<uintptr_t>(handle));
}

void Launch(const Plan& plan, const Variant& variant, Grid grid, CUstream stream, void** arguments,
            bool is_dependent) {
  CUlaunchConfig config = {};
  config.gridDimX = grid.x;
  config.gridDimY = grid.y;
  config.gridDimZ = grid.z;
  config.blockDimX = variant.threads;
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.sharedMemBytes = variant.shared_bytes;
  config.hStream = stream;
  CUlaunchAttribute overlap = {};
  overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = is_dependent ? 1 : 0;
  const Driver& driver = Driver::Get();
  CUresult status = driver.launch_kernel_ex(&config, reinterpret_cast<CUfunction>(variant.kernel),
                                            arguments, nullptr);
  if (status != CUDA_SUCCESS) {
    const char* name = nullptr;
    const char* text = nullptr;
    driver.get_error_name(status, &name);
    driver.get_error_string(status, &text);
    // A kind of its own: Python tells it from a refused argument (op.py of each operator).
    TVM_FFI_THROW(LaunchFailed) << plan.label << ": launch gave " << (name ? name : "?") << ": "
                                << (text ? text : "");
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, Version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(num_binaries, NumBinaries);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(driver_version, DriverVersion);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(open_plan, OpenPlan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(load_plan, LoadPlan);

}  // namespace fastkernels
