#include "closing.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace polyccl {
namespace {

struct Registry {
  std::mutex mutex;
  std::set<Communicator*> living;
  std::vector<Communicator*> held;  // until the end
  std::atomic<int> apart{0};        // threads that destroy one

  bool quiet() {
    const std::scoped_lock lock(mutex);
    return apart == 0 &&
           std::all_of(living.begin(), living.end(), [](const Communicator* c) { return c->inherited() || c->idle(); });
  }
};

Registry& registry();

// A forked child must not find the lock taken by a thread that it does not have.
Registry* make_registry() {
  pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); }, [] { registry().mutex.unlock(); });
  return std::make_unique<Registry>().release();  // outlives the destruction of statics
}

Registry& registry() {
  static Registry* const all = make_registry();
  return *all;
}

thread_local bool worker_thread = false;
std::atomic<RunDestruction> run_destruction{[](const std::function<void()>& destroy) {
  destroy();
  return true;
}};

void destroy(Communicator* communicator) {
  {
    const std::scoped_lock lock(registry().mutex);
    registry().living.erase(communicator);
  }
  const std::unique_ptr<Communicator> owned(communicator);
}

void let_go(Communicator* communicator) {
  if (communicator->inherited()) return;  // its threads are the parent's
  if (!worker_thread) {
    if (run_destruction.load()([communicator] { destroy(communicator); })) return;
    const std::scoped_lock lock(registry().mutex);
    registry().held.push_back(communicator);
    return;
  }
  ++registry().apart;
  try {
    std::thread([communicator] {
      destroy(communicator);
      --registry().apart;
    }).detach();
  } catch (const std::system_error&) {  // out of threads: it stays as it is, with nothing on its way
    --registry().apart;
  }
}

}  // namespace

std::shared_ptr<Communicator> make_communicator(CommunicatorConfig config) {
  std::shared_ptr<Communicator> made(std::make_unique<Communicator>(std::move(config)).release(), let_go);
  const std::scoped_lock lock(registry().mutex);
  registry().living.insert(made.get());
  return made;
}

void mark_worker_thread() noexcept { worker_thread = true; }

void set_run_destruction(RunDestruction run) noexcept { run_destruction = run; }

void end_communicators(Deadline deadline, bool destroy) {
  Registry& all = registry();
  {
    const std::scoped_lock lock(all.mutex);
    for (Communicator* communicator : all.living) {
      if (!communicator->inherited()) communicator->end();
    }
  }
  while (!all.quiet()) {
    if (expired(deadline)) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!destroy) return;
  const auto next = [&all]() -> Communicator* {
    const std::scoped_lock lock(all.mutex);
    if (all.held.empty()) return nullptr;
    Communicator* const last = all.held.back();
    all.held.pop_back();
    return last;
  };
  while (Communicator* const held = next()) polyccl::destroy(held);  // a bridge leaves those of its island
}

}  // namespace polyccl
