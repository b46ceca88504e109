// The cross lane: keeps the messages of several iterations in flight. A part of the executor, included by nothing else.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "executor.h"
#include "fingerprint.h"
#include "pieces.h"

namespace polyccl {

inline constexpr uint16_t kPlanChannel = 1;  // of the link's tags

// Keeps the cross steps of several iterations in flight. Used by one thread.
class Executor::CrossLane {
 public:
  explicit CrossLane(Executor& executor) : executor_(executor) {}

  void add(std::shared_ptr<Iteration> it) {
    Entry entry{std::move(it), {}};
    const auto& steps = entry.it->section->steps;
    for (uint32_t i = 0; i < steps.size(); ++i) {
      if (steps[i].lane == Lane::kCross) entry.waiting.push_back(i);
    }
    if (!entry.waiting.empty()) entries_.push_back(std::move(entry));
  }

  bool empty() const { return entries_.empty() && flights_.empty(); }

  // Start what can start and collect what is done, until nothing moves. Throws Error.
  void advance() {
    for (bool moved = true; moved;) {
      moved = collect();
      for (Entry& entry : entries_) moved |= start(entry);
      std::erase_if(entries_, [](const Entry& entry) { return entry.waiting.empty(); });
    }
  }

  bool something_landed() const {
    return std::any_of(flights_.begin(), flights_.end(), [](const Flight& f) { return f.request->done(); });
  }

  // Whether messages wait for what nobody tells of: they are to be looked at again soon.
  bool holds() const {
    return std::any_of(entries_.begin(), entries_.end(),
                       [](const Entry& entry) { return static_cast<bool>(entry.it->execution->may_start); });
  }

  // The operation that ends first, by its deadline.
  const Execution* most_urgent() const {
    const Execution* urgent = nullptr;
    const auto consider = [&urgent](const Iteration& it) {
      const Execution& e = *it.execution;
      if (e.call.deadline != 0 && (urgent == nullptr || e.call.deadline < urgent->call.deadline)) urgent = &e;
    };
    for (const Flight& f : flights_) consider(*f.it);
    for (const Entry& entry : entries_) consider(*entry.it);
    return urgent;
  }

  // "rank 1 (...), rank 3 (...)": whose messages are outstanding.
  std::string outstanding() const {
    std::vector<int> peers;
    for (const Flight& f : flights_) peers.push_back(f.it->section->steps[f.step].peer);
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    std::string text;
    for (int peer : peers) text += (text.empty() ? "" : ", ") + executor_.legs_.member(peer);
    return text;
  }

  // After a failure: everything counts as done. The group has failed, so that no request touches memory any more.
  void skip() {
    for (auto& f : std::exchange(flights_, {})) mark_once(*f.it, f.step);
    for (auto& entry : std::exchange(entries_, {})) {
      for (uint32_t step : entry.waiting) mark_once(*entry.it, step);
    }
  }

 private:
  struct Entry {
    std::shared_ptr<Iteration> it;
    std::vector<uint32_t> waiting;  // steps not yet started
  };
  struct Flight {
    std::shared_ptr<Iteration> it;
    uint32_t step;
    std::shared_ptr<LinkRequest> request;
    uint64_t bytes;
    int64_t begin;
  };

  // An error in the middle of a pass leaves steps in the lists that are done.
  void mark_once(Iteration& it, uint32_t step) {
    if (!it.done[step]) executor_.mark(it, step);
  }

  bool collect() {
    bool moved = false;
    for (size_t i = 0; i < flights_.size();) {
      Flight& f = flights_[i];
      if (!f.request->done()) {
        ++i;
        continue;
      }
      if (const auto& error = f.request->error()) {
        // Sizes that differ harm no one else where the user's own messages do not match.
        if (f.it->execution->tags.empty() || error->code() != Code::kMismatch) throw *error;
        f.it->execution->error = *error;
      }
      const Step& step = f.it->section->steps[f.step];
      executor_.trace_step(*f.it, step, f.bytes, f.begin);
      const auto it = std::move(f.it);
      const uint32_t done = f.step;
      f = std::move(flights_.back());
      flights_.pop_back();
      executor_.mark(*it, done);
      moved = true;
    }
    return moved;
  }

  bool start(Entry& entry) {
    bool moved = false;
    Iteration& it = *entry.it;
    if (auto& may_start = it.execution->may_start) {
      if (!may_start()) return false;
      may_start = {};
    }
    size_t kept = 0;
    for (uint32_t position : entry.waiting) {
      const Step& step = it.section->steps[position];
      if (!it.ready(step)) {
        entry.waiting[kept++] = position;
      } else if (is_message(step)) {
        moved |= launch(entry.it, position, step);
      } else {
        executor_.run_step(it, step, Lane::kCross);
        executor_.mark(it, position);
        moved = true;
      }
    }
    entry.waiting.resize(kept);
    return moved;
  }

  // True where the message is done already: an empty one of a ragged section, which neither side sends.
  bool launch(const std::shared_ptr<Iteration>& it, uint32_t position, const Step& step) {
    const Execution& e = *it->execution;
    const bool sends = step.verb == Verb::kSend;
    const Piece piece = resolve(*it, sends ? step.src[0] : step.dst[0]);
    if (piece.count == 0 && e.tags.empty()) {
      executor_.mark(*it, position);
      return true;
    }
    const uint64_t bytes = piece.count * e.call.element();
    const Tag tag = e.tags.empty() ? Tag{executor_.tag_group_, e.sequence, it->index, step.ordinal, kPlanChannel}
                                   : e.tags[position];
    const int64_t begin = executor_.trace_.on() ? now_ns() : 0;
    const uint64_t fingerprint = e.tags.empty() ? pair_fingerprint(e.fingerprint, e.call, executor_.rank_, step.peer)
                                 : e.fingerprints.empty() ? 0
                                                          : e.fingerprints[position];
    auto request = sends ? executor_.group_.send(step.peer, tag, piece.memory, bytes, fingerprint)
                         : executor_.group_.recv(step.peer, tag, piece.memory, bytes, fingerprint);
    if (sends) executor_.legs_.sent(step.peer, bytes);
    flights_.push_back({it, position, std::move(request), bytes, begin});
    return flights_.back().request->done();
  }

  Executor& executor_;
  std::vector<Entry> entries_;
  std::vector<Flight> flights_;
};

}  // namespace polyccl
