// How the plugin's inside reports what goes wrong: an exception with the ABI's code, which the table's entries turn
// into a result.
#pragma once

#include <polyccl/backend.h>

#include <stdexcept>
#include <string>

namespace polyccl_ccl {

class Failure : public std::runtime_error {
 public:
  Failure(polyccl_result result, const std::string& text) : std::runtime_error(text), result_(result) {}
  polyccl_result result() const { return result_; }

 private:
  polyccl_result result_;
};

// The words of this thread's last failure, for last_error(NULL, ...).
std::string& thread_error();

// Run an entry of the table: no exception leaves it.
template <typename Body>
polyccl_result guarded(Body body) noexcept {
  try {
    body();
    return POLYCCL_OK;
  } catch (const Failure& e) {
    thread_error() = e.what();
    return e.result();
  } catch (const std::exception& e) {
    thread_error() = e.what();
    return POLYCCL_ERROR_INTERNAL;
  } catch (...) {
    thread_error() = "an exception of an unknown class";
    return POLYCCL_ERROR_INTERNAL;
  }
}

// One line for PolyCCL's log; nothing before the host has given one.
void log(int32_t level, const std::string& text);

}  // namespace polyccl_ccl
