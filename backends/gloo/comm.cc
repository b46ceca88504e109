// A communicator on Gloo: how it comes to be, and how it ends.
#include "comm.h"

#include <gloo/common/error.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>

#include <csignal>
#include <ctime>
#include <map>
#include <stdexcept>
#include <utility>

#include "address.h"

namespace polyccl_gloo {
namespace {

// Gloo writes to sockets without MSG_NOSIGNAL. Python ignores SIGPIPE; where a host does not, its thread holds the
// signal back.
class SigpipeGuard {
 public:
  explicit SigpipeGuard(bool needed) : needed_(needed) {
    if (!needed_) return;
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~SigpipeGuard() {
    if (!needed_ || sigismember(&before_, SIGPIPE) == 1) return;
    const timespec none{};
    while (sigtimedwait(&pipe_, nullptr, &none) == SIGPIPE) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SigpipeGuard(const SigpipeGuard&) = delete;
  SigpipeGuard& operator=(const SigpipeGuard&) = delete;

 private:
  bool needed_;
  sigset_t pipe_{}, before_{};
};

bool sigpipe_kills() {
  struct sigaction action {};
  return sigaction(SIGPIPE, nullptr, &action) == 0 && (action.sa_flags & SA_SIGINFO) == 0 &&
         action.sa_handler == SIG_DFL;
}

// The given store as Gloo wants it. Usable until close(): newer Gloo keeps it.
class Store final : public gloo::rendezvous::Store {
 public:
  Store(const polyccl_store* store, int64_t deadline) : store_(store), deadline_(deadline) {}

  void close() { store_ = nullptr; }

  void set(const std::string& key, const std::vector<char>& value) override {
    check(key);
    const polyccl_result result = store_->set(store_->ctx, full(key).c_str(), value.data(), value.size());
    if (result != POLYCCL_OK) throw Failure(result, "the store did not take '" + full(key) + "'");
  }

  std::vector<char> get(const std::string& key) override {
    const auto known = values_.find(key);
    if (known != values_.end()) return known->second;
    check(key);
    std::vector<char> value(1024);
    for (;;) {
      uint64_t size = 0;
      const polyccl_result result =
          store_->get(store_->ctx, full(key).c_str(), value.data(), value.size(), &size, deadline_);
      if (result == POLYCCL_ERROR_INVALID && size > value.size()) {
        value.resize(size);
        continue;
      }
      if (result != POLYCCL_OK)
        throw Failure(result, "the store did not give '" + full(key) + "', which another rank sets");
      value.resize(size);
      return values_[key] = value;
    }
  }

  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) (void)get(key);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override { wait(keys); }

 private:
  static std::string full(const std::string& key) { return "gloo/" + key; }

  void check(const std::string& key) const {
    if (store_ == nullptr)
      throw Failure(POLYCCL_ERROR_INTERNAL, "Gloo asks for '" + key + "' after the communicator was made");
    if (store_->cancelled != nullptr && store_->cancelled(store_->ctx) != 0) {
      throw Failure(POLYCCL_ERROR_ABORTED, "the creation of the communicator was cancelled");
    }
  }

  const polyccl_store* store_;
  const int64_t deadline_;
  std::map<std::string, std::vector<char>> values_;
};

// Older Gloo takes a reference, newer Gloo shares the store.
template <typename GlooContext>
void connect_full_mesh(GlooContext& context, const std::shared_ptr<Store>& store,
                       std::shared_ptr<gloo::transport::Device>& device) {
  if constexpr (requires { context.connectFullMesh(store, device); }) {
    context.connectFullMesh(store, device);
  } else {
    context.connectFullMesh(*store, device);
  }
}

bool says_timeout(const std::string& text) {
  for (const char* words : {"imed out", "timeout", "Timeout"}) {
    if (text.find(words) != std::string::npos) return true;
  }
  return false;
}

// What an exception means, for a communicator that has not ended yet.
std::pair<polyccl_result, std::string> explain(std::exception_ptr thrown, int64_t deadline) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Failure& e) {
    return {e.result(), e.what()};
  } catch (const std::bad_alloc&) {
    return {POLYCCL_ERROR_INTERNAL, "out of memory"};
  } catch (const gloo::IoException& e) {
    const bool late = says_timeout(e.what()) || expired(deadline);
    return {late ? POLYCCL_ERROR_TIMEOUT : POLYCCL_ERROR_PEER_LOST, e.what()};
  } catch (const std::exception& e) {
    return {expired(deadline) ? POLYCCL_ERROR_TIMEOUT : POLYCCL_ERROR_INTERNAL, e.what()};
  } catch (...) {
    return {POLYCCL_ERROR_INTERNAL, "an exception of an unknown class"};
  }
}

std::string list(const std::vector<bool>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i]) text += (text.empty() ? "" : ", ") + std::to_string(i);
  }
  return text;
}

std::string or_empty(const char* text) { return text != nullptr ? text : ""; }

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Watch
// ---------------------------------------------------------------------------------------------------------------------

Watch::Watch(std::shared_ptr<State> state, std::shared_ptr<Sentinels> sentinels)
    : state_(std::move(state)), sentinels_(std::move(sentinels)), thread_([this] { run(); }) {}

Watch::~Watch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopping_.notify_all();
  thread_.join();
}

void Watch::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto pause = std::chrono::milliseconds(state_->busy ? 50 : 250);
    if (stopping_.wait_for(lock, pause, [this] { return stop_; })) return;
    if (!state_->busy || state_->ended()) continue;
    lock.unlock();
    look();
    lock.lock();
  }
}

void Watch::look() {
  try {
    std::string text;
    const std::vector<bool> gone = sentinels_->gone(&text);
    // A wait that times out closes all connections itself, just before it throws: that is no peer's loss.
    if (text.empty() || says_timeout(text)) return;
    state_->end_if_stuck(gone, "the connection to rank " + list(gone) + " is gone: " + text);
  } catch (const std::exception&) {  // out of memory: look again later
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Comm
// ---------------------------------------------------------------------------------------------------------------------

Comm::Comm(const polyccl_comm_config& config)
    : rank_(config.rank), size_(config.size), name_(or_empty(config.name)), mask_sigpipe_(sigpipe_kills()) {
  if (size_ < 1 || rank_ < 0 || rank_ >= size_) {
    throw Refusal(POLYCCL_ERROR_INVALID,
                  "rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " is no rank of a communicator");
  }
  sent_.resize(static_cast<size_t>(size_));
  received_.resize(static_cast<size_t>(size_));
  if (size_ == 1) return;
  if (config.store == nullptr) throw Refusal(POLYCCL_ERROR_INVALID, "a communicator of several ranks needs a store");
  const std::string address = choose_address(or_empty(config.address), or_empty(config.interface));
  try {
    connect(config, address);
  } catch (...) {
    const auto [result, text] = explain(std::current_exception(), config.deadline);
    throw Failure(result, text + " (this rank listens on " + address + ")");
  }
}

void Comm::connect(const polyccl_comm_config& config, const std::string& address) {
  const SigpipeGuard guard(true);  // Gloo's thread inherits the mask
  if (expired(config.deadline))
    throw Failure(POLYCCL_ERROR_TIMEOUT, "the deadline passed before the ranks could be connected");
  gloo::transport::tcp::attr attributes;
  attributes.hostname = address;
  const auto device = std::make_shared<Device>(state_, gloo::transport::tcp::CreateDevice(attributes));
  const auto store = std::make_shared<Store>(config.store, config.deadline);
  auto context = std::make_shared<gloo::rendezvous::Context>(rank_, size_);
  context->setTimeout(time_left(config.deadline));
  std::shared_ptr<gloo::transport::Device> base = device;
  connect_full_mesh(*context, store, base);
  store->close();
  sentinels_ = std::make_shared<Sentinels>(device->context()->inner(), rank_, size_);
  context_ = std::move(context);
  watch_ = std::make_unique<Watch>(state_, sentinels_);
}

Comm::~Comm() {
  watch_.reset();
  close();
  sentinels_.reset();
  state_->clear_parked();
}

std::byte* Comm::scratch(size_t bytes) {
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  return scratch_.data();
}

uint64_t Comm::take(std::vector<uint64_t>& counters, int peer, uint64_t pieces) {
  uint64_t& counter = counters[static_cast<size_t>(peer)];
  const uint64_t first = counter;
  counter += pieces;
  return first;
}

polyccl_result Comm::run(int64_t deadline, const std::function<void()>& body) {
  if (state_->ended()) {
    set_error("the communicator has ended: " + state_->text());
    return state_->reason();
  }
  const SigpipeGuard guard(mask_sigpipe_);
  state_->deadline = deadline;
  state_->busy = true;
  polyccl_result result = POLYCCL_OK;
  try {
    body();
  } catch (const Refusal& e) {
    result = e.result();
    set_error(e.what());
  } catch (...) {
    result = fail(std::current_exception(), deadline);
  }
  state_->busy = false;
  return result;
}

// An operation failed midway: ranks no longer agree on what comes next, so the communicator ends. Closing its
// connections lets the others know at once.
polyccl_result Comm::fail(std::exception_ptr thrown, int64_t deadline) {
  auto [result, text] = explain(thrown, deadline);
  if (result == POLYCCL_ERROR_PEER_LOST && !state_->ended()) text = gone_ranks() + text;
  state_->end(result, text);  // where it had ended, as by abort(), that stays the reason
  close();
  set_error(state_->text());
  return state_->reason();
}

std::string Comm::gone_ranks() {
  if (!sentinels_) return "";
  std::string words;
  const std::string ranks = list(sentinels_->gone(&words));
  return ranks.empty() ? "" : "the connection to rank " + ranks + " is gone: ";
}

void Comm::abort() {
  state_->end(POLYCCL_ERROR_ABORTED, "the communicator was aborted");
  close();
}

void Comm::close() noexcept {
  try {
    if (context_) context_->closeConnections();
  } catch (const std::exception&) {  // a connection that is broken already
  }
}

void Comm::set_error(const std::string& text) {
  const std::lock_guard lock(error_mutex_);
  error_ = name_.empty() ? text : "communicator '" + name_ + "', rank " + std::to_string(rank_) + ": " + text;
}

std::string Comm::error() const {
  const std::lock_guard lock(error_mutex_);
  return error_;
}

}  // namespace polyccl_gloo
