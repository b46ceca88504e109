// The operations: which of them oneCCL does, and how they are called.
#pragma once

#include <polyccl/backend.h>

#include <vector>

#include "library.h"

namespace polyccl_xccl {

// Bits of POLYCCL_CAN_* that are offered to PolyCCL: what oneCCL does by PolyCCL's rules.
uint32_t supports(const oneccl::Api& api, uint32_t kind, uint32_t dtype, uint32_t reduction, uint32_t memory);

// One operation, checked, in oneCCL's terms.
struct Op {
  polyccl_op c{};
  oneccl::DataType type = oneccl::kUint8;
  oneccl::RedOp reduction = oneccl::kSum;
  size_t count = 0;                     // of `type`, in one block
  std::vector<size_t> sends, receives;  // ALL_TO_ALL_V: of `type`, for each rank
  size_t read = 0, written = 0;         // bytes that this rank reads at input and writes at output
};

// Check an operation as rank `rank` of `size` is to run it. Throws a Failure.
Op parse(const oneccl::Api& api, const polyccl_op& given, int rank, int size);

// The function of oneCCL that a kind calls, for texts.
const char* function_of(uint32_t kind);

// Make the call. An operation of nothing calls nothing.
oneccl::Result call(const oneccl::Api& api, const Op& op, oneccl::Comm comm, int rank);

}  // namespace polyccl_xccl
