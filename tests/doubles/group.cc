// Groups: see group.h.
#include "group.h"

#include <thread>
#include <utility>
#include <vector>

namespace stand_in {
namespace {

struct Making {
  std::shared_ptr<ncclComm> comm;
  std::function<Failure()> body;
};

struct Batch {
  std::shared_ptr<ncclComm> comm;
  std::vector<Operation> operations;
};

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Making> makings;
  std::vector<Batch> batches;  // in the order in which the communicators first appeared
};
thread_local Group group;

// The makings of one group wait for each other's ranks, so they run side by side.
Failure make_all(std::vector<Making>& makings) {
  std::vector<Failure> failures(makings.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 1; i < makings.size(); ++i) {
    threads.emplace_back([&, i] { failures[i] = makings[i].body(); });
  }
  if (!makings.empty()) failures[0] = makings[0].body();
  for (std::thread& thread : threads) thread.join();
  Failure first;
  for (std::size_t i = 0; i < makings.size(); ++i) {
    makings[i].comm->end(failures[i]);
    if (failures[i] && !first) first = failures[i];
  }
  return first;
}

Failure launch_all(std::vector<Batch>& batches) {
  for (Batch& batch : batches) {
    if (Failure failure = batch.comm->launch(std::move(batch.operations))) return failure;
  }
  return {};
}

bool any_non_blocking(const Group& closed) {
  for (const Making& making : closed.makings) {
    if (!making.comm->config.blocking) return true;
  }
  for (const Batch& batch : closed.batches) {
    if (!batch.comm->config.blocking) return true;
  }
  return false;
}

// As in NCCL, one non-blocking communicator makes the whole group so: what was called is enqueued later, by another
// thread, and until ncclCommGetAsyncError says ncclSuccess nothing may be assumed to be on the stream.
ncclResult_t run_later(Group closed) {
  for (const Making& making : closed.makings) making.comm->begin();
  for (const Batch& batch : closed.batches) batch.comm->begin();
  std::thread([later = std::move(closed)]() mutable {
    std::this_thread::sleep_for(
        std::chrono::milliseconds(1));           // long enough for a caller that does not poll to be wrong
    static_cast<void>(make_all(later.makings));  // each communicator has its own failure
    const Failure failure = launch_all(later.batches);
    for (const Batch& batch : later.batches) batch.comm->end(failure);
  }).detach();
  return ncclInProgress;
}

}  // namespace

void start_group() { ++group.depth; }

ncclResult_t report(const Failure& failure) {
  if (!failure) return ncclSuccess;
  remember(failure);
  if (group.depth > 0 && group.error == ncclSuccess) group.error = failure.code;
  return failure.code;
}

ncclResult_t end_group() {
  if (group.depth == 0) return report({ncclInvalidUsage, "ncclGroupEnd: not in a group call."});
  if (--group.depth > 0) return ncclSuccess;
  Group closed = std::exchange(group, Group{});
  if (closed.error != ncclSuccess) {
    for (const Making& making : closed.makings) making.comm->end({closed.error, ""});
    return closed.error;
  }
  if (any_non_blocking(closed)) return run_later(std::move(closed));
  if (Failure failure = make_all(closed.makings)) return report(failure);
  return report(launch_all(closed.batches));
}

ncclResult_t add(const std::shared_ptr<ncclComm>& comm, Operation operation) {
  start_group();
  auto batch = group.batches.begin();
  while (batch != group.batches.end() && batch->comm != comm) ++batch;
  if (batch == group.batches.end()) batch = group.batches.insert(batch, Batch{comm, {}});
  batch->operations.push_back(std::move(operation));
  return end_group();
}

ncclResult_t add_making(const std::shared_ptr<ncclComm>& comm, std::function<Failure()> body) {
  start_group();
  group.makings.push_back({comm, std::move(body)});
  return end_group();
}

}  // namespace stand_in
