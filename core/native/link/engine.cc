#include "engine.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "interface.h"
#include "session.h"

namespace polyccl {
namespace {

constexpr size_t kMaxEnded = 4096;          // ended groups that are remembered, to drop what still comes for them
constexpr size_t kMaxEarlyFailures = 1024;  // failures of groups that may yet be created
constexpr int kEvents = 64;

// The caller's handle of a group.
class GroupHandle final : public LinkGroup {
 public:
  GroupHandle(Engine& engine, Group group) : engine_(engine), group_(std::move(group)) {}
  ~GroupHandle() override { engine_.end_group(group_); }
  Group& group() { return group_; }

  std::shared_ptr<LinkRequest> send(int peer, const Tag& tag, const void* memory, size_t bytes,
                                    uint64_t fingerprint) override {
    // A send's memory is only ever read; one type of request serves both directions.
    return engine_.post(group_, true, peer, tag, static_cast<std::byte*>(const_cast<void*>(memory)), bytes,
                        fingerprint);
  }
  std::shared_ptr<LinkRequest> recv(int peer, const Tag& tag, void* memory, size_t bytes,
                                    uint64_t fingerprint) override {
    return engine_.post(group_, false, peer, tag, static_cast<std::byte*>(memory), bytes, fingerprint);
  }
  bool has_come(int peer, const Tag& tag) override { return engine_.has_come(group_, peer, tag); }
  void fail(const Error& error, bool tell) override { engine_.fail(group_, error, tell); }
  std::optional<Error> failure() const override { return engine_.failure(group_); }
  std::vector<int> departed() const override { return engine_.departed(group_); }
  void on_failure(std::function<void(const Error&)> callback) override {
    engine_.on_failure(group_, std::move(callback));
  }
  void on_late_mismatch(std::function<void(int, const Tag&, const Error&)> callback) override {
    engine_.on_late_mismatch(group_, std::move(callback));
  }
  void connect(std::span<const int> peers) override { engine_.connect(group_, peers); }

 private:
  Engine& engine_;
  Group group_;
};

ProcessId draw_process_id() {
  const std::string bytes = random_bytes(16);
  ProcessId id;
  std::memcpy(&id.hi, bytes.data(), 8);
  std::memcpy(&id.lo, bytes.data() + 8, 8);
  return id;
}

}  // namespace

// ---- Start and end ----

Engine::Engine() : self_{draw_process_id(), choose_interface().address, 0}, self_party_(*this, self_.process) {
  epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  timer_ = Fd(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!epoll_ || !timer_) throw Error(Code::kInternal, "cannot start the link: " + error_text(errno));
  listener_ = listen_on(self_.host, &self_.port);
  watch(listener_.get(), kListenerKey, EPOLLIN);
  watch(timer_.get(), kTimerKey, EPOLLIN);
  driver_ = std::make_unique<Driver>(epoll_.get(), kWakeKey, [this](int timeout_ms) { return pump(timeout_ms); });
  driver_->start();
}

void Engine::shutdown() {
  if (dead_) return;
  {
    Session session(*this);
    if (std::exchange(closed_, true)) return;
    const Error error(Code::kAborted, "the process is ending; its communicators end with it");
    const auto groups = groups_;
    for (const auto& [id, group] : groups) fail_locked(*group, error);
    listener_.reset();
    greetings_.clear();
    for (auto& [key, entry] : connections_) entry.first->close_orderly();
  }
  driver_->stop();
  // Let the peers read the goodbye before the sockets close: one that is closed with bytes unread would be reset.
  const int64_t until = now_ns() + kGoodbyeNs;
  bool shut = false;
  while (now_ns() < until) {
    {
      Session session(*this);
      if (connections_.empty()) return;
      const auto quiet = [](const auto& entry) { return entry.second.first->quiet(); };
      if (!shut && std::all_of(connections_.begin(), connections_.end(), quiet)) {
        shut = true;
        for (auto& [key, entry] : connections_) entry.first->shut_down_writing();
      }
    }
    pump(10);
  }
}

void Engine::after_fork_in_child() {
  dead_ = true;
  // Only descriptors are closed: the connections themselves are the parent's, and go on.
  connections_.clear();
  greetings_.clear();
  listener_.reset();
  timer_.reset();
  driver_->abandon();
  epoll_.reset();
  mutex_.unlock();
}

void Engine::check_alive() const {
  if (dead_) {
    throw Error(Code::kInternal,
                "this process was forked from one that uses PolyCCL, and communicators do not survive fork(). Create "
                "communicators in "
                "the child of a process that has none yet, or start processes by \"spawn\" or \"forkserver\".");
  }
}

// ---- Events ----

void Engine::watch(int fd, uint64_t key, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0 &&
      epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0) {
    throw Error(Code::kInternal, "cannot watch a socket: " + error_text(errno));
  }
}

bool Engine::pump(int timeout_ms) {
  epoll_event events[kEvents];
  const int count = epoll_wait(epoll_.get(), events, kEvents, timeout_ms);
  if (timeout_ms != 0 && driver_) driver_->awake();
  if (count <= 0) return false;
  Session session(*this);
  for (int i = 0; i < count; ++i) dispatch(events[i].data.u64, events[i].events);
  return true;
}

void Engine::dispatch(uint64_t key, uint32_t events) {
  if (key == kListenerKey) return accept_all();
  if (key == kWakeKey) return driver_->on_wake_event();
  if (key == kTimerKey) return run_timers();
  if (greetings_.contains(key)) return greet(key);
  const auto it = connections_.find(key);
  if (it == connections_.end()) return;  // gone since the poller spoke
  Connection& connection = *it->second.first;
  if ((events & EPOLLOUT) != 0) connection.flush();
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) connection.receive();
  if (connection.broken() != 0) drop_connection(key, connection.why());
}

bool Engine::wait(const std::function<bool()>& ready, Deadline deadline, const std::function<bool()>& interrupted) {
  check_alive();
  return driver_->wait(ready, deadline, interrupted);
}

void Engine::wake() {
  check_alive();
  driver_->notify();
}

void Engine::progress() {
  check_alive();
  driver_->driven();
  pump(0);
}

// ---- What users ask of the link ----

LinkAddress Engine::address() const {
  check_alive();
  return self_;
}

void Engine::add_token(const std::string& token) {
  Session session(*this);
  tokens_.emplace(token_name(token), token);
}

void Engine::set_connect_timeout(int64_t ns) {
  Session session(*this);
  connect_timeout_ = ns;
}

LinkCounters Engine::count(const Known& known) const {
  LinkCounters sum = known.closed;
  for (const auto& [key, entry] : connections_) {
    if (entry.second != &known) continue;
    sum.bytes_sent += entry.first->payload_sent;
    sum.bytes_received += entry.first->payload_received;
    sum.wire_bytes_sent += entry.first->wire_sent;
    sum.wire_bytes_received += entry.first->wire_received;
  }
  return sum;
}

LinkCounters Engine::counters() const {
  check_alive();
  const std::lock_guard lock(mutex_);
  LinkCounters sum;
  for (const auto& [id, known] : peers_) {
    const LinkCounters one = count(known);
    sum.bytes_sent += one.bytes_sent;
    sum.bytes_received += one.bytes_received;
    sum.wire_bytes_sent += one.wire_bytes_sent;
    sum.wire_bytes_received += one.wire_bytes_received;
  }
  return sum;
}

LinkCounters Engine::counters(const ProcessId& peer) const {
  check_alive();
  const std::lock_guard lock(mutex_);
  const auto it = peers_.find(peer);
  return it == peers_.end() ? LinkCounters{} : count(it->second);
}

// ---- Groups ----

std::shared_ptr<LinkGroup> Engine::create_group(uint64_t id, int rank, std::vector<LinkAddress> members,
                                                std::vector<std::string> names, const std::string& token) {
  Group group;
  group.id = id;
  group.rank = rank;
  group.members = std::move(members);
  group.names = std::move(names);
  group.token = token;
  check_alive();
  if (rank < 0 || static_cast<size_t>(rank) >= group.members.size() || group.names.size() != group.members.size()) {
    throw Error(Code::kInvalidArgument, group_text(id) + ": rank " + std::to_string(rank) + " with " +
                                            std::to_string(group.members.size()) + " members and " +
                                            std::to_string(group.names.size()) + " names");
  }
  if (group.members[static_cast<size_t>(rank)].process != self_.process) {
    throw Error(Code::kInvalidArgument, group_text(id) + ": member " + std::to_string(rank) + " is not this process");
  }
  Session session(*this);
  if (closed_) throw Error(Code::kAborted, group_text(id) + ": the process is ending");
  if (groups_.contains(id)) throw Error(Code::kInternal, group_text(id) + " exists already");
  tokens_.emplace(token_name(token), token);
  for (const LinkAddress& member : group.members) {
    if (member.process == self_.process) {
      group.parties.push_back(&self_party_);
      continue;
    }
    Known& known = know(member.process);
    known.endpoint = {member.host, member.port};
    if (known.token.empty()) known.token = token;
    known.peer->revive();
    group.parties.push_back(known.peer.get());
    if (std::find(group.peers.begin(), group.peers.end(), known.peer.get()) == group.peers.end()) {
      group.peers.push_back(known.peer.get());
    }
  }
  const auto handle = std::make_shared<GroupHandle>(*this, std::move(group));
  groups_[id] = &handle->group();
  ended_.erase(id);
  if (const auto early = early_failures_.extract(id)) fail_locked(handle->group(), early.mapped());
  return handle;
}

std::shared_ptr<LinkRequest> Engine::post(Group& group, bool sending, int peer, const Tag& tag, std::byte* memory,
                                          size_t bytes, uint64_t fingerprint) {
  auto request = std::make_shared<Request>(tag, memory, bytes, fingerprint);
  Session session(*this);
  if (group.failure) {
    request->finish(group.failure);
  } else if (peer < 0 || static_cast<size_t>(peer) >= group.parties.size()) {
    request->finish(Error(Code::kInvalidArgument, group_text(group.id) + " has no rank " + std::to_string(peer) +
                                                      " (it has " + std::to_string(group.parties.size()) + " ranks)"));
  } else if (tag.group != group.id) {
    request->finish(
        Error(Code::kInternal, group_text(group.id) + ": a message with the tag of " + group_text(tag.group)));
  } else if (memory == nullptr && bytes > 0) {
    request->finish(
        Error(Code::kInvalidArgument, group_text(group.id) + ": no memory for " + std::to_string(bytes) + " bytes"));
  } else {
    Party& party = *group.parties[static_cast<size_t>(peer)];
    sending ? party.post_send(request) : party.post_receive(request);
    // Nobody but the caller can wait for this one yet.
    if (completions_ == 1 && request->done()) completions_ = 0;
  }
  return request;
}

bool Engine::has_come(const Group& group, int peer, const Tag& tag) {
  check_alive();
  const std::lock_guard lock(mutex_);
  return !group.failure && group.parties[static_cast<size_t>(peer)]->has_come(tag);
}

void Engine::fail(Group& group, const Error& error, bool tell) {
  Session session(*this);
  fail_locked(group, error);
  if (!tell || group.told) return;
  group.told = true;
  for (Peer* peer : group.peers) peer->tell_failure(group.id, *group.failure);
}

void Engine::fail_locked(Group& group, const Error& error) {
  if (group.failure) return;
  group.failure = error;
  for (Party* party : group.parties) party->cancel(group.id, error);
  completed();  // also those that wait for nothing but the failure
  if (group.on_failure) call_later(group, [callback = std::move(group.on_failure), error] { callback(error); });
  group.on_failure = nullptr;
}

void Engine::call_later(const Group& group, std::function<void()> callback) {
  callbacks_.push_back([gate = group.gate, callback = std::move(callback)] {
    const std::lock_guard lock(gate->mutex);
    if (!gate->closed) callback();
  });
}

std::optional<Error> Engine::failure(const Group& group) const {
  check_alive();
  const std::lock_guard lock(mutex_);
  return group.failure;
}

std::vector<int> Engine::departed(const Group& group) const {
  check_alive();
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (size_t rank = 0; rank < group.members.size(); ++rank) {
    const auto it = peers_.find(group.members[rank].process);
    if (it == peers_.end()) continue;  // this process
    const Peer& peer = *it->second.peer;
    if (peer.said_goodbye() || peer.has_left(group.id)) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void Engine::on_failure(Group& group, std::function<void(const Error&)> callback) {
  Session session(*this);
  if (group.failure) {
    call_later(group, [callback = std::move(callback), error = *group.failure] { callback(error); });
  } else {
    group.on_failure = std::move(callback);
  }
}

void Engine::on_late_mismatch(Group& group, std::function<void(int, const Tag&, const Error&)> callback) {
  Session session(*this);
  group.on_late_mismatch = std::move(callback);
}

void Engine::connect(Group& group, std::span<const int> peers) {
  Session session(*this);
  for (const int rank : peers) {
    if (rank < 0 || static_cast<size_t>(rank) >= group.members.size()) {
      throw Error(Code::kInvalidArgument, group_text(group.id) + " has no rank " + std::to_string(rank));
    }
    const ProcessId& id = group.members[static_cast<size_t>(rank)].process;
    if (id != self_.process && know(id).peer->state() == Peer::State::kIdle) need_connection(id);
  }
}

void Engine::end_group(Group& group) {
  if (dead_) return;
  {
    const std::lock_guard lock(group.gate->mutex);
    group.gate->closed = true;
  }
  Session session(*this);
  const Error error(Code::kAborted, group_text(group.id) + " was destroyed while a message was pending");
  for (Party* party : group.parties) party->cancel(group.id, error);
  for (Peer* peer : group.peers) peer->tell_end(group.id);
  groups_.erase(group.id);
  if (ended_.insert(group.id).second) ended_order_.push_back(group.id);
  if (ended_order_.size() > kMaxEnded) {
    ended_.erase(ended_order_.front());
    ended_order_.pop_front();
  }
}

// ---- What peers ask of the engine ----

Group* Engine::find_group(uint64_t id) {
  const auto it = groups_.find(id);
  return it == groups_.end() ? nullptr : it->second;
}

bool Engine::dropping(uint64_t id) {
  const Group* group = find_group(id);
  return group != nullptr ? group->failure.has_value() : ended_.contains(id);
}

std::string Engine::who(uint64_t id, const ProcessId& member) {
  if (const Group* group = find_group(id)) {
    for (size_t rank = 0; rank < group->members.size(); ++rank) {
      if (group->members[rank].process == member) return group->names[rank];
    }
  }
  const auto it = peers_.find(member);
  if (it == peers_.end() || it->second.endpoint.port == 0) return "a process of the job";
  return "the process at " + describe(it->second.endpoint);
}

void Engine::fail_group(uint64_t id, const Error& error) {
  if (Group* group = find_group(id)) return fail_locked(*group, error);
  if (!ended_.contains(id) && early_failures_.size() < kMaxEarlyFailures) early_failures_.emplace(id, error);
}

void Engine::late_mismatch(uint64_t id, const ProcessId& member, const Tag& tag, const Error& error) {
  const Group* group = find_group(id);
  if (group == nullptr || !group->on_late_mismatch) return;
  completed();
  for (size_t rank = 0; rank < group->members.size(); ++rank) {
    if (group->members[rank].process != member) continue;
    call_later(*group, [callback = group->on_late_mismatch, rank = static_cast<int>(rank), tag, error] {
      callback(rank, tag, error);
    });
    return;
  }
}

}  // namespace polyccl
