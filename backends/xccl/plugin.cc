// The plugin's face: the table of the ABI. No exception leaves an entry.
#include <polyccl/backend.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "comm.h"
#include "device.h"
#include "operations.h"

struct polyccl_comm {
  explicit polyccl_comm(const polyccl_comm_config& config) : impl(config) {}
  polyccl_xccl::Comm impl;
};

namespace polyccl_xccl {
namespace {
const polyccl_host* the_host = nullptr;
}  // namespace
}  // namespace polyccl_xccl

namespace polyccl_ccl {

std::string& thread_error() {
  thread_local std::string text;
  return text;
}

void log(int32_t level, const std::string& text) {
  const polyccl_host* host = polyccl_xccl::the_host;
  if (host != nullptr && host->log != nullptr) host->log(host->ctx, level, text.c_str());
}

}  // namespace polyccl_ccl

namespace polyccl_xccl {
namespace {

using polyccl_ccl::guarded;
using polyccl_ccl::thread_error;

void put(const std::string& text, char* output, uint64_t size) {
  if (text.size() >= size) throw Failure(POLYCCL_ERROR_INVALID, "the buffer is too small for '" + text + "'");
  std::memcpy(output, text.c_str(), text.size() + 1);
}

polyccl_result library(char* version, uint64_t version_size, char* file, uint64_t file_size) {
  return guarded([&] {
    const OneCcl& one = open_oneccl();
    put(one.version_text(), version, version_size);
    put(one.library.file, file, file_size);
  });
}

// Ranks of one communicator need the very same version: oneCCL's protocols are its own business.
polyccl_result compatibility(int32_t, char* key, uint64_t size) {
  return guarded([&] { put("oneccl " + open_oneccl().version_text(), key, size); });
}

polyccl_result count_devices(int32_t* count) {
  return guarded([&] {
    *count = 0;
    *count = device_count();
  });
}

uint32_t can(uint32_t kind, uint32_t dtype, uint32_t reduction, uint32_t memory) {
  const OneCcl* one = open_oneccl_if_there();
  return one == nullptr ? 0 : supports(one->api, kind, dtype, reduction, memory);
}

uint32_t completion(uint32_t, uint32_t memory) {
  if (memory == POLYCCL_MEMORY_HOST) return POLYCCL_COMPLETION_INLINE;
  return device_table() != nullptr && memory == POLYCCL_MEMORY_DEVICE ? POLYCCL_COMPLETION_STREAM : 0;
}

polyccl_result comm_create(const polyccl_comm_config* given, polyccl_comm** comm) {
  return guarded([&] {
    *comm = nullptr;
    polyccl_comm_config config{};
    std::memcpy(&config, given, std::min<size_t>(given->struct_size, sizeof config));
    *comm = std::make_unique<polyccl_comm>(config).release();  // comm_destroy() takes it back
  });
}

polyccl_result issue(polyccl_comm* comm, const polyccl_op* const* ops, uint32_t n, polyccl_request** request) {
  if (request != nullptr) *request = nullptr;
  if (n == 0) return POLYCCL_OK;
  const polyccl_result result = guarded([&] { comm->impl.run(ops, n); });
  if (result != POLYCCL_OK) (void)guarded([&] { comm->impl.set_error(thread_error()); });
  return result;
}

polyccl_result request_wait(polyccl_comm*, polyccl_request*) {
  return guarded(
      [] { throw Failure(POLYCCL_ERROR_INVALID, "issue() gives no request here: there is nothing to wait for"); });
}

polyccl_result abort_comm(polyccl_comm* comm) {
  comm->impl.abort();
  return POLYCCL_OK;
}

polyccl_result comm_destroy(polyccl_comm* comm) {
  return guarded([&] { const std::unique_ptr<polyccl_comm> owned(comm); });
}

void last_error(polyccl_comm* comm, char* text, uint64_t size) {
  if (size == 0) return;
  text[0] = '\0';
  (void)guarded([&] {
    const std::string words = comm != nullptr ? comm->impl.error() : thread_error();
    const size_t length = std::min<size_t>(words.size(), size - 1);
    std::memcpy(text, words.data(), length);
    text[length] = '\0';
  });
}

const polyccl_backend* table() {
  // oneCCL ends the process where ranks' sizes differ (its own thread throws).
  static const polyccl_backend made = {
      .struct_size = sizeof(polyccl_backend),
      .abi = POLYCCL_ABI,
      .flags = POLYCCL_FLAG_CONCURRENT_COMMS | POLYCCL_FLAG_MAY_HANG | POLYCCL_FLAG_SIZES_FATAL,
      .reserved = 0,
      .name = "xccl",
      .library = library,
      .compatibility = compatibility,
      .device_count = count_devices,
      .supports = can,
      .completion = completion,
      .comm_create = comm_create,
      .issue = issue,
      .request_wait = request_wait,
      .request_test = nullptr,
      .async_error = nullptr,
      .abort = abort_comm,
      .comm_destroy = comm_destroy,
      .last_error = last_error,
      .kind_name = nullptr,
      .device = device_table(),
  };
  return &made;
}

}  // namespace
}  // namespace polyccl_xccl

extern "C" POLYCCL_EXPORT polyccl_result polyccl_backend_query(uint32_t host_abi, const polyccl_host* host,
                                                               const polyccl_backend** backend) {
  using namespace polyccl_xccl;
  *backend = table();
  if ((host_abi >> 16) != POLYCCL_ABI_MAJOR) {
    thread_error() = "the xccl plugin speaks major version " + std::to_string(POLYCCL_ABI_MAJOR) +
                     " of the plugin ABI, the host " + std::to_string(host_abi >> 16);
    return POLYCCL_ERROR_UNSUPPORTED;
  }
  the_host = host;
  return POLYCCL_OK;
}
