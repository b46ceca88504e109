// The plugin's face: the table of the ABI. No exception leaves an entry.
#include <polyccl/backend.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "capabilities.h"
#include "comm.h"
#include "device.h"
#include "failure.h"
#include "family.h"
#include "operations.h"
#include "runtime.h"

struct polyccl_comm {
  explicit polyccl_comm(const polyccl_comm_config& config) : impl(config) {}
  polyccl_ccl::Comm impl;
};

namespace polyccl_ccl {
namespace {

const polyccl_host* the_host = nullptr;

void put(const std::string& text, char* output, uint64_t size) {
  if (text.size() >= size) throw Failure(POLYCCL_ERROR_INVALID, "the buffer is too small for '" + text + "'");
  std::memcpy(output, text.c_str(), text.size() + 1);
}

// Run an entry of a communicator; it keeps the words of its failures.
template <typename Body>
polyccl_result on(polyccl_comm* comm, Body body) noexcept {
  const polyccl_result result = guarded(body);
  if (result != POLYCCL_OK) {
    (void)guarded([&] { comm->impl.set_error(thread_error()); });
  }
  return result;
}

polyccl_result library(char* version, uint64_t version_size, char* file, uint64_t file_size) {
  return guarded([&] {
    const Vendor& open = vendor();
    put(open.version_text() + (open.stand_in ? " (stand-in)" : ""), version, version_size);
    put(open.library.file, file, file_size);
  });
}

// Ranks of one communicator need the very same version of the library: its protocols are its own business.
polyccl_result compatibility(int32_t, char* key, uint64_t size) {
  return guarded([&] { put(std::string(family().backend) + " " + vendor().version_text(), key, size); });
}

polyccl_result count_devices(int32_t* count) {
  return guarded([&] {
    *count = 0;
    *count = device_count();
  });
}

uint32_t completion(uint32_t, uint32_t memory) {
  return memory == POLYCCL_MEMORY_DEVICE ? POLYCCL_COMPLETION_STREAM : 0;
}

polyccl_result comm_create(const polyccl_comm_config* given, polyccl_comm** comm) {
  return guarded([&] {
    *comm = nullptr;
    polyccl_comm_config config{};
    std::memcpy(&config, given, std::min<size_t>(given->struct_size, sizeof config));
    *comm = std::make_unique<polyccl_comm>(config).release();  // comm_destroy() takes it back
  });
}

polyccl_result issue_ops(polyccl_comm* comm, const polyccl_op* const* ops, uint32_t n, polyccl_request** request) {
  if (request != nullptr) *request = nullptr;
  return on(comm, [&] { issue(comm->impl, ops, n); });
}

polyccl_result request_wait(polyccl_comm*, polyccl_request*) {
  return guarded([] {
    throw Failure(POLYCCL_ERROR_INVALID,
                  "operations complete in their stream's order: there is no request to wait for");
  });
}

polyccl_result async_error(polyccl_comm* comm) {
  return on(comm, [&] { comm->impl.look(); });
}

polyccl_result abort_comm(polyccl_comm* comm) {
  return guarded([&] { comm->impl.abort(); });
}

polyccl_result comm_destroy(polyccl_comm* comm) {
  return guarded([&] { const std::unique_ptr<polyccl_comm> owned(comm); });
}

void last_error(polyccl_comm* comm, char* text, uint64_t size) {
  if (size == 0) return;
  text[0] = '\0';
  std::string words = thread_error();
  if (comm != nullptr) (void)guarded([&] { words = comm->impl.error(); });
  const size_t length = std::min<size_t>(words.size(), size - 1);
  std::memcpy(text, words.data(), length);
  text[length] = '\0';
}

polyccl_backend make_table() {
  polyccl_backend table{};
  table.struct_size = sizeof table;
  table.abi = POLYCCL_ABI;
  table.flags = POLYCCL_FLAG_CONCURRENT_COMMS;
  table.name = family().backend;
  table.library = library;
  table.compatibility = compatibility;
  table.device_count = count_devices;
  table.supports = supports;
  table.completion = completion;
  table.comm_create = comm_create;
  table.issue = issue_ops;
  table.request_wait = request_wait;
  table.async_error = async_error;
  table.abort = abort_comm;
  table.comm_destroy = comm_destroy;
  table.last_error = last_error;
  table.device = &device_table();
  return table;
}

polyccl_backend& the_table() {
  static polyccl_backend table = make_table();
  return table;
}

}  // namespace

std::string& thread_error() {
  thread_local std::string text;
  return text;
}

void log(int32_t level, const std::string& text) {
  if (the_host != nullptr) the_host->log(the_host->ctx, level, text.c_str());
}

}  // namespace polyccl_ccl

extern "C" POLYCCL_EXPORT polyccl_result polyccl_backend_query(uint32_t host_abi, const polyccl_host* host,
                                                               const polyccl_backend** backend) {
  using namespace polyccl_ccl;
  polyccl_backend& table = the_table();
  *backend = &table;
  return guarded([&] {
    if ((host_abi >> 16) != POLYCCL_ABI_MAJOR) {
      throw Failure(POLYCCL_ERROR_UNSUPPORTED, std::string("the ") + family().backend +
                                                   " plugin speaks major version " + std::to_string(POLYCCL_ABI_MAJOR) +
                                                   " of the plugin ABI, the host " + std::to_string(host_abi >> 16));
    }
    if (host != nullptr && POLYCCL_HAS(host, log) && host->log != nullptr) the_host = host;
    // Only what is chosen already: which runtime torch brings is not known before torch is imported.
    const Runtime* chosen = chosen_runtime();
    if (chosen != nullptr && chosen->stand_in) table.flags |= POLYCCL_FLAG_DEVICE_IS_HOST;
  });
}
