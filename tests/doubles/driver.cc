// Plays a program that knows only the vendors' APIs: it opens a runtime and a collective library by path, and runs one
// scenario on processes that it forks before the first stream exists. Exits with 0 where all that a scenario says
// holds.
//   driver <scenario> <libcuda> <libnccl> <libamdhip64> <librccl>
// Each scenario runs with both vendors, one after the other; `both` uses them at once.
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Handle = void*;

struct UniqueId {
  char bytes[128];
};

constexpr int kFloat = 7;
constexpr int kSum = 0;
constexpr int kInvalidUsage = 5;
constexpr int kRemoteError = 6;
constexpr int kInProgress = 7;
constexpr int kNotReady = 600;
constexpr int kNotPermitted[] = {800, 801};

[[noreturn]] void give_up(const char* expression, int line) {
  std::fprintf(stderr, "driver.cc:%d: does not hold: %s\n", line, expression);
  std::fflush(nullptr);
  _exit(1);
}
#define CHECK(expression) ((expression) ? static_cast<void>(0) : give_up(#expression, __LINE__))

template <typename F>
F* symbol(Handle library, const std::string& name) {
  void* found = dlsym(library, name.c_str());
  if (found == nullptr) give_up(name.c_str(), __LINE__);
  return reinterpret_cast<F*>(found);
}

// One vendor's calls. Those of the two runtimes that have the same shape share an entry.
struct Vendor {
  bool hip;
  Handle runtime;
  Handle ccl;

  Vendor(bool hip_, const char* runtime_path, const char* ccl_path)
      : hip(hip_), runtime(dlopen(runtime_path, RTLD_NOW | RTLD_LOCAL)), ccl(dlopen(ccl_path, RTLD_NOW | RTLD_LOCAL)) {
    if (runtime == nullptr || ccl == nullptr) give_up(dlerror(), __LINE__);
  }

  template <typename... A>
  int rt(const char* cuda, const char* amd, A... arguments) const {
    return symbol<int(A...)>(runtime, hip ? amd : cuda)(arguments...);
  }
  template <typename... A>
  int nccl(const char* name, A... arguments) const {
    return symbol<int(A...)>(ccl, name)(arguments...);
  }

  void use_device(int device) const {
    if (hip) return CHECK(rt("", "hipSetDevice", device) == 0);
    Handle context = nullptr;
    CHECK(rt("cuInit", "", 0u) == 0);
    CHECK(rt("cuDevicePrimaryCtxRetain", "", &context, device) == 0);
    CHECK(rt("cuCtxSetCurrent", "", context) == 0);
  }
  Handle stream() const {
    Handle made = nullptr;
    CHECK(rt("cuStreamCreate", "hipStreamCreateWithFlags", &made, 1u) == 0);
    return made;
  }
  Handle event() const {
    Handle made = nullptr;
    CHECK(rt("cuEventCreate", "hipEventCreateWithFlags", &made, 2u) == 0);
    return made;
  }
  float* device_memory(std::size_t count) const {
    Handle made = nullptr;
    CHECK(rt("cuMemAlloc_v2", "hipMalloc", &made, count * sizeof(float)) == 0);
    return static_cast<float*>(made);
  }
  template <typename T>
  T* host_memory(std::size_t count) const {
    Handle made = nullptr;
    CHECK(rt("cuMemHostAlloc", "hipHostMalloc", &made, count * sizeof(T), 0u) == 0);
    return static_cast<T*>(made);
  }
  int record(Handle event, Handle stream) const { return rt("cuEventRecord", "hipEventRecord", event, stream); }
  int query(Handle event) const { return rt("cuEventQuery", "hipEventQuery", event); }
  int wait_event(Handle stream, Handle event) const {
    return rt("cuStreamWaitEvent", "hipStreamWaitEvent", stream, event, 0u);
  }
  int synchronize(Handle stream) const { return rt("cuStreamSynchronize", "hipStreamSynchronize", stream); }
  int host_function(Handle stream, void (*function)(void*), void* data) const {
    return rt("cuLaunchHostFunc", "hipLaunchHostFunc", stream, function, data);
  }
  int upload(void* device, void* host, std::size_t bytes, Handle stream) const {
    return rt("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync", device, host, bytes, stream);
  }
  int download(void* host, void* device, std::size_t bytes, Handle stream) const {
    return rt("cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync", host, device, bytes, stream);
  }
  int wait_value(Handle stream, void* address, std::uint32_t value) const {
    if (!hip) return rt("cuStreamWaitValue32_v2", "", stream, address, value, 0u);
    return rt("", "hipStreamWaitValue32", stream, address, value, 0u, ~0u);
  }
  int write_value(Handle stream, void* address, std::uint32_t value) const {
    return rt("cuStreamWriteValue32_v2", "hipStreamWriteValue32", stream, address, value, 0u);
  }

  int all_reduce(const float* input, float* output, std::size_t count, Handle comm, Handle stream) const {
    return nccl("ncclAllReduce", static_cast<const void*>(input), static_cast<void*>(output), count, kFloat, kSum, comm,
                stream);
  }
  int send(const float* input, std::size_t count, int peer, Handle comm, Handle stream) const {
    return nccl("ncclSend", static_cast<const void*>(input), count, kFloat, peer, comm, stream);
  }
  int receive(float* output, std::size_t count, int peer, Handle comm, Handle stream) const {
    return nccl("ncclRecv", static_cast<void*>(output), count, kFloat, peer, comm, stream);
  }
  int async_error(Handle comm) const {
    int error = 0;
    CHECK(nccl("ncclCommGetAsyncError", comm, &error) == 0);
    return error;
  }
  std::string last_error() const { return symbol<const char*(Handle)>(ccl, "ncclGetLastError")(nullptr); }
};

// Wait for a condition; false at the deadline.
bool within(milliseconds limit, const std::function<bool()>& condition) {
  const auto end = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

// What the ranks of a scenario share: the unique id, and flags by which one waits for another.
struct Shared {
  std::atomic<bool> has_id;
  std::atomic<int> reached;
  UniqueId id;
};

struct Rank {
  const Vendor& vendor;
  Shared& shared;
  int rank;
  int ranks;
  Handle stream;
  Handle comm = nullptr;

  void fetch_id(UniqueId* id) const {
    if (rank == 0) {
      CHECK(vendor.nccl("ncclGetUniqueId", &shared.id) == 0);
      shared.has_id = true;
    }
    CHECK(within(seconds(20), [&] { return shared.has_id.load(); }));
    *id = shared.id;
  }
  void join() {
    UniqueId id{};
    fetch_id(&id);
    CHECK(vendor.nccl("ncclCommInitRank", &comm, ranks, id, rank) == 0);
  }
  // All ranks have come here.
  void meet(int times) const {
    ++shared.reached;
    CHECK(within(seconds(20), [&] { return shared.reached >= ranks * times; }));
  }
  // Device memory that holds one value throughout.
  float* filled(std::size_t count, float value) const {
    auto* host = vendor.host_memory<float>(count);
    for (std::size_t i = 0; i < count; ++i) host[i] = value;
    float* device = vendor.device_memory(count);
    CHECK(vendor.upload(device, host, count * sizeof(float), stream) == 0);
    CHECK(vendor.synchronize(stream) == 0);
    return device;
  }
  bool holds(float* device, std::size_t count, float value) const {
    auto* host = vendor.host_memory<float>(count);
    CHECK(vendor.download(host, device, count * sizeof(float), stream) == 0);
    CHECK(vendor.synchronize(stream) == 0);
    for (std::size_t i = 0; i < count; ++i) {
      if (host[i] != value) return false;
    }
    return true;
  }
};

// A kernel that runs until it is let go.
struct Gate {
  std::atomic<bool> open = false;
  static void wait(void* gate) {
    while (!static_cast<Gate*>(gate)->open) std::this_thread::sleep_for(milliseconds(1));
  }
};

// --- Scenarios: each is what every rank does -------------------------------------------------------------------------

void all_reduce_behind_a_slow_kernel_returns_at_once(Rank& r) {
  r.join();
  const Vendor& v = r.vendor;
  float* data = r.filled(1000, static_cast<float>(r.rank + 1));
  Gate gate;
  Handle done = v.event();
  CHECK(v.query(done) == 0);  // never recorded: nothing to wait for
  CHECK(v.host_function(r.stream, Gate::wait, &gate) == 0);
  CHECK(v.all_reduce(data, data, 1000, r.comm, r.stream) == 0);  // would block for ever where it waited for the gate
  CHECK(v.record(done, r.stream) == 0);
  CHECK(v.query(done) == kNotReady);
  gate.open = true;
  CHECK(v.synchronize(r.stream) == 0);
  CHECK(v.query(done) == 0);
  CHECK(r.holds(data, 1000, 3));
  CHECK(v.nccl("ncclCommDestroy", r.comm) == 0);
}

void another_stream_waits_by_event(Rank& r) {
  r.join();
  const Vendor& v = r.vendor;
  float* data = r.filled(5000, static_cast<float>(r.rank + 1));
  float* copy = v.device_memory(5000);
  Handle other = v.stream();
  Handle done = v.event();
  CHECK(v.all_reduce(data, data, 5000, r.comm, r.stream) == 0);
  CHECK(v.record(done, r.stream) == 0);
  CHECK(v.wait_event(other, done) == 0);
  CHECK(v.rt("cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync", copy, data, 5000 * sizeof(float), other) == 0);
  CHECK(v.synchronize(other) == 0);
  CHECK(r.holds(copy, 5000, 3));
  // Two streams of one communicator keep the order of the calls.
  CHECK(v.all_reduce(data, data, 5000, r.comm, r.stream) == 0);
  CHECK(v.all_reduce(copy, copy, 5000, r.comm, other) == 0);
  CHECK(v.synchronize(other) == 0);
  CHECK(r.holds(copy, 5000, 6));
}

void a_group_exchanges_more_than_any_buffer_holds(Rank& r) {
  r.join();
  const Vendor& v = r.vendor;
  const std::size_t count = 300'000;  // 1.2 MB
  const int peer = 1 - r.rank;
  float* out = r.filled(count, static_cast<float>(r.rank + 10));
  float* small = r.filled(7, static_cast<float>(r.rank + 20));
  float* in = v.device_memory(count);
  float* in_small = v.device_memory(7);
  float* own = v.device_memory(count);
  float* sum = r.filled(count, 1);
  Handle other = v.stream();
  CHECK(v.nccl("ncclGroupStart") == 0);
  CHECK(v.nccl("ncclGroupStart") == 0);
  CHECK(v.send(out, count, peer, r.comm, r.stream) == 0);
  CHECK(v.send(small, 7, peer, r.comm, other) == 0);
  CHECK(v.nccl("ncclGroupEnd") == 0);
  CHECK(v.send(out, count, r.rank, r.comm, r.stream) == 0);
  // The ranks name their collective and their messages in different orders.
  if (r.rank == 0) CHECK(v.all_reduce(sum, sum, count, r.comm, r.stream) == 0);
  CHECK(v.receive(own, count, r.rank, r.comm, r.stream) == 0);
  CHECK(v.receive(in, count, peer, r.comm, r.stream) == 0);
  CHECK(v.receive(in_small, 7, peer, r.comm, other) == 0);
  if (r.rank == 1) CHECK(v.all_reduce(sum, sum, count, r.comm, r.stream) == 0);
  CHECK(v.nccl("ncclGroupEnd") == 0);
  CHECK(v.synchronize(other) == 0);
  CHECK(r.holds(in_small, 7, static_cast<float>(peer + 20)));
  CHECK(r.holds(in, count, static_cast<float>(peer + 10)));
  CHECK(r.holds(own, count, static_cast<float>(r.rank + 10)));
  CHECK(r.holds(sum, count, 2));
  CHECK(v.nccl("ncclGroupEnd") == kInvalidUsage);
}

void sends_outside_a_group_deadlock_until_the_abort(Rank& r) {
  r.join();
  const Vendor& v = r.vendor;
  float* data = r.filled(4, 1);
  Handle done = v.event();
  CHECK(v.send(data, 4, 1 - r.rank, r.comm, r.stream) == 0);
  CHECK(v.receive(data, 4, 1 - r.rank, r.comm, r.stream) == 0);
  CHECK(v.record(done, r.stream) == 0);
  CHECK(!within(milliseconds(150), [&] { return v.query(done) == 0; }));
  r.meet(1);
  const auto start = Clock::now();
  CHECK(v.nccl("ncclCommAbort", r.comm) == 0);
  CHECK(Clock::now() - start < seconds(2));
  CHECK(v.synchronize(r.stream) == 0);  // the stream is free again
  CHECK(v.all_reduce(data, data, 4, r.comm, r.stream) == 4);
}

void eager_sends_hide_the_deadlock(Rank& r) {
  r.join();
  const Vendor& v = r.vendor;
  float* data = r.filled(4, static_cast<float>(r.rank));
  float* in = v.device_memory(4);
  CHECK(v.send(data, 4, 1 - r.rank, r.comm, r.stream) == 0);
  CHECK(v.receive(in, 4, 1 - r.rank, r.comm, r.stream) == 0);
  CHECK(r.holds(in, 4, static_cast<float>(1 - r.rank)));
}

void unequal_sizes_are_an_asynchronous_error_with_a_text(Rank& r) {
  r.join();
  const Vendor& v = r.vendor;
  float* data = r.filled(8, 1);
  CHECK(v.all_reduce(data, data, r.rank == 0 ? 8 : 4, r.comm, r.stream) == 0);
  CHECK(within(seconds(5), [&] { return v.async_error(r.comm) == kInvalidUsage; }));
  const std::string text = v.last_error();
  CHECK(text.find("mismatch") != std::string::npos && text.find("count 4") != std::string::npos);
  CHECK(v.all_reduce(data, data, 8, r.comm, r.stream) == kInvalidUsage);
  Handle done = v.event();
  CHECK(v.record(done, r.stream) == 0);
  CHECK(v.query(done) == kNotReady);  // a failed kernel does not end by itself
  CHECK(v.nccl("ncclCommAbort", r.comm) == 0);
  CHECK(v.synchronize(r.stream) == 0);
}

void the_end_of_a_peer_is_noticed_at_once(Rank& r) {
  r.join();
  const Vendor& v = r.vendor;
  float* data = r.filled(100'000, 1);
  if (r.rank == 1) {
    r.meet(1);
    raise(SIGKILL);
  }
  CHECK(v.receive(data, 100'000, 1, r.comm, r.stream) == 0);
  r.meet(1);
  const auto start = Clock::now();
  CHECK(within(seconds(5), [&] { return v.async_error(r.comm) == kRemoteError; }));
  CHECK(Clock::now() - start < seconds(1));
  CHECK(v.last_error().find("rank 1 has ended") != std::string::npos);
  CHECK(v.nccl("ncclCommAbort", r.comm) == 0);
}

void a_peer_that_ends_before_it_joins_is_noticed(Rank& r) {
  UniqueId id{};
  r.fetch_id(&id);
  if (r.rank == 0) {
    CHECK(within(seconds(10), [&] { return r.shared.reached > 0; }));
    raise(SIGKILL);
  }
  ++r.shared.reached;
  CHECK(r.vendor.nccl("ncclCommInitRank", &r.comm, r.ranks, id, r.rank) == kRemoteError);
  CHECK(r.comm == nullptr);
}

void an_abort_is_told_to_the_peers(Rank& r) {
  r.join();
  const Vendor& v = r.vendor;
  float* data = r.filled(100, 1);
  if (r.rank == 0) {
    CHECK(v.receive(data, 100, 1, r.comm, r.stream) == 0);
    r.meet(1);
    CHECK(within(seconds(5), [&] { return v.async_error(r.comm) == kRemoteError; }));
    CHECK(v.last_error().find("aborted") != std::string::npos);
  } else {
    r.meet(1);
  }
  CHECK(v.nccl("ncclCommAbort", r.comm) == 0);
}

void streams_wait_for_and_write_flags(Rank& r) {
  const Vendor& v = r.vendor;
  auto* flags = v.host_memory<std::uint32_t>(2);
  std::atomic_ref<std::uint32_t> first(flags[0]);
  std::atomic_ref<std::uint32_t> second(flags[1]);
  first = 0;
  second = 0;
  float* data = r.filled(10, 1);
  auto* input = v.host_memory<float>(10);
  CHECK(v.wait_value(r.stream, &flags[0], 5) == 0);
  CHECK(v.upload(data, input, 10 * sizeof(float), r.stream) == 0);
  CHECK(v.write_value(r.stream, &flags[1], 7) == 0);
  for (int i = 0; i < 10; ++i) input[i] = 42;  // the copy comes after the flag, and must see this
  first = 4;
  CHECK(!within(milliseconds(50), [&] { return second == 7; }));
  first = 6;  // at least 5
  CHECK(within(seconds(5), [&] { return second == 7; }));
  CHECK(r.holds(data, 10, 42));
  std::uint32_t unknown = 0;
  CHECK(v.wait_value(r.stream, &unknown, 0) != 0);  // memory that no device reaches
}

struct Probe {
  const Vendor* vendor;
  Handle event;
  std::atomic<int> result = -1;
  static void ask(void* data) {
    auto* probe = static_cast<Probe*>(data);
    probe->result = probe->vendor->query(probe->event);
  }
};

void host_functions_must_not_call_the_runtime(Rank& r) {
  const Vendor& v = r.vendor;
  Probe probe{&v, v.event()};
  CHECK(v.host_function(r.stream, Probe::ask, &probe) == 0);
  CHECK(v.synchronize(r.stream) == 0);
  CHECK(probe.result == kNotPermitted[v.hip ? 1 : 0]);
}

void a_forked_child_has_no_runtime(Rank& r) {
  const pid_t child = fork();
  if (child == 0) _exit(r.vendor.synchronize(r.stream) == 3 ? 0 : 1);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void two_ranks_on_one_device_are_refused(Rank& r) {
  UniqueId id{};
  r.fetch_id(&id);
  r.vendor.use_device(0);
  CHECK(r.vendor.nccl("ncclCommInitRank", &r.comm, r.ranks, id, r.rank) == kInvalidUsage);
  CHECK(r.vendor.last_error().find("Duplicate GPU") != std::string::npos);
}

// The order of a communicator's calls holds over streams even where the later stream is free and the earlier is not.
void calls_on_two_streams_keep_their_order(Rank& r) {
  r.join();
  const Vendor& v = r.vendor;
  float* first = r.filled(10, 1);
  float* second = r.filled(10, 5);
  Handle other = v.stream();
  Handle done = v.event();
  Gate gate;
  CHECK(v.host_function(r.stream, Gate::wait, &gate) == 0);
  CHECK(v.all_reduce(first, first, 10, r.comm, r.stream) == 0);
  CHECK(v.all_reduce(second, second, 10, r.comm, other) == 0);
  CHECK(v.record(done, other) == 0);
  CHECK(!within(milliseconds(50), [&] { return v.query(done) == 0; }));
  gate.open = true;
  CHECK(r.holds(first, 10, 2));
  CHECK(v.synchronize(other) == 0);
  CHECK(r.holds(second, 10, 10));
}

struct ConfigPrefix {
  std::size_t size = 48;
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 0;
  int group_size = INT32_MIN, min_ctas = INT32_MIN, max_ctas = INT32_MIN;
  const char* net = nullptr;
  int split_share = INT32_MIN;
};

void non_blocking_calls_are_in_progress_until_they_are_polled(Rank& r) {
  const Vendor& v = r.vendor;
  UniqueId id{};
  r.fetch_id(&id);
  ConfigPrefix config{};
  CHECK(v.nccl("ncclCommInitRankConfig", &r.comm, r.ranks, id, r.rank, &config) == kInProgress);
  CHECK(r.comm != nullptr);
  CHECK(within(seconds(10), [&] { return v.async_error(r.comm) == 0; }));
  float* data = r.filled(50, 2);
  CHECK(v.all_reduce(data, data, 50, r.comm, r.stream) == kInProgress);
  CHECK(within(seconds(10), [&] { return v.async_error(r.comm) == 0; }));
  CHECK(r.holds(data, 50, 4));
  Handle half = nullptr;
  CHECK(v.nccl("ncclCommSplit", r.comm, r.rank, 0, &half, static_cast<void*>(nullptr)) == kInProgress);
  CHECK(within(seconds(10), [&] { return v.async_error(half) == 0; }));
  CHECK(v.nccl("ncclCommFinalize", r.comm) == kInProgress);
  CHECK(within(seconds(10), [&] { return v.async_error(r.comm) == 0; }));
  CHECK(v.nccl("ncclCommDestroy", half) == 0);
  CHECK(v.nccl("ncclCommDestroy", r.comm) == 0);
  config.magic = 1;
  CHECK(v.nccl("ncclCommInitRankConfig", &r.comm, r.ranks, id, r.rank, &config) == 4);
}

void an_abort_ends_an_initialization(Rank& r) {
  if (r.rank == 1) return;
  const Vendor& v = r.vendor;
  UniqueId id{};
  r.fetch_id(&id);
  ConfigPrefix config{};
  CHECK(v.nccl("ncclCommInitRankConfig", &r.comm, r.ranks, id, r.rank, &config) == kInProgress);
  CHECK(v.async_error(r.comm) == kInProgress);
  const auto start = Clock::now();
  CHECK(v.nccl("ncclCommAbort", r.comm) == 0);
  CHECK(Clock::now() - start < seconds(2));
}

void survivors_shrink_the_communicator(Rank& r) {
  r.join();
  const Vendor& v = r.vendor;
  float* data = r.filled(100, 1);
  CHECK(v.all_reduce(data, data, 100, r.comm, r.stream) == 0);
  CHECK(r.holds(data, 100, 3));
  r.meet(1);
  if (r.rank == 1) raise(SIGKILL);
  CHECK(v.all_reduce(data, data, 100, r.comm, r.stream) == 0);
  CHECK(within(seconds(5), [&] { return v.async_error(r.comm) != 0; }));
  Handle rest = nullptr;
  int excluded[] = {1};
  CHECK(v.nccl("ncclCommShrink", r.comm, static_cast<int*>(excluded), 1, &rest, static_cast<void*>(nullptr), 0) != 0);
  CHECK(v.nccl("ncclCommShrink", r.comm, static_cast<int*>(excluded), 1, &rest, static_cast<void*>(nullptr), 1) == 0);
  int count = 0;
  CHECK(v.nccl("ncclCommCount", rest, &count) == 0 && count == 2);
  CHECK(v.nccl("ncclCommAbort", r.comm) == 0);
  float* again = r.filled(100, 5);
  CHECK(v.all_reduce(again, again, 100, rest, r.stream) == 0);
  CHECK(r.holds(again, 100, 10));
  CHECK(v.nccl("ncclCommDestroy", rest) == 0);
}

void scalars_are_read_when_their_residence_says(Rank& r) {
  r.join();
  const Vendor& v = r.vendor;
  float now = 2;
  int op = 0;
  CHECK(v.nccl("ncclRedOpCreatePreMulSum", &op, static_cast<void*>(&now), kFloat, 1, r.comm) == 0);
  now = 100;  // the value was taken
  float* data = r.filled(6, 3);
  Gate gate;
  CHECK(v.host_function(r.stream, Gate::wait, &gate) == 0);
  CHECK(v.nccl("ncclAllReduce", static_cast<const void*>(data), static_cast<void*>(data), std::size_t{6}, kFloat, op,
               r.comm, r.stream) == 0);
  CHECK(v.nccl("ncclRedOpDestroy", op, r.comm) == 0);  // what is enqueued keeps it
  gate.open = true;
  CHECK(r.holds(data, 6, 12));
  float* factor = r.filled(1, 1);
  float* four = r.filled(1, 4);
  CHECK(v.nccl("ncclRedOpCreatePreMulSum", &op, static_cast<void*>(factor), kFloat, 0, r.comm) == 0);
  CHECK(v.rt("cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync", factor, four, sizeof(float), r.stream) == 0);
  CHECK(v.nccl("ncclAllReduce", static_cast<const void*>(data), static_cast<void*>(data), std::size_t{6}, kFloat, op,
               r.comm, r.stream) == 0);
  CHECK(r.holds(data, 6, 96));
  CHECK(v.nccl("ncclAllReduce", static_cast<const void*>(data), static_cast<void*>(data), std::size_t{6}, 8, op, r.comm,
               r.stream) == 4);
}

void the_host_faults_on_guarded_memory(Rank& r) {
  r.join();
  float* data = r.filled(3000, 1);
  CHECK(r.vendor.all_reduce(data, data, 3000, r.comm, r.stream) == 0);
  CHECK(r.holds(data, 3000, 2));
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL);
    const volatile float seen = data[1];
    _exit(seen == 2 ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(!WIFEXITED(status) || WEXITSTATUS(status) != 0);
}

void a_watchdog_ends_what_never_would(Rank& r) {
  r.join();
  float* data = r.filled(4, 1);
  if (r.rank == 1) return r.meet(1);
  CHECK(r.vendor.receive(data, 4, 1, r.comm, r.stream) == 0);
  CHECK(within(seconds(10), [&] { return r.vendor.async_error(r.comm) == 8; }));
  r.meet(1);
  CHECK(r.vendor.nccl("ncclCommAbort", r.comm) == 0);
}

void captures_are_refused(Rank& r) {
  r.join();
  const Vendor& v = r.vendor;
  float* data = r.filled(4, 1);
  CHECK(v.rt("cuStreamBeginCapture_v2", "hipStreamBeginCapture", r.stream, 0) == 0);
  int state = 0;
  CHECK(v.rt("cuStreamIsCapturing", "hipStreamIsCapturing", r.stream, &state) == 0 && state == 1);
  CHECK(v.all_reduce(data, data, 4, r.comm, r.stream) == kInvalidUsage);
  CHECK(v.last_error().find("captures") != std::string::npos);
  Handle graph = nullptr;
  CHECK(v.rt("cuStreamEndCapture", "hipStreamEndCapture", r.stream, &graph) == 0);
}

// In the global mode it does not matter which thread asks; in relaxed mode every thread may.
void a_capture_is_disturbed_unless_one_relaxes(Rank& r) {
  constexpr int kCapturesGlobally = 0, kThreadLocal = 1, kRelaxed = 2;
  const Vendor& v = r.vendor;
  Handle graph = nullptr, event = v.event();
  CHECK(v.record(event, r.stream) == 0 && v.synchronize(r.stream) == 0);
  const auto query_while_captured = [&](int capture, int mode, int* ended) {
    CHECK(v.rt("cuStreamBeginCapture_v2", "hipStreamBeginCapture", r.stream, capture) == 0);
    int status = 0;
    std::thread([&] {
      v.use_device(r.rank);
      CHECK(v.rt("cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode", &mode) == 0 && mode == 0);
      status = v.query(event);
    }).join();
    *ended = v.rt("cuStreamEndCapture", "hipStreamEndCapture", r.stream, &graph);
    return status;
  };
  constexpr int kUnsupported = 900, kInvalidated = 901;
  int ended = 0;
  CHECK(query_while_captured(kCapturesGlobally, 0, &ended) == kUnsupported && ended == kInvalidated);
  CHECK(query_while_captured(kCapturesGlobally, kThreadLocal, &ended) == 0 && ended == 0);
  CHECK(query_while_captured(kCapturesGlobally, kRelaxed, &ended) == 0 && ended == 0);
  CHECK(query_while_captured(kThreadLocal, 0, &ended) == 0 && ended == 0);
}

// --- Running them ----------------------------------------------------------------------------------------------------

struct Scenario {
  void (*body)(Rank&);
  int ranks = 2;
  int killed = -1;
};

const std::map<std::string, Scenario>& scenarios() {
  static const std::map<std::string, Scenario> all{
      {"async", {all_reduce_behind_a_slow_kernel_returns_at_once}},
      {"cross_stream", {another_stream_waits_by_event}},
      {"group", {a_group_exchanges_more_than_any_buffer_holds}},
      {"deadlock", {sends_outside_a_group_deadlock_until_the_abort}},
      {"eager", {eager_sends_hide_the_deadlock}},
      {"mismatch", {unequal_sizes_are_an_asynchronous_error_with_a_text}},
      {"peer_killed", {the_end_of_a_peer_is_noticed_at_once, 2, 1}},
      {"killed_before_joining", {a_peer_that_ends_before_it_joins_is_noticed, 2, 0}},
      {"abort", {an_abort_is_told_to_the_peers}},
      {"flags", {streams_wait_for_and_write_flags, 1}},
      {"host_function", {host_functions_must_not_call_the_runtime, 1}},
      {"fork", {a_forked_child_has_no_runtime, 1}},
      {"shared_device", {two_ranks_on_one_device_are_refused}},
      {"two_streams", {calls_on_two_streams_keep_their_order}},
      {"non_blocking", {non_blocking_calls_are_in_progress_until_they_are_polled}},
      {"abort_init", {an_abort_ends_an_initialization}},
      {"shrink", {survivors_shrink_the_communicator, 3, 1}},
      {"scalars", {scalars_are_read_when_their_residence_says}},
      {"guard", {the_host_faults_on_guarded_memory}},
      {"watchdog", {a_watchdog_ends_what_never_would}},
      {"capture", {captures_are_refused}},
      {"capture_modes", {a_capture_is_disturbed_unless_one_relaxes}},
  };
  return all;
}

void run_rank(const Vendor& vendor, Shared& shared, const Scenario& scenario, int rank) {
  vendor.use_device(rank);
  Rank self{vendor, shared, rank, scenario.ranks, vendor.stream()};
  scenario.body(self);
}

// One process, both vendors, at the same time.
void run_both(const std::vector<Vendor>& vendors, std::vector<Shared*>& shared, int rank) {
  std::vector<Rank> both;
  std::vector<float*> data;
  for (std::size_t i = 0; i < 2; ++i) {
    vendors[i].use_device(rank);
    both.push_back(Rank{vendors[i], *shared[i], rank, 2, vendors[i].stream()});
    both[i].join();
    data.push_back(both[i].filled(10'000, static_cast<float>(rank + 1)));
  }
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(vendors[i].all_reduce(data[i], data[i], 10'000, both[i].comm, both[i].stream) == 0);
  }
  for (std::size_t i = 0; i < 2; ++i) CHECK(both[i].holds(data[i], 10'000, 3));
}

Shared* share() {
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  return static_cast<Shared*>(memory);
}

// Run each rank in a process of its own; those that are not to be killed must end well.
bool run_processes(int ranks, int killed, const std::function<void(int)>& body) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      body(rank);
      std::fflush(nullptr);
      std::exit(0);  // with the sanitizers' last checks
    }
    children.push_back(child);
  }
  bool good = true;
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    const bool ended =
        within(seconds(60), [&] { return waitpid(children[static_cast<std::size_t>(rank)], &status, WNOHANG) != 0; });
    if (!ended) kill(children[static_cast<std::size_t>(rank)], SIGKILL);
    const bool was_killed = ended && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (rank == killed ? was_killed : ended && WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    std::fprintf(stderr, "rank %d: %s, status %x\n", rank, ended ? "ended badly" : "did not end",
                 static_cast<unsigned>(status));
    good = false;
  }
  return good;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 6)
    return std::fprintf(stderr, "usage: driver <scenario> <libcuda> <libnccl> <libamdhip64> <librccl>\n"), 2;
  const std::string name = arguments[1];
  const std::vector<Vendor> vendors{{false, arguments[2], arguments[3]}, {true, arguments[4], arguments[5]}};
  if (name == "both") {
    std::vector<Shared*> shared{share(), share()};
    return run_processes(2, -1, [&](int rank) { run_both(vendors, shared, rank); }) ? 0 : 1;
  }
  const auto found = scenarios().find(name);
  if (found == scenarios().end()) return std::fprintf(stderr, "no scenario %s\n", name.c_str()), 2;
  bool good = true;
  for (const Vendor& vendor : vendors) {
    Shared* shared = share();
    const Scenario& scenario = found->second;
    good =
        run_processes(scenario.ranks, scenario.killed, [&](int rank) { run_rank(vendor, *shared, scenario, rank); }) &&
        good;
  }
  return good ? 0 : 1;
}
