// oneCCL's own thread throws where a peer is lost in mid-transfer, and nobody catches that: the C++ runtime then ends
// the process, and with it a rank that lost nothing but a neighbour. A handler of std::terminate() may not return, but
// nothing says that it must end the process: this one parks the thread.
#include <cxxabi.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <typeinfo>

#include "library.h"

namespace polyccl_xccl {
namespace {

constexpr const char* kThrown = "N3ccl2v19exceptionE";  // ccl::v1::exception

std::atomic<bool> worker_ended{false};
char worker_words[512] = "";  // whole before `worker_ended` is set
std::terminate_handler others = nullptr;

std::atomic<int> inside{0};
std::atomic<bool> left_behind{false};

// oneCCL's own clean-up waits for its threads when the process exits, and they for a peer that is gone: where something
// was given up the process ends here. Of such handlers the last registered runs first, and oneCCL registers its own as
// it goes along: so this one is registered again whenever it gets a reason.
void leave(int status, void*) {
  if (inside == 0 && !left_behind && !worker_ended) return;
  std::fflush(nullptr);
  ::_exit(status);
}

void note_failure() {
  try {
    throw;
  } catch (const std::exception& e) {
    std::strncpy(worker_words, e.what(), sizeof worker_words - 1);
  } catch (...) {
  }
}

void on_terminate() {
  const std::type_info* type = abi::__cxa_current_exception_type();
  const bool main_thread = ::gettid() == ::getpid();
  if (type == nullptr || std::strcmp(type->name(), kThrown) != 0 || main_thread) {
    if (others != nullptr) others();
    std::abort();
  }
  if (!worker_ended) {
    note_failure();
    ::on_exit(leave, nullptr);
    worker_ended = true;
    polyccl_ccl::log(
        POLYCCL_LOG_WARNING,
        std::string("oneCCL's thread ended, so that oneCCL cannot be used in this process any more: ") + worker_words);
  }
  for (;;) ::pause();
}

}  // namespace

void guard_worker() {
  static const bool once = [] {
    others = std::set_terminate(on_terminate);
    return true;
  }();
  (void)once;
}

Inside::Inside() { ++inside; }
Inside::~Inside() { --inside; }

void watch_exit() { ::on_exit(leave, nullptr); }

void leave_behind() {
  if (!left_behind.exchange(true)) watch_exit();
}

std::string worker_failure() {
  if (!worker_ended) return "";
  return worker_words[0] != '\0' ? worker_words : "an exception without words";
}

}  // namespace polyccl_xccl
