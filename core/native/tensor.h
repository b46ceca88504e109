// Intake of tensors: what a Python object's memory is, read through DLPack's C exchange API where the type has it
// (torch), else through __dlpack__ (NumPy and others). Nothing here links torch.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "error.h"
#include "types.h"

namespace polyccl {

namespace nb = nanobind;

// One tensor's memory. Holds references to the Python objects that keep it where it is, so it must be destroyed with the
// GIL.
struct Tensor {
  void* data = nullptr;
  uint64_t count = 0;  // elements
  Dtype dtype = 0;
  int32_t device_type = 1;  // DLDeviceType: kDLCPU 1, kDLCUDA 2, kDLROCM 10, kDLOneAPI 14, ...
  int32_t device_index = 0;
  int64_t rows = 1;        // size of dimension 0; 1 for a 0-d tensor
  void* stream = nullptr;  // current stream of the device, where the exchange API gives it
  // Gives the stream that is current when it is called; null where the exchange API does not say.
  int (*current_stream)(int32_t device_type, int32_t device_index, void** stream) = nullptr;
  nb::object owner;  // keeps the memory
  nb::object guard;  // keeps its owner from giving the memory away; may be null
  size_t bytes() const { return count * dtype_size(dtype); }
};

enum class Access { kRead, kWrite };

// Read `object`. `what` names the argument in errors ("all_reduce: tensor"). Throws InvalidArgument (with what to do)
// for: no tensor; not contiguous; a type that no code of ours names; memory that is not there (FakeTensor, DTensor,
// meta, storage resized to 0); conj or neg views; read-only memory with Access::kWrite. AsyncCollectiveTensor is waited
// for and unwrapped.
Tensor intake(nb::handle object, Access access, const std::string& what);

}  // namespace polyccl
