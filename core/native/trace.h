// A timeline of what the lanes did, for pictures and for the curious. Off unless asked for.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "clock.h"
#include "plan.h"

namespace polyccl {

struct TraceEvent {
  uint64_t sequence;
  uint32_t chunk;
  Lane lane;
  Verb verb;
  Kind kind;
  int peer;
  uint64_t bytes;
  int64_t begin, end;  // CLOCK_MONOTONIC nanoseconds
};

class Trace {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }
  void enable(bool on) { on_.store(on, std::memory_order_relaxed); }

  void add(const TraceEvent& event) {
    std::scoped_lock lock(mutex_);
    if (events_.size() < kLimit) events_.push_back(event);
  }

  // Everything since the last call.
  std::vector<TraceEvent> take() {
    std::scoped_lock lock(mutex_);
    return std::exchange(events_, {});
  }

 private:
  static constexpr size_t kLimit = 1 << 20;
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<TraceEvent> events_;
};

}  // namespace polyccl
