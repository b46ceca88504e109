#include "device.h"

#include <sched.h>

#include <chrono>
#include <string>
#include <thread>

namespace polyccl {

Device::Device(const Backend& backend, int index) : backend_(backend), index_(index) {
  const polyccl_device* t = backend.table().device;
  const bool whole = t != nullptr && t->host_alloc && t->host_free && t->alloc && t->free && t->stream_create &&
                     t->stream_destroy && t->stream_wait_event && t->event_create && t->event_destroy &&
                     t->event_record && t->event_query && t->copy;
  if (!whole) {
    throw Error(Code::kUnsupportedOperation,
                "backend '" + backend.name() + "' (" + backend.path() +
                    ") lacks the copies, streams or events of its device that PolyCCL needs");
  }
}

void Device::check(polyccl_result result, const char* what) const {
  backend_.check(result, nullptr, std::string(what) + " on device " + std::to_string(index_));
}

Device::Handle Device::stream(bool high_priority) const {
  void* stream = nullptr;
  check(table().stream_create(index_, high_priority ? 1 : 0, &stream), "creating a stream");
  return {stream, [t = &table()](void* p) { (void)t->stream_destroy(p); }};
}

Device::Handle Device::event() const {
  void* event = nullptr;
  check(table().event_create(index_, &event), "creating an event");
  return {event, [t = &table()](void* p) { (void)t->event_destroy(p); }};
}

Device::Handle Device::pinned(size_t bytes) const {
  void* memory = nullptr;
  check(table().host_alloc(index_, &memory, bytes), "allocating pinned memory");
  return {memory, [t = &table()](void* p) { (void)t->host_free(p); }};
}

Device::Handle Device::memory(size_t bytes) const {
  void* memory = nullptr;
  check(table().alloc(index_, &memory, bytes), "allocating memory");
  return {memory, [t = &table()](void* p) { (void)t->free(p); }};
}

void Device::copy(void* stream, void* output, const void* input, size_t bytes) const {
  if (bytes != 0) check(table().copy(stream, output, bytes, input, bytes, bytes, 1), "copying");
}

void Device::record(void* event, void* stream) const {
  check(table().event_record(event, stream), "recording an event");
}

void Device::wait(void* stream, void* event) const {
  check(table().stream_wait_event(stream, event), "making a stream wait");
}

bool Device::reached(void* event) const {
  const polyccl_result result = table().event_query(event);
  if (result == POLYCCL_IN_PROGRESS) return false;
  check(result, "looking at an event");
  return true;
}

bool Device::has_flags() const { return table().wait_flag != nullptr; }

void Device::await_flag(void* stream, const volatile uint32_t* flag, uint32_t value) const {
  check(table().wait_flag(stream, flag, value), "making a stream wait for the host");
}

void Device::await(void* event, Deadline deadline, const std::function<bool()>& ended) const {
  constexpr int64_t kSpin = 20'000, kNap = 50'000;  // nanoseconds
  const int64_t begin = now_ns();
  while (!reached(event)) {
    if (ended && ended()) throw Error(Code::kAborted, "the communicator ended while its device was at work");
    if (expired(deadline)) throw Error(Code::kTimeout, "timed out while the device was at work");
    if (now_ns() - begin < kSpin) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::nanoseconds(kNap));
    }
  }
}

void Device::synchronize(void* stream, Deadline deadline, const std::function<bool()>& ended) const {
  const Handle mark = event();
  record(mark.get(), stream);
  await(mark.get(), deadline, ended);
}

}  // namespace polyccl
