// Matching: what this process has under way with one other process. Pairs sends with receives by tag, keeps the slots
// of messages that came before their receive, and counts credits. All groups share it.
//
// Guarded by the engine's lock.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "connection.h"
#include "request.h"

namespace polyccl {

struct TagHash {
  size_t operator()(const Tag& tag) const {
    uint64_t h = tag.group * 0x9E3779B97F4A7C15ull ^ tag.sequence;
    h = (h ^ (h >> 29)) * 0xBF58476D1CE4E5B9ull;
    h ^= (uint64_t{tag.chunk} << 32) | (uint64_t{tag.ordinal} << 16) | tag.channel;
    h = (h ^ (h >> 32)) * 0x94D049BB133111EBull;
    return h ^ (h >> 29);
  }
};

struct ProcessIdHash {
  size_t operator()(const ProcessId& id) const { return id.lo; }
};

// What a peer needs from the engine.
class Hub {
 public:
  virtual ~Hub() = default;
  virtual void need_connection(const ProcessId& peer) = 0;
  virtual void completed() = 0;               // a request is done (one call for each): waiters must look
  virtual bool dropping(uint64_t group) = 0;  // the group has ended or failed here: nothing of it is of use
  virtual std::string who(uint64_t group,
                          const ProcessId& member) = 0;  // "rank 3 (...)", or the process where no group names it
  virtual void fail_group(uint64_t group, const Error& error) = 0;  // as told by a member, or for a broken protocol
  virtual void late_mismatch(uint64_t group, const ProcessId& member, const Tag& tag, const Error& error) = 0;
};

// Where messages go and come from: another process, or this one.
class Party {
 public:
  virtual ~Party() = default;
  virtual void post_send(const std::shared_ptr<Request>& request) = 0;
  virtual void post_receive(const std::shared_ptr<Request>& request) = 0;
  // Whether a message has come, or is announced, that no receive was posted for.
  virtual bool has_come(const Tag& tag) const = 0;
  // End all requests of a group with this error, and drop what has come for it.
  virtual void cancel(uint64_t group, const Error& error) = 0;
};

using Requests = std::unordered_map<Tag, std::shared_ptr<Request>, TagHash>;

struct Slot {
  std::unique_ptr<std::byte[]> bytes;
  Terms terms;
};
using Slots = std::unordered_map<Tag, Slot, TagHash>;

// What the other side has said about a message that has found no request here.
using Notices = std::unordered_map<Tag, Terms, TagHash>;

// The text of a mismatch, the same on both sides. Where the sizes are equal, the fingerprints differ.
Error mismatch(uint64_t group, const std::string& sender, size_t sent, const std::string& receiver, size_t received,
               const Tag& tag);

// The text where two ranks' fingerprints differ.
Error unlike(uint64_t group, const std::string& one, const std::string& other, const Tag& tag);

// "communicator 0x1f", for error texts.
std::string group_text(uint64_t group);

class Peer final : public Party, public Sink {
 public:
  Peer(Hub& hub, const ProcessId& self, const ProcessId& id) : hub_(hub), self_(self), id_(id) {}

  enum class State { kIdle, kConnecting, kUp, kFinished, kLost };
  State state() const { return state_; }
  void connecting() { state_ = State::kConnecting; }
  void up(Connection* connection);
  // The connection is gone, or could not be made. Ends all that is pending; posts end so too until revive(). A peer
  // that said goodbye is finished, not lost.
  void lost(const std::string& why);
  void revive();
  Connection* connection() { return connection_; }
  const ProcessId& id() const { return id_; }
  bool was_up() const { return was_up_; }

  // Whether the member has left the group in good order.
  bool has_left(uint64_t group) const { return left_.contains(group); }
  bool said_goodbye() const { return goodbye_; }
  // The error for a group that had this member.
  Error gone(uint64_t group, const std::string& why);

  // Tell the other side; where there is no connection yet, once there is one.
  void tell_failure(uint64_t group, const Error& error);
  void tell_end(uint64_t group);

  void post_send(const std::shared_ptr<Request>& request) override;
  void post_receive(const std::shared_ptr<Request>& request) override;
  bool has_come(const Tag& tag) const override { return unexpected_.contains(tag) || wanted_.contains(tag); }
  void cancel(uint64_t group, const Error& error) override;

  void credits(uint32_t slots, uint32_t bytes) override;
  Landing land(const Frame& frame) override;
  void landed(const Frame& frame, Landing landing) override;
  void control(const Frame& frame, const std::string& text) override;
  void sent(const std::shared_ptr<Request>& request) override;

 private:
  void start_send(const std::shared_ptr<Request>& request);
  void start_receive(const std::shared_ptr<Request>& request);
  void end(const std::shared_ptr<Request>& request, std::optional<Error> error = {});
  void withdraw(const std::shared_ptr<Request>& request, const Error& error);
  bool refuse_duplicate(Requests& pending, const std::shared_ptr<Request>& request, const char* what);
  std::optional<Error> unusable(uint64_t group);
  void tell(const Frame& frame, std::string text);
  void announce(FrameType type, const Tag& tag, uint64_t bytes, uint64_t other, uint64_t detail);
  void announce(FrameType type, const Request& request);
  void fail_receive(const std::shared_ptr<Request>& request, uint64_t sent, bool eager);
  void fail_send(const std::shared_ptr<Request>& request, uint64_t received);
  void free_slot(size_t bytes);
  void return_credits();
  bool clashes(const Tag& tag, uint64_t fingerprint);
  Landing land_eager(const Frame& frame);
  Landing land_data(const Frame& frame);
  void landed_eager(const Frame& frame, Landing landing);
  void on_want(const Frame& frame);
  void on_ready(const Frame& frame);
  void on_receive_mismatch(const Frame& frame);
  void leave(uint64_t group);
  void say_goodbye();
  void forget_all();

  Hub& hub_;
  const ProcessId self_, id_;
  State state_ = State::kIdle;
  Connection* connection_ = nullptr;
  bool was_up_ = false, goodbye_ = false;
  std::string lost_why_;

  Requests sends_, receives_;                                               // pending
  std::vector<std::shared_ptr<Request>> waiting_sends_, waiting_receives_;  // for the connection
  std::vector<std::pair<Frame, std::string>> waiting_control_;
  Slots unexpected_;                   // came whole, no receive yet
  Notices ready_;                      // READY that found no send
  Notices wanted_;                     // WANT that found no receive
  std::unordered_set<uint64_t> left_;  // groups that the peer has left

  // The fingerprints of recent operations, as either side said them first; by sequence, the newest in each place.
  struct Known {
    uint64_t group = 0, sequence = 0, fingerprint = 0;
    uint16_t channel = 0;
  };
  std::array<Known, kSlots> known_{};

  uint32_t slots_ = kSlots, slot_bytes_ = kSlotBytes;  // free at the receiver, as far as this side knows
  uint32_t used_ = 0, used_bytes_ = 0;                 // here: taken by messages of the peer
};

// Messages of a process to itself: the same rules, one memcpy.
class SelfParty final : public Party {
 public:
  SelfParty(Hub& hub, const ProcessId& self) : hub_(hub), self_(self) {}
  void post_send(const std::shared_ptr<Request>& request) override;
  void post_receive(const std::shared_ptr<Request>& request) override;
  bool has_come(const Tag& tag) const override { return unexpected_.contains(tag) || sends_.contains(tag); }
  void cancel(uint64_t group, const Error& error) override;

 private:
  void match(const std::shared_ptr<Request>& send, const std::shared_ptr<Request>& receive);
  Error differ(uint64_t group, size_t sent, const std::shared_ptr<Request>& receive);

  Hub& hub_;
  const ProcessId self_;
  Requests sends_, receives_;
  Slots unexpected_;
  size_t slot_bytes_ = 0;
};

}  // namespace polyccl
