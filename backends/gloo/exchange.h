// Direct transfers among the ranks of a communicator: the ground for point to point, and for collectives whose best
// plan is one exchange.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm.h"

namespace polyccl_gloo {

// A set of transfers that run together. Receives are posted before sends, whatever the order of the calls: Gloo sends
// once the receiver is ready, and with sends posted first two ranks take turns instead of using both directions. Long
// transfers go in pieces, all posted at once, so that a connection that fails finds some of them waiting and wakes the
// waiter.
class Exchange {
 public:
  explicit Exchange(Comm& comm) : comm_(comm) {}

  // `slot` is the first of pieces(bytes) consecutive slots, the same on both sides. 0 bytes are no transfer.
  void send(int peer, uint64_t slot, const void* data, size_t bytes);
  void receive(int peer, uint64_t slot, void* data, size_t bytes);

  // Run all of it; returns when everything has arrived and been sent. Throws.
  void run();

  static uint64_t pieces(size_t bytes) { return (bytes + kPiece - 1) / kPiece; }

 private:
  static constexpr size_t kPiece = size_t{1} << 20;

  struct Transfer {
    int peer;
    uint64_t slot;
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
  };

  Comm& comm_;
  std::vector<Transfer> receives_, sends_;
};

// The first slot of a collective's exchange. Gloo's own algorithms use prefixes 1 to 8 (gloo/types.h), point to point
// has one of its own.
inline uint64_t exchange_slot(uint32_t tag) { return (uint64_t{0x40} << 56) | (uint64_t{tag} << 24); }
inline uint64_t message_slot(uint64_t number) { return (uint64_t{0x41} << 56) | number; }

}  // namespace polyccl_gloo
