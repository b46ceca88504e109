// A communicator on a library of this family: how it comes to be, how calls are made on it, and how it ends.
#pragma once

#include <polyccl/backend.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "nccl_api.h"

namespace polyccl_ccl {

// The ABI's code for a result of the library.
polyccl_result code_of(int result);

class Comm {
 public:
  // Creates it with all ranks, by the config's deadline. Throws a Failure.
  explicit Comm(const polyccl_comm_config& config);

  // In good order, within a bound, unless it was aborted: then at once.
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int device() const { return device_; }
  std::string where() const;  // "rank 1 of 2 of communicator 'dp'"

  // Make calls of the library, none of which waits for a rank: `body` is given the handle and gives the library's
  // result. Then wait until the library has taken them (it does so in a thread of its own), by `deadline`, or until
  // abort(). Throws a Failure; whatever it throws ends the communicator.
  void call(int64_t deadline, const char* doing, const std::function<int(Handle)>& body);

  // A few bytes of device memory, for what needs a buffer but no data.
  void* pad() const { return pad_; }

  // Throws what went wrong since the last call.
  void look();

  void abort();
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }

  std::string error() const;
  void set_error(const std::string& text);

 private:
  void connect(const polyccl_comm_config& config);
  void start(const polyccl_comm_config& config, const UniqueId& id);
  void start_blocking(const polyccl_comm_config& config, const UniqueId& id);
  void await_start(const polyccl_comm_config& config);
  [[noreturn]] void refuse_start(int result);
  [[noreturn]] void fail(int result, const char* doing);
  int look_at_result(const char* doing);
  void finish();

  int rank_, size_, device_;
  std::string name_;
  void* pad_ = nullptr;
  std::mutex calls_;  // held while the library is in a call on handle_
  std::atomic<Handle> handle_{nullptr};
  std::atomic<bool> aborted_{false}, abort_started_{false};
  mutable std::mutex error_mutex_;
  std::string error_;
};

}  // namespace polyccl_ccl
