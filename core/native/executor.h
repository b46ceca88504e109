// The executor: runs plans.
//
// An operation is cut into iterations (the plan's chunks, then its tail). Each takes a slot: a bounded piece of
// scratch, given out in order. Three lanes work on the admitted iterations at once: pre (local legs before the link),
// cross (the link), post (local legs after it). A lane starts a step when the steps that it depends on are done; pre
// and post run strictly in order, the cross lane keeps all admitted iterations in flight. An operation of one
// iteration, and one without local legs, runs on the caller's thread instead.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "call.h"
#include "device.h"
#include "link/link.h"
#include "plan.h"
#include "trace.h"
#include "work.h"

namespace polyccl {

// Whether the user pressed Ctrl-C; asked about every 100 ms while the caller's thread waits. May be empty.
using Interrupted = std::function<bool()>;

// Thrown where `Interrupted` ended a wait.
class InterruptedWait : public Error {
 public:
  InterruptedWait() : Error(Code::kAborted, "interrupted") {}
};

// One message of a fused group among ranks of an island (or of a communicator whose library has send and recv).
struct Message {
  bool sends;
  int peer;
  char* memory;
  uint64_t count;
  uint64_t fingerprint;
};

// What the executor needs of the communicator that it serves.
class Legs {
 public:
  virtual ~Legs() = default;
  // A collective of this rank's island, on the communicator of that lane. Blocks. Throws Error.
  virtual void local(Lane lane, const Call& call, const Interrupted& interrupted) = 0;
  // A fused group of messages inside the island. Blocks. Throws Error.
  virtual void exchange(Lane lane, const std::vector<Message>& messages, Dtype dtype, Deadline deadline,
                        const Interrupted& interrupted) = 0;
  // True where messages of the cross lane go by exchange(), since the library has send and recv of its own.
  virtual bool native_messages(Dtype dtype) const = 0;
  // The communicator is broken by this error: end everything that runs. Returns the error that stays.
  virtual Error fail(const Error& error) = 0;
  virtual std::optional<Error> failure() const = 0;
  // After a failure: return once no library works for an operation on a device any more, or the device hangs.
  virtual void settle() = 0;
  // True where a call of a library was given up, which may use the memory of its operation for as long as the process
  // lives.
  virtual bool memory_in_use() const = 0;
  // Payload that goes to a peer over the link.
  virtual void sent(int peer, uint64_t bytes) = 0;
  // Words for error texts: a member ("rank 3 (island b, host h)").
  virtual std::string member(int peer) const = 0;
};

// An operation on its way.
struct Execution {
  std::shared_ptr<const Plan> plan;  // null: only `prepare` runs
  Call call;
  uint64_t sequence = 0;
  std::shared_ptr<Work> work;
  std::function<void()>
      prepare;  // runs in lane pre before the first step; throwing ends the operation, not the communicator
  std::vector<std::shared_ptr<void>> staging;  // of messages: memory to keep
  std::function<bool()> may_start;  // of messages: asked until it says yes, before which none goes; empty: yes
  std::vector<std::function<void()>> finish;  // of messages: what to do once they are there
  std::vector<Tag> tags;                      // of messages, by step; empty for plans
  std::vector<uint64_t> fingerprints;         // of messages, by step; empty for what the user sends
  uint64_t fingerprint = 0;                   // of a plan's operation; the executor sets it
  // The executor's own:
  std::optional<Error> error;                  // of messages: ends them, not the communicator
  Interrupted interrupted;                     // empty in the lanes
  std::array<std::vector<size_t>, 2> scratch;  // byte offsets of the scratch buffers in a slot, by section
  std::array<size_t, 2> scratch_bytes{};       // of a slot: on the host, on the device
  uint64_t main_iterations = 0, iterations = 0, admitted = 0, finished = 0;
  bool prepared = false;
};

// One iteration of an operation, in a slot.
struct Iteration {
  std::shared_ptr<Execution> execution;
  const Section* section = nullptr;
  const std::vector<size_t>* scratch_offsets = nullptr;
  uint32_t index = 0;              // in the operation
  uint64_t start = 0, length = 0;  // elements of a block
  int slot = -1;                   // -1: needs none
  bool retired = false;
  std::array<char*, 2> scratch{};       // on the host, on the device
  std::vector<std::atomic<bool>> done;  // by step
  std::atomic<uint32_t> left{0};        // steps that are not done

  Iteration(std::shared_ptr<Execution> e, const Section& s)
      : execution(std::move(e)), section(&s), done(s.steps.size()) {}
  bool ready(const Step& step) const;  // whether all that the step depends on is done
};

class Executor {
 public:
  // `device` is null where input and output are host memory.
  Executor(Legs& legs, LinkGroup& group, const Device* device, uint64_t tag_group, int rank, int size, int window,
           Trace& trace);
  ~Executor();

  // Run to the end on the caller's thread. Only where idle(), and never two at once. Throws Error.
  void run(const std::shared_ptr<Execution>& execution, const Interrupted& interrupted);

  // Hand over to the lanes; execution->work completes.
  void enqueue(std::shared_ptr<Execution> execution);

  // Messages (plans of one ragged iteration in lane cross, with tags of their own) need no slot and no order among
  // operations.
  void run_messages(const std::shared_ptr<Execution>& execution, const Interrupted& interrupted);
  void enqueue_messages(std::shared_ptr<Execution> execution);

  // True where no operation is on its way in the lanes.
  bool idle() const;

  // Whether run() loses no overlap of local and cross legs.
  static bool runs_alone(const Plan& plan, const Call& call);

  // End the lanes, once what is on its way is over. Nothing may be issued any more.
  void stop();

  // Let all lanes look at the failure.
  void wake();

 private:
  class CrossLane;

  // Scratch of one iteration. Grows to what operations need.
  struct Slot {
    std::vector<char> host;
    Device::Handle pinned, device;  // instead of `host`, where there is a device
    std::array<size_t, 2> bytes{};
  };

  void start_lanes(const Execution& e);
  // Whether a lane may end: other lanes may still have iterations for it while operations are on their way.
  bool may_end() const { return stop_ && idle(); }
  void local_lane(Lane lane);
  void cross_lane();
  void prepare_front(std::unique_lock<std::mutex>& lock);
  void admit(std::unique_lock<std::mutex>& lock);

  std::shared_ptr<Iteration> make_iteration(const std::shared_ptr<Execution>& e, uint64_t index, int slot);
  void run_steps(Iteration& it, Lane lane);
  void run_group(Iteration& it, Lane lane, const std::vector<uint32_t>& steps);
  void run_step(Iteration& it, const Step& step, Lane lane);
  void wait_for(const Iteration& it, const Step& step);
  void reserve(int slot, const std::array<size_t, 2>& bytes);
  uint64_t run_copies(Iteration& it, const Step& step, Lane lane);
  void run_grouped(Iteration& it);
  void run_overlapped(const std::shared_ptr<Execution>& e, const Interrupted& interrupted);
  void drive(CrossLane& cross, const Interrupted& interrupted);
  void mark(Iteration& it, uint32_t step);
  void skip(Iteration& it, Lane lane);
  void retire(const std::shared_ptr<Iteration>& it);
  void complete(Execution& e, std::optional<Error> error);
  void signal();
  void trace_step(const Iteration& it, const Step& step, uint64_t bytes, int64_t begin) const;
  static bool cross_done(const Iteration& it);

  Legs& legs_;
  LinkGroup& group_;
  const Device* const device_;
  const uint64_t tag_group_;
  const int rank_, size_;
  const int window_;
  Trace& trace_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Execution>> queue_;  // operations not yet fully admitted
  std::array<std::deque<std::shared_ptr<Iteration>>, kLanes> lanes_;
  std::array<std::thread, kLanes> threads_;
  std::vector<Slot> slots_;
  std::array<Device::Handle, kLanes> streams_;  // of the device, for copies of each lane
  std::vector<int> free_slots_;
  std::atomic<uint64_t> in_flight_{0};  // operations in the lanes
  std::atomic<uint64_t> signals_{0};    // counts what a parked lane might wait for
  bool stop_ = false;
};

}  // namespace polyccl
