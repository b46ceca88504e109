// Sends and receives of one fused group: see exchange.h.
#include "exchange.h"

#include <array>

namespace stand_in {
namespace {

bool agree(const Fingerprint& ours, const Fingerprint& theirs) {
  // Point to point, only bytes matter: NCCL lets the two sides name different types.
  if (ours.kind != theirs.kind || ours.bytes != theirs.bytes) return false;
  if (ours.kind == Kind::kPointToPoint || ours.kind == Kind::kAlltoAllv) return true;
  return ours.dtype == theirs.dtype && ours.op == theirs.op && ours.root == theirs.root && ours.count == theirs.count;
}

}  // namespace

std::string Fingerprint::text() const {
  static constexpr std::array<const char*, 11> kNames{"?",         "Send/Recv", "AllReduce",     "Broadcast",
                                                      "Reduce",    "AllGather", "ReduceScatter", "AlltoAll",
                                                      "AlltoAllv", "Gather",    "Scatter"};
  const auto index = static_cast<std::size_t>(kind);
  std::string text = index < kNames.size() ? kNames[index] : "?";
  text += "(count " + std::to_string(count) + ", datatype " + std::to_string(dtype);
  if (kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter)
    text += ", op " + std::to_string(op);
  if (root >= 0) text += ", root " + std::to_string(root);
  return text + ", " + std::to_string(bytes) + " bytes)";
}

Exchange::Exchange(Region& region, bool eager)
    : region_(region),
      eager_(eager),
      out_(static_cast<std::size_t>(region.ranks)),
      in_(static_cast<std::size_t>(region.ranks)) {}

void Exchange::send(int peer, const Fingerprint& fingerprint, const std::byte* bytes) {
  out_[static_cast<std::size_t>(peer)].messages.push_back({fingerprint, bytes, nullptr});
}

void Exchange::receive(int peer, const Fingerprint& fingerprint, std::byte* bytes) {
  in_[static_cast<std::size_t>(peer)].messages.push_back({fingerprint, nullptr, bytes});
}

bool Exchange::push(int peer) {
  Lane& lane = out_[static_cast<std::size_t>(peer)];
  Ring& ring = region_.ring(region_.rank, peer);
  bool moved = false;
  while (lane.front < lane.messages.size()) {
    Message& message = lane.messages[lane.front];
    const std::uint64_t total = sizeof(Fingerprint) + message.fingerprint.bytes;
    while (message.done < total) {
      const bool head = message.done < sizeof(Fingerprint);
      const auto* from = head ? reinterpret_cast<const std::byte*>(&message.fingerprint) + message.done
                              : message.from + (message.done - sizeof(Fingerprint));
      const std::size_t count = ring.push(from, (head ? sizeof(Fingerprint) : total) - message.done);
      if (count == 0) return moved;
      message.done += count;
      moved = true;
    }
    ++lane.front;
  }
  return moved;
}

bool Exchange::pull(int peer, Failure* failure) {
  Lane& lane = in_[static_cast<std::size_t>(peer)];
  Ring& ring = region_.ring(peer, region_.rank);
  bool moved = false;
  while (lane.front < lane.messages.size()) {
    Message& message = lane.messages[lane.front];
    const std::uint64_t total = sizeof(Fingerprint) + message.fingerprint.bytes;
    while (message.done < total) {
      const bool head = message.done < sizeof(Fingerprint);
      auto* to = head ? reinterpret_cast<std::byte*>(&message.seen) + message.done
                      : message.to + (message.done - sizeof(Fingerprint));
      const std::size_t count = ring.pull(to, (head ? sizeof(Fingerprint) : total) - message.done);
      if (count == 0) return moved;
      message.done += count;
      moved = true;
      if (message.done == sizeof(Fingerprint) && !agree(message.fingerprint, message.seen)) {
        *failure = {ncclInvalidUsage, "mismatch: rank " + std::to_string(region_.rank) + " called " +
                                          message.fingerprint.text() + ", rank " + std::to_string(peer) + " called " +
                                          message.seen.text()};
        return moved;
      }
    }
    ++lane.front;
  }
  return moved;
}

bool Exchange::finished(int peer) {
  const Lane& out = out_[static_cast<std::size_t>(peer)];
  const Lane& in = in_[static_cast<std::size_t>(peer)];
  if (out.front < out.messages.size() || in.front < in.messages.size()) return false;
  if (eager_ || out.messages.empty()) return true;
  const Ring& ring = region_.ring(region_.rank, peer);
  return ring.read.load(std::memory_order_acquire) == ring.written.load(std::memory_order_relaxed);
}

// A peer that is gone can have put all we need into the ring before: the caller tries once more before it believes
// this.
Failure Exchange::look_at_peers() {
  for (int peer = 0; peer < region_.ranks; ++peer) {
    if (finished(peer)) continue;
    if (const std::string why = region_.gone(peer); !why.empty()) return {ncclRemoteError, why};
  }
  return {};
}

Failure Exchange::run(const std::function<bool()>& cancelled) {
  Patience patience;
  Failure lost;
  while (true) {
    bool moved = false;
    bool done = true;
    Failure failure;
    for (int peer = 0; peer < region_.ranks; ++peer) {
      moved = push(peer) || moved;
      moved = pull(peer, &failure) || moved;
      done = done && finished(peer);
    }
    // A mismatch with one peer is no reason to keep from the others what they need to see it too: all have been served
    // once above.
    if (failure) return failure;
    if (done) return {};
    if (cancelled()) return {ncclInternalError, "the communicator was aborted"};
    if (moved) {
      patience.progressed();
      lost = {};
      continue;
    }
    if (lost) return lost;
    if (patience.time_to_look()) {
      lost = look_at_peers();
      if (lost) continue;
    }
    if (!patience.wait()) return timed_out("an operation");
  }
}

}  // namespace stand_in
