// The link, lent to a plugin as the message transport of one communicator.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "link/link.h"
#include "polyccl/backend.h"

namespace polyccl {

// Lend a group of the link with the communicator's ranks; `id` is the group's number, and nothing else uses the group.
// `names` are those of the members, for error texts.
std::shared_ptr<const polyccl_transport> lend_link(std::shared_ptr<LinkGroup> group, uint64_t id,
                                                   std::vector<std::string> names);

// For its scope, waits of transports on this thread ask `interrupted` every 100 ms and end with POLYCCL_ERROR_ABORTED once
// it says yes. So a library may be called on the thread of a user who may press Ctrl-C.
class InterruptibleWaits {
 public:
  explicit InterruptibleWaits(const std::function<bool()>& interrupted);
  ~InterruptibleWaits();
  InterruptibleWaits(const InterruptibleWaits&) = delete;
  InterruptibleWaits& operator=(const InterruptibleWaits&) = delete;

  // Whether a wait was ended so.
  bool ended() const { return ended_; }
  // Of this thread; null where there is none.
  static InterruptibleWaits* current();
  // For a wait to ask.
  bool ask();

 private:
  const std::function<bool()>& interrupted_;
  InterruptibleWaits* const outer_;
  bool ended_ = false;
};

}  // namespace polyccl
