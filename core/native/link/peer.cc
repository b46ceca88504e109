#include "peer.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace polyccl {
namespace {

// Entries about messages to come are small, but a broken peer must not fill the memory with them.
constexpr size_t kMaxNotices = 1 << 20;
constexpr size_t kMaxLeft = 1 << 16;
constexpr size_t kMaxWaitingControl = 1 << 12;

// Credits go back in batches, unless the peer may be running short of them.
constexpr uint32_t kBatchSlots = kSlots / 4, kBatchBytes = kSlotBytes / 4;
constexpr uint32_t kLowSlots = kSlots / 2, kLowBytes = kSlotBytes / 2;

std::shared_ptr<Request> find(const Requests& requests, const Tag& tag) {
  const auto it = requests.find(tag);
  return it == requests.end() ? nullptr : it->second;
}

// Of a frame that announces a message, or carries a small one.
Terms terms_of(const Frame& frame) { return {frame.bytes, frame.detail}; }

bool insert_notice(Notices& notices, const Frame& frame) {
  return notices.size() < kMaxNotices && notices.emplace(frame.tag, terms_of(frame)).second;
}

Error duplicate(const char* what, const Tag& tag) {
  return {Code::kInternal, group_text(tag.group) + ": a " + what + " with the same tag is already pending (" +
                               describe(tag) + "). This is an error in PolyCCL; please report it."};
}

std::vector<std::shared_ptr<Request>> of_group(const Requests& requests, uint64_t group) {
  std::vector<std::shared_ptr<Request>> found;
  for (const auto& [tag, request] : requests) {
    if (tag.group == group) found.push_back(request);
  }
  return found;
}

template <class Map>
void erase_group(Map& map, uint64_t group) {
  std::erase_if(map, [&](const auto& entry) { return entry.first.group == group; });
}

}  // namespace

std::string group_text(uint64_t group) {
  char text[40];
  std::snprintf(text, sizeof text, "communicator 0x%llx", static_cast<unsigned long long>(group));
  return text;
}

Error unlike(uint64_t group, const std::string& one, const std::string& other, const Tag& tag) {
  return {Code::kMismatch, group_text(group) + ": " + one + " and " + other +
                               " call unlike operations: they differ in kind, dtype, reduction, root, count or the "
                               "hint 'deterministic' (" +
                               describe(tag) +
                               "). Let all ranks call the same operations in the same order; POLYCCL_CHECK=1 tells "
                               "which of these differs, and on which ranks."};
}

Error mismatch(uint64_t group, const std::string& sender, size_t sent, const std::string& receiver, size_t received,
               const Tag& tag) {
  if (sent == received) return unlike(group, sender, receiver, tag);
  return {Code::kMismatch,
          group_text(group) + ": " + sender + " sends " + std::to_string(sent) + " bytes where " + receiver +
              " receives " + std::to_string(received) + " (" + describe(tag) +
              "). Let all ranks call the same operation with matching sizes and types; POLYCCL_CHECK=1 "
              "compares the calls before anything is sent."};
}

// ---- The connection's life ----

void Peer::up(Connection* connection) {
  state_ = State::kUp;
  connection_ = connection;
  was_up_ = true;
  lost_why_.clear();
  const auto sends = std::exchange(waiting_sends_, {});
  const auto receives = std::exchange(waiting_receives_, {});
  const auto control = std::exchange(waiting_control_, {});
  // Receives first: what they announce lets the other side begin.
  for (const auto& request : receives) {
    if (!request->done()) start_receive(request);
  }
  for (const auto& request : sends) {
    if (!request->done()) start_send(request);
  }
  for (const auto& [frame, text] : control) connection_->send_control(frame, text);
}

void Peer::lost(const std::string& why) {
  state_ = goodbye_ ? State::kFinished : State::kLost;
  lost_why_ = why;
  for (const Requests* pending : {&sends_, &receives_}) {
    const auto all = *pending;
    for (const auto& [tag, request] : all) withdraw(request, gone(tag.group, why));
  }
  connection_ = nullptr;
  forget_all();
}

void Peer::forget_all() {
  sends_.clear();
  receives_.clear();
  waiting_sends_.clear();
  waiting_receives_.clear();
  waiting_control_.clear();
  ready_.clear();
  wanted_.clear();
  known_.fill({});
  // Messages that came whole may still be received from a peer that ended in good order.
  if (!goodbye_) unexpected_.clear();
  slots_ = kSlots, slot_bytes_ = kSlotBytes;
  used_ = used_bytes_ = 0;
}

void Peer::revive() {
  if (state_ == State::kLost) state_ = State::kIdle;
}

Error Peer::gone(uint64_t group, const std::string& why) {
  const std::string who = group_text(group) + ": " + hub_.who(group, id_);
  if (goodbye_) {
    return {Code::kPeerLost,
            who +
                " has ended in good order, but a message with it was still to come. Let all ranks make the same "
                "calls before they end."};
  }
  return {Code::kPeerLost,
          who + " is lost: " + why + ". Its process has most likely died or its host cannot be reached; see its log."};
}

void Peer::tell_failure(uint64_t group, const Error& error) {
  Frame frame;
  frame.type = FrameType::kGroupFail;
  frame.tag.group = group;
  frame.other = static_cast<uint64_t>(error.code());
  std::string text = error.what();
  if (text.size() > kMaxFailText) {
    size_t cut = kMaxFailText;
    while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) --cut;  // not within a UTF-8 sequence
    text.resize(cut);
  }
  frame.bytes = text.size();
  tell(frame, std::move(text));
}

void Peer::tell_end(uint64_t group) {
  left_.erase(group);
  Frame frame;
  frame.type = FrameType::kGroupEnd;
  frame.tag.group = group;
  tell(frame, {});
}

void Peer::tell(const Frame& frame, std::string text) {
  if (goodbye_ || state_ == State::kLost || state_ == State::kFinished) return;
  if (connection_ != nullptr) {
    connection_->send_control(frame, std::move(text));
  } else if (waiting_control_.size() < kMaxWaitingControl) {
    waiting_control_.emplace_back(frame, std::move(text));
  }
}

// ---- Posts ----

bool Peer::refuse_duplicate(Requests& pending, const std::shared_ptr<Request>& request, const char* what) {
  if (pending.empty() || !pending.contains(request->tag)) return false;
  end(request, duplicate(what, request->tag));
  return true;
}

std::optional<Error> Peer::unusable(uint64_t group) {
  if (state_ == State::kLost || state_ == State::kFinished || goodbye_) return gone(group, lost_why_);
  if (left_.contains(group)) {
    return Error(Code::kPeerLost,
                 group_text(group) + ": " + hub_.who(group, id_) +
                     " has left the communicator, but a message with it was still to come. Let all ranks make "
                     "the same calls before they finalize.");
  }
  return {};
}

void Peer::post_send(const std::shared_ptr<Request>& request) {
  if (refuse_duplicate(sends_, request, "send")) return;
  if (auto error = unusable(request->tag.group)) return end(request, std::move(error));
  sends_.emplace(request->tag, request);
  if (connection_ != nullptr) return start_send(request);
  waiting_sends_.push_back(request);
  if (state_ == State::kIdle) hub_.need_connection(id_);
}

void Peer::start_send(const std::shared_ptr<Request>& request) {
  if (!ready_.empty()) {
    if (const auto it = ready_.find(request->tag); it != ready_.end()) {
      const Terms terms = it->second;
      ready_.erase(it);
      if (terms != request->terms()) return fail_send(request, terms.bytes);
      request->cleared = true;
      return connection_->send_large(request);
    }
  }
  if (clashes(request->tag, request->fingerprint)) return;
  if (request->bytes <= kEagerBytes && slots_ > 0 && request->bytes <= slot_bytes_) {
    slots_ -= 1;
    slot_bytes_ -= static_cast<uint32_t>(request->bytes);
    return connection_->send_eager(request);
  }
  request->announced = true;
  announce(FrameType::kWant, *request);
}

void Peer::post_receive(const std::shared_ptr<Request>& request) {
  if (refuse_duplicate(receives_, request, "receive")) return;
  if (!unexpected_.empty()) {
    if (const auto it = unexpected_.find(request->tag); it != unexpected_.end()) {
      const Slot slot = std::move(it->second);
      unexpected_.erase(it);
      if (slot.terms == request->terms()) {
        if (request->bytes > 0) std::memcpy(request->memory, slot.bytes.get(), request->bytes);
        end(request);
      } else {
        fail_receive(request, slot.terms.bytes, true);
      }
      return free_slot(slot.terms.bytes);
    }
  }
  if (auto error = unusable(request->tag.group)) return end(request, std::move(error));
  receives_.emplace(request->tag, request);
  if (connection_ != nullptr) return start_receive(request);
  waiting_receives_.push_back(request);
  if (state_ == State::kIdle) hub_.need_connection(id_);
}

void Peer::start_receive(const std::shared_ptr<Request>& request) {
  bool wanted = false;
  if (!wanted_.empty()) {
    if (const auto it = wanted_.find(request->tag); it != wanted_.end()) {
      const Terms terms = it->second;
      wanted_.erase(it);
      if (terms != request->terms()) return fail_receive(request, terms.bytes, false);
      wanted = true;
    }
  }
  if (clashes(request->tag, request->fingerprint)) return;
  if (!wanted && request->bytes <= kEagerBytes) return;
  request->cleared = true;
  announce(FrameType::kReady, *request);
}

void Peer::cancel(uint64_t group, const Error& error) {
  for (const auto& request : of_group(sends_, group)) withdraw(request, error);
  for (const auto& request : of_group(receives_, group)) withdraw(request, error);
  erase_group(ready_, group);
  erase_group(wanted_, group);
  for (Known& known : known_) {
    if (known.group == group) known = {};
  }
  std::vector<size_t> sizes;
  std::erase_if(unexpected_, [&](const auto& entry) {
    if (entry.first.group != group) return false;
    sizes.push_back(entry.second.terms.bytes);
    return true;
  });
  for (const size_t size : sizes) free_slot(size);
}

// Whether the other side has said another fingerprint of the message's operation than this side has. If so, the group
// fails: where roots differ, say, both may send what neither will receive. Only for a message that finds no other half;
// where both halves are here, their terms are compared.
bool Peer::clashes(const Tag& tag, uint64_t fingerprint) {
  if (fingerprint == 0) return false;
  Known& known = known_[(tag.sequence + tag.group) % known_.size()];
  const bool same = known.group == tag.group && known.sequence == tag.sequence && known.channel == tag.channel;
  if (!same || known.fingerprint == 0) {
    known = {tag.group, tag.sequence, fingerprint, tag.channel};
    return false;
  }
  if (known.fingerprint == fingerprint) return false;
  const Error error = unlike(tag.group, hub_.who(tag.group, self_), hub_.who(tag.group, id_), tag);
  hub_.fail_group(tag.group, error);
  tell_failure(tag.group, error);  // what would have shown it there may not go out any more
  return true;
}

// Ends a pending request whose message is not over.
void Peer::withdraw(const std::shared_ptr<Request>& request, const Error& error) {
  const auto remove = [&](Requests& from) {
    if (const auto it = from.find(request->tag); it != from.end() && it->second == request) from.erase(it);
  };
  remove(sends_);
  remove(receives_);
  if (connection_ != nullptr && connection_->abandon(request.get()) && request->bytes <= kEagerBytes &&
      !request->cleared) {
    slots_ += 1;  // it never went out
    slot_bytes_ += static_cast<uint32_t>(request->bytes);
  }
  end(request, error);
}

void Peer::end(const std::shared_ptr<Request>& request, std::optional<Error> error) {
  request->finish(std::move(error));
  hub_.completed();
}

// ---- Frames ----

void Peer::announce(FrameType type, const Tag& tag, uint64_t bytes, uint64_t other, uint64_t detail) {
  if (connection_ == nullptr) return;
  Frame frame;
  frame.type = type;
  frame.tag = tag;
  frame.bytes = bytes;
  frame.other = other;
  frame.detail = detail;
  connection_->send_control(frame);
}

void Peer::announce(FrameType type, const Request& request) {
  announce(type, request.tag, request.bytes, 0, request.fingerprint);
}

void Peer::fail_receive(const std::shared_ptr<Request>& request, uint64_t sent, bool eager) {
  const Tag tag = request->tag;
  receives_.erase(tag);
  end(request, mismatch(tag.group, hub_.who(tag.group, id_), sent, hub_.who(tag.group, self_), request->bytes, tag));
  announce(FrameType::kReceiveMismatch, tag, request->bytes, sent, eager ? 1 : 0);
}

void Peer::fail_send(const std::shared_ptr<Request>& request, uint64_t received) {
  const Tag tag = request->tag;
  sends_.erase(tag);
  end(request,
      mismatch(tag.group, hub_.who(tag.group, self_), request->bytes, hub_.who(tag.group, id_), received, tag));
  announce(FrameType::kSendMismatch, tag, request->bytes, received, 0);
}

void Peer::sent(const std::shared_ptr<Request>& request) {
  sends_.erase(request->tag);
  end(request);
}

void Peer::credits(uint32_t slots, uint32_t bytes) {
  if (slots > kSlots - slots_ || bytes > kSlotBytes - slot_bytes_)
    throw std::runtime_error("more credits than there are slots");
  slots_ += slots;
  slot_bytes_ += bytes;
}

void Peer::free_slot(size_t bytes) {
  if (connection_ == nullptr) return;
  used_ -= 1;
  used_bytes_ -= static_cast<uint32_t>(bytes);
  connection_->give_back(1, static_cast<uint32_t>(bytes));
  return_credits();
}

// Credits travel with any header. A frame of their own goes out for a batch, or at once where the peer may be running
// short: what it believes to be taken is what is taken and what it has not been told of.
void Peer::return_credits() {
  const uint32_t slots = connection_->owed_slots(), bytes = connection_->owed_bytes();
  if (slots == 0) return;
  const bool batch = slots >= kBatchSlots || bytes >= kBatchBytes;
  const bool low = used_ + slots > kLowSlots || used_bytes_ + bytes > kLowBytes;
  if (batch || low) connection_->send_control(Frame{});
}

Landing Peer::land(const Frame& frame) {
  return frame.type == FrameType::kEager ? land_eager(frame) : land_data(frame);
}

Landing Peer::land_eager(const Frame& frame) {
  used_ += 1;
  used_bytes_ += static_cast<uint32_t>(frame.bytes);
  if (used_ + connection_->owed_slots() > kSlots || used_bytes_ + connection_->owed_bytes() > kSlotBytes) {
    throw std::runtime_error("more messages than there are slots for them");
  }
  return_credits();
  Landing landing;
  if (hub_.dropping(frame.tag.group)) return landing;
  if (auto request = find(receives_, frame.tag)) {
    if (request->terms() == terms_of(frame)) {
      landing.memory = request->memory;
      landing.request = std::move(request);
    } else {
      fail_receive(request, frame.bytes, true);
    }
    return landing;
  }
  landing.slot = std::make_unique_for_overwrite<std::byte[]>(frame.bytes);
  return landing;
}

Landing Peer::land_data(const Frame& frame) {
  Landing landing;
  auto request = find(receives_, frame.tag);
  if (!request) {
    if (hub_.dropping(frame.tag.group)) return landing;
    throw std::runtime_error("data that no receive has asked for (" + describe(frame.tag) + ")");
  }
  if (!request->cleared || frame.other != request->moved || frame.bytes > request->bytes - request->moved) {
    throw std::runtime_error("data that does not fit its receive (" + describe(frame.tag) + ")");
  }
  landing.memory = request->memory + request->moved;
  landing.request = std::move(request);
  return landing;
}

void Peer::landed(const Frame& frame, Landing landing) {
  if (frame.type == FrameType::kEager) return landed_eager(frame, std::move(landing));
  if (!landing.request) return;  // withdrawn meanwhile
  landing.request->moved += frame.bytes;
  if (landing.request->moved < landing.request->bytes) return;
  receives_.erase(frame.tag);
  end(landing.request);
}

void Peer::landed_eager(const Frame& frame, Landing landing) {
  if (landing.request) {
    receives_.erase(frame.tag);
    end(landing.request);
  } else if (landing.slot && !hub_.dropping(frame.tag.group)) {
    // The receive may have been posted while the payload came.
    const auto request = find(receives_, frame.tag);
    if (!request && clashes(frame.tag, frame.detail)) {
      // Dropped with its group.
    } else if (!request) {
      if (unexpected_.emplace(frame.tag, Slot{std::move(landing.slot), terms_of(frame)}).second) return;
      hub_.fail_group(frame.tag.group, duplicate("message", frame.tag));
    } else if (request->terms() == terms_of(frame)) {
      if (frame.bytes > 0) std::memcpy(request->memory, landing.slot.get(), frame.bytes);
      receives_.erase(frame.tag);
      end(request);
    } else {
      fail_receive(request, frame.bytes, true);
    }
  }
  free_slot(frame.bytes);
}

void Peer::control(const Frame& frame, const std::string& text) {
  switch (frame.type) {
    case FrameType::kWant:
      return on_want(frame);
    case FrameType::kReady:
      return on_ready(frame);
    case FrameType::kSendMismatch:
      wanted_.erase(frame.tag);
      if (const auto request = find(receives_, frame.tag)) {
        receives_.erase(frame.tag);
        end(request, mismatch(frame.tag.group, hub_.who(frame.tag.group, id_), frame.bytes,
                              hub_.who(frame.tag.group, self_), request->bytes, frame.tag));
      }
      return;
    case FrameType::kReceiveMismatch:
      return on_receive_mismatch(frame);
    case FrameType::kGroupFail: {
      const bool known = frame.other <= static_cast<uint64_t>(Code::kInternal);
      return hub_.fail_group(frame.tag.group, Error(known ? static_cast<Code>(frame.other) : Code::kInternal, text));
    }
    case FrameType::kGroupEnd:
      return leave(frame.tag.group);
    case FrameType::kGoodbye:
      return say_goodbye();
    default:
      return;  // credits came with the header
  }
}

void Peer::on_want(const Frame& frame) {
  if (hub_.dropping(frame.tag.group)) return;
  const auto request = find(receives_, frame.tag);
  if (!request) {
    if (clashes(frame.tag, frame.detail)) return;
    if (!insert_notice(wanted_, frame)) throw std::runtime_error("too many or doubled announcements of messages");
  } else if (request->terms() != terms_of(frame)) {
    fail_receive(request, frame.bytes, false);
  } else if (!request->cleared) {
    request->cleared = true;
    announce(FrameType::kReady, *request);
  }
}

void Peer::on_ready(const Frame& frame) {
  if (hub_.dropping(frame.tag.group)) return;
  const auto request = find(sends_, frame.tag);
  if (!request) {
    if (clashes(frame.tag, frame.detail)) return;
    if (!insert_notice(ready_, frame)) throw std::runtime_error("too many or doubled announcements of receives");
  } else if (!request->announced || request->cleared) {
    // It is on its way already; where the terms differ, the receiver finds out and says so.
  } else if (request->terms() != terms_of(frame)) {
    fail_send(request, frame.bytes);
  } else {
    request->cleared = true;
    connection_->send_large(request);
  }
}

void Peer::on_receive_mismatch(const Frame& frame) {
  ready_.erase(frame.tag);
  const Tag& tag = frame.tag;
  const Error error =
      mismatch(tag.group, hub_.who(tag.group, self_), frame.other, hub_.who(tag.group, id_), frame.bytes, tag);
  const auto request = find(sends_, tag);
  if (request && !request->cleared && request->bytes == frame.other) {
    withdraw(request, error);  // some of it may still be queued
  } else if (frame.detail == 1 && !hub_.dropping(tag.group)) {
    hub_.late_mismatch(tag.group, id_, tag, error);
  }
}

// The peer has left a group: what is still pending with it there cannot come any more.
void Peer::leave(uint64_t group) {
  if (left_.size() >= kMaxLeft) left_.erase(left_.begin());
  if (!hub_.dropping(group)) left_.insert(group);
  for (const Requests* pending : {&sends_, &receives_}) {
    for (const auto& request : of_group(*pending, group)) withdraw(request, *unusable(group));
  }
}

void Peer::say_goodbye() {
  goodbye_ = true;
  for (const Requests* pending : {&sends_, &receives_}) {
    const auto all = *pending;
    for (const auto& [tag, request] : all) withdraw(request, gone(tag.group, {}));
  }
}

// ---- This process itself ----

Error SelfParty::differ(uint64_t group, size_t sent, const std::shared_ptr<Request>& receive) {
  const std::string who = hub_.who(group, self_);
  return mismatch(group, who, sent, who, receive->bytes, receive->tag);
}

void SelfParty::match(const std::shared_ptr<Request>& send, const std::shared_ptr<Request>& receive) {
  std::optional<Error> error;
  if (send->terms() != receive->terms()) {
    error = differ(send->tag.group, send->bytes, receive);
  } else if (send->bytes > 0) {
    std::memmove(receive->memory, send->memory, send->bytes);
  }
  for (const auto& request : {send, receive}) {
    request->finish(error);
    hub_.completed();
  }
}

void SelfParty::post_send(const std::shared_ptr<Request>& request) {
  const Tag& tag = request->tag;
  if (sends_.contains(tag) || unexpected_.contains(tag)) {
    request->finish(duplicate("send", tag));
    return hub_.completed();
  }
  if (const auto receive = find(receives_, tag)) {
    receives_.erase(tag);
    return match(request, receive);
  }
  if (request->bytes > kEagerBytes || unexpected_.size() >= kSlots || slot_bytes_ + request->bytes > kSlotBytes) {
    sends_.emplace(tag, request);
    return;
  }
  Slot slot{std::make_unique_for_overwrite<std::byte[]>(request->bytes), request->terms()};
  if (request->bytes > 0) std::memcpy(slot.bytes.get(), request->memory, request->bytes);
  slot_bytes_ += request->bytes;
  unexpected_.emplace(tag, std::move(slot));
  request->finish();
  hub_.completed();
}

void SelfParty::post_receive(const std::shared_ptr<Request>& request) {
  const Tag& tag = request->tag;
  if (receives_.contains(tag)) {
    request->finish(duplicate("receive", tag));
    return hub_.completed();
  }
  if (const auto send = find(sends_, tag)) {
    sends_.erase(tag);
    return match(send, request);
  }
  const auto it = unexpected_.find(tag);
  if (it == unexpected_.end()) {
    receives_.emplace(tag, request);
    return;
  }
  const Slot slot = std::move(it->second);
  unexpected_.erase(it);
  slot_bytes_ -= slot.terms.bytes;
  if (slot.terms != request->terms()) {
    const Error error = differ(tag.group, slot.terms.bytes, request);
    request->finish(error);
    hub_.late_mismatch(tag.group, self_, tag, error);
  } else {
    if (request->bytes > 0) std::memcpy(request->memory, slot.bytes.get(), request->bytes);
    request->finish();
  }
  hub_.completed();
}

void SelfParty::cancel(uint64_t group, const Error& error) {
  for (Requests* pending : {&sends_, &receives_}) {
    for (const auto& request : of_group(*pending, group)) {
      pending->erase(request->tag);
      request->finish(error);
      hub_.completed();
    }
  }
  std::erase_if(unexpected_, [&](const auto& entry) {
    if (entry.first.group != group) return false;
    slot_bytes_ -= entry.second.terms.bytes;
    return true;
  });
}

}  // namespace polyccl
