// The shared memory of one communicator: see region.h.
#include "region.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <thread>

#include "environment.h"

namespace stand_in {
namespace {

#ifdef STAND_IN_HIP
constexpr char kMark[8] = "rccl-id";
#else
constexpr char kMark[8] = "nccl-id";
#endif

// What a unique id holds; the rest of its 128 bytes is zero.
struct Id {
  char mark[8];
  std::int32_t process;
  std::int32_t file;
  std::uint64_t secret;
};

// The memory of ids that this process has made and that wait for their ranks: file by secret.
struct Open {
  std::mutex mutex;
  std::map<std::uint64_t, int> files;
};
Open& open_ids() {
  static Open& open = *std::make_unique<Open>().release();
  return open;
}

void let_go(std::uint64_t secret) {
  Open& open = open_ids();
  const std::lock_guard lock(open.mutex);
  const auto entry = open.files.find(secret);
  if (entry == open.files.end()) return;
  close(entry->second);
  open.files.erase(entry);
}

int open_process(int process) { return static_cast<int>(syscall(SYS_pidfd_open, process, 0)); }

// kill(process, 0) succeeds on a zombie; a pidfd becomes readable when the process ends.
bool has_ended(int handle) {
  pollfd look{handle, POLLIN, 0};
  return poll(&look, 1, 0) > 0;
}

std::string errno_text(const std::string& what) { return what + ": " + std::strerror(errno); }

}  // namespace

struct Region::Header {
  std::uint64_t secret;
  std::atomic<std::uint32_t> ranks;  // 0 until the first rank joins
  std::atomic<std::uint32_t> joined;
};

// --- Rings and waits -------------------------------------------------------------------------------------------------

std::size_t Ring::push(const std::byte* from, std::size_t n) {
  const std::uint64_t at = written.load(std::memory_order_relaxed);
  const std::uint64_t room = kRingBytes - (at - read.load(std::memory_order_acquire));
  const std::size_t count = std::min<std::size_t>(n, room);
  const std::size_t start = at % kRingBytes;
  const std::size_t first = std::min(count, kRingBytes - start);
  if (first > 0) std::memcpy(bytes + start, from, first);
  if (count > first) std::memcpy(bytes, from + first, count - first);
  written.store(at + count, std::memory_order_release);
  return count;
}

std::size_t Ring::pull(std::byte* to, std::size_t n) {
  const std::uint64_t at = read.load(std::memory_order_relaxed);
  const std::uint64_t there = written.load(std::memory_order_acquire) - at;
  const std::size_t count = std::min<std::size_t>(n, there);
  const std::size_t start = at % kRingBytes;
  const std::size_t first = std::min(count, kRingBytes - start);
  if (first > 0) std::memcpy(to, bytes + start, first);
  if (count > first) std::memcpy(to + first, bytes, count - first);
  read.store(at + count, std::memory_order_release);
  return count;
}

std::chrono::seconds watchdog() {
  static const std::chrono::seconds limit(environment("FAKE_CCL_WATCHDOG_S", 60));
  return limit;
}

Patience::Patience() : since_(std::chrono::steady_clock::now()), looked_(since_), limit_(watchdog()) {}

void Patience::progressed() {
  turns_ = 0;
  since_ = std::chrono::steady_clock::now();
}

bool Patience::wait() {
  if (++turns_ < 100) {
    std::this_thread::yield();
    return true;
  }
  usleep(50);
  return std::chrono::steady_clock::now() - since_ < limit_;
}

bool Patience::time_to_look() {
  const auto now = std::chrono::steady_clock::now();
  if (now - looked_ < std::chrono::milliseconds(3)) return false;
  looked_ = now;
  return true;
}

Failure timed_out(const std::string& what) {
  constexpr auto code = STAND_IN_VERSION >= 23003 ? static_cast<ncclResult_t>(8) : ncclInternalError;
  return {code, what + ": nothing moved until the watchdog's time was up (FAKE_CCL_WATCHDOG_S)"};
}

// --- Joining ---------------------------------------------------------------------------------------------------------

Failure Region::make(ncclUniqueId* id) {
  const int file = memfd_create("stand-in communicator", MFD_CLOEXEC);
  if (file < 0) return {ncclSystemError, errno_text("memfd_create")};
  Id parts{};
  std::memcpy(parts.mark, kMark, sizeof(kMark));
  parts.process = getpid();
  parts.file = file;
  if (getrandom(&parts.secret, sizeof(parts.secret), 0) != sizeof(parts.secret) ||
      pwrite(file, &parts.secret, sizeof(parts.secret), 0) != sizeof(parts.secret)) {
    close(file);
    return {ncclSystemError, errno_text("writing the communicator's memory")};
  }
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id, &parts, sizeof(parts));
  Open& open = open_ids();
  const std::lock_guard lock(open.mutex);
  open.files[parts.secret] = file;
  return {};
}

Failure Region::join(const ncclUniqueId& id, int ranks, int rank, int device, const std::function<bool()>& cancelled,
                     std::shared_ptr<Region>* region) {
  Id parts{};
  std::memcpy(&parts, &id, sizeof(parts));
  if (std::memcmp(parts.mark, kMark, sizeof(kMark)) != 0)
    return {ncclInvalidArgument, "the unique id is none of this library's"};
  const std::string path = "/proc/" + std::to_string(parts.process) + "/fd/" + std::to_string(parts.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0)
    return {ncclRemoteError, "the process that made the unique id is gone, or the id has been used already"};
  const std::size_t bytes = sizeof(Ring) * static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks) +
                            sizeof(Slot) * static_cast<std::size_t>(ranks) + 4096;
  std::uint64_t secret = 0;
  const bool same = pread(file, &secret, sizeof(secret), 0) == sizeof(secret) && secret == parts.secret;
  if (!same) {
    close(file);
    return {ncclInvalidUsage, "the unique id has been used already: each communicator needs a new one"};
  }
  void* memory = MAP_FAILED;
  struct stat status {};
  // All ranks make it the same size; who has other ideas of it is refused by enter().
  if (fstat(file, &status) == 0 &&
      (static_cast<std::size_t>(status.st_size) >= bytes || ftruncate(file, static_cast<off_t>(bytes)) == 0)) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  }
  close(file);
  if (memory == MAP_FAILED) return {ncclSystemError, errno_text("mapping the communicator's memory")};
  auto made = std::make_shared<Region>(memory, bytes, ranks, rank);
  if (Failure failure = made->enter(device)) return failure;
  if (Failure failure = made->wait_for_all(parts.process, cancelled)) {
    made->set_presence(Presence::kAborted);
    return failure;
  }
  let_go(parts.secret);
  if (Failure failure = made->check_devices()) return failure;
  *region = std::move(made);
  return {};
}

Region::Region(void* memory, std::size_t bytes, int ranks_, int rank_)
    : rank(rank_), ranks(ranks_), memory_(memory), bytes_(bytes), handles_(static_cast<std::size_t>(ranks_), -1) {}

Region::~Region() {
  for (const int handle : handles_) {
    if (handle >= 0) close(handle);
  }
  munmap(memory_, bytes_);
}

Failure Region::enter(int device) {
  Header& header = *static_cast<Header*>(memory_);
  std::uint32_t expected = 0;
  const auto count = static_cast<std::uint32_t>(ranks);
  if (!header.ranks.compare_exchange_strong(expected, count) && expected != count) {
    return {ncclInvalidArgument, "rank " + std::to_string(rank) + " says that there are " + std::to_string(count) +
                                     " ranks, another said " + std::to_string(expected)};
  }
  Slot& own = slot(rank);
  Presence absent = Presence::kAbsent;
  if (!own.presence.compare_exchange_strong(absent, Presence::kJoining)) {
    return {ncclInvalidUsage, "rank " + std::to_string(rank) + " has joined already"};
  }
  own.process = getpid();
  own.device = device;
  own.presence = Presence::kJoined;
  ++header.joined;
  return {};
}

Failure Region::wait_for_all(int maker, const std::function<bool()>& cancelled) {
  const Header& header = *static_cast<Header*>(memory_);
  const int maker_handle = open_process(maker);
  Patience patience;
  Failure failure;
  while (header.joined < static_cast<std::uint32_t>(ranks) && !failure) {
    if (cancelled()) failure = {ncclInternalError, "the communicator was aborted while it was made"};
    if (!failure && patience.time_to_look()) {
      if (maker_handle < 0 || has_ended(maker_handle))
        failure = {ncclRemoteError, "the process that made the unique id is gone"};
      for (int peer = 0; peer < ranks && !failure; ++peer) {
        if (slot(peer).presence.load() < Presence::kJoined) continue;
        if (const std::string why = gone(peer); !why.empty()) failure = {ncclRemoteError, why};
      }
      if (header.joined == static_cast<std::uint32_t>(ranks)) failure = {};
    }
    if (!failure && !patience.wait()) failure = timed_out("waiting for all ranks to join");
  }
  if (maker_handle >= 0) close(maker_handle);
  return failure;
}

// NCCL before 2.30 has no two ranks on one device; later versions only where they are told to.
Failure Region::check_devices() const {
  if (environment("FAKE_CCL_REFUSE_SHARED_GPU", 0) == 0) return {};
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank || slot(peer).device != slot(rank).device) continue;
    return {ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " +
                                  std::to_string(peer) + " both on device " + std::to_string(slot(rank).device)};
  }
  return {};
}

Slot& Region::slot(int of) const { return reinterpret_cast<Slot*>(static_cast<std::byte*>(memory_) + 4096)[of]; }

Ring& Region::ring(int from, int to) {
  auto* rings =
      reinterpret_cast<Ring*>(static_cast<std::byte*>(memory_) + 4096 + sizeof(Slot) * static_cast<std::size_t>(ranks));
  return rings[static_cast<std::size_t>(from) * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(to)];
}

std::uint64_t Region::hash() const { return static_cast<const Header*>(memory_)->secret; }

void Region::set_presence(Presence presence) { slot(rank).presence = presence; }

int Region::process_handle(int of) {
  const std::lock_guard lock(mutex_);
  int& handle = handles_[static_cast<std::size_t>(of)];
  if (handle == -1) {
    handle = open_process(slot(of).process);
    if (handle < 0) handle = errno == ESRCH ? -2 : -3;
  }
  return handle;
}

std::string Region::gone(int of) {
  if (slot(of).presence == Presence::kFailed) return "rank " + std::to_string(of) + " has failed";
  return ended(of);
}

std::string Region::ended(int of) {
  const std::string name = "rank " + std::to_string(of);
  switch (slot(of).presence.load()) {
    case Presence::kAborted:
      return name + " has aborted the communicator";
    case Presence::kDestroyed:
      return name + " has destroyed its communicator";
    default:
      break;
  }
  const int handle = process_handle(of);
  if (handle == -2 || (handle >= 0 && has_ended(handle))) return "the process of " + name + " has ended";
  return "";
}

// --- Agreements ------------------------------------------------------------------------------------------------------

Posting& Region::posting(Board board, int of) const {
  const auto index = static_cast<std::size_t>(board);
  return slot(of).postings[index][rounds_[index] % 2];
}

Failure Region::agree(Board board, const std::vector<int>& members, int first, int second,
                      const std::function<bool()>& cancelled, Values* values) {
  const std::uint64_t round = ++rounds_[static_cast<std::size_t>(board)];
  Posting& own = posting(board, rank);
  own.values[0] = first;
  own.values[1] = second;
  own.round.store(round, std::memory_order_release);
  Patience patience;
  for (const int member : members) {
    Posting& theirs = posting(board, member);
    while (theirs.round.load(std::memory_order_acquire) < round) {
      if (cancelled()) return {ncclInternalError, "the communicator was aborted"};
      if (patience.time_to_look()) {
        const std::string why = ended(member);
        if (!why.empty() && theirs.round.load() < round) return {ncclRemoteError, why};
      }
      if (!patience.wait()) return timed_out("waiting for rank " + std::to_string(member) + " to make the same call");
    }
    values->emplace_back(theirs.values[0], theirs.values[1]);
  }
  return {};
}

void Region::publish(Board board, const ncclUniqueId& id) {
  Posting& own = posting(board, rank);
  own.id = id;
  own.published.store(rounds_[static_cast<std::size_t>(board)], std::memory_order_release);
}

Failure Region::receive(Board board, int leader, const std::function<bool()>& cancelled, ncclUniqueId* id) {
  const std::uint64_t round = rounds_[static_cast<std::size_t>(board)];
  Posting& theirs = posting(board, leader);
  Patience patience;
  while (theirs.published.load(std::memory_order_acquire) < round) {
    if (cancelled()) return {ncclInternalError, "the communicator was aborted"};
    if (patience.time_to_look()) {
      if (const std::string why = ended(leader); !why.empty() && theirs.published.load() < round)
        return {ncclRemoteError, why};
    }
    if (!patience.wait())
      return timed_out("waiting for rank " + std::to_string(leader) + " to make the new communicator");
  }
  *id = theirs.id;
  return {};
}

}  // namespace stand_in
