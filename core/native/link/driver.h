// Who drives the sockets: one of the waiting threads, or a thread of the link's own while nobody waits. The others park
// and are woken when something may have changed for them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "../clock.h"
#include "socket.h"

namespace polyccl {

class Driver {
 public:
  // Waits up to `timeout_ms` for events on the poller (0: not at all) and handles them; true where there were any.
  using Pump = std::function<bool(int timeout_ms)>;

  // `epoll` is the poller's descriptor; the driver adds its own wake-up event to it, with `wake_key` as data.
  Driver(int epoll, uint64_t wake_key, Pump pump);
  ~Driver() { stop(); }

  void start();  // the background thread
  void stop();

  bool wait(const std::function<bool()>& ready, Deadline deadline, const std::function<bool()>& interrupted);

  // Something may have changed for a waiter. Cheap where nobody sleeps.
  void notify();
  void on_wake_event();                          // the poller reports the wake-up event
  void awake() { driver_asleep_.store(false); }  // a pump with a timeout has returned from the poller
  void driven() { last_drive_.store(now_ns(), std::memory_order_relaxed); }

  // In a forked child: close what was inherited; there is no thread any more.
  void abandon();

 private:
  class Waiting;
  void drive(Waiting& waiting);
  void follow(Waiting& waiting);
  void sleep_in_poller(Waiting& waiting, uint64_t seen);
  void hand_over();
  void background();
  void background_turn();

  const int epoll_;
  const Pump pump_;
  Fd wake_, background_wake_;

  std::atomic<uint64_t> generation_{0};  // counts notify()
  std::atomic<bool> driving_{false};     // a waiter is the driver
  std::atomic<bool> driver_asleep_{false};
  std::atomic<int> waiters_{0}, parked_{0};
  std::mutex park_mutex_;
  std::condition_variable park_;

  std::thread thread_;
  std::atomic<bool> stopping_{false};
  // What the background thread sleeps on, so that those who must wake it know.
  enum class Doze { kNone, kPoller, kLong };
  std::atomic<Doze> doze_{Doze::kNone};
  std::atomic<int64_t> last_drive_{0};
  std::atomic<int64_t> asleep_since_{0};  // of the driver; 0 while it is awake
};

}  // namespace polyccl
