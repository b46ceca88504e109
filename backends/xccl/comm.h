// A communicator on oneCCL.
//
// Its calls block, and none of them can be ended: oneCCL has no abort (POLYCCL_FLAG_MAY_HANG). PolyCCL makes them on a
// thread that it can give up.
#pragma once

#include <polyccl/backend.h>

#include <atomic>
#include <mutex>
#include <string>

#include "library.h"

namespace polyccl_xccl {

class Comm {
 public:
  // Meets the other ranks at the store, then in oneCCL, which waits for all of them without a limit. Throws Failure.
  explicit Comm(const polyccl_comm_config& config);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // Run operations to their end; several are one group of sends and receives. Throws Failure: before anything is sent
  // where the arguments are wrong, else the communicator is of no use afterwards.
  void run(const polyccl_op* const* ops, uint32_t n);

  // No call begins any more; one that is running goes on.
  void abort();

  void set_error(const std::string& text);
  std::string error() const;

 private:
  void require_alive() const;
  void check(oneccl::Result result, const char* function);

  const OneCcl& one_;
  const int rank_, size_;
  const std::string name_;
  oneccl::Comm comm_ = nullptr;
  std::atomic<bool> aborted_{false};
  bool failed_ = false;
  mutable std::mutex error_mutex_;
  std::string error_;
};

}  // namespace polyccl_xccl
