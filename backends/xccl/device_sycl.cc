// Intel's GPUs through SYCL: the device table. A stream is a sycl::queue, as torch's streams on XPU are; arithmetic is
// left to the host. Never compiled by PolyCCL's authors, who had no SYCL compiler; see README.md.
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <sycl/sycl.hpp>
#include <thread>
#include <vector>

#include "../common/failure.h"
#include "device.h"

namespace polyccl_xccl {
namespace {

using polyccl_ccl::Failure;
using polyccl_ccl::guarded;

struct Event {
  std::optional<sycl::event> recorded;
};

// The GPUs in the order of torch.xpu.
const std::vector<sycl::device>& devices() {
  static const std::vector<sycl::device> all = [] {
    std::vector<sycl::device> found;
    for (const sycl::platform& platform : sycl::platform::get_platforms()) {
      if (platform.get_backend() != sycl::backend::ext_oneapi_level_zero) continue;
      for (const sycl::device& device : platform.get_devices(sycl::info::device_type::gpu)) found.push_back(device);
    }
    return found;
  }();
  return all;
}

const sycl::device& device_at(int32_t index) {
  if (index < 0 || static_cast<size_t>(index) >= devices().size()) {
    throw Failure(POLYCCL_ERROR_INVALID,
                  "there is no XPU device " + std::to_string(index) + " among " + std::to_string(devices().size()));
  }
  return devices()[static_cast<size_t>(index)];
}

// Of a platform's default context, which torch's queues have too.
sycl::context context_of(int32_t index) { return device_at(index).get_platform().ext_oneapi_get_default_context(); }

sycl::queue& queue(void* stream) {
  if (stream == nullptr) throw Failure(POLYCCL_ERROR_INVALID, "an XPU operation needs a stream");
  return *static_cast<sycl::queue*>(stream);
}

void* checked(void* memory, uint64_t bytes) {
  if (memory == nullptr && bytes != 0)
    throw Failure(POLYCCL_ERROR_UNAVAILABLE, "there is no memory for " + std::to_string(bytes) + " bytes");
  return memory;
}

// Memory is freed in the context that it was taken from, which the ABI does not hand back.
std::mutex memories_mutex;
std::vector<std::pair<void*, sycl::context>>& memories() {
  static auto& all = *std::make_unique<std::vector<std::pair<void*, sycl::context>>>().release();
  return all;
}

void remember(void* memory, const sycl::context& context) {
  const std::lock_guard lock(memories_mutex);
  memories().emplace_back(memory, context);
}

polyccl_result host_alloc(int32_t device, void** memory, uint64_t bytes) {
  return guarded([&] {
    *memory = checked(sycl::malloc_host(bytes, context_of(device)), bytes);
    remember(*memory, context_of(device));
  });
}

polyccl_result alloc(int32_t device, void** memory, uint64_t bytes) {
  return guarded([&] {
    *memory = checked(sycl::malloc_device(bytes, device_at(device), context_of(device)), bytes);
    remember(*memory, context_of(device));
  });
}

polyccl_result free_memory(void* memory) {
  return guarded([&] {
    const std::lock_guard lock(memories_mutex);
    auto& all = memories();
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i].first != memory) continue;
      sycl::free(memory, all[i].second);
      all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
  });
}

polyccl_result stream_create(int32_t device, int32_t high_priority, void** stream) {
  return guarded([&] {
    sycl::property_list properties{sycl::property::queue::in_order()};
    if (high_priority != 0) {
      properties = {sycl::property::queue::in_order(), sycl::ext::oneapi::property::queue::priority_high()};
    }
    *stream = std::make_unique<sycl::queue>(context_of(device), device_at(device), properties).release();
  });
}

polyccl_result stream_destroy(void* stream) {
  return guarded([&] { const std::unique_ptr<sycl::queue> owned(static_cast<sycl::queue*>(stream)); });
}

polyccl_result event_create(int32_t, void** event) {
  return guarded([&] { *event = std::make_unique<Event>().release(); });
}

polyccl_result event_destroy(void* event) {
  return guarded([&] { const std::unique_ptr<Event> owned(static_cast<Event*>(event)); });
}

polyccl_result event_record(void* event, void* stream) {
  return guarded([&] { static_cast<Event*>(event)->recorded = queue(stream).ext_oneapi_submit_barrier(); });
}

polyccl_result stream_wait_event(void* stream, void* event) {
  return guarded([&] {
    const auto& recorded = static_cast<Event*>(event)->recorded;
    if (recorded) queue(stream).ext_oneapi_submit_barrier({*recorded});
  });
}

polyccl_result event_query(void* event) {
  bool reached = true;
  const polyccl_result result = guarded([&] {
    const auto& recorded = static_cast<Event*>(event)->recorded;
    using Status = sycl::info::event::command_execution_status;
    reached = !recorded || recorded->get_info<Status>() == sycl::info::event_command_status::complete;
  });
  return result == POLYCCL_OK && !reached ? POLYCCL_IN_PROGRESS : result;
}

polyccl_result copy(void* stream, void* output, uint64_t output_stride, const void* input, uint64_t input_stride,
                    uint64_t bytes, uint64_t rows) {
  return guarded([&] {
    for (uint64_t row = 0; row < rows; ++row) {
      queue(stream).memcpy(static_cast<char*>(output) + row * output_stride,
                           static_cast<const char*>(input) + row * input_stride, bytes);
    }
  });
}

polyccl_result wait_flag(void* stream, const volatile uint32_t* flag, uint32_t value) {
  return guarded([&] {
    queue(stream).submit([=](sycl::handler& handler) {
      handler.host_task([=] {
        while (*flag < value) std::this_thread::sleep_for(std::chrono::microseconds(20));
      });
    });
  });
}

polyccl_result write_flag(void* stream, volatile uint32_t* flag, uint32_t value) {
  return guarded(
      [&] { queue(stream).submit([=](sycl::handler& handler) { handler.host_task([=] { *flag = value; }); }); });
}

}  // namespace

const polyccl_device* device_table() {
  static const polyccl_device table = {
      .struct_size = sizeof(polyccl_device),
      .reserved = 0,
      .host_alloc = host_alloc,
      .host_free = free_memory,
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
      .reduce = nullptr,
      .scale = nullptr,
      .stream_is_capturing = nullptr,
      .enter = nullptr,
      .leave = nullptr,
  };
  return &table;
}

int device_count() { return static_cast<int>(devices().size()); }

}  // namespace polyccl_xccl
