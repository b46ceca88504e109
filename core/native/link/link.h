// The link: PolyCCL's own transport between processes. One per process, shared by all communicators.
//
// A message is matched by its tag, never by arrival. A receive may be posted before or after the message comes.
// - Up to kEagerBytes, the sender sends at once while the receiver has free slots for it (credits); a message that
// comes before its
//   receive waits in a slot.
// - Longer ones go as soon as the receiver has posted the receive, which it tells the sender at that moment; so with
// receives posted
//   ahead a message costs one crossing. They are read straight from, and into, the caller's memory.
// Sender and receiver also give the size, and a fingerprint of the operation that the message belongs to (opaque to the
// link; 0 for none). Where either differs, both sides fail with kMismatch, and nothing else is harmed. Messages of one
// group, channel and sequence belong to one operation: where two ranks give it different fingerprints in messages that
// do not match one another, the group fails with kMismatch.
//
// Whoever waits also drives the sockets; a thread of the link's own does so while nobody waits, so that loss is noticed
// at once. That thread never touches Python.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../clock.h"
#include "../error.h"

namespace polyccl {

inline constexpr size_t kEagerBytes = 64 * 1024;

// Identifies a process on the link; drawn at random when the link starts.
struct ProcessId {
  uint64_t hi = 0, lo = 0;
  auto operator<=>(const ProcessId&) const = default;
};

// Where a process listens. All that another process needs to reach it.
struct LinkAddress {
  ProcessId process;
  std::string host;  // numeric address
  uint16_t port = 0;
};

// What matches a send with a receive. `group` is the communicator (and its epoch); `channel` keeps apart what must not
// meet: messages of plans, point to point, control; `sequence`, `chunk` and `ordinal` number messages inside it.
struct Tag {
  uint64_t group = 0;
  uint64_t sequence = 0;
  uint32_t chunk = 0;
  uint16_t ordinal = 0;
  uint16_t channel = 0;
  auto operator<=>(const Tag&) const = default;
};

class LinkRequest;  // one message on its way; see below

// A group's view of the link: the members of one communicator, by rank. Cheap; connections are made on first use and
// shared.
class LinkGroup {
 public:
  virtual ~LinkGroup() = default;  // cancels what is pending

  // Start to send or to receive. `memory` must stay valid until the request is done. Never blocks. What goes wrong
  // shows in the request.
  virtual std::shared_ptr<LinkRequest> send(int peer, const Tag& tag, const void* memory, size_t bytes,
                                            uint64_t fingerprint = 0) = 0;
  virtual std::shared_ptr<LinkRequest> recv(int peer, const Tag& tag, void* memory, size_t bytes,
                                            uint64_t fingerprint = 0) = 0;

  // Whether a message with this tag has come, or is announced, that no receive was posted for.
  virtual bool has_come(int peer, const Tag& tag) = 0;

  // Fail everything that is pending, and everything that comes, with this error; wakes all waiters. With `tell`, the
  // other members' groups are failed too (on connections that exist), by the same code and text. The first failure
  // stays.
  virtual void fail(const Error& error, bool tell) = 0;

  // The failure, if there is one: set by fail(), by a member's fail(tell), or by the loss of a member with a
  // connection.
  virtual std::optional<Error> failure() const = 0;

  // The members that have left the group, or ended their process, in good order, as far as connections tell.
  virtual std::vector<int> departed() const = 0;

  // Called once, on failure, from whichever thread notices; must not block and must not call the link.
  // None runs any more once the group's destructor has returned.
  virtual void on_failure(std::function<void(const Error&)> callback) = 0;

  // Called when a member's receive turns out to differ in size or fingerprint from a small message whose send was done
  // already, so that the send's request could not say so. `peer` is the member. The same rules as for on_failure; may be called
  // more than once.
  virtual void on_late_mismatch(std::function<void(int peer, const Tag& tag, const Error& error)> callback) {
    (void)callback;
  }

  // Open connections to these members now, in the background, so that their loss is noticed.
  virtual void connect(std::span<const int> peers) = 0;
};

class LinkRequest {
 public:
  virtual ~LinkRequest() = default;
  virtual bool done() const = 0;                          // cheap: one atomic load
  virtual const std::optional<Error>& error() const = 0;  // once done
};

struct LinkCounters {
  uint64_t bytes_sent = 0;  // payload, without headers
  uint64_t bytes_received = 0;
  uint64_t wire_bytes_sent = 0;  // with headers and control frames
  uint64_t wire_bytes_received = 0;
};

class Link {
 public:
  virtual ~Link() = default;

  // The process's link; started at the first call. `interface` is POLYCCL_SOCKET_IFNAME's value or empty. After fork()
  // the child's link is dead: its sockets are closed, and every call throws kInternal with a sentence that says so.
  static Link& instance();

  // shutdown() of the process's link, where it was started. Also runs at the process's exit, but then other parts may
  // have ended before.
  static void end();

  virtual LinkAddress address() const = 0;

  // Trust peers that prove this token (and prove it to them). Any number of tokens.
  virtual void add_token(const std::string& token) = 0;

  // `names[r]` describes member r in error texts, e.g. "rank 3 (island amd, host b)". members[r] may be this process
  // itself: messages to oneself work.
  virtual std::shared_ptr<LinkGroup> create_group(uint64_t group, int rank, std::vector<LinkAddress> members,
                                                  std::vector<std::string> names, const std::string& token) = 0;

  // Drive the sockets until `ready()` is true, the deadline passes (false), or wake() is called often enough for
  // ready() to turn true. `ready` is called often, with no lock of the link held. Spins about 20 us, then parks.
  // `interrupted`, where given, is called about every 100 ms; true ends the wait (false is returned).
  virtual bool wait(const std::function<bool()>& ready, Deadline deadline,
                    const std::function<bool()>& interrupted = {}) = 0;

  // Make waiters look at their `ready` again. From any thread.
  virtual void wake() = 0;

  // Handle what has arrived and send what can be sent, without blocking.
  virtual void progress() = 0;

  // Payload to and from another member of a group, and in total; for the byte counts that users see.
  virtual LinkCounters counters() const = 0;
  virtual LinkCounters counters(const ProcessId& peer) const = 0;

  // How long the link tries to reach a member before it takes it for lost; 30 s unless set.
  virtual void set_connect_timeout(int64_t ns) { (void)ns; }

  // Say goodbye to all peers and end the link, so that they see an orderly end and not a loss. Takes at most about a
  // second. For the process's exit; what is pending fails.
  virtual void shutdown() {}
};

}  // namespace polyccl
