// Checks of arguments: the one place that turns what the user gave into a call, or refuses it before anything is sent.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "call.h"
#include "communicator.h"
#include "tensor.h"

namespace polyccl {

// What the user gave. Sides are a tensor, a list of tensors, or None.
struct Arguments {
  Kind kind = 0;
  nb::handle input, output;
  Reduction reduction = 0;
  nb::handle factor;  // a number, a tensor of one element, or None
  int peer = -1;
  std::optional<std::vector<int64_t>> input_splits, output_splits;  // rows of dimension 0, for all_to_all_v
  uint32_t tag = 0;                                                 // of send and recv
  const char *input_name = "tensor", *output_name = "tensor";       // for errors
};

// A call with the tensors that it reads and writes. Destroy with the GIL.
struct CheckedCall {
  Call call;
  std::vector<Tensor> inputs, outputs;
};

// Throws kInvalidArgument or kUnsupportedOperation; nothing was sent then.
CheckedCall check_arguments(const Communicator& comm, const Arguments& arguments);

}  // namespace polyccl
