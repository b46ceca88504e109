// How communicators end: when their last holder lets go of them, on whatever thread that is, and with the process.
#pragma once

#include <memory>

#include "clock.h"
#include "communicator.h"

namespace polyccl {

// A communicator that may be let go of on any thread. On a worker thread, which it may have to wait for, it is destroyed
// apart, on a thread of its own.
std::shared_ptr<Communicator> make_communicator(CommunicatorConfig config);

// Say that the calling thread serves communicators or devices.
void mark_worker_thread() noexcept;

// Keep a communicator for end_communicators(), where it cannot be destroyed now.
void hold_until_end(std::shared_ptr<Communicator> communicator);

// The process ends: end what is on its way, and, with `destroy`, destroy the communicators that were kept for now, which
// needs all their threads. Returns by the deadline, but for what the libraries take for an orderly end.
void end_communicators(Deadline deadline, bool destroy);

}  // namespace polyccl
