// The operations: what the plugin does for each kind.
#pragma once

#include <polyccl/backend.h>

#include <cstdint>

#include "comm.h"

namespace polyccl_gloo {

// Bits of POLYCCL_CAN_*. `host` reduces.
uint32_t supports(const polyccl_host* host, uint32_t kind, uint32_t dtype, uint32_t reduction, uint32_t memory);

// Run one operation to its end; a group of several is refused. Throws a Refusal before anything is sent,
// or what ends the communicator.
void run_operations(Comm& comm, const polyccl_host* host, const polyccl_op* const* ops, uint32_t n);

}  // namespace polyccl_gloo
