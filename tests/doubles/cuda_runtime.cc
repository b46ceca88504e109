// libcudart.so.13: the calls of the CUDA runtime that NVIDIA's Python bindings make, over the driver API. Like the real
// one it uses the devices' primary contexts, and makes the chosen one current.
#include <cstddef>
#include <cstdint>

#include "cuda_api.h"
#include "stand_in.h"

extern "C" {
CUresult cuCtxGetCurrent(CUcontext* context);
CUresult cuCtxGetDevice(CUdevice* device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxSynchronize(void);
CUresult cuDeviceGetCount(int* count);
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device);
CUresult cuDriverGetVersion(int* version);
CUresult cuGetErrorString(CUresult error, const char** text);
CUresult cuInit(unsigned flags);
CUresult cuMemAlloc_v2(CUdeviceptr* memory, std::size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr memory);
CUresult cuMemcpy(CUdeviceptr output, CUdeviceptr input, std::size_t bytes);
CUresult cuMemcpyAsync(CUdeviceptr output, CUdeviceptr input, std::size_t bytes, CUstream stream);
CUresult cuStreamCreate(CUstream* stream, unsigned flags);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
}

namespace {

constexpr int kVersion = 13000;

// The runtime's errors have the driver's numbers where both have the error.
int result(CUresult error) { return static_cast<int>(error); }

// Make device 0 current where the thread has none yet.
CUresult prepare() {
  if (const CUresult failed = cuInit(0); failed != CUDA_SUCCESS) return failed;
  CUcontext context = nullptr;
  if (const CUresult failed = cuCtxGetCurrent(&context); failed != CUDA_SUCCESS) return failed;
  if (context != nullptr) return CUDA_SUCCESS;
  if (const CUresult failed = cuDevicePrimaryCtxRetain(&context, 0); failed != CUDA_SUCCESS) return failed;
  return cuCtxSetCurrent(context);
}

template <typename F>
int prepared(F&& call) {
  const CUresult failed = prepare();
  return result(failed != CUDA_SUCCESS ? failed : call());
}

CUdeviceptr address(const void* pointer) { return static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(pointer)); }

}  // namespace

STAND_IN_API const char* polyccl_stand_in(void) { return "CUDA runtime"; }

STAND_IN_API int cudaRuntimeGetVersion(int* version) { return version == nullptr ? 1 : (*version = kVersion, 0); }
STAND_IN_API int cudaDriverGetVersion(int* version) { return result(cuDriverGetVersion(version)); }

STAND_IN_API const char* cudaGetErrorString(int error) {
  const char* text = nullptr;
  cuGetErrorString(static_cast<CUresult>(error), &text);
  return text == nullptr ? "unrecognized error code" : text;
}

STAND_IN_API int cudaGetDeviceCount(int* count) {
  return prepared([&] { return cuDeviceGetCount(count); });
}

STAND_IN_API int cudaGetDevice(int* device) {
  return prepared([&] { return cuCtxGetDevice(device); });
}

STAND_IN_API int cudaSetDevice(int device) {
  return prepared([&] {
    CUcontext context = nullptr;
    const CUresult failed = cuDevicePrimaryCtxRetain(&context, device);
    return failed != CUDA_SUCCESS ? failed : cuCtxSetCurrent(context);
  });
}

STAND_IN_API int cudaDeviceSynchronize(void) {
  return prepared([] { return cuCtxSynchronize(); });
}

STAND_IN_API int cudaMalloc(void** memory, std::size_t bytes) {
  return prepared([&] {
    CUdeviceptr made = 0;
    const CUresult failed = memory == nullptr ? CUDA_ERROR_INVALID_VALUE : cuMemAlloc_v2(&made, bytes);
    if (failed == CUDA_SUCCESS) *memory = reinterpret_cast<void*>(static_cast<std::uintptr_t>(made));
    return failed;
  });
}

STAND_IN_API int cudaFree(void* memory) {
  return prepared([&] { return cuMemFree_v2(address(memory)); });
}

STAND_IN_API int cudaMemcpy(void* output, const void* input, std::size_t bytes, int) {
  return prepared([&] { return cuMemcpy(address(output), address(input), bytes); });
}

STAND_IN_API int cudaMemcpyAsync(void* output, const void* input, std::size_t bytes, int, CUstream stream) {
  return prepared([&] { return cuMemcpyAsync(address(output), address(input), bytes, stream); });
}

STAND_IN_API int cudaStreamCreate(CUstream* stream) {
  return prepared([&] { return cuStreamCreate(stream, 0); });
}

STAND_IN_API int cudaStreamDestroy(CUstream stream) {
  return prepared([&] { return cuStreamDestroy_v2(stream); });
}

STAND_IN_API int cudaStreamSynchronize(CUstream stream) {
  return prepared([&] { return cuStreamSynchronize(stream); });
}
