#include "device.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "closing.h"

namespace polyccl {
namespace {

std::atomic<int> held{0};      // what was given to be let go of, and is still there
std::atomic<pid_t> holder{0};  // the process whose threads have it: a forked child has none of them

}  // namespace

// What is to be let go of, and the thread that does it, which goes on alone where its owner ends before it is done.
class Device::Bin {
 public:
  Bin() {
    std::thread([state = state_] {
      mark_worker_thread();
      state->serve();
    }).detach();
  }
  ~Bin() {
    if (getpid() != process_) return;  // a forked child has no such thread, and may find the lock taken
    const std::scoped_lock lock(state_->mutex);
    state_->closing = true;
    state_->changed.notify_all();
  }
  Bin(const Bin&) = delete;
  Bin& operator=(const Bin&) = delete;

  void add(std::shared_ptr<void> what) {
    const std::scoped_lock lock(state_->mutex);
    ++held;
    holder = getpid();
    state_->full.push_back(std::move(what));
    state_->changed.notify_all();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::shared_ptr<void>> full;
    bool closing = false;

    void serve() {
      std::unique_lock lock(mutex);
      while (true) {
        changed.wait(lock, [this] { return closing || !full.empty(); });
        if (full.empty()) return;
        auto gone = std::exchange(full, {});
        const auto number = static_cast<int>(gone.size());
        lock.unlock();
        gone.clear();
        held -= number;
        lock.lock();
      }
    }
  };

  const pid_t process_ = getpid();
  const std::shared_ptr<State> state_ = std::make_shared<State>();  // the thread's as much as ours
};

// Makes the device this thread's, for a scope, where `stream` is a default one: such a handle (CUDA and HIP have three)
// does not say whose, and the user's thread may have another device, or none.
class Device::Entered {
 public:
  Entered(const Device& device, const void* stream) : table_(device.table()) {
    constexpr uintptr_t kLastDefault = 2;
    if (reinterpret_cast<uintptr_t>(stream) > kLastDefault || !table_.enter || !table_.leave) return;
    device.check(table_.enter(device.index_, &before_), "entering the device");
    inside_ = true;
  }
  ~Entered() {
    if (inside_) (void)table_.leave(before_);
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  const polyccl_device& table_;
  int64_t before_ = 0;
  bool inside_ = false;
};

bool Device::all_gone(Deadline deadline) {
  while (held != 0 && holder == getpid()) {
    if (expired(deadline)) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

Device::Device(const Backend& backend, int index, bool high_priority)
    : backend_(backend), index_(index), high_priority_(high_priority), bin_(std::make_shared<Bin>()) {
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

Device::Handle Device::stream() const {
  void* stream = nullptr;
  check(table().stream_create(index_, high_priority_ ? 1 : 0, &stream), "creating a stream");
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
  return {memory, [bin = bin_, t = &table()](void* p) {
            bin->add(std::shared_ptr<void>(p, [t](void* freed) { (void)t->host_free(freed); }));
          }};
}

Device::Handle Device::memory(size_t bytes) const {
  void* memory = nullptr;
  check(table().alloc(index_, &memory, bytes), "allocating memory");
  return {memory, [bin = bin_, t = &table()](void* p) {
            bin->add(std::shared_ptr<void>(p, [t](void* freed) { (void)t->free(freed); }));
          }};
}

void Device::let_go(std::shared_ptr<void> what) const { bin_->add(std::move(what)); }

void Device::copy(void* stream, void* output, const void* input, size_t bytes) const {
  const Entered entered(*this, stream);
  if (bytes != 0) check(table().copy(stream, output, bytes, input, bytes, bytes, 1), "copying");
}

void Device::record(void* event, void* stream) const {
  const Entered entered(*this, stream);
  check(table().event_record(event, stream), "recording an event");
}

void Device::wait(void* stream, void* event) const {
  const Entered entered(*this, stream);
  check(table().stream_wait_event(stream, event), "making a stream wait");
}

bool Device::reached(void* event) const {
  const polyccl_result result = table().event_query(event);
  if (result == POLYCCL_IN_PROGRESS) return false;
  check(result, "looking at an event");
  return true;
}

bool Device::capturing(void* stream) const {
  int32_t answer = 0;
  if (table().stream_is_capturing == nullptr) return false;
  const Entered entered(*this, stream);
  check(table().stream_is_capturing(stream, &answer), "asking whether a stream is being captured");
  return answer != 0;
}

bool Device::has_flags() const {
  std::call_once(flags_tried_, [this] { has_flags_ = try_flags(); });
  return has_flags_;
}

bool Device::try_flags() const {
  if (table().wait_flag == nullptr) return false;
  const Handle memory = pinned(sizeof(uint32_t)), mark = event(), on = stream();
  auto* const flag = static_cast<uint32_t*>(memory.get());
  *flag = 1;  // what is waited for is there already
  const polyccl_result result = table().wait_flag(on.get(), flag, 1);
  if (result == POLYCCL_ERROR_UNSUPPORTED) return false;
  check(result, "making a stream wait for the host");
  record(mark.get(), on.get());
  await(mark.get(), now_ns() + kSettleNs, {});
  return true;
}

void Device::await_flag(void* stream, const volatile uint32_t* flag, uint32_t value) const {
  const Entered entered(*this, stream);
  check(table().wait_flag(stream, flag, value), "making a stream wait for the host");
}

void Device::await(void* event, Deadline deadline, const std::function<bool()>& ended) const {
  constexpr int64_t kSpin = 20'000, kNap = 50'000;  // nanoseconds
  const int64_t begin = now_ns();
  const auto go_on = [&ended] {
    if (ended && ended()) throw Error(Code::kAborted, "the communicator ended while its device was at work");
  };
  while (!reached(event)) {
    go_on();
    if (expired(deadline)) throw Error(Code::kTimeout, "timed out while the device was at work");
    if (now_ns() - begin < kSpin) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::nanoseconds(kNap));
    }
  }
  go_on();  // a library that is aborted leaves its work undone, and lets the stream go on as if it were done
}

void Device::synchronize(void* stream, Deadline deadline, const std::function<bool()>& ended) const {
  const Handle mark = event();
  record(mark.get(), stream);
  await(mark.get(), deadline, ended);
}

void Device::finish(void* stream, Deadline deadline, const std::function<bool()>& ended) const {
  const Handle mark = event();
  record(mark.get(), stream);
  try {
    await(mark.get(), deadline, ended);
  } catch (const Error&) {
    await(mark.get(), now_ns() + kSettleNs, {});
    throw;
  }
}

}  // namespace polyccl
