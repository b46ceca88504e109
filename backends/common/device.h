// The ABI's device table over the runtime.
#pragma once

#include <polyccl/backend.h>

namespace polyccl_ccl {

const polyccl_device& device_table();

}  // namespace polyccl_ccl
