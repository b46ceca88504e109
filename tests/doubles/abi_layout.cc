// Prints the numbers of the vendors' ABIs that the stand-ins use, one a line. Built twice, from our declarations and
// from the vendor's header (STAND_IN_VENDOR_HEADERS), it must print the same.
#include <cstddef>
#include <cstdio>

#define NUMBER(name) std::printf("%s %lld\n", #name, static_cast<long long>(name))
#define FIELD(type, name) std::printf("%s.%s %zu\n", #type, #name, offsetof(type, name))
#define SIZE(type) std::printf("sizeof %s %zu\n", #type, sizeof(type))

#if defined(ABI_NCCL)
#include "ccl_api.h"

int main() {
  SIZE(ncclUniqueId);
  SIZE(ncclConfig_t);
  FIELD(ncclConfig_t, magic);
  FIELD(ncclConfig_t, version);
  FIELD(ncclConfig_t, blocking);
  FIELD(ncclConfig_t, netName);
  FIELD(ncclConfig_t, splitShare);
  FIELD(ncclConfig_t, trafficClass);
  FIELD(ncclConfig_t, commName);
  FIELD(ncclConfig_t, nvlsCTAs);
  FIELD(ncclConfig_t, nvlinkCentricSched);
  FIELD(ncclConfig_t, graphUsageMode);
  FIELD(ncclConfig_t, maxP2pPeers);
  FIELD(ncclConfig_t, graphStreamOrdering);
  FIELD(ncclConfig_t, hostCftMode);
  FIELD(ncclConfig_t, nvlsHostMode);
  FIELD(ncclCollConfig_t, magic);
  FIELD(ncclCollConfig_t, version);
  NUMBER(NCCL_API_MAGIC);
  NUMBER(NCCL_CONFIG_UNDEF_INT);
  NUMBER(NCCL_SPLIT_NOCOLOR);
  NUMBER(NCCL_SHRINK_ABORT);
  NUMBER(ncclUnhandledCudaError);
  NUMBER(ncclSystemError);
  NUMBER(ncclInternalError);
  NUMBER(ncclInvalidArgument);
  NUMBER(ncclInvalidUsage);
  NUMBER(ncclRemoteError);
  NUMBER(ncclInProgress);
  NUMBER(ncclTimeout);
  NUMBER(ncclInt8);
  NUMBER(ncclUint8);
  NUMBER(ncclInt32);
  NUMBER(ncclUint32);
  NUMBER(ncclInt64);
  NUMBER(ncclUint64);
  NUMBER(ncclFloat16);
  NUMBER(ncclFloat32);
  NUMBER(ncclFloat64);
  NUMBER(ncclBfloat16);
  NUMBER(ncclFloat8e4m3);
  NUMBER(ncclFloat8e5m2);
  NUMBER(ncclSum);
  NUMBER(ncclProd);
  NUMBER(ncclMax);
  NUMBER(ncclMin);
  NUMBER(ncclAvg);
  NUMBER(ncclNumOps);
  NUMBER(ncclScalarDevice);
  NUMBER(ncclScalarHostImmediate);
}
#elif defined(ABI_CUDA)
#include "cuda_api.h"

int main() {
  SIZE(CUDA_MEMCPY2D);
  FIELD(CUDA_MEMCPY2D, srcMemoryType);
  FIELD(CUDA_MEMCPY2D, srcDevice);
  FIELD(CUDA_MEMCPY2D, srcPitch);
  FIELD(CUDA_MEMCPY2D, dstMemoryType);
  FIELD(CUDA_MEMCPY2D, dstHost);
  FIELD(CUDA_MEMCPY2D, dstDevice);
  FIELD(CUDA_MEMCPY2D, dstPitch);
  FIELD(CUDA_MEMCPY2D, WidthInBytes);
  FIELD(CUDA_MEMCPY2D, Height);
  SIZE(CUdeviceptr);
  SIZE(CUuuid);
  NUMBER(CUDA_ERROR_INVALID_VALUE);
  NUMBER(CUDA_ERROR_OUT_OF_MEMORY);
  NUMBER(CUDA_ERROR_NOT_INITIALIZED);
  NUMBER(CUDA_ERROR_NO_DEVICE);
  NUMBER(CUDA_ERROR_INVALID_DEVICE);
  NUMBER(CUDA_ERROR_INVALID_CONTEXT);
  NUMBER(CUDA_ERROR_INVALID_HANDLE);
  NUMBER(CUDA_ERROR_NOT_FOUND);
  NUMBER(CUDA_ERROR_NOT_READY);
  NUMBER(CUDA_ERROR_CONTEXT_IS_DESTROYED);
  NUMBER(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  NUMBER(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  NUMBER(CUDA_ERROR_NOT_PERMITTED);
  NUMBER(CUDA_ERROR_NOT_SUPPORTED);
  NUMBER(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  NUMBER(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  NUMBER(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
  NUMBER(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
  NUMBER(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
  NUMBER(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  NUMBER(CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1);
  NUMBER(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
  NUMBER(CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR);
  NUMBER(CU_POINTER_ATTRIBUTE_CONTEXT);
  NUMBER(CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
  NUMBER(CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
  NUMBER(CU_POINTER_ATTRIBUTE_HOST_POINTER);
  NUMBER(CU_POINTER_ATTRIBUTE_IS_MANAGED);
  NUMBER(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
  NUMBER(CU_POINTER_ATTRIBUTE_RANGE_SIZE);
  NUMBER(CU_MEMORYTYPE_HOST);
  NUMBER(CU_MEMORYTYPE_DEVICE);
  NUMBER(CU_STREAM_WAIT_VALUE_FLUSH);
  NUMBER(CU_EVENT_DISABLE_TIMING);
}
#elif defined(ABI_HIP)
#include "hip_api.h"

int main() {
  NUMBER(hipErrorInvalidValue);
  NUMBER(hipErrorNotInitialized);
  NUMBER(hipErrorInvalidDevice);
  NUMBER(hipErrorNotReady);
  NUMBER(hipErrorNotSupported);
  NUMBER(hipDeviceAttributeComputeCapabilityMajor);
  NUMBER(hipDeviceAttributeComputeCapabilityMinor);
  NUMBER(hipDeviceAttributeMultiprocessorCount);
  NUMBER(hipDeviceAttributePciBusId);
  NUMBER(hipDeviceAttributeUnifiedAddressing);
  NUMBER(hipDeviceAttributeWarpSize);
  NUMBER(hipDeviceAttributeCanUseStreamWaitValue);
  NUMBER(hipMemcpyDefault);
  NUMBER(hipEventDisableTiming);
}
#endif
