// The operations: which of them oneCCL does, and how they are called.
#include "operations.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <type_traits>

namespace polyccl_xccl {
namespace {

using oneccl::Api;
using oneccl::DataType;
using oneccl::Result;

[[noreturn]] void refuse(polyccl_result result, const std::string& text) { throw Failure(result, text); }

// oneCCL's name of a type that it reduces.
std::optional<DataType> reducible(uint32_t dtype) {
  switch (dtype) {
    case POLYCCL_DTYPE_INT8:
      return oneccl::kInt8;
    case POLYCCL_DTYPE_UINT8:
      return oneccl::kUint8;
    case POLYCCL_DTYPE_INT32:
      return oneccl::kInt32;
    case POLYCCL_DTYPE_UINT32:
      return oneccl::kUint32;
    case POLYCCL_DTYPE_INT64:
      return oneccl::kInt64;
    case POLYCCL_DTYPE_UINT64:
      return oneccl::kUint64;
    case POLYCCL_DTYPE_FLOAT16:
      return oneccl::kFloat16;
    case POLYCCL_DTYPE_FLOAT32:
      return oneccl::kFloat32;
    case POLYCCL_DTYPE_FLOAT64:
      return oneccl::kFloat64;
    case POLYCCL_DTYPE_BFLOAT16:
      return oneccl::kBfloat16;
    default:
      return std::nullopt;
  }
}

bool is_float(DataType type) {
  return type == oneccl::kFloat16 || type == oneccl::kFloat32 || type == oneccl::kFloat64 || type == oneccl::kBfloat16;
}

std::optional<oneccl::RedOp> reduction_of(uint32_t reduction) {
  switch (reduction) {
    case POLYCCL_REDUCTION_SUM:
      return oneccl::kSum;
    case POLYCCL_REDUCTION_PRODUCT:
      return oneccl::kProd;
    case POLYCCL_REDUCTION_MIN:
      return oneccl::kMin;
    case POLYCCL_REDUCTION_MAX:
      return oneccl::kMax;
    default:
      return std::nullopt;
  }
}

// What only moves goes as words of the element's size, so that every type can.
struct Moved {
  DataType type;
  size_t words;  // for each element
};

Moved moved(size_t element) {
  switch (element) {
    case 4:
      return {oneccl::kUint32, 1};
    case 8:
      return {oneccl::kUint64, 1};
    case 16:
      return {oneccl::kUint64, 2};
    default:
      return {oneccl::kUint8, element};
  }
}

bool reduces(uint32_t kind) {
  return kind == POLYCCL_KIND_ALL_REDUCE || kind == POLYCCL_KIND_REDUCE || kind == POLYCCL_KIND_REDUCE_SCATTER;
}

bool is_message(uint32_t kind) { return kind == POLYCCL_KIND_SEND || kind == POLYCCL_KIND_RECV; }

bool has_peer(uint32_t kind) {
  return is_message(kind) || kind == POLYCCL_KIND_BROADCAST || kind == POLYCCL_KIND_REDUCE ||
         kind == POLYCCL_KIND_SCATTER;
}

bool serves(uint32_t memory) {
#ifdef POLYCCL_XCCL_SYCL
  return memory == POLYCCL_MEMORY_HOST || memory == POLYCCL_MEMORY_DEVICE;
#else
  return memory == POLYCCL_MEMORY_HOST;
#endif
}

// Whether a call exists that gives the right result, whatever PolyCCL is offered.
bool works(const Api& api, uint32_t kind, uint32_t dtype, uint32_t reduction) {
  if (polyccl_dtype_size(dtype) == 0) return false;
  if (reduces(kind)) {
    const auto type = reducible(dtype);
    const auto op = reduction_of(reduction);
    if (!type || !op) return false;
    // oneCCL compares: whether NaN wins depends on which rank it comes from, and differs within one result.
    const bool compares = *op == oneccl::kMin || *op == oneccl::kMax;
    return !(compares && is_float(*type));
  }
  switch (kind) {
    case POLYCCL_KIND_BROADCAST:
    case POLYCCL_KIND_ALL_GATHER:
    case POLYCCL_KIND_ALL_TO_ALL:
    case POLYCCL_KIND_SEND:
    case POLYCCL_KIND_RECV:
      return true;
    case POLYCCL_KIND_ALL_TO_ALL_V:
      return api.AllToAllV != nullptr;
    case POLYCCL_KIND_SCATTER:
      return api.Scatter != nullptr;
    default:
      return false;
  }
}

size_t product(uint64_t a, uint64_t b) {
  size_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) refuse(POLYCCL_ERROR_INVALID, "the data is larger than memory can be");
  return result;
}

size_t total(const std::vector<size_t>& counts) {
  size_t sum = 0;
  for (const size_t count : counts) {
    if (__builtin_add_overflow(sum, count, &sum))
      refuse(POLYCCL_ERROR_INVALID, "the data is larger than memory can be");
  }
  return sum;
}

std::vector<size_t> scaled(const uint64_t* counts, size_t words, int size) {
  if (counts == nullptr) refuse(POLYCCL_ERROR_INVALID, "this kind needs counts for each rank");
  std::vector<size_t> result;
  for (int i = 0; i < size; ++i) result.push_back(product(counts[i], words));
  return result;
}

// Fill op.read and op.written.
void measure(Op& op, size_t word, int rank, int size) {
  const size_t block = product(op.count, word), all = product(block, static_cast<uint64_t>(size));
  const bool root = op.c.peer == rank;
  switch (op.c.kind) {
    case POLYCCL_KIND_SEND:
      op.read = block;
      break;
    case POLYCCL_KIND_RECV:
      op.written = block;
      break;
    case POLYCCL_KIND_BROADCAST:
      (root ? op.read : op.written) = block;  // a root's output may be absent
      break;
    case POLYCCL_KIND_REDUCE:
      op.read = block;
      op.written = root ? block : 0;
      break;
    case POLYCCL_KIND_ALL_GATHER:
      op.read = block;
      op.written = all;
      break;
    case POLYCCL_KIND_REDUCE_SCATTER:
      op.read = all;
      op.written = block;
      break;
    case POLYCCL_KIND_SCATTER:
      op.read = root ? all : 0;
      op.written = block;
      break;
    case POLYCCL_KIND_ALL_TO_ALL_V:
      op.read = product(total(op.sends), word);
      op.written = product(total(op.receives), word);
      break;
    default:
      op.read = op.written = op.c.kind == POLYCCL_KIND_ALL_TO_ALL ? all : block;
  }
}

// A copy of the input where oneCCL would not take it in place. Of host memory alone: on a device PolyCCL gives other
// memory.
const void* apart(const Op& op, std::vector<std::byte>& copy) {
  const auto* input = static_cast<const std::byte*>(op.c.input);
  if (op.c.input != op.c.output || op.read == 0 || op.c.memory != POLYCCL_MEMORY_HOST) return input;
  copy.assign(input, input + op.read);
  return copy.data();
}

oneccl::Result broadcast(const Api& api, const Op& op, oneccl::Comm comm, int rank) {
  void* output = op.c.output;
  const void* input = op.c.input;
  if (op.c.peer != rank) input = output;
  if (output == nullptr) output = const_cast<void*>(input);  // a root's, in place: only read
  return api.Broadcast(input, output, op.count, op.type, op.c.peer, comm, op.c.stream);
}

}  // namespace

// Sends and receives are offered on devices alone. On the host oneCCL logs an error for each message of a group, done
// or not (the group's events are dropped while they run, and their destructor waits), and PolyCCL's own link carries
// them without that, by its deadline, and without a hang.
uint32_t supports(const Api& api, uint32_t kind, uint32_t dtype, uint32_t reduction, uint32_t memory) {
  if (!serves(memory) || !works(api, kind, dtype, reduction)) return 0;
  if (is_message(kind)) return memory == POLYCCL_MEMORY_DEVICE ? POLYCCL_CAN | POLYCCL_CAN_GROUP : 0;
  const bool copies = kind == POLYCCL_KIND_BROADCAST || kind == POLYCCL_KIND_ALL_GATHER;
  // Integers have one sum; of two NaNs, each rank may keep its own.
  const bool exact = kind == POLYCCL_KIND_ALL_REDUCE && !is_float(*reducible(dtype));
  return copies || exact ? POLYCCL_CAN | POLYCCL_CAN_EQUAL_BITS : POLYCCL_CAN;
}

Op parse(const Api& api, const polyccl_op& given, int rank, int size) {
  Op op;
  std::memcpy(&op.c, &given, std::min<size_t>(given.struct_size, sizeof op.c));
  if (op.c.required != 0)
    refuse(POLYCCL_ERROR_UNSUPPORTED, "the operation needs features that this plugin does not know");
  if (op.c.memory == POLYCCL_MEMORY_DEVICE && !serves(op.c.memory)) {
    refuse(POLYCCL_ERROR_UNSUPPORTED,
           "this build of the xccl plugin serves host memory alone; for XPU tensors build it with a SYCL compiler and "
           "-DPOLYCCL_XCCL_SYCL=ON");
  }
  if (!serves(op.c.memory) || !works(api, op.c.kind, op.c.dtype, op.c.reduction)) {
    refuse(POLYCCL_ERROR_UNSUPPORTED, "kind " + std::to_string(op.c.kind) + " with dtype " +
                                          std::to_string(op.c.dtype) + ", reduction " + std::to_string(op.c.reduction) +
                                          " and memory " + std::to_string(op.c.memory) + " is not native to oneCCL");
  }
  if (has_peer(op.c.kind) && (op.c.peer < 0 || op.c.peer >= size)) {
    refuse(POLYCCL_ERROR_INVALID,
           "rank " + std::to_string(op.c.peer) + " is not among the " + std::to_string(size) + " ranks");
  }
  const size_t element = polyccl_dtype_size(op.c.dtype);
  Moved as = moved(element);
  if (reduces(op.c.kind)) {
    as = {*reducible(op.c.dtype), 1};
    op.reduction = *reduction_of(op.c.reduction);
  }
  op.type = as.type;
  op.count = product(op.c.count, as.words);
  if (op.c.kind == POLYCCL_KIND_ALL_TO_ALL_V) {
    op.sends = scaled(op.c.counts, as.words, size);
    op.receives = scaled(op.c.output_counts, as.words, size);
  }
  measure(op, element / as.words, rank, size);
  if (op.read != 0 && op.c.input == nullptr) refuse(POLYCCL_ERROR_INVALID, "the input is NULL");
  if (op.written != 0 && op.c.output == nullptr) refuse(POLYCCL_ERROR_INVALID, "the output is NULL");
  return op;
}

const char* function_of(uint32_t kind) {
  switch (kind) {
    case POLYCCL_KIND_SEND:
      return "onecclSend";
    case POLYCCL_KIND_RECV:
      return "onecclRecv";
    case POLYCCL_KIND_BROADCAST:
      return "onecclBroadcast";
    case POLYCCL_KIND_ALL_REDUCE:
      return "onecclAllReduce";
    case POLYCCL_KIND_REDUCE:
      return "onecclReduce";
    case POLYCCL_KIND_ALL_GATHER:
      return "onecclAllGather";
    case POLYCCL_KIND_REDUCE_SCATTER:
      return "onecclReduceScatter";
    case POLYCCL_KIND_ALL_TO_ALL:
      return "onecclAllToAll";
    case POLYCCL_KIND_ALL_TO_ALL_V:
      return "onecclAllToAllV";
    default:
      return "onecclScatter";
  }
}

Result call(const Api& api, const Op& op, oneccl::Comm comm, int rank) {
  void* const input = const_cast<void*>(op.c.input);  // all but one signature say const, and none writes it
  void* const stream = op.c.stream;
  std::vector<std::byte> copy;
  if (op.c.kind != POLYCCL_KIND_ALL_TO_ALL_V && op.count == 0) return oneccl::kSuccess;  // equal on all ranks
  switch (op.c.kind) {
    case POLYCCL_KIND_SEND:
      return api.Send(input, op.count, op.type, op.c.peer, comm, stream);
    case POLYCCL_KIND_RECV:
      return api.Recv(op.c.output, op.count, op.type, op.c.peer, comm, stream);
    case POLYCCL_KIND_BROADCAST:
      return broadcast(api, op, comm, rank);
    case POLYCCL_KIND_ALL_REDUCE:
      return api.AllReduce(input, op.c.output, op.count, op.type, op.reduction, comm, stream);
    case POLYCCL_KIND_REDUCE:
      return api.Reduce(input, op.c.output, op.count, op.type, op.reduction, op.c.peer, comm, stream);
    case POLYCCL_KIND_ALL_GATHER:
      return api.AllGather(input, op.c.output, op.count, op.type, comm, stream);
    case POLYCCL_KIND_REDUCE_SCATTER:
      return api.ReduceScatter(input, op.c.output, op.count, op.type, op.reduction, comm, stream);
    case POLYCCL_KIND_SCATTER:
      return api.Scatter(apart(op, copy), op.c.output, op.count, op.type, op.c.peer, comm, stream);
    case POLYCCL_KIND_ALL_TO_ALL:
      return api.AllToAll(apart(op, copy), op.c.output, op.count, op.type, comm, stream);
    default:
      return api.AllToAllV(apart(op, copy), op.sends.data(), op.c.output, op.receives.data(), op.type, comm, stream);
  }
}

}  // namespace polyccl_xccl
