#include "driver.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "../error.h"

namespace polyccl {
namespace {

constexpr int64_t kSpinNs = 20'000;
constexpr int64_t kInterruptNs = 100'000'000;  // how often a waiter asks whether it is interrupted
constexpr int64_t kQuietNs = 2'000'000;        // after this long without a driver the background thread takes over

Fd make_event() {
  Fd fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!fd) throw Error(Code::kInternal, "cannot make an event descriptor: " + error_text(errno));
  return fd;
}

void signal_event(const Fd& fd) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(fd.get(), &one, sizeof one);  // full means that it is signalled already
}

void clear_event(const Fd& fd) {
  uint64_t count;
  [[maybe_unused]] const ssize_t n = read(fd.get(), &count, sizeof count);
}

int to_ms(int64_t ns) { return static_cast<int>(std::clamp<int64_t>((ns + 999'999) / 1'000'000, 0, 1'000)); }

}  // namespace

// One call of wait().
class Driver::Waiting {
 public:
  Waiting(const std::function<bool()>& ready, Deadline deadline, const std::function<bool()>& interrupted)
      : ready_(ready), deadline_(deadline), interrupted_(interrupted), ask_at_(now_ns() + kInterruptNs) {}

  // Whether the wait is over, and how it ended.
  bool over() {
    if (!over_) over_ = look();
    return over_;
  }

  // How long it may sleep.
  int64_t most_ns() const {
    const int64_t now = now_ns();
    int64_t until = interrupted_ ? ask_at_ : now + 10 * kInterruptNs;
    if (deadline_ != 0) until = std::min(until, deadline_);
    return std::max<int64_t>(until - now, 0);
  }

  bool result = false;

 private:
  bool look() {
    result = ready_();
    if (result) return true;
    const int64_t now = now_ns();
    if (deadline_ != 0 && now >= deadline_) return true;
    if (!interrupted_ || now < ask_at_) return false;
    ask_at_ = now + kInterruptNs;
    return interrupted_();
  }

  const std::function<bool()>& ready_;
  const Deadline deadline_;
  const std::function<bool()>& interrupted_;
  int64_t ask_at_;
  bool over_ = false;
};

Driver::Driver(int epoll, uint64_t wake_key, Pump pump)
    : epoll_(epoll), pump_(std::move(pump)), wake_(make_event()), background_wake_(make_event()) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = wake_key;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
    throw Error(Code::kInternal, "cannot watch an event descriptor: " + error_text(errno));
  }
}

void Driver::on_wake_event() { clear_event(wake_); }

void Driver::notify() {
  generation_.fetch_add(1);
  if (driver_asleep_.load()) signal_event(wake_);
  if (parked_.load() > 0) {
    // The empty critical section orders this after a waiter's last look.
    { const std::lock_guard lock(park_mutex_); }
    park_.notify_all();
  }
}

bool Driver::wait(const std::function<bool()>& ready, Deadline deadline, const std::function<bool()>& interrupted) {
  Waiting waiting(ready, deadline, interrupted);
  if (waiting.over()) return waiting.result;
  // Leaving must happen on exceptions too: `ready` and `interrupted` are the caller's.
  struct Presence {
    Driver& driver;
    explicit Presence(Driver& d) : driver(d) {
      driver.waiters_.fetch_add(1);
      // The background thread would compete for every event.
      if (driver.doze_.load() == Doze::kPoller) signal_event(driver.background_wake_);
    }
    ~Presence() {
      driver.driven();
      if (driver.waiters_.fetch_sub(1) == 1 && driver.doze_.load() == Doze::kLong)
        signal_event(driver.background_wake_);
      driver.hand_over();
    }
  } presence(*this);
  while (!waiting.over()) {
    if (!driving_.exchange(true)) {
      struct Wheel {
        Driver& driver;
        ~Wheel() { driver.driving_.store(false); }
      } wheel{*this};
      drive(waiting);
      return waiting.result;
    }
    follow(waiting);
  }
  return waiting.result;
}

void Driver::hand_over() {
  if (driving_.load() || parked_.load() == 0) return;
  { const std::lock_guard lock(park_mutex_); }
  park_.notify_all();
}

void Driver::drive(Waiting& waiting) {
  int64_t spin_until = now_ns() + kSpinNs;
  while (true) {
    const uint64_t seen = generation_.load();
    if (waiting.over()) return;
    if (pump_(0)) {
      spin_until = now_ns() + kSpinNs;
    } else if (now_ns() < spin_until) {
      sched_yield();
    } else {
      sleep_in_poller(waiting, seen);
      spin_until = now_ns() + kSpinNs;
    }
  }
}

void Driver::sleep_in_poller(Waiting& waiting, uint64_t seen) {
  struct Asleep {
    Driver& driver;
    explicit Asleep(Driver& d) : driver(d) {
      driver.asleep_since_.store(now_ns(), std::memory_order_relaxed);
      driver.driver_asleep_.store(true);
    }
    ~Asleep() {
      driver.driver_asleep_.store(false);
      driver.asleep_since_.store(0, std::memory_order_relaxed);
    }
  } asleep(*this);
  if (generation_.load() == seen) pump_(to_ms(waiting.most_ns()));
}

void Driver::follow(Waiting& waiting) {
  const int64_t spin_until = now_ns() + kSpinNs;
  while (now_ns() < spin_until) {
    if (waiting.over() || !driving_.load()) return;
    sched_yield();
  }
  const uint64_t seen = generation_.load();
  parked_.fetch_add(1);
  if (!waiting.over()) {
    std::unique_lock lock(park_mutex_);
    park_.wait_for(lock, std::chrono::nanoseconds(waiting.most_ns()),
                   [&] { return generation_.load() != seen || !driving_.load(); });
  }
  parked_.fetch_sub(1);
}

// ---- The background thread ----

void Driver::start() {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the thread inherits it: signals are the application's
  thread_ = std::thread([this] { background(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), "polyccl-link");
}

void Driver::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  signal_event(background_wake_);
  thread_.join();
}

void Driver::background() {
  while (!stopping_.load()) background_turn();
}

void Driver::background_turn() {
  pollfd fds[2] = {{background_wake_.get(), POLLIN, 0}, {epoll_, POLLIN, 0}};
  if (waiters_.load() > 0 || now_ns() - last_drive_.load(std::memory_order_relaxed) < kQuietNs) {
    // Someone drives, or has just done so. While it sleeps for long, sleep too: it wakes this thread when it leaves.
    const int64_t since = asleep_since_.load(std::memory_order_relaxed);
    if (since != 0 && now_ns() - since > kQuietNs) {
      doze_.store(Doze::kLong);
      if (waiters_.load() > 0) poll(fds, 1, 100);
    } else {
      poll(fds, 1, 1);
    }
  } else {
    doze_.store(Doze::kPoller);
    if (waiters_.load() == 0) poll(fds, 2, -1);
  }
  doze_.store(Doze::kNone);
  if (fds[0].revents != 0) clear_event(background_wake_);
  if (waiters_.load() == 0 && fds[1].revents != 0) pump_(0);
}

void Driver::abandon() {
  if (thread_.joinable()) thread_.detach();
  wake_.reset();
  background_wake_.reset();
}

}  // namespace polyccl
