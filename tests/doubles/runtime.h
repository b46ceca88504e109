// The runtime that both vendors' stand-ins share: devices whose memory is host memory, streams that are worker threads
// with an in-order queue, and events. cuda_driver.cc and hip.cc translate their vendor's calls into these.
//
// Environment (read once):
//   FAKE_DEVICE_COUNT  devices that exist (8)
//   FAKE_DELAY_US      each piece of work first sleeps a random time up to this (0)
//   FAKE_SEED          seed of these times (1); the variable RANK is added to it
//   FAKE_GUARD         1: the host faults where it dereferences device memory (0)
//   FAKE_NO_WAIT_VALUE 1: streams cannot wait for a value in memory (0)
#ifndef STAND_IN_RUNTIME_H_
#define STAND_IN_RUNTIME_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace stand_in {

// CUDA's and HIP's numbers are the same wherever both have the error.
enum class Status : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kContextIsDestroyed = 709,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kNotPermitted = 800,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kUnknown = 999,
};

const char* name_of(Status status);
const char* text_of(Status status);

// A point in a stream's work.
class Mark {
 public:
  void reach();
  bool reached() const;
  void wait() const;
  // Valid once reached.
  std::chrono::steady_clock::time_point time() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point time_;
};

enum class Capture { kNone = 0, kActive = 1, kInvalidated = 2 };

// Of a capture: whose calls that might disturb it are forbidden. Of a thread: kRelaxed allows them to it.
enum class CaptureMode { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

class Stream {
 public:
  Stream(int device, unsigned flags, int priority, unsigned seed);

  // Start the worker. It ends once the stream is closed and its queue empty; nothing ever waits for it to end.
  static std::shared_ptr<Stream> start(int device, unsigned flags, int priority);
  void close();

  void enqueue(std::function<void()> work);
  std::shared_ptr<Mark> mark();
  bool idle() const;

  const int device;
  const unsigned flags;
  const int priority;
  Capture capture = Capture::kNone;  // these are guarded by the runtime's mutex
  CaptureMode capture_mode = CaptureMode::kGlobal;
  std::thread::id capturer;

 private:
  void run();
  void delay();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
  bool closed_ = false;
  const long max_delay_us_;
  std::mt19937 random_;
};

struct Event {
  int device;
  bool timed;
  std::shared_ptr<Mark> mark;  // the last record's; null before the first. Guarded by the runtime's mutex
};

enum class MemoryKind { kHost, kRegistered, kDevice };

struct Allocation {
  std::uintptr_t base;
  std::size_t size;
  MemoryKind kind;
  int device;
  std::byte* view;              // where workers reach it
  std::shared_ptr<void> owner;  // frees it; null for registered memory
};

enum class Compare { kGreaterEqual = 0, kEqual = 1, kAnd = 2, kNor = 3 };

// Everything that a process has. Handles are pointers that are looked up before use, so a stale one is an error, not a
// crash.
class Runtime {
 public:
  Runtime();

  int device_count() const { return device_count_; }
  bool can_wait_value() const { return can_wait_value_; }
  bool guarded() const { return guarded_; }

  // False in a child of fork(): its workers are gone, and the vendors' runtimes fail too.
  bool in_first_process() const;
  // True on a stream's worker: from there the vendors' APIs must not be called.
  static bool on_worker();

  Status allocate(int device, std::size_t bytes, MemoryKind kind, void** memory);
  Status release(const void* memory, MemoryKind kind);
  // Freed once the stream's work so far is done.
  Status release_on(Stream& stream, const void* memory);
  Status register_host(void* memory, std::size_t bytes, int device);
  Status unregister_host(const void* memory);
  bool find(const void* pointer, Allocation* found) const;
  // Where a worker reaches what the pointer names; itself for memory that is not the runtime's.
  std::byte* view(const void* pointer) const;

  Status create_stream(int device, unsigned flags, int priority, void** stream);
  Status destroy_stream(void* stream);
  // The stream of a handle. 0 and 1 are the device's default stream, 2 is the thread's own.
  std::shared_ptr<Stream> stream(const void* handle, int device);
  std::vector<std::shared_ptr<Stream>> streams_of(int device);
  int urgent_streams(int device);
  Status synchronize_device(int device);
  Status begin_capture(Stream& stream, CaptureMode mode);
  Status end_capture(Stream& stream);
  Capture capture_of(const Stream& stream) const;
  static void exchange_capture_mode(CaptureMode* mode);  // of this thread

  // Work on a stream. Each fails while the stream captures: graphs are not modelled.
  Status enqueue(Stream& stream, std::function<void()> work);
  Status copy(Stream& stream, void* output, const void* input, std::size_t bytes);
  Status copy_rows(Stream& stream, void* output, std::size_t output_stride, const void* input, std::size_t input_stride,
                   std::size_t bytes, std::size_t rows);
  Status fill(Stream& stream, void* output, unsigned char value, std::size_t bytes);
  Status wait_value(Stream& stream, const void* address, std::uint32_t value, Compare compare, std::uint32_t mask);
  Status write_value(Stream& stream, void* address, std::uint32_t value);

  Status create_event(int device, bool timed, void** event);
  Status destroy_event(void* event);
  Status record(void* event, Stream& stream);
  Status wait_event(Stream& stream, void* event);
  Status query_event(void* event);
  Status synchronize_event(void* event);
  Status elapsed(void* start, void* end, float* milliseconds);

 private:
  std::shared_ptr<Event> event(const void* handle) const;
  Status mark_of(const void* handle, std::shared_ptr<Mark>* mark) const;
  const Allocation* locate(std::uintptr_t address) const;
  bool device_reaches(const void* address) const;
  // Allocations, and questions about events, might disturb a capture: where that is forbidden to this thread they fail, and the capture is
  // invalid.
  Status might_disturb_captures();

  const int device_count_;
  const bool can_wait_value_;
  const bool guarded_;
  const int process_;

  mutable std::mutex mutex_;
  std::map<std::uintptr_t, Allocation> memory_;
  std::map<const void*, std::shared_ptr<Stream>> streams_;
  std::map<const void*, std::shared_ptr<Event>> events_;
  std::map<int, std::shared_ptr<Stream>> default_streams_;
};

// The process's runtime. It is never destroyed: workers may outlive main().
Runtime& runtime();

}  // namespace stand_in

#endif  // STAND_IN_RUNTIME_H_
