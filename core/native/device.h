// A device, through its backend's table: memory, streams and events that free themselves, and waits that end.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "clock.h"
#include "loader.h"

namespace polyccl {

// How long what was enqueued may take to end once an operation has failed; beyond that the device hangs.
inline constexpr int64_t kSettleNs = 10'000'000'000;

class Device : public std::enable_shared_from_this<Device> {
 public:
  // `backend` must have a device table. Its streams get the highest priority with `high_priority`, else the lowest.
  // Throws kUnsupportedOperation where the table lacks what staging needs.
  Device(const Backend& backend, int index, bool high_priority = false);

  int index() const { return index_; }
  const Backend& backend() const { return backend_; }

  // Whether host code may read device memory: of stand-ins for tests only.
  bool is_host() const { return backend_.has(POLYCCL_FLAG_DEVICE_IS_HOST); }

  using Handle = std::unique_ptr<void, std::function<void(void*)>>;

  // Let go of something on a thread of the device's own. To free memory may wait for all streams of the device, one of
  // which may wait for an operation of ours: whoever works for that operation must not wait for the stream. The handles
  // of memory free it so by themselves; what users' objects do is unknown, so they are let go of so as well.
  void let_go(std::shared_ptr<void> what) const;

  // Wait until everything that any device was to let go of is gone; false where it is not by the deadline.
  static bool all_gone(Deadline deadline);

  Handle stream() const;
  Handle event() const;
  Handle pinned(size_t bytes) const;  // host memory that copies to and from the device may overlap with
  Handle memory(size_t bytes) const;  // on the device

  void copy(void* stream, void* output, const void* input, size_t bytes) const;
  void record(void* event, void* stream) const;
  void wait(void* stream, void* event) const;
  bool reached(void* event) const;

  // Whether what is enqueued on the stream goes into a graph; false too where the backend cannot tell.
  bool capturing(void* stream) const;

  // Whether a stream can wait for a word of host memory; then await_flag() makes it wait until *flag >= value. Tried
  // out at the first call, on a stream of its own: that the plugin has the entry does not say that the device can.
  bool has_flags() const;
  void await_flag(void* stream, const volatile uint32_t* flag, uint32_t value) const;

  // Block the host until the event is reached. `ended` is asked now and then; true throws kAborted, the deadline
  // kTimeout.
  void await(void* event, Deadline deadline, const std::function<bool()>& ended) const;

  // As await(), for all that is on the stream.
  void synchronize(void* stream, Deadline deadline, const std::function<bool()>& ended) const;

  // As synchronize(), for what ends by itself, as copies do: does not throw before that, unless the device hangs. Until
  // then they use the caller's memory.
  void finish(void* stream, Deadline deadline, const std::function<bool()>& ended) const;

 private:
  void check(polyccl_result result, const char* what) const;
  const polyccl_device& table() const { return *backend_.table().device; }

  class Bin;
  class Entered;

  bool try_flags() const;

  const Backend& backend_;
  const int index_;
  const bool high_priority_;
  const std::shared_ptr<Bin> bin_;
  mutable std::once_flag flags_tried_;
  mutable bool has_flags_ = false;
};

}  // namespace polyccl
