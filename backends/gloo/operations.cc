// The operations: Gloo's own algorithms (trees and rings), and where one exchange among all ranks is faster, small
// all_reduce, reduce and all_gather, an exchange. What is no more than an exchange at any size (all_to_all, gather,
// scatter, messages) is left to PolyCCL.
#include "operations.h"

#include <gloo/allgather.h>
#include <gloo/allgatherv.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/reduce.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

namespace polyccl_gloo {
namespace {

// Up to this many bytes from each rank in all, one exchange among all ranks beats a ring.
constexpr size_t kExchangeLimit = size_t{256} << 10;
// reduce() works through its data in parts of this size, so that its scratch memory does not grow with the count.
constexpr size_t kReducePart = size_t{8} << 20;

using Sizes = std::vector<size_t>;

// One operation, checked, in bytes.
struct Op {
  polyccl_op c{};
  size_t element = 1;
  size_t block = 0;  // bytes of one block
  Sizes blocks;      // ALL_GATHER_V: bytes of each block
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
};

[[noreturn]] void refuse(polyccl_result result, const std::string& text) { throw Refusal(result, text); }

bool reduces(uint32_t kind) { return kind == POLYCCL_KIND_ALL_REDUCE || kind == POLYCCL_KIND_REDUCE; }
bool has_root(uint32_t kind) { return kind == POLYCCL_KIND_BROADCAST || kind == POLYCCL_KIND_REDUCE; }

size_t product(uint64_t a, uint64_t b) {
  size_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) refuse(POLYCCL_ERROR_INVALID, "the data is larger than memory can be");
  return result;
}

size_t total(const Sizes& sizes) { return std::accumulate(sizes.begin(), sizes.end(), size_t{0}); }

Sizes bytes_of(const uint64_t* counts, size_t element, int size) {
  if (counts == nullptr) refuse(POLYCCL_ERROR_INVALID, "this kind needs counts");
  Sizes bytes;
  size_t sum = 0;
  for (int i = 0; i < size; ++i) {
    bytes.push_back(product(counts[i], element));
    if (__builtin_add_overflow(sum, bytes.back(), &sum)) {
      refuse(POLYCCL_ERROR_INVALID, "the data is larger than memory can be");
    }
  }
  return bytes;
}

// Bytes that this rank reads at input and writes at output.
std::pair<size_t, size_t> extents(const Op& op, int rank, int size) {
  const auto ranks = static_cast<size_t>(size);
  const bool root = op.c.peer == rank;
  switch (op.c.kind) {
    case POLYCCL_KIND_BROADCAST:
      return {root ? op.block : 0, root ? 0 : op.block};  // a root's output may be absent
    case POLYCCL_KIND_REDUCE:
      return {op.block, root ? op.block : 0};
    case POLYCCL_KIND_ALL_GATHER:
      return {op.block, product(ranks, op.block)};
    case POLYCCL_KIND_ALL_GATHER_V:
      return {op.blocks[static_cast<size_t>(rank)], total(op.blocks)};
    case POLYCCL_KIND_BARRIER:
      return {0, 0};
    default:
      return {op.block, op.block};
  }
}

// Read what the caller's struct holds, and check it.
Op parse(const polyccl_op& given, const polyccl_host* host, int rank, int size) {
  Op op;
  std::memcpy(&op.c, &given, std::min<size_t>(given.struct_size, sizeof op.c));
  if (op.c.required != 0)
    refuse(POLYCCL_ERROR_UNSUPPORTED, "the operation needs features that this plugin does not know");
  if (supports(host, op.c.kind, op.c.dtype, op.c.reduction, op.c.memory) == 0) {
    refuse(POLYCCL_ERROR_UNSUPPORTED, "kind " + std::to_string(op.c.kind) + " with dtype " +
                                          std::to_string(op.c.dtype) + ", reduction " + std::to_string(op.c.reduction) +
                                          " and memory " + std::to_string(op.c.memory) + " is not native to Gloo");
  }
  if (has_root(op.c.kind) && (op.c.peer < 0 || op.c.peer >= size)) {
    refuse(POLYCCL_ERROR_INVALID,
           "rank " + std::to_string(op.c.peer) + " is not among the " + std::to_string(size) + " ranks");
  }
  if (op.c.kind != POLYCCL_KIND_BARRIER) op.element = polyccl_dtype_size(op.c.dtype);
  op.block = op.c.kind == POLYCCL_KIND_BARRIER ? 0 : product(op.c.count, op.element);
  if (op.c.kind == POLYCCL_KIND_ALL_GATHER_V) op.blocks = bytes_of(op.c.counts, op.element, size);
  op.input = static_cast<const std::byte*>(op.c.input);
  op.output = static_cast<std::byte*>(op.c.output);
  const auto [read, written] = extents(op, rank, size);
  if (read != 0 && op.input == nullptr) refuse(POLYCCL_ERROR_INVALID, "the input is NULL");
  if (written != 0 && op.output == nullptr) refuse(POLYCCL_ERROR_INVALID, "the output is NULL");
  return op;
}

void copy_bytes(std::byte* output, const std::byte* input, size_t bytes) {
  if (bytes != 0 && output != input) std::memmove(output, input, bytes);
}

// What must be alike on all ranks, as one number (FNV-1a); never 0.
uint64_t fingerprint(const Op& op) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&hash](uint64_t word) {
    for (int shift = 0; shift < 64; shift += 8) hash = (hash ^ ((word >> shift) & 0xff)) * 0x100000001b3;
  };
  add(op.c.kind);
  add(op.c.dtype);
  add(op.block);
  for (const size_t block : op.blocks) add(block);
  if (reduces(op.c.kind)) add(op.c.reduction);
  if (has_root(op.c.kind)) add(static_cast<uint64_t>(op.c.peer));
  return hash | 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Collectives
// ---------------------------------------------------------------------------------------------------------------------

// Messages that run together.
class Exchange {
 public:
  explicit Exchange(Transport& transport) : transport_(transport) {}

  void send(int peer, const void* data, size_t bytes) { sends_.push_back({peer, const_cast<void*>(data), bytes}); }
  void receive(int peer, void* data, size_t bytes) { receives_.push_back({peer, data, bytes}); }

  // Return when everything has arrived and been sent. Receives are posted first: a message finds its place waiting.
  void run() {
    std::vector<Transport::Message> messages;
    for (const Part& part : receives_) {
      messages.push_back(transport_.receive(part.peer, kSlot, part.data, part.bytes));
    }
    for (const Part& part : sends_) messages.push_back(transport_.send(part.peer, kSlot, part.data, part.bytes));
    std::vector<polyccl_message*> all;
    for (const Transport::Message& message : messages) all.push_back(message.get());
    transport_.wait(all);
  }

 private:
  static constexpr uint32_t kSlot = 0;  // Gloo's own begin at 1 << 24
  struct Part {
    int peer;
    void* data;
    size_t bytes;
  };
  Transport& transport_;
  std::vector<Part> receives_, sends_;
};

class Collective {
 public:
  Collective(Comm& comm, const polyccl_host* host, const Op& op)
      : comm_(comm),
        host_(host),
        op_(op),
        rank_(static_cast<size_t>(comm.rank())),
        size_(static_cast<size_t>(comm.size())) {}

  void run() {
    switch (op_.c.kind) {
      case POLYCCL_KIND_BROADCAST:
        return broadcast();
      case POLYCCL_KIND_ALL_REDUCE:
        return all_reduce();
      case POLYCCL_KIND_REDUCE:
        return reduce();
      case POLYCCL_KIND_ALL_GATHER:
        return all_gather(Sizes(size_, op_.block));
      case POLYCCL_KIND_ALL_GATHER_V:
        return all_gather(op_.blocks);
      default:
        return barrier();
    }
  }

 private:
  size_t root() const { return static_cast<size_t>(op_.c.peer); }
  bool at_root() const { return root() == rank_; }
  bool fits_exchange(size_t bytes) const { return bytes * (size_ - 1) <= kExchangeLimit; }

  void broadcast();
  void all_reduce();
  void ring_all_reduce();
  void exchange_all_reduce();
  void reduce();
  void exchange_reduce();
  void all_gather(const Sizes& blocks);
  void barrier();

  // output = the `blocks` of all ranks combined in rank order, the first two first.
  void combine(std::byte* output, const std::vector<const std::byte*>& blocks) const;
  gloo::AllreduceOptions::Func function() const;

  // Call f with a value whose type has the size of one element: Gloo takes the size from a type.
  template <typename F>
  void with_element(F f) const {
    switch (op_.element) {
      case 1:
        return f(std::array<std::byte, 1>{});
      case 2:
        return f(std::array<std::byte, 2>{});
      case 4:
        return f(std::array<std::byte, 4>{});
      case 8:
        return f(std::array<std::byte, 8>{});
      default:
        return f(std::array<std::byte, 16>{});
    }
  }

  Comm& comm_;
  const polyccl_host* host_;
  const Op& op_;
  const size_t rank_, size_;
};

void check_reduced(polyccl_result result) {
  if (result != POLYCCL_OK) throw Failure(result, "PolyCCL's reduction gave result " + std::to_string(result));
}

void Collective::combine(std::byte* output, const std::vector<const std::byte*>& blocks) const {
  const std::byte* left = blocks.front();
  for (size_t i = 1; i < blocks.size(); ++i) {
    check_reduced(host_->reduce(host_->ctx, output, left, blocks[i], op_.c.count, op_.c.dtype, op_.c.reduction));
    left = output;
  }
}

gloo::AllreduceOptions::Func Collective::function() const {
  return [host = host_, dtype = op_.c.dtype, reduction = op_.c.reduction](void* output, const void* a, const void* b,
                                                                          size_t n) {
    check_reduced(host->reduce(host->ctx, output, a, b, n, dtype, reduction));
  };
}

void Collective::broadcast() {
  std::byte* output = op_.output;
  if (at_root() && output == nullptr) output = const_cast<std::byte*>(op_.input);  // only read: it is what is sent
  if (op_.block == 0) return;
  if (size_ == 1) return copy_bytes(output, op_.input, op_.block);
  gloo::BroadcastOptions options(comm_.context());
  options.setOutput(output, op_.block);
  if (at_root() && output != op_.input) options.setInput(const_cast<std::byte*>(op_.input), op_.block);
  options.setRoot(op_.c.peer);
  gloo::broadcast(options);
}

void Collective::all_reduce() {
  if (op_.block == 0) return;
  if (size_ == 1) return copy_bytes(op_.output, op_.input, op_.block);
  return fits_exchange(op_.block) ? exchange_all_reduce() : ring_all_reduce();
}

void Collective::ring_all_reduce() {
  gloo::AllreduceOptions options(comm_.context());
  options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
  with_element([&](auto element) {
    using Element = decltype(element);
    options.setOutput(reinterpret_cast<Element*>(op_.output), op_.c.count);
    if (op_.input != op_.output) {
      options.setInput(reinterpret_cast<Element*>(const_cast<std::byte*>(op_.input)), op_.c.count);
    }
  });
  options.setReduceFunction(function());
  gloo::allreduce(options);
}

// Every rank gets every rank's data and combines it in rank order: one crossing, and equal bits everywhere.
void Collective::exchange_all_reduce() {
  const size_t bytes = op_.block;
  std::byte* scratch = comm_.scratch(bytes * (size_ + 1));
  std::byte* result = scratch + bytes * size_;
  Exchange exchange(comm_.transport());
  std::vector<const std::byte*> blocks;
  for (size_t i = 0; i < size_; ++i) {
    blocks.push_back(i == rank_ ? op_.input : scratch + bytes * i);
    if (i == rank_) continue;
    exchange.receive(static_cast<int>(i), scratch + bytes * i, bytes);
    exchange.send(static_cast<int>(i), op_.input, bytes);
  }
  exchange.run();
  combine(result, blocks);
  copy_bytes(op_.output, result, bytes);
}

void Collective::reduce() {
  if (op_.block == 0) return;
  if (size_ == 1) return copy_bytes(op_.output, op_.input, op_.block);
  if (fits_exchange(op_.block)) return exchange_reduce();
  // Gloo's ring writes partial results into every rank's output: where the caller has none, into scratch.
  const size_t part = std::min<size_t>(op_.c.count, kReducePart / op_.element);
  std::vector<std::byte> scratch(at_root() ? 0 : part * op_.element);
  for (uint64_t begin = 0; begin < op_.c.count; begin += part) {
    const size_t count = std::min<size_t>(part, op_.c.count - begin);
    const std::byte* input = op_.input + begin * op_.element;
    std::byte* output = at_root() ? op_.output + begin * op_.element : scratch.data();
    gloo::ReduceOptions options(comm_.context());
    with_element([&](auto element) {
      using Element = decltype(element);
      options.setOutput(reinterpret_cast<Element*>(output), count);
      if (input != output) options.setInput(reinterpret_cast<Element*>(const_cast<std::byte*>(input)), count);
    });
    options.setReduceFunction(function());
    options.setRoot(op_.c.peer);
    gloo::reduce(options);
  }
}

void Collective::exchange_reduce() {
  const size_t bytes = op_.block;
  Exchange exchange(comm_.transport());
  if (!at_root()) {
    exchange.send(op_.c.peer, op_.input, bytes);
    return exchange.run();
  }
  std::byte* scratch = comm_.scratch(bytes * (size_ + 1));
  std::byte* result = scratch + bytes * size_;
  std::vector<const std::byte*> blocks;
  for (size_t i = 0; i < size_; ++i) {
    blocks.push_back(i == rank_ ? op_.input : scratch + bytes * i);
    if (i != rank_) exchange.receive(static_cast<int>(i), scratch + bytes * i, bytes);
  }
  exchange.run();
  combine(result, blocks);
  copy_bytes(op_.output, result, bytes);
}

void Collective::all_gather(const Sizes& blocks) {
  const size_t sum = total(blocks);
  if (sum == 0) return;
  Sizes offsets(size_, 0);
  std::partial_sum(blocks.begin(), blocks.end() - 1, offsets.begin() + 1);
  std::byte* own = op_.output + offsets[rank_];
  if (size_ == 2 || fits_exchange(*std::max_element(blocks.begin(), blocks.end()))) {
    copy_bytes(own, op_.input, blocks[rank_]);
    Exchange exchange(comm_.transport());
    for (size_t i = 0; i < size_; ++i) {
      if (i == rank_) continue;
      exchange.receive(static_cast<int>(i), op_.output + offsets[i], blocks[i]);
      exchange.send(static_cast<int>(i), own, blocks[rank_]);
    }
    return exchange.run();
  }
  copy_bytes(own, op_.input, blocks[rank_]);  // the output then holds all of the input, which is Gloo's way in place
  if (op_.c.kind == POLYCCL_KIND_ALL_GATHER) {
    gloo::AllgatherOptions options(comm_.context());
    options.setOutput(op_.output, sum);
    return gloo::allgather(options);
  }
  gloo::AllgathervOptions options(comm_.context());
  options.setOutput(op_.output, blocks);
  gloo::allgatherv(options);
}

void Collective::barrier() {
  if (size_ == 1) return;
  gloo::BarrierOptions options(comm_.context());
  gloo::barrier(options);
}

}  // namespace

uint32_t supports(const polyccl_host* host, uint32_t kind, uint32_t dtype, uint32_t reduction, uint32_t memory) {
  if (memory != POLYCCL_MEMORY_HOST) return 0;
  if (kind == POLYCCL_KIND_BARRIER) return POLYCCL_CAN;
  if (polyccl_dtype_size(dtype) == 0) return 0;
  if (reduces(kind)) {
    if (reduction < POLYCCL_REDUCTION_SUM || reduction > POLYCCL_REDUCTION_BXOR) return 0;
    // The host's arithmetic says of zero elements whether it could.
    if (host->reduce(host->ctx, nullptr, nullptr, nullptr, 0, dtype, reduction) != POLYCCL_OK) return 0;
    // The ring combines each part on one rank and passes the result on; the exchange combines alike everywhere.
    return kind == POLYCCL_KIND_ALL_REDUCE ? POLYCCL_CAN | POLYCCL_CAN_EQUAL_BITS : POLYCCL_CAN;
  }
  switch (kind) {
    case POLYCCL_KIND_BROADCAST:
    case POLYCCL_KIND_ALL_GATHER:
    case POLYCCL_KIND_ALL_GATHER_V:
      return POLYCCL_CAN | POLYCCL_CAN_EQUAL_BITS;
    default:
      return 0;
  }
}

void run_operations(Comm& comm, const polyccl_host* host, const polyccl_op* const* ops, uint32_t n) {
  if (n != 1) refuse(POLYCCL_ERROR_UNSUPPORTED, "operations cannot be issued as one group");
  const Op op = parse(*ops[0], host, comm.rank(), comm.size());
  if (comm.size() > 1) comm.transport().begin(fingerprint(op), op.c.deadline);
  Collective(comm, host, op).run();
}

}  // namespace polyccl_gloo
