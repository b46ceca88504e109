// The device runtime: opening, and what its results mean.
#include "runtime.h"

#include <atomic>
#include <memory>
#include <mutex>

#include "failure.h"
#include "nccl_api.h"

namespace polyccl_ccl {
namespace {

std::string objection(const Library& library) {
  Runtime probe;
  Symbols symbols(library);
  family().fill(probe, symbols);
  return symbols.missing().empty() ? "" : "lacks " + symbols.missing();
}

std::mutex opening;
std::atomic<const Runtime*> opened{nullptr};

const Runtime* keep(Library library) {
  if (library.handle == nullptr) return nullptr;
  auto runtime = std::make_unique<Runtime>();
  runtime->library = std::move(library);
  Symbols symbols(runtime->library);
  family().fill(*runtime, symbols);
  runtime->stand_in = symbols.has("polyccl_stand_in");
  log(POLYCCL_LOG_INFO,
      std::string(family().runtime.what) + " from " + runtime->library.file + ": " + runtime->library.found);
  const Runtime* kept = runtime.release();  // for as long as the process lives
  opened.store(kept, std::memory_order_release);
  return kept;
}

// Whether a status means that there is nothing to work with: no driver, none that fits, no device.
bool means_absent(Status status) {
  for (const Status absent : {3, 34, 35, 36, 100, 101, 803, 804}) {
    if (status == absent) return true;
  }
  return false;
}

// What the vendor's library itself says where there is no driver: its own words help to find the cause.
std::string library_words() {
  try {
    const Vendor& library = vendor();
    void* memory = nullptr;
    if (library.api.mem_alloc == nullptr || library.stand_in) return "";
    const int result = library.api.mem_alloc(&memory, 4096);
    if (result == kSuccess) return "";
    return "; " + std::string(flavour_name(library.flavour)) + " says: " + library.words(result, nullptr);
  } catch (const Failure&) {
    return "";
  }
}

}  // namespace

const Runtime* chosen_runtime() {
  if (const Runtime* known = opened.load(std::memory_order_acquire)) return known;
  const std::lock_guard lock(opening);
  if (const Runtime* known = opened.load(std::memory_order_acquire)) return known;
  return keep(open_if_chosen(family().runtime, objection));
}

const Runtime& runtime() {
  if (const Runtime* known = opened.load(std::memory_order_acquire)) return *known;
  try {
    const std::lock_guard lock(opening);
    if (const Runtime* known = opened.load(std::memory_order_acquire)) return *known;
    return *keep(open_library(family().runtime, objection));
  } catch (const Failure& e) {
    throw Failure(e.result(), e.what() + library_words() + ". " + family().advice);
  }
}

int device_count() {
  const Runtime& table = runtime();
  int devices = 0;
  const Status status = table.count(&devices);
  if (status == kDone && devices > 0) return devices;
  const std::string words = status == kDone ? "it sees no device" : table.text(status);
  throw Failure(POLYCCL_ERROR_UNAVAILABLE, std::string(family().runtime.what) + " (" + table.library.file +
                                               ") has no device to offer: " + words + library_words() + ". " +
                                               family().advice);
}

void check(Status status, const char* doing) {
  if (status == kDone) return;
  const polyccl_result result = means_absent(status)      ? POLYCCL_ERROR_UNAVAILABLE
                                : status == kInvalidValue ? POLYCCL_ERROR_INVALID
                                : status == kNotSupported ? POLYCCL_ERROR_UNSUPPORTED
                                                          : POLYCCL_ERROR_INTERNAL;
  throw Failure(result, std::string(doing) + ": " + runtime().text(status));
}

bool is_capturing(void* stream) {
  constexpr Status kImplicit = 906;  // the legacy default stream, while a stream that synchronizes with it is captured
  const Runtime& table = runtime();
  int capture = 0;
  if (table.stream_is_capturing == nullptr) return false;
  const Status status = table.stream_is_capturing(stream, &capture);
  return status == kImplicit || (status == kDone && capture != 0);
}

Current::Current(int device) {
  check(runtime().enter(device, &before_), "choosing the device");
  relax();
}

Current::Current(void* stream, std::nullptr_t) {
  check(runtime().enter_for(stream, &before_), "choosing the device of a stream");
  relax();
}

void Current::relax() {
  if (runtime().exchange_capture_mode != nullptr) (void)runtime().exchange_capture_mode(&mode_);
}

Current::~Current() {
  relax();  // back to what it was
  runtime().leave(before_);
}

}  // namespace polyccl_ccl
