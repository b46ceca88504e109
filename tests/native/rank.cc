// One rank of a job of tests:
//   rank <scenario> <shape> <rank> <folder>
// test_native.py starts as many as the shape has ranks. Exits with 0 where all holds and the sanitizer is content.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "scenarios.h"

namespace polyccl::native_test {
namespace {

// A race, and memory that is lost: each sanitizer must find one of them, else it finds nothing at all.
void planted_fault(Job&) {
  int* shared = std::make_unique<int>().release();
  std::thread first([shared] { *shared = 1; }), second([shared] { *shared = 2; });
  first.join();
  second.join();
}

std::set<std::string> threads() {
  std::set<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    found.insert(entry.path().filename());
  return found;
}

// At the process's end LeakSanitizer reads the memory of all threads, and crashes where one is just ending: let those end
// first that were left to themselves.
void let_threads_end() {
  const Deadline deadline = now_ns() + kPatience;
  auto before = threads();
  for (int quiet = 0; quiet < 5 && !expired(deadline); ++quiet) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (auto now = threads(); now != before) {
      before = std::move(now);
      quiet = -1;
    }
  }
}

const std::map<std::string, void (*)(Job&)> kScenarios = {
    {"abort", abort},
    {"absent", absent},
    {"arithmetic", arithmetic},
    {"destroy", destroy},
    {"finalize", finalize},
    {"drop_on_stream", drop_on_stream},
    {"in_flight", in_flight},
    {"interrupt", interrupt},
    {"lose_first", lose_first},
    {"lose_last", lose_last},
    {"messages", messages},
    {"mismatch", mismatch},
    {"operations", operations},
    {"planted_fault", planted_fault},
    {"two_at_once", two_at_once},
    {"time_out", time_out},
};

}  // namespace
}  // namespace polyccl::native_test

int main(int argc, char** argv) {
  using namespace polyccl::native_test;
  const auto scenario = argc == 5 ? kScenarios.find(argv[1]) : kScenarios.end();
  if (scenario == kScenarios.end()) {
    std::fprintf(stderr, "usage: rank <scenario> <shape> <rank> <folder>, with a scenario of rank.cc\n");
    return 2;
  }
  try {
    {
      Job job(argv[2], std::atoi(argv[3]), argv[4]);
      scenario->second(job);
    }
    let_threads_end();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %s: %s\n", argv[3], error.what());
    return 1;
  }
}
