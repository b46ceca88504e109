// One operation on one rank: its memory, its call, and whether the result is right.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "job.h"

namespace polyccl::native_test {

// A stream as a user of a device has one: current in the thread that made it. On the host there is none, and nothing to
// do.
class UsersStream {
 public:
  explicit UsersStream(std::shared_ptr<Device> device);
  ~UsersStream();
  UsersStream(const UsersStream&) = delete;
  UsersStream& operator=(const UsersStream&) = delete;

  UserStream face() const;
  void drain() const;  // wait until all that is on it is done

 private:
  std::shared_ptr<Device> device_;
  Device::Handle handle_;
};

// Memory where the job's tensors are: a device's is a stand-in's, and so the host's too.
std::shared_ptr<char> allocate(const Job& job, uint64_t bytes);

// What an operation looks like, the same on all ranks.
struct Form {
  Kind kind = POLYCCL_KIND_ALL_REDUCE;
  uint64_t count = 1000;  // float32 elements of a block; of the longest one, where ragged
  Reduction reduction = POLYCCL_REDUCTION_SUM;
  int root = 0;
  bool in_place = false;
  bool lists = false;   // blocks are not adjacent
  bool strict = false;  // sums by rank
  Deadline deadline = 0;

  std::string text() const;
};

// How the caller learns of the end.
enum class Waiting {
  kSynchronous,  // the call itself returns when it is done, or when the user's stream will wait for it
  kJoin,         // Work.wait(): the host waits; with a device's tensors the user's stream does
  kBlocking,     // Work.wait_blocking(): the host waits
};

class Trial {
 public:
  // Without a stream, a device's tensors are as NumPy's on a stand-in: ready at the call, and at its end.
  Trial(const Job& job, const Form& form, const UsersStream* stream = nullptr);

  // Start, or do, the operation. Throws its error, where it has one already.
  void issue(Communicator& comm, Waiting how, const Interrupted& interrupted = {});

  // Return when the result is there. Throws the operation's error.
  void wait() const;

  // The host waits for the operation's end, whatever that is; its error.
  std::optional<Error> end() const;
  bool done() const { return !work_ || work_->done(); }

  // Throw unless the output is what it must be.
  void check() const;

 private:
  uint64_t length(bool input, int block) const;
  float expected(int block, uint64_t i) const;
  Side side(bool input) const;
  void place(const Job& job, bool input);
  void fill();

  const int rank_, size_;
  const Form form_;
  const Operation& row_;
  const UsersStream* const stream_;
  bool reads_ = false, writes_ = false;
  std::shared_ptr<char> input_memory_, output_memory_;
  std::vector<char*> inputs_, outputs_;  // blocks
  Waiting how_ = Waiting::kSynchronous;
  std::shared_ptr<Work> work_;
};

// All collectives of about `count` elements in all, each twice, in forms that vary: in place, as lists, root, reduction.
std::vector<Form> forms(int size, uint64_t count);

}  // namespace polyccl::native_test
