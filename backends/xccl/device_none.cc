// A build without a SYCL compiler: host memory alone.
#include "device.h"

namespace polyccl_xccl {

const polyccl_device* device_table() { return nullptr; }
int device_count() { return 0; }

}  // namespace polyccl_xccl
