// A communicator of the CCL stand-in: its ranks' shared memory, its state, and the operations that are on their way.
#ifndef STAND_IN_COMM_H_
#define STAND_IN_COMM_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exchange.h"
#include "failure.h"
#include "region.h"

namespace stand_in {

// A reduction as an operation uses it. 5 stands for every PREMUL_SUM.
constexpr unsigned kPreMulSum = 5;
struct Reduction {
  unsigned op = 0;
  std::array<std::byte, 8> factor{};    // PREMUL_SUM with a host scalar: taken when the operator was made
  const void* device_factor = nullptr;  // with a device scalar: read when the operation runs
};

struct UserReduction {
  Reduction reduction;
  unsigned dtype;
};

// One call, as it was made.
struct Operation {
  Kind kind;
  bool is_send = false;  // of point to point
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t count = 0;  // of one block
  unsigned dtype = 0;
  Reduction reduction{};
  int peer = -1;  // or root
  Stream stream = nullptr;
  const void* bias = nullptr;               // RCCL: added to the result
  std::vector<std::size_t> counts[4] = {};  // AlltoAllv: send counts and offsets, receive counts and offsets
};

// Configuration as the library understood it.
struct Config {
  bool blocking = true;
  bool split_share = false;
};

// What came of reading a ncclConfig_t (null: the defaults).
Failure read_config(const ncclConfig_t* config, Config* read);

}  // namespace stand_in

// The type that the API names. Handles are looked up in a table before use.
struct ncclComm : std::enable_shared_from_this<ncclComm> {
 public:
  ncclComm(int device, stand_in::Config config);

  static ncclComm_t add(std::shared_ptr<ncclComm> comm);
  static std::shared_ptr<ncclComm> find(ncclComm_t handle);
  static void remove(ncclComm_t handle);

  // Become one of `ranks`, and join the others; blocks until all are there.
  stand_in::Failure join(const ncclUniqueId& id, int ranks, int rank);

  // Whether a call may be made: an earlier error, an abort or an initialization that still runs forbids it.
  stand_in::Failure usable() const;
  ncclResult_t async_error() const;
  void fail(const stand_in::Failure& failure);

  // Between these a non-blocking call is on its way: the state is ncclInProgress.
  void begin();
  void end(const stand_in::Failure& failure);

  // Enqueue the operations as one fused group on the first one's stream; returns at once.
  stand_in::Failure launch(std::vector<stand_in::Operation> operations);

  // Until no operation is on its way, as long as the communicator has no error.
  void drain();
  // Ends what runs, lets nothing more start, and waits until nothing touches the callers' memory. Bounded.
  void abort();
  void destroy();
  // As abort(), but the ranks can still agree on a smaller communicator.
  void give_up();
  bool aborted() const { return aborted_; }

  stand_in::Failure add_reduction(const stand_in::UserReduction& reduction, unsigned* op);
  stand_in::Failure remove_reduction(unsigned op);
  stand_in::Failure reduction(unsigned op, unsigned dtype, stand_in::Reduction* found) const;

  // A registered buffer or window; the handle is a number that is no address.
  void* add_registration(void* memory);
  stand_in::Failure remove_registration(void* handle);
  void* registered(void* handle) const;

  int ranks = 0;  // this and the next two are set once joined
  int rank = 0;
  std::shared_ptr<stand_in::Region> region;
  const int device;
  const stand_in::Config config;

 private:
  void run(const std::vector<stand_in::Operation>& operations, std::uint64_t ticket);
  bool cancelled() const { return aborted_ || given_up_; }
  bool stop() const { return cancelled() || closing_; }
  bool broken() const { return state_ != ncclSuccess && state_ != ncclInProgress; }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  ncclResult_t state_ = ncclSuccess;
  std::atomic<bool> aborted_ = false;
  std::atomic<bool> given_up_ = false;
  std::atomic<bool> closing_ = false;
  int running_ = 0;             // operations whose work touches memory now
  std::uint64_t launched_ = 0;  // tickets: fused groups run in the order of their calls, on whatever streams
  std::uint64_t completed_ = 0;
  std::map<unsigned, stand_in::UserReduction> reductions_;
  std::map<void*, void*> registrations_;
  std::uintptr_t next_registration_ = 16;
};

namespace stand_in {

// The text that ncclGetLastError gives: the process's last error.
void remember(const Failure& failure);
const char* last_error();

}  // namespace stand_in

#endif  // STAND_IN_COMM_H_
