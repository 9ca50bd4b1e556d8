// A CUDA driver that launches nothing: it writes down what it is asked to launch, a JSON line each,
// to the file that FAKE_DRIVER_LOG names. A kernel is called by the checksum of its cubin.
#include <cuda.h>
#include <elf.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int kParamsBytes = 256;  // sizeof(gdn_decode::Params)

uint64_t Checksum(const void* image) {
  const auto* header = static_cast<const Elf64_Ehdr*>(image);
  const auto* bytes = static_cast<const unsigned char*>(image);
  uint64_t sum = 14695981039346656037u;  // FNV-1a
  for (uint64_t i = 0; i < header->e_shoff; ++i) sum = (sum ^ bytes[i]) * 1099511628211u;
  return sum;
}

}  // namespace

#undef cuDeviceGet
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#undef cuDevicePrimaryCtxRetain

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult, const char** name) {
  *name = "an error of the fake driver";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "";
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 132;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext*) { return CUDA_SUCCESS; }
CUresult cuLibraryLoadData(CUlibrary* library, const void* image, CUjit_option*, void**, unsigned,
                           CUlibraryOption*, void**, unsigned) {
  *library = reinterpret_cast<CUlibrary>(Checksum(image));
  return CUDA_SUCCESS;
}
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char*) {
  *kernel = reinterpret_cast<CUkernel>(library);
  return CUDA_SUCCESS;
}
CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}
CUresult cuKernelGetAttribute(int* value, CUfunction_attribute, CUkernel, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult cuKernelSetAttribute(CUfunction_attribute, int, CUkernel, CUdevice) {
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments,
                          void**) {
  FILE* log = fopen(getenv("FAKE_DRIVER_LOG"), "a");
  fprintf(log, "{\"kernel\": \"%llx\", \"grid\": [%u, %u, %u], \"threads\": %u, \"params\": \"",
          reinterpret_cast<unsigned long long>(function), config->gridDimX, config->gridDimY,
          config->gridDimZ, config->blockDimX);
  const auto* params = static_cast<const unsigned char*>(arguments[0]);
  for (int i = 0; i < kParamsBytes; ++i) fprintf(log, "%02x", params[i]);
  fprintf(log, "\"}\n");
  fclose(log);
  return CUDA_SUCCESS;
}

}  // extern "C"
