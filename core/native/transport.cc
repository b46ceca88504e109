#include "transport.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "results.h"

// One message: the link's request, and with whom.
struct polyccl_message {
  std::shared_ptr<polyccl::LinkRequest> request;
  int peer;
};

namespace polyccl {
namespace {

struct Lent {
  std::shared_ptr<LinkGroup> group;
  uint64_t id;
  std::vector<std::string> names;
  polyccl_transport table{};
};

thread_local std::string thread_error;
thread_local InterruptibleWaits* interruptible = nullptr;

Lent& lent(void* ctx) { return *static_cast<Lent*>(ctx); }

// Run `body`, which throws Error or returns; keep the words of what it throws.
template <typename Body>
polyccl_result guarded(Body body) noexcept {
  try {
    body();
    return POLYCCL_OK;
  } catch (const std::exception&) {
    const Error error = current_error();
    try {
      thread_error = error.what();
    } catch (...) {  // out of memory: the code alone must do
    }
    return result_of(error.code());
  } catch (...) {
    return POLYCCL_ERROR_INTERNAL;
  }
}

polyccl_result post(void* ctx, const polyccl_message_config* given, polyccl_message** message, bool sends) {
  *message = nullptr;
  return guarded([&] {
    polyccl_message_config m{};
    std::memcpy(&m, given, std::min<size_t>(given->struct_size, sizeof m));
    // The link has no field of 32 bits for the index: its upper half goes where channels are told apart, of which a
    // transport needs none.
    const Tag tag{lent(ctx).id, m.operation, m.slot, static_cast<uint16_t>(m.index),
                  static_cast<uint16_t>(m.index >> 16)};
    auto made = std::make_unique<polyccl_message>();
    made->peer = m.peer;
    LinkGroup& group = *lent(ctx).group;
    made->request = sends ? group.send(m.peer, tag, m.memory, m.bytes, m.fingerprint)
                          : group.recv(m.peer, tag, m.memory, m.bytes, m.fingerprint);
    *message = made.release();
  });
}

polyccl_result send(void* ctx, const polyccl_message_config* config, polyccl_message** message) {
  return post(ctx, config, message, true);
}

polyccl_result recv(void* ctx, const polyccl_message_config* config, polyccl_message** message) {
  return post(ctx, config, message, false);
}

// "rank 1 (...), rank 3 (...)": with whom messages are not done.
std::string pending_peers(const Lent& lent, std::span<polyccl_message* const> messages) {
  std::vector<int> peers;
  for (const polyccl_message* m : messages) {
    if (!m->request->done()) peers.push_back(m->peer);
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  std::string text;
  for (const int peer : peers) text += (text.empty() ? "" : ", ") + lent.names[static_cast<size_t>(peer)];
  return text;
}

polyccl_result wait(void* ctx, polyccl_message* const* messages, uint32_t n, int64_t deadline) {
  return guarded([&] {
    const std::span all(messages, n);
    const auto done = [](const polyccl_message* m) { return m->request->done(); };
    const auto failed = [&](const polyccl_message* m) { return done(m) && m->request->error().has_value(); };
    // Most messages are over in the order in which they were posted: look at those behind only where one is not.
    size_t first = 0;
    const auto over = [&] {
      while (first < n && done(all[first]) && !failed(all[first])) ++first;
      return first == n || std::any_of(all.begin() + static_cast<ptrdiff_t>(first), all.end(), failed);
    };
    InterruptibleWaits* const scope = InterruptibleWaits::current();
    const std::function<bool()> interrupted =
        scope == nullptr ? std::function<bool()>() : [scope] { return scope->ask(); };
    const bool in_time = over() || Link::instance().wait(over, deadline, interrupted);
    for (const polyccl_message* m : all) {
      if (failed(m)) throw *m->request->error();
    }
    if (!in_time && scope != nullptr && scope->ended()) throw Error(Code::kAborted, "interrupted");
    if (!in_time) throw Error(Code::kTimeout, "timed out waiting for " + pending_peers(lent(ctx), all));
  });
}

void end(void* ctx, polyccl_result result, const char* text) {
  // The communicator that owns this tells the other ranks, once it has seen what came of the operation.
  (void)guarded([&] { lent(ctx).group->fail(Error(meaning_of(result).code, text), false); });
}

void message_free(void* ctx, polyccl_message* message) {
  const std::unique_ptr<polyccl_message> owned(message);
  if (owned == nullptr || owned->request->done()) return;
  end(ctx, POLYCCL_ERROR_ABORTED, "a message was given up before it was done");
}

void last_error(void*, char* text, uint64_t size) {
  if (size == 0) return;
  const size_t length = std::min<size_t>(thread_error.size(), size - 1);
  std::memcpy(text, thread_error.data(), length);
  text[length] = '\0';
}

}  // namespace

InterruptibleWaits::InterruptibleWaits(const std::function<bool()>& interrupted)
    : interrupted_(interrupted), outer_(std::exchange(interruptible, this)) {}

InterruptibleWaits::~InterruptibleWaits() { interruptible = outer_; }

InterruptibleWaits* InterruptibleWaits::current() { return interruptible; }

bool InterruptibleWaits::ask() {
  if (!ended_ && interrupted_) ended_ = interrupted_();
  return ended_;
}

std::shared_ptr<const polyccl_transport> lend_link(std::shared_ptr<LinkGroup> group, uint64_t id,
                                                   std::vector<std::string> names) {
  const auto made = std::make_shared<Lent>();
  made->group = std::move(group);
  made->id = id;
  made->names = std::move(names);
  made->table = {
      .struct_size = sizeof(polyccl_transport),
      .reserved = 0,
      .ctx = made.get(),
      .send = send,
      .recv = recv,
      .wait = wait,
      .message_free = message_free,
      .end = end,
      .last_error = last_error,
  };
  return {made, &made->table};
}

}  // namespace polyccl
