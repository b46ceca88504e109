// NCCL's C API as far as the stand-in has it, in declarations of our own; with STAND_IN_VENDOR_HEADERS the real nccl.h,
// which checks every signature. What exists depends on the flavour:
//   STAND_IN_VERSION  the version code, e.g. 23203
//   STAND_IN_HIP      RCCL: AMD's runtime below, RCCL's own calls
//   STAND_IN_FORK     NCCLX (or rcclx, with STAND_IN_HIP): the forks' calls, and their fields in ncclConfig_t
#ifndef STAND_IN_CCL_API_H_
#define STAND_IN_CCL_API_H_

#include <climits>
#include <cstddef>
#include <cstdint>

#ifdef STAND_IN_VENDOR_HEADERS
#include <nccl.h>
using Stream = cudaStream_t;
#else
using ncclComm_t = struct ncclComm*;
using ncclWindow_t = struct ncclWindow_vidmem*;
using Stream = void*;

struct ncclUniqueId {
  char internal[128];
};

enum ncclResult_t : unsigned {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclTimeout = 8,
};

enum ncclDataType_t : unsigned {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
};

enum ncclRedOp_t : unsigned { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4, ncclNumOps = 5 };
enum ncclScalarResidence_t : unsigned { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 };

enum : int { NCCL_CONFIG_UNDEF_INT = INT_MIN, NCCL_SPLIT_NOCOLOR = -1, NCCL_SHRINK_ABORT = 1 };
enum : unsigned { NCCL_API_MAGIC = 0xcafebeefu };

// Fields are only ever appended. NCCLX and rcclx append theirs where upstream went on with others.
struct ncclConfig_t {
  std::size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
  int cgaClusterSize;
  int minCTAs;
  int maxCTAs;
  const char* netName;
  int splitShare;
#if STAND_IN_VERSION >= 22600
  int trafficClass;
#endif
#if STAND_IN_VERSION >= 22700
  const char* commName;
  int collnetEnable;
  int CTAPolicy;
  int shrinkShare;
  int nvlsCTAs;
#endif
#if STAND_IN_VERSION >= 22800
  int nChannelsPerNetPeer;
  int nvlinkCentricSched;
#endif
#if STAND_IN_VERSION >= 22900
  int graphUsageMode;
  int numRmaCtx;
#endif
#if STAND_IN_VERSION >= 23003
  int maxP2pPeers;
#endif
#ifdef STAND_IN_FORK
  const char* commDesc;
#ifndef STAND_IN_HIP
  int* splitGroupRanks;
  int splitGroupSize;
  int fastInitMode;
  void* hints;
  void* ncclxConfig;
#endif
#else
#if STAND_IN_VERSION >= 23005
  int graphStreamOrdering;
#endif
#if STAND_IN_VERSION >= 23100
  int launchOrderImplicit;
  int numRmaSig;
  int rmaEagerInit;
  int hostCftMode;
#endif
#if STAND_IN_VERSION >= 23200
  int nvlsHostMode;
#endif
#endif
};

struct ncclCollConfig_t {
  std::size_t size;
  unsigned magic;
  unsigned version;
};
#endif

#endif  // STAND_IN_CCL_API_H_
