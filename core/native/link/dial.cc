// The engine's part that makes connections and notices their end.
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "session.h"

namespace polyccl {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kHandshakeNs = 15 * kSecond;
constexpr int64_t kUnknownTokenNs = 5 * kSecond;  // how long a peer may take to learn of the token
constexpr int64_t kFirstPause = kSecond / 100, kLongestPause = kSecond;
constexpr int64_t kAcceptPause = kSecond / 10;
constexpr size_t kMaxStrangers = 256;  // accepted sockets whose handshake is not over

// A process listens before anyone learns its address, so one whose port is closed is gone: no need to try again.
Refusal refusal_of(int error) { return error == ECONNREFUSED ? Refusal::kClosing : Refusal::kNone; }

}  // namespace

Engine::Known& Engine::know(const ProcessId& id) {
  Known& known = peers_[id];
  if (!known.peer) known.peer = std::make_unique<Peer>(static_cast<Hub&>(*this), self_.process, id);
  return known;
}

void Engine::need_connection(const ProcessId& peer) { start_dial(know(peer)); }

// ---- Dialing ----

void Engine::start_dial(Known& known) {
  if (closed_ || known.peer->state() != Peer::State::kIdle || known.endpoint.port == 0) return;
  known.peer->connecting();
  const int64_t now = now_ns();
  known.dial = {};
  known.dial.give_up_at = now + connect_timeout_;
  known.dial.unknown_token_until = now + std::min(kUnknownTokenNs, connect_timeout_);
  known.dial.pause = kFirstPause;
  try_dial(known);
}

void Engine::try_dial(Known& known) {
  known.dial.retry_at = 0;
  int error = 0;
  Fd fd;
  try {
    fd = start_connect(known.endpoint, &error);
    if (error != 0 && error != EINPROGRESS) return dial_failed(known, refusal_of(error), error_text(error));
    const uint64_t key = next_key_++;
    watch(fd.get(), key, EPOLLOUT);
    Greeting greeting;
    greeting.fd = std::move(fd);
    greeting.dialed = true;
    greeting.peer = known.peer->id();
    greeting.deadline = std::min(now_ns() + kHandshakeNs, known.dial.give_up_at);
    greetings_.emplace(key, std::move(greeting));
    known.dial.greeting = key;
    set_timer();
  } catch (const Error& failure) {
    dial_failed(known, Refusal::kNone, failure.what());
  }
}

void Engine::dial_failed(Known& known, Refusal refusal, const std::string& why) {
  Dial& dial = known.dial;
  dial.greeting = 0;
  if (known.peer->state() != Peer::State::kConnecting) return;
  const int64_t now = now_ns();
  bool again = false;
  switch (refusal) {
    case Refusal::kNone:
      // One that was reached before and cannot be reached now is gone.
      again = now < dial.give_up_at && !known.peer->was_up();
      break;
    case Refusal::kYield:
      again = now < dial.give_up_at;
      break;
    case Refusal::kUnknownToken:
      again = now < dial.unknown_token_until;
      break;
    default:
      break;
  }
  if (!again) return lose(known, "no connection to " + describe(known.endpoint) + ": " + why);
  dial.last_error = why;
  dial.retry_at = std::min(now + dial.pause, std::max(dial.give_up_at, now + 1));
  dial.pause = std::min(2 * dial.pause, kLongestPause);
  set_timer();
}

// ---- Accepting ----

void Engine::accept_all() {
  while (true) {
    Fd fd = accept_from(listener_.get());
    if (!fd) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) pause_accepting();
      return;
    }
    make_room_for_stranger();
    const uint64_t key = next_key_++;
    watch(fd.get(), key, EPOLLIN);
    Greeting greeting;
    greeting.fd = std::move(fd);
    greeting.deadline = now_ns() + kHandshakeNs;
    greeting.handshake = Handshake::accept(
        self_.process, [this](const std::string& name) { return find_token(name); },
        [this](const ProcessId& id, uint64_t connections) { return admit(id, connections); });
    greetings_.emplace(key, std::move(greeting));
    set_timer();
  }
}

// A member proves itself in a few round trips; whoever has not done so for the longest is the least likely to be one.
void Engine::make_room_for_stranger() {
  size_t strangers = 0;
  uint64_t oldest = 0;
  for (const auto& [key, greeting] : greetings_) {
    if (greeting.dialed) continue;
    ++strangers;
    if (oldest == 0 || key < oldest) oldest = key;
  }
  if (strangers >= kMaxStrangers) greetings_.erase(oldest);
}

// Out of descriptors or memory: the listener would report the waiting connection again and again.
void Engine::pause_accepting() {
  watch(listener_.get(), kListenerKey, 0);
  accept_again_at_ = now_ns() + kAcceptPause;
  set_timer();
}

std::optional<std::string> Engine::find_token(const std::string& name) const {
  const auto it = tokens_.find(name);
  return it == tokens_.end() ? std::nullopt : std::optional(it->second);
}

// Two that dial each other at once must keep the same connection: that of the lower process id. The lower one refuses
// the other's while its own has reached the other side; the higher one takes what it is offered and drops its own. What
// it dropped may be read here when the winner is up already.
Refusal Engine::admit(const ProcessId& id, uint64_t connections) {
  if (closed_) return Refusal::kClosing;
  const auto it = peers_.find(id);
  if (it == peers_.end()) return Refusal::kNone;
  if (it->second.peer->said_goodbye()) return Refusal::kClosing;
  if (it->second.peer->connection() != nullptr && connections < it->second.connections) return Refusal::kYield;
  const auto own = greetings_.find(it->second.dial.greeting);
  const bool reached = own != greetings_.end() && own->second.handshake.has_value();
  return reached && self_.process < id ? Refusal::kYield : Refusal::kNone;
}

// ---- Handshakes ----

void Engine::greet(uint64_t key) {
  Greeting& greeting = greetings_.at(key);
  try {
    if (greeting.dialed && !greeting.handshake) {
      if (const int error = socket_error(greeting.fd.get()))
        return end_greeting(key, refusal_of(error), error_text(error));
      greeting.handshake =
          Handshake::dial(self_.process, greeting.peer, know(greeting.peer).token, know(greeting.peer).connections);
      watch(greeting.fd.get(), key, EPOLLIN);
    }
    if (!talk(greeting)) return;
  } catch (const std::runtime_error& error) {
    return end_greeting(key, Refusal::kNone, error.what());
  }
  const Handshake& handshake = *greeting.handshake;
  if (handshake.state() == Handshake::State::kDone) return establish(key);
  end_greeting(key, handshake.refusal(), describe(handshake.refusal()));
}

// Moves the bytes of a handshake. True once it is over; throws where the connection breaks. What it sends is far
// smaller than the buffer of a new socket, so a short write is a break too.
bool Engine::talk(Greeting& greeting) {
  Handshake& handshake = *greeting.handshake;
  char bytes[256];
  while (true) {
    const std::string output(handshake.output());
    if (!output.empty()) {
      const ssize_t n = send(greeting.fd.get(), output.data(), output.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n != static_cast<ssize_t>(output.size()))
        throw std::runtime_error(n < 0 ? error_text(errno) : "the connection is stuck");
      handshake.sent(output.size());
    }
    if (handshake.state() != Handshake::State::kRunning) return true;
    const ssize_t n = recv(greeting.fd.get(), bytes, std::min(sizeof bytes, handshake.wants()), MSG_DONTWAIT);
    if (n == 0) throw std::runtime_error("the connection was closed during the handshake");
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
    if (n < 0) throw std::runtime_error(error_text(errno));
    handshake.feed({bytes, static_cast<size_t>(n)});
  }
}

void Engine::end_greeting(uint64_t key, Refusal refusal, const std::string& why) {
  const bool dialed = greetings_.at(key).dialed;
  const ProcessId peer = greetings_.at(key).peer;
  greetings_.erase(key);
  if (!dialed) return;  // a stranger; nothing changes
  Known& known = know(peer);
  if (known.dial.greeting == key) dial_failed(known, refusal, why);
}

void Engine::establish(uint64_t key) {
  Greeting greeting = std::move(greetings_.at(key));
  greetings_.erase(key);
  Known& known = know(greeting.handshake->peer());
  if (known.dial.greeting != 0 && known.dial.greeting != key) greetings_.erase(known.dial.greeting);
  known.dial = {};
  // It would not make another connection if it still had the one that we know.
  if (Connection* old = known.peer->connection())
    drop_connection(old->id(), "it has closed the connection and made another");
  known.peer->revive();
  known.connections += 1;
  auto connection = std::make_unique<Connection>(std::move(greeting.fd), epoll_.get(), key, *known.peer);
  Connection* raw = connection.get();
  connections_.emplace(key, std::make_pair(std::move(connection), &known));
  known.peer->up(raw);
  completed();
}

// ---- Loss ----

void Engine::drop_connection(uint64_t key, const std::string& why) {
  const auto it = connections_.find(key);
  Known& known = *it->second.second;
  lose(known, why);
  known.closed = count(known);
  connections_.erase(it);
}

void Engine::lose(Known& known, const std::string& why) {
  Peer& peer = *known.peer;
  greetings_.erase(known.dial.greeting);
  known.dial = {};
  std::vector<Group*> hit;
  for (const auto& [id, group] : groups_) {
    const bool member = std::find(group->peers.begin(), group->peers.end(), &peer) != group->peers.end();
    if (member && !peer.said_goodbye() && !peer.has_left(id)) hit.push_back(group);
  }
  peer.lost(why);
  for (Group* group : hit) fail_locked(*group, peer.gone(group->id, why));
}

// ---- Deadlines ----

void Engine::run_timers() {
  uint64_t count;
  [[maybe_unused]] const ssize_t n = read(timer_.get(), &count, sizeof count);
  timer_at_ = 0;
  const int64_t now = now_ns();
  if (accept_again_at_ != 0 && accept_again_at_ <= now && listener_) {
    accept_again_at_ = 0;
    watch(listener_.get(), kListenerKey, EPOLLIN);
  }
  std::vector<uint64_t> late;
  for (const auto& [key, greeting] : greetings_) {
    if (greeting.deadline <= now) late.push_back(key);
  }
  for (const uint64_t key : late) end_greeting(key, Refusal::kNone, "no answer in time");
  for (auto& [id, known] : peers_) {
    if (known.dial.retry_at != 0 && known.dial.retry_at <= now) {
      if (now >= known.dial.give_up_at) {
        dial_failed(known, Refusal::kNone, known.dial.last_error);
      } else {
        try_dial(known);
      }
    }
  }
  set_timer();
}

void Engine::set_timer() {
  int64_t next = 0;
  const auto consider = [&](int64_t at) {
    if (at != 0 && (next == 0 || at < next)) next = at;
  };
  consider(accept_again_at_);
  for (const auto& [key, greeting] : greetings_) consider(greeting.deadline);
  for (const auto& [id, known] : peers_) consider(known.dial.retry_at);
  if (next == timer_at_) return;
  timer_at_ = next;
  itimerspec when{};
  when.it_value.tv_sec = next / kSecond;
  when.it_value.tv_nsec = next % kSecond;
  timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr);
}

}  // namespace polyccl
