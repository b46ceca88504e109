#include "transport.h"

#include <chrono>
#include <utility>

namespace polyccl_gloo {
namespace {

// Gloo's slot is a prefix of 8 bits for the collective, 32 bits of a tag, and a number of 24 bits. The tag is not used:
// each operation has a number of its own in the transport.
uint32_t slot_of(uint64_t slot) {
  constexpr uint64_t kNumber = (uint64_t{1} << 24) - 1;
  return static_cast<uint32_t>((slot >> 56) << 24 | (slot & kNumber));
}

// Gloo's collectives look whether there is a pair for each rank, and send by buffers. Its older algorithms, which send by
// pairs, are not used.
class NoPair final : public gloo::transport::Pair {
 public:
  const gloo::transport::Address& address() const override { refuse(); }
  void connect(const std::vector<char>&) override { refuse(); }
  void close() override {}
  void setSync(bool, bool) override { refuse(); }
  std::unique_ptr<gloo::transport::Buffer> createSendBuffer(int, void*, size_t) override { refuse(); }
  std::unique_ptr<gloo::transport::Buffer> createRecvBuffer(int, void*, size_t) override { refuse(); }
  void send(gloo::transport::UnboundBuffer*, uint64_t, size_t, size_t) override { refuse(); }
  void recv(gloo::transport::UnboundBuffer*, uint64_t, size_t, size_t) override { refuse(); }
  bool isConnected() { return true; }  // virtual since 2023

 private:
  [[noreturn]] static void refuse() {
    throw Failure(POLYCCL_ERROR_INTERNAL, "Gloo asks a pair for more than its presence");
  }
};

class BufferContext final : public gloo::transport::Context {
 public:
  BufferContext(Transport& transport, int rank, int size)
      : gloo::transport::Context(rank, size), transport_(transport) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) pairs_[static_cast<size_t>(peer)] = std::make_unique<NoPair>();
    }
  }

  std::unique_ptr<gloo::transport::Pair>& createPair(int peer) override { return pairs_[static_cast<size_t>(peer)]; }
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* data, size_t bytes) override {
    return std::make_unique<Buffer>(transport_, data, bytes);
  }

 private:
  Transport& transport_;
};

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Transport
// ---------------------------------------------------------------------------------------------------------------------

void Transport::begin(uint64_t fingerprint, int64_t deadline) {
  ++operation_;
  fingerprint_ = fingerprint;
  deadline_ = deadline;
  posted_.clear();
}

Transport::Message Transport::send(int peer, uint32_t slot, const void* memory, size_t bytes) {
  return post(table_.send, true, peer, slot, const_cast<void*>(memory), bytes);  // only read
}

Transport::Message Transport::receive(int peer, uint32_t slot, void* memory, size_t bytes) {
  return post(table_.recv, false, peer, slot, memory, bytes);
}

Transport::Message Transport::post(Post function, bool sends, int peer, uint32_t slot, void* memory, size_t bytes) {
  polyccl_message_config config{};
  config.struct_size = sizeof config;
  config.peer = peer;
  config.operation = operation_;
  config.fingerprint = fingerprint_;
  config.slot = slot;
  config.index = posted_[{sends, peer, slot}]++;
  config.memory = memory;
  config.bytes = bytes;
  polyccl_message* message = nullptr;
  check(function(table_.ctx, &config, &message));
  return Message(message, Free{&table_});
}

void Transport::wait(const std::vector<polyccl_message*>& messages) {
  check(table_.wait(table_.ctx, messages.data(), static_cast<uint32_t>(messages.size()), deadline_));
}

void Transport::check(polyccl_result result) const {
  if (result == POLYCCL_OK) return;
  std::string text(4096, '\0');
  table_.last_error(table_.ctx, text.data(), text.size());
  text.resize(text.find('\0'));
  throw Failure(result, text);
}

// ---------------------------------------------------------------------------------------------------------------------
// Buffer
// ---------------------------------------------------------------------------------------------------------------------

size_t Buffer::length(size_t offset, size_t bytes) const {
  return bytes == kUnspecifiedByteCount ? size - offset : bytes;
}

void Buffer::send(int peer, uint64_t slot, size_t offset, size_t bytes) {
  sends_.push_back({peer, transport_.send(peer, slot_of(slot), at(offset), length(offset, bytes))});
}

void Buffer::recv(int peer, uint64_t slot, size_t offset, size_t bytes) {
  receives_.push_back({peer, transport_.receive(peer, slot_of(slot), at(offset), length(offset, bytes))});
}

void Buffer::recv(std::vector<int> peers, uint64_t slot, size_t offset, size_t bytes) {
  if (peers.size() != 1) {
    throw Failure(POLYCCL_ERROR_INTERNAL, "Gloo receives from any of several ranks, which this transport cannot");
  }
  recv(peers.front(), slot, offset, bytes);
}

bool Buffer::waitRecv(int* rank, std::chrono::milliseconds) { return wait(receives_, rank); }

bool Buffer::waitSend(int* rank, std::chrono::milliseconds) { return wait(sends_, rank); }

bool Buffer::wait(std::vector<Pending>& pending, int* rank) {
  if (pending.empty()) throw Failure(POLYCCL_ERROR_INTERNAL, "Gloo waits for a message that it has not posted");
  transport_.wait({pending.front().message.get()});
  if (rank != nullptr) *rank = pending.front().peer;
  pending.erase(pending.begin());
  return true;
}

void Buffer::abortWaitRecv() { transport_.end(POLYCCL_ERROR_ABORTED, "a wait for a message was aborted"); }

void Buffer::abortWaitSend() { abortWaitRecv(); }

// ---------------------------------------------------------------------------------------------------------------------
// Context
// ---------------------------------------------------------------------------------------------------------------------

Context::Context(Transport& transport, int rank, int size) : gloo::Context(rank, size) {
  transportContext_ = std::make_shared<BufferContext>(transport, rank, size);
  setTimeout(std::chrono::hours(24));  // Gloo wants one; the operation's deadline is what counts
}

}  // namespace polyccl_gloo
