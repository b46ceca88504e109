#include "call_thread.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

namespace polyccl {

struct CallThread::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::function<void()> call;  // the next one, until the thread takes it
  bool running = false;        // from the order to the return
  bool given_up = false;
  bool hangs = false;

  void serve() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return call || given_up; });
      if (!call) return;
      const auto taken = std::exchange(call, {});
      lock.unlock();
      taken();
      lock.lock();
      running = false;
      changed.notify_all();
    }
  }

  void give_up_locked() {
    given_up = true;
    hangs = hangs || running;
    changed.notify_all();
  }
};

CallThread::CallThread() : state_(std::make_shared<State>()), thread_([state = state_] { state->serve(); }) {}

CallThread::~CallThread() {
  give_up();
  hangs() ? thread_.detach() : thread_.join();
}

CallThread::End CallThread::run(std::function<void()> call, Deadline deadline,
                                const std::function<bool()>& interrupted) {
  constexpr int64_t kSlice = 100'000'000;
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.given_up) return End::kGivenUp;
  state.call = std::move(call);
  state.running = true;
  state.changed.notify_all();
  const auto over = [&state] { return !state.running || state.given_up; };
  while (!over()) {
    const int64_t left = deadline == 0 ? kSlice : std::min(kSlice, deadline - now_ns());
    if (left <= 0) {
      state.give_up_locked();
      return End::kTimeout;
    }
    state.changed.wait_for(lock, std::chrono::nanoseconds(left), over);
    if (over() || !interrupted) continue;
    lock.unlock();
    const bool stop = interrupted();
    lock.lock();
    if (stop && !over()) {
      state.give_up_locked();
      return End::kInterrupted;
    }
  }
  return state.running ? End::kGivenUp : End::kDone;
}

void CallThread::give_up() noexcept {
  const std::scoped_lock lock(state_->mutex);
  state_->give_up_locked();
}

bool CallThread::given_up() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->given_up;
}

bool CallThread::hangs() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->hangs;
}

void keep_forever(std::shared_ptr<void> what) {
  using Kept = std::pair<std::mutex, std::vector<std::shared_ptr<void>>>;
  static Kept& kept = *std::make_unique<Kept>().release();  // outlives the destruction of statics
  const std::scoped_lock lock(kept.first);
  kept.second.push_back(std::move(what));
}

}  // namespace polyccl
