// The device runtime behind a plugin: the CUDA driver's functions or HIP's, under one set of names. Opened like the
// vendor's library, not linked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "library.h"

namespace polyccl_ccl {

using Status = int;  // CUresult, hipError_t
constexpr Status kDone = 0;
constexpr Status kInvalidValue = 1;  // these have the same numbers in both
constexpr Status kNotReady = 600;
constexpr Status kNotSupported = 801;

struct Runtime {
  Library library;
  bool stand_in = false;  // its device memory is host memory

  // The same in both but for their names. Streams, events and memory are plain pointers.
  Status (*alloc)(void** memory, size_t bytes) = nullptr;
  Status (*free)(void* memory) = nullptr;
  Status (*host_alloc)(void** memory, size_t bytes, unsigned flags) = nullptr;
  Status (*host_free)(void* memory) = nullptr;
  Status (*priorities)(int* least, int* greatest) = nullptr;
  Status (*stream_create)(void** stream, unsigned flags, int priority) = nullptr;
  Status (*stream_destroy)(void* stream) = nullptr;
  Status (*stream_wait_event)(void* stream, void* event, unsigned flags) = nullptr;
  Status (*stream_is_capturing)(void* stream, int* status) = nullptr;  // may be absent
  Status (*exchange_capture_mode)(int* mode) = nullptr;                // may be absent
  Status (*event_create)(void** event, unsigned flags) = nullptr;
  Status (*event_destroy)(void* event) = nullptr;
  Status (*event_record)(void* event, void* stream) = nullptr;
  Status (*event_query)(void* event) = nullptr;

  // The family's own, over what differs.
  Status (*count)(int* devices) = nullptr;
  Status (*architecture)(int device, int* major, int* minor) = nullptr;
  Status (*copy)(void* stream, void* output, size_t output_stride, const void* input, size_t input_stride, size_t bytes,
                 size_t rows) = nullptr;
  Status (*wait_value)(void* stream, const volatile uint32_t* flag, uint32_t value) = nullptr;  // may be absent
  Status (*write_value)(void* stream, volatile uint32_t* flag, uint32_t value) = nullptr;       // may be absent
  Status (*enter)(int device, intptr_t* before) = nullptr;        // make a device this thread's
  Status (*enter_for)(void* stream, intptr_t* before) = nullptr;  // that of a stream; NULL: any
  void (*leave)(intptr_t before) = nullptr;
  std::string (*text)(Status status) = nullptr;
};

// Flags with the same bits in both.
constexpr unsigned kPortableMapped = 3;
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kNoTiming = 2;
constexpr int kRelaxed = 2;  // a mode of captures

// The runtime, opened at the first call. Throws a Failure (UNAVAILABLE).
const Runtime& runtime();

// The same where the user named it or the process has mapped it; else NULL. For what is asked before there is a device.
const Runtime* chosen_runtime();

// The devices of this process: at least one. Throws a Failure (UNAVAILABLE) with the vendor's words and what to do.
int device_count();

// Turn a status into a Failure.
void check(Status status, const char* doing);

// Whether the stream is being captured into a graph.
bool is_capturing(void* stream);

// Makes a device this thread's, for a scope. While another thread captures a stream in CUDA's and HIP's default mode, calls that might
// disturb a capture fail, in any thread, and end the capture. None in such a scope does disturb one, and the scope says so.
class Current {
 public:
  explicit Current(int device);
  static Current of(void* stream) { return Current(stream, nullptr); }
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  Current(void* stream, std::nullptr_t);
  void relax();

  intptr_t before_ = 0;
  int mode_ = kRelaxed;
};

}  // namespace polyccl_ccl
