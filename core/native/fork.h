// Whether the process was forked since something was made: threads and connections do not pass into the child.
#pragma once

#include <cstdint>

namespace polyccl {

// The number of forks between the first process and this one.
uint32_t fork_generation() noexcept;

// Notes the process that it is made in.
class Birthplace {
 public:
  // True in a process that fork() made after this.
  bool inherited() const noexcept { return generation_ != fork_generation(); }

 private:
  uint32_t generation_ = fork_generation();
};

}  // namespace polyccl
