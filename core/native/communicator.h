// The communicator: an ordered group of ranks on one backend, or on a bridge.
//
// It decides how a call runs: by the library (native), by a plan over messages (what the library lacks, and everything
// on `host`), or by a plan over islands (a bridge, which owns two communicators of its island: one for each local
// lane).
#pragma once

#include <array>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "agreement.h"
#include "call.h"
#include "device.h"
#include "executor.h"
#include "fork.h"
#include "link/link.h"
#include "loader.h"
#include "plan.h"
#include "trace.h"
#include "work.h"

namespace polyccl {

// What a plan depends on, beside the topology and options that a communicator has for life.
struct Signature {
  Kind kind;
  Dtype dtype;
  Reduction reduction;
  int root;
  bool small;
  bool strict;
  auto operator<=>(const Signature&) const = default;
};

struct CommunicatorConfig {
  std::string name;
  uint64_t group = 0;  // names the communicator on the link, the same on all ranks
  int rank = 0;
  std::vector<LinkAddress> members;
  std::vector<std::string> descriptions;  // of members, for error texts
  std::vector<std::vector<int>> islands;  // ranks; one island for a plain communicator
  std::string token;                      // of the job, for the link
  std::shared_ptr<BackendComm> native;    // null for `host`, for a bridge, and for one rank
  std::string device_name = "cpu";        // where tensors are; type and index are DLPack's
  int32_t device_type = 1, device_index = 0;
  std::shared_ptr<Device> device;  // null where data lies in host memory
  std::array<std::shared_ptr<class Communicator>, 2>
      island{};         // a bridge's, for lanes pre and post; null in an island of one rank
  bool overlap = true;  // whether the island's two communicators may be used at once
  std::function<std::string(const Signature&)> planner;  // gives an encoded plan
  bool check = false;
  int64_t timeout_ns = 0;
  uint64_t latency_bytes = 0;  // up to this size plans for latency are used
  int window = 4;              // iterations in flight
};

// Makes what keeps a call's memory alive; asked where the call outlives its caller's frame.
using Keep = std::function<std::shared_ptr<void>()>;

class Communicator : public std::enable_shared_from_this<Communicator>, private Legs {
 public:
  explicit Communicator(CommunicatorConfig config);
  ~Communicator() override;

  // Start an operation; what `keep` gives is held until it is done. A synchronous call (async == false) returns when it
  // is done, and throws its error; then the result may be null. One at a time: further threads wait their turn.
  std::shared_ptr<Work> issue(Call call, bool async, const Keep& keep, const Interrupted& interrupted);

  // Wait for a message with this tag that no receive was issued for yet; the rank that sends it. It stays where it is.
  int find_sender(uint32_t tag, Deadline deadline, const Interrupted& interrupted);

  // Sends and receives of a batch, together.
  std::shared_ptr<Work> issue_batch(std::vector<Call> calls, bool async, const Keep& keep,
                                    const Interrupted& interrupted);

  // Under POLYCCL_CHECK: tell the others that this rank refused its call.
  void announce_refusal();

  // The process ends: end what is on its way, here alone. Does not wait for it. Nothing can be issued afterwards.
  void end();

  // True if no operation is in the lanes.
  bool idle() const { return executor_->idle(); }

  // End everything, from any thread, in bounded time, any number of times. Works end with kAborted; so do the other
  // ranks'.
  void abort();

  // Wait for what was issued; nothing can be issued afterwards.
  void finalize(Deadline deadline, const Interrupted& interrupted);

  // True in a forked child: its threads and connections are the parent's, so that it must not even be destroyed.
  bool inherited() const { return made_.inherited(); }

  std::optional<Error> failure() const override;
  std::vector<int> departed() const { return group_->departed(); }  // ranks that have left in good order
  bool memory_in_use() const override;
  int rank() const { return config_.rank; }
  int size() const { return static_cast<int>(config_.members.size()); }
  const std::string& name() const { return config_.name; }
  const CommunicatorConfig& config() const { return config_; }
  int64_t timeout_ns() const { return timeout_ns_; }
  void set_timeout(int64_t ns) { timeout_ns_ = ns; }

  // Whether the library does it itself.
  bool is_native(Kind kind, Dtype dtype, Reduction reduction) const;

  // Payload of plans and messages that this rank sent to each rank over the link.
  std::vector<uint64_t> payload_sent() const;
  Trace& trace() { return trace_; }

  // Words for errors: "all_reduce on communicator 'dp' (rank 2 of 4)".
  std::string where(const std::string& operation) const;

 private:
  void local(Lane lane, const Call& call, const Interrupted& interrupted) override;
  void exchange(Lane lane, const std::vector<Message>& messages, Dtype dtype, Deadline deadline,
                const Interrupted& interrupted) override;
  bool native_messages(Dtype dtype) const override;
  Error fail(const Error& error) override;
  void settle() override;
  void sent(int peer, uint64_t bytes) override;
  std::string member(int peer) const override { return config_.descriptions[static_cast<size_t>(peer)]; }

  Error fail(const Error& error, bool tell);
  void run_leg(Call call, const Interrupted& interrupted);
  void run_native(const Call& call, const Interrupted& interrupted);
  void run_library(std::vector<polyccl_op> ops, const std::string& doing, const Interrupted& interrupted);
  Error cause(const Error& seen);
  // A word that streams wait for. It may be waited for when the communicator is gone.
  struct Flag {
    uint32_t* word;
    uint32_t value;
    std::shared_ptr<void> memory;  // pinned; many words share it
  };
  std::function<void()> users_stream_reached(const Call& call);
  std::shared_ptr<void> kept(const Keep& keep) const;
  using Followers = std::shared_ptr<std::atomic<int>>;
  static void count_follower(const Followers& followers, Work& work);
  void let_followers_end();
  bool follow_on_stream(const std::shared_ptr<Work>& work, const UserStream& stream, bool async);
  Flag take_flag();
  static void* joining_stream(const Device& device, const UserStream& from);
  std::shared_ptr<Work> issue_on_stream(const Call& call, std::vector<polyccl_op> ops, bool async, const Keep& keep);
  std::shared_ptr<Work> issue_library_messages(const std::vector<Call>& calls, bool async, const Keep& keep,
                                               const Interrupted& interrupted);
  std::shared_ptr<void> stage_messages(std::vector<Call>& calls);
  void await_staged(void* reached, Deadline deadline, const Interrupted& interrupted);
  void run_whole(Execution& e, std::function<void()> before, std::function<void()> work);
  bool library_blocks() const;
  uint32_t memory_kind() const { return config_.device ? POLYCCL_MEMORY_DEVICE : POLYCCL_MEMORY_HOST; }
  polyccl_op library_op(const Call& call) const;
  void run_messages(const std::vector<Message>& messages, Dtype dtype, Deadline deadline,
                    const Interrupted& interrupted);
  bool runs_native(const Call& call) const;
  bool library_below() const;  // whether operations call a vendor's library, which the caller's thread must not wait in
  std::shared_ptr<const Plan> plan_for(const Call& call);
  std::optional<Agreement::Scope> agreement_scope() const;
  void agree(const Call& call, Agreement::Scope scope, const Interrupted& interrupted);
  std::shared_ptr<Execution> make_execution(Call call);
  std::shared_ptr<Work> start(const std::shared_ptr<Execution>& e, bool async, bool alone, const Keep& keep,
                              const Interrupted& interrupted);
  void await(Work& work, const Interrupted& interrupted);
  Error located(const Error& error, const std::string& operation) const;
  void require_not_inherited(const std::string& operation) const;
  void require_usable(const std::string& operation) const;
  std::shared_ptr<Execution> message_execution(std::vector<Call> calls);

  std::vector<int> neighbours() const;

  CommunicatorConfig config_;
  const Birthplace made_;
  std::atomic<int64_t> timeout_ns_;
  std::vector<std::atomic<uint64_t>> payload_;  // by peer
  std::vector<int> island_rank_;                // of each rank, in its own island
  Trace trace_;
  std::shared_ptr<LinkGroup> group_;
  std::unique_ptr<Agreement> agreement_;

  // Of a device: the stream of its library's calls, and the flags that users' streams wait for.
  Device::Handle library_stream_;
  std::mutex flags_mutex_;
  std::vector<Flag> free_flags_;  // with their last values
  // Operations on their way whose end users' streams wait for; a `Work` may be joined when the communicator is gone.
  const Followers followers_ = std::make_shared<std::atomic<int>>(0);
  std::mutex library_mutex_;           // one caller of the library at a time
  std::atomic<int> library_calls_{0};  // operations in the lanes that call the library
  std::atomic<int> agreements_{0};     // calls in the lanes that ranks have yet to agree on

  std::mutex issue_mutex_;
  uint64_t sequence_ = 0;
  uint64_t leg_messages_ = 0;
  std::mutex messages_mutex_;                                      // of the counts; never held while waiting
  std::map<std::pair<int, uint32_t>, uint64_t> sends_, receives_;  // point to point, by peer and tag

  std::mutex plans_mutex_;
  std::list<std::pair<Signature, std::shared_ptr<const Plan>>> plans_;  // most recent first
  std::map<Signature, decltype(plans_)::iterator> plan_index_;

  mutable std::mutex failure_mutex_;
  std::atomic<bool> broken_{false};
  std::optional<Error> failure_;
  std::atomic<bool> finalized_{false};
  bool closing_ = false;  // no reaper any more
  std::thread reaper_;

  std::unique_ptr<Executor> executor_;  // last: its threads use all the rest
};

}  // namespace polyccl
