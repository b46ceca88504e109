// Python's GIL, taken and given back in ways that survive the interpreter's end.
//
// Python before 3.14 ends a thread that asks for the GIL while the interpreter ends: pthread_exit() unwinds the thread's
// stack, and the first destructor on it that may not throw ends the process. Such a thread is parked here for the rest
// of the process's life, which is what Python 3.14 does by itself.
#pragma once

#include <Python.h>
#include <cxxabi.h>

namespace polyccl {

// False once the interpreter has begun to end: no other thread gets the GIL any more.
inline bool interpreter_lives() { return Py_IsInitialized() != 0; }

// Block the calling thread for the rest of the process's life.
[[noreturn]] void park_thread() noexcept;

// The number of threads that hold a GilAcquire, wait for the GIL, or are parked. At the interpreter's end none of them
// goes on.
int threads_at_gil() noexcept;

// Hold the GIL in this scope, with or without it before.
class GilAcquire {
 public:
  GilAcquire() noexcept;
  ~GilAcquire();
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

 private:
  PyGILState_STATE state_{};
  const bool taken_;
};

// Give the GIL back in this scope. The thread that ends the interpreter keeps it: nobody else can have it then.
class GilRelease {
 public:
  GilRelease() noexcept;
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

// Run `call` with the GIL, from any thread. Return false, without a call, if the interpreter is ending.
template <class Call>
bool with_gil(const Call& call) {
  if (!interpreter_lives()) return false;
  const GilAcquire gil;
  try {
    call();
  } catch (const abi::__forced_unwind&) {  // the interpreter ended while `call` ran Python code
    park_thread();
  }
  return true;
}

}  // namespace polyccl
