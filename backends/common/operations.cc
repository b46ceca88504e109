// The operations.
//
// Data that only moves is handed over as bytes, so that every type can. Operations that the library lacks but that are
// one group of its calls (all_to_all and the ragged ones) are that group. Each operation has three parts, for the sake
// of the in-place layouts: copies on its stream, the library's calls, copies on its stream.
#include "operations.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "capabilities.h"
#include "failure.h"
#include "nccl_api.h"
#include "runtime.h"

namespace polyccl_ccl {
namespace {

constexpr int kByte = kUint8;

// One operation, checked.
struct Op {
  polyccl_op c{};
  uint64_t element = 1;  // bytes
  uint64_t block = 0;    // bytes of one block
  Reduction reduction;   // of a kind that reduces
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  bool made_reduction = false;  // reduction.op is to be destroyed
};

class Issue {
 public:
  Issue(Comm& comm, const polyccl_op* const* ops, uint32_t n);
  ~Issue();
  Issue(const Issue&) = delete;
  Issue& operator=(const Issue&) = delete;
  void run();

 private:
  [[noreturn]] void refuse(polyccl_result result, const std::string& text) const;
  uint64_t product(uint64_t a, uint64_t b) const;
  uint64_t total(const uint64_t* counts, uint64_t element) const;
  Op parse(const polyccl_op& given) const;
  void check_kind(const Op& op) const;
  void check_memory(const Op& op) const;
  void check_own_messages() const;
  std::pair<uint64_t, uint64_t> extents(const Op& op) const;

  void prepare(Op& op);
  void make_factor(Op& op);
  void settle(const Op& op);
  bool is_group(const Op& op) const;
  int enqueue_all(Handle handle) const;
  int enqueue(const Op& op, Handle handle) const;
  int enqueue_blocks(const Op& op, Handle handle) const;
  int enqueue_ragged(const Op& op, Handle handle) const;
  int exchange(const Op& op, Handle handle, const uint64_t* to, const uint64_t* from) const;
  int gather(const Op& op, Handle handle) const;
  int scatter(const Op& op, Handle handle) const;
  bool at_root(const Op& op) const { return op.c.peer == comm_.rank(); }
  uint64_t ranks() const { return static_cast<uint64_t>(comm_.size()); }
  uint64_t own(uint64_t block) const { return static_cast<uint64_t>(comm_.rank()) * block; }
  void copy(const Op& op, void* to, const void* from, uint64_t bytes) const;

  Comm& comm_;
  const Api& api_ = vendor().api;
  std::vector<Op> ops_;
  int64_t deadline_ = 0;  // the first of the operations'
};

const char* name_of(uint32_t kind) {
  static const char* const names[] = {
      "?",          "send",         "recv",         "broadcast",      "all_reduce",
      "reduce",     "all_gather",   "all_gather_v", "reduce_scatter", "reduce_scatter_v",
      "all_to_all", "all_to_all_v", "scatter",      "gather",         "barrier"};
  return kind < std::size(names) ? names[kind] : names[0];
}

// ---- checks

void Issue::refuse(polyccl_result result, const std::string& text) const {
  throw Failure(result, comm_.where() + ": " + text);
}

uint64_t Issue::product(uint64_t a, uint64_t b) const {
  uint64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) refuse(POLYCCL_ERROR_INVALID, "the data is larger than memory can be");
  return result;
}

uint64_t Issue::total(const uint64_t* counts, uint64_t element) const {
  if (counts == nullptr) refuse(POLYCCL_ERROR_INVALID, "a ragged operation needs the counts of all ranks");
  uint64_t sum = 0;
  for (uint64_t i = 0; i < ranks(); ++i) {
    if (__builtin_add_overflow(sum, product(counts[i], element), &sum)) {
      refuse(POLYCCL_ERROR_INVALID, "the data is larger than memory can be");
    }
  }
  return sum;
}

// Bytes that this rank reads at input and writes at output.
std::pair<uint64_t, uint64_t> Issue::extents(const Op& op) const {
  const uint64_t all = product(ranks(), op.block);
  switch (op.c.kind) {
    case POLYCCL_KIND_SEND:
      return {op.block, 0};
    case POLYCCL_KIND_RECV:
      return {0, op.block};
    case POLYCCL_KIND_BROADCAST:
      return {at_root(op) ? op.block : 0, at_root(op) ? 0 : op.block};  // a root's output may be absent
    case POLYCCL_KIND_REDUCE:
      return {op.block, at_root(op) ? op.block : 0};
    case POLYCCL_KIND_ALL_GATHER:
      return {op.block, all};
    case POLYCCL_KIND_REDUCE_SCATTER:
      return {all, op.block};
    case POLYCCL_KIND_ALL_GATHER_V:
      return {product(op.c.counts[comm_.rank()], op.element), total(op.c.counts, op.element)};
    case POLYCCL_KIND_REDUCE_SCATTER_V:
      return {total(op.c.counts, op.element), product(op.c.counts[comm_.rank()], op.element)};
    case POLYCCL_KIND_ALL_TO_ALL:
      return {all, all};
    case POLYCCL_KIND_ALL_TO_ALL_V:
      return {total(op.c.counts, op.element), total(op.c.output_counts, op.element)};
    case POLYCCL_KIND_SCATTER:
      return {at_root(op) ? all : 0, op.block};
    case POLYCCL_KIND_GATHER:
      return {op.block, at_root(op) ? all : 0};
    case POLYCCL_KIND_BARRIER:
      return {0, 0};
    default:
      return {op.block, op.block};
  }
}

void Issue::check_kind(const Op& op) const {
  const std::string name = name_of(op.c.kind);
  if (op.c.required != 0) {
    refuse(POLYCCL_ERROR_UNSUPPORTED, name + " needs features that this plugin does not know");
  }
  if ((supports(op.c.kind, op.c.dtype, op.c.reduction, op.c.memory) & POLYCCL_CAN) == 0) {
    refuse(POLYCCL_ERROR_UNSUPPORTED, "the library cannot do this " + name + ": kind " + std::to_string(op.c.kind) +
                                          ", dtype " + std::to_string(op.c.dtype) + ", reduction " +
                                          std::to_string(op.c.reduction) + ", memory " + std::to_string(op.c.memory));
  }
  if (has_peer(op.c.kind) && (op.c.peer < 0 || op.c.peer >= comm_.size())) {
    refuse(POLYCCL_ERROR_INVALID, name + ": there is no rank " + std::to_string(op.c.peer));
  }
}

void Issue::check_memory(const Op& op) const {
  const auto [reads, writes] = extents(op);
  if ((reads != 0 && op.input == nullptr) || (writes != 0 && op.output == nullptr)) {
    refuse(POLYCCL_ERROR_INVALID, std::string(name_of(op.c.kind)) + ": memory with elements is NULL");
  }
  const bool exchanges = op.c.kind == POLYCCL_KIND_ALL_TO_ALL || op.c.kind == POLYCCL_KIND_ALL_TO_ALL_V;
  if (exchanges && reads != 0 && op.input == op.output) {
    refuse(POLYCCL_ERROR_INVALID, std::string(name_of(op.c.kind)) +
                                      " cannot be done in place: the library receives where it still sends from");
  }
  if (op.c.reduction == POLYCCL_REDUCTION_PREMUL_SUM && reduces(op.c.kind) && op.c.factor == nullptr) {
    refuse(POLYCCL_ERROR_INVALID, std::string(name_of(op.c.kind)) + ": PREMUL_SUM has no factor");
  }
}

// Read what the caller's struct holds, and check it.
Op Issue::parse(const polyccl_op& given) const {
  Op op;
  std::memcpy(&op.c, &given, std::min<size_t>(given.struct_size, sizeof op.c));
  check_kind(op);
  if (op.c.kind != POLYCCL_KIND_BARRIER) op.element = polyccl_dtype_size(op.c.dtype);
  const bool ragged = op.c.kind == POLYCCL_KIND_ALL_GATHER_V || op.c.kind == POLYCCL_KIND_REDUCE_SCATTER_V ||
                      op.c.kind == POLYCCL_KIND_ALL_TO_ALL_V;
  if (ragged) total(op.c.counts, op.element);  // refuses where there are none
  op.block = product(op.c.count, op.element);
  if (reduces(op.c.kind)) op.reduction = *reduction_of(op.c.dtype, op.c.reduction);
  op.input = static_cast<const std::byte*>(op.c.input);
  op.output = static_cast<std::byte*>(op.c.output);
  check_memory(op);
  return op;
}

// A message to this rank itself needs both halves in one group, else the library waits for ever.
void Issue::check_own_messages() const {
  int64_t sent = 0;
  for (const Op& op : ops_) {
    if (op.c.kind == POLYCCL_KIND_SEND && at_root(op)) ++sent;
    if (op.c.kind == POLYCCL_KIND_RECV && at_root(op)) --sent;
  }
  if (sent != 0)
    refuse(POLYCCL_ERROR_INVALID, "a message to this rank itself needs its send and its recv in one group");
}

Issue::Issue(Comm& comm, const polyccl_op* const* ops, uint32_t n) : comm_(comm) {
  for (uint32_t i = 0; i < n; ++i) {
    ops_.push_back(parse(*ops[i]));
    const int64_t one = ops_.back().c.deadline;
    if (one != 0 && (deadline_ == 0 || one < deadline_)) deadline_ = one;
  }
  check_own_messages();
}

// ---- before and after the library's calls

void Issue::copy(const Op& op, void* to, const void* from, uint64_t bytes) const {
  if (bytes == 0 || to == from) return;
  check(runtime().copy(op.c.stream, to, bytes, from, bytes, bytes, 1), "copying an operation's own block");
}

void Issue::make_factor(Op& op) {
  const bool device = op.c.factor_memory == POLYCCL_MEMORY_DEVICE;
  comm_.call(deadline_, "creating PREMUL_SUM", [&](Handle handle) {
    return api_.create_premul_sum(&op.reduction.op, const_cast<void*>(op.c.factor), op.reduction.type,
                                  device ? kScalarDevice : kScalarHostImmediate, handle);
  });
  op.made_reduction = true;
}

void Issue::prepare(Op& op) {
  if (reduces(op.c.kind) && op.c.reduction == POLYCCL_REDUCTION_PREMUL_SUM) make_factor(op);
  if (op.c.kind == POLYCCL_KIND_GATHER && at_root(op)) {
    copy(op, op.output + own(op.block), op.input, op.block);
    op.input = op.output + own(op.block);
  }
}

void Issue::settle(const Op& op) {
  if (op.c.kind == POLYCCL_KIND_SCATTER && at_root(op)) copy(op, op.output, op.input + own(op.block), op.block);
}

// What is left when all is done, or has failed.
Issue::~Issue() {
  for (const Op& op : ops_) {
    if (!op.made_reduction) continue;
    (void)guarded([&] {
      comm_.call(deadline_, "destroying PREMUL_SUM",
                 [&](Handle handle) { return api_.destroy_op(op.reduction.op, handle); });
    });
  }
}

// ---- the library's calls

bool Issue::is_group(const Op& op) const {
  switch (op.c.kind) {
    case POLYCCL_KIND_ALL_TO_ALL:
      return api_.all_to_all == nullptr;
    case POLYCCL_KIND_GATHER:
      return api_.gather == nullptr;
    case POLYCCL_KIND_SCATTER:
      return api_.scatter == nullptr;
    case POLYCCL_KIND_ALL_GATHER_V:
    case POLYCCL_KIND_REDUCE_SCATTER_V:
    case POLYCCL_KIND_ALL_TO_ALL_V:
      return true;
    default:
      return false;
  }
}

void Issue::run() {
  const Current current(comm_.device());
  for (Op& op : ops_) prepare(op);
  const char* doing = ops_.size() == 1 ? name_of(ops_[0].c.kind) : "a group of operations";
  comm_.call(deadline_, doing, [&](Handle handle) {
    if (ops_.size() == 1 && !is_group(ops_[0])) return enqueue(ops_[0], handle);
    return enqueue_all(handle);
  });
  for (const Op& op : ops_) settle(op);
}

// A group must be closed whatever becomes of its calls: it belongs to the thread.
int Issue::enqueue_all(Handle handle) const {
  int result = api_.group_start();
  if (result != kSuccess) return result;
  for (const Op& op : ops_) {
    result = enqueue(op, handle);
    if (result != kSuccess && result != kInProgress) break;
  }
  const int closed = api_.group_end();
  return result != kSuccess && result != kInProgress ? result : closed;
}

int Issue::enqueue(const Op& op, Handle handle) const {
  void* stream = op.c.stream;
  const uint64_t units = op.c.count * op.reduction.units;  // fits: `block` is larger
  if (op.c.kind == POLYCCL_KIND_BARRIER) {
    return api_.all_reduce(comm_.pad(), comm_.pad(), 1, kByte, kMax, handle, stream);
  }
  if (is_group(op) && op.c.kind != POLYCCL_KIND_ALL_TO_ALL && op.c.kind != POLYCCL_KIND_GATHER &&
      op.c.kind != POLYCCL_KIND_SCATTER) {
    return enqueue_ragged(op, handle);
  }
  if (op.block == 0) return kSuccess;
  switch (op.c.kind) {
    case POLYCCL_KIND_SEND:
      return api_.send(op.input, op.block, kByte, op.c.peer, handle, stream);
    case POLYCCL_KIND_RECV:
      return api_.recv(op.output, op.block, kByte, op.c.peer, handle, stream);
    case POLYCCL_KIND_ALL_REDUCE:
      return api_.all_reduce(op.input, op.output, units, op.reduction.type, op.reduction.op, handle, stream);
    case POLYCCL_KIND_REDUCE:
      return api_.reduce(op.input, op.output, units, op.reduction.type, op.reduction.op, op.c.peer, handle, stream);
    case POLYCCL_KIND_REDUCE_SCATTER:
      return api_.reduce_scatter(op.input, op.output, units, op.reduction.type, op.reduction.op, handle, stream);
    default:
      return enqueue_blocks(op, handle);
  }
}

// The kinds that move whole blocks.
int Issue::enqueue_blocks(const Op& op, Handle handle) const {
  void* stream = op.c.stream;
  // A root without an output keeps what it has: the same memory is never written.
  void* output = op.output != nullptr ? op.output : const_cast<std::byte*>(op.input);
  switch (op.c.kind) {
    case POLYCCL_KIND_BROADCAST:
      return api_.broadcast(op.input != nullptr ? op.input : op.output, output, op.block, kByte, op.c.peer, handle,
                            stream);
    case POLYCCL_KIND_ALL_GATHER:
      return api_.all_gather(op.input, op.output, op.block, kByte, handle, stream);
    case POLYCCL_KIND_ALL_TO_ALL:
      if (api_.all_to_all != nullptr) return api_.all_to_all(op.input, op.output, op.block, kByte, handle, stream);
      return exchange(op, handle, nullptr, nullptr);
    case POLYCCL_KIND_GATHER:
      return gather(op, handle);
    case POLYCCL_KIND_SCATTER:
      return scatter(op, handle);
    default:
      return kInvalidArgument;  // check_kind() lets none through
  }
}

int Issue::enqueue_ragged(const Op& op, Handle handle) const {
  if (op.c.kind == POLYCCL_KIND_ALL_TO_ALL_V) return exchange(op, handle, op.c.counts, op.c.output_counts);
  uint64_t at = 0;
  for (int rank = 0; rank < comm_.size(); ++rank) {
    const uint64_t count = op.c.counts[rank];
    const uint64_t bytes = count * op.element;
    int result = kSuccess;
    if (count == 0) continue;
    if (op.c.kind == POLYCCL_KIND_ALL_GATHER_V) {
      std::byte* block = op.output + at;
      const void* from = rank == comm_.rank() ? op.input : block;
      result = api_.broadcast(from, block, bytes, kByte, rank, handle, op.c.stream);
    } else {
      void* to = rank == comm_.rank() ? op.output : nullptr;
      result = api_.reduce(op.input + at, to, count * op.reduction.units, op.reduction.type, op.reduction.op, rank,
                           handle, op.c.stream);
    }
    if (result != kSuccess && result != kInProgress) return result;
    at += bytes;
  }
  return kSuccess;
}

// Blocks to and from all ranks; counts of NULL: all of op.count elements.
int Issue::exchange(const Op& op, Handle handle, const uint64_t* to, const uint64_t* from) const {
  uint64_t sent = 0, received = 0;
  for (int peer = 0; peer < comm_.size(); ++peer) {
    const uint64_t out = to != nullptr ? to[peer] * op.element : op.block;
    const uint64_t in = from != nullptr ? from[peer] * op.element : op.block;
    int result = out != 0 ? api_.send(op.input + sent, out, kByte, peer, handle, op.c.stream) : kSuccess;
    if (result != kSuccess && result != kInProgress) return result;
    result = in != 0 ? api_.recv(op.output + received, in, kByte, peer, handle, op.c.stream) : kSuccess;
    if (result != kSuccess && result != kInProgress) return result;
    sent += out;
    received += in;
  }
  return kSuccess;
}

// A root's own block lies where it belongs: prepare() has put it there.
int Issue::gather(const Op& op, Handle handle) const {
  if (api_.gather != nullptr) return api_.gather(op.input, op.output, op.block, kByte, op.c.peer, handle, op.c.stream);
  if (!at_root(op)) return api_.send(op.input, op.block, kByte, op.c.peer, handle, op.c.stream);
  for (int peer = 0; peer < comm_.size(); ++peer) {
    if (peer == comm_.rank()) continue;
    const uint64_t at = static_cast<uint64_t>(peer) * op.block;
    const int result = api_.recv(op.output + at, op.block, kByte, peer, handle, op.c.stream);
    if (result != kSuccess && result != kInProgress) return result;
  }
  return kSuccess;
}

// A root's own block stays where it is; settle() copies it.
int Issue::scatter(const Op& op, Handle handle) const {
  if (api_.scatter != nullptr) {
    void* output = at_root(op) ? const_cast<std::byte*>(op.input) + own(op.block) : op.output;
    return api_.scatter(op.input, output, op.block, kByte, op.c.peer, handle, op.c.stream);
  }
  if (!at_root(op)) return api_.recv(op.output, op.block, kByte, op.c.peer, handle, op.c.stream);
  for (int peer = 0; peer < comm_.size(); ++peer) {
    if (peer == comm_.rank()) continue;
    const uint64_t at = static_cast<uint64_t>(peer) * op.block;
    const int result = api_.send(op.input + at, op.block, kByte, peer, handle, op.c.stream);
    if (result != kSuccess && result != kInProgress) return result;
  }
  return kSuccess;
}

}  // namespace

void issue(Comm& comm, const polyccl_op* const* ops, uint32_t n) {
  if (n != 0) Issue(comm, ops, n).run();
}

}  // namespace polyccl_ccl
