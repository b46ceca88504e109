#include "comm.h"

#include <exception>
#include <new>

namespace polyccl_gloo {
namespace {

std::string or_empty(const char* text) { return text != nullptr ? text : ""; }

// The exception that is being handled, as a failure of the communicator.
Failure current_failure() {
  try {
    throw;
  } catch (const Failure& e) {
    return e;
  } catch (const std::bad_alloc&) {
    return {POLYCCL_ERROR_INTERNAL, "out of memory"};
  } catch (const std::exception& e) {
    return {POLYCCL_ERROR_INTERNAL, e.what()};
  } catch (...) {
    return {POLYCCL_ERROR_INTERNAL, "an exception of an unknown class"};
  }
}

}  // namespace

Comm::Comm(const polyccl_comm_config& config) : rank_(config.rank), size_(config.size), name_(or_empty(config.name)) {
  if (size_ < 1 || rank_ < 0 || rank_ >= size_) {
    throw Refusal(POLYCCL_ERROR_INVALID,
                  "rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " is no rank of a communicator");
  }
  if (size_ == 1) return;
  if (config.transport == nullptr) {
    throw Refusal(POLYCCL_ERROR_INVALID, "a communicator of several ranks needs the host's transport");
  }
  transport_ = std::make_unique<Transport>(*config.transport);
  context_ = std::make_shared<Context>(*transport_, rank_, size_);
}

std::byte* Comm::scratch(size_t bytes) {
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  return scratch_.data();
}

polyccl_result Comm::run(const std::function<void()>& body) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_) return ended_->result();
  }
  try {
    body();
    return POLYCCL_OK;
  } catch (const Refusal& e) {
    set_error(e.what());
    return e.result();
  } catch (...) {
    const Failure failure = current_failure();
    return end(failure.result(), failure.what());
  }
}

// The first end stays.
polyccl_result Comm::end(polyccl_result result, const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_) return ended_->result();
    ended_.emplace(result, text);
  }
  set_error(text);
  if (transport_) transport_->end(result, text);
  return result;
}

void Comm::abort() { (void)end(POLYCCL_ERROR_ABORTED, "the communicator was aborted"); }

void Comm::set_error(const std::string& text) {
  const std::lock_guard lock(mutex_);
  error_ = name_.empty() ? text : "communicator '" + name_ + "', rank " + std::to_string(rank_) + ": " + text;
}

std::string Comm::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

}  // namespace polyccl_gloo
