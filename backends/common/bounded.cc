// Calls into a library that may not return.
#include "bounded.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace polyccl_ccl {
namespace {

struct Call {
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<int> result;
  bool given_up = false;
};

}  // namespace

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::optional<int> run_bounded(std::function<int()> body, int64_t deadline, const std::function<bool()>& stop,
                               std::function<void(int)> late) {
  auto call = std::make_shared<Call>();
  std::thread([call, body = std::move(body), late = std::move(late)] {
    const int result = body();
    std::unique_lock lock(call->mutex);
    call->result = result;
    call->changed.notify_all();
    const bool given_up = call->given_up;
    lock.unlock();
    if (given_up && late) late(result);
  }).detach();
  std::unique_lock lock(call->mutex);
  while (!call->result) {
    const bool stopped = stop && stop();
    if (stopped || (deadline != 0 && now_ns() >= deadline)) {
      call->given_up = true;
      return std::nullopt;
    }
    call->changed.wait_for(lock, std::chrono::milliseconds(10));
  }
  return call->result;
}

void Pause::operator()() {
  if (++looks_ <= 20) {
    ::sched_yield();
    return;
  }
  std::this_thread::sleep_for(std::chrono::microseconds(std::min(20 * (looks_ - 20), 1000)));
}

}  // namespace polyccl_ccl
