// What the opened library can do.
#include "capabilities.h"

#include "failure.h"
#include "nccl_api.h"
#include "runtime.h"

namespace polyccl_ccl {
namespace {

constexpr int kSinceAverage = 21000;  // and bfloat16
constexpr int kSinceFp8 = 22400;

bool is_fp8(uint32_t dtype) { return dtype >= POLYCCL_DTYPE_FLOAT8_E4M3FN && dtype <= POLYCCL_DTYPE_FLOAT8_E8M0FNU; }

// The library's fp8 type, by the format that every device of this process gives that number; -1 for none.
int fp8_type(uint32_t dtype) {
  if (vendor().version < kSinceFp8) return -1;
  const Runtime& table = runtime();
  const int devices = device_count();
  int type = -1;
  for (int device = 0; device < devices; ++device) {
    int major = 0, minor = 0;
    if (table.architecture == nullptr || table.architecture(device, &major, &minor) != kDone) return -1;
    const int one = family().fp8(dtype, major, minor);
    if (one < 0 || (device > 0 && one != type)) return -1;
    type = one;
  }
  return type;
}

// The library's number of a type in which it calculates as PolyCCL does; -1 for none.
int arithmetic_type(uint32_t dtype) {
  switch (dtype) {
    case POLYCCL_DTYPE_INT8:
      return kInt8;
    case POLYCCL_DTYPE_UINT8:
      return kUint8;
    case POLYCCL_DTYPE_INT32:
      return kInt32;
    case POLYCCL_DTYPE_UINT32:
      return kUint32;
    case POLYCCL_DTYPE_INT64:
      return kInt64;
    case POLYCCL_DTYPE_UINT64:
      return kUint64;
    case POLYCCL_DTYPE_FLOAT16:
      return kFloat16;
    case POLYCCL_DTYPE_FLOAT32:
      return kFloat32;
    case POLYCCL_DTYPE_FLOAT64:
      return kFloat64;
    case POLYCCL_DTYPE_BFLOAT16:
      return vendor().version >= kSinceAverage ? kBfloat16 : -1;
    default:
      return is_fp8(dtype) ? fp8_type(dtype) : -1;
  }
}

// Values of bool are 0 and 1, on which "or" is the larger and "and" the smaller.
std::optional<Reduction> bool_reduction(uint32_t reduction) {
  switch (reduction) {
    case POLYCCL_REDUCTION_SUM:
    case POLYCCL_REDUCTION_MAX:
    case POLYCCL_REDUCTION_BOR:
      return Reduction{kUint8, kMax, 1};
    case POLYCCL_REDUCTION_PRODUCT:
    case POLYCCL_REDUCTION_MIN:
    case POLYCCL_REDUCTION_BAND:
      return Reduction{kUint8, kMin, 1};
    default:
      return std::nullopt;
  }
}

// A sum of complex numbers is that of their parts.
std::optional<Reduction> complex_reduction(uint32_t dtype, uint32_t reduction) {
  if (reduction != POLYCCL_REDUCTION_SUM) return std::nullopt;
  return Reduction{dtype == POLYCCL_DTYPE_COMPLEX64 ? kFloat32 : kFloat64, kSum, 2};
}

bool is_float(int type) { return type >= kFloat16 && type <= kBfloat16; }

std::optional<Reduction> number_reduction(uint32_t dtype, uint32_t reduction) {
  const int type = arithmetic_type(dtype);
  if (type < 0) return std::nullopt;
  switch (reduction) {
    case POLYCCL_REDUCTION_SUM:
      return Reduction{type, kSum, 1};
    case POLYCCL_REDUCTION_PRODUCT:
      return Reduction{type, kProd, 1};
    case POLYCCL_REDUCTION_MAX:
      return Reduction{type, kMax, 1};
    case POLYCCL_REDUCTION_MIN:
      return Reduction{type, kMin, 1};
    case POLYCCL_REDUCTION_AVG:  // in fp8, 1/N itself would be rounded
      if (vendor().version < kSinceAverage || is_fp8(dtype)) return std::nullopt;
      return Reduction{type, kAvg, 1};
    case POLYCCL_REDUCTION_PREMUL_SUM:
      if (vendor().api.create_premul_sum == nullptr || vendor().api.destroy_op == nullptr || !is_float(type)) {
        return std::nullopt;
      }
      return Reduction{type, kSum, 1};
    default:
      return std::nullopt;
  }
}

// Whether a reduction gives the same bits in whatever order its operands come.
bool any_order(uint32_t dtype, uint32_t reduction) {
  const bool whole = dtype <= POLYCCL_DTYPE_UINT64;
  return whole || reduction == POLYCCL_REDUCTION_MIN || reduction == POLYCCL_REDUCTION_MAX;
}

uint32_t can(uint32_t kind, uint32_t dtype, uint32_t reduction) {
  constexpr uint32_t kYes = POLYCCL_CAN | POLYCCL_CAN_GROUP;
  constexpr uint32_t kSame = POLYCCL_CAN_EQUAL_BITS;
  vendor();  // nothing is native without it
  switch (kind) {
    case POLYCCL_KIND_ALL_REDUCE:
      if (!reduction_of(dtype, reduction)) return 0;
      return family().equal_bits || any_order(dtype, reduction) ? kYes | kSame : kYes;
    case POLYCCL_KIND_REDUCE:
    case POLYCCL_KIND_REDUCE_SCATTER:
    case POLYCCL_KIND_REDUCE_SCATTER_V:
      return reduction_of(dtype, reduction) ? kYes | kSame : 0;
    default:
      return kYes | kSame;
  }
}

}  // namespace

std::optional<Reduction> reduction_of(uint32_t dtype, uint32_t reduction) {
  if (dtype == POLYCCL_DTYPE_BOOL) return bool_reduction(reduction);
  if (dtype == POLYCCL_DTYPE_COMPLEX64 || dtype == POLYCCL_DTYPE_COMPLEX128) return complex_reduction(dtype, reduction);
  return number_reduction(dtype, reduction);
}

bool has_peer(uint32_t kind) {
  switch (kind) {
    case POLYCCL_KIND_SEND:
    case POLYCCL_KIND_RECV:
    case POLYCCL_KIND_BROADCAST:
    case POLYCCL_KIND_REDUCE:
    case POLYCCL_KIND_SCATTER:
    case POLYCCL_KIND_GATHER:
      return true;
    default:
      return false;
  }
}

bool reduces(uint32_t kind) {
  return kind == POLYCCL_KIND_ALL_REDUCE || kind == POLYCCL_KIND_REDUCE || kind == POLYCCL_KIND_REDUCE_SCATTER ||
         kind == POLYCCL_KIND_REDUCE_SCATTER_V;
}

uint32_t supports(uint32_t kind, uint32_t dtype, uint32_t reduction, uint32_t memory) noexcept {
  if (memory != POLYCCL_MEMORY_DEVICE || kind < POLYCCL_KIND_SEND || kind > POLYCCL_KIND_BARRIER) return 0;
  if (kind != POLYCCL_KIND_BARRIER && polyccl_dtype_size(dtype) == 0) return 0;
  uint32_t bits = 0;
  const polyccl_result result = guarded([&] { bits = can(kind, dtype, reduction); });
  return result == POLYCCL_OK ? bits : 0;
}

}  // namespace polyccl_ccl
