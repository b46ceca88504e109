// What hip.cc needs of AMD's hip_runtime_api.h, in declarations of our own; with STAND_IN_VENDOR_HEADERS the real
// header, which checks every signature of the stand-in. Names and values are the API's; the two structs whose layout
// changed with HIP 6 have names of our own.
#ifndef STAND_IN_HIP_API_H_
#define STAND_IN_HIP_API_H_

#include <cstddef>
#include <cstdint>

#ifdef STAND_IN_VENDOR_HEADERS
#include <hip/hip_runtime_api.h>
#else
using hipDevice_t = int;
using hipDeviceptr_t = void*;
using hipStream_t = struct ihipStream_t*;
using hipEvent_t = struct ihipEvent_t*;
using hipGraph_t = struct ihipGraph*;
using hipGraphNode_t = struct hipGraphNode*;
using hipHostFn_t = void (*)(void* data);
struct hipPointerAttribute_t;

enum hipError_t : unsigned {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorNotInitialized = 3,
  hipErrorInvalidDevice = 101,
  hipErrorNotReady = 600,
  hipErrorNotSupported = 801,
};
enum hipDeviceAttribute_t : unsigned {
  hipDeviceAttributeComputeCapabilityMajor = 23,
  hipDeviceAttributeComputeCapabilityMinor = 61,
  hipDeviceAttributeMultiprocessorCount = 63,
  hipDeviceAttributePciBusId = 67,
  hipDeviceAttributeUnifiedAddressing = 85,
  hipDeviceAttributeWarpSize = 87,
  hipDeviceAttributeCanUseStreamWaitValue = 10013,
};
enum hipMemcpyKind : unsigned { hipMemcpyDefault = 4 };
enum hipStreamCaptureStatus : unsigned { hipStreamCaptureStatusNone = 0 };
enum hipStreamCaptureMode : unsigned { hipStreamCaptureModeGlobal = 0 };
enum { hipEventDisableTiming = 2 };
#endif

// hipPointerAttribute_t since HIP 6.
struct PointerAttributes {
  unsigned type;  // 0 unknown to HIP, 1 host, 2 device
  int device;
  void* device_pointer;
  void* host_pointer;
  int is_managed;
  unsigned flags;
};

// hipDeviceProp_tR0600, the layout since HIP 6, as far as the stand-in fills it.
struct DeviceProperties {
  char name[256];
  unsigned char uuid[16];
  char luid[8];
  unsigned luid_mask;
  std::size_t total_memory;
  std::size_t shared_memory_per_block;
  int registers_per_block;
  int warp_size;
  std::size_t pitch;
  int max_threads_per_block;
  int max_threads[3];
  int max_grid[3];
  int clock_rate;
  std::size_t constant_memory;
  int major;
  int minor;
  char unfilled[1160 - 368];
  char arch_name[256];  // gcnArchName
  char rest[1472 - 1160 - 256];
};
static_assert(offsetof(DeviceProperties, major) == 360 && offsetof(DeviceProperties, arch_name) == 1160);
static_assert(sizeof(DeviceProperties) == 1472);

#endif  // STAND_IN_HIP_API_H_
