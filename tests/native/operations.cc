// What goes well.
#include <future>

#include "scenarios.h"
#include "trial.h"

namespace polyccl::native_test {
namespace {

constexpr Waiting kWaitings[] = {Waiting::kSynchronous, Waiting::kJoin, Waiting::kBlocking};

// Each in turn as a user on a stream would, and as one without.
const UsersStream* in_turn(const Job& job, const UsersStream& stream, size_t turn) {
  return job.device() && turn % 2 == 0 ? &stream : nullptr;
}

// ---- messages -------------------------------------------------------------------------------------------------------

// `count` floats for one message, which say who sent it.
class Letter {
 public:
  Letter(const Job& job, uint64_t count, int sender, bool written)
      : memory_(allocate(job, count * sizeof(float))), count_(count), sender_(sender) {
    for (uint64_t i = 0; i < count; ++i) data()[i] = written ? value(i) : -1;
  }

  Call call(bool sends, int peer, uint32_t tag, const UsersStream* stream) const {
    Call call;
    call.row = find_operation(sends ? POLYCCL_KIND_SEND : POLYCCL_KIND_RECV);
    call.dtype = POLYCCL_DTYPE_FLOAT32;
    call.peer = peer;
    call.tag = tag;
    call.count = count_;
    (sends ? call.input : call.output).blocks = {memory_.get()};
    call.deadline = now_ns() + kPatience;
    if (stream != nullptr) call.stream = stream->face();
    return call;
  }

  void check() const {
    for (uint64_t i = 0; i < count_; ++i) {
      require(data()[i] == value(i), "a message of " + std::to_string(count_) + " has what was sent");
    }
  }

  const std::shared_ptr<char>& memory() const { return memory_; }

 private:
  float* data() const { return reinterpret_cast<float*>(memory_.get()); }
  float value(uint64_t i) const { return static_cast<float>(static_cast<uint64_t>(sender_) * 1000 + i % 997); }

  std::shared_ptr<char> memory_;
  uint64_t count_;
  int sender_;
};

// Everyone sends to the next rank and receives from the one before, in one batch.
void pass_round(const Job& job, Communicator& comm, uint64_t count, uint32_t tag, bool async,
                const UsersStream* stream) {
  const int next = (job.rank() + 1) % job.size(), before = (job.rank() + job.size() - 1) % job.size();
  const Letter out(job, count, job.rank(), true), in(job, count, before, false);
  const Keep keep = [held = std::vector{out.memory(), in.memory()}] {
    return std::make_shared<std::vector<std::shared_ptr<char>>>(held);
  };
  const auto work =
      comm.issue_batch({in.call(false, before, tag, stream), out.call(true, next, tag, stream)}, async, keep, {});
  if (work && work->join()) {
    work->join()();
  } else if (work) {
    require(work->wait(now_ns() + kPatience, {}), "a batch ends");
    work->raise();
  }
  if (stream != nullptr) stream->drain();
  in.check();
}

// Rank 0 takes a message of every other rank, in the order in which they come.
void take_from_any(const Job& job, Communicator& comm) {
  constexpr uint32_t kTag = 9;
  constexpr uint64_t kCount = 3000;
  if (job.rank() != 0) {
    const Letter out(job, kCount, job.rank(), true);
    (void)comm.issue(out.call(true, 0, kTag, nullptr), false, {}, {});
    return;
  }
  for (int left = job.size() - 1; left > 0; --left) {
    const int sender = comm.find_sender(kTag, now_ns() + kPatience, {});
    const Letter in(job, kCount, sender, false);
    (void)comm.issue(in.call(false, sender, kTag, nullptr), false, {}, {});
    in.check();
  }
}

// ---- collectives ----------------------------------------------------------------------------------------------------

// All forms at once; this thread and another wait for half of them each, and pass messages meanwhile.
void overlap(const Job& job, Communicator& comm, uint64_t count, const UsersStream& stream) {
  std::vector<std::unique_ptr<Trial>> trials;
  for (const Form& form : forms(job.size(), count)) {
    const size_t turn = trials.size();
    trials.push_back(std::make_unique<Trial>(job, form, in_turn(job, stream, turn / 2)));
    trials.back()->issue(comm, turn % 2 == 0 ? Waiting::kJoin : Waiting::kBlocking);
  }
  auto other = std::async(std::launch::async, [&] {
    for (size_t i = 1; i < trials.size(); i += 2) {
      trials[i]->wait();
      trials[i]->check();
    }
  });
  const bool by_library = job.device() && !job.layout().is_bridge();
  for (uint32_t tag = by_library ? 1 : 0; tag < 4; ++tag) pass_round(job, comm, 200 + count / 2, tag, true, nullptr);
  for (size_t i = 0; i < trials.size(); i += 2) {
    trials[i]->wait();
    trials[i]->check();
  }
  other.get();
}

}  // namespace

void operations(Job& job) {
  const UsersStream stream(job.device());
  for (const bool check : {false, true}) {
    const auto comm = job.communicator(check ? "checked" : "unchecked", check);
    size_t turn = check ? 1 : 0;
    for (const uint64_t count : {0, 1, 1000, 100'000}) {
      if (check && count > 1000) continue;
      for (const Form& form : forms(job.size(), count)) {
        Trial trial(job, form, in_turn(job, stream, turn / 3));
        trial.issue(*comm, kWaitings[turn++ % 3]);
        trial.wait();
        trial.check();
      }
    }
  }
}

void in_flight(Job& job) {
  const UsersStream stream(job.device());
  const auto comm = job.communicator("in-flight");
  for (const uint64_t count : {300, 60'000, 300}) overlap(job, *comm, count, stream);
}

void messages(Job& job) {
  const UsersStream stream(job.device());
  const auto comm = job.communicator("messages");
  size_t turn = 0;
  for (const uint64_t count : {1, 1000, 100'000, 7}) {
    for (const uint32_t tag : {0, 3}) {
      for (const bool async : {false, true}) {
        pass_round(job, *comm, count, tag, async, in_turn(job, stream, turn++));
      }
    }
  }
  if (!(job.device() && !job.layout().is_bridge())) take_from_any(job, *comm);
}

void two_at_once(Job& job) {
  std::vector<std::shared_ptr<Communicator>> both;
  for (const char* name : {"first", "second"}) both.push_back(job.communicator(name));
  std::vector<std::future<void>> users;
  for (const auto& comm : both) {
    users.push_back(std::async(std::launch::async, [&job, &comm] {
      const UsersStream stream(job.device());
      size_t turn = 0;
      for (const Form& form : forms(job.size(), 20'000)) {
        Trial trial(job, form, in_turn(job, stream, turn / 3));
        trial.issue(*comm, kWaitings[turn++ % 3]);
        trial.wait();
        trial.check();
      }
    }));
  }
  for (auto& user : users) user.get();
}

void finalize(Job& job) {
  const UsersStream stream(job.device());
  const auto comm = job.communicator("finalized");
  std::vector<std::unique_ptr<Trial>> trials;
  for (const Form& form : forms(job.size(), 30'000)) {
    trials.push_back(std::make_unique<Trial>(job, form, in_turn(job, stream, trials.size())));
    trials.back()->issue(*comm, Waiting::kBlocking);
  }
  comm->finalize(now_ns() + kPatience, {});
  for (const auto& trial : trials) {
    require(trial->done(), "finalize() waits for what was issued");
    trial->wait();
    trial->check();
  }
  Trial late(job, Form{});
  try {
    late.issue(*comm, Waiting::kSynchronous);
    require(false, "a finalized communicator refuses calls");
  } catch (const Error& error) {
    if (error.code() != Code::kInvalidArgument) throw;
  }
}

void drop_on_stream(Job& job) {
  const UsersStream stream(job.device());
  std::vector<std::unique_ptr<Trial>> trials;
  {
    const auto comm = job.communicator("dropped");
    for (const Form& form : forms(job.size(), 30'000)) {
      if (form.kind == POLYCCL_KIND_BARRIER) continue;  // the host waits for it
      trials.push_back(std::make_unique<Trial>(job, form, job.device() ? &stream : nullptr));
      trials.back()->issue(*comm, trials.size() % 4 == 0 ? Waiting::kJoin : Waiting::kSynchronous);
    }
  }
  for (const auto& trial : trials) {
    trial->wait();
    trial->check();
  }
}

}  // namespace polyccl::native_test
