#include "fork.h"

#include <pthread.h>

#include <atomic>

namespace polyccl {
namespace {

std::atomic<uint32_t> generation{0};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { ++generation; });

}  // namespace

uint32_t fork_generation() noexcept { return generation.load(std::memory_order_relaxed); }

}  // namespace polyccl
