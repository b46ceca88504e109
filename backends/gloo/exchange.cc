// Direct transfers among the ranks of a communicator: see exchange.h.
#include "exchange.h"

#include <algorithm>

namespace polyccl_gloo {

void Exchange::send(int peer, uint64_t slot, const void* data, size_t bytes) {
  if (bytes == 0) return;
  // Gloo takes no pointer to const; a buffer that only sends is only read.
  sends_.push_back({peer, slot, comm_.context()->createUnboundBuffer(const_cast<void*>(data), bytes)});
}

void Exchange::receive(int peer, uint64_t slot, void* data, size_t bytes) {
  if (bytes == 0) return;
  receives_.push_back({peer, slot, comm_.context()->createUnboundBuffer(data, bytes)});
}

void Exchange::run() {
  const auto each_piece = [](const Transfer& transfer, const auto& action) {
    const size_t bytes = transfer.buffer->size;
    for (uint64_t i = 0; i < pieces(bytes); ++i) {
      action(transfer.slot + i, i * kPiece, std::min(kPiece, bytes - i * kPiece));
    }
  };
  for (Transfer& t : receives_) {
    each_piece(t, [&](uint64_t slot, size_t offset, size_t bytes) { t.buffer->recv(t.peer, slot, offset, bytes); });
  }
  for (Transfer& t : sends_) {
    each_piece(t, [&](uint64_t slot, size_t offset, size_t bytes) { t.buffer->send(t.peer, slot, offset, bytes); });
  }
  for (Transfer& t : receives_) each_piece(t, [&](uint64_t, size_t, size_t) { t.buffer->waitRecv(); });
  for (Transfer& t : sends_) each_piece(t, [&](uint64_t, size_t, size_t) { t.buffer->waitSend(); });
}

}  // namespace polyccl_gloo
