// The ABI's device table over the runtime. Every entry makes the right device this thread's for its duration.
//
// What would be lost or wrong in a CUDA graph is refused while the stream is being captured: a graph holds a copy of an
// operation's commands, but the host's part of a planned operation would not run again with it.
#include "device.h"

#include <string>

#include "failure.h"
#include "runtime.h"

namespace polyccl_ccl {
namespace {

void refuse_in_capture(void* stream, const char* what) {
  if (!is_capturing(stream)) return;
  throw Failure(POLYCCL_ERROR_UNSUPPORTED,
                std::string("the stream is being captured into a graph, which cannot hold ") + what +
                    ": run this outside the capture");
}

polyccl_result host_alloc(int32_t device, void** memory, uint64_t bytes) {
  return guarded([&] {
    *memory = nullptr;
    const Current current(device);
    check(runtime().host_alloc(memory, bytes, kPortableMapped), "allocating pinned host memory");
  });
}

polyccl_result host_free(void* memory) {
  return guarded([&] {
    if (memory == nullptr) return;
    const Current current = Current::of(nullptr);
    check(runtime().host_free(memory), "freeing pinned host memory");
  });
}

polyccl_result alloc(int32_t device, void** memory, uint64_t bytes) {
  return guarded([&] {
    *memory = nullptr;
    const Current current(device);
    check(runtime().alloc(memory, bytes), "allocating device memory");
  });
}

polyccl_result free_memory(void* memory) {
  return guarded([&] {
    if (memory == nullptr) return;
    const Current current = Current::of(nullptr);
    check(runtime().free(memory), "freeing device memory");
  });
}

polyccl_result stream_create(int32_t device, int32_t high_priority, void** stream) {
  return guarded([&] {
    *stream = nullptr;
    const Current current(device);
    int least = 0, greatest = 0;
    check(runtime().priorities(&least, &greatest), "asking for the priorities of streams");
    check(runtime().stream_create(stream, kNonBlocking, high_priority != 0 ? greatest : least), "creating a stream");
  });
}

polyccl_result stream_destroy(void* stream) {
  return guarded([&] {
    if (stream == nullptr) return;
    const Current current = Current::of(stream);
    check(runtime().stream_destroy(stream), "destroying a stream");
  });
}

polyccl_result stream_wait_event(void* stream, void* event) {
  return guarded([&] {
    const Current current = Current::of(stream);
    check(runtime().stream_wait_event(stream, event, 0), "making a stream wait for an event");
  });
}

polyccl_result event_create(int32_t device, void** event) {
  return guarded([&] {
    *event = nullptr;
    const Current current(device);
    check(runtime().event_create(event, kNoTiming), "creating an event");
  });
}

polyccl_result event_destroy(void* event) {
  return guarded([&] {
    if (event == nullptr) return;
    const Current current = Current::of(nullptr);
    check(runtime().event_destroy(event), "destroying an event");
  });
}

polyccl_result event_record(void* event, void* stream) {
  return guarded([&] {
    const Current current = Current::of(stream);
    refuse_in_capture(stream, "an event that the host looks at");
    check(runtime().event_record(event, stream), "recording an event");
  });
}

polyccl_result event_query(void* event) {
  bool ready = true;
  const polyccl_result result = guarded([&] {
    const Current current = Current::of(nullptr);
    const Status status = runtime().event_query(event);
    ready = status != kNotReady;
    if (ready) check(status, "work before an event failed");
  });
  return ready ? result : POLYCCL_IN_PROGRESS;
}

polyccl_result copy(void* stream, void* output, uint64_t output_stride, const void* input, uint64_t input_stride,
                    uint64_t bytes, uint64_t rows) {
  return guarded([&] {
    if (bytes == 0 || rows == 0) return;
    const Current current = Current::of(stream);
    refuse_in_capture(stream, "a planned operation's copies");
    if (output_stride == bytes && input_stride == bytes) {  // one piece
      bytes *= rows;
      rows = 1;
    }
    check(runtime().copy(stream, output, output_stride, input, input_stride, bytes, rows), "copying");
  });
}

[[noreturn]] void lack(const char* what) {
  throw Failure(POLYCCL_ERROR_UNSUPPORTED, std::string("this version of ") + family().runtime.what + " (" +
                                               runtime().library.file + ") has no " + what);
}

polyccl_result wait_flag(void* stream, const volatile uint32_t* flag, uint32_t value) {
  return guarded([&] {
    if (runtime().wait_value == nullptr) lack("wait of a stream on a value in memory");
    const Current current = Current::of(stream);
    refuse_in_capture(stream, "a wait for the host");
    check(runtime().wait_value(stream, flag, value), "making a stream wait for a flag");
  });
}

polyccl_result write_flag(void* stream, volatile uint32_t* flag, uint32_t value) {
  return guarded([&] {
    if (runtime().write_value == nullptr) lack("write of a value to memory by a stream");
    const Current current = Current::of(stream);
    refuse_in_capture(stream, "a word to the host");
    check(runtime().write_value(stream, flag, value), "making a stream write a flag");
  });
}

polyccl_result stream_is_capturing(void* stream, int32_t* capturing) {
  return guarded([&] {
    const Current current = Current::of(stream);
    *capturing = is_capturing(stream) ? 1 : 0;
  });
}

polyccl_result enter(int32_t device, int64_t* before) {
  return guarded([&] {
    intptr_t undo = 0;
    check(runtime().enter(device, &undo), "choosing the device");
    *before = undo;
  });
}

polyccl_result leave(int64_t before) {
  return guarded([&] { runtime().leave(static_cast<intptr_t>(before)); });
}

const polyccl_device table = {
    .struct_size = sizeof(polyccl_device),
    .reserved = 0,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .alloc = alloc,
    .free = free_memory,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_wait_event = stream_wait_event,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_query = event_query,
    .copy = copy,
    .wait_flag = wait_flag,
    .write_flag = write_flag,
    .reduce = nullptr,  // the plugins bring no kernels of their own
    .scale = nullptr,
    .stream_is_capturing = stream_is_capturing,
    .enter = enter,
    .leave = leave,
};

}  // namespace

const polyccl_device& device_table() { return table; }

}  // namespace polyccl_ccl
