// The planner's plans, from the file that plans.py writes: where PolyCCL asks Python, this looks them up.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "communicator.h"

namespace polyccl::native_test {

// Whose plans: of the communicator of all ranks, or of one inside this rank's island.
enum class Scope : int64_t { kWhole = 0, kIsland = 1 };

class PlanBook {
 public:
  explicit PlanBook(const std::string& path);

  // The encoded plan. Throws where plans.py has not written it.
  std::string find(Scope scope, const Signature& signature) const;

  uint64_t latency_bytes() const { return latency_bytes_; }

 private:
  std::map<std::pair<Scope, Signature>, std::string> plans_;
  uint64_t latency_bytes_ = 0;
};

}  // namespace polyccl::native_test
