// The plugin's face: the table of the ABI. No exception leaves an entry.
#include <dlfcn.h>
#include <gloo/barrier.h>
#include <gloo/config.h>
#include <polyccl/backend.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "comm.h"
#include "operations.h"

struct polyccl_comm {
  explicit polyccl_comm(const polyccl_comm_config& config) : impl(config) {}
  polyccl_gloo::Comm impl;
};

namespace polyccl_gloo {
namespace {

const polyccl_host* the_host = nullptr;
thread_local std::string thread_error;

// Run an entry that belongs to no communicator.
template <typename Body>
polyccl_result guarded(Body body) noexcept {
  try {
    return body();
  } catch (const Failure& e) {
    thread_error = e.what();
    return e.result();
  } catch (const std::exception& e) {
    thread_error = e.what();
    return POLYCCL_ERROR_INTERNAL;
  } catch (...) {
    thread_error = "an exception of an unknown class";
    return POLYCCL_ERROR_INTERNAL;
  }
}

polyccl_result put(const std::string& text, char* output, uint64_t size) {
  if (text.size() >= size) throw Failure(POLYCCL_ERROR_INVALID, "the buffer is too small for '" + text + "'");
  std::memcpy(output, text.c_str(), text.size() + 1);
  return POLYCCL_OK;
}

// The numbers that Gloo gives itself, which have long been the same, and the commit where this build fixes it.
std::string version() {
#ifdef POLYCCL_GLOO_COMMIT
  const std::string commit = " (commit " + std::string(POLYCCL_GLOO_COMMIT).substr(0, 12) + ")";
#else
  const std::string commit;
#endif
  return std::to_string(GLOO_VERSION_MAJOR) + "." + std::to_string(GLOO_VERSION_MINOR) + "." +
         std::to_string(GLOO_VERSION_PATCH) + commit;
}

// The file that holds a function; "" where that is unknown.
std::string file_of(void* function) {
  Dl_info info{};
  return ::dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

polyccl_result library(char* version_text, uint64_t version_size, char* file, uint64_t file_size) {
  return guarded([&] {
    const std::string gloo = file_of(reinterpret_cast<void*>(&gloo::barrier));
    const std::string self = file_of(reinterpret_cast<void*>(&library));
    put(version(), version_text, version_size);
    return put(gloo == self ? "" : gloo, file, file_size);
  });
}

// What must be alike for two ranks' Gloo to run the same algorithms.
polyccl_result compatibility(int32_t, char* key, uint64_t size) {
  return guarded([&] {
    const char* bytes = std::endian::native == std::endian::little ? "little" : "big";
    return put("gloo " + version() + " " + bytes + "-endian", key, size);
  });
}

polyccl_result device_count(int32_t* count) {
  *count = 0;
  return POLYCCL_OK;
}

uint32_t can(uint32_t kind, uint32_t dtype, uint32_t reduction, uint32_t memory) {
  return supports(the_host, kind, dtype, reduction, memory);
}

uint32_t completion(uint32_t, uint32_t memory) { return memory == POLYCCL_MEMORY_HOST ? POLYCCL_COMPLETION_INLINE : 0; }

polyccl_result comm_create(const polyccl_comm_config* given, polyccl_comm** comm) {
  return guarded([&] {
    *comm = nullptr;
    polyccl_comm_config config{};
    std::memcpy(&config, given, std::min<size_t>(given->struct_size, sizeof config));
    *comm = std::make_unique<polyccl_comm>(config).release();  // comm_destroy() takes it back
    return POLYCCL_OK;
  });
}

polyccl_result issue(polyccl_comm* comm, const polyccl_op* const* ops, uint32_t n, polyccl_request** request) {
  return guarded([&] {
    if (request != nullptr) *request = nullptr;
    if (n == 0) return polyccl_result{POLYCCL_OK};
    return comm->impl.run([&] { run_operations(comm->impl, the_host, ops, n); });
  });
}

polyccl_result request_wait(polyccl_comm*, polyccl_request*) {
  thread_error = "Gloo's operations are done when issue() returns: there is no request to wait for";
  return POLYCCL_ERROR_INVALID;
}

polyccl_result abort_comm(polyccl_comm* comm) {
  return guarded([&] {
    comm->impl.abort();
    return POLYCCL_OK;
  });
}

polyccl_result comm_destroy(polyccl_comm* comm) {
  return guarded([&] {
    const std::unique_ptr<polyccl_comm> owned(comm);
    return POLYCCL_OK;
  });
}

void last_error(polyccl_comm* comm, char* text, uint64_t size) {
  if (size == 0) return;
  text[0] = '\0';
  (void)guarded([&] {
    const std::string words = comm != nullptr ? comm->impl.error() : thread_error;
    const size_t length = std::min<size_t>(words.size(), size - 1);
    std::memcpy(text, words.data(), length);
    text[length] = '\0';
    return POLYCCL_OK;
  });
}

const polyccl_backend table = {
    .struct_size = sizeof(polyccl_backend),
    .abi = POLYCCL_ABI,
    .flags = POLYCCL_FLAG_CONCURRENT_COMMS | POLYCCL_FLAG_TRANSPORT,
    .reserved = 0,
    .name = "gloo",
    .library = library,
    .compatibility = compatibility,
    .device_count = device_count,
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
    .device = nullptr,
};

}  // namespace
}  // namespace polyccl_gloo

extern "C" POLYCCL_EXPORT polyccl_result polyccl_backend_query(uint32_t host_abi, const polyccl_host* host,
                                                               const polyccl_backend** backend) {
  using namespace polyccl_gloo;
  *backend = &table;
  if ((host_abi >> 16) != POLYCCL_ABI_MAJOR) {
    thread_error = "the gloo plugin speaks major version " + std::to_string(POLYCCL_ABI_MAJOR) +
                   " of the plugin ABI, the host " + std::to_string(host_abi >> 16);
    return POLYCCL_ERROR_UNSUPPORTED;
  }
  if (host == nullptr || !POLYCCL_HAS(host, reduce) || host->reduce == nullptr) {
    thread_error = "the host offers no reduce(), which the gloo plugin needs";
    return POLYCCL_ERROR_UNSUPPORTED;
  }
  the_host = host;
  return POLYCCL_OK;
}
