// The vendor's runtime as the CCL stand-in uses it: see device.h.
#include "device.h"

#include <memory>
#include <string>
#include <utility>

#include "stand_in.h"

#ifdef STAND_IN_HIP
#include "hip_api.h"

extern "C" {
hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned flags);
hipError_t hipEventDestroy(hipEvent_t event);
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream);
hipError_t hipFree(void* memory);
hipError_t hipGetDevice(int* device);
const char* hipGetErrorString(hipError_t error);
hipError_t hipLaunchHostFunc(hipStream_t stream, hipHostFn_t function, void* data);
hipError_t hipMalloc(void** memory, std::size_t bytes);
hipError_t hipSetDevice(int device);
hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus* status);
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags);
}
#else
#include "cuda_api.h"

extern "C" {
#ifndef STAND_IN_VENDOR_HEADERS
CUresult cuCtxGetCurrent(CUcontext* context);
CUresult cuCtxGetDevice(CUdevice* device);
CUresult cuCtxPopCurrent_v2(CUcontext* context);
CUresult cuCtxPushCurrent_v2(CUcontext context);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device);
CUresult cuEventCreate(CUevent* event, unsigned flags);
CUresult cuEventDestroy_v2(CUevent event);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuGetErrorString(CUresult error, const char** text);
CUresult cuInit(unsigned flags);
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data);
CUresult cuMemAlloc_v2(CUdeviceptr* memory, std::size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr memory);
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
#endif
}
#endif

namespace stand_in {
namespace {

void run_and_free(void* data) {
  const std::unique_ptr<std::function<void()>> work(static_cast<std::function<void()>*>(data));
  (*work)();
}

#ifdef STAND_IN_HIP
Failure check(hipError_t error) {
  if (error == hipSuccess) return {};
  return {ncclUnhandledCudaError, std::string("HIP failure '") + hipGetErrorString(error) + "'"};
}

hipStream_t native(Stream stream) { return reinterpret_cast<hipStream_t>(stream); }
#else
Failure check(CUresult error) {
  if (error == CUDA_SUCCESS) return {};
  const char* text = nullptr;
  cuGetErrorString(error, &text);
  return {ncclUnhandledCudaError, std::string("Cuda failure '") + (text == nullptr ? "unknown error" : text) + "'"};
}

CUstream native(Stream stream) { return reinterpret_cast<CUstream>(stream); }
#endif

}  // namespace

#ifdef STAND_IN_HIP

Failure current_device(int* device) { return check(hipGetDevice(device)); }

OnDevice::OnDevice(int device) {
  hipGetDevice(&before_);
  hipSetDevice(device);
}
OnDevice::~OnDevice() { hipSetDevice(before_); }

Failure launch(Stream stream, std::function<void()> work) {
  auto boxed = std::make_unique<std::function<void()>>(std::move(work));
  Failure failure = check(hipLaunchHostFunc(native(stream), run_and_free, boxed.get()));
  if (!failure) static_cast<void>(boxed.release());  // the stream frees it
  return failure;
}

Failure order(Stream earlier, Stream later) {
  hipEvent_t event = nullptr;
  if (Failure failure = check(hipEventCreateWithFlags(&event, hipEventDisableTiming))) return failure;
  Failure failure = check(hipEventRecord(event, native(earlier)));
  if (!failure) failure = check(hipStreamWaitEvent(native(later), event, 0));
  hipEventDestroy(event);
  return failure;
}

Failure is_capturing(Stream stream, bool* capturing) {
  hipStreamCaptureStatus status{};
  Failure failure = check(hipStreamIsCapturing(native(stream), &status));
  *capturing = static_cast<int>(status) != 0;
  return failure;
}

Failure allocate(void** memory, std::size_t bytes) { return check(hipMalloc(memory, bytes)); }
Failure release(void* memory) { return check(hipFree(memory)); }
std::byte* view(const void* pointer) { return static_cast<std::byte*>(polyccl_stand_in_hip_view(pointer)); }

#else

// Like a program of the CUDA runtime, the library uses a device's primary context, and device 0 where the thread has
// none.
Failure current_device(int* device) {
  *device = 0;
  if (Failure failure = check(cuInit(0))) return failure;
  CUcontext context = nullptr;
  if (Failure failure = check(cuCtxGetCurrent(&context))) return failure;
  return context == nullptr ? Failure{} : check(cuCtxGetDevice(device));
}

OnDevice::OnDevice(int device) : before_(device) {
  CUcontext context = nullptr;
  cuInit(0);
  cuDevicePrimaryCtxRetain(&context, device);
  cuCtxPushCurrent_v2(context);
}
OnDevice::~OnDevice() {
  cuCtxPopCurrent_v2(nullptr);
  cuDevicePrimaryCtxRelease_v2(before_);
}

Failure launch(Stream stream, std::function<void()> work) {
  auto boxed = std::make_unique<std::function<void()>>(std::move(work));
  Failure failure = check(cuLaunchHostFunc(native(stream), run_and_free, boxed.get()));
  if (!failure) static_cast<void>(boxed.release());  // the stream frees it
  return failure;
}

Failure order(Stream earlier, Stream later) {
  CUevent event = nullptr;
  if (Failure failure = check(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING))) return failure;
  Failure failure = check(cuEventRecord(event, native(earlier)));
  if (!failure) failure = check(cuStreamWaitEvent(native(later), event, 0));
  cuEventDestroy_v2(event);
  return failure;
}

Failure is_capturing(Stream stream, bool* capturing) {
  CUstreamCaptureStatus status{};
  Failure failure = check(cuStreamIsCapturing(native(stream), &status));
  *capturing = static_cast<int>(status) != 0;
  return failure;
}

Failure allocate(void** memory, std::size_t bytes) {
  CUdeviceptr made = 0;
  Failure failure = check(cuMemAlloc_v2(&made, bytes));
  *memory = reinterpret_cast<void*>(static_cast<std::uintptr_t>(made));
  return failure;
}
Failure release(void* memory) {
  return check(cuMemFree_v2(static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(memory))));
}
std::byte* view(const void* pointer) { return static_cast<std::byte*>(polyccl_stand_in_cuda_view(pointer)); }

#endif

}  // namespace stand_in
