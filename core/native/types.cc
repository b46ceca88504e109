#include "types.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace polyccl {
namespace {

constexpr auto kNumbers = [] {
  std::array<Dtype, std::size(kDtypes)> numbers{};
  std::ranges::transform(kDtypes, numbers.begin(), &DtypeRow::dtype);
  return numbers;
}();

constexpr bool numbers_are_dense() {
  for (size_t i = 0; i < kNumbers.size(); ++i) {
    if (kNumbers[i] != i + 1) return false;
  }
  return true;
}
static_assert(numbers_are_dense(), "find_dtype() indexes the table by number");

const DtypeRow* find_dtype(Dtype dtype) {
  return dtype >= 1 && dtype <= std::size(kDtypes) ? &kDtypes[dtype - 1] : nullptr;
}

}  // namespace

std::string_view dtype_name(Dtype dtype) {
  const DtypeRow* row = find_dtype(dtype);
  return row == nullptr ? "unknown" : row->name;
}

std::span<const Dtype> all_dtypes() { return kNumbers; }

std::string_view reduction_name(Reduction reduction) {
  return reduction < std::size(kReductions) ? kReductions[reduction].name : "unknown";
}

bool can_reduce(Dtype dtype, Reduction reduction) {
  const DtypeRow* row = find_dtype(dtype);
  if (row == nullptr || reduction >= std::size(kReductions)) return false;
  return (kReductions[reduction].families >> static_cast<int>(row->family) & 1) != 0;
}

std::span<const Operation> operations() { return kOperations; }

const Operation* find_operation(Kind kind) {
  const auto* row = std::ranges::find(kOperations, kind, &Operation::kind);
  return row == std::end(kOperations) ? nullptr : row;
}

}  // namespace polyccl
