// Devices, streams, events and memory: see runtime.h.
#include "runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "environment.h"

namespace stand_in {
namespace {

constexpr int kFill = 0xA5;  // fresh memory is never zero by luck
constexpr std::size_t kAlignment = 512;
constexpr std::size_t kPage = 4096;

thread_local bool worker_thread = false;
thread_local CaptureMode thread_capture_mode = CaptureMode::kGlobal;

struct Name {
  Status status;
  const char* name;
  const char* text;
};
constexpr Name kNames[] = {
    {Status::kSuccess, "SUCCESS", "no error"},
    {Status::kInvalidValue, "ERROR_INVALID_VALUE", "invalid argument"},
    {Status::kOutOfMemory, "ERROR_OUT_OF_MEMORY", "out of memory"},
    {Status::kNotInitialized, "ERROR_NOT_INITIALIZED", "initialization error"},
    {Status::kNoDevice, "ERROR_NO_DEVICE", "no capable device is detected"},
    {Status::kInvalidDevice, "ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {Status::kInvalidContext, "ERROR_INVALID_CONTEXT", "invalid device context"},
    {Status::kInvalidHandle, "ERROR_INVALID_HANDLE", "invalid resource handle"},
    {Status::kNotFound, "ERROR_NOT_FOUND", "named symbol not found"},
    {Status::kNotReady, "ERROR_NOT_READY", "device not ready"},
    {Status::kContextIsDestroyed, "ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {Status::kAlreadyRegistered, "ERROR_HOST_MEMORY_ALREADY_REGISTERED", "memory is already registered"},
    {Status::kNotRegistered, "ERROR_HOST_MEMORY_NOT_REGISTERED", "memory is not registered"},
    {Status::kNotPermitted, "ERROR_NOT_PERMITTED", "operation not permitted (called from a host function?)"},
    {Status::kNotSupported, "ERROR_NOT_SUPPORTED", "operation not supported"},
    {Status::kCaptureUnsupported, "ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {Status::kCaptureInvalidated, "ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {Status::kUnknown, "ERROR_UNKNOWN", "unknown error"},
};

struct Unmap {
  std::size_t size;
  void operator()(void* memory) const { munmap(memory, size); }
};

// One memory, mapped twice: the user's address faults, the worker's does not. Gives null where the system has no more.
std::shared_ptr<void> map_guarded(std::size_t bytes, void** user, std::byte** view) {
  const std::size_t size = (bytes + kPage - 1) / kPage * kPage;
  const int file = memfd_create("stand-in device memory", MFD_CLOEXEC);
  if (file < 0) return nullptr;
  void* outer = MAP_FAILED;
  void* inner = MAP_FAILED;
  if (ftruncate(file, static_cast<off_t>(size)) == 0) {
    outer = mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
    inner = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  if (outer == MAP_FAILED || inner == MAP_FAILED) {
    if (outer != MAP_FAILED) munmap(outer, size);
    if (inner != MAP_FAILED) munmap(inner, size);
    return nullptr;
  }
  *user = outer;
  *view = static_cast<std::byte*>(inner);
  auto both = std::make_shared<std::pair<std::unique_ptr<void, Unmap>, std::unique_ptr<void, Unmap>>>(
      std::unique_ptr<void, Unmap>(outer, Unmap{size}), std::unique_ptr<void, Unmap>(inner, Unmap{size}));
  return std::shared_ptr<void>(both, both.get());
}

// The stream that handle 2 means: one for each thread and device, closed when the thread ends.
struct ThreadStreams {
  std::map<int, std::shared_ptr<Stream>> streams;
  ThreadStreams() = default;
  ThreadStreams(const ThreadStreams&) = delete;
  ThreadStreams& operator=(const ThreadStreams&) = delete;
  ~ThreadStreams() {
    for (auto& [device, stream] : streams) stream->close();
  }
};
thread_local ThreadStreams thread_streams;

bool holds(std::uint32_t seen, std::uint32_t value, Compare compare) {
  switch (compare) {
    case Compare::kGreaterEqual:
      return static_cast<std::int32_t>(seen - value) >= 0;
    case Compare::kEqual:
      return seen == value;
    case Compare::kAnd:
      return (seen & value) != 0;
    case Compare::kNor:
      return ~(seen | value) != 0;
  }
  return true;
}

}  // namespace

const char* name_of(Status status) {
  for (const Name& entry : kNames) {
    if (entry.status == status) return entry.name;
  }
  return nullptr;
}

const char* text_of(Status status) {
  for (const Name& entry : kNames) {
    if (entry.status == status) return entry.text;
  }
  return nullptr;
}

Runtime& runtime() {
  static Runtime& instance = *std::make_unique<Runtime>().release();
  return instance;
}

// --- Marks and streams -----------------------------------------------------------------------------------------------

void Mark::reach() {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  time_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

bool Mark::reached() const {
  const std::lock_guard lock(mutex_);
  return reached_;
}

void Mark::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

std::chrono::steady_clock::time_point Mark::time() const {
  const std::lock_guard lock(mutex_);
  return time_;
}

Stream::Stream(int device_, unsigned flags_, int priority_, unsigned seed)
    : device(device_),
      flags(flags_),
      priority(priority_),
      max_delay_us_(environment("FAKE_DELAY_US", 0)),
      random_(seed) {}

std::shared_ptr<Stream> Stream::start(int device, unsigned flags, int priority) {
  static std::atomic<unsigned> ordinal = 0;
  const auto seed = static_cast<unsigned>(environment("FAKE_SEED", 1) + 1000 * environment("RANK", 0)) + ordinal++;
  auto stream = std::make_shared<Stream>(device, flags, priority, seed);
  std::thread([stream] { stream->run(); }).detach();
  return stream;
}

void Stream::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Stream::enqueue(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  changed_.notify_all();
}

std::shared_ptr<Mark> Stream::mark() {
  auto mark = std::make_shared<Mark>();
  enqueue([mark] { mark->reach(); });
  return mark;
}

bool Stream::idle() const {
  const std::lock_guard lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::delay() {
  if (max_delay_us_ <= 0) return;
  std::uniform_int_distribution<long> times(0, max_delay_us_);
  std::this_thread::sleep_for(std::chrono::microseconds(times(random_)));
}

void Stream::run() {
  worker_thread = true;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    {
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      delay();
      work();
    }  // what the work held is freed before the stream counts as idle
    lock.lock();
    busy_ = false;
  }
}

// --- The runtime -----------------------------------------------------------------------------------------------------

Runtime::Runtime()
    : device_count_(static_cast<int>(environment("FAKE_DEVICE_COUNT", 8))),
      can_wait_value_(environment("FAKE_NO_WAIT_VALUE", 0) == 0),
      guarded_(environment("FAKE_GUARD", 0) != 0),
      process_(getpid()) {}

bool Runtime::in_first_process() const { return getpid() == process_; }

bool Runtime::on_worker() { return worker_thread; }

Status Runtime::allocate(int device, std::size_t bytes, MemoryKind kind, void** memory) {
  if (memory == nullptr || bytes == 0) return Status::kInvalidValue;
  if (const Status status = might_disturb_captures(); status != Status::kSuccess) return status;
  void* user = nullptr;
  std::byte* view = nullptr;
  std::shared_ptr<void> owner;
  if (kind == MemoryKind::kDevice && guarded_) {
    owner = map_guarded(bytes, &user, &view);
  } else if (bytes < SIZE_MAX - kAlignment) {
    // Whole multiples only where that costs nothing: the exact size lets AddressSanitizer see what runs over.
    if (posix_memalign(&user, kAlignment, bytes) == 0) owner = std::shared_ptr<void>(user, std::free);
    view = static_cast<std::byte*>(user);
  }
  if (owner == nullptr) return Status::kOutOfMemory;
  std::memset(view, kFill, bytes);
  const std::lock_guard lock(mutex_);
  const auto base = reinterpret_cast<std::uintptr_t>(user);
  memory_[base] = Allocation{base, bytes, kind, device, view, owner};
  *memory = user;
  return Status::kSuccess;
}

Status Runtime::release(const void* memory, MemoryKind kind) {
  if (memory == nullptr) return Status::kSuccess;
  if (const Status status = might_disturb_captures(); status != Status::kSuccess) return status;
  std::shared_ptr<void> owner;
  int device = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto entry = memory_.find(reinterpret_cast<std::uintptr_t>(memory));
    if (entry == memory_.end() || entry->second.kind != kind) return Status::kInvalidValue;
    device = entry->second.device;
  }
  // As on a device: what was enqueued before may still use the memory.
  const Status status = synchronize_device(device);
  const std::lock_guard lock(mutex_);
  const auto entry = memory_.find(reinterpret_cast<std::uintptr_t>(memory));
  if (entry == memory_.end()) return Status::kInvalidValue;
  owner = std::move(entry->second.owner);
  memory_.erase(entry);
  return status;
}

Status Runtime::release_on(Stream& stream, const void* memory) {
  if (memory == nullptr) return Status::kSuccess;
  const auto base = reinterpret_cast<std::uintptr_t>(memory);
  {
    const std::lock_guard lock(mutex_);
    const auto entry = memory_.find(base);
    if (entry == memory_.end() || entry->second.kind != MemoryKind::kDevice) return Status::kInvalidValue;
  }
  return enqueue(stream, [this, base] {
    std::shared_ptr<void> owner;  // freed after the lock
    const std::lock_guard lock(mutex_);
    const auto entry = memory_.find(base);
    if (entry == memory_.end()) return;
    owner = std::move(entry->second.owner);
    memory_.erase(entry);
  });
}

Status Runtime::register_host(void* memory, std::size_t bytes, int device) {
  if (memory == nullptr || bytes == 0) return Status::kInvalidValue;
  const std::lock_guard lock(mutex_);
  const auto base = reinterpret_cast<std::uintptr_t>(memory);
  if (locate(base) != nullptr) return Status::kAlreadyRegistered;
  memory_[base] = Allocation{base, bytes, MemoryKind::kRegistered, device, static_cast<std::byte*>(memory), nullptr};
  return Status::kSuccess;
}

Status Runtime::unregister_host(const void* memory) {
  const std::lock_guard lock(mutex_);
  const auto entry = memory_.find(reinterpret_cast<std::uintptr_t>(memory));
  if (entry == memory_.end() || entry->second.kind != MemoryKind::kRegistered) return Status::kNotRegistered;
  memory_.erase(entry);
  return Status::kSuccess;
}

const Allocation* Runtime::locate(std::uintptr_t address) const {
  auto entry = memory_.upper_bound(address);
  if (entry == memory_.begin()) return nullptr;
  --entry;
  return address - entry->second.base < entry->second.size ? &entry->second : nullptr;
}

bool Runtime::find(const void* pointer, Allocation* found) const {
  const std::lock_guard lock(mutex_);
  const Allocation* allocation = locate(reinterpret_cast<std::uintptr_t>(pointer));
  if (allocation == nullptr) return false;
  *found = *allocation;
  return true;
}

std::byte* Runtime::view(const void* pointer) const {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (guarded_) {
    const std::lock_guard lock(mutex_);
    if (const Allocation* allocation = locate(address)) return allocation->view + (address - allocation->base);
  }
  return reinterpret_cast<std::byte*>(address);
}

bool Runtime::device_reaches(const void* address) const {
  const std::lock_guard lock(mutex_);
  return locate(reinterpret_cast<std::uintptr_t>(address)) != nullptr;
}

Status Runtime::create_stream(int device, unsigned flags, int priority, void** stream) {
  if (stream == nullptr) return Status::kInvalidValue;
  auto made = Stream::start(device, flags, priority);
  *stream = made.get();
  const std::lock_guard lock(mutex_);
  streams_[made.get()] = std::move(made);
  return Status::kSuccess;
}

Status Runtime::destroy_stream(void* stream) {
  const std::lock_guard lock(mutex_);
  const auto entry = streams_.find(stream);
  if (entry == streams_.end()) return Status::kInvalidHandle;
  entry->second->close();  // what is queued still runs, and the call does not wait for it: as on a device
  streams_.erase(entry);
  return Status::kSuccess;
}

std::shared_ptr<Stream> Runtime::stream(const void* handle, int device) {
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  if (number == 2) {
    auto& own = thread_streams.streams[device];
    if (own == nullptr) own = Stream::start(device, 0, 0);
    return own;
  }
  const std::lock_guard lock(mutex_);
  if (number < 2) {
    auto& shared = default_streams_[device];
    if (shared == nullptr) shared = Stream::start(device, 0, 0);
    return shared;
  }
  const auto entry = streams_.find(handle);
  return entry == streams_.end() ? nullptr : entry->second;
}

int Runtime::urgent_streams(int device) {
  const auto streams = streams_of(device);
  return static_cast<int>(
      std::count_if(streams.begin(), streams.end(), [](const auto& stream) { return stream->priority < 0; }));
}

std::vector<std::shared_ptr<Stream>> Runtime::streams_of(int device) {
  std::vector<std::shared_ptr<Stream>> found;
  const std::lock_guard lock(mutex_);
  for (const auto& [handle, stream] : streams_) {
    if (stream->device == device) found.push_back(stream);
  }
  const auto entry = default_streams_.find(device);
  if (entry != default_streams_.end()) found.push_back(entry->second);
  return found;
}

Status Runtime::synchronize_device(int device) {
  std::vector<std::shared_ptr<Mark>> marks;
  for (const auto& stream : streams_of(device)) {
    if (!stream->idle()) marks.push_back(stream->mark());
  }
  for (const auto& mark : marks) mark->wait();
  return Status::kSuccess;
}

Status Runtime::begin_capture(Stream& stream, CaptureMode mode) {
  const std::lock_guard lock(mutex_);
  if (stream.capture != Capture::kNone) return Status::kCaptureUnsupported;
  stream.capture = Capture::kActive;
  stream.capture_mode = mode;
  stream.capturer = std::this_thread::get_id();
  return Status::kSuccess;
}

Status Runtime::end_capture(Stream& stream) {
  const std::lock_guard lock(mutex_);
  const Capture capture = std::exchange(stream.capture, Capture::kNone);
  if (capture == Capture::kNone) return Status::kInvalidValue;
  return capture == Capture::kActive ? Status::kSuccess : Status::kCaptureInvalidated;
}

void Runtime::exchange_capture_mode(CaptureMode* mode) { std::swap(*mode, thread_capture_mode); }

Status Runtime::might_disturb_captures() {
  if (thread_capture_mode == CaptureMode::kRelaxed) return Status::kSuccess;
  Status status = Status::kSuccess;
  const std::lock_guard lock(mutex_);
  for (const auto& [handle, stream] : streams_) {
    if (stream->capture == Capture::kNone) continue;
    const bool own = stream->capturer == std::this_thread::get_id();
    const bool forbidden =
        own ? stream->capture_mode != CaptureMode::kRelaxed
            : stream->capture_mode == CaptureMode::kGlobal && thread_capture_mode == CaptureMode::kGlobal;
    if (!forbidden) continue;
    stream->capture = Capture::kInvalidated;
    status = Status::kCaptureUnsupported;
  }
  return status;
}

Capture Runtime::capture_of(const Stream& stream) const {
  const std::lock_guard lock(mutex_);
  return stream.capture;
}

// --- Work ------------------------------------------------------------------------------------------------------------

Status Runtime::enqueue(Stream& stream, std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    if (stream.capture != Capture::kNone) {
      stream.capture = Capture::kInvalidated;
      return Status::kCaptureUnsupported;
    }
  }
  stream.enqueue(std::move(work));
  return Status::kSuccess;
}

Status Runtime::copy(Stream& stream, void* output, const void* input, std::size_t bytes) {
  return copy_rows(stream, output, bytes, input, bytes, bytes, 1);
}

Status Runtime::copy_rows(Stream& stream, void* output, std::size_t output_stride, const void* input,
                          std::size_t input_stride, std::size_t bytes, std::size_t rows) {
  if (bytes == 0 || rows == 0) return Status::kSuccess;
  if (output == nullptr || input == nullptr) return Status::kInvalidValue;
  if (rows > 1 && (output_stride < bytes || input_stride < bytes)) return Status::kInvalidValue;
  return enqueue(stream, [=, this] {
    for (std::size_t row = 0; row < rows; ++row) {
      std::memmove(view(output) + row * output_stride, view(input) + row * input_stride, bytes);
    }
  });
}

Status Runtime::fill(Stream& stream, void* output, unsigned char value, std::size_t bytes) {
  if (bytes == 0) return Status::kSuccess;
  if (output == nullptr) return Status::kInvalidValue;
  return enqueue(stream, [=, this] { std::memset(view(output), value, bytes); });
}

// The words are the host's flags, so they are read and written as such: atomically, with the order that a flag needs.
Status Runtime::wait_value(Stream& stream, const void* address, std::uint32_t value, Compare compare,
                           std::uint32_t mask) {
  if (!can_wait_value_) return Status::kNotSupported;
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof(value) != 0 || !device_reaches(address))
    return Status::kInvalidValue;
  return enqueue(stream, [=, this] {
    const std::atomic_ref<std::uint32_t> word(*reinterpret_cast<std::uint32_t*>(view(address)));
    for (int turn = 0; !holds(word.load(std::memory_order_acquire) & mask, value, compare); ++turn) {
      if (turn < 100) {
        std::this_thread::yield();
      } else {
        usleep(50);
      }
    }
  });
}

Status Runtime::write_value(Stream& stream, void* address, std::uint32_t value) {
  if (!can_wait_value_) return Status::kNotSupported;
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof(value) != 0 || !device_reaches(address))
    return Status::kInvalidValue;
  return enqueue(stream, [=, this] {
    const std::atomic_ref<std::uint32_t> word(*reinterpret_cast<std::uint32_t*>(view(address)));
    word.store(value, std::memory_order_release);
  });
}

// --- Events ----------------------------------------------------------------------------------------------------------

Status Runtime::create_event(int device, bool timed, void** event) {
  if (event == nullptr) return Status::kInvalidValue;
  auto made = std::make_shared<Event>(Event{device, timed, nullptr});
  *event = made.get();
  const std::lock_guard lock(mutex_);
  events_[made.get()] = std::move(made);
  return Status::kSuccess;
}

Status Runtime::destroy_event(void* event) {
  const std::lock_guard lock(mutex_);
  return events_.erase(event) == 1 ? Status::kSuccess : Status::kInvalidHandle;
}

std::shared_ptr<Event> Runtime::event(const void* handle) const {
  const std::lock_guard lock(mutex_);
  const auto entry = events_.find(handle);
  return entry == events_.end() ? nullptr : entry->second;
}

Status Runtime::mark_of(const void* handle, std::shared_ptr<Mark>* mark) const {
  const auto found = event(handle);
  if (found == nullptr) return Status::kInvalidHandle;
  const std::lock_guard lock(mutex_);
  *mark = found->mark;
  return Status::kSuccess;
}

Status Runtime::record(void* handle, Stream& stream) {
  const auto found = event(handle);
  if (found == nullptr || found->device != stream.device) return Status::kInvalidHandle;
  auto mark = std::make_shared<Mark>();
  const Status status = enqueue(stream, [mark] { mark->reach(); });
  if (status != Status::kSuccess) return status;
  const std::lock_guard lock(mutex_);
  found->mark = mark;  // who waits for an earlier record keeps waiting for that one
  return Status::kSuccess;
}

Status Runtime::wait_event(Stream& stream, void* handle) {
  std::shared_ptr<Mark> mark;
  const Status status = mark_of(handle, &mark);
  if (status != Status::kSuccess || mark == nullptr) return status;
  return enqueue(stream, [mark] { mark->wait(); });
}

Status Runtime::query_event(void* handle) {
  std::shared_ptr<Mark> mark;
  Status status = might_disturb_captures();
  if (status == Status::kSuccess) status = mark_of(handle, &mark);
  if (status != Status::kSuccess || mark == nullptr) return status;
  return mark->reached() ? Status::kSuccess : Status::kNotReady;
}

Status Runtime::synchronize_event(void* handle) {
  std::shared_ptr<Mark> mark;
  Status status = might_disturb_captures();
  if (status == Status::kSuccess) status = mark_of(handle, &mark);
  if (status == Status::kSuccess && mark != nullptr) mark->wait();
  return status;
}

Status Runtime::elapsed(void* start, void* end, float* milliseconds) {
  const auto first = event(start);
  const auto last = event(end);
  if (milliseconds == nullptr) return Status::kInvalidValue;
  if (first == nullptr || last == nullptr || !first->timed || !last->timed) return Status::kInvalidHandle;
  std::shared_ptr<Mark> from;
  std::shared_ptr<Mark> to;
  if (mark_of(start, &from) != Status::kSuccess || mark_of(end, &to) != Status::kSuccess) return Status::kInvalidHandle;
  if (from == nullptr || to == nullptr) return Status::kInvalidHandle;
  if (!from->reached() || !to->reached()) return Status::kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(to->time() - from->time()).count();
  return Status::kSuccess;
}

}  // namespace stand_in
