// The C API that NCCL, NCCLX, RCCL and RCCLX share, in declarations of our own: no vendor's header is needed to build.
// Numbers and layouts are those of nccl.h, which a test compares them with where it can be had.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <string>

#include "family.h"
#include "library.h"

namespace polyccl_ccl {

using Handle = void*;  // ncclComm_t

enum : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8
};

enum : int {
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
  kFloat8E4m3 = 10,
  kFloat8E5m2 = 11
};

enum : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

// Where ncclRedOpCreatePreMulSum() finds its factor.
enum : int { kScalarDevice = 0, kScalarHostImmediate = 1 };

struct UniqueId {
  char bytes[128];
};

// ncclConfig_t as far as all flavours agree on it. NCCL and NCCLX give byte 96 and on different meanings, RCCLX and
// NCCL byte 80 and on, so that no more than this is ever sent.
struct Config {
  static constexpr int kUndefined = INT_MIN;
  size_t size = 0;
  unsigned magic = 0xcafebeef;
  unsigned version = 0;
  int blocking = kUndefined;               // since 2.14
  int cga_cluster_size = kUndefined;       // 2.17
  int min_ctas = kUndefined;               //
  int max_ctas = kUndefined;               //
  const char* net_name = nullptr;          //
  int split_share = kUndefined;            // 2.18
  int traffic_class = kUndefined;          // 2.26
  const char* comm_name = nullptr;         // 2.27
  int collnet_enable = kUndefined;         //
  int cta_policy = kUndefined;             //
  int shrink_share = kUndefined;           //
  int nvls_ctas = kUndefined;              //
  int channels_per_net_peer = kUndefined;  // 2.28
  int nvlink_centric_sched = kUndefined;   //

  // A non-blocking creation, in the part of the struct that a library of this version knows.
  static Config for_version(int version, const char* name);
};
static_assert(offsetof(Config, blocking) == 16 && offsetof(Config, net_name) == 32);
static_assert(offsetof(Config, comm_name) == 48 && offsetof(Config, channels_per_net_peer) == 72);
static_assert(sizeof(Config) == 80 && sizeof(UniqueId) == 128);

using Collective = int (*)(const void*, void*, size_t, int type, Handle, void* stream);
using Rooted = int (*)(const void*, void*, size_t, int type, int root, Handle, void* stream);

// The functions that a library has. All but those marked optional are there.
struct Api {
  int (*get_version)(int*) = nullptr;
  int (*get_unique_id)(UniqueId*) = nullptr;
  const char* (*get_error_string)(int) = nullptr;
  const char* (*get_last_error)(Handle) = nullptr;  // optional
  int (*comm_init_rank)(Handle*, int, UniqueId, int) = nullptr;
  int (*comm_init_rank_config)(Handle*, int, UniqueId, int, Config*) = nullptr;  // optional
  int (*comm_finalize)(Handle) = nullptr;                                        // optional
  int (*comm_destroy)(Handle) = nullptr;
  int (*comm_abort)(Handle) = nullptr;
  int (*comm_get_async_error)(Handle, int*) = nullptr;
  int (*mem_alloc)(void**, size_t) = nullptr;  // optional
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*all_reduce)(const void*, void*, size_t, int type, int op, Handle, void* stream) = nullptr;
  int (*reduce_scatter)(const void*, void*, size_t, int type, int op, Handle, void* stream) = nullptr;
  int (*reduce)(const void*, void*, size_t, int type, int op, int root, Handle, void* stream) = nullptr;
  Rooted broadcast = nullptr;
  Collective all_gather = nullptr;
  int (*send)(const void*, size_t, int type, int peer, Handle, void* stream) = nullptr;
  int (*recv)(void*, size_t, int type, int peer, Handle, void* stream) = nullptr;
  Collective all_to_all = nullptr;  // optional, as are the rest
  Rooted gather = nullptr;
  Rooted scatter = nullptr;
  int (*create_premul_sum)(int* op, void* factor, int type, int residence, Handle) = nullptr;
  int (*destroy_op)(int op, Handle) = nullptr;
};

// An open library of this family.
struct Vendor {
  Library library;
  Api api;
  int version = 0;  // as the library counts: 2.32.3 is 23203
  Flavour flavour = Flavour::kNccl;
  bool stand_in = false;

  std::string version_text() const;                  // "2.32.3"
  std::string words(int result, Handle comm) const;  // the library's own, for a result
};

// The library, opened at the first call. Throws a Failure (UNAVAILABLE).
const Vendor& vendor();

}  // namespace polyccl_ccl
