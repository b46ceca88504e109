// What a communicator does for tensors on a device: the user's streams, the library's own order on them, and messages by way of pinned
// memory.
#include <algorithm>
#include <cstring>
#include <utility>

#include "communicator.h"

namespace polyccl {

// ---- streams of users -----------------------------------------------------------------------------------------------

// What waits, in a lane, until the user's stream has come to this call. Empty where there is no stream.
std::function<void()> Communicator::users_stream_reached(const Call& call) {
  if (!config_.device || !call.stream.known()) return {};
  std::shared_ptr<void> mark(config_.device->event());
  config_.device->record(mark.get(), call.stream.handle);
  return [this, mark, deadline = call.deadline] {
    config_.device->await(mark.get(), deadline, [this] { return failure().has_value(); });
  };
}

// What keeps a call's memory alive. On a device it is the device's thread that lets go of it.
std::shared_ptr<void> Communicator::kept(const Keep& keep) const {
  auto held = keep();
  if (!config_.device || !held) return held;
  void* const address = held.get();
  return {address,
          [device = config_.device, held = std::move(held)](void*) mutable { device->let_go(std::move(held)); }};
}

// For the user a call on his stream is over when it returns, or when he has joined it, and what comes next relies on
// it. So a communicator that is destroyed lets such operations come to their end, unless it has failed.
void Communicator::count_follower(const Followers& followers, Work& work) {
  ++*followers;
  work.on_done([followers] { --*followers; });
}

void Communicator::let_followers_end() {
  constexpr int64_t kPatience = 20'000'000'000;
  if (*followers_ == 0) return;
  const auto quiet = [this] { return *followers_ == 0 || failure().has_value(); };
  for (const Deadline deadline = now_ns() + kPatience; !quiet() && !expired(deadline);) {
    constexpr int64_t kLook = 10'000'000;  // nobody wakes the link for a follower
    Link::instance().wait(quiet, std::min(deadline, now_ns() + kLook));
  }
}

// Let the user's stream, and not the host, wait for an operation of the lanes: now for a synchronous one, at wait() for
// another. False where streams cannot wait for the host.
bool Communicator::follow_on_stream(const std::shared_ptr<Work>& work, const UserStream& stream, bool async) {
  if (!config_.device || !stream.known() || !config_.device->has_flags()) return false;
  const Flag flag = take_flag();
  work->on_done([this, flag] {
    __atomic_store_n(flag.word, flag.value, __ATOMIC_RELEASE);  // after an error too: no stream hangs
    std::scoped_lock lock(flags_mutex_);
    free_flags_.push_back(flag);
  });
  if (async) {
    work->set_join([device = config_.device, followers = followers_, work = work.get(), flag, stream] {
      void* const current = joining_stream(*device, stream);
      count_follower(followers, *work);
      device->await_flag(current, flag.word, flag.value);
    });
  } else {
    count_follower(followers_, *work);
    config_.device->await_flag(stream.handle, flag.word, flag.value);
  }
  return true;
}

Communicator::Flag Communicator::take_flag() {
  constexpr size_t kFlags = 64, kStride = 64;  // a cache line each
  std::scoped_lock lock(flags_mutex_);
  if (free_flags_.empty()) {
    const std::shared_ptr<void> memory(config_.device->pinned(kFlags * kStride));
    char* const words = static_cast<char*>(memory.get());
    std::memset(words, 0, kFlags * kStride);
    for (size_t i = 0; i < kFlags; ++i) {
      free_flags_.push_back({reinterpret_cast<uint32_t*>(words + i * kStride), 0, memory});
    }
  }
  Flag flag = free_flags_.back();
  free_flags_.pop_back();
  ++flag.value;  // streams wait for at least this value, so a word may be used again
  return flag;
}

// The stream that is current now, and is to wait for an operation.
void* Communicator::joining_stream(const Device& device, const UserStream& from) {
  void* handle = nullptr;
  if (from.current(from.device_type, from.device_index, &handle) != 0) {
    throw Error(Code::kInternal, "wait(): the tensor's framework does not say which stream is current");
  }
  if (device.capturing(handle)) {
    throw Error(Code::kUnsupportedOperation,
                "wait(): the current stream is being captured into a graph, which cannot wait for an operation from "
                "outside of it; wait before the capture begins, or call wait_blocking()");
  }
  return handle;
}

// The library's own order on streams: enqueue from the caller's thread, a synchronous operation on his stream, another
// on the library's.
std::shared_ptr<Work> Communicator::issue_on_stream(const Call& call, std::vector<polyccl_op> ops, bool async,
                                                    const Keep& keep) {
  const std::string operation(call.row->name);
  void* stream = async ? library_stream_.get() : call.stream.handle;
  const Device& device = *config_.device;
  std::shared_ptr<void> mark(device.event());
  if (async) {
    device.record(mark.get(), call.stream.handle);
    device.wait(stream, mark.get());
  }
  std::vector<const polyccl_op*> pointers;
  for (polyccl_op& op : ops) {
    op.stream = stream;
    pointers.push_back(&op);
  }
  std::shared_ptr<void> done(device.event());
  try {
    std::scoped_lock lock(library_mutex_);
    config_.native->run(pointers, operation);
    device.record(done.get(), stream);
  } catch (const Error& error) {
    throw located(fail(cause(error)), operation);
  }
  auto watch = std::make_shared<Execution>();
  watch->call.row = call.row;
  watch->call.deadline = call.deadline;
  watch->work = std::make_shared<Work>(operation, call.deadline);
  watch->work->keep_alive(kept(keep), shared_from_this());
  if (async) {
    watch->work->set_join(
        [keep = config_.device, done, from = call.stream] { keep->wait(joining_stream(*keep, from), done.get()); });
  } else {
    watch->work->set_join([] {});  // the user's stream is in order already
  }
  watch->prepare = [this, done, deadline = call.deadline, operation] {
    try {
      config_.device->await(done.get(), deadline, [this, &operation] {
        config_.native->check_async(operation);
        return failure().has_value();
      });
    } catch (const Error& error) {
      const Error failed = fail(cause(error));
      try {
        config_.device->await(done.get(), now_ns() + kSettleNs, {});
      } catch (const Error&) {  // a device that hangs
      }
      throw failed;
    }
  };
  auto work = watch->work;
  count_follower(followers_, *work);
  executor_->enqueue(std::move(watch));
  return work;
}

// A batch by the device's library.
std::shared_ptr<Work> Communicator::issue_library_messages(const std::vector<Call>& calls, bool async, const Keep& keep,
                                                           const Interrupted& interrupted) {
  std::vector<polyccl_op> ops;
  for (const Call& call : calls) ops.push_back(library_op(call));
  if (calls[0].stream.known() && library_calls_ == 0) return issue_on_stream(calls[0], std::move(ops), async, keep);
  auto e = std::make_shared<Execution>();
  e->call = calls[0];
  auto held = std::make_shared<std::vector<Call>>(calls);
  const auto before = [ready = users_stream_reached(calls[0])] {
    if (ready) ready();
  };
  run_whole(*e, before, [this, ops = std::move(ops), held] { run_library(ops, "messages", {}); });
  return start(e, async, false, keep, interrupted);
}

// Messages of device memory over the link: by way of pinned memory, which lives as long as the call. A stream of their
// own copies, in the order of the user's. Gives the event after which the messages may go; before it none is received
// either, since to bring it home would hold up a lane, for which the user's stream may wait.
std::shared_ptr<void> Communicator::stage_messages(std::vector<Call>& calls) {
  const std::shared_ptr<Device> device = config_.device;
  const std::shared_ptr<void> stream(device->stream());
  auto event = std::make_shared<std::pair<std::shared_ptr<void>, Device::Handle>>(stream, device->event());
  const std::shared_ptr<void> reached(event, event->second.get());  // keeps the stream too
  if (const UserStream& users = calls[0].stream; users.known()) {
    device->record(reached.get(), users.handle);
    device->wait(stream.get(), reached.get());
  }
  for (Call& call : calls) {
    const bool sends = call.kind() == POLYCCL_KIND_SEND;
    const size_t bytes = call.count * call.element();
    if (bytes == 0) continue;
    Side& side = sends ? call.input : call.output;
    call.staging = std::shared_ptr<void>(device->pinned(bytes));
    char* user = std::exchange(side.blocks[0], static_cast<char*>(call.staging.get()));
    if (sends) {
      device->copy(stream.get(), call.staging.get(), user, bytes);
    } else {
      call.unstage = [this, device, stream, user, staging = call.staging, bytes, deadline = call.deadline] {
        device->copy(stream.get(), user, staging.get(), bytes);
        device->finish(stream.get(), deadline, [this] { return failure().has_value(); });
      };
    }
  }
  device->record(reached.get(), stream.get());
  return reached;
}

// For a synchronous call, on the caller's thread.
void Communicator::await_staged(void* reached, Deadline deadline, const Interrupted& interrupted) {
  constexpr int kLooks = 64;  // whether the user interrupts is asked at every so many
  bool stop = false;
  const auto ended = [&, looks = 0]() mutable {
    stop = ++looks % kLooks == 0 && interrupted && interrupted();
    return stop || failure().has_value();
  };
  try {
    config_.device->await(reached, deadline, ended);
  } catch (const Error&) {
    if (stop) throw InterruptedWait();
    throw;
  }
}

}  // namespace polyccl
