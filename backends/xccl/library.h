// The library oneCCL: where it is found, what it exports, and the environment that it starts in.
#pragma once

#include <string>

#include "../common/failure.h"
#include "../common/library.h"
#include "oneccl.h"

namespace polyccl_xccl {

using polyccl_ccl::Failure;
using polyccl_ccl::Library;

struct OneCcl {
  Library library;
  oneccl::Api api;
  int version = 0;  // major * 10000 + minor * 100 + patch

  std::string version_text() const;
};

// The open library; opened by the first call, which throws a Failure where there is none. It is never closed.
const OneCcl& open_oneccl();

// The same, or null where it cannot be opened.
const OneCcl* open_oneccl_if_there() noexcept;

// Give oneCCL the interface that holds `address` (or is called `interface`) where the user chose none. It reads its
// environment at its first call, so that the first communicator of a process decides.
void choose_interface(const char* address, const char* interface);

// What ended oneCCL's own thread in this process; "" while it lives. Without it nothing moves any more.
std::string worker_failure();

// Keep the process alive where an exception ends oneCCL's own thread, as the loss of a peer in mid-transfer does: that
// thread is parked then. Other uncaught exceptions end the process as ever.
void guard_worker();

// Lives while a call of oneCCL runs.
class Inside {
 public:
  Inside();
  ~Inside();
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

// With a communicator that was left as it is, and with a call that does not return, the process skips oneCCL's own
// clean-up at its exit, which would wait for them. watch_exit() is for calls from now on.
void leave_behind();
void watch_exit();

}  // namespace polyccl_xccl
