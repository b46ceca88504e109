// How communicators end: when their last holder lets go of them, on whatever thread that is, and with the process.
#pragma once

#include <functional>
#include <memory>

#include "clock.h"
#include "communicator.h"

namespace polyccl {

// A communicator that may be let go of on any thread. On a worker thread, which it may have to wait for, it is destroyed
// apart, on a thread of its own.
std::shared_ptr<Communicator> make_communicator(CommunicatorConfig config);

// Say that the calling thread serves communicators or devices.
void mark_worker_thread() noexcept;

// Runs `destroy()` on a thread that is no worker, maybe without a lock of its caller's; false, without a call, if the
// communicator must stay until end_communicators().
using RunDestruction = bool (*)(const std::function<void()>& destroy);
void set_run_destruction(RunDestruction run) noexcept;

// The process ends: end what is on its way, and, with `destroy`, destroy the communicators that were kept for now, which
// needs all their threads. Returns by the deadline, but for what the libraries take for an orderly end.
void end_communicators(Deadline deadline, bool destroy);

}  // namespace polyccl
