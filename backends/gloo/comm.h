// A communicator on Gloo: how it comes to be, how it ends, and what its operations share.
#pragma once

#include <gloo/rendezvous/context.h>
#include <polyccl/backend.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport.h"

namespace polyccl_gloo {

// Looks, while an operation runs, whether a rank it waits for is gone. Gloo wakes most waiters itself, but none whose
// buffer was half transferred when the connection failed.
class Watch {
 public:
  Watch(std::shared_ptr<State> state, std::shared_ptr<Sentinels> sentinels);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  void run();
  void look();

  std::shared_ptr<State> state_;
  std::shared_ptr<Sentinels> sentinels_;
  std::mutex mutex_;
  std::condition_variable stopping_;
  bool stop_ = false;
  std::thread thread_;
};

class Comm {
 public:
  // Connects to all ranks, by the config's deadline. Throws.
  explicit Comm(const polyccl_comm_config& config);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::shared_ptr<gloo::rendezvous::Context>& context() const { return context_; }  // null for a single rank

  // The tag of the next collective: the same on all ranks, which issue alike.
  uint32_t next_tag() { return tag_++; }

  // Take `pieces` slots of the ordered messages to (from) a peer; gives the first.
  uint64_t next_send(int peer, uint64_t pieces) { return take(sent_, peer, pieces); }
  uint64_t next_receive(int peer, uint64_t pieces) { return take(received_, peer, pieces); }

  // Memory that stays with the communicator, for small things.
  std::byte* scratch(size_t bytes);

  // Run one operation's `body` by `deadline`. Whatever it throws, but a refusal, ends the communicator.
  polyccl_result run(int64_t deadline, const std::function<void()>& body);

  void abort();

  void set_error(const std::string& text);
  std::string error() const;

 private:
  void connect(const polyccl_comm_config& config, const std::string& address);
  polyccl_result fail(std::exception_ptr thrown, int64_t deadline);
  void close() noexcept;
  std::string gone_ranks();
  uint64_t take(std::vector<uint64_t>& counters, int peer, uint64_t pieces);

  int rank_, size_;
  std::string name_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::shared_ptr<gloo::rendezvous::Context> context_;
  std::shared_ptr<Sentinels> sentinels_;
  std::unique_ptr<Watch> watch_;
  uint32_t tag_ = 0;
  std::vector<uint64_t> sent_, received_;
  std::vector<std::byte> scratch_;
  bool mask_sigpipe_ = false;
  mutable std::mutex error_mutex_;
  std::string error_;
};

// A refusal: the arguments are wrong or not supported. Nothing was sent, and the communicator stays usable.
class Refusal : public Failure {
 public:
  using Failure::Failure;
};

}  // namespace polyccl_gloo
