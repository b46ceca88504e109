// What goes wrong: every operation ends, with an error that says why, and the process goes on.
#include <unistd.h>

#include <algorithm>
#include <future>
#include <initializer_list>

#include "scenarios.h"
#include "trial.h"

namespace polyccl::native_test {
namespace {

constexpr uint64_t kLarge = 100'000;
using Trials = std::vector<std::unique_ptr<Trial>>;

// Large collectives of all kinds, on their way.
Trials start(const Job& job, Communicator& comm, const UsersStream& stream) {
  Trials trials;
  for (const Form& form : forms(job.size(), kLarge)) {
    const bool on_stream = job.device() && trials.size() % 2 == 0;
    trials.push_back(std::make_unique<Trial>(job, form, on_stream ? &stream : nullptr));
    try {
      trials.back()->issue(comm, Waiting::kBlocking);
    } catch (const Error&) {
      require(comm.failure().has_value(), "only a broken communicator refuses a call");
      trials.pop_back();
      break;
    }
  }
  return trials;
}

// In the middle of it all: this operation is over. There may be fewer, where the communicator has failed already.
void wait_until_one_ends(const Trials& trials, size_t which) {
  wait_until("an operation ends", [&] { return which >= trials.size() || trials[which]->done(); });
}

// Whatever an operation's end is: a good one has the right result, another one of these codes.
void require_ends(const Trials& trials, std::initializer_list<Code> codes) {
  for (const auto& trial : trials) {
    if (const auto error = trial->end()) {
      require(std::find(codes.begin(), codes.end(), error->code()) != codes.end(),
              std::string("an operation ends with one of the expected errors, not with: ") + error->what());
    } else {
      trial->check();
    }
  }
}

void require_broken(const Job& job, Communicator& comm, Code code) {
  wait_until("a rank learns that its communicator is broken", [&] { return comm.failure().has_value(); });
  require(comm.failure()->code() == code, std::string("a failure has another code: ") + comm.failure()->what());
  Trial late(job, Form{});
  try {
    late.issue(comm, Waiting::kSynchronous);
  } catch (const Error& error) {
    if (error.code() == code) return;
    throw;
  }
  require(false, "a broken communicator refuses calls");
}

// One call whose error is expected; its code.
Code code_of_call(const Job& job, Communicator& comm, const Form& form) {
  Trial trial(job, form);
  try {
    trial.issue(comm, Waiting::kSynchronous);
  } catch (const Error& error) {
    return error.code();
  }
  throw Error(Code::kInternal, form.text() + " ends well, and should not");
}

// A fresh communicator works.
void require_usable(Job& job, const std::string& name) {
  const auto comm = job.communicator(name);
  Trial trial(job, Form{});
  trial.issue(*comm, Waiting::kSynchronous);
  trial.wait();
  trial.check();
}

void lose(Job& job, int victim) {
  const UsersStream stream(job.device());
  const auto comm = job.communicator("loses");
  const Trials trials = start(job, *comm, stream);
  if (job.rank() == victim) {
    wait_until_one_ends(trials, 1);
    _exit(0);
  }
  require_ends(trials, {Code::kPeerLost});
  require_broken(job, *comm, Code::kPeerLost);
  stream.drain();
}

}  // namespace

void destroy(Job& job) {
  const UsersStream stream(job.device());
  for (int round = 0; round < 3; ++round) {
    auto comm = job.communicator("destroyed." + std::to_string(round));
    const Trials trials = start(job, *comm, stream);
    if (round > 0) wait_until_one_ends(trials, static_cast<size_t>(round) * 4);
    comm.reset();
    for (const auto& trial : trials) {
      wait_until("an operation goes on though its communicator was let go of", [&trial] { return trial->done(); });
    }
    stream.drain();
    for (const auto& trial : trials) trial->check();
  }
  require_usable(job, "after destruction");
}

void abort(Job& job) {
  const UsersStream stream(job.device());
  for (int round = 0; round < 4; ++round) {
    const auto comm = job.communicator("aborted." + std::to_string(round));
    const Trials trials = start(job, *comm, stream);
    std::vector<std::future<void>> others;
    for (int n = 0; job.rank() == round % job.size() && n < 2; ++n) {
      others.push_back(std::async(std::launch::async, [&] {
        wait_until_one_ends(trials, static_cast<size_t>(round));
        comm->abort();
      }));
    }
    require_ends(trials, {Code::kAborted});
    for (auto& other : others) other.get();
    require_broken(job, *comm, Code::kAborted);
    stream.drain();
  }
  require_usable(job, "after abort");
}

void lose_first(Job& job) { lose(job, 0); }

void lose_last(Job& job) { lose(job, job.size() - 1); }

void time_out(Job& job) {
  const UsersStream stream(job.device());
  const auto comm = job.communicator("late");
  Form form;
  form.count = kLarge;
  if (job.rank() == 0) {
    wait_until("the others are late", [&] { return comm->failure().has_value(); });
  } else {
    form.deadline = now_ns() + kSecond / 2;
    require(code_of_call(job, *comm, form) == Code::kTimeout, "a call without rank 0 times out");
  }
  require_broken(job, *comm, Code::kTimeout);
}

void interrupt(Job& job) {
  const auto comm = job.communicator("interrupted");
  if (job.rank() != 0) {
    wait_until("rank 0 is interrupted", [&] { return comm->failure().has_value(); });
    return require_broken(job, *comm, Code::kAborted);
  }
  Form form;
  form.count = kLarge;
  Trial trial(job, form);
  try {
    trial.issue(*comm, Waiting::kSynchronous, [] { return true; });
    require(false, "an interrupted call throws");
  } catch (const InterruptedWait&) {
  }
  require_broken(job, *comm, Code::kAborted);
}

void mismatch(Job& job) {
  const auto comm = job.communicator("checked", true);
  for (int round = 0; round < 3; ++round) {
    Form form;
    form.count = job.rank() == round % job.size() ? 1000 : 1001;
    require(code_of_call(job, *comm, form) == Code::kMismatch, "calls that differ are refused");
    form.count = 1000;
    Trial trial(job, form);
    trial.issue(*comm, Waiting::kSynchronous);
    trial.wait();
    trial.check();
  }
}

void absent(Job& job) {
  constexpr int kAbsent = 1;  // of the first island
  const auto& island = job.layout().islands[0];
  const bool waits = std::find(island.begin(), island.end(), job.rank()) != island.end() && job.rank() != kAbsent;
  if (!waits || job.backend() == "host") return;
  try {
    (void)job.communicator("incomplete", false, kSecond);
    require(false, "a communicator is not made without all its ranks");
  } catch (const Error& error) {
    require(error.code() == Code::kTimeout, std::string("a creation times out, instead of: ") + error.what());
  }
}

}  // namespace polyccl::native_test
