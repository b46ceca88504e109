// A communicator on a library of this family.
//
// Creation and operations are non-blocking where the library can that (2.14 and newer): it takes a call, returns, and
// tells through ncclCommGetAsyncError() when it has enqueued the work. So no call is made that another rank's absence
// could hold, every wait has a deadline, and abort() from another thread finds nobody inside the library.
#include "comm.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "bounded.h"
#include "failure.h"
#include "runtime.h"

namespace polyccl_ccl {
namespace {

constexpr const char* kIdKey = "unique_id";
constexpr int64_t kAbortBound = 10 * kSecond;     // of the library's own abort
constexpr int64_t kFinalizeBound = 20 * kSecond;  // of an orderly end
constexpr int64_t kLockBound = 2 * kSecond;       // of a call that is in the library
constexpr size_t kPadBytes = 64;

// What rank 0 tells the others: 'I', its library's version and the id; or 'E' and why there is none.
struct Invitation {
  char tag = 'I';
  int32_t version = 0;
  UniqueId id{};
  std::string trouble;

  std::string encode() const {
    if (tag != 'I') return "E" + trouble;
    std::string text(1 + sizeof version + sizeof id, 'I');
    std::memcpy(&text[1], &version, sizeof version);
    std::memcpy(&text[1 + sizeof version], &id, sizeof id);
    return text;
  }

  static Invitation decode(const std::string& text) {
    Invitation out;
    out.tag = text.empty() ? '?' : text[0];
    if (out.tag == 'E') out.trouble = text.substr(1);
    if (out.tag == 'I' && text.size() == 1 + sizeof out.version + sizeof out.id) {
      std::memcpy(&out.version, &text[1], sizeof out.version);
      std::memcpy(&out.id, &text[1 + sizeof out.version], sizeof out.id);
    } else if (out.tag == 'I') {
      out.tag = '?';
    }
    return out;
  }
};

void check_config(const polyccl_comm_config& config) {
  if (config.store == nullptr) throw Failure(POLYCCL_ERROR_INVALID, "there is no store to meet in");
  if (config.size < 1 || config.rank < 0 || config.rank >= config.size) {
    throw Failure(POLYCCL_ERROR_INVALID,
                  "rank " + std::to_string(config.rank) + " is not one of " + std::to_string(config.size) + " ranks");
  }
}

// The device of a communicator: the given one; on a stand-in, whose memory is the host's, the host means the first.
int device_of(const polyccl_comm_config& config) {
  const int devices = device_count();
  if (config.device < 0 && runtime().stand_in) return 0;
  if (config.device >= 0 && config.device < devices) return config.device;
  throw Failure(POLYCCL_ERROR_INVALID, std::string(family().backend) + " works on devices, and " +
                                           std::to_string(config.device) + " is none of the " +
                                           std::to_string(devices) + " that this process sees (they count from 0)");
}

Invitation invite() {
  Invitation out;
  out.version = vendor().version;
  const int result = vendor().api.get_unique_id(&out.id);
  if (result == kSuccess) return out;
  out.tag = 'E';
  out.trouble = "ncclGetUniqueId: " + vendor().words(result, nullptr);
  return out;
}

void publish(const polyccl_store& store, const Invitation& invitation) {
  const std::string text = invitation.encode();
  const polyccl_result result = store.set(store.ctx, kIdKey, text.data(), text.size());
  if (result != POLYCCL_OK) throw Failure(result, "the store did not take the unique id");
}

Invitation receive(const polyccl_comm_config& config) {
  std::string text(4096, '\0');
  uint64_t size = 0;
  const polyccl_store& store = *config.store;
  const polyccl_result result = store.get(store.ctx, kIdKey, text.data(), text.size(), &size, config.deadline);
  if (result != POLYCCL_OK) throw Failure(result, "rank 0 has not put the unique id into the store");
  text.resize(std::min<uint64_t>(size, text.size()));
  return Invitation::decode(text);
}

bool cancelled(const polyccl_comm_config& config) {
  return config.store->cancelled != nullptr && config.store->cancelled(config.store->ctx) != 0;
}

// Pads of device memory, one for each communicator: two that are in use at once must not write the same one. They are
// kept for later communicators, since freeing device memory may wait for all that runs on the device.
class Pads {
 public:
  static Pads& instance() {
    static Pads& pads = *std::make_unique<Pads>().release();  // outlives every communicator
    return pads;
  }

  void* take(int device) {
    const std::lock_guard lock(mutex_);
    std::vector<void*>& unused = unused_[device];
    if (unused.empty()) {
      void* pad = nullptr;
      check(runtime().alloc(&pad, kPadBytes), "allocating device memory");
      return pad;
    }
    void* const pad = unused.back();
    unused.pop_back();
    return pad;
  }

  void give_back(int device, void* pad) {
    const std::lock_guard lock(mutex_);
    unused_[device].push_back(pad);
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<void*>> unused_;  // by device
};

// End a communicator of the library by force. Returns within a bound, whatever the library does.
void abort_bounded(Handle handle) {
  const auto result =
      run_bounded([abort = vendor().api.comm_abort, handle] { return abort(handle); }, now_ns() + kAbortBound);
  if (!result) {
    log(POLYCCL_LOG_WARNING, std::string(flavour_name(vendor().flavour)) +
                                 "'s ncclCommAbort() has not returned in 10 s; its thread is left behind");
  }
}

}  // namespace

polyccl_result code_of(int result) {
  switch (result) {
    case kSuccess:
      return POLYCCL_OK;
    case kInvalidArgument:
    case kInvalidUsage:
      return POLYCCL_ERROR_INVALID;
    case kRemoteError:
      return POLYCCL_ERROR_PEER_LOST;
    case kTimeout:
      return POLYCCL_ERROR_TIMEOUT;
    default:
      return POLYCCL_ERROR_INTERNAL;
  }
}

// ---- creation

Comm::Comm(const polyccl_comm_config& config)
    : rank_(config.rank), size_(config.size), device_(-1), name_(config.name != nullptr ? config.name : "") {
  check_config(config);
  try {
    (void)vendor();  // before the runtime: an RCCL brings the HIP that it works with
    device_ = device_of(config);
    connect(config);
  } catch (const Failure& e) {
    abort();
    throw Failure(e.result(), where() + ": " + e.what());
  }
}

void Comm::connect(const polyccl_comm_config& config) {
  Invitation invitation;
  if (rank_ == 0) {
    invitation = invite();
    if (size_ > 1) publish(*config.store, invitation);
  } else {
    invitation = receive(config);
  }
  if (invitation.tag == 'E') throw Failure(POLYCCL_ERROR_UNAVAILABLE, "rank 0 has no unique id: " + invitation.trouble);
  if (invitation.tag != 'I') {
    throw Failure(POLYCCL_ERROR_INTERNAL,
                  "what rank 0 put into the store is no unique id; give ranks one version of PolyCCL");
  }
  if (invitation.version != vendor().version) {
    throw Failure(POLYCCL_ERROR_INVALID, "this rank has version " + std::to_string(vendor().version) + " of " +
                                             flavour_name(vendor().flavour) + " and rank 0 has " +
                                             std::to_string(invitation.version) +
                                             ": all ranks need the same. Install one version everywhere");
  }
  const Current current(device_);
  pad_ = Pads::instance().take(device_);
  start(config, invitation.id);
}

void Comm::start(const polyccl_comm_config& config, const UniqueId& id) {
  const Api& api = vendor().api;
  if (api.comm_init_rank_config == nullptr) return start_blocking(config, id);
  Config settings = Config::for_version(vendor().version, name_.empty() ? nullptr : name_.c_str());
  Handle made = nullptr;
  const int result = api.comm_init_rank_config(&made, size_, id, rank_, &settings);
  handle_ = made;
  if (result != kSuccess && result != kInProgress) refuse_start(result);
  await_start(config);
}

// For libraries before 2.14: on a thread that is given up at the deadline.
void Comm::start_blocking(const polyccl_comm_config& config, const UniqueId& id) {
  auto made = std::make_shared<Handle>(nullptr);
  const auto init = [api = &vendor().api, made, id, size = size_, rank = rank_, device = device_] {
    try {
      const Current current(device);
      return api->comm_init_rank(made.get(), size, id, rank);
    } catch (const Failure&) {  // nothing may leave the thread
      return int{kUnhandledCudaError};
    }
  };
  const auto late = [made](int result) {
    if (result == kSuccess) abort_bounded(*made);
  };
  const auto result = run_bounded(
      init, config.deadline, [&] { return cancelled(config); }, late);
  if (!result && cancelled(config)) throw Failure(POLYCCL_ERROR_ABORTED, "the creation was given up");
  if (!result) throw Failure(POLYCCL_ERROR_TIMEOUT, "another rank did not come by the deadline");
  if (*result != kSuccess) refuse_start(*result);
  handle_ = *made;
}

void Comm::await_start(const polyccl_comm_config& config) {
  Pause pause;
  for (;;) {
    int state = kSuccess;
    const int result = vendor().api.comm_get_async_error(handle_, &state);
    if (result != kSuccess) refuse_start(result);
    if (state == kSuccess) return;
    if (state != kInProgress) refuse_start(state);
    if (cancelled(config)) throw Failure(POLYCCL_ERROR_ABORTED, "the creation was given up");
    if (config.deadline != 0 && now_ns() >= config.deadline) {
      throw Failure(POLYCCL_ERROR_TIMEOUT, "another rank did not come by the deadline");
    }
    pause();
  }
}

void Comm::refuse_start(int result) {
  // Whatever of CUDA or HIP fails here has failed before any rank was met: there is no device to work with.
  const bool absent = result == kUnhandledCudaError;
  const polyccl_result code = absent ? POLYCCL_ERROR_UNAVAILABLE : code_of(result);
  const std::string advice = absent ? std::string(". ") + family().advice : ". NCCL_DEBUG=INFO makes it say more";
  throw Failure(code, std::string(flavour_name(vendor().flavour)) +
                          " did not create the communicator: " + vendor().words(result, handle_) + advice);
}

// ---- calls

void Comm::call(int64_t deadline, const char* doing, const std::function<int(Handle)>& body) {
  {
    const std::lock_guard lock(calls_);
    if (aborted() || handle_ == nullptr) fail(kSuccess, doing);
    const int result = body(handle_);
    if (result == kSuccess) return;
    if (result != kInProgress || aborted()) fail(result, doing);
  }
  Pause pause;
  while (look_at_result(doing) == kInProgress) {
    if (deadline != 0 && now_ns() >= deadline) {
      throw Failure(
          POLYCCL_ERROR_TIMEOUT,
          where() + ": " + doing + ": the library did not take it by the deadline; another rank may not have come");
    }
    pause();
  }
}

int Comm::look_at_result(const char* doing) {
  const std::lock_guard lock(calls_);
  if (aborted() || handle_ == nullptr) fail(kSuccess, doing);
  int state = kSuccess;
  const int result = vendor().api.comm_get_async_error(handle_, &state);
  if (result != kSuccess) fail(result, doing);
  if (state != kSuccess && state != kInProgress) fail(state, doing);
  return state;
}

void Comm::look() { (void)look_at_result("looking for errors"); }

void Comm::fail(int result, const char* doing) {
  if (aborted()) throw Failure(POLYCCL_ERROR_ABORTED, where() + ": " + doing + ": the communicator was aborted");
  throw Failure(code_of(result), where() + ": " + doing + ": " + vendor().words(result, handle_));
}

// ---- the end

void Comm::abort() {
  aborted_.store(true, std::memory_order_release);
  std::unique_lock lock(calls_, std::defer_lock);
  // The library's own abort may run beside a call that hangs in it, and wakes it.
  const int64_t bound = now_ns() + kLockBound;
  for (Pause pause; !lock.try_lock() && now_ns() < bound; pause()) {
  }
  const Handle handle = handle_;
  if (lock.owns_lock()) handle_ = nullptr;
  if (handle != nullptr && !abort_started_.exchange(true)) abort_bounded(handle);
}

// Free the library's communicator in good order, within a bound; handle_ stays where that did not work out.
void Comm::finish() {
  enum Stage : int { kFinalizing, kGivenUp, kDestroying };
  const auto stage = std::make_shared<std::atomic<int>>(kFinalizing);
  const auto body = [api = vendor().api, handle = handle_.load(), stage] {
    int state = api.comm_finalize != nullptr ? api.comm_finalize(handle) : kSuccess;
    for (Pause pause; state == kInProgress; pause()) {
      if (*stage == kGivenUp || api.comm_get_async_error(handle, &state) != kSuccess) return -1;
    }
    int expected = kFinalizing;
    if (state != kSuccess || !stage->compare_exchange_strong(expected, kDestroying)) return -1;
    return api.comm_destroy(handle);
  };
  const auto result = run_bounded(body, now_ns() + kFinalizeBound);
  int expected = kFinalizing;
  if (stage->compare_exchange_strong(expected, kGivenUp)) return;  // the caller ends it by force
  handle_ = nullptr;
  if (!result) log(POLYCCL_LOG_WARNING, where() + ": ncclCommDestroy() has not returned in 20 s; it is left behind");
}

Comm::~Comm() {
  if (!aborted() && handle_ != nullptr) finish();
  // One that ends by force may leave work behind, and its pad with it.
  if (!aborted() && handle_ == nullptr && pad_ != nullptr) Pads::instance().give_back(device_, pad_);
  abort();
}

std::string Comm::where() const {
  return "rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " of communicator '" + name_ + "' on " +
         family().backend;
}

std::string Comm::error() const {
  const std::lock_guard lock(error_mutex_);
  return error_;
}

void Comm::set_error(const std::string& text) {
  const std::lock_guard lock(error_mutex_);
  error_ = text;
}

}  // namespace polyccl_ccl
