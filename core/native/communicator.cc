#include "communicator.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "closing.h"
#include "log.h"
#include "transport.h"

namespace polyccl {
namespace {

constexpr size_t kCachedPlans = 256;
constexpr uint16_t kMessageChannel = 2;  // the user's point to point
// Fused groups of plans inside an island: to higher ranks, and to lower ones, since each direction counts for itself.
constexpr uint16_t kLegUpChannel = 4, kLegDownChannel = 5;

// A leg gives the blocks of a side as one stretch; a plan wants each.
void spread(Side& side, Shape shape, size_t size, uint64_t bytes) {
  if (shape == Shape::kBlocks && side.blocks.size() == 1 && size > 1) {
    side.blocks = adjacent_blocks(side.blocks[0], size, bytes);
  }
}

// Counts one less at the end of its scope.
class Countdown {
 public:
  explicit Countdown(std::atomic<int>& count) : count_(count) {}
  ~Countdown() { --count_; }
  Countdown(const Countdown&) = delete;
  Countdown& operator=(const Countdown&) = delete;

 private:
  std::atomic<int>& count_;
};

}  // namespace

Communicator::Communicator(CommunicatorConfig config)
    : config_(std::move(config)),
      timeout_ns_(config_.timeout_ns),
      payload_(config_.members.size()),
      island_rank_(config_.members.size()) {
  for (const auto& island : config_.islands) {
    for (size_t i = 0; i < island.size(); ++i) island_rank_[static_cast<size_t>(island[i])] = static_cast<int>(i);
  }
  group_ =
      Link::instance().create_group(config_.group, config_.rank, config_.members, config_.descriptions, config_.token);
  agreement_ = std::make_unique<Agreement>(*group_, config_.group, config_.rank, config_.islands, config_.descriptions);
  if (config_.device) library_stream_ = config_.device->stream();
  executor_ = std::make_unique<Executor>(static_cast<Legs&>(*this), *group_, config_.device.get(), config_.group,
                                         config_.rank, size(), config_.window, trace_);
  // The link may not be blocked, and ending a library's calls may take a while. Once is enough: whatever failed first,
  // fail() ends everything.
  const auto fail_apart = [this](const Error& error) {
    std::scoped_lock lock(failure_mutex_);
    if (!closing_ && !failure_ && !reaper_.joinable())
      reaper_ = std::thread([this, error] {
        mark_worker_thread();
        fail(error, true);
      });
  };
  group_->on_failure(fail_apart);
  group_->on_late_mismatch([fail_apart](int, const Tag& tag, const Error& error) {
    // Whoever receives a user's message raises; the sender has returned long since. A plan's message breaks the
    // operation.
    if (tag.channel != kMessageChannel) fail_apart(error);
  });
  group_->connect(neighbours());
}

// Whose loss this rank watches for: a tree. Ranks watch their island's head, heads one another and their islands.
std::vector<int> Communicator::neighbours() const {
  std::vector<int> ranks;
  for (const auto& island : config_.islands) {
    const bool mine = std::find(island.begin(), island.end(), rank()) != island.end();
    const bool head = island.front() == rank();
    if (head) ranks.insert(ranks.end(), island.begin() + 1, island.end());
    if (mine && !head) return {island.front()};
  }
  for (const auto& island : config_.islands) {
    if (island.front() != rank()) ranks.push_back(island.front());
  }
  return ranks;
}

Communicator::~Communicator() {
  finalized_ = true;
  let_followers_end();
  if (!executor_->idle()) fail(Error(Code::kAborted, "the communicator was destroyed"), false);
  {
    std::scoped_lock lock(failure_mutex_);
    closing_ = true;
  }
  if (reaper_.joinable()) reaper_.join();  // before what it uses goes
  executor_->stop();                       // its lanes may still look for it, in fail()
  executor_.reset();
  agreement_.reset();
  group_.reset();  // no callback comes after this
}

std::string Communicator::where(const std::string& operation) const {
  return operation + " on communicator '" + config_.name + "' (" + member(rank()) + " of " + std::to_string(size()) +
         ")";
}

Error Communicator::located(const Error& error, const std::string& operation) const {
  return Error(error.code(), where(operation) + ": " + error.what());
}

std::optional<Error> Communicator::failure() const {
  if (!broken_.load(std::memory_order_acquire)) return std::nullopt;
  std::scoped_lock lock(failure_mutex_);
  return failure_;
}

bool Communicator::memory_in_use() const {
  const auto used = [](const std::shared_ptr<Communicator>& island) { return island && island->memory_in_use(); };
  return (config_.native && config_.native->memory_in_use()) || used(config_.island[0]) || used(config_.island[1]);
}

Error Communicator::fail(const Error& error) { return fail(error, true); }

Error Communicator::fail(const Error& error, bool tell) {
  {
    std::scoped_lock lock(failure_mutex_);
    if (failure_) return *failure_;
    failure_ = error;
    broken_.store(true, std::memory_order_release);
  }
  write_log(POLYCCL_LOG_INFO, "", where("failure") + ": " + error.what());
  group_->fail(error, tell);
  if (config_.native) config_.native->abort();
  for (auto& island : config_.island) {
    if (island) island->fail(error, tell);
  }
  if (executor_) executor_->wake();
  return error;
}

void Communicator::settle() {
  for (auto& island : config_.island) {
    if (island) island->settle();
  }
  if (!config_.device || !config_.native) return;
  try {
    config_.device->synchronize(library_stream_.get(), now_ns() + kSettleNs, {});
  } catch (const Error&) {  // a device that hangs: the failure is on record
  }
}

void Communicator::end() {
  finalized_ = true;
  if (!idle()) fail(Error(Code::kAborted, "the process ended"), false);
}

void Communicator::abort() {
  if (inherited()) return;
  fail(Error(Code::kAborted, member(rank()) + " aborted the communicator"), true);
}

// Before any lock: a thread that is not in the child may have held it at the fork.
void Communicator::require_not_inherited(const std::string& operation) const {
  if (!inherited()) return;
  throw Error(Code::kInternal, where(operation) +
                                   ": the communicator belongs to the parent process and does not survive fork(); "
                                   "create one in the child");
}

void Communicator::require_usable(const std::string& operation) const {
  require_not_inherited(operation);
  if (finalized_)
    throw Error(Code::kInvalidArgument, where(operation) + ": the communicator was finalized; create a new one");
  if (auto error = failure()) {
    throw Error(error->code(),
                where(operation) + ": the communicator is broken: " + error->what() + ". Create a new one");
  }
}

bool Communicator::is_native(Kind kind, Dtype dtype, Reduction reduction) const {
  return config_.native &&
         (config_.native->backend().supports(kind, dtype, reduction, memory_kind()) & POLYCCL_CAN) != 0;
}

bool Communicator::runs_native(const Call& call) const {
  return !call.strict && !call.lists && is_native(call.kind(), call.dtype, call.reduction);
}

bool Communicator::library_blocks() const {
  return config_.native && !config_.native->backend().has(POLYCCL_FLAG_TRANSPORT);
}

bool Communicator::library_below() const {
  return library_blocks() || (config_.island[0] && config_.island[0]->library_blocks());
}

bool Communicator::native_messages(Dtype dtype) const {
  if (!config_.native) return false;
  const Backend& backend = config_.native->backend();
  constexpr uint32_t kNeeded = POLYCCL_CAN | POLYCCL_CAN_GROUP;
  const auto can = [&](Kind kind) {
    return (backend.supports(kind, dtype, POLYCCL_REDUCTION_NONE, memory_kind()) & kNeeded) == kNeeded;
  };
  return can(POLYCCL_KIND_SEND) && can(POLYCCL_KIND_RECV);
}

void Communicator::sent(int peer, uint64_t bytes) {
  payload_[static_cast<size_t>(peer)].fetch_add(bytes, std::memory_order_relaxed);
}

std::vector<uint64_t> Communicator::payload_sent() const {
  std::vector<uint64_t> bytes;
  for (const auto& counter : payload_) bytes.push_back(counter.load(std::memory_order_relaxed));
  return bytes;
}

std::shared_ptr<const Plan> Communicator::plan_for(const Call& call) {
  const bool small = !call.row->ragged && call.full_bytes(size()) <= config_.latency_bytes;
  const Signature signature{call.kind(), call.dtype, call.reduction, call.peer, small, call.strict};
  std::scoped_lock lock(plans_mutex_);
  if (auto found = plan_index_.find(signature); found != plan_index_.end()) {
    plans_.splice(plans_.begin(), plans_, found->second);
    return found->second->second;
  }
  auto plan = std::make_shared<const Plan>(Plan::decode(config_.planner(signature), size()));
  plans_.emplace_front(signature, plan);
  plan_index_[signature] = plans_.begin();
  if (plans_.size() > kCachedPlans) {
    plan_index_.erase(plans_.back().first);
    plans_.pop_back();
  }
  return plan;
}

// Who must agree before a call: all ranks when checking, else the ranks whose library dies on unequal sizes.
std::optional<Agreement::Scope> Communicator::agreement_scope() const {
  if (size() == 1) return std::nullopt;
  if (config_.check) return Agreement::Scope::kAll;
  const auto fatal = [](const std::shared_ptr<BackendComm>& native) {
    return native && native->backend().has(POLYCCL_FLAG_SIZES_FATAL);
  };
  const auto& island = config_.island[0];
  if (fatal(config_.native) || (island && fatal(island->config_.native))) return Agreement::Scope::kIsland;
  return std::nullopt;
}

void Communicator::agree(const Call& call, Agreement::Scope scope, const Interrupted& interrupted) {
  try {
    Fingerprint mine = Fingerprint::of(call);
    mine.native = runs_native(call) ? 1 : 0;
    if (scope == Agreement::Scope::kAll) mine.balance = balance_of(call, rank());
    agreement_->agree(mine, scope, call.deadline, interrupted);
  } catch (const InterruptedWait&) {
    throw;
  } catch (const Error& error) {
    // A difference leaves the communicator usable, if all ranks know of it.
    const bool known_to_all = scope == Agreement::Scope::kAll || config_.islands.size() == 1;
    if (error.code() != Code::kMismatch || !known_to_all) throw fail(error);
    throw;
  }
}

polyccl_op Communicator::library_op(const Call& call) const {
  polyccl_op op{};
  op.struct_size = sizeof op;
  op.kind = call.kind();
  op.dtype = call.dtype;
  op.reduction = call.reduction;
  op.peer = call.peer;
  op.input = call.input.empty() ? nullptr : call.input.blocks[0];
  op.output = call.output.empty() ? nullptr : call.output.blocks[0];
  op.count = call.count;
  const bool input_blocks = call.row->input == Shape::kBlocks;
  op.counts = (input_blocks ? call.input : call.output).counts.data();
  op.output_counts = call.output.counts.data();
  op.factor = call.factor.data();
  op.factor_memory = POLYCCL_MEMORY_HOST;
  op.memory = memory_kind();
  op.deadline = call.deadline;
  return op;
}

void Communicator::run_native(const Call& call, const Interrupted& interrupted) {
  run_library({library_op(call)}, std::string(call.row->name), interrupted);
}

// Call the library, and wait until what it does is done.
void Communicator::run_library(std::vector<polyccl_op> ops, const std::string& doing, const Interrupted& interrupted) {
  std::vector<const polyccl_op*> pointers;
  for (polyccl_op& op : ops) {
    op.stream = library_stream_.get();
    pointers.push_back(&op);
  }
  try {
    {
      std::scoped_lock lock(library_mutex_);
      InterruptibleWaits waits(interrupted);
      try {
        config_.native->run(pointers, doing);
      } catch (const Error&) {
        if (waits.ended()) throw InterruptedWait();
        throw;
      }
    }
    if (!config_.device) return;
    config_.device->synchronize(library_stream_.get(), ops[0].deadline, [this, &doing] {
      config_.native->check_async(doing);
      return failure().has_value();
    });
  } catch (const InterruptedWait&) {
    throw;
  } catch (const Error& error) {
    throw cause(error);
  }
}

// What a library's error came from. A library that was aborted, or whose peer's side was, can say no more than that; the
// communicator that ended it can, and so can the link, which knows the rank that is lost. Their word may come a moment
// after the library's.
Error Communicator::cause(const Error& seen) {
  constexpr int64_t kPatience = 1'000'000'000;
  if (seen.code() != Code::kAborted && seen.code() != Code::kPeerLost && seen.code() != Code::kInternal) return seen;
  const auto known = [this] { return failure() || group_->failure(); };
  Link::instance().wait(known, now_ns() + kPatience);
  if (const auto failed = failure()) return *failed;
  return group_->failure().value_or(seen);
}

std::shared_ptr<Execution> Communicator::make_execution(Call call) {
  auto e = std::make_shared<Execution>();
  e->sequence = ++sequence_;
  e->call = std::move(call);
  return e;
}

std::shared_ptr<Work> Communicator::issue(Call call, bool async, const Keep& keep, const Interrupted& interrupted) {
  if (!call.row->collective) return issue_batch({std::move(call)}, async, keep, interrupted);
  const std::string operation(call.row->name);
  require_not_inherited(operation);
  std::scoped_lock turn(issue_mutex_);
  require_usable(operation);
  auto e = make_execution(std::move(call));
  const auto scope = agreement_scope();
  const bool native = runs_native(e->call);
  if (native && e->call.stream.known() && library_calls_ == 0 && agreements_ == 0) {
    if (scope) agree(e->call, *scope, interrupted);
    return issue_on_stream(e->call, {library_op(e->call)}, async, keep);
  }
  auto plan = native ? nullptr : plan_for(e->call);
  auto ready = users_stream_reached(e->call);
  if (!native && !native_messages(e->call.dtype) && config_.overlap) {
    const bool alone =
        !async && !library_below() && !config_.device && executor_->idle() && Executor::runs_alone(*plan, e->call);
    e->plan = std::move(plan);
    ++agreements_;
    e->prepare = [this, e = e.get(), scope, ready = std::move(ready)] {
      const Countdown over(agreements_);
      if (ready) ready();
      if (scope) agree(e->call, *scope, e->interrupted);
    };
    return start(e, async, alone, keep, interrupted);
  }
  // The operation is one piece of work: in a lane where its library blocks in ways that no signal interrupts.
  const bool alone =
      native && !async && !library_below() && !config_.device && library_calls_ == 0 && executor_->idle();
  auto inner = std::make_shared<Execution>(*e);
  inner->plan = std::move(plan);
  const auto before = [this, e = e.get(), inner, scope, ready = std::move(ready)] {
    if (ready) ready();
    if (scope) agree(inner->call, *scope, e->interrupted);
  };
  run_whole(*e, before, [this, e = e.get(), inner] {
    inner->plan ? executor_->run(inner, {}) : run_native(inner->call, e->interrupted);
  });
  return start(e, async, alone, keep, interrupted);
}

// Make the operation one piece of work in lane pre. Ranks that differ find it out in `before`, and the communicator stays
// usable; in `work` data has been sent, and every error breaks the communicator.
void Communicator::run_whole(Execution& e, std::function<void()> before, std::function<void()> work) {
  ++library_calls_;
  e.prepare = [this, before = std::move(before), work = std::move(work)] {
    const Countdown over(library_calls_);
    bool begun = false;
    try {
      before();
      begun = true;
      work();
    } catch (const InterruptedWait&) {
      throw;
    } catch (...) {
      const Error error = current_error();
      if (error.code() == Code::kMismatch && !begun && !failure()) throw error;
      const Error failed = fail(error);
      settle();
      throw failed;
    }
  };
}

std::shared_ptr<Work> Communicator::start(const std::shared_ptr<Execution>& e, bool async, bool alone, const Keep& keep,
                                          const Interrupted& interrupted) {
  const std::string operation(e->call.row->name);
  if (alone) {
    try {
      executor_->run(e, interrupted);
    } catch (const InterruptedWait& wait) {
      fail(Error(Code::kAborted, member(rank()) + " was interrupted in " + operation), true);
      throw;
    } catch (const Error& error) {
      if (error.code() == Code::kMismatch && !e->prepared) throw located(error, operation);
      throw located(fail(error), operation);
    } catch (const std::bad_alloc&) {
      throw located(fail(current_error()), operation);
    }
    return nullptr;
  }
  e->work = std::make_shared<Work>(operation, e->call.deadline);
  e->work->keep_alive(kept(keep), shared_from_this());
  auto work = e->work;
  const UserStream stream = e->call.stream;
  executor_->enqueue(e);
  if (follow_on_stream(work, stream, async)) return work;
  if (!async) await(*work, interrupted);
  return work;
}

void Communicator::await(Work& work, const Interrupted& interrupted) {
  if (!work.wait(0, interrupted)) {
    // No one else can wait for it, and it must not go on with the caller's memory.
    fail(Error(Code::kAborted, member(rank()) + " was interrupted in " + work.description()), true);
    throw InterruptedWait();
  }
  if (auto error = work.error()) throw located(*error, work.description());
}

// ---- point to point ------------------------------------------------------------------------------------------------

// Messages need no slots and no order among operations: a plan made here carries them, its tags count messages by pair.
std::shared_ptr<Execution> Communicator::message_execution(std::vector<Call> calls) {
  auto e = std::make_shared<Execution>();
  auto plan = std::make_shared<Plan>();
  Section section;
  section.ragged = true;
  section.chunk = 1;
  Call whole = calls.front();
  whole.unstage = {};
  whole.dtype = POLYCCL_DTYPE_UINT8;
  whole.input = whole.output = {};
  std::scoped_lock lock(messages_mutex_);
  for (const Call& call : calls) {
    const bool sends = call.kind() == POLYCCL_KIND_SEND;
    Side& side = sends ? whole.input : whole.output;
    const Side& from = sends ? call.input : call.output;
    const uint64_t bytes = call.count * call.element();
    Step step;
    step.verb = sends ? Verb::kSend : Verb::kRecv;
    step.lane = Lane::kCross;
    step.peer = call.peer;
    const Slice slice{sends ? kInputBuffer : kOutputBuffer, static_cast<int>(side.blocks.size()), {0, 1}, {1, 1}};
    (sends ? step.src : step.dst).push_back(slice);
    section.steps.push_back(std::move(step));
    side.blocks.push_back(from.blocks[0]);
    side.counts.push_back(bytes);
    section.chunk = std::max(section.chunk, bytes);
    auto& counter = (sends ? sends_ : receives_)[{call.peer, call.tag}];
    e->tags.push_back({config_.group, ++counter, call.tag, 0, kMessageChannel});
  }
  for (Call& call : calls) {
    if (call.unstage) e->finish.push_back(std::move(call.unstage));
    if (call.staging) e->staging.push_back(std::move(call.staging));
  }
  whole.count = section.chunk;
  plan->kind = whole.kind();
  plan->sections.push_back(std::move(section));
  e->plan = std::move(plan);
  e->call = std::move(whole);
  return e;
}

std::shared_ptr<Work> Communicator::issue_batch(std::vector<Call> calls, bool async, const Keep& keep,
                                                const Interrupted& interrupted) {
  std::shared_ptr<Execution> e;
  std::shared_ptr<void> staged;
  const UserStream stream = calls[0].stream;
  const std::string operation = calls.size() == 1 ? std::string(calls[0].row->name) : "batch";
  require_not_inherited(operation);
  {
    std::scoped_lock turn(issue_mutex_);
    require_usable(operation);
    if (config_.device) {
      // A library has no tags: tagged messages go over the link.
      const auto library_has = [this](const Call& c) { return c.tag == 0 && native_messages(c.dtype); };
      const bool by_library = std::all_of(calls.begin(), calls.end(), library_has);
      const auto tagged = [](const Call& c) { return c.tag != 0; };
      if (std::any_of(calls.begin(), calls.end(), tagged) && std::any_of(calls.begin(), calls.end(), library_has)) {
        throw Error(Code::kUnsupportedOperation,
                    where(operation) +
                        ": messages with a tag and without cannot be in one batch on a device whose "
                        "library has messages, but no tags; issue them apart");
      }
      if (by_library) return issue_library_messages(calls, async, keep, interrupted);
      staged = stage_messages(calls);
    }
    e = message_execution(std::move(calls));
  }
  if (async) {
    e->work = std::make_shared<Work>(operation, e->call.deadline);
    e->work->keep_alive(kept(keep), shared_from_this());
    auto work = e->work;
    if (staged) e->may_start = [device = config_.device, staged] { return device->reached(staged.get()); };
    executor_->enqueue_messages(e);
    follow_on_stream(work, stream, true);
    return work;
  }
  try {
    if (staged) await_staged(staged.get(), e->call.deadline, interrupted);
    executor_->run_messages(e, interrupted);
  } catch (const InterruptedWait&) {
    fail(Error(Code::kAborted, member(rank()) + " was interrupted in " + operation), true);
    throw;
  } catch (const Error& error) {
    if (error.code() == Code::kMismatch && !failure()) throw located(error, operation);
    throw located(fail(error), operation);
  } catch (const std::bad_alloc&) {
    throw located(fail(current_error()), operation);
  }
  return nullptr;
}

int Communicator::find_sender(uint32_t tag, Deadline deadline, const Interrupted& interrupted) {
  const std::string operation = "recv from any rank";
  if (config_.device && native_messages(POLYCCL_DTYPE_UINT8)) {
    throw Error(
        Code::kUnsupportedOperation,
        where(operation) + ": messages go by the device's library, which cannot tell; name the rank that sends");
  }
  require_usable(operation);
  int found = -1;
  const auto come = [&] {
    std::scoped_lock lock(messages_mutex_);
    for (int peer = 0; peer < size() && found < 0; ++peer) {
      const auto received = receives_.find({peer, tag});
      const uint64_t next = received == receives_.end() ? 1 : received->second + 1;
      if (group_->has_come(peer, {config_.group, next, tag, 0, kMessageChannel})) found = peer;
    }
    return found >= 0 || failure() || finalized_;
  };
  const auto stop = [&] { return finalized_ || (interrupted && interrupted()); };
  const bool in_time = Link::instance().wait(come, deadline, stop);
  if (found >= 0) return found;
  require_usable(operation);
  if (in_time || !expired(deadline)) throw InterruptedWait();
  throw Error(Code::kTimeout, where(operation) + ": nothing came with tag " + std::to_string(tag));
}

// ---- legs of a bridge's plans --------------------------------------------------------------------------------------

void Communicator::local(Lane lane, const Call& call, const Interrupted& interrupted) {
  config_.island[lane == Lane::kPost ? 1 : 0]->run_leg(call, interrupted);
}

// Run one collective leg, as the only caller of this communicator.
void Communicator::run_leg(Call call, const Interrupted& interrupted) {
  if (auto error = failure()) throw *error;
  if (runs_native(call)) return run_native(call, interrupted);
  const uint64_t bytes = call.count * call.element();
  spread(call.input, call.row->input, config_.members.size(), bytes);
  spread(call.output, call.row->output, config_.members.size(), bytes);
  auto e = make_execution(std::move(call));
  e->plan = plan_for(e->call);
  executor_->run(e, interrupted);
}

void Communicator::exchange(Lane lane, const std::vector<Message>& messages, Dtype dtype, Deadline deadline,
                            const Interrupted& interrupted) {
  if (config_.native) return run_messages(messages, dtype, deadline, interrupted);
  auto inside = messages;
  for (Message& m : inside) m.peer = island_rank_[static_cast<size_t>(m.peer)];
  config_.island[lane == Lane::kPost ? 1 : 0]->run_messages(inside, dtype, deadline, interrupted);
}

// A fused group of messages among the ranks of this communicator: by its library, else over the link.
void Communicator::run_messages(const std::vector<Message>& messages, Dtype dtype, Deadline deadline,
                                const Interrupted& interrupted) {
  std::vector<Call> calls;
  for (const Message& m : messages) {
    Call call;
    call.row = find_operation(m.sends ? POLYCCL_KIND_SEND : POLYCCL_KIND_RECV);
    call.dtype = dtype;
    call.peer = m.peer;
    call.count = m.count;
    (m.sends ? call.input : call.output).blocks = {m.memory};
    call.deadline = deadline;
    calls.push_back(std::move(call));
  }
  if (!native_messages(dtype)) {
    auto e = message_execution(std::move(calls));
    for (size_t i = 0; i < messages.size(); ++i) {
      const Message& m = messages[i];
      const bool up = m.sends ? m.peer > rank() : m.peer < rank();
      e->tags[i].channel = up ? kLegUpChannel : kLegDownChannel;
      e->fingerprints.push_back(m.fingerprint);
    }
    return executor_->run_messages(e, interrupted);
  }
  std::vector<polyccl_op> ops;
  for (const Call& call : calls) ops.push_back(library_op(call));
  run_library(std::move(ops), "a group of messages", interrupted);
}

// ---- the end -------------------------------------------------------------------------------------------------------

void Communicator::announce_refusal() {
  if (!config_.check || size() == 1 || broken_ || finalized_ || inherited()) return;
  std::scoped_lock turn(issue_mutex_);
  auto e = std::make_shared<Execution>();
  e->call.row = find_operation(POLYCCL_KIND_BARRIER);
  e->call.deadline = timeout_ns_ == 0 ? 0 : now_ns() + timeout_ns_;
  e->sequence = ++sequence_;  // as on the ranks that made the call
  e->work = std::make_shared<Work>("a refused call", e->call.deadline);
  ++agreements_;
  e->prepare = [this, deadline = e->call.deadline] {
    const Countdown over(agreements_);
    Fingerprint refused;
    refused.refused = 1;
    agreement_->agree(refused, Agreement::Scope::kAll, deadline, {});
  };
  executor_->enqueue(std::move(e));
}

void Communicator::finalize(Deadline deadline, const Interrupted& interrupted) {
  require_not_inherited("finalize");
  std::scoped_lock turn(issue_mutex_);
  if (finalized_.exchange(true)) throw Error(Code::kInvalidArgument, where("finalize") + ": it was finalized already");
  const auto quiet = [this] { return executor_->idle() || failure().has_value(); };
  if (!Link::instance().wait(quiet, deadline, interrupted) && !expired(deadline)) throw InterruptedWait();
}

}  // namespace polyccl
