// One operation while it runs: see task.h.
#include "task.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "arithmetic.h"
#include "device.h"

namespace stand_in {
namespace {

void move_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

bool reduces(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter; }

}  // namespace

Task::Task(const Operation& operation, int rank, int ranks)
    : operation_(operation),
      rank_(rank),
      ranks_(ranks),
      bytes_(operation.count * size_of(operation.dtype)),
      input_(operation.input == nullptr ? nullptr : view(operation.input)),
      output_(operation.output == nullptr ? nullptr : view(operation.output)) {}

Fingerprint Task::fingerprint(std::size_t bytes) const {
  const Kind kind = operation_.kind;
  const bool rooted =
      kind == Kind::kBroadcast || kind == Kind::kReduce || kind == Kind::kGather || kind == Kind::kScatter;
  return {
      kind,
      operation_.dtype,
      reduces(kind) ? operation_.reduction.op : 0,
      rooted ? operation_.peer : -1,
      kind == Kind::kPointToPoint || kind == Kind::kAlltoAllv ? bytes / size_of(operation_.dtype) : operation_.count,
      bytes};
}

// NCCL multiplies before it adds: by the caller's factor, or for the average of a floating type by 1/ranks.
void Task::scale_input() {
  const unsigned op = operation_.reduction.op;
  const bool average = op == 4 && !is_integer(operation_.dtype);
  if (op != kPreMulSum && !average) return;
  std::array<std::byte, 8> factor = operation_.reduction.factor;
  if (average) {
    reciprocal(operation_.dtype, factor.data(), static_cast<std::size_t>(ranks_));
  } else if (operation_.reduction.device_factor != nullptr) {
    std::memcpy(factor.data(), view(operation_.reduction.device_factor), size_of(operation_.dtype));
  }
  const std::size_t blocks = operation_.kind == Kind::kReduceScatter ? static_cast<std::size_t>(ranks_) : 1;
  scaled_.resize(bytes_ * blocks);
  scale(operation_.dtype, scaled_.data(), input_, factor.data(), operation_.count * blocks);
  input_ = scaled_.data();
}

void Task::prepare(Exchange& exchange) {
  if (reduces(operation_.kind)) return prepare_reduction(exchange);
  if (operation_.kind == Kind::kAlltoAllv) return prepare_all_to_all_v(exchange);
  prepare_movement(exchange);
}

void Task::prepare_reduction(Exchange& exchange) {
  scale_input();
  const bool scatter = operation_.kind == Kind::kReduceScatter;
  const bool rooted = operation_.kind == Kind::kReduce;
  const Fingerprint print = fingerprint(bytes_);
  contributions_.resize(static_cast<std::size_t>(ranks_));
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == rank_) continue;
    const std::size_t offset = scatter ? bytes_ * static_cast<std::size_t>(peer) : 0;
    if (!rooted || peer == operation_.peer) exchange.send(peer, print, input_ + offset);
    if (rooted && rank_ != operation_.peer) continue;
    auto& contribution = contributions_[static_cast<std::size_t>(peer)];
    contribution.resize(bytes_);
    exchange.receive(peer, print, contribution.data());
  }
}

// Who has blocks for others: all of them, or the root.
void Task::prepare_movement(Exchange& exchange) {
  const Kind kind = operation_.kind;
  const Fingerprint print = fingerprint(bytes_);
  if (kind == Kind::kPointToPoint) {
    if (operation_.is_send) return exchange.send(operation_.peer, print, input_);
    return exchange.receive(operation_.peer, print, output_);
  }
  const bool from_root = kind == Kind::kBroadcast || kind == Kind::kScatter;
  const bool to_root = kind == Kind::kGather;
  const bool cut_input = kind == Kind::kAlltoAll || kind == Kind::kScatter;
  const bool cut_output = kind == Kind::kAllGather || kind == Kind::kAlltoAll || kind == Kind::kGather;
  for (int peer = 0; peer < ranks_; ++peer) {
    const std::size_t offset = bytes_ * static_cast<std::size_t>(peer);
    const bool sends = (!from_root || rank_ == operation_.peer) && (!to_root || peer == operation_.peer);
    const bool receives = (!from_root || peer == operation_.peer) && (!to_root || rank_ == operation_.peer);
    const std::byte* from = input_ + (cut_input && input_ != nullptr ? offset : 0);
    std::byte* to = output_ + (cut_output && output_ != nullptr ? offset : 0);
    if (peer == rank_) {
      if (sends && receives) move_bytes(to, from, bytes_);
      continue;
    }
    if (sends) exchange.send(peer, print, from);
    if (receives) exchange.receive(peer, print, to);
  }
}

void Task::prepare_all_to_all_v(Exchange& exchange) {
  const std::size_t size = size_of(operation_.dtype);
  const auto& [send_counts, send_offsets, receive_counts, receive_offsets] = operation_.counts;
  for (int peer = 0; peer < ranks_; ++peer) {
    const auto i = static_cast<std::size_t>(peer);
    const std::byte* from = input_ + send_offsets[i] * size;
    std::byte* to = output_ + receive_offsets[i] * size;
    if (peer == rank_) {
      move_bytes(to, from, std::min(send_counts[i], receive_counts[i]) * size);
      continue;
    }
    exchange.send(peer, fingerprint(send_counts[i] * size), from);
    exchange.receive(peer, fingerprint(receive_counts[i] * size), to);
  }
}

void Task::finish() {
  if (!reduces(operation_.kind) || (operation_.kind == Kind::kReduce && rank_ != operation_.peer)) return;
  const std::size_t offset = operation_.kind == Kind::kReduceScatter ? bytes_ * static_cast<std::size_t>(rank_) : 0;
  const auto contribution = [&](int of) {
    return of == rank_ ? input_ + offset : contributions_[static_cast<std::size_t>(of)].data();
  };
  const unsigned op = operation_.reduction.op;
  const bool sums = op == 4 || op == kPreMulSum;
  std::vector<std::byte> total(bytes_);
  move_bytes(total.data(), contribution(0), bytes_);
  for (int of = 1; of < ranks_; ++of)
    combine(operation_.dtype, sums ? 0 : op, total.data(), contribution(of), operation_.count);
  if (op == 4 && is_integer(operation_.dtype))
    divide(operation_.dtype, total.data(), static_cast<std::size_t>(ranks_), operation_.count);
  if (operation_.bias != nullptr) combine(operation_.dtype, 0, total.data(), view(operation_.bias), operation_.count);
  move_bytes(output_, total.data(), bytes_);
}

}  // namespace stand_in
