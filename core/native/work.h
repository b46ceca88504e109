// Work: the handle of an operation that was issued.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "clock.h"
#include "error.h"
#include "fork.h"

namespace polyccl {

class Work {
 public:
  explicit Work(std::string description, Deadline deadline)
      : description_(std::move(description)), deadline_(deadline) {}

  // Also true in a forked child, where nothing would ever complete it: there the error says so.
  bool done() const { return done_.load(std::memory_order_acquire) || made_.inherited(); }

  // The operation's own error, once done.
  std::optional<Error> error() const;

  // Block until done, until `deadline` (false), or until `interrupted`, asked about every 100 ms, says so (false).
  bool wait(Deadline deadline, const std::function<bool()>& interrupted) const;

  // Throw the operation's error, if it is done and has one.
  void raise() const;

  // Call when done, from the thread that completes the operation, or at once. Must not block.
  void on_done(std::function<void()> callback);

  // Complete; the first call counts. Releases what was kept alive.
  void complete(std::optional<Error> error);

  // Hold on to the operation's memory, and to the communicator that it runs on, until done.
  void keep_alive(std::shared_ptr<void> memory, std::shared_ptr<void> communicator) {
    kept_ = std::move(memory);
    communicator_ = std::move(communicator);
  }

  // For operations of devices: how to make the user's current stream wait for this one instead of the host.
  void set_join(std::function<void()> join) { join_ = std::move(join); }
  const std::function<void()>& join() const { return join_; }

  // Hold on to the memory until the process ends: a library's call that was given up may still use it. Before complete().
  void keep_forever();

  const std::string& description() const { return description_; }
  Deadline deadline() const { return deadline_; }

 private:
  const std::string description_;
  const Deadline deadline_;
  const Birthplace made_;
  std::atomic<bool> done_{false};
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::optional<Error> error_;
  std::shared_ptr<void> kept_, communicator_;
  std::function<void()> join_;
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace polyccl
