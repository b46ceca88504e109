// The shared memory of one communicator: who has joined and whether they live, a ring of bytes for each directed pair
// of ranks, and a board for the few agreements (split, shrink) that the ranks' host threads make.
//
// The memory is a memfd that the maker of the unique id holds and the others open through /proc; it has no name, so
// nothing is left behind whoever is killed, and whenever.
#ifndef STAND_IN_REGION_H_
#define STAND_IN_REGION_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "failure.h"

namespace stand_in {

constexpr std::size_t kRingBytes = 64 * 1024;
constexpr int kMaxRanks = 64;

// Bytes on their way from one rank to another: written by one process, read by one other.
struct alignas(64) Ring {
  std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  alignas(64) std::byte bytes[kRingBytes];

  // Copy what fits, or what is there, up to n bytes; gives how many.
  std::size_t push(const std::byte* from, std::size_t n);
  std::size_t pull(std::byte* to, std::size_t n);
};

enum class Presence : std::uint32_t { kAbsent = 0, kJoining, kJoined, kFailed, kDestroyed, kAborted };

// One rank's part in an agreement. Two sets are used in turn, so that a fast rank does not overwrite what a slow one
// still reads.
struct Posting {
  std::atomic<std::uint64_t> round;      // the posting below is of this round
  std::atomic<std::uint64_t> published;  // the id below is of this round
  std::int32_t values[2];
  ncclUniqueId id;
};

enum class Board { kSplit = 0, kShrink = 1 };

struct alignas(64) Slot {
  std::atomic<Presence> presence;
  std::int32_t process;
  std::int32_t device;
  Posting postings[2][2];  // by board, then by parity of the round
};

// FAKE_CCL_WATCHDOG_S: after so long without progress an operation has failed.
std::chrono::seconds watchdog();

// Waits: a little spinning, then short sleeps; tells when nothing has moved until the watchdog's time is up.
class Patience {
 public:
  Patience();
  void progressed();
  // Wait a little. False once the time is up.
  bool wait();
  // True every few milliseconds: time for a look that costs a system call.
  bool time_to_look();

 private:
  std::chrono::steady_clock::time_point since_;
  std::chrono::steady_clock::time_point looked_;
  std::chrono::seconds limit_;
  int turns_ = 0;
};

Failure timed_out(const std::string& what);

class Region {
 public:
  // Make a unique id, and the memory behind it.
  static Failure make(ncclUniqueId* id);

  // Join as one of `ranks`, and wait until all have joined, or `cancelled`.
  static Failure join(const ncclUniqueId& id, int ranks, int rank, int device, const std::function<bool()>& cancelled,
                      std::shared_ptr<Region>* region);
  // join() makes it.
  Region(void* memory, std::size_t bytes, int ranks, int rank);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  Ring& ring(int from, int to);
  void set_presence(Presence presence);

  // Why nothing more is to be expected from a rank; empty while it takes part. A look at the process is a system call.
  std::string ended(int rank);
  // The same, or that its operations have failed.
  std::string gone(int rank);

  // Agree with `members` (ranks, this one among them): all post two values, and get those of all, member by member.
  using Values = std::vector<std::pair<int, int>>;
  Failure agree(Board board, const std::vector<int>& members, int first, int second,
                const std::function<bool()>& cancelled, Values* values);
  // The second half: the leader of a part gives `id` to the others, who wait for it.
  void publish(Board board, const ncclUniqueId& id);
  Failure receive(Board board, int leader, const std::function<bool()>& cancelled, ncclUniqueId* id);

  // The same number on all ranks, and another for each communicator.
  std::uint64_t hash() const;

  const int rank;
  const int ranks;

 private:
  struct Header;
  Slot& slot(int rank) const;
  Posting& posting(Board board, int rank) const;
  Failure enter(int device);
  Failure check_devices() const;
  Failure wait_for_all(int maker, const std::function<bool()>& cancelled);
  int process_handle(int rank);

  void* const memory_;
  const std::size_t bytes_;
  std::mutex mutex_;
  std::vector<int> handles_;  // pidfd by rank; -1 not opened, -2 the process is gone
  std::uint64_t rounds_[2] = {0, 0};
};

}  // namespace stand_in

#endif  // STAND_IN_REGION_H_
