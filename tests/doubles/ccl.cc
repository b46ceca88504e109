// libnccl.so.2 and librccl.so.1: the C API. One place checks arguments; what is right goes to a group (group.h) and
// from there to a communicator.
//
// Environment (beside runtime.h's):
//   FAKE_CCL_EAGER=1           a send completes before it is received (a program must not rely on that)
//   FAKE_CCL_WATCHDOG_S        after so long without progress an operation fails (60)
//   FAKE_CCL_REFUSE_SHARED_GPU two ranks on one device are refused, as before NCCL 2.30
//   FAKE_HIP_ARCH              RCCL: on gfx94x the 8-bit types are FNUZ (gfx942)
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arithmetic.h"
#include "ccl_api.h"
#include "comm.h"
#include "device.h"
#include "environment.h"
#include "group.h"
#include "region.h"
#include "stand_in.h"

using stand_in::Board;
using stand_in::Config;
using stand_in::Failure;
using stand_in::Kind;
using stand_in::Operation;
using stand_in::report;

namespace {

Failure invalid(const std::string& call, const std::string& what) { return {ncclInvalidArgument, call + " : " + what}; }

void choose_formats() {
#ifdef STAND_IN_HIP
  const char* arch = std::getenv("FAKE_HIP_ARCH");
  stand_in::use_fnuz(arch == nullptr || *arch == 0 || std::strncmp(arch, "gfx94", 5) == 0);
#endif
}

// --- Making communicators --------------------------------------------------------------------------------------------

// What a rank becomes: known at once, or once the ranks have met.
struct Place {
  ncclUniqueId id;
  int ranks;
  int rank;
};

// The new communicator's handle is there at once; `meet` may block.
ncclResult_t make(ncclComm_t* handle, const Config& config, std::function<Failure(Place*)> meet) {
  int device = 0;
  if (Failure failure = stand_in::current_device(&device)) return report(failure);
  auto comm = std::make_shared<ncclComm>(device, config);
  *handle = ncclComm::add(comm);
  choose_formats();
  return stand_in::add_making(comm, [handle, comm, meet = std::move(meet)] {
    Place place{};
    Failure failure = meet(&place);
    if (!failure) failure = comm->join(place.id, place.ranks, place.rank);
    if (failure && comm->config.blocking) {
      ncclComm::remove(comm.get());
      *handle = nullptr;
    }
    return failure;
  });
}

ncclResult_t make_by_id(const char* call, ncclComm_t* handle, int ranks, const ncclUniqueId& id, int rank,
                        const ncclConfig_t* config) {
  if (handle == nullptr) return report(invalid(call, "comm argument is NULL"));
  *handle = nullptr;
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return report(invalid(call, "Invalid rank requested : " + std::to_string(rank) + "/" + std::to_string(ranks)));
  }
  if (ranks > stand_in::kMaxRanks) return report({ncclInternalError, "the stand-in has at most 64 ranks"});
  Config read;
  if (Failure failure = stand_in::read_config(config, &read)) return report(failure);
  return make(handle, read, [place = Place{id, ranks, rank}](Place* found) {
    *found = place;
    return Failure{};
  });
}

Failure find(const char* call, ncclComm_t handle, std::shared_ptr<ncclComm>* comm) {
  if (handle == nullptr) return invalid(call, "comm argument is NULL");
  *comm = ncclComm::find(handle);
  return *comm == nullptr ? invalid(call, "comm argument is invalid: destroyed, or never made") : Failure{};
}

// The id of a part of a communicator: its first member makes it, the others take it.
Failure share_id(ncclComm& parent, Board board, int leader, ncclUniqueId* id) {
  if (leader != parent.rank)
    return parent.region->receive(
        board, leader, [&] { return parent.aborted(); }, id);
  Failure failure = stand_in::Region::make(id);
  if (!failure) parent.region->publish(board, *id);
  return failure;
}

// All ranks of the parent tell their color and key. Without a color a rank has no place, but is there for the others.
Failure meet_for_split(ncclComm& parent, int color, int key, Place* place) {
  std::vector<int> all;
  for (int rank = 0; rank < parent.ranks; ++rank) all.push_back(rank);
  stand_in::Region::Values values;
  if (Failure failure = parent.region->agree(
          Board::kSplit, all, color, key, [&] { return parent.aborted(); }, &values))
    return failure;
  if (color == NCCL_SPLIT_NOCOLOR) return {};
  std::vector<int> part;
  for (const int rank : all) {
    if (values[static_cast<std::size_t>(rank)].first == color) part.push_back(rank);
  }
  std::stable_sort(part.begin(), part.end(), [&](int a, int b) {
    return values[static_cast<std::size_t>(a)].second < values[static_cast<std::size_t>(b)].second;
  });
  place->ranks = static_cast<int>(part.size());
  place->rank = static_cast<int>(std::find(part.begin(), part.end(), parent.rank) - part.begin());
  return share_id(parent, Board::kSplit, part.front(), &place->id);
}

#if STAND_IN_VERSION >= 22703
// The members that stay meet; the others may be dead.
Failure meet_for_shrink(ncclComm& parent, const std::vector<int>& members, Place* place) {
  place->ranks = static_cast<int>(members.size());
  place->rank = static_cast<int>(std::find(members.begin(), members.end(), parent.rank) - members.begin());
  stand_in::Region::Values values;
  if (Failure failure = parent.region->agree(
          Board::kShrink, members, place->ranks, 0, [&] { return parent.aborted(); }, &values)) {
    return failure;
  }
  for (const auto& [ranks, unused] : values) {
    if (ranks != place->ranks) return {ncclInvalidUsage, "CommShrink : the ranks exclude different numbers of ranks"};
  }
  return share_id(parent, Board::kShrink, members.front(), &place->id);
}
#endif

// --- Operations ------------------------------------------------------------------------------------------------------

struct Call {
  const char* name;
  bool reads = true;   // this rank has an input
  bool writes = true;  // this rank has an output
};

ncclResult_t enqueue(const Call& call, ncclComm_t handle, ncclDataType_t dtype, int op, Operation operation) {
  std::shared_ptr<ncclComm> comm;
  if (Failure failure = find(call.name, handle, &comm)) return report(failure);
  if (Failure failure = comm->usable()) return report(failure);
  constexpr unsigned kTypes = STAND_IN_VERSION >= 22400 ? 12 : 10;
  if (static_cast<unsigned>(dtype) >= kTypes)
    return report(invalid(call.name, "invalid type " + std::to_string(dtype)));
  operation.dtype = static_cast<unsigned>(dtype);
  const bool needs_peer = operation.peer != -1;
  if (needs_peer && (operation.peer < 0 || operation.peer >= comm->ranks)) {
    return report(invalid(call.name, "invalid root or peer " + std::to_string(operation.peer) + " (there are " +
                                         std::to_string(comm->ranks) + " ranks)"));
  }
  if (op >= 0) {
    if (Failure failure = comm->reduction(static_cast<unsigned>(op), operation.dtype, &operation.reduction)) {
      return report({failure.code, std::string(call.name) + " : " + failure.text});
    }
  }
  const bool is_root = operation.peer == comm->rank;
  const bool reads = call.reads || is_root;
  const bool writes = call.writes || is_root;
  if (operation.count > 0 && ((reads && operation.input == nullptr) || (writes && operation.output == nullptr))) {
    return report(invalid(call.name, "a buffer is NULL"));
  }
  return stand_in::add(comm, std::move(operation));
}

Operation operation(Kind kind, const void* input, void* output, std::size_t count, int peer, Stream stream) {
  Operation made{};
  made.kind = kind;
  made.input = input;
  made.output = output;
  made.count = count;
  made.peer = peer;
  made.stream = stream;
  return made;
}

// A root that is no rank must not look like "no root".
int root_of(int root) { return root < 0 ? -2 : root; }

ncclResult_t all_reduce(const void* input, void* output, std::size_t count, ncclDataType_t dtype, int op,
                        ncclComm_t comm, Stream stream, const void* bias = nullptr) {
  Operation made = operation(Kind::kAllReduce, input, output, count, -1, stream);
  made.bias = bias;
  return enqueue({"AllReduce"}, comm, dtype, op, std::move(made));
}

ncclResult_t broadcast(const void* input, void* output, std::size_t count, ncclDataType_t dtype, int root,
                       ncclComm_t comm, Stream stream) {
  return enqueue({"Broadcast", false, true}, comm, dtype, -1,
                 operation(Kind::kBroadcast, input, output, count, root_of(root), stream));
}

ncclResult_t reduce(const void* input, void* output, std::size_t count, ncclDataType_t dtype, int op, int root,
                    ncclComm_t comm, Stream stream) {
  return enqueue({"Reduce", true, false}, comm, dtype, op,
                 operation(Kind::kReduce, input, output, count, root_of(root), stream));
}

ncclResult_t all_gather(const void* input, void* output, std::size_t count, ncclDataType_t dtype, ncclComm_t comm,
                        Stream stream) {
  return enqueue({"AllGather"}, comm, dtype, -1, operation(Kind::kAllGather, input, output, count, -1, stream));
}

ncclResult_t reduce_scatter(const void* input, void* output, std::size_t count, ncclDataType_t dtype, int op,
                            ncclComm_t comm, Stream stream) {
  return enqueue({"ReduceScatter"}, comm, dtype, op, operation(Kind::kReduceScatter, input, output, count, -1, stream));
}

ncclResult_t point_to_point(bool is_send, const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                            int peer, ncclComm_t comm, Stream stream) {
  Operation made = operation(Kind::kPointToPoint, input, output, count, root_of(peer), stream);
  made.is_send = is_send;
  const void* buffer = is_send ? input : output;
  if (count > 0 && buffer == nullptr) return report(invalid(is_send ? "Send" : "Recv", "a buffer is NULL"));
  if (is_send) made.output = const_cast<void*>(input);
  if (!is_send) made.input = output;
  return enqueue({is_send ? "Send" : "Recv"}, comm, dtype, -1, std::move(made));
}

#if STAND_IN_VERSION >= 22803 || defined(STAND_IN_HIP)
ncclResult_t all_to_all(const void* input, void* output, std::size_t count, ncclDataType_t dtype, ncclComm_t comm,
                        Stream stream) {
  if (count > 0 && input == output) return report(invalid("AlltoAll", "in place is not supported"));
  return enqueue({"AlltoAll"}, comm, dtype, -1, operation(Kind::kAlltoAll, input, output, count, -1, stream));
}
#endif

#if STAND_IN_VERSION >= 22803
ncclResult_t gather(const void* input, void* output, std::size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                    Stream stream) {
  return enqueue({"Gather", true, false}, comm, dtype, -1,
                 operation(Kind::kGather, input, output, count, root_of(root), stream));
}

ncclResult_t scatter(const void* input, void* output, std::size_t count, ncclDataType_t dtype, int root,
                     ncclComm_t comm, Stream stream) {
  return enqueue({"Scatter", false, true}, comm, dtype, -1,
                 operation(Kind::kScatter, input, output, count, root_of(root), stream));
}
#endif

#if defined(STAND_IN_HIP) || defined(STAND_IN_FORK)
ncclResult_t all_to_all_v(const void* input, const std::size_t* counts, const std::size_t* offsets, void* output,
                          const std::size_t* output_counts, const std::size_t* output_offsets, ncclDataType_t dtype,
                          ncclComm_t handle, Stream stream) {
  std::shared_ptr<ncclComm> comm;
  if (Failure failure = find("AlltoAllv", handle, &comm)) return report(failure);
  Operation made = operation(Kind::kAlltoAllv, input, output, 0, -1, stream);
  const std::array<const std::size_t*, 4> given{counts, offsets, output_counts, output_offsets};
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (given[i] == nullptr) return report(invalid("AlltoAllv", "counts or displacements are NULL"));
    made.counts[i].assign(given[i], given[i] + comm->ranks);
  }
  return enqueue({"AlltoAllv"}, handle, dtype, -1, std::move(made));
}
#endif

#if STAND_IN_VERSION >= 23100
Failure check_config(const ncclCollConfig_t* config) {
  if (config != nullptr && config->magic != NCCL_API_MAGIC) {
    return {ncclInvalidArgument, "ncclCollConfig_t argument not initialized via NCCL_COLLCONFIG_INITIALIZER"};
  }
  return {};
}
#endif

// Every call with a communicator that only asks.
template <typename T>
ncclResult_t ask(const char* call, ncclComm_t handle, T* place, T (*answer)(const ncclComm&)) {
  std::shared_ptr<ncclComm> comm;
  if (Failure failure = find(call, handle, &comm)) return report(failure);
  if (place == nullptr) return report(invalid(call, "the output is NULL"));
  if (Failure failure = comm->usable(); failure.code == ncclInvalidArgument) return report(failure);
  *place = answer(*comm);
  return ncclSuccess;
}

}  // namespace

#ifdef STAND_IN_HIP
STAND_IN_API const char* polyccl_stand_in(void) { return "RCCL"; }
#elif defined(STAND_IN_FORK)
STAND_IN_API const char* polyccl_stand_in(void) { return "NCCLX"; }
#else
STAND_IN_API const char* polyccl_stand_in(void) { return "NCCL"; }
#endif

// --- The library -----------------------------------------------------------------------------------------------------

STAND_IN_API ncclResult_t ncclGetVersion(int* version) {
  if (version == nullptr) return ncclInvalidArgument;
  *version = STAND_IN_VERSION;
  return ncclSuccess;
}

STAND_IN_API const char* ncclGetErrorString(ncclResult_t result) {
  switch (static_cast<int>(result)) {
    case 0:
      return "no error";
    case 1:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case 2:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case 3:
      return "internal error - please report this issue to the NCCL developers";
    case 4:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case 5:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case 6:
      return "remote process exited or there was a network error";
    case 7:
      return "NCCL operation in progress";
    case 8:
      return STAND_IN_VERSION >= 23003 ? "timeout" : "unknown result code";
    default:
      return "unknown result code";
  }
}

STAND_IN_API const char* ncclGetLastError(ncclComm_t) { return stand_in::last_error(); }

STAND_IN_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (id == nullptr) return report(invalid("GetUniqueId", "uniqueId argument is NULL"));
  return report(stand_in::Region::make(id));
}

// --- Communicators ---------------------------------------------------------------------------------------------------

STAND_IN_API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return make_by_id("CommInitRank", comm, ranks, id, rank, nullptr);
}

STAND_IN_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                                 ncclConfig_t* config) {
  return make_by_id("CommInitRankConfig", comm, ranks, id, rank, config);
}

STAND_IN_API ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  if (comms == nullptr || count < 1)
    return report(invalid("CommInitAll", "comm argument is NULL, or ndev is not positive"));
  ncclUniqueId id{};
  if (Failure failure = stand_in::Region::make(&id)) return report(failure);
  stand_in::start_group();
  for (int rank = 0; rank < count; ++rank) {
    const stand_in::OnDevice current(devices == nullptr ? rank : devices[rank]);
    make_by_id("CommInitAll", &comms[rank], count, id, rank, nullptr);
  }
  return stand_in::end_group();
}

#if STAND_IN_VERSION >= 22300
STAND_IN_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int count, ncclUniqueId* ids,
                                                   ncclConfig_t* config) {
  if (ids == nullptr || count < 1) return report(invalid("CommInitRankScalable", "there is no unique id"));
  return make_by_id("CommInitRankScalable", comm, ranks, ids[0], rank, config);
}
#endif

STAND_IN_API ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  std::shared_ptr<ncclComm> comm;
  if (Failure failure = find("CommFinalize", handle, &comm)) return report(failure);
  if (Failure failure = comm->usable()) return report(failure);
  if (comm->config.blocking) {
    comm->drain();
    return ncclSuccess;
  }
  return stand_in::add_making(comm, [comm] {
    comm->drain();
    return Failure{};
  });
}

STAND_IN_API ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (handle == nullptr) return ncclSuccess;
  std::shared_ptr<ncclComm> comm;
  if (Failure failure = find("CommDestroy", handle, &comm)) return report(failure);
  comm->destroy();
  ncclComm::remove(handle);
  return ncclSuccess;
}

STAND_IN_API ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (handle == nullptr) return ncclSuccess;
  std::shared_ptr<ncclComm> comm;
  if (Failure failure = find("CommAbort", handle, &comm)) return report(failure);
  comm->abort();
  ncclComm::remove(handle);
  return ncclSuccess;
}

STAND_IN_API ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  std::shared_ptr<ncclComm> comm;
  if (Failure failure = find("CommGetAsyncError", handle, &comm)) return report(failure);
  if (error == nullptr) return report(invalid("CommGetAsyncError", "asyncError argument is NULL"));
  *error = comm->async_error();
  return ncclSuccess;
}

STAND_IN_API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return ask<int>("CommCount", comm, count, [](const ncclComm& c) { return c.ranks; });
}

STAND_IN_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return ask<int>("CommUserRank", comm, rank, [](const ncclComm& c) { return c.rank; });
}

STAND_IN_API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return ask<int>("CommCuDevice", comm, device, [](const ncclComm& c) { return c.device; });
}

STAND_IN_API ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* child,
                                        ncclConfig_t* config) {
  std::shared_ptr<ncclComm> parent;
  if (Failure failure = find("CommSplit", handle, &parent)) return report(failure);
  if (Failure failure = parent->usable()) return report(failure);
  if (child == nullptr) return report(invalid("CommSplit", "newcomm argument is NULL"));
  *child = nullptr;
  if (color < NCCL_SPLIT_NOCOLOR) return report(invalid("CommSplit", "color must be >= 0 or NCCL_SPLIT_NOCOLOR"));
  Config read = parent->config;
  if (config != nullptr) {
    if (Failure failure = stand_in::read_config(config, &read)) return report(failure);
  }
  if (color == NCCL_SPLIT_NOCOLOR) {
    return stand_in::add_making(parent, [=] {
      Place none{};
      return meet_for_split(*parent, color, key, &none);
    });
  }
  return make(child, read, [=](Place* place) { return meet_for_split(*parent, color, key, place); });
}

#if STAND_IN_VERSION >= 22703
STAND_IN_API ncclResult_t ncclCommShrink(ncclComm_t handle, int* excluded, int count, ncclComm_t* child,
                                         ncclConfig_t* config, int flags) {
  std::shared_ptr<ncclComm> parent;
  if (Failure failure = find("CommShrink", handle, &parent)) return report(failure);
  if (child == nullptr || (excluded == nullptr && count > 0))
    return report(invalid("CommShrink", "an argument is NULL"));
  *child = nullptr;
  const bool after_error = (flags & NCCL_SHRINK_ABORT) != 0;
  if (Failure failure = parent->usable(); failure && !(after_error && parent->region != nullptr))
    return report(failure);
  if (count <= 0 || count >= parent->ranks)
    return report(invalid("CommShrink", "the number of excluded ranks must be in [1, ranks)"));
  std::vector<int> members;
  for (int rank = 0; rank < parent->ranks; ++rank) {
    if (std::find(excluded, excluded + count, rank) == excluded + count) members.push_back(rank);
  }
  if (std::find(members.begin(), members.end(), parent->rank) == members.end())
    return report(invalid("CommShrink", "an excluded rank must not call it"));
  Config read = parent->config;
  if (config != nullptr) {
    if (Failure failure = stand_in::read_config(config, &read)) return report(failure);
  }
  if (after_error) parent->give_up();
  return make(child, read, [=](Place* place) { return meet_for_shrink(*parent, members, place); });
}
#endif

// --- Groups ----------------------------------------------------------------------------------------------------------

STAND_IN_API ncclResult_t ncclGroupStart() {
  stand_in::start_group();
  return ncclSuccess;
}

STAND_IN_API ncclResult_t ncclGroupEnd() { return stand_in::end_group(); }

// --- Memory ----------------------------------------------------------------------------------------------------------

STAND_IN_API ncclResult_t ncclMemAlloc(void** memory, std::size_t bytes) {
  if (memory == nullptr) return report(invalid("MemAlloc", "ptr argument is NULL"));
  int device = 0;
  if (Failure failure = stand_in::current_device(&device)) return report(failure);
  const stand_in::OnDevice current(device);
  return report(stand_in::allocate(memory, bytes));
}

STAND_IN_API ncclResult_t ncclMemFree(void* memory) {
  if (memory == nullptr) return ncclSuccess;
  int device = 0;
  if (Failure failure = stand_in::current_device(&device)) return report(failure);
  const stand_in::OnDevice current(device);
  return report(stand_in::release(memory));
}

STAND_IN_API ncclResult_t ncclCommRegister(const ncclComm_t handle, void* memory, std::size_t bytes,
                                           void** registration) {
  std::shared_ptr<ncclComm> comm;
  if (Failure failure = find("CommRegister", handle, &comm)) return report(failure);
  if (memory == nullptr || bytes == 0 || registration == nullptr)
    return report(invalid("CommRegister", "an argument is NULL or 0"));
  *registration = comm->add_registration(memory);
  return ncclSuccess;
}

STAND_IN_API ncclResult_t ncclCommDeregister(const ncclComm_t handle, void* registration) {
  std::shared_ptr<ncclComm> comm;
  if (Failure failure = find("CommDeregister", handle, &comm)) return report(failure);
  return report(comm->remove_registration(registration));
}

#if STAND_IN_VERSION >= 22703
STAND_IN_API ncclResult_t ncclCommWindowRegister(ncclComm_t handle, void* memory, std::size_t bytes,
                                                 ncclWindow_t* window, int) {
  if (window == nullptr) return report(invalid("CommWindowRegister", "win argument is NULL"));
  void* registration = nullptr;
  const ncclResult_t result = ncclCommRegister(handle, memory, bytes, &registration);
  *window = static_cast<ncclWindow_t>(registration);
  return result;
}

STAND_IN_API ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, ncclWindow_t window) {
  return ncclCommDeregister(handle, window);
}
#endif

#if STAND_IN_VERSION >= 22902
STAND_IN_API ncclResult_t ncclWinGetUserPtr(ncclComm_t handle, ncclWindow_t window, void** memory) {
  std::shared_ptr<ncclComm> comm;
  if (Failure failure = find("WinGetUserPtr", handle, &comm)) return report(failure);
  if (memory == nullptr) return report(invalid("WinGetUserPtr", "the output is NULL"));
  *memory = comm->registered(window);
  return *memory == nullptr ? report(invalid("WinGetUserPtr", "the window is unknown")) : ncclSuccess;
}
#endif

// --- Operators -------------------------------------------------------------------------------------------------------

STAND_IN_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype,
                                                   ncclScalarResidence_t residence, ncclComm_t handle) {
  std::shared_ptr<ncclComm> comm;
  if (Failure failure = find("RedOpCreatePreMulSum", handle, &comm)) return report(failure);
  if (Failure failure = comm->usable()) return report(failure);
  if (op == nullptr || scalar == nullptr || static_cast<unsigned>(dtype) >= stand_in::kDtypes) {
    return report(invalid("RedOpCreatePreMulSum", "an argument is NULL, or the type is unknown"));
  }
  stand_in::UserReduction made{};
  made.dtype = static_cast<unsigned>(dtype);
  made.reduction.op = stand_in::kPreMulSum;
  if (residence == ncclScalarHostImmediate) {
    std::memcpy(made.reduction.factor.data(), scalar, stand_in::size_of(made.dtype));
  } else {
    made.reduction.device_factor = scalar;
  }
  unsigned number = 0;
  const Failure failure = comm->add_reduction(made, &number);
  *op = static_cast<ncclRedOp_t>(number);
  return report(failure);
}

STAND_IN_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  std::shared_ptr<ncclComm> comm;
  if (Failure failure = find("RedOpDestroy", handle, &comm)) return report(failure);
  return report(comm->remove_reduction(static_cast<unsigned>(op)));
}

// --- Operations ------------------------------------------------------------------------------------------------------

STAND_IN_API ncclResult_t ncclAllReduce(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                        ncclRedOp_t op, ncclComm_t comm, Stream stream) {
  return all_reduce(input, output, count, dtype, static_cast<int>(op), comm, stream);
}

STAND_IN_API ncclResult_t ncclBroadcast(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                        int root, ncclComm_t comm, Stream stream) {
  return broadcast(input, output, count, dtype, root, comm, stream);
}

STAND_IN_API ncclResult_t ncclBcast(void* buffer, std::size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                                    Stream stream) {
  return broadcast(buffer, buffer, count, dtype, root, comm, stream);
}

STAND_IN_API ncclResult_t ncclReduce(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                     ncclRedOp_t op, int root, ncclComm_t comm, Stream stream) {
  return reduce(input, output, count, dtype, static_cast<int>(op), root, comm, stream);
}

STAND_IN_API ncclResult_t ncclAllGather(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                        ncclComm_t comm, Stream stream) {
  return all_gather(input, output, count, dtype, comm, stream);
}

STAND_IN_API ncclResult_t ncclReduceScatter(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                            ncclRedOp_t op, ncclComm_t comm, Stream stream) {
  return reduce_scatter(input, output, count, dtype, static_cast<int>(op), comm, stream);
}

STAND_IN_API ncclResult_t ncclSend(const void* input, std::size_t count, ncclDataType_t dtype, int peer,
                                   ncclComm_t comm, Stream stream) {
  return point_to_point(true, input, nullptr, count, dtype, peer, comm, stream);
}

STAND_IN_API ncclResult_t ncclRecv(void* output, std::size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                                   Stream stream) {
  return point_to_point(false, nullptr, output, count, dtype, peer, comm, stream);
}

#if STAND_IN_VERSION >= 22803
STAND_IN_API ncclResult_t ncclAlltoAll(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                       ncclComm_t comm, Stream stream) {
  return all_to_all(input, output, count, dtype, comm, stream);
}

STAND_IN_API ncclResult_t ncclGather(const void* input, void* output, std::size_t count, ncclDataType_t dtype, int root,
                                     ncclComm_t comm, Stream stream) {
  return gather(input, output, count, dtype, root, comm, stream);
}

STAND_IN_API ncclResult_t ncclScatter(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                      int root, ncclComm_t comm, Stream stream) {
  return scatter(input, output, count, dtype, root, comm, stream);
}
#endif

#if STAND_IN_VERSION >= 23100
STAND_IN_API ncclResult_t ncclAllReduceConfig(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                              ncclRedOp_t op, ncclComm_t comm, Stream stream,
                                              const ncclCollConfig_t* config) {
  if (Failure failure = check_config(config)) return report(failure);
  return all_reduce(input, output, count, dtype, static_cast<int>(op), comm, stream);
}

STAND_IN_API ncclResult_t ncclBroadcastConfig(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                              int root, ncclComm_t comm, Stream stream,
                                              const ncclCollConfig_t* config) {
  if (Failure failure = check_config(config)) return report(failure);
  return broadcast(input, output, count, dtype, root, comm, stream);
}

STAND_IN_API ncclResult_t ncclReduceConfig(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                           ncclRedOp_t op, int root, ncclComm_t comm, Stream stream,
                                           const ncclCollConfig_t* config) {
  if (Failure failure = check_config(config)) return report(failure);
  return reduce(input, output, count, dtype, static_cast<int>(op), root, comm, stream);
}

STAND_IN_API ncclResult_t ncclAllGatherConfig(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                              ncclComm_t comm, Stream stream, const ncclCollConfig_t* config) {
  if (Failure failure = check_config(config)) return report(failure);
  return all_gather(input, output, count, dtype, comm, stream);
}

STAND_IN_API ncclResult_t ncclReduceScatterConfig(const void* input, void* output, std::size_t count,
                                                  ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm, Stream stream,
                                                  const ncclCollConfig_t* config) {
  if (Failure failure = check_config(config)) return report(failure);
  return reduce_scatter(input, output, count, dtype, static_cast<int>(op), comm, stream);
}

STAND_IN_API ncclResult_t ncclAlltoAllConfig(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                             ncclComm_t comm, Stream stream, const ncclCollConfig_t* config) {
  if (Failure failure = check_config(config)) return report(failure);
  return all_to_all(input, output, count, dtype, comm, stream);
}

STAND_IN_API ncclResult_t ncclGatherConfig(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                           int root, ncclComm_t comm, Stream stream, const ncclCollConfig_t* config) {
  if (Failure failure = check_config(config)) return report(failure);
  return gather(input, output, count, dtype, root, comm, stream);
}

STAND_IN_API ncclResult_t ncclScatterConfig(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                            int root, ncclComm_t comm, Stream stream, const ncclCollConfig_t* config) {
  if (Failure failure = check_config(config)) return report(failure);
  return scatter(input, output, count, dtype, root, comm, stream);
}
#endif

// --- What RCCL and the forks add -------------------------------------------------------------------------------------

#if defined(STAND_IN_HIP) || defined(STAND_IN_FORK)
STAND_IN_API ncclResult_t ncclAllToAllv(const void* input, const std::size_t* counts, const std::size_t* offsets,
                                        void* output, const std::size_t* output_counts,
                                        const std::size_t* output_offsets, ncclDataType_t dtype, ncclComm_t comm,
                                        Stream stream) {
  return all_to_all_v(input, counts, offsets, output, output_counts, output_offsets, dtype, comm, stream);
}
#endif

#ifdef STAND_IN_HIP
STAND_IN_API ncclResult_t ncclAlltoAllv(const void* input, const std::size_t* counts, const std::size_t* offsets,
                                        void* output, const std::size_t* output_counts,
                                        const std::size_t* output_offsets, ncclDataType_t dtype, ncclComm_t comm,
                                        Stream stream) {
  return all_to_all_v(input, counts, offsets, output, output_counts, output_offsets, dtype, comm, stream);
}

STAND_IN_API ncclResult_t ncclAllToAll(const void* input, void* output, std::size_t count, ncclDataType_t dtype,
                                       ncclComm_t comm, Stream stream) {
  return all_to_all(input, output, count, dtype, comm, stream);
}

STAND_IN_API ncclResult_t ncclAllReduceWithBias(const void* input, void* output, std::size_t count,
                                                ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm, Stream stream,
                                                const void* bias) {
  return all_reduce(input, output, count, dtype, static_cast<int>(op), comm, stream, bias);
}

#ifdef STAND_IN_FORK
// Here only for its name, by which a caller knows the fork.
STAND_IN_API ncclResult_t ncclShardedRelayMultiGroupAllReduce() {
  return report({ncclInvalidUsage, "the stand-in does not model ncclShardedRelayMultiGroupAllReduce"});
}
#endif
#elif defined(STAND_IN_FORK)
STAND_IN_API ncclResult_t ncclCommGetUniqueHash(ncclComm_t handle, std::uint64_t* hash) {
  return ask<std::uint64_t>("CommGetUniqueHash", handle, hash, [](const ncclComm& c) { return c.region->hash(); });
}

STAND_IN_API ncclResult_t ncclGlobalRegisterWithPtr(void* memory, std::size_t bytes) {
  return memory == nullptr || bytes == 0 ? report(invalid("GlobalRegisterWithPtr", "an argument is NULL or 0"))
                                         : ncclSuccess;
}

STAND_IN_API ncclResult_t ncclGlobalDeregisterWithPtr(void* memory, std::size_t bytes) {
  return memory == nullptr || bytes == 0 ? report(invalid("GlobalDeregisterWithPtr", "an argument is NULL or 0"))
                                         : ncclSuccess;
}
#endif
