// Gloo's transport, decorated.
//
// Gloo's own classes lack three things that a communicator must have, and all of them are reached through its virtual
// interface:
//   - abort: closing connections does not wake a thread that waits, so every live buffer is known here and can be told
//   to stop waiting;
//   - one deadline for an operation: Gloo gives each of its waits the whole timeout; here each wait gets what is left;
//   - cheap buffers: ~UnboundBuffer spins until Gloo's own thread lets go, so buffers that are done are parked and
//   freed later.
// Sentinels add a fourth: who is gone. A receive that nobody answers is posted to every peer, and fails when the
// connection does.
#pragma once

#include <gloo/rendezvous/context.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <polyccl/backend.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

// Newer Gloo connects the pairs inside its transport context; the older one does it from outside.
#if __has_include(<gloo/common/store.h>)
#define POLYCCL_GLOO_CONNECTS_INSIDE 1
#else
#define POLYCCL_GLOO_CONNECTS_INSIDE 0
#endif

namespace polyccl_gloo {

// An error of this plugin's own, with its result.
class Failure : public std::runtime_error {
 public:
  Failure(polyccl_result result, const std::string& text) : std::runtime_error(text), result_(result) {}
  polyccl_result result() const { return result_; }

 private:
  polyccl_result result_;
};

// Time that is left until an absolute deadline, in Gloo's unit: rounded up, at least 1 ms; a year where there is none.
std::chrono::milliseconds time_left(int64_t deadline);
bool expired(int64_t deadline);

class Buffer;

// What the decorated objects of one communicator share.
class State {
 public:
  // From now on nothing waits: whatever waits throws, as does whatever comes later. The first reason stays.
  void end(polyccl_result reason, const std::string& text);
  bool ended() const { return ended_.load(); }
  polyccl_result reason() const;
  std::string text() const;

  // Throw the reason as a Failure where the communicator has ended.
  void check() const;

  // End with POLYCCL_ERROR_PEER_LOST where a buffer waits only for ranks that are gone (gone[rank]).
  void end_if_stuck(const std::vector<bool>& gone, const std::string& text);

  void add(Buffer* buffer);
  void remove(Buffer* buffer);
  void park(std::unique_ptr<gloo::transport::UnboundBuffer> done);
  void clear_parked();

  std::atomic<int64_t> deadline{0};  // of the operation that runs
  std::atomic<bool> busy{false};     // one does

 private:
  static constexpr size_t kParked = 64;
  mutable std::mutex mutex_;
  std::atomic<bool> ended_{false};
  polyccl_result reason_ = POLYCCL_OK;
  std::string text_;
  std::unordered_set<Buffer*> live_;
  std::deque<std::unique_ptr<gloo::transport::UnboundBuffer>> parked_;
};

// A buffer that abort() reaches. Waits end by the operation's deadline, whatever timeout Gloo's algorithms pass.
class Buffer final : public gloo::transport::UnboundBuffer {
 public:
  Buffer(std::shared_ptr<State> state, std::unique_ptr<gloo::transport::UnboundBuffer> inner);
  ~Buffer() override;

  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override;
  bool waitSend(int* rank, std::chrono::milliseconds timeout) override;
  void abortWaitRecv() override { inner_->abortWaitRecv(); }
  void abortWaitSend() override { inner_->abortWaitSend(); }
  void send(int peer, uint64_t slot, size_t offset, size_t bytes) override;
  void recv(int peer, uint64_t slot, size_t offset, size_t bytes) override;
  void recv(std::vector<int> peers, uint64_t slot, size_t offset, size_t bytes) override;

  using gloo::transport::UnboundBuffer::waitRecv;
  using gloo::transport::UnboundBuffer::waitSend;

  // Whether it waits, in one direction, for nobody but ranks that are gone.
  bool stuck(const std::vector<bool>& gone) const;

 private:
  // What is posted in one direction and not waited for yet, and with whom.
  struct Direction {
    std::vector<int> peers;
    int pending = 0;
    void post(const std::vector<int>& with);
    bool stuck(const std::vector<bool>& gone) const;
  };
  void post(Direction& direction, const std::vector<int>& peers);
  void done(Direction& direction);

  std::shared_ptr<State> state_;
  std::unique_ptr<gloo::transport::UnboundBuffer> inner_;
  mutable std::mutex mutex_;  // the directions are read by the thread that watches
  Direction sends_, receives_;
};

class Context final : public gloo::transport::Context {
 public:
  Context(std::shared_ptr<State> state, std::shared_ptr<gloo::transport::Context> inner);

  std::unique_ptr<gloo::transport::Pair>& getPair(int peer) override { return inner_->getPair(peer); }
  std::unique_ptr<gloo::transport::Pair>& createPair(int peer) override;
#if POLYCCL_GLOO_CONNECTS_INSIDE
  void createAndConnectAllPairs(std::shared_ptr<gloo::IStore> store) override;
#endif
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* data, size_t bytes) override;

  gloo::transport::Context& inner() { return *inner_; }

 private:
  std::shared_ptr<State> state_;
  std::shared_ptr<gloo::transport::Context> inner_;
};

class Device final : public gloo::transport::Device {
 public:
  Device(std::shared_ptr<State> state, std::shared_ptr<gloo::transport::Device> inner);

  std::string str() const override { return inner_->str(); }
  const std::string& getPCIBusID() const override { return inner_->getPCIBusID(); }
  int getInterfaceSpeed() const override { return inner_->getInterfaceSpeed(); }
  bool hasGPUDirect() const override { return inner_->hasGPUDirect(); }
  std::shared_ptr<gloo::transport::Context> createContext(int rank, int size) override;

  // What createContext() made last.
  const std::shared_ptr<Context>& context() const { return context_; }

 private:
  std::shared_ptr<State> state_;
  std::shared_ptr<gloo::transport::Device> inner_;
  std::shared_ptr<Context> context_;
};

// One receive to every peer that nobody ever answers: it fails when the connection does.
class Sentinels {
 public:
  Sentinels(gloo::transport::Context& inner, int rank, int size);

  // Which ranks' connections are gone; `text` gets Gloo's words for the first. Never blocks.
  std::vector<bool> gone(std::string* text);

 private:
  const int size_;
  std::mutex mutex_;
  std::vector<char> data_;
  std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>> buffers_;  // by rank; null for this one
};

}  // namespace polyccl_gloo
