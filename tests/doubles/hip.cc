// libamdhip64.so.7: HIP's runtime calls over runtime.h. Each thread's device is 0 until it sets another.
//
// Environment: FAKE_HIP_ARCH, the architecture's name (gfx942).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "hip_api.h"
#include "runtime.h"
#include "stand_in.h"

namespace {

using stand_in::Allocation;
using stand_in::MemoryKind;
using stand_in::runtime;
using stand_in::Runtime;
using stand_in::Status;
using stand_in::Stream;

constexpr int kVersion = 70051831;
constexpr std::size_t kDeviceBytes = std::size_t{16} << 30;

thread_local int current_device = 0;
thread_local hipError_t last_error = hipSuccess;

// HIP has no word for "not permitted here".
hipError_t result(Status status) {
  const auto error = status == Status::kNotPermitted ? hipErrorNotSupported : static_cast<hipError_t>(status);
  if (error != hipSuccess && error != hipErrorNotReady) last_error = error;
  return error;
}

template <typename F>
hipError_t call(F&& body) {
  if (Runtime::on_worker()) return result(Status::kNotPermitted);
  if (!runtime().in_first_process()) return result(Status::kNotInitialized);
  if (runtime().device_count() <= 0) return result(Status::kNoDevice);
  return result(body());
}

template <typename F>
hipError_t on_stream(hipStream_t handle, F&& body) {
  return call([&] {
    const auto stream = runtime().stream(handle, current_device);
    return stream == nullptr ? Status::kInvalidHandle : body(*stream);
  });
}

bool exists(int device) { return device >= 0 && device < runtime().device_count(); }

template <typename T>
Status put(T* place, T value) {
  if (place == nullptr) return Status::kInvalidValue;
  *place = value;
  return Status::kSuccess;
}

const char* arch() {
  const char* name = std::getenv("FAKE_HIP_ARCH");
  return name == nullptr || std::strncmp(name, "gfx", 3) != 0 ? "gfx942" : name;
}

// "gfx942" is version 9.4, stepping 2; "gfx1100" is 11.0.
void version_of_arch(int* major, int* minor) {
  const std::string digits = std::string(arch()).substr(3);
  const std::size_t split = digits.size() < 3 ? 0 : digits.size() - 2;
  *major = split == 0 ? 0 : std::atoi(digits.substr(0, split).c_str());
  *minor = split == 0 ? 0 : digits[split] - '0';
}

hipError_t copy(void* output, const void* input, std::size_t bytes, hipStream_t stream) {
  return on_stream(stream, [&](Stream& s) { return runtime().copy(s, output, input, bytes); });
}

hipError_t fill(void* output, int value, std::size_t bytes, hipStream_t stream) {
  return on_stream(stream,
                   [&](Stream& s) { return runtime().fill(s, output, static_cast<unsigned char>(value), bytes); });
}

hipError_t allocate(void** memory, std::size_t bytes, MemoryKind kind) {
  return call([&] {
    if (memory == nullptr) return Status::kInvalidValue;
    *memory = nullptr;
    return bytes == 0 ? Status::kSuccess : runtime().allocate(current_device, bytes, kind, memory);
  });
}

}  // namespace

STAND_IN_API const char* polyccl_stand_in(void) { return "HIP runtime"; }
STAND_IN_API void* polyccl_stand_in_hip_view(const void* pointer) { return runtime().view(pointer); }

// --- The library and its devices -------------------------------------------------------------------------------------

STAND_IN_API hipError_t hipInit(unsigned flags) {
  return call([&] { return flags == 0 ? Status::kSuccess : Status::kInvalidValue; });
}

STAND_IN_API hipError_t hipDriverGetVersion(int* version) {
  return call([&] { return put(version, kVersion); });
}

STAND_IN_API hipError_t hipRuntimeGetVersion(int* version) { return hipDriverGetVersion(version); }

STAND_IN_API const char* hipGetErrorString(hipError_t error) {
  const char* text = stand_in::text_of(static_cast<Status>(error));
  return text == nullptr ? "unknown error" : text;
}

STAND_IN_API const char* hipGetErrorName(hipError_t error) {
  const char* name = stand_in::name_of(static_cast<Status>(error));
  thread_local std::string full;
  full = std::string("HIP_") + (name == nullptr ? "ERROR_UNKNOWN" : name);
  return full.c_str();
}

STAND_IN_API hipError_t hipGetLastError(void) { return std::exchange(last_error, hipSuccess); }
STAND_IN_API hipError_t hipPeekAtLastError(void) { return last_error; }

STAND_IN_API hipError_t hipGetDeviceCount(int* count) {
  return call([&] { return put(count, runtime().device_count()); });
}

STAND_IN_API hipError_t hipSetDevice(int device) {
  return call([&] {
    if (!exists(device)) return Status::kInvalidDevice;
    current_device = device;
    return Status::kSuccess;
  });
}

STAND_IN_API hipError_t hipGetDevice(int* device) {
  return call([&] { return put(device, current_device); });
}

STAND_IN_API hipError_t hipDeviceSynchronize(void) {
  return call([] { return runtime().synchronize_device(current_device); });
}

STAND_IN_API hipError_t hipDeviceGetName(char* name, int size, hipDevice_t device) {
  return call([&] {
    if (name == nullptr || size <= 0) return Status::kInvalidValue;
    if (!exists(device)) return Status::kInvalidDevice;
    std::snprintf(name, static_cast<std::size_t>(size), "Stand-in for an AMD GPU");
    return Status::kSuccess;
  });
}

STAND_IN_API hipError_t hipDeviceGetPCIBusId(char* text, int size, int device) {
  return call([&] {
    if (text == nullptr || size < 13) return Status::kInvalidValue;
    if (!exists(device)) return Status::kInvalidDevice;
    std::snprintf(text, static_cast<std::size_t>(size), "0000:%02x:00.0", static_cast<unsigned>(device + 1) & 0xFFu);
    return Status::kSuccess;
  });
}

STAND_IN_API hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device) {
  return call([&] {
    if (!exists(device)) return Status::kInvalidDevice;
    int major = 0;
    int minor = 0;
    version_of_arch(&major, &minor);
    switch (attribute) {
      case hipDeviceAttributeComputeCapabilityMajor:
        return put(value, major);
      case hipDeviceAttributeComputeCapabilityMinor:
        return put(value, minor);
      case hipDeviceAttributeMultiprocessorCount:
        return put(value, 304);
      case hipDeviceAttributePciBusId:
        return put(value, device + 1);
      case hipDeviceAttributeUnifiedAddressing:
        return put(value, 1);
      case hipDeviceAttributeWarpSize:
        return put(value, 64);
      case hipDeviceAttributeCanUseStreamWaitValue:
        return put(value, runtime().can_wait_value() ? 1 : 0);
      default:
        return put(value, 0);
    }
  });
}

STAND_IN_API hipError_t hipDeviceComputeCapability(int* major, int* minor, hipDevice_t device) {
  return call([&] {
    if (major == nullptr || minor == nullptr) return Status::kInvalidValue;
    if (!exists(device)) return Status::kInvalidDevice;
    version_of_arch(major, minor);
    return Status::kSuccess;
  });
}

// The name that hipGetDeviceProperties has in programs that are built with HIP 6 or newer.
STAND_IN_API hipError_t hipGetDevicePropertiesR0600(DeviceProperties* properties, int device) {
  return call([&] {
    if (properties == nullptr) return Status::kInvalidValue;
    if (!exists(device)) return Status::kInvalidDevice;
    *properties = DeviceProperties{};
    std::snprintf(properties->name, sizeof(properties->name), "Stand-in for an AMD GPU");
    std::snprintf(properties->arch_name, sizeof(properties->arch_name), "%s:sramecc+:xnack-", arch());
    properties->uuid[15] = static_cast<unsigned char>(device + 1);
    properties->total_memory = kDeviceBytes;
    properties->warp_size = 64;
    version_of_arch(&properties->major, &properties->minor);
    return Status::kSuccess;
  });
}

STAND_IN_API hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call([&] {
    if (least != nullptr) *least = 1;
    if (greatest != nullptr) *greatest = -1;
    return Status::kSuccess;
  });
}

STAND_IN_API int polyccl_stand_in_hip_urgent_streams(int device) { return runtime().urgent_streams(device); }

// --- Memory ----------------------------------------------------------------------------------------------------------

STAND_IN_API hipError_t hipMalloc(void** memory, std::size_t bytes) {
  return allocate(memory, bytes, MemoryKind::kDevice);
}

STAND_IN_API hipError_t hipExtMallocWithFlags(void** memory, std::size_t bytes, unsigned) {
  return allocate(memory, bytes, MemoryKind::kDevice);
}

STAND_IN_API hipError_t hipFree(void* memory) {
  return call([&] { return runtime().release(memory, MemoryKind::kDevice); });
}

STAND_IN_API hipError_t hipMallocAsync(void** memory, std::size_t bytes, hipStream_t stream) {
  const hipError_t refused = on_stream(stream, [](Stream&) { return Status::kSuccess; });
  return refused != hipSuccess ? refused : hipMalloc(memory, bytes);
}

STAND_IN_API hipError_t hipFreeAsync(void* memory, hipStream_t stream) {
  return on_stream(stream, [&](Stream& s) { return runtime().release_on(s, memory); });
}

STAND_IN_API hipError_t hipHostMalloc(void** memory, std::size_t bytes, unsigned) {
  return allocate(memory, bytes, MemoryKind::kHost);
}

STAND_IN_API hipError_t hipHostFree(void* memory) {
  return call([&] { return runtime().release(memory, MemoryKind::kHost); });
}

STAND_IN_API hipError_t hipHostRegister(void* memory, std::size_t bytes, unsigned) {
  return call([&] { return runtime().register_host(memory, bytes, current_device); });
}

STAND_IN_API hipError_t hipHostUnregister(void* memory) {
  return call([&] { return runtime().unregister_host(memory); });
}

STAND_IN_API hipError_t hipHostGetDevicePointer(void** device_pointer, void* memory, unsigned) {
  return call([&] {
    Allocation found{};
    if (device_pointer == nullptr || !runtime().find(memory, &found)) return Status::kInvalidValue;
    *device_pointer = memory;
    return Status::kSuccess;
  });
}

STAND_IN_API hipError_t hipMemGetInfo(std::size_t* free, std::size_t* total) {
  return call([&] {
    if (free == nullptr || total == nullptr) return Status::kInvalidValue;
    *free = kDeviceBytes / 2;
    *total = kDeviceBytes;
    return Status::kSuccess;
  });
}

STAND_IN_API hipError_t hipPointerGetAttributes(hipPointerAttribute_t* attributes, const void* pointer) {
  return call([&] {
    Allocation found{};
    if (attributes == nullptr || !runtime().find(pointer, &found)) return Status::kInvalidValue;
    void* address = const_cast<void*>(pointer);
    const bool on_device = found.kind == MemoryKind::kDevice;
    const PointerAttributes known{on_device ? 2u : 1u, found.device, address, on_device ? nullptr : address, 0, 0};
    std::memcpy(static_cast<void*>(attributes), &known, sizeof(known));
    return Status::kSuccess;
  });
}

STAND_IN_API hipError_t hipMemcpyAsync(void* output, const void* input, std::size_t bytes, hipMemcpyKind,
                                       hipStream_t stream) {
  return copy(output, input, bytes, stream);
}

STAND_IN_API hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t output, void* input, std::size_t bytes, hipStream_t stream) {
  return copy(output, input, bytes, stream);
}

STAND_IN_API hipError_t hipMemcpyDtoHAsync(void* output, hipDeviceptr_t input, std::size_t bytes, hipStream_t stream) {
  return copy(output, input, bytes, stream);
}

STAND_IN_API hipError_t hipMemcpyDtoDAsync(hipDeviceptr_t output, hipDeviceptr_t input, std::size_t bytes,
                                           hipStream_t stream) {
  return copy(output, input, bytes, stream);
}

STAND_IN_API hipError_t hipMemcpy(void* output, const void* input, std::size_t bytes, hipMemcpyKind) {
  return on_stream(nullptr, [&](Stream& s) {
    const Status status = runtime().copy(s, output, input, bytes);
    if (status == Status::kSuccess) s.mark()->wait();
    return status;
  });
}

STAND_IN_API hipError_t hipMemcpy2DAsync(void* output, std::size_t output_pitch, const void* input,
                                         std::size_t input_pitch, std::size_t width, std::size_t height, hipMemcpyKind,
                                         hipStream_t stream) {
  return on_stream(stream, [&](Stream& s) {
    return runtime().copy_rows(s, output, output_pitch, input, input_pitch, width, height);
  });
}

STAND_IN_API hipError_t hipMemsetAsync(void* output, int value, std::size_t bytes, hipStream_t stream) {
  return fill(output, value, bytes, stream);
}

STAND_IN_API hipError_t hipMemsetD8Async(hipDeviceptr_t output, unsigned char value, std::size_t count,
                                         hipStream_t stream) {
  return fill(output, value, count, stream);
}

STAND_IN_API hipError_t hipMemset(void* output, int value, std::size_t bytes) {
  return on_stream(nullptr, [&](Stream& s) {
    const Status status = runtime().fill(s, output, static_cast<unsigned char>(value), bytes);
    if (status == Status::kSuccess) s.mark()->wait();
    return status;
  });
}

// --- Streams ---------------------------------------------------------------------------------------------------------

STAND_IN_API hipError_t hipStreamCreateWithPriority(hipStream_t* stream, unsigned flags, int priority) {
  return call(
      [&] { return runtime().create_stream(current_device, flags, priority, reinterpret_cast<void**>(stream)); });
}

STAND_IN_API hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned flags) {
  return hipStreamCreateWithPriority(stream, flags, 0);
}

STAND_IN_API hipError_t hipStreamCreate(hipStream_t* stream) { return hipStreamCreateWithPriority(stream, 0, 0); }

STAND_IN_API hipError_t hipStreamDestroy(hipStream_t stream) {
  return call([&] { return runtime().destroy_stream(stream); });
}

STAND_IN_API hipError_t hipStreamGetFlags(hipStream_t stream, unsigned* flags) {
  return on_stream(stream, [&](Stream& s) { return put(flags, s.flags); });
}

STAND_IN_API hipError_t hipStreamGetPriority(hipStream_t stream, int* priority) {
  return on_stream(stream, [&](Stream& s) { return put(priority, s.priority); });
}

STAND_IN_API hipError_t hipStreamGetDevice(hipStream_t stream, hipDevice_t* device) {
  return on_stream(stream, [&](Stream& s) { return put(device, s.device); });
}

STAND_IN_API hipError_t hipStreamQuery(hipStream_t stream) {
  return on_stream(stream, [&](Stream& s) {
    if (runtime().capture_of(s) != stand_in::Capture::kNone) return Status::kCaptureUnsupported;
    return s.idle() ? Status::kSuccess : Status::kNotReady;
  });
}

STAND_IN_API hipError_t hipStreamSynchronize(hipStream_t stream) {
  return on_stream(stream, [&](Stream& s) {
    if (runtime().capture_of(s) != stand_in::Capture::kNone) return Status::kCaptureUnsupported;
    s.mark()->wait();
    return Status::kSuccess;
  });
}

STAND_IN_API hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned) {
  return on_stream(stream, [&](Stream& s) { return runtime().wait_event(s, event); });
}

STAND_IN_API hipError_t hipStreamWaitValue32(hipStream_t stream, void* address, std::uint32_t value, unsigned flags,
                                             std::uint32_t mask) {
  if (flags > 3) return result(Status::kInvalidValue);
  return on_stream(stream, [&](Stream& s) {
    return runtime().wait_value(s, address, value, static_cast<stand_in::Compare>(flags), mask);
  });
}

STAND_IN_API hipError_t hipStreamWriteValue32(hipStream_t stream, void* address, std::uint32_t value, unsigned) {
  return on_stream(stream, [&](Stream& s) { return runtime().write_value(s, address, value); });
}

STAND_IN_API hipError_t hipLaunchHostFunc(hipStream_t stream, hipHostFn_t function, void* data) {
  return on_stream(stream, [&](Stream& s) {
    return function == nullptr ? Status::kInvalidValue : runtime().enqueue(s, [function, data] { function(data); });
  });
}

STAND_IN_API hipError_t hipStreamBeginCapture(hipStream_t stream, hipStreamCaptureMode mode) {
  return on_stream(stream,
                   [&](Stream& s) { return runtime().begin_capture(s, static_cast<stand_in::CaptureMode>(mode)); });
}

STAND_IN_API hipError_t hipStreamEndCapture(hipStream_t stream, hipGraph_t* graph) {
  if (graph != nullptr) *graph = nullptr;
  return on_stream(stream, [](Stream& s) { return runtime().end_capture(s); });
}

STAND_IN_API hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus* status) {
  return on_stream(
      stream, [&](Stream& s) { return put(status, static_cast<hipStreamCaptureStatus>(runtime().capture_of(s))); });
}

STAND_IN_API hipError_t hipStreamGetCaptureInfo(hipStream_t stream, hipStreamCaptureStatus* status,
                                                unsigned long long* id) {
  if (id != nullptr) *id = reinterpret_cast<std::uintptr_t>(stream);
  return hipStreamIsCapturing(stream, status);
}

STAND_IN_API hipError_t hipStreamGetCaptureInfo_v2(hipStream_t stream, hipStreamCaptureStatus* status,
                                                   unsigned long long* id, hipGraph_t* graph,
                                                   const hipGraphNode_t** dependencies, std::size_t* count) {
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (count != nullptr) *count = 0;
  return hipStreamGetCaptureInfo(stream, status, id);
}

STAND_IN_API hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode* mode) {
  if (mode == nullptr) return result(Status::kInvalidValue);
  auto exchanged = static_cast<stand_in::CaptureMode>(*mode);
  Runtime::exchange_capture_mode(&exchanged);
  *mode = static_cast<hipStreamCaptureMode>(exchanged);
  return hipSuccess;
}

// --- Events ----------------------------------------------------------------------------------------------------------

STAND_IN_API hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned flags) {
  const bool timed = (flags & hipEventDisableTiming) == 0;
  return call([&] { return runtime().create_event(current_device, timed, reinterpret_cast<void**>(event)); });
}

STAND_IN_API hipError_t hipEventCreate(hipEvent_t* event) { return hipEventCreateWithFlags(event, 0); }

STAND_IN_API hipError_t hipEventDestroy(hipEvent_t event) {
  return call([&] { return runtime().destroy_event(event); });
}

STAND_IN_API hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  return on_stream(stream, [&](Stream& s) { return runtime().record(event, s); });
}

STAND_IN_API hipError_t hipEventQuery(hipEvent_t event) {
  return call([&] { return runtime().query_event(event); });
}

STAND_IN_API hipError_t hipEventSynchronize(hipEvent_t event) {
  return call([&] { return runtime().synchronize_event(event); });
}

STAND_IN_API hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t start, hipEvent_t end) {
  return call([&] { return runtime().elapsed(start, end, milliseconds); });
}
