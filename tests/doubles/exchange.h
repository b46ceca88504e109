// What a rank sends to and receives from the others in one fused group. Messages of a directed pair keep their order;
// all pairs progress in turn, so that no order of calls inside a group can block. A message begins with a fingerprint
// of the call that sent it, and a receiver whose own call differs fails instead of taking the bytes.
#ifndef STAND_IN_EXCHANGE_H_
#define STAND_IN_EXCHANGE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "failure.h"
#include "region.h"

namespace stand_in {

enum class Kind : std::uint32_t {
  kPointToPoint = 1,
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kAlltoAll,
  kAlltoAllv,
  kGather,
  kScatter,
};

struct Fingerprint {
  Kind kind;
  std::uint32_t dtype;
  std::uint32_t op;
  std::int32_t root;
  std::uint64_t count;
  std::uint64_t bytes;  // that follow

  std::string text() const;
};

class Exchange {
 public:
  // `eager`: a send is done when it is in the ring; else when the peer has taken it, as a program must be able to
  // stand.
  Exchange(Region& region, bool eager);

  // The memory must stay until run() returns.
  void send(int peer, const Fingerprint& fingerprint, const std::byte* bytes);
  void receive(int peer, const Fingerprint& fingerprint, std::byte* bytes);

  // Until all is done, something is wrong, or `cancelled`.
  Failure run(const std::function<bool()>& cancelled);

 private:
  struct Message {
    Fingerprint fingerprint;
    const std::byte* from;
    std::byte* to;
    std::uint64_t done = 0;  // bytes, the fingerprint's included
    Fingerprint seen{};
  };
  struct Lane {
    std::vector<Message> messages;
    std::size_t front = 0;
  };

  bool push(int peer);
  bool pull(int peer, Failure* failure);
  bool finished(int peer);
  Failure look_at_peers();

  Region& region_;
  const bool eager_;
  std::vector<Lane> out_;
  std::vector<Lane> in_;
};

}  // namespace stand_in

#endif  // STAND_IN_EXCHANGE_H_
