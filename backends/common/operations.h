// The operations: which calls of the library each kind is.
#pragma once

#include <polyccl/backend.h>

#include <cstdint>

#include "comm.h"

namespace polyccl_ccl {

// Enqueue operations on their streams; several are one fused group. Throws a Failure.
void issue(Comm& comm, const polyccl_op* const* ops, uint32_t n);

}  // namespace polyccl_ccl
