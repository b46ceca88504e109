// Gloo's transport, decorated: see transport.h.
#include "transport.h"

#include <algorithm>
#include <ctime>
#include <exception>
#include <utility>

namespace polyccl_gloo {
namespace {

// Slots of the sentinels; Gloo's algorithms use prefixes 1 to 8 (gloo/types.h).
constexpr uint64_t kSentinelSlot = uint64_t{0x42} << 56;

constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);

int64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

}  // namespace

std::chrono::milliseconds time_left(int64_t deadline) {
  if (deadline == 0) return kForever;
  const int64_t left = (deadline - now_ns() + 999'999) / 1'000'000;
  return std::chrono::milliseconds(std::clamp<int64_t>(left, 1, kForever.count()));
}

bool expired(int64_t deadline) { return deadline != 0 && now_ns() >= deadline; }

// ---------------------------------------------------------------------------------------------------------------------
// State
// ---------------------------------------------------------------------------------------------------------------------

void State::end(polyccl_result reason, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (!ended_) {
    reason_ = reason;
    text_ = text;
    ended_ = true;
  }
  for (Buffer* buffer : live_) {
    buffer->abortWaitRecv();
    buffer->abortWaitSend();
  }
}

polyccl_result State::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

std::string State::text() const {
  const std::lock_guard lock(mutex_);
  return text_;
}

void State::check() const {
  if (!ended_) return;
  const std::lock_guard lock(mutex_);
  throw Failure(reason_, text_);
}

void State::end_if_stuck(const std::vector<bool>& gone, const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    if (std::none_of(live_.begin(), live_.end(), [&](const Buffer* buffer) { return buffer->stuck(gone); })) return;
  }
  end(POLYCCL_ERROR_PEER_LOST, text);
}

void State::add(Buffer* buffer) {
  const std::lock_guard lock(mutex_);
  if (ended_) throw Failure(reason_, text_);
  live_.insert(buffer);
}

void State::remove(Buffer* buffer) {
  const std::lock_guard lock(mutex_);
  live_.erase(buffer);
}

void State::park(std::unique_ptr<gloo::transport::UnboundBuffer> done) {
  std::unique_ptr<gloo::transport::UnboundBuffer> oldest;  // freed outside the lock: freeing may spin
  const std::lock_guard lock(mutex_);
  parked_.push_back(std::move(done));
  if (parked_.size() <= kParked) return;
  oldest = std::move(parked_.front());
  parked_.pop_front();
}

void State::clear_parked() {
  std::deque<std::unique_ptr<gloo::transport::UnboundBuffer>> parked;
  const std::lock_guard lock(mutex_);
  parked.swap(parked_);
}

// ---------------------------------------------------------------------------------------------------------------------
// Buffer
// ---------------------------------------------------------------------------------------------------------------------

Buffer::Buffer(std::shared_ptr<State> state, std::unique_ptr<gloo::transport::UnboundBuffer> inner)
    : gloo::transport::UnboundBuffer(inner->ptr, inner->size), state_(std::move(state)), inner_(std::move(inner)) {
  state_->add(this);
}

Buffer::~Buffer() {
  state_->remove(this);  // first: end() calls those that are live, from any thread
  // Where something is still posted, Gloo's thread may yet write to this memory: only the real destructor rules that
  // out.
  if (sends_.pending == 0 && receives_.pending == 0) state_->park(std::move(inner_));
}

bool Buffer::waitRecv(int* rank, std::chrono::milliseconds) {
  state_->check();
  if (!inner_->waitRecv(rank, time_left(state_->deadline))) {
    state_->check();
    throw Failure(POLYCCL_ERROR_INTERNAL, "a wait was interrupted for no known reason");
  }
  done(receives_);
  return true;
}

bool Buffer::waitSend(int* rank, std::chrono::milliseconds) {
  state_->check();
  if (!inner_->waitSend(rank, time_left(state_->deadline))) {
    state_->check();
    throw Failure(POLYCCL_ERROR_INTERNAL, "a wait was interrupted for no known reason");
  }
  done(sends_);
  return true;
}

void Buffer::send(int peer, uint64_t slot, size_t offset, size_t bytes) {
  state_->check();
  post(sends_, {peer});
  inner_->send(peer, slot, offset, bytes);
}

void Buffer::recv(int peer, uint64_t slot, size_t offset, size_t bytes) {
  state_->check();
  post(receives_, {peer});
  inner_->recv(peer, slot, offset, bytes);
}

void Buffer::recv(std::vector<int> peers, uint64_t slot, size_t offset, size_t bytes) {
  state_->check();
  post(receives_, peers);
  inner_->recv(std::move(peers), slot, offset, bytes);
}

bool Buffer::stuck(const std::vector<bool>& gone) const {
  const std::lock_guard lock(mutex_);
  return sends_.stuck(gone) || receives_.stuck(gone);
}

void Buffer::post(Direction& direction, const std::vector<int>& peers) {
  const std::lock_guard lock(mutex_);
  direction.post(peers);
}

void Buffer::done(Direction& direction) {
  const std::lock_guard lock(mutex_);
  if (--direction.pending == 0) direction.peers.clear();
}

void Buffer::Direction::post(const std::vector<int>& with) {
  ++pending;
  for (const int peer : with) {
    if (std::find(peers.begin(), peers.end(), peer) == peers.end()) peers.push_back(peer);
  }
}

bool Buffer::Direction::stuck(const std::vector<bool>& gone) const {
  // Gloo does not tell which of several peers a completion belongs to, so all of them must be gone.
  return pending > 0 &&
         std::all_of(peers.begin(), peers.end(), [&](int peer) { return gone[static_cast<size_t>(peer)]; });
}

// ---------------------------------------------------------------------------------------------------------------------
// Context, Device
// ---------------------------------------------------------------------------------------------------------------------

Context::Context(std::shared_ptr<State> state, std::shared_ptr<gloo::transport::Context> inner)
    : gloo::transport::Context(inner->rank, inner->size), state_(std::move(state)), inner_(std::move(inner)) {}

std::unique_ptr<gloo::transport::Pair>& Context::createPair(int peer) {
  inner_->setTimeout(getTimeout());  // set on this object, by a function that is not virtual
  return inner_->createPair(peer);
}

#if POLYCCL_GLOO_CONNECTS_INSIDE
void Context::createAndConnectAllPairs(std::shared_ptr<gloo::IStore> store) {
  inner_->setTimeout(getTimeout());
  inner_->createAndConnectAllPairs(std::move(store));
}
#endif

std::unique_ptr<gloo::transport::UnboundBuffer> Context::createUnboundBuffer(void* data, size_t bytes) {
  return std::make_unique<Buffer>(state_, inner_->createUnboundBuffer(data, bytes));
}

Device::Device(std::shared_ptr<State> state, std::shared_ptr<gloo::transport::Device> inner)
    : state_(std::move(state)), inner_(std::move(inner)) {}

std::shared_ptr<gloo::transport::Context> Device::createContext(int rank, int size) {
  context_ = std::make_shared<Context>(state_, inner_->createContext(rank, size));
  return context_;
}

// ---------------------------------------------------------------------------------------------------------------------
// Sentinels
// ---------------------------------------------------------------------------------------------------------------------

Sentinels::Sentinels(gloo::transport::Context& inner, int rank, int size)
    : size_(size), data_(static_cast<size_t>(size)), buffers_(static_cast<size_t>(size)) {
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const auto i = static_cast<size_t>(peer);
    buffers_[i] = inner.createUnboundBuffer(&data_[i], 1);
    buffers_[i]->recv(peer, kSentinelSlot, 0, 1);
  }
}

std::vector<bool> Sentinels::gone(std::string* text) {
  const std::lock_guard lock(mutex_);  // a probe's two calls belong together
  std::vector<bool> gone(static_cast<size_t>(size_));
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (!buffers_[i]) continue;
    try {
      buffers_[i]->abortWaitRecv();  // so that the wait returns at once, unless the connection has failed
      (void)buffers_[i]->waitRecv(nullptr, kForever);
    } catch (const std::exception& e) {
      if (text->empty()) *text = e.what();
      gone[i] = true;
    }
  }
  return gone;
}

}  // namespace polyccl_gloo
