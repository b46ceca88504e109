// Calls into a library that may not return: made on a thread that can be given up.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

namespace polyccl_ccl {

int64_t now_ns();  // CLOCK_MONOTONIC
constexpr int64_t kSecond = 1'000'000'000;

// Run `body` on a thread of its own and give its result; nothing where it has not returned by `deadline` (0: none) or
// once `stop` says so. It then goes on alone, so it must own all that it uses, and `late` is given its result.
std::optional<int> run_bounded(std::function<int()> body, int64_t deadline, const std::function<bool()>& stop = {},
                               std::function<void(int)> late = {});

// Waits between looks at something that another thread changes: short at first, so that what is quick stays quick.
class Pause {
 public:
  void operator()();

 private:
  int looks_ = 0;
};

}  // namespace polyccl_ccl
