// A communicator on oneCCL.
#include "comm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "operations.h"

namespace polyccl_xccl {
namespace {

constexpr const char* kIdKey = "xccl/id";

std::string words_of(const OneCcl& one, oneccl::Result result, oneccl::Comm comm) {
  std::string text = " gave " + std::to_string(result);
  const auto add = [&text](const char* words) {
    if (words != nullptr && words[0] != '\0') text += std::string(": ") + words;
  };
  add(one.api.GetErrorString(result));
  if (one.api.GetLastError != nullptr) add(one.api.GetLastError(comm));
  return text;
}

// The id that rank 0 draws; it names an address at which oneCCL's ranks meet.
oneccl::UniqueId meet(const OneCcl& one, const polyccl_comm_config& config) {
  oneccl::UniqueId id{};
  const polyccl_store* store = config.store;
  if (config.size > 1 && store == nullptr)
    throw Failure(POLYCCL_ERROR_INVALID, "a communicator of several ranks needs a store");
  if (config.rank == 0) {
    const oneccl::Result result = one.api.GetUniqueId(&id);
    if (result != oneccl::kSuccess)
      throw Failure(POLYCCL_ERROR_INTERNAL, "onecclGetUniqueId" + words_of(one, result, nullptr));
    if (config.size == 1) return id;
    const polyccl_result set = store->set(store->ctx, kIdKey, id.data, sizeof id.data);
    if (set != POLYCCL_OK) throw Failure(set, "the store did not take oneCCL's id");
    return id;
  }
  uint64_t size = 0;
  const polyccl_result got = store->get(store->ctx, kIdKey, id.data, sizeof id.data, &size, config.deadline);
  if (got != POLYCCL_OK) throw Failure(got, "the store did not give oneCCL's id, which rank 0 sets");
  if (size != sizeof id.data)
    throw Failure(POLYCCL_ERROR_INTERNAL, "oneCCL's id has " + std::to_string(size) + " bytes and not 4096");
  return id;
}

std::string or_empty(const char* text) { return text != nullptr ? text : ""; }

}  // namespace

Comm::Comm(const polyccl_comm_config& config)
    : one_(open_oneccl()), rank_(config.rank), size_(config.size), name_(or_empty(config.name)) {
  if (size_ < 1 || rank_ < 0 || rank_ >= size_) {
    throw Failure(POLYCCL_ERROR_INVALID,
                  "rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " is no rank of a communicator");
  }
  if (const std::string words = worker_failure(); !words.empty()) {
    throw Failure(POLYCCL_ERROR_UNAVAILABLE,
                  "oneCCL's own thread has ended in this process, most likely since a peer was lost in mid-transfer (" +
                      words + "); use another backend, or start the process afresh");
  }
#ifdef POLYCCL_XCCL_SYCL
  if (config.device >= 0 && one_.api.SetDevice != nullptr) {
    check(one_.api.SetDevice(static_cast<uint32_t>(config.device)), "onecclSetDevice");
  }
#else
  if (config.device >= 0) {
    throw Failure(POLYCCL_ERROR_UNSUPPORTED,
                  "this build of the xccl plugin serves host memory alone; for XPU tensors build it with a SYCL "
                  "compiler and -DPOLYCCL_XCCL_SYCL=ON");
  }
#endif
  choose_interface(config.address, config.interface);
  guard_worker();
  const Inside call;
  const oneccl::UniqueId id = meet(one_, config);
  static const bool before = (watch_exit(), true);
  check(one_.api.CommInitRank(&comm_, static_cast<size_t>(size_), id, rank_), "onecclCommInitRank");
  static const bool after = (watch_exit(), true);
  (void)before, (void)after;
}

// What a failure left behind is not taken apart: a peer that is gone may be waited for there.
Comm::~Comm() {
  if (aborted_ || failed_ || comm_ == nullptr || !worker_failure().empty()) return;
  const Inside call;
  (void)one_.api.CommFinalize(comm_);
  (void)one_.api.CommDestroy(comm_);
}

void Comm::abort() {
  aborted_ = true;
  leave_behind();
}

void Comm::require_alive() const {
  if (aborted_) throw Failure(POLYCCL_ERROR_ABORTED, "the communicator was aborted");
  if (failed_) throw Failure(POLYCCL_ERROR_INTERNAL, "the communicator has failed before: " + error());
  const std::string words = worker_failure();
  if (!words.empty()) throw Failure(POLYCCL_ERROR_PEER_LOST, "oneCCL's own thread has ended: " + words);
}

void Comm::check(oneccl::Result result, const char* function) {
  if (result == oneccl::kSuccess) return;
  failed_ = true;
  leave_behind();
  throw Failure(result == oneccl::kNotImplemented ? POLYCCL_ERROR_UNSUPPORTED : POLYCCL_ERROR_INTERNAL,
                function + words_of(one_, result, comm_));
}

void Comm::run(const polyccl_op* const* ops, uint32_t n) {
  require_alive();
  std::vector<Op> parsed;
  for (uint32_t i = 0; i < n; ++i) parsed.push_back(parse(one_.api, *ops[i], rank_, size_));
  const Inside running;
  if (n == 1) {
    check(call(one_.api, parsed[0], comm_, rank_), function_of(parsed[0].c.kind));
    return;
  }
  for (const Op& op : parsed) {
    if (op.c.kind != POLYCCL_KIND_SEND && op.c.kind != POLYCCL_KIND_RECV)
      throw Failure(POLYCCL_ERROR_UNSUPPORTED, "only sends and receives can be issued as one group");
  }
  check(one_.api.GroupStart(), "onecclGroupStart");
  for (const Op& op : parsed) check(call(one_.api, op, comm_, rank_), function_of(op.c.kind));
  check(one_.api.GroupEnd(), "onecclGroupEnd");
}

void Comm::set_error(const std::string& text) {
  const std::lock_guard lock(error_mutex_);
  error_ = name_.empty() ? text : "communicator '" + name_ + "', rank " + std::to_string(rank_) + ": " + text;
}

std::string Comm::error() const {
  const std::lock_guard lock(error_mutex_);
  return error_;
}

}  // namespace polyccl_xccl
