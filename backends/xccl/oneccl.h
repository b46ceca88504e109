// oneCCL's C API (version 2, `oneapi/ccl.h`) as far as this plugin uses it: declarations of our own, so that the plugin
// is built without any package of Intel's. tests/unit/test_xccl_plugin.py compares them with the real header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyccl_xccl::oneccl {

enum Result : int {
  kSuccess = 0,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kPluginException = 11,
  kNotImplemented = 12
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

enum RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3 };

struct UniqueId {
  char data[4096];
};

using Comm = struct Opaque*;

// X(name, result, arguments) for every function, without its prefix `oneccl`. The last argument of an operation is a
// pointer to its SYCL queue; NULL for host memory.
#define POLYCCL_ONECCL_REQUIRED(X)                                                     \
  X(GetVersion, Result, (int*))                                                        \
  X(GetErrorString, const char*, (Result))                                             \
  X(GetUniqueId, Result, (UniqueId*))                                                  \
  X(CommInitRank, Result, (Comm*, size_t, UniqueId, int))                              \
  X(CommFinalize, Result, (Comm))                                                      \
  X(CommDestroy, Result, (Comm))                                                       \
  X(AllReduce, Result, (void*, void*, size_t, DataType, RedOp, Comm, void*))           \
  X(Reduce, Result, (const void*, void*, size_t, DataType, RedOp, int, Comm, void*))   \
  X(ReduceScatter, Result, (const void*, void*, size_t, DataType, RedOp, Comm, void*)) \
  X(Broadcast, Result, (const void*, void*, size_t, DataType, int, Comm, void*))       \
  X(AllGather, Result, (const void*, void*, size_t, DataType, Comm, void*))            \
  X(AllToAll, Result, (const void*, void*, size_t, DataType, Comm, void*))             \
  X(Send, Result, (const void*, size_t, DataType, int, Comm, void*))                   \
  X(Recv, Result, (void*, size_t, DataType, int, Comm, void*))                         \
  X(GroupStart, Result, ())                                                            \
  X(GroupEnd, Result, ())

// What older releases lack: PolyCCL plans these there.
#define POLYCCL_ONECCL_OPTIONAL(X)                                             \
  X(GetLastError, const char*, (Comm))                                         \
  X(SetDevice, Result, (uint32_t))                                             \
  X(Scatter, Result, (const void*, void*, size_t, DataType, int, Comm, void*)) \
  X(AllToAllV, Result, (const void*, const size_t*, void*, const size_t*, DataType, Comm, void*))

// The functions, looked up in the library. Those of the second list may be null.
struct Api {
#define POLYCCL_SLOT(name, result, arguments) result(*name) arguments = nullptr;
  POLYCCL_ONECCL_REQUIRED(POLYCCL_SLOT)
  POLYCCL_ONECCL_OPTIONAL(POLYCCL_SLOT)
#undef POLYCCL_SLOT
};

}  // namespace polyccl_xccl::oneccl
