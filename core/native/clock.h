// Deadlines: absolute nanoseconds of CLOCK_MONOTONIC, 0 for none.
#pragma once

#include <cstdint>
#include <ctime>

namespace polyccl {

using Deadline = int64_t;

inline int64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

inline bool expired(Deadline deadline) { return deadline != 0 && now_ns() >= deadline; }

}  // namespace polyccl
