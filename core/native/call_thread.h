// A thread for calls that may never return, as those of a library without an abort.
//
// Whoever waits for such a call stops waiting at its deadline or at give_up(). A call that is still running then goes
// on alone: its thread is detached, and all that the call was given must stay for as long as the process lives.
#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "clock.h"

namespace polyccl {

class CallThread {
 public:
  enum class End { kDone, kTimeout, kGivenUp, kInterrupted };

  CallThread();
  ~CallThread();  // gives up what is running
  CallThread(const CallThread&) = delete;
  CallThread& operator=(const CallThread&) = delete;

  // Make a call, which must own or outlive all that it uses, and may not throw. One caller at a time. `interrupted` is
  // asked every 100 ms. After any end but kDone every further call ends with kGivenUp.
  End run(std::function<void()> call, Deadline deadline, const std::function<bool()>& interrupted = {});

  // From any thread: nobody waits any more, and no call begins.
  void give_up() noexcept;
  bool given_up() const;

  // Whether a call was running when the thread was given up. It may have ended since.
  bool hangs() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // the thread's as much as ours
  std::thread thread_;
};

// Hold on to something until the process ends: a call that was given up may still use it.
void keep_forever(std::shared_ptr<void> what);

}  // namespace polyccl
