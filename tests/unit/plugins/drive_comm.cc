// Drives the core's BackendComm, which has no Python face, and prints one line for each fact. Links loader.cc alone:
// the arithmetic that loader.cc offers to plugins is a double here.
//
// drive_comm double PLUGIN: what becomes of a plugin's results and of the store's exceptions.
// drive_comm hangs PLUGIN: what becomes of calls that do not return.
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <iostream>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "loader.h"
#include "reduce.h"

namespace polyccl {

bool can_reduce(Dtype dtype, Reduction reduction) {
  return dtype == POLYCCL_DTYPE_FLOAT32 && reduction == POLYCCL_REDUCTION_SUM;
}

void reduce(void* output, std::span<const void* const> operands, size_t n, Dtype, Reduction, const Factor&) {
  for (size_t i = 0; i < n; ++i) {
    float sum = 0;
    for (const void* operand : operands) sum += static_cast<const float*>(operand)[i];
    static_cast<float*>(output)[i] = sum;
  }
}

namespace {

class MemoryStore : public BootstrapStore {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key, Deadline) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(20), [&] { return values_.count(key) != 0; })) {
      throw Error(Code::kTimeout, "nobody set " + key);
    }
    return values_[key];
  }
  bool cancelled() const override { return false; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

class BrokenStore : public MemoryStore {
 public:
  explicit BrokenStore(bool known) : known_(known) {}
  std::string get(const std::string&, Deadline) override {
    if (known_) throw Error(Code::kPeerLost, "the store's server is gone");
    throw std::out_of_range("a stranger's exception");
  }

 private:
  bool known_;
};

template <typename Call>
void report(const std::string& what, Call call) {
  try {
    call();
    std::cout << what << ": ok\n";
  } catch (const Error& e) {
    std::cout << what << ": code " << static_cast<int>(e.code()) << ": " << e.what() << "\n";
  }
}

CommConfig config_of(int rank, int size) {
  CommConfig config;
  config.rank = rank;
  config.size = size;
  config.name = "dp";
  config.interface = "lo";
  config.deadline = now_ns() + 20'000'000'000;
  return config;
}

polyccl_op operation(Kind kind, uint64_t count) {
  polyccl_op op{};
  op.struct_size = sizeof op;
  op.kind = kind;
  op.dtype = POLYCCL_DTYPE_FLOAT32;
  op.reduction = POLYCCL_REDUCTION_SUM;
  op.peer = -1;
  op.memory = POLYCCL_MEMORY_HOST;
  op.count = count;
  return op;
}

void drive_double(Backend& backend) {
  MemoryStore store;
  store.set("greeting", "hello");
  {
    BackendComm comm(backend, config_of(0, 1), store);
    std::cout << "answer: " << store.get("answer", 0) << "\n";
    for (uint64_t result = 0; result < 10; ++result) {
      const polyccl_op now = operation(POLYCCL_KIND_BARRIER, result), posted = operation(POLYCCL_KIND_SEND, result);
      report("inline " + std::to_string(result), [&] { comm.run({&now}, "barrier on communicator 'dp'"); });
      report("posted " + std::to_string(result), [&] { comm.run({&posted}, "send on communicator 'dp'"); });
    }
  }
  BrokenStore known(true), stranger(false);
  report("known", [&] { BackendComm comm(backend, config_of(0, 1), known); });
  report("stranger", [&] { BackendComm comm(backend, config_of(0, 1), stranger); });
  std::cout << "counts: " << backend.library_version() << "\n";
}

// An all_reduce of the double ends once the first element of its output is 0, and then writes 7 to all of it.
void drive_hangs(Backend& backend) {
  MemoryStore store;
  store.set("greeting", "hello");
  static std::vector<float> memory(1000, 1);  // stays, as what a call that was given up may write must
  volatile float* output = memory.data();
  {
    BackendComm comm(backend, config_of(0, 1), store);
    polyccl_op op = operation(POLYCCL_KIND_ALL_REDUCE, memory.size());
    op.output = memory.data();
    op.deadline = now_ns() + 100'000'000;
    report("late", [&] { comm.run({&op}, "all_reduce"); });
    std::cout << "in use after a deadline: " << comm.memory_in_use() << "\n";
    const polyccl_op next = operation(POLYCCL_KIND_BARRIER, 0);
    report("next", [&] { comm.run({&next}, "barrier"); });
    output[0] = 0;
    for (const int64_t end = now_ns() + 10'000'000'000; output[999] != 7 && now_ns() < end;) std::this_thread::yield();
    std::cout << "the call went on: " << (output[999] == 7) << "\n";
  }
  {
    BackendComm comm(backend, config_of(0, 1), store);
    polyccl_op op = operation(POLYCCL_KIND_ALL_REDUCE, memory.size());
    op.output = memory.data();
    std::thread other([&comm] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      comm.abort();
    });
    report("aborted", [&] { comm.run({&op}, "all_reduce"); });
    other.join();
  }
  {
    BackendComm idle(backend, config_of(0, 1), store);
    idle.abort();
    std::cout << "in use after an abort of nothing: " << idle.memory_in_use() << "\n";
  }
  {
    BackendComm good(backend, config_of(0, 1), store);
    const polyccl_op op = operation(POLYCCL_KIND_BARRIER, 0);
    report("good", [&] { good.run({&op}, "barrier"); });
    const polyccl_op bad = operation(POLYCCL_KIND_BARRIER, POLYCCL_ERROR_INTERNAL);
    report("bad", [&] { good.run({&bad}, "barrier"); });
  }
  store.set("greeting", "hang");
  CommConfig config = config_of(0, 1);
  config.deadline = now_ns() + 100'000'000;
  report("creation", [&] { BackendComm comm(backend, config, store); });
  report("interrupted creation", [&] { BackendComm comm(backend, config_of(0, 1), store, [] { return true; }); });
  std::cout << "counts: " << backend.library_version() << "\n";
}

}  // namespace
}  // namespace polyccl

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  polyccl::Backend& backend = polyccl::Backend::load(argv[2]);
  if (std::string(argv[1]) == "double") polyccl::drive_double(backend);
  if (std::string(argv[1]) == "hangs") polyccl::drive_hangs(backend);
  return 0;
}
