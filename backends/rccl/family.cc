// RCCL and RCCLX over HIP: names, numbers and the calls that only HIP has in this form.
#include "family.h"

#include <polyccl/backend.h>

#include <array>

#include "nccl_api.h"
#include "runtime.h"

namespace polyccl_ccl {
namespace {

struct Names {
  Flavour flavour;
  const char *backend, *what, *variable, *install;
};
#ifdef POLYCCL_RCCLX
constexpr Names kNames{Flavour::kRcclx, "rcclx", "RCCLX (librccl.so.1)", "POLYCCL_RCCLX_LIBRARY",
                       "Build it from Meta's torchcomms"};
#else
constexpr Names kNames{Flavour::kRccl, "rccl", "RCCL (librccl.so.1)", "POLYCCL_RCCL_LIBRARY", "Install ROCm"};
#endif
// Wheels of torch for ROCm bring both libraries along.
constexpr std::array kWheelRccl{"torch/lib/librccl.so", "torch/lib/librccl.so.1"};
constexpr std::array kWheelHip{"torch/lib/libamdhip64.so"};
constexpr std::array kRcclNames{"librccl.so.1", "librccl.so", "/opt/rocm/lib/librccl.so.1"};
constexpr std::array kHipNames{"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so",
                               "/opt/rocm/lib/libamdhip64.so"};

constexpr int kAnyDirection = 4;  // hipMemcpyDefault
constexpr unsigned kAtLeast = 0;  // hipStreamWaitValueGte
constexpr uint32_t kAllBits = 0xffffffff;
constexpr intptr_t kUnchanged = -1;

// HIP's calls for a device act on the one that a thread has chosen.
struct {
  Status (*count)(int*) = nullptr;
  Status (*set_device)(int) = nullptr;
  Status (*get_device)(int*) = nullptr;
  Status (*capability)(int*, int*, int) = nullptr;
  Status (*device_of_stream)(void*, int*) = nullptr;
  Status (*memcpy_async)(void*, const void*, size_t, int, void*) = nullptr;
  Status (*memcpy_2d)(void*, size_t, const void*, size_t, size_t, size_t, int, void*) = nullptr;
  Status (*wait_value)(void*, void*, uint32_t, unsigned, uint32_t) = nullptr;
  Status (*write_value)(void*, void*, uint32_t, unsigned) = nullptr;
  const char* (*name_of)(Status) = nullptr;
  const char* (*words_of)(Status) = nullptr;
} hip;

Status choose(int device, intptr_t* before) {
  int now = 0;
  *before = kUnchanged;
  Status status = hip.get_device(&now);
  if (status != kDone || now == device) return status;
  status = hip.set_device(device);
  if (status == kDone) *before = now;
  return status;
}

// Where HIP does not tell a stream's device, the thread's stays: its calls take streams of other devices too.
Status choose_for_stream(void* stream, intptr_t* before) {
  int device = 0;
  *before = kUnchanged;
  if (reinterpret_cast<uintptr_t>(stream) <= 2 || hip.device_of_stream == nullptr) return kDone;
  return hip.device_of_stream(stream, &device) == kDone ? choose(device, before) : kDone;
}

void restore(intptr_t before) {
  if (before != kUnchanged) (void)hip.set_device(static_cast<int>(before));
}

Status move_rows(void* stream, void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                 size_t height) {
  if (height == 1) return hip.memcpy_async(to, from, width, kAnyDirection, stream);
  return hip.memcpy_2d(to, to_pitch, from, from_pitch, width, height, kAnyDirection, stream);
}

Status wait_for(void* stream, const volatile uint32_t* flag, uint32_t value) {
  return hip.wait_value(stream, const_cast<uint32_t*>(flag), value, kAtLeast, kAllBits);
}

Status tell(void* stream, volatile uint32_t* flag, uint32_t value) {
  return hip.write_value(stream, const_cast<uint32_t*>(flag), value, 0);
}

std::string describe(Status status) {
  const char* words = hip.words_of(status);
  const char* name = hip.name_of(status);
  return std::string(name != nullptr ? name : "HIP error") + " (" + std::to_string(status) +
         (words != nullptr ? std::string(": ") + words : "") + ")";
}

void find_hip(Runtime& table, Symbols& from) {
  from.require("hipSetDevice", hip.set_device);
  from.require("hipGetDevice", hip.get_device);
  from.require("hipGetDeviceCount", table.count);
  from.require("hipGetErrorName", hip.name_of);
  from.require("hipGetErrorString", hip.words_of);
  from.optional("hipStreamGetDevice", hip.device_of_stream);
  if (from.optional("hipDeviceComputeCapability", hip.capability)) {
    table.architecture = [](int device, int* major, int* minor) { return hip.capability(major, minor, device); };
  }
  // memory
  from.require("hipMalloc", table.alloc);
  from.require("hipFree", table.free);
  from.require("hipHostMalloc", table.host_alloc);
  from.require("hipHostFree", table.host_free);
  from.require("hipMemcpyAsync", hip.memcpy_async);
  from.require("hipMemcpy2DAsync", hip.memcpy_2d);
  // streams
  from.require("hipDeviceGetStreamPriorityRange", table.priorities);
  from.require("hipStreamCreateWithPriority", table.stream_create);
  from.require("hipStreamDestroy", table.stream_destroy);
  from.require("hipStreamWaitEvent", table.stream_wait_event);
  from.optional("hipStreamIsCapturing", table.stream_is_capturing);
  from.optional("hipThreadExchangeStreamCaptureMode", table.exchange_capture_mode);
  if (from.optional("hipStreamWaitValue32", hip.wait_value)) table.wait_value = wait_for;
  if (from.optional("hipStreamWriteValue32", hip.write_value)) table.write_value = tell;
  // events
  from.require("hipEventCreateWithFlags", table.event_create);
  from.require("hipEventDestroy", table.event_destroy);
  from.require("hipEventRecord", table.event_record);
  from.require("hipEventQuery", table.event_query);

  table.copy = move_rows;
  table.enter = choose;
  table.enter_for = choose_for_stream;
  table.leave = restore;
  table.text = describe;
}

// RCCL gives two numbers to fp8; gfx940 to gfx942 (capability 9.4) read them as the FNUZ formats, all others as OCP's.
int fp8_number(uint32_t dtype, int major, int minor) {
  const bool fnuz = major == 9 && minor == 4;
  switch (dtype) {
    case POLYCCL_DTYPE_FLOAT8_E4M3FN:
      return fnuz ? -1 : kFloat8E4m3;
    case POLYCCL_DTYPE_FLOAT8_E5M2:
      return fnuz ? -1 : kFloat8E5m2;
    case POLYCCL_DTYPE_FLOAT8_E4M3FNUZ:
      return fnuz ? kFloat8E4m3 : -1;
    case POLYCCL_DTYPE_FLOAT8_E5M2FNUZ:
      return fnuz ? kFloat8E5m2 : -1;
    default:
      return -1;
  }
}

const Family rccl_family = {
    .backend = kNames.backend,
    .flavour = kNames.flavour,
    .library = {kNames.what, kNames.variable, "librccl", kRcclNames, kWheelRccl, kNames.install},
    .runtime = {"the HIP runtime", "POLYCCL_HIP_LIBRARY", "libamdhip64", kHipNames, kWheelHip, "Install ROCm"},
    .equal_bits = false,  // its MSCCL algorithms let every rank add in an order of its own
    .fill = find_hip,
    .fp8 = fp8_number,
    .advice =
        "It needs an AMD GPU with its kernel driver and ROCm's HIP runtime: see whether `rocminfo` lists the GPU in "
        "this "
        "very machine or container and whether this user may open /dev/kfd and /dev/dri; without one use the backend "
        "gloo or host",
};

}  // namespace

const Family& family() { return rccl_family; }

}  // namespace polyccl_ccl
