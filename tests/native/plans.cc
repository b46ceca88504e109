#include "plans.h"

#include <array>
#include <fstream>

namespace polyccl::native_test {

PlanBook::PlanBook(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(&latency_bytes_), sizeof latency_bytes_);
  if (!file) throw Error(Code::kInternal, "there are no plans in '" + path + "'");
  std::array<int64_t, 8> head{};  // scope, kind, dtype, reduction, root, small, strict, bytes of the plan
  while (file.read(reinterpret_cast<char*>(head.data()), sizeof head)) {
    Signature signature{};
    signature.kind = static_cast<Kind>(head[1]);
    signature.dtype = static_cast<Dtype>(head[2]);
    signature.reduction = static_cast<Reduction>(head[3]);
    signature.root = static_cast<int>(head[4]);
    signature.small = head[5] != 0;
    signature.strict = head[6] != 0;
    std::string plan(static_cast<size_t>(head[7]), '\0');
    file.read(plan.data(), static_cast<std::streamsize>(plan.size()));
    plans_[{static_cast<Scope>(head[0]), signature}] = std::move(plan);
  }
}

std::string PlanBook::find(Scope scope, const Signature& s) const {
  const auto found = plans_.find({scope, s});
  if (found != plans_.end()) return found->second;
  throw Error(Code::kInternal, "plans.py has written no plan of kind " + std::to_string(s.kind) + ", dtype " +
                                   std::to_string(s.dtype) + ", reduction " + std::to_string(s.reduction) + ", root " +
                                   std::to_string(s.root) + (s.small ? ", small" : "") + (s.strict ? ", strict" : ""));
}

}  // namespace polyccl::native_test
