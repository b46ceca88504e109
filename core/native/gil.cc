#include "gil.h"

#include <unistd.h>

#include <atomic>

namespace polyccl {
namespace {

std::atomic<int> entering{0};
// Scopes in which this thread would have given the GIL back, had the interpreter not been ending.
thread_local int kept = 0;

}  // namespace

void park_thread() noexcept {
  while (true) pause();
}

int threads_at_gil() noexcept { return entering; }

GilAcquire::GilAcquire() noexcept : taken_(kept == 0) {
  if (!taken_) return;
  ++entering;
  if (!interpreter_lives()) park_thread();
  try {
    state_ = PyGILState_Ensure();
  } catch (...) {  // the unwinding of pthread_exit()
    park_thread();
  }
}

GilAcquire::~GilAcquire() {
  if (!taken_) return;
  PyGILState_Release(state_);
  --entering;
}

GilRelease::GilRelease() noexcept : state_(interpreter_lives() ? PyEval_SaveThread() : nullptr) {
  if (state_ == nullptr) ++kept;
}

GilRelease::~GilRelease() {
  if (state_ == nullptr) {
    --kept;
    return;
  }
  ++entering;
  if (!interpreter_lives()) park_thread();
  try {
    PyEval_RestoreThread(state_);
  } catch (...) {  // the unwinding of pthread_exit()
    park_thread();
  }
  --entering;
}

}  // namespace polyccl
