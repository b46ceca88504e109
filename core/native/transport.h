// The link, lent to a plugin as the message transport of one communicator.
#pragma once

#include <cstdint>
#include <memory>

#include "link/link.h"
#include "polyccl/backend.h"

namespace polyccl {

// Lend a group of the link with the communicator's ranks; `id` is the group's number, and nothing else uses the group.
std::shared_ptr<const polyccl_transport> lend_link(std::shared_ptr<LinkGroup> group, uint64_t id);

}  // namespace polyccl
