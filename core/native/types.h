// Data types, reductions and kinds: what the core asks of the tables in spec.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "polyccl/backend.h"
#include "spec.h"

namespace polyccl {

using Dtype = uint32_t;      // POLYCCL_DTYPE_*
using Reduction = uint32_t;  // POLYCCL_REDUCTION_*
using Kind = uint32_t;       // POLYCCL_KIND_*

// Bytes of one element; 0 for an unknown type.
inline size_t dtype_size(Dtype dtype) { return polyccl_dtype_size(dtype); }

// "float32", ...; "dtype 77" is not a name: unknown types give "unknown".
std::string_view dtype_name(Dtype dtype);

// Every type, in the order of their numbers.
std::span<const Dtype> all_dtypes();

// "SUM", ...
std::string_view reduction_name(Reduction reduction);

// Whether PolyCCL's host kernels combine this type by this reduction. AVG and PREMUL_SUM count as reductions here: they are sums with
// a scaling. The fp8 types only move.
bool can_reduce(Dtype dtype, Reduction reduction);

std::span<const Operation> operations();

// The row of a kind; null for an unknown one.
const Operation* find_operation(Kind kind);

}  // namespace polyccl
