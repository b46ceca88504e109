#include "work.h"

#include <algorithm>
#include <chrono>

#include "call_thread.h"

namespace polyccl {

std::optional<Error> Work::error() const {
  if (made_.inherited() && !done_) {  // and the lock may be held by a thread that is not here
    return Error(Code::kInternal,
                 description_ +
                     ": it was on its way when this process was forked, and belongs to the parent process; "
                     "create a communicator in the child");
  }
  std::scoped_lock lock(mutex_);
  return error_;
}

bool Work::wait(Deadline deadline, const std::function<bool()>& interrupted) const {
  constexpr int64_t kSlice = 100'000'000;
  if (done()) return true;
  std::unique_lock lock(mutex_);
  while (!done()) {
    int64_t left = kSlice;
    if (deadline != 0) left = std::min(left, deadline - now_ns());
    if (left <= 0) return false;
    changed_.wait_for(lock, std::chrono::nanoseconds(left), [this] { return done(); });
    if (done() || !interrupted) continue;
    lock.unlock();
    if (interrupted()) return done();
    lock.lock();
  }
  return true;
}

void Work::raise() const {
  if (!done()) return;
  if (auto e = error()) throw *e;
}

void Work::on_done(std::function<void()> callback) {
  if (!made_.inherited()) {
    std::scoped_lock lock(mutex_);
    if (!done()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void Work::keep_forever() {
  std::scoped_lock lock(mutex_);
  if (kept_) polyccl::keep_forever(std::move(kept_));
}

void Work::complete(std::optional<Error> error) {
  std::vector<std::function<void()>> callbacks;
  std::shared_ptr<void> kept, communicator;
  {
    std::scoped_lock lock(mutex_);
    if (done()) return;
    error_ = std::move(error);
    callbacks.swap(callbacks_);
    kept.swap(kept_);
    communicator.swap(communicator_);
    done_.store(true, std::memory_order_release);
    // Under the lock: a waiter that sees `done` may destroy this object at once.
    changed_.notify_all();
  }
  for (auto& callback : callbacks) callback();
}

}  // namespace polyccl
