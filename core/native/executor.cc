#include "executor.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <system_error>
#include <utility>

#include "call_thread.h"
#include "closing.h"
#include "cross_lane.h"
#include "fingerprint.h"
#include "pieces.h"
#include "reduce.h"

namespace polyccl {
namespace {

constexpr size_t kAlign = 64;

Factor resolve(const Call& call, FactorKind kind, int ranks) {
  Factor factor;
  if (kind == FactorKind::kAverage) {
    factor.kind = Factor::Kind::kAverage;
    factor.ranks = static_cast<size_t>(ranks);
  } else if (kind == FactorKind::kCall) {
    factor.kind = Factor::Kind::kValue;
    factor.value = call.factor.data();
  }
  return factor;
}

// The sizes of a collective leg follow from its slices: `whole` pieces divide into one block for each rank of the
// island.
Call local_call(const Iteration& it, const Step& step, Reduction reduction) {
  const Call& outer = it.execution->call;
  Call call;
  call.row = find_operation(step.kind);
  call.dtype = outer.dtype;
  call.reduction = call.row->reduces ? reduction : Reduction{POLYCCL_REDUCTION_NONE};
  call.peer = step.root;
  call.deadline = outer.deadline;
  call.within = it.execution->fingerprint;
  if (step.kind == POLYCCL_KIND_BARRIER) {
    call.count = 1;  // a token
    return call;
  }
  Piece src{}, dst{};
  if (!step.src.empty()) src = resolve(it, step.src[0]);
  if (!step.dst.empty()) dst = resolve(it, step.dst[0]);
  const bool splits_input = call.row->input == Shape::kBlocks;
  call.count = splits_input ? dst.count : (step.src.empty() ? dst.count : src.count);
  if (!step.src.empty()) call.input.blocks = {src.memory};
  if (!step.dst.empty()) call.output.blocks = {dst.memory};
  return call;
}

uint64_t round_up(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// How an operation is cut: counts of iterations, and where its scratch buffers lie in a slot. And what tells its
// messages from another operation's.
void cut(Execution& e) {
  if (!e.plan) return;
  if (e.tags.empty()) e.fingerprint = Fingerprint::of(e.call).hash(e.call.within);
  const Section& main = e.plan->sections[0];
  const uint64_t tail = e.plan->sections.size() > 1 ? e.call.count % main.unit : 0;
  const uint64_t count = e.call.count - tail;
  const uint64_t length = main.chunk == 0 ? count : std::min(count, main.chunk);
  e.main_iterations = count == 0 ? 0 : (count + length - 1) / length;
  e.iterations = e.main_iterations + (tail != 0 ? 1 : 0);
  for (size_t i = 0; i < e.plan->sections.size(); ++i) {
    const Section& section = e.plan->sections[i];
    const uint64_t capacity = section.ragged ? section.chunk : (i == 0 ? length : tail);
    std::array<size_t, 2> end{};
    for (const Scratch& scratch : section.scratch) {
      size_t& offset = end[scratch.device ? 1 : 0];
      e.scratch[i].push_back(offset);
      offset += round_up((scratch.size.of(capacity) + 1) * e.call.element());
    }
    for (size_t m = 0; m < end.size(); ++m) e.scratch_bytes[m] = std::max(e.scratch_bytes[m], end[m]);
  }
}

Error timed_out(const Execution& e, const std::string& waiting_for) {
  return Error(Code::kTimeout, "timed out" + (waiting_for.empty() ? "" : " waiting for " + waiting_for) +
                                   "; see whether all ranks called " + std::string(e.call.row->name) +
                                   " in the same order, or give a longer timeout");
}

}  // namespace

bool Iteration::ready(const Step& step) const {
  return std::all_of(step.deps.begin(), step.deps.end(),
                     [this](uint32_t d) { return done[d].load(std::memory_order_acquire); });
}

Executor::Executor(Legs& legs, LinkGroup& group, const Device* device, uint64_t tag_group, int rank, int size,
                   int window, Trace& trace)
    : legs_(legs),
      group_(group),
      device_(device),
      tag_group_(tag_group),
      rank_(rank),
      size_(size),
      window_(window),
      trace_(trace) {
  slots_.resize(static_cast<size_t>(window));
  for (int i = window; i-- > 0;) free_slots_.push_back(i);
}

void Executor::stop() {
  {
    std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  wake();
  for (auto& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

Executor::~Executor() {
  stop();
  if (legs_.memory_in_use()) keep_forever(std::make_shared<decltype(slots_)>(std::move(slots_)));
}

bool Executor::idle() const { return in_flight_.load(std::memory_order_acquire) == 0; }

bool Executor::runs_alone(const Plan& plan, const Call& call) {
  const Section& main = plan.sections[0];
  if (main.chunk == 0 || call.count <= main.chunk) return true;
  return !main.uses(Lane::kPre) && !main.uses(Lane::kPost);
}

std::shared_ptr<Iteration> Executor::make_iteration(const std::shared_ptr<Execution>& e, uint64_t index, int slot) {
  const bool tail = index >= e->main_iterations;
  const Section& section = e->plan->sections[tail ? 1 : 0];
  auto it = std::make_shared<Iteration>(e, section);
  it->scratch_offsets = &e->scratch[tail ? 1 : 0];
  it->index = static_cast<uint32_t>(index);
  it->slot = slot;
  it->left.store(static_cast<uint32_t>(section.steps.size()), std::memory_order_relaxed);
  const Section& main = e->plan->sections[0];
  const uint64_t rest = e->plan->sections.size() > 1 ? e->call.count % main.unit : 0;
  if (tail) {
    it->start = e->call.count - rest;
    it->length = rest;
  } else {
    it->start = index * main.chunk;
    it->length = main.chunk == 0 ? e->call.count - rest : std::min(main.chunk, e->call.count - rest - it->start);
  }
  if (slot >= 0) {
    Slot& memory = slots_[static_cast<size_t>(slot)];
    it->scratch = {device_ == nullptr ? memory.host.data() : static_cast<char*>(memory.pinned.get()),
                   static_cast<char*>(memory.device.get())};
  }
  return it;
}

void Executor::reserve(int slot, const std::array<size_t, 2>& bytes) {
  Slot& memory = slots_[static_cast<size_t>(slot)];
  const auto grow = [&](size_t kind, Device::Handle& handle, auto allocate) {
    if (memory.bytes[kind] >= bytes[kind]) return;
    handle = (device_->*allocate)(bytes[kind]);
    memory.bytes[kind] = bytes[kind];
  };
  try {
    if (device_ == nullptr) {
      if (memory.host.size() < bytes[0]) memory.host.resize(bytes[0]);
      return;
    }
    grow(0, memory.pinned, &Device::pinned);
    grow(1, memory.device, &Device::memory);
  } catch (const std::exception& error) {
    throw Error(Code::kInternal, "there is no memory for scratch of " + std::to_string(bytes[0] + bytes[1]) +
                                     " bytes (" + error.what() +
                                     "); free some, or let less be on the way at once by the hint chunk_bytes");
  }
}

void Executor::trace_step(const Iteration& it, const Step& step, uint64_t bytes, int64_t begin) const {
  if (begin == 0) return;
  trace_.add({it.execution->sequence, it.index, step.lane, step.verb, step.kind, step.peer, bytes, begin, now_ns()});
}

void Executor::run_step(Iteration& it, const Step& step, Lane lane) {
  const Execution& e = *it.execution;
  const Call& call = e.call;
  const int64_t begin = trace_.on() ? now_ns() : 0;
  uint64_t count = 0;
  switch (step.verb) {
    case Verb::kLocal: {
      Call leg = local_call(it, step, e.plan->reduction);
      count = leg.count;
      if (leg.count != 0) legs_.local(lane, leg, e.interrupted);
      break;
    }
    case Verb::kCopy:
      count = run_copies(it, step, lane);
      break;
    case Verb::kReduce: {
      std::vector<const void*> operands;
      operands.reserve(step.src.size());
      for (const Slice& s : step.src) operands.push_back(resolve(it, s).memory);
      const Piece to = resolve(it, step.dst[0]);
      count = to.count;
      reduce(to.memory, operands, to.count, call.dtype, e.plan->reduction, resolve(call, step.factor, size_));
      break;
    }
    case Verb::kScale: {
      const Piece from = resolve(it, step.src[0]), to = resolve(it, step.dst[0]);
      count = to.count;
      scale(to.memory, from.memory, to.count, call.dtype, resolve(call, step.factor, size_));
      break;
    }
    case Verb::kSend:
    case Verb::kRecv:
      break;  // messages go in groups or over the link
  }
  trace_step(it, step, count * call.element(), begin);
}

// Copies of a step: the host's at once, those to and from the device together, until they are there. Returns the
// elements.
uint64_t Executor::run_copies(Iteration& it, const Step& step, Lane lane) {
  const size_t element = it.execution->call.element();
  auto& stream = streams_[static_cast<size_t>(lane)];
  uint64_t count = 0;
  bool enqueued = false;
  for (size_t i = 0; i < step.src.size(); ++i) {
    const Piece from = resolve(it, step.src[i]), to = resolve(it, step.dst[i]);
    count += from.count;
    if (from.count == 0 || from.memory == to.memory) continue;
    if (device_ == nullptr || (!from.device && !to.device)) {
      std::memcpy(to.memory, from.memory, from.count * element);
      continue;
    }
    if (!stream) stream = device_->stream();
    device_->copy(stream.get(), to.memory, from.memory, from.count * element);
    enqueued = true;
  }
  const auto ended = [this] { return legs_.failure().has_value(); };
  if (enqueued) device_->finish(stream.get(), it.execution->call.deadline, ended);
  return count;
}

void Executor::run_group(Iteration& it, Lane lane, const std::vector<uint32_t>& steps) {
  const Execution& e = *it.execution;
  std::vector<Message> messages;
  for (uint32_t position : steps) {
    const Step& step = it.section->steps[position];
    const bool sends = step.verb == Verb::kSend;
    const Piece piece = resolve(it, sends ? step.src[0] : step.dst[0]);
    if (piece.count == 0) continue;
    const uint64_t fingerprint = pair_fingerprint(e.fingerprint, e.call, rank_, step.peer);
    messages.push_back({sends, step.peer, piece.memory, piece.count, fingerprint});
  }
  if (!messages.empty()) legs_.exchange(lane, messages, e.call.dtype, e.call.deadline, e.interrupted);
  for (uint32_t position : steps) mark(it, position);
}

// The steps of a local lane, in order; messages that follow one another and do not depend on one another go as one
// group.
void Executor::run_steps(Iteration& it, Lane lane) {
  std::vector<uint32_t> group;
  const auto flush = [&] {
    if (!group.empty()) run_group(it, lane, std::exchange(group, {}));
  };
  const auto& steps = it.section->steps;
  for (uint32_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    if (step.lane != lane) continue;
    const bool joins = is_message(step) && std::none_of(step.deps.begin(), step.deps.end(), [&](uint32_t d) {
                         return std::find(group.begin(), group.end(), d) != group.end();
                       });
    if (!joins) flush();
    wait_for(it, step);
    if (is_message(step)) {
      group.push_back(i);
    } else {
      run_step(it, step, lane);
      mark(it, i);
    }
  }
  flush();
}

// A plan of messages, on a library that has send and recv: in the order of the plan up to the first step that must wait, and all messages on
// the way as one fused group. So the groups of two ranks that exchange meet, and none holds a message of a later phase.
void Executor::run_grouped(Iteration& it) {
  const auto& steps = it.section->steps;
  while (it.left != 0) {
    std::vector<uint32_t> group;
    for (uint32_t i = 0; i < steps.size(); ++i) {
      if (it.done[i]) continue;
      if (!it.ready(steps[i])) break;
      if (is_message(steps[i])) {
        group.push_back(i);
      } else {
        run_step(it, steps[i], steps[i].lane);
        mark(it, i);
      }
    }
    run_group(it, Lane::kCross, group);
  }
}

void Executor::drive(CrossLane& cross, const Interrupted& interrupted) {
  if (cross.empty()) return;
  const Execution* urgent = cross.most_urgent();
  const Deadline deadline = urgent == nullptr ? 0 : urgent->call.deadline;
  const auto ready = [&] { return cross.something_landed() || legs_.failure().has_value(); };
  if (!Link::instance().wait(ready, deadline, interrupted)) {
    if (expired(deadline)) throw timed_out(*urgent, cross.outstanding());
    throw InterruptedWait();
  }
  if (auto failure = legs_.failure()) throw *failure;
}

// No local legs: up to `window` iterations in flight on this thread.
void Executor::run_overlapped(const std::shared_ptr<Execution>& e, const Interrupted& interrupted) {
  CrossLane cross(*this);
  std::deque<std::shared_ptr<Iteration>> open;
  uint64_t next = 0;
  while (next < e->iterations || !open.empty()) {
    while (next < e->iterations && open.size() < static_cast<size_t>(window_)) {
      const int slot = static_cast<int>(next % static_cast<uint64_t>(window_));
      reserve(slot, e->scratch_bytes);
      open.push_back(make_iteration(e, next, slot));
      run_steps(*open.back(), Lane::kPre);
      cross.add(open.back());
      ++next;
    }
    cross.advance();
    while (!open.empty() && open.front()->left == 0) open.pop_front();
    if (!open.empty() && (open.size() == static_cast<size_t>(window_) || next == e->iterations))
      drive(cross, interrupted);
  }
}

void Executor::run(const std::shared_ptr<Execution>& e, const Interrupted& interrupted) {
  cut(*e);
  e->interrupted = interrupted;
  if (e->prepare) e->prepare();
  e->prepared = true;
  if (e->iterations == 0) return;
  reserve(0, e->scratch_bytes);
  if (legs_.native_messages(e->call.dtype)) {
    for (uint64_t i = 0; i < e->iterations; ++i) run_grouped(*make_iteration(e, i, 0));
    return;
  }
  const Section& main = e->plan->sections[0];
  if (!main.uses(Lane::kPost) && e->iterations > 1) return run_overlapped(e, interrupted);
  for (uint64_t i = 0; i < e->iterations; ++i) {
    auto it = make_iteration(e, i, 0);
    CrossLane cross(*this);
    cross.add(it);
    cross.advance();  // receives are posted ahead
    run_steps(*it, Lane::kPre);
    for (cross.advance(); !cross.empty(); cross.advance()) drive(cross, interrupted);
    run_steps(*it, Lane::kPost);
  }
}

void Executor::run_messages(const std::shared_ptr<Execution>& e, const Interrupted& interrupted) {
  cut(*e);
  auto it = make_iteration(e, 0, -1);
  CrossLane cross(*this);
  cross.add(it);
  for (cross.advance(); !cross.empty(); cross.advance()) drive(cross, interrupted);
  if (e->error) throw *e->error;
  for (const auto& finish : e->finish) finish();
}

void Executor::enqueue_messages(std::shared_ptr<Execution> e) {
  cut(*e);
  start_lanes(*e);
  in_flight_.fetch_add(1, std::memory_order_acq_rel);
  std::unique_lock lock(mutex_);
  lanes_[static_cast<size_t>(Lane::kCross)].push_back(make_iteration(e, 0, -1));
  lock.unlock();
  signal();
}

void Executor::signal() {
  signals_.fetch_add(1, std::memory_order_acq_rel);
  { std::scoped_lock lock(mutex_); }  // a lane between its look and its sleep must not miss this
  changed_.notify_all();
  Link::instance().wake();
}

void Executor::wake() { signal(); }

void Executor::mark(Iteration& it, uint32_t step) {
  it.done[step].store(true, std::memory_order_release);
  it.left.fetch_sub(1, std::memory_order_acq_rel);
  if (it.execution->work) signal();
}

bool Executor::cross_done(const Iteration& it) {
  const auto& steps = it.section->steps;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps[i].lane == Lane::kCross && !it.done[i]) return false;
  }
  return true;
}

void Executor::skip(Iteration& it, Lane lane) {
  const auto& steps = it.section->steps;
  for (uint32_t i = 0; i < steps.size(); ++i) {
    if (steps[i].lane == lane && !it.done[i]) mark(it, i);
  }
}

// Wait, in a lane's thread, for the steps that a step depends on.
void Executor::wait_for(const Iteration& it, const Step& step) {
  if (it.ready(step)) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return it.ready(step) || stop_ || legs_.failure().has_value(); });
  if (it.ready(step)) return;
  lock.unlock();
  if (auto failure = legs_.failure()) throw *failure;
  throw Error(Code::kAborted, "the communicator was destroyed");
}

void Executor::enqueue(std::shared_ptr<Execution> e) {
  cut(*e);
  start_lanes(*e);
  in_flight_.fetch_add(1, std::memory_order_acq_rel);
  std::unique_lock lock(mutex_);
  queue_.push_back(std::move(e));
  changed_.notify_all();
}

// Starts the lanes that an operation needs, on its caller's thread, whom it concerns where the system gives no more.
void Executor::start_lanes(const Execution& e) {
  const auto needs = [&e](Lane lane) {
    if (lane == Lane::kPre && e.tags.empty()) return true;  // messages have nothing to prepare
    return e.plan && std::any_of(e.plan->sections.begin(), e.plan->sections.end(),
                                 [lane](const Section& section) { return section.uses(lane); });
  };
  try {
    const std::scoped_lock lock(mutex_);
    for (int number = 0; number < kLanes; ++number) {
      const auto lane = static_cast<Lane>(number);
      auto& thread = threads_[static_cast<size_t>(number)];
      if (thread.joinable() || !needs(lane)) continue;
      thread = std::thread([this, lane] {
        mark_worker_thread();
        lane == Lane::kCross ? cross_lane() : local_lane(lane);
      });
    }
  } catch (const std::system_error& error) {
    throw legs_.fail(Error(Code::kInternal, std::string(e.call.row->name) + ": the system starts no more threads (" +
                                                error.what() + "); raise its limits of threads and memory"));
  }
}

// Runs what must precede the first operation in the queue: in lane pre, so in the same order on all ranks.
void Executor::prepare_front(std::unique_lock<std::mutex>& lock) {
  auto e = queue_.front();
  lock.unlock();
  std::optional<Error> error = legs_.failure();
  try {
    if (!error && e->prepare) e->prepare();
  } catch (...) {
    error = current_error();
  }
  lock.lock();
  e->prepared = true;
  if (error || e->iterations == 0) {
    queue_.pop_front();
    lock.unlock();
    in_flight_.fetch_sub(1, std::memory_order_acq_rel);
    complete(*e, error);
    lock.lock();
  }
  admit(lock);
}

// Gives slots to the iterations that wait for one. Once the communicator has failed they need no memory: lanes skip
// their steps.
void Executor::admit(std::unique_lock<std::mutex>& lock) {
  while (!queue_.empty() && queue_.front()->prepared && !free_slots_.empty()) {
    auto& e = queue_.front();
    const int slot = free_slots_.back();
    if (!legs_.failure()) {
      try {
        reserve(slot, e->scratch_bytes);
      } catch (const Error& error) {
        lock.unlock();
        legs_.fail(error);
        lock.lock();
        continue;
      }
    }
    free_slots_.pop_back();
    auto it = make_iteration(e, e->admitted, slot);
    const bool nothing = it->left.load(std::memory_order_relaxed) == 0;  // to do, as for a rank alone
    for (int lane = 0; lane < kLanes; ++lane) {
      // Every lane that has to do with it sees it, and one does where there is nothing: the last one to leave it retires it.
      const bool sees = nothing ? static_cast<Lane>(lane) == Lane::kPre : it->section->uses(static_cast<Lane>(lane));
      if (!sees) continue;
      lanes_[static_cast<size_t>(lane)].push_back(it);
    }
    if (++e->admitted == e->iterations) queue_.pop_front();
  }
  signals_.fetch_add(1, std::memory_order_acq_rel);
  changed_.notify_all();
  Link::instance().wake();
}

// Frees the slot of an iteration whose steps are all done. Called by every lane that leaves it; the last one acts.
void Executor::retire(const std::shared_ptr<Iteration>& it) {
  if (it->left.load(std::memory_order_acquire) != 0) return;
  std::unique_lock lock(mutex_);
  if (std::exchange(it->retired, true)) return;
  if (it->slot >= 0) free_slots_.push_back(it->slot);
  auto& e = *it->execution;
  const bool whole = ++e.finished == e.iterations;
  lock.unlock();
  if (whole) {
    if (!e.error) e.error = legs_.failure();
    try {
      for (const auto& finish : e.finish) {
        if (!e.error) finish();
      }
    } catch (...) {
      e.error = legs_.fail(current_error());
    }
    in_flight_.fetch_sub(1, std::memory_order_acq_rel);
    complete(e, e.error);
  }
  lock.lock();
  admit(lock);
}

void Executor::complete(Execution& e, std::optional<Error> error) {
  if (error && legs_.memory_in_use()) e.work->keep_forever();
  e.work->complete(std::move(error));
}

void Executor::local_lane(Lane lane) {
  auto& inbox = lanes_[static_cast<size_t>(lane)];
  std::unique_lock lock(mutex_);
  while (true) {
    const auto must_prepare = [&] { return lane == Lane::kPre && !queue_.empty() && !queue_.front()->prepared; };
    changed_.wait(lock, [&] { return may_end() || !inbox.empty() || must_prepare(); });
    if (!inbox.empty()) {
      auto it = std::move(inbox.front());
      inbox.pop_front();
      lock.unlock();
      try {
        if (!legs_.failure()) run_steps(*it, lane);
      } catch (...) {
        legs_.fail(current_error());
      }
      if (legs_.failure()) {
        legs_.settle();
        skip(*it, lane);
      }
      retire(it);
      lock.lock();
    } else if (must_prepare()) {
      prepare_front(lock);
    } else if (may_end()) {
      return;
    }
  }
}

void Executor::cross_lane() {
  auto& inbox = lanes_[static_cast<size_t>(Lane::kCross)];
  CrossLane cross(*this);
  std::vector<std::shared_ptr<Iteration>> open;
  while (true) {
    const uint64_t seen = signals_.load(std::memory_order_acquire);
    {
      std::unique_lock lock(mutex_);
      if (open.empty()) changed_.wait(lock, [&] { return may_end() || !inbox.empty(); });
      if (open.empty() && inbox.empty()) return;
      for (auto& it : std::exchange(inbox, {})) {
        cross.add(it);
        open.push_back(std::move(it));
      }
    }
    try {
      if (!legs_.failure()) cross.advance();
      std::erase_if(open, [&](const auto& it) {
        retire(it);
        return cross_done(*it);
      });
      const Execution* urgent = cross.most_urgent();
      const Deadline deadline = urgent == nullptr ? 0 : urgent->call.deadline;
      const auto ready = [&] { return cross.something_landed() || signals_.load(std::memory_order_acquire) != seen; };
      constexpr int64_t kLook = 50'000;  // nanoseconds
      const int64_t look = cross.holds() ? now_ns() + kLook : 0;
      const Deadline until = look != 0 && (deadline == 0 || look < deadline) ? look : deadline;
      if (!cross.empty() && !legs_.failure() && !Link::instance().wait(ready, until) && until == deadline) {
        throw timed_out(*urgent, cross.outstanding());
      }
    } catch (...) {
      legs_.fail(current_error());
    }
    if (legs_.failure()) {
      cross.skip();
      for (auto& it : std::exchange(open, {})) retire(it);
    }
  }
}

}  // namespace polyccl
