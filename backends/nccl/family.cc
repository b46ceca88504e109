// NCCL and NCCLX over the CUDA driver: names, numbers and the calls that only the driver has in this form.
#include "family.h"

#include <polyccl/backend.h>

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "nccl_api.h"
#include "runtime.h"

namespace polyccl_ccl {
namespace {

#ifdef POLYCCL_NCCLX
constexpr Flavour kFlavour = Flavour::kNcclx;
constexpr const char* kBackend = "ncclx";
constexpr const char* kWhat = "NCCLX (libnccl.so.2)";
constexpr const char* kVariable = "POLYCCL_NCCLX_LIBRARY";
constexpr std::array<const char*, 0> kPackaged{};
constexpr const char* kInstall = "Build it from Meta's torchcomms";
#else
constexpr Flavour kFlavour = Flavour::kNccl;
constexpr const char* kBackend = "nccl";
constexpr const char* kWhat = "NCCL (libnccl.so.2)";
constexpr const char* kVariable = "POLYCCL_NCCL_LIBRARY";
constexpr std::array kPackaged{"nvidia/nccl/lib/libnccl.so.2"};
constexpr const char* kInstall = "Install it (pip install nvidia-nccl-cu12, or -cu13 for CUDA 13)";
#endif
constexpr std::array kLibraries{"libnccl.so.2"};
constexpr std::array kDrivers{"libcuda.so.1"};

using Context = void*;
using DevicePointer = unsigned long long;

// CUDA_MEMCPY2D, as version 2 of the driver's calls has it.
struct Copy2d {
  struct Side {
    size_t x = 0, y = 0;
    unsigned memory = 4;  // unified: the driver finds out where an address lies
    const void* host = nullptr;
    DevicePointer device = 0;
    void* array = nullptr;
    size_t pitch = 0;
  };
  Side from, to;
  size_t width = 0, height = 0;
};
static_assert(sizeof(Copy2d) == 128);

constexpr int kLargestDevice = 64;
constexpr int kMajorAttribute = 75, kMinorAttribute = 76;
constexpr unsigned kGreaterOrEqual = 0;

struct Driver {
  Status (*init)(unsigned) = nullptr;
  Status (*device_count)(int*) = nullptr;
  Status (*device_get)(int*, int) = nullptr;
  Status (*attribute)(int*, int, int) = nullptr;
  Status (*retain)(Context*, int) = nullptr;
  Status (*push)(Context) = nullptr;
  Status (*pop)(Context*) = nullptr;
  Status (*current)(Context*) = nullptr;
  Status (*stream_context)(void*, Context*) = nullptr;
  Status (*copy)(DevicePointer, DevicePointer, size_t, void*) = nullptr;
  Status (*copy_2d)(const Copy2d*, void*) = nullptr;
  Status (*wait)(void*, DevicePointer, uint32_t, unsigned) = nullptr;
  Status (*write)(void*, DevicePointer, uint32_t, unsigned) = nullptr;
  Status (*error_name)(Status, const char**) = nullptr;
  Status (*error_string)(Status, const char**) = nullptr;
};
Driver driver;
std::atomic<int> home{0};  // whose context serves calls that name no device: the last one that was named

DevicePointer address(const volatile void* memory) { return reinterpret_cast<uintptr_t>(memory); }

// The primary context of a device, which torch and NCCL use too. Retained once, for as long as the process lives.
Status primary(int device, Context* context) {
  static std::mutex mutex;
  static std::array<Context, kLargestDevice> retained{};
  if (device < 0 || device >= kLargestDevice) return kInvalidValue;
  const std::lock_guard lock(mutex);
  Context& known = retained[static_cast<size_t>(device)];
  int handle = 0;
  Status status = known != nullptr ? kDone : driver.init(0);
  if (status == kDone && known == nullptr) status = driver.device_get(&handle, device);
  if (status == kDone && known == nullptr) status = driver.retain(&known, handle);
  *context = known;
  return status;
}

// Push a context; `before` counts what leave() has to pop.
Status push(Context context, intptr_t* before) {
  const Status status = driver.push(context);
  if (status == kDone) ++*before;
  return status;
}

Status enter(int device, intptr_t* before) {
  Context context = nullptr;
  *before = 0;
  if (const Status status = primary(device, &context); status != kDone) return status;
  home.store(device, std::memory_order_relaxed);
  return push(context, before);
}

void leave(intptr_t before) {
  Context popped = nullptr;
  while (before-- > 0) (void)driver.pop(&popped);
}

// Handles 0, 1 and 2 are the default streams of whatever context is current. Asking for a stream's needs one as well.
Status enter_for(void* stream, intptr_t* before) {
  *before = 0;
  Context now = nullptr, wanted = nullptr;
  Status status = driver.current(&now);
  if (status == kDone && now == nullptr) status = enter(home, before);
  if (status != kDone || reinterpret_cast<uintptr_t>(stream) <= 2) return status;
  status = driver.stream_context(stream, &wanted);
  if (status == kDone && wanted != now) status = push(wanted, before);
  if (status != kDone) leave(std::exchange(*before, 0));
  return status;
}

Status count(int* devices) {
  const Status status = driver.init(0);
  return status == kDone ? driver.device_count(devices) : status;
}

Status architecture(int device, int* major, int* minor) {
  int handle = 0;
  Status status = driver.device_get(&handle, device);
  if (status == kDone) status = driver.attribute(major, kMajorAttribute, handle);
  return status == kDone ? driver.attribute(minor, kMinorAttribute, handle) : status;
}

Status copy(void* stream, void* output, size_t output_stride, const void* input, size_t input_stride, size_t bytes,
            size_t rows) {
  if (rows == 1) return driver.copy(address(output), address(input), bytes, stream);
  Copy2d rectangle;
  rectangle.from.device = address(input);
  rectangle.from.pitch = input_stride;
  rectangle.to.device = address(output);
  rectangle.to.pitch = output_stride;
  rectangle.width = bytes;
  rectangle.height = rows;
  return driver.copy_2d(&rectangle, stream);
}

Status wait_value(void* stream, const volatile uint32_t* flag, uint32_t value) {
  return driver.wait(stream, address(flag), value, kGreaterOrEqual);
}

Status write_value(void* stream, volatile uint32_t* flag, uint32_t value) {
  return driver.write(stream, address(flag), value, 0);
}

std::string text(Status status) {
  const char* name = nullptr;
  const char* words = nullptr;
  (void)driver.error_name(status, &name);
  (void)driver.error_string(status, &words);
  return std::string(name != nullptr ? name : "CUDA error " + std::to_string(status)) +
         (words != nullptr ? std::string(" (") + words + ")" : "");
}

void fill(Runtime& runtime, Symbols& symbols) {
  symbols.require("cuInit", driver.init);
  symbols.require("cuDeviceGetCount", driver.device_count);
  symbols.require("cuDeviceGet", driver.device_get);
  symbols.require("cuDeviceGetAttribute", driver.attribute);
  symbols.require("cuDevicePrimaryCtxRetain", driver.retain);
  symbols.require("cuCtxPushCurrent_v2", driver.push);
  symbols.require("cuCtxPopCurrent_v2", driver.pop);
  symbols.require("cuCtxGetCurrent", driver.current);
  symbols.require("cuStreamGetCtx", driver.stream_context);
  symbols.require("cuMemcpyAsync", driver.copy);
  symbols.require("cuMemcpy2DAsync_v2", driver.copy_2d);
  symbols.require("cuGetErrorName", driver.error_name);
  symbols.require("cuGetErrorString", driver.error_string);
  symbols.require("cuMemAlloc_v2", runtime.alloc);
  symbols.require("cuMemFree_v2", runtime.free);
  symbols.require("cuMemHostAlloc", runtime.host_alloc);
  symbols.require("cuMemFreeHost", runtime.host_free);
  symbols.require("cuCtxGetStreamPriorityRange", runtime.priorities);
  symbols.require("cuStreamCreateWithPriority", runtime.stream_create);
  symbols.require("cuStreamDestroy_v2", runtime.stream_destroy);
  symbols.require("cuStreamWaitEvent", runtime.stream_wait_event);
  symbols.require("cuEventCreate", runtime.event_create);
  symbols.require("cuEventDestroy_v2", runtime.event_destroy);
  symbols.require("cuEventRecord", runtime.event_record);
  symbols.require("cuEventQuery", runtime.event_query);
  symbols.optional("cuStreamIsCapturing", runtime.stream_is_capturing);
  symbols.optional("cuThreadExchangeStreamCaptureMode", runtime.exchange_capture_mode);
  if (symbols.optional("cuStreamWaitValue32_v2", driver.wait)) runtime.wait_value = wait_value;
  if (symbols.optional("cuStreamWriteValue32_v2", driver.write)) runtime.write_value = write_value;
  runtime.count = count;
  runtime.architecture = architecture;
  runtime.copy = copy;
  runtime.enter = enter;
  runtime.enter_for = enter_for;
  runtime.leave = leave;
  runtime.text = text;
}

// NVIDIA's devices know the OCP formats, and reduce in them from compute capability 9.0 on.
int fp8(uint32_t dtype, int major, int) {
  if (major < 9) return -1;
  if (dtype == POLYCCL_DTYPE_FLOAT8_E4M3FN) return kFloat8E4m3;
  return dtype == POLYCCL_DTYPE_FLOAT8_E5M2 ? kFloat8E5m2 : -1;
}

const Family nccl_family = {
    .backend = kBackend,
    .flavour = kFlavour,
    .library = {kWhat, kVariable, "libnccl", kLibraries, kPackaged, kInstall},
    .runtime = {"the CUDA driver", "POLYCCL_CUDA_LIBRARY", "libcuda", kDrivers, {}, "Install NVIDIA's driver"},
    .equal_bits = kFlavour == Flavour::kNccl,  // NCCLX has algorithms in which every rank adds in an order of its own
    .fill = fill,
    .fp8 = fp8,
    .advice =
        "It needs an NVIDIA GPU with a driver for the CUDA version that the library was built for: see whether "
        "`nvidia-smi` lists the GPU in this very machine or container, and update the driver if its version is named; "
        "without one use the backend gloo or host",
};

}  // namespace

const Family& family() { return nccl_family; }

}  // namespace polyccl_ccl
