// Intel's devices. device_sycl.cc serves them, in a build with a SYCL compiler; device_none.cc is for all others.
#pragma once

#include <polyccl/backend.h>

namespace polyccl_xccl {

const polyccl_device* device_table();  // null: host memory alone
int device_count();

}  // namespace polyccl_xccl
