// Groups: what a thread calls between ncclGroupStart and ncclGroupEnd is collected, then done at once. A call outside a
// group is a group of its own.
#ifndef STAND_IN_GROUP_H_
#define STAND_IN_GROUP_H_

#include <functional>
#include <memory>

#include "comm.h"
#include "failure.h"

namespace stand_in {

void start_group();
ncclResult_t end_group();

// Remember the failure, for ncclGetLastError and for the group that is open; gives its code.
ncclResult_t report(const Failure& failure);

// An operation on a communicator.
ncclResult_t add(const std::shared_ptr<ncclComm>& comm, Operation operation);

// The making of a communicator, or another call of `comm` that waits for other ranks: `body` blocks, and runs beside
// the group's others.
ncclResult_t add_making(const std::shared_ptr<ncclComm>& comm, std::function<Failure()> body);

}  // namespace stand_in

#endif  // STAND_IN_GROUP_H_
