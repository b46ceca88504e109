// What the files of the engine share, and no one else needs.
#pragma once

#include <utility>

#include "engine.h"

namespace polyccl {

// Data of the engine's own descriptors in the poller.
inline constexpr uint64_t kListenerKey = 1, kWakeKey = 2, kTimerKey = 3;
inline constexpr int64_t kGoodbyeNs = 1'000'000'000;

// The engine's lock. At its end waiters are woken, where a request ended, and callbacks are called, both without the
// lock.
class Engine::Session {
 public:
  explicit Session(Engine& engine) : engine_(engine) {
    engine_.check_alive();
    engine_.mutex_.lock();
  }
  ~Session() {
    const auto callbacks = std::exchange(engine_.callbacks_, {});
    const bool changed = std::exchange(engine_.completions_, 0) > 0;
    engine_.mutex_.unlock();
    for (const auto& callback : callbacks) callback();
    if (changed) engine_.driver_->notify();
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

 private:
  Engine& engine_;
};

}  // namespace polyccl
