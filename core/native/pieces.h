// Where a plan's slices lie in one iteration of an operation.
#pragma once

#include "executor.h"

namespace polyccl {

struct Piece {
  char* memory;
  uint64_t count;
  bool device;  // where input and output lie; else the host's
};

Piece resolve(const Iteration& it, const Slice& slice);

}  // namespace polyccl
