// A communicator of the CCL stand-in: see comm.h.
#include "comm.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "device.h"
#include "environment.h"
#include "task.h"

namespace stand_in {
namespace {

struct Table {
  std::mutex mutex;
  std::map<const void*, std::shared_ptr<ncclComm>> comms;
  std::string last_error;
};
Table& table() {
  static Table& all = *std::make_unique<Table>().release();
  return all;
}

Failure bad(const std::string& text) { return {ncclInvalidArgument, "invalid config: " + text}; }

constexpr bool undefined(int value) { return value == NCCL_CONFIG_UNDEF_INT; }

// What the library reads is its own struct, filled with defaults, then with as many of the caller's bytes as both know.
ncclConfig_t defaults() {
  ncclConfig_t config{};
  config.size = sizeof(config);
  config.magic = NCCL_API_MAGIC;
  config.version = STAND_IN_VERSION;
  config.blocking = config.cgaClusterSize = config.minCTAs = config.maxCTAs = config.splitShare = NCCL_CONFIG_UNDEF_INT;
#if STAND_IN_VERSION >= 22600
  config.trafficClass = NCCL_CONFIG_UNDEF_INT;
#endif
#if STAND_IN_VERSION >= 22700
  config.collnetEnable = config.CTAPolicy = config.shrinkShare = config.nvlsCTAs = NCCL_CONFIG_UNDEF_INT;
#endif
  return config;
}

// A caller of an older version cannot have meant the fields that came later.
void forget_newer(ncclConfig_t* config) {
  const unsigned version = config->version;
  const ncclConfig_t fresh = defaults();
  if (version < 21400) config->blocking = fresh.blocking;
  if (version < 21700) {
    config->cgaClusterSize = fresh.cgaClusterSize;
    config->minCTAs = fresh.minCTAs;
    config->maxCTAs = fresh.maxCTAs;
    config->netName = fresh.netName;
  }
  if (version < 21800) config->splitShare = fresh.splitShare;
#if STAND_IN_VERSION >= 22600
  if (version < 22600) config->trafficClass = fresh.trafficClass;
#endif
#if STAND_IN_VERSION >= 22700
  if (version < 22700) {
    config->commName = fresh.commName;
    config->collnetEnable = fresh.collnetEnable;
    config->CTAPolicy = fresh.CTAPolicy;
    config->shrinkShare = fresh.shrinkShare;
    config->nvlsCTAs = fresh.nvlsCTAs;
  }
#endif
}

// NCCLX and rcclx dereference commDesc where upstream has two of its numbers: with the wrong layout that is a crash
// there, a sentence here.
Failure check_fork_fields([[maybe_unused]] const ncclConfig_t& config) {
#ifdef STAND_IN_FORK
  const auto address = reinterpret_cast<std::uintptr_t>(config.commDesc);
  if (address != 0 && (address < 4096 || address >> 47 != 0)) {
    return bad("commDesc is no pointer: the caller sent another library's layout of ncclConfig_t");
  }
#endif
  return {};
}

}  // namespace

Failure read_config(const ncclConfig_t* given, Config* read) {
  ncclConfig_t config = defaults();
  if (given != nullptr) {
    std::size_t size = 0;
    std::memcpy(&size, given, sizeof(size));
    std::memcpy(static_cast<void*>(&config), given, std::min(size, sizeof(config)));
    if (config.magic != NCCL_API_MAGIC)
      return {ncclInvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER"};
    forget_newer(&config);
  }
  if (Failure failure = check_fork_fields(config)) return failure;
  if (!undefined(config.blocking) && config.blocking != 0 && config.blocking != 1)
    return bad("blocking " + std::to_string(config.blocking));
  if (!undefined(config.cgaClusterSize) && (config.cgaClusterSize < 0 || config.cgaClusterSize > 8)) {
    return bad("cgaClusterSize " + std::to_string(config.cgaClusterSize));
  }
  const bool bad_minimum = !undefined(config.minCTAs) && config.minCTAs <= 0;
  const bool bad_maximum = !undefined(config.maxCTAs) && config.maxCTAs <= 0;
  const bool crossed = !undefined(config.minCTAs) && !undefined(config.maxCTAs) && config.minCTAs > config.maxCTAs;
  if (bad_minimum || bad_maximum || crossed) {
    return bad("minCTAs " + std::to_string(config.minCTAs) + ", maxCTAs " + std::to_string(config.maxCTAs));
  }
  if (!undefined(config.splitShare) && config.splitShare != 0 && config.splitShare != 1) {
    return bad("splitShare " + std::to_string(config.splitShare));
  }
  // As with the real library, the environment has the last word.
  const long forced = environment("NCCL_COMM_BLOCKING", -1);
  read->blocking = forced >= 0 ? forced != 0 : config.blocking != 0;
  read->split_share = config.splitShare == 1;
  return {};
}

void remember(const Failure& failure) {
  if (!failure || failure.text.empty()) return;
  const std::lock_guard lock(table().mutex);
  table().last_error = failure.text;
}

const char* last_error() {
  thread_local std::string copy;
  const std::lock_guard lock(table().mutex);
  copy = table().last_error;
  return copy.c_str();
}

}  // namespace stand_in

using stand_in::Failure;
using stand_in::Operation;
using stand_in::Presence;

ncclComm::ncclComm(int device_, stand_in::Config config_) : device(device_), config(config_) {}

ncclComm_t ncclComm::add(std::shared_ptr<ncclComm> comm) {
  const std::lock_guard lock(stand_in::table().mutex);
  ncclComm_t handle = comm.get();
  stand_in::table().comms[handle] = std::move(comm);
  return handle;
}

std::shared_ptr<ncclComm> ncclComm::find(ncclComm_t handle) {
  const std::lock_guard lock(stand_in::table().mutex);
  const auto entry = stand_in::table().comms.find(handle);
  return entry == stand_in::table().comms.end() ? nullptr : entry->second;
}

void ncclComm::remove(ncclComm_t handle) {
  std::shared_ptr<ncclComm> last;
  const std::lock_guard lock(stand_in::table().mutex);
  const auto entry = stand_in::table().comms.find(handle);
  if (entry == stand_in::table().comms.end()) return;
  last = std::move(entry->second);  // freed after the lock
  stand_in::table().comms.erase(entry);
}

Failure ncclComm::join(const ncclUniqueId& id, int ranks_, int rank_) {
  std::shared_ptr<stand_in::Region> joined;
  Failure failure = stand_in::Region::join(
      id, ranks_, rank_, device, [this] { return stop(); }, &joined);
  const std::lock_guard lock(mutex_);
  ranks = ranks_;
  rank = rank_;
  region = std::move(joined);
  return failure;
}

Failure ncclComm::usable() const {
  const std::lock_guard lock(mutex_);
  if (aborted_) return {ncclInvalidArgument, "the communicator was aborted"};
  if (state_ == ncclInProgress) {
    return {ncclInvalidArgument, "Attempt to use communicator before the previous operation returned ncclSuccess"};
  }
  if (state_ != ncclSuccess) return {state_, ""};  // the text is the first error's
  if (region == nullptr) return {ncclInvalidArgument, "the communicator is not initialized"};
  return {};
}

ncclResult_t ncclComm::async_error() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

void ncclComm::fail(const Failure& failure) {
  stand_in::remember(failure);
  const std::lock_guard lock(mutex_);
  if (state_ == ncclSuccess || state_ == ncclInProgress) state_ = failure.code;
  if (region != nullptr && !aborted_) region->set_presence(Presence::kFailed);
  changed_.notify_all();
}

void ncclComm::begin() {
  const std::lock_guard lock(mutex_);
  if (state_ == ncclSuccess) state_ = ncclInProgress;
}

void ncclComm::end(const Failure& failure) {
  if (failure) return fail(failure);
  const std::lock_guard lock(mutex_);
  if (state_ == ncclInProgress) state_ = ncclSuccess;
  changed_.notify_all();
}

Failure ncclComm::launch(std::vector<Operation> operations) {
  // Collectives first: ranks may order them and their sends and receives differently inside a group.
  std::stable_partition(operations.begin(), operations.end(),
                        [](const Operation& operation) { return operation.kind != stand_in::Kind::kPointToPoint; });
  const stand_in::OnDevice current(device);
  const Stream stream = operations.front().stream;
  std::vector<Stream> others;
  for (const Operation& operation : operations) {
    bool capturing = false;
    if (Failure failure = stand_in::is_capturing(operation.stream, &capturing)) return failure;
    if (capturing) return {ncclInvalidUsage, "the stand-in does not model graphs: the stream captures"};
    if (operation.stream == stream || std::count(others.begin(), others.end(), operation.stream) > 0) continue;
    others.push_back(operation.stream);
  }
  for (Stream other : others) {
    if (Failure failure = stand_in::order(other, stream)) return failure;
  }
  std::uint64_t ticket = 0;
  {
    const std::lock_guard lock(mutex_);
    ticket = launched_++;
  }
  auto self = shared_from_this();
  Failure failure = stand_in::launch(stream, [self, ticket, work = std::move(operations)] { self->run(work, ticket); });
  for (Stream other : others) {
    if (!failure) failure = stand_in::order(stream, other);
  }
  if (failure) fail(failure);
  return failure;
}

// On the stream's worker.
void ncclComm::run(const std::vector<Operation>& operations, std::uint64_t ticket) {
  bool runs = false;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return completed_ == ticket || stop() || broken(); });
    runs = completed_ == ticket && !cancelled() && !broken();
    if (runs) ++running_;
  }
  Failure failure;
  if (runs) {
    std::vector<stand_in::Task> tasks;
    tasks.reserve(operations.size());
    static const bool eager = stand_in::environment("FAKE_CCL_EAGER", 0) != 0;
    stand_in::Exchange exchange(*region, eager);
    for (const Operation& operation : operations) tasks.emplace_back(operation, rank, ranks).prepare(exchange);
    failure = exchange.run([this] { return cancelled(); });
    if (!failure) {
      for (stand_in::Task& task : tasks) task.finish();
    }
  }
  if (failure && !cancelled()) fail(failure);
  std::unique_lock lock(mutex_);
  if (runs) --running_;
  changed_.notify_all();
  if (broken()) {
    // A kernel whose communicator has failed does not end: the stream stands still until someone aborts.
    changed_.wait_for(lock, stand_in::watchdog(), [this] { return stop(); });
  }
  completed_ = std::max(completed_, ticket + 1);
  changed_.notify_all();
}

void ncclComm::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return completed_ == launched_ || cancelled() || broken(); });
}

void ncclComm::abort() {
  aborted_ = true;
  std::unique_lock lock(mutex_);
  if (region != nullptr) region->set_presence(Presence::kAborted);
  changed_.notify_all();
  changed_.wait(lock, [this] { return running_ == 0; });
}

void ncclComm::give_up() {
  given_up_ = true;
  std::unique_lock lock(mutex_);
  if (state_ == ncclSuccess) state_ = ncclInvalidUsage;
  region->set_presence(Presence::kFailed);
  changed_.notify_all();
  changed_.wait(lock, [this] { return running_ == 0; });
}

void ncclComm::destroy() {
  {
    // What a non-blocking call has still to enqueue comes first.
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return state_ != ncclInProgress || cancelled(); });
  }
  drain();
  closing_ = true;
  const std::lock_guard lock(mutex_);
  if (region != nullptr && !aborted_) region->set_presence(Presence::kDestroyed);
  changed_.notify_all();
}

// --- Operators and registrations of the user -------------------------------------------------------------------------

Failure ncclComm::add_reduction(const stand_in::UserReduction& reduction, unsigned* op) {
  static std::atomic<unsigned> next =
      ncclNumOps;  // unique in the process: another communicator's operator is never taken for one's own
  const std::lock_guard lock(mutex_);
  *op = next++;
  reductions_[*op] = reduction;
  return {};
}

Failure ncclComm::remove_reduction(unsigned op) {
  const std::lock_guard lock(mutex_);
  if (op < ncclNumOps) return {ncclInvalidArgument, "ncclRedOpDestroy of a built-in operator"};
  if (reductions_.erase(op) == 0)
    return {ncclInvalidArgument, "ncclRedOpDestroy of an operator that is unknown to this communicator"};
  return {};
}

Failure ncclComm::reduction(unsigned op, unsigned dtype, stand_in::Reduction* found) const {
  if (op < ncclNumOps) {
    found->op = op;
    return {};
  }
  const std::lock_guard lock(mutex_);
  const auto entry = reductions_.find(op);
  if (entry == reductions_.end()) return {ncclInvalidArgument, "the operator is unknown to this communicator"};
  if (entry->second.dtype != dtype) {
    return {ncclInvalidArgument,
            "Data type supplied to user-created ncclRedOp_t does not match type given to reduction operation"};
  }
  *found = entry->second.reduction;
  return {};
}

void* ncclComm::add_registration(void* memory) {
  const std::lock_guard lock(mutex_);
  void* handle = reinterpret_cast<void*>(next_registration_++);
  registrations_[handle] = memory;
  return handle;
}

Failure ncclComm::remove_registration(void* handle) {
  const std::lock_guard lock(mutex_);
  if (registrations_.erase(handle) == 0)
    return {ncclInvalidArgument, "the handle was not registered with this communicator"};
  return {};
}

void* ncclComm::registered(void* handle) const {
  const std::lock_guard lock(mutex_);
  const auto entry = registrations_.find(handle);
  return entry == registrations_.end() ? nullptr : entry->second;
}
