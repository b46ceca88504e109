// The engine: the process's link. Owns the sockets, the peers and the groups; makes connections and notices their loss.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "connection.h"
#include "driver.h"
#include "handshake.h"
#include "link.h"
#include "peer.h"

namespace polyccl {

// Lets the end of a group wait for a callback of it that is running, and keeps later ones from starting.
struct Gate {
  std::recursive_mutex mutex;
  bool closed = false;
};

// What the engine knows of a group; the caller's LinkGroup refers to it.
struct Group {
  uint64_t id = 0;
  int rank = 0;
  std::vector<LinkAddress> members;
  std::vector<std::string> names;
  std::string token;
  std::vector<Party*> parties;  // by rank; they live as long as the engine
  std::vector<Peer*> peers;     // the other processes among them
  std::optional<Error> failure;
  bool told = false;
  std::shared_ptr<Gate> gate = std::make_shared<Gate>();
  std::function<void(const Error&)> on_failure;
  std::function<void(int, const Tag&, const Error&)> on_late_mismatch;
};

class Engine final : public Link, private Hub {
 public:
  Engine();
  ~Engine() override { shutdown(); }

  LinkAddress address() const override;
  void add_token(const std::string& token) override;
  std::shared_ptr<LinkGroup> create_group(uint64_t group, int rank, std::vector<LinkAddress> members,
                                          std::vector<std::string> names, const std::string& token) override;
  bool wait(const std::function<bool()>& ready, Deadline deadline, const std::function<bool()>& interrupted) override;
  void wake() override;
  void progress() override;
  LinkCounters counters() const override;
  LinkCounters counters(const ProcessId& peer) const override;
  void set_connect_timeout(int64_t ns) override;
  void shutdown() override;

  // For the groups.
  std::shared_ptr<LinkRequest> post(Group& group, bool sending, int peer, const Tag& tag, std::byte* memory,
                                    size_t bytes, uint64_t fingerprint);
  void fail(Group& group, const Error& error, bool tell);
  std::optional<Error> failure(const Group& group) const;
  std::vector<int> departed(const Group& group) const;
  bool has_come(const Group& group, int peer, const Tag& tag);
  void on_failure(Group& group, std::function<void(const Error&)> callback);
  void on_late_mismatch(Group& group, std::function<void(int, const Tag&, const Error&)> callback);
  void connect(Group& group, std::span<const int> peers);
  void end_group(Group& group);

  // Around fork().
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child();

 private:
  class Session;
  // A socket whose handshake is under way.
  struct Greeting {
    Fd fd;
    std::optional<Handshake> handshake;  // none until a dialed socket is connected
    bool dialed = false;
    ProcessId peer;  // of a dialed one
    int64_t deadline = 0;
  };
  // The effort to reach a peer.
  struct Dial {
    uint64_t greeting = 0;  // under way now; 0 while waiting for the next try
    int64_t give_up_at = 0, unknown_token_until = 0, retry_at = 0, pause = 0;
    std::string last_error;
  };
  struct Known {
    std::unique_ptr<Peer> peer;
    Endpoint endpoint;  // no port where it has only dialed us so far
    std::string token;
    Dial dial;
    uint64_t connections = 0;  // made so far
    LinkCounters closed;       // counters of connections that are gone
  };

  void check_alive() const;
  Known& know(const ProcessId& id);
  void watch(int fd, uint64_t key, uint32_t events);
  bool pump(int timeout_ms);
  void dispatch(uint64_t key, uint32_t events);

  void accept_all();
  void make_room_for_stranger();
  void pause_accepting();
  void start_dial(Known& known);
  void try_dial(Known& known);
  void dial_failed(Known& known, Refusal refusal, const std::string& why);
  void greet(uint64_t key);
  bool talk(Greeting& greeting);
  void end_greeting(uint64_t key, Refusal refusal, const std::string& why);
  void establish(uint64_t key);
  Refusal admit(const ProcessId& peer, uint64_t connections);
  std::optional<std::string> find_token(const std::string& name) const;
  void drop_connection(uint64_t key, const std::string& why);
  void lose(Known& known, const std::string& why);
  void run_timers();
  void set_timer();

  Group* find_group(uint64_t id);
  void fail_locked(Group& group, const Error& error);
  void call_later(const Group& group, std::function<void()> callback);
  LinkCounters count(const Known& known) const;

  void need_connection(const ProcessId& peer) override;
  void completed() override { ++completions_; }
  bool dropping(uint64_t group) override;
  std::string who(uint64_t group, const ProcessId& member) override;
  void fail_group(uint64_t group, const Error& error) override;
  void late_mismatch(uint64_t group, const ProcessId& member, const Tag& tag, const Error& error) override;

  mutable std::mutex mutex_;
  std::atomic<bool> dead_{false};  // forked
  bool closed_ = false;            // shut down
  LinkAddress self_;
  Fd epoll_, listener_, timer_;
  std::unique_ptr<Driver> driver_;
  int64_t connect_timeout_ = 30'000'000'000;
  int64_t timer_at_ = 0, accept_again_at_ = 0;

  uint64_t next_key_ = 16;  // of sockets in the poller; the first few are the engine's own
  std::unordered_map<uint64_t, Greeting> greetings_;
  std::unordered_map<uint64_t, std::pair<std::unique_ptr<Connection>, Known*>> connections_;
  std::map<ProcessId, Known> peers_;
  SelfParty self_party_;
  std::map<std::string, std::string> tokens_;  // by name

  std::unordered_map<uint64_t, Group*> groups_;
  std::unordered_set<uint64_t> ended_;
  std::deque<uint64_t> ended_order_;
  std::map<uint64_t, Error> early_failures_;  // of groups that are not created here yet

  size_t completions_ = 0;                        // since the lock was taken
  std::vector<std::function<void()>> callbacks_;  // to call without the lock
};

}  // namespace polyccl
