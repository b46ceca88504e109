// Gloo's transport, on the messages that the host lends (polyccl_transport).
//
// Gloo's own TCP transport ends the process on a size that differs or a connection that is reset, loses data when a
// context closes, and leaves its threads behind; its interface is virtual, so another one can take its place. Only
// what Gloo's collectives ask of a transport is here: unbound buffers.
#pragma once

#include <gloo/context.h>
#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>
#include <polyccl/backend.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace polyccl_gloo {

// An error with its result.
class Failure : public std::runtime_error {
 public:
  Failure(polyccl_result result, const std::string& text) : std::runtime_error(text), result_(result) {}
  polyccl_result result() const { return result_; }

 private:
  polyccl_result result_;
};

// The host's transport, and the operation that runs on it.
class Transport {
 public:
  struct Free {
    const polyccl_transport* table;
    void operator()(polyccl_message* message) const { table->message_free(table->ctx, message); }
  };
  using Message = std::unique_ptr<polyccl_message, Free>;

  explicit Transport(const polyccl_transport& table) : table_(table) {}

  // Begin the next operation: its messages carry `fingerprint`, and its waits end by `deadline`.
  void begin(uint64_t fingerprint, int64_t deadline);

  // Start a message. Those of one operation, peer and slot match in order. Throws Failure.
  Message send(int peer, uint32_t slot, const void* memory, size_t bytes);
  Message receive(int peer, uint32_t slot, void* memory, size_t bytes);

  // Block until all are done. Throws Failure.
  void wait(const std::vector<polyccl_message*>& messages);

  // Fail what is pending and what comes, from any thread.
  void end(polyccl_result result, const std::string& text) { table_.end(table_.ctx, result, text.c_str()); }

 private:
  using Post = decltype(polyccl_transport::send);
  Message post(Post function, bool sends, int peer, uint32_t slot, void* memory, size_t bytes);
  void check(polyccl_result result) const;

  const polyccl_transport& table_;
  uint64_t operation_ = 0, fingerprint_ = 0;
  int64_t deadline_ = 0;
  std::map<std::tuple<bool, int, uint32_t>, uint32_t> posted_;  // in this operation, by direction, peer and slot
};

// Memory that Gloo's algorithms send from and receive into. Waits end by the operation's deadline, whatever timeout
// they pass.
class Buffer final : public gloo::transport::UnboundBuffer {
 public:
  Buffer(Transport& transport, void* data, size_t bytes) : UnboundBuffer(data, bytes), transport_(transport) {}
  ~Buffer() override = default;

  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override;
  bool waitSend(int* rank, std::chrono::milliseconds timeout) override;
  void abortWaitRecv() override;
  void abortWaitSend() override;
  void send(int peer, uint64_t slot, size_t offset, size_t bytes) override;
  void recv(int peer, uint64_t slot, size_t offset, size_t bytes) override;
  void recv(std::vector<int> peers, uint64_t slot, size_t offset, size_t bytes) override;

 private:
  // What is posted in one direction and not waited for yet, oldest first.
  struct Pending {
    int peer;
    Transport::Message message;
  };
  std::byte* at(size_t offset) const { return static_cast<std::byte*>(ptr) + offset; }
  size_t length(size_t offset, size_t bytes) const;
  bool wait(std::vector<Pending>& pending, int* rank);

  Transport& transport_;
  std::vector<Pending> sends_, receives_;
};

// What Gloo's collectives run on. The transport must outlive it.
class Context final : public gloo::Context {
 public:
  Context(Transport& transport, int rank, int size);
};

}  // namespace polyccl_gloo
