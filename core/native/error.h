// Errors of the core: one class, whose code chooses the Python class that the user sees.
#pragma once

#include <stdexcept>
#include <string>

namespace polyccl {

enum class Code {
  kInvalidArgument,
  kBackendUnavailable,
  kUnsupportedOperation,
  kTimeout,
  kPeerLost,
  kAborted,
  kMismatch,
  kInternal,
};

// what() is whole: it says what happened, where, and what to try.
class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& text) : std::runtime_error(text), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

// What is being caught, as an Error.
inline Error current_error() {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(Code::kInternal, error.what());
  }
}

}  // namespace polyccl
