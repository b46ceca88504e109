// libcuda.so.1: the CUDA driver API over runtime.h. As strict as the driver about initialization, current contexts and
// handles: a call without a current context fails, and so does any call from a host function.
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda_api.h"
#include "runtime.h"
#include "stand_in.h"

namespace {

using stand_in::Allocation;
using stand_in::MemoryKind;
using stand_in::runtime;
using stand_in::Runtime;
using stand_in::Status;
using stand_in::Stream;

constexpr int kDriverVersion = 13000;
constexpr int kMaxDevices = 64;
constexpr std::size_t kDeviceBytes = std::size_t{16} << 30;

// A context handle is the address of its device's entry.
struct Primary {
  std::mutex mutex;
  int retained = 0;
};
std::array<Primary, kMaxDevices>& primaries() {
  static auto& all = *std::make_unique<std::array<Primary, kMaxDevices>>().release();
  return all;
}

std::atomic<bool> initialized = false;
thread_local std::vector<int> contexts;  // the last one is current

CUresult result(Status status) { return static_cast<CUresult>(status); }

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(&primaries()[static_cast<std::size_t>(device)]); }

// -1 where the handle is no context.
int device_of(CUcontext context) {
  const auto* entry = reinterpret_cast<const Primary*>(context);
  for (int device = 0; device < runtime().device_count(); ++device) {
    if (entry == &primaries()[static_cast<std::size_t>(device)]) return device;
  }
  return -1;
}

bool alive(int device) {
  Primary& primary = primaries()[static_cast<std::size_t>(device)];
  const std::lock_guard lock(primary.mutex);
  return primary.retained > 0;
}

bool exists(CUdevice device) { return device >= 0 && device < runtime().device_count(); }

// Whether any call may be made now.
CUresult enter() {
  if (Runtime::on_worker()) return CUDA_ERROR_NOT_PERMITTED;
  if (!initialized || !runtime().in_first_process()) return CUDA_ERROR_NOT_INITIALIZED;
  return CUDA_SUCCESS;
}

// Whether a call that needs a current context may be made; gives its device.
CUresult enter(int* device) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!alive(contexts.back())) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  *device = contexts.back();
  return CUDA_SUCCESS;
}

template <typename F>
CUresult in_context(F&& call) {
  int device = 0;
  const CUresult refused = enter(&device);
  return refused != CUDA_SUCCESS ? refused : result(call(device));
}

template <typename F>
CUresult on_stream(CUstream handle, F&& call) {
  return in_context([&](int device) {
    const auto stream = runtime().stream(handle, device);
    return stream == nullptr ? Status::kInvalidHandle : call(*stream);
  });
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }

CUresult copy(CUstream stream, void* output, const void* input, std::size_t bytes) {
  return on_stream(stream, [&](Stream& s) { return runtime().copy(s, output, input, bytes); });
}

CUresult copy_now(void* output, const void* input, std::size_t bytes) {
  return on_stream(nullptr, [&](Stream& s) {
    const Status status = runtime().copy(s, output, input, bytes);
    if (status == Status::kSuccess) s.mark()->wait();
    return status;
  });
}

template <typename T>
Status store(void* place, T value) {
  std::memcpy(place, &value, sizeof(value));
  return Status::kSuccess;
}

Status pointer_attribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  Allocation found{};
  if (data == nullptr || !runtime().find(pointer(address), &found)) return Status::kInvalidValue;
  const bool on_device = found.kind == MemoryKind::kDevice;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return store(data, context_of(found.device));
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return store(data, static_cast<unsigned>(on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return store(data, address);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return on_device ? Status::kInvalidValue : store(data, pointer(address));
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return store(data, static_cast<unsigned char>(0));
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return store(data, found.device);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return store(data, static_cast<CUdeviceptr>(found.base));
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return store(data, found.size);
    default:
      return Status::kNotSupported;
  }
}

std::size_t size_of(CUpointer_attribute attribute) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return 4;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return 1;
    default:
      return 8;
  }
}

// "cuMemAlloc" means the newest version that a caller of `version` knows.
void* find_export(const std::string& name, int version) {
  static void* const self = [] {
    Dl_info where{};
    dladdr(reinterpret_cast<void*>(&polyccl_stand_in_cuda_view), &where);
    return dlopen(where.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  for (const char* suffix : {"_v3", "_v2", ""}) {
    if (suffix == std::string("_v3") && version < 12030) continue;
    if (void* found = dlsym(self, (name + suffix).c_str())) return found;
  }
  return nullptr;
}

}  // namespace

STAND_IN_API const char* polyccl_stand_in(void) { return "CUDA driver"; }
STAND_IN_API void* polyccl_stand_in_cuda_view(const void* pointer) { return runtime().view(pointer); }

// --- The library and its devices -------------------------------------------------------------------------------------

STAND_IN_API CUresult cuInit(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (Runtime::on_worker()) return CUDA_ERROR_NOT_PERMITTED;
  if (runtime().device_count() <= 0) return CUDA_ERROR_NO_DEVICE;
  if (runtime().device_count() > kMaxDevices) return CUDA_ERROR_INVALID_DEVICE;
  if (!runtime().in_first_process()) return CUDA_ERROR_NOT_INITIALIZED;
  initialized = true;
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuDriverGetVersion(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = kDriverVersion;
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuGetErrorString(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *text = stand_in::text_of(static_cast<Status>(error));
  return *text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

STAND_IN_API CUresult cuGetErrorName(CUresult error, const char** name) {
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *name = nullptr;
  const char* known = stand_in::name_of(static_cast<Status>(error));
  if (known == nullptr) return CUDA_ERROR_INVALID_VALUE;
  thread_local std::string full;
  full = std::string("CUDA_") + known;
  *name = full.c_str();
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t,
                                          CUdriverProcAddressQueryResult* status) {
  if (symbol == nullptr || function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *function = find_export(symbol, version);
  const bool found = *function != nullptr;
  if (status != nullptr) *status = found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return found || status != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

STAND_IN_API CUresult cuDeviceGetCount(int* count) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = runtime().device_count();
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!exists(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  if (name == nullptr || size <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, static_cast<std::size_t>(size), "Stand-in for an NVIDIA GPU");
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  if (uuid == nullptr || !exists(device)) return CUDA_ERROR_INVALID_VALUE;
  std::memset(uuid, 0, sizeof(*uuid));
  uuid->bytes[15] = static_cast<char>(device + 1);
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice device) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  if (bytes == nullptr || !exists(device)) return CUDA_ERROR_INVALID_VALUE;
  *bytes = kDeviceBytes;
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuDeviceGetPCIBusId(char* text, int size, CUdevice device) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  if (text == nullptr || size < 13 || !exists(device)) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(text, static_cast<std::size_t>(size), "0000:%02x:00.0", static_cast<unsigned>(device + 1) & 0xFFu);
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  const int can_wait = runtime().can_wait_value() ? 1 : 0;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return *value = 1024, CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return *value = 32, CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return *value = 132, CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return *value = device + 1, CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return *value = 9, CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
      return *value = 1, CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR:
      return *value = can_wait, CUDA_SUCCESS;
    default:
      return *value = 0, CUDA_SUCCESS;
  }
}

// --- Contexts --------------------------------------------------------------------------------------------------------

STAND_IN_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  Primary& primary = primaries()[static_cast<std::size_t>(device)];
  const std::lock_guard lock(primary.mutex);
  ++primary.retained;
  *context = context_of(device);
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  Primary& primary = primaries()[static_cast<std::size_t>(device)];
  const std::lock_guard lock(primary.mutex);
  if (primary.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  --primary.retained;
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return cuDevicePrimaryCtxRelease_v2(device); }

STAND_IN_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = alive(device) ? 1 : 0;
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuCtxSetCurrent(CUcontext context) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  if (!contexts.empty()) contexts.pop_back();
  if (context == nullptr) return CUDA_SUCCESS;
  const int device = device_of(context);
  if (device < 0 || !alive(device)) return CUDA_ERROR_INVALID_CONTEXT;
  contexts.push_back(device);
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuCtxGetCurrent(CUcontext* context) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *context = contexts.empty() ? nullptr : context_of(contexts.back());
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuCtxPushCurrent_v2(CUcontext context) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  const int device = device_of(context);
  if (device < 0 || !alive(device)) return CUDA_ERROR_INVALID_CONTEXT;
  contexts.push_back(device);
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (const CUresult refused = enter(); refused != CUDA_SUCCESS) return refused;
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context != nullptr) *context = context_of(contexts.back());
  contexts.pop_back();
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuCtxGetDevice(CUdevice* device) {
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return enter(device);
}

STAND_IN_API CUresult cuCtxSynchronize(void) {
  return in_context([](int device) { return runtime().synchronize_device(device); });
}

STAND_IN_API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return in_context([&](int) {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return Status::kSuccess;
  });
}

STAND_IN_API int polyccl_stand_in_cuda_urgent_streams(int device) { return runtime().urgent_streams(device); }

// --- Memory ----------------------------------------------------------------------------------------------------------

STAND_IN_API CUresult cuMemAlloc_v2(CUdeviceptr* memory, std::size_t bytes) {
  return in_context([&](int device) {
    void* made = nullptr;
    if (memory == nullptr) return Status::kInvalidValue;
    const Status status = runtime().allocate(device, bytes, MemoryKind::kDevice, &made);
    *memory = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(made));
    return status;
  });
}

STAND_IN_API CUresult cuMemFree_v2(CUdeviceptr memory) {
  return in_context([&](int) { return runtime().release(pointer(memory), MemoryKind::kDevice); });
}

STAND_IN_API CUresult cuMemAllocAsync(CUdeviceptr* memory, std::size_t bytes, CUstream stream) {
  const CUresult refused = on_stream(stream, [](Stream&) { return Status::kSuccess; });
  return refused != CUDA_SUCCESS ? refused : cuMemAlloc_v2(memory, bytes);
}

STAND_IN_API CUresult cuMemFreeAsync(CUdeviceptr memory, CUstream stream) {
  return on_stream(stream, [&](Stream& s) { return runtime().release_on(s, pointer(memory)); });
}

STAND_IN_API CUresult cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) {
  return in_context([&](int device) { return runtime().allocate(device, bytes, MemoryKind::kHost, memory); });
}

STAND_IN_API CUresult cuMemAllocHost_v2(void** memory, std::size_t bytes) { return cuMemHostAlloc(memory, bytes, 0); }

STAND_IN_API CUresult cuMemFreeHost(void* memory) {
  return in_context([&](int) { return runtime().release(memory, MemoryKind::kHost); });
}

STAND_IN_API CUresult cuMemHostRegister_v2(void* memory, std::size_t bytes, unsigned) {
  return in_context([&](int device) { return runtime().register_host(memory, bytes, device); });
}

STAND_IN_API CUresult cuMemHostUnregister(void* memory) {
  return in_context([&](int) { return runtime().unregister_host(memory); });
}

STAND_IN_API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device_pointer, void* memory, unsigned) {
  return in_context([&](int) {
    Allocation found{};
    if (device_pointer == nullptr || !runtime().find(memory, &found)) return Status::kInvalidValue;
    *device_pointer = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(memory));
    return Status::kSuccess;
  });
}

STAND_IN_API CUresult cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  return in_context([&](int) {
    if (free == nullptr || total == nullptr) return Status::kInvalidValue;
    *free = kDeviceBytes / 2;
    *total = kDeviceBytes;
    return Status::kSuccess;
  });
}

STAND_IN_API CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  return in_context([&](int) { return pointer_attribute(data, attribute, address); });
}

// Unlike the single form, memory that CUDA does not know is no error: its attributes are zero.
STAND_IN_API CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** data,
                                             CUdeviceptr address) {
  return in_context([&](int) {
    if (attributes == nullptr || data == nullptr) return Status::kInvalidValue;
    for (unsigned i = 0; i < count; ++i) {
      if (pointer_attribute(data[i], attributes[i], address) == Status::kSuccess) continue;
      std::memset(data[i], 0, size_of(attributes[i]));
      if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) store(data[i], -2);
    }
    return Status::kSuccess;
  });
}

STAND_IN_API CUresult cuMemcpyAsync(CUdeviceptr output, CUdeviceptr input, std::size_t bytes, CUstream stream) {
  return copy(stream, pointer(output), pointer(input), bytes);
}

STAND_IN_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr output, const void* input, std::size_t bytes, CUstream stream) {
  return copy(stream, pointer(output), input, bytes);
}

STAND_IN_API CUresult cuMemcpyDtoHAsync_v2(void* output, CUdeviceptr input, std::size_t bytes, CUstream stream) {
  return copy(stream, output, pointer(input), bytes);
}

STAND_IN_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr output, CUdeviceptr input, std::size_t bytes, CUstream stream) {
  return copy(stream, pointer(output), pointer(input), bytes);
}

STAND_IN_API CUresult cuMemcpy(CUdeviceptr output, CUdeviceptr input, std::size_t bytes) {
  return copy_now(pointer(output), pointer(input), bytes);
}

STAND_IN_API CUresult cuMemcpyHtoD_v2(CUdeviceptr output, const void* input, std::size_t bytes) {
  return copy_now(pointer(output), input, bytes);
}

STAND_IN_API CUresult cuMemcpyDtoH_v2(void* output, CUdeviceptr input, std::size_t bytes) {
  return copy_now(output, pointer(input), bytes);
}

STAND_IN_API CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* copy, CUstream stream) {
  if (copy == nullptr || copy->srcMemoryType == CU_MEMORYTYPE_ARRAY || copy->dstMemoryType == CU_MEMORYTYPE_ARRAY) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto* input = static_cast<const std::byte*>(
      copy->srcMemoryType == CU_MEMORYTYPE_HOST ? copy->srcHost : pointer(copy->srcDevice));
  auto* output =
      static_cast<std::byte*>(copy->dstMemoryType == CU_MEMORYTYPE_HOST ? copy->dstHost : pointer(copy->dstDevice));
  const std::size_t input_pitch = copy->srcPitch == 0 ? copy->WidthInBytes : copy->srcPitch;
  const std::size_t output_pitch = copy->dstPitch == 0 ? copy->WidthInBytes : copy->dstPitch;
  input += copy->srcY * input_pitch + copy->srcXInBytes;
  output += copy->dstY * output_pitch + copy->dstXInBytes;
  return on_stream(stream, [&](Stream& s) {
    return runtime().copy_rows(s, output, output_pitch, input, input_pitch, copy->WidthInBytes, copy->Height);
  });
}

STAND_IN_API CUresult cuMemsetD8Async(CUdeviceptr output, unsigned char value, std::size_t count, CUstream stream) {
  return on_stream(stream, [&](Stream& s) { return runtime().fill(s, pointer(output), value, count); });
}

// --- Streams ---------------------------------------------------------------------------------------------------------

STAND_IN_API CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  return in_context(
      [&](int device) { return runtime().create_stream(device, flags, priority, reinterpret_cast<void**>(stream)); });
}

STAND_IN_API CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}

STAND_IN_API CUresult cuStreamDestroy_v2(CUstream stream) {
  return in_context([&](int) { return runtime().destroy_stream(stream); });
}

STAND_IN_API CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  return on_stream(stream, [&](Stream& s) {
    if (context == nullptr) return Status::kInvalidValue;
    *context = context_of(s.device);
    return Status::kSuccess;
  });
}

STAND_IN_API CUresult cuStreamGetFlags(CUstream stream, unsigned* flags) {
  return on_stream(stream, [&](Stream& s) {
    if (flags == nullptr) return Status::kInvalidValue;
    *flags = s.flags;
    return Status::kSuccess;
  });
}

STAND_IN_API CUresult cuStreamGetPriority(CUstream stream, int* priority) {
  return on_stream(stream, [&](Stream& s) {
    if (priority == nullptr) return Status::kInvalidValue;
    *priority = s.priority;
    return Status::kSuccess;
  });
}

STAND_IN_API CUresult cuStreamQuery(CUstream stream) {
  return on_stream(stream, [&](Stream& s) {
    if (runtime().capture_of(s) != stand_in::Capture::kNone) return Status::kCaptureUnsupported;
    return s.idle() ? Status::kSuccess : Status::kNotReady;
  });
}

STAND_IN_API CUresult cuStreamSynchronize(CUstream stream) {
  return on_stream(stream, [&](Stream& s) {
    if (runtime().capture_of(s) != stand_in::Capture::kNone) return Status::kCaptureUnsupported;
    s.mark()->wait();
    return Status::kSuccess;
  });
}

STAND_IN_API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  return on_stream(stream, [&](Stream& s) { return runtime().wait_event(s, event); });
}

STAND_IN_API CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  const unsigned compare = flags & ~static_cast<unsigned>(CU_STREAM_WAIT_VALUE_FLUSH);
  if (compare > 3) return CUDA_ERROR_INVALID_VALUE;
  return on_stream(stream, [&](Stream& s) {
    return runtime().wait_value(s, pointer(address), value, static_cast<stand_in::Compare>(compare), ~0u);
  });
}

STAND_IN_API CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  return on_stream(stream, [&](Stream& s) { return runtime().write_value(s, pointer(address), value); });
}

STAND_IN_API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return on_stream(stream, [&](Stream& s) { return runtime().enqueue(s, [function, data] { function(data); }); });
}

STAND_IN_API CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  return on_stream(stream,
                   [&](Stream& s) { return runtime().begin_capture(s, static_cast<stand_in::CaptureMode>(mode)); });
}

STAND_IN_API CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  if (graph != nullptr) *graph = nullptr;
  return on_stream(stream, [](Stream& s) { return runtime().end_capture(s); });
}

STAND_IN_API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return on_stream(stream, [&](Stream& s) {
    if (status == nullptr) return Status::kInvalidValue;
    *status = static_cast<CUstreamCaptureStatus>(runtime().capture_of(s));
    return Status::kSuccess;
  });
}

STAND_IN_API CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                                CUgraph* graph, const CUgraphNode** dependencies, std::size_t* count) {
  if (id != nullptr) *id = reinterpret_cast<std::uintptr_t>(stream);
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (count != nullptr) *count = 0;
  return cuStreamIsCapturing(stream, status);
}

STAND_IN_API CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                                CUgraph* graph, const CUgraphNode** dependencies,
                                                const CUgraphEdgeData** edges, std::size_t* count) {
  if (edges != nullptr) *edges = nullptr;
  return cuStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, count);
}

STAND_IN_API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto exchanged = static_cast<stand_in::CaptureMode>(*mode);
  Runtime::exchange_capture_mode(&exchanged);
  *mode = static_cast<CUstreamCaptureMode>(exchanged);
  return CUDA_SUCCESS;
}

// --- Events ----------------------------------------------------------------------------------------------------------

STAND_IN_API CUresult cuEventCreate(CUevent* event, unsigned flags) {
  const bool timed = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  return in_context([&](int device) { return runtime().create_event(device, timed, reinterpret_cast<void**>(event)); });
}

STAND_IN_API CUresult cuEventDestroy_v2(CUevent event) {
  return in_context([&](int) { return runtime().destroy_event(event); });
}

STAND_IN_API CUresult cuEventRecord(CUevent event, CUstream stream) {
  return on_stream(stream, [&](Stream& s) { return runtime().record(event, s); });
}

STAND_IN_API CUresult cuEventQuery(CUevent event) {
  return in_context([&](int) { return runtime().query_event(event); });
}

STAND_IN_API CUresult cuEventSynchronize(CUevent event) {
  return in_context([&](int) { return runtime().synchronize_event(event); });
}

STAND_IN_API CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  return in_context([&](int) { return runtime().elapsed(start, end, milliseconds); });
}

STAND_IN_API CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}
