// One message on its way, as both the caller and the engine see it.
#pragma once

#include <atomic>
#include <optional>
#include <utility>

#include "frame.h"

namespace polyccl {

// What the two sides of a message must have in common beside its tag.
struct Terms {
  uint64_t bytes = 0;
  uint64_t fingerprint = 0;  // of the operation; opaque
  bool operator==(const Terms&) const = default;
};

class Request final : public LinkRequest {
 public:
  Request(const Tag& tag, std::byte* memory, size_t bytes, uint64_t fingerprint)
      : tag(tag), memory(memory), bytes(bytes), fingerprint(fingerprint) {}

  bool done() const override { return done_.load(std::memory_order_acquire); }
  const std::optional<Error>& error() const override { return error_; }

  // From here on `memory` is not touched any more. The first end stays.
  void finish(std::optional<Error> error = {}) {
    if (done()) return;
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
  }

  const Tag tag;
  std::byte* const memory;  // of a send: only read
  const size_t bytes;
  const uint64_t fingerprint;
  Terms terms() const { return {bytes, fingerprint}; }
  // How far the engine is; guarded by its lock.
  size_t moved = 0;        // bytes handed to a connection, or received
  bool announced = false;  // of a send: WANT has been sent, so it waits for READY
  bool cleared = false;    // READY has been received (send) or sent (receive)

 private:
  std::atomic<bool> done_{false};
  std::optional<Error> error_;
};

}  // namespace polyccl
