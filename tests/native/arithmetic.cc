// Every reduction of every type, on bits drawn at random: sums that overflow, denormals, NaN, odd lengths and offsets.
#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

#include "reduce.h"
#include "scenarios.h"

namespace polyccl::native_test {
namespace {

constexpr size_t kOperands = 3;
using Bytes = std::vector<std::byte>;

Bytes draw(std::mt19937_64& chance, Dtype dtype, size_t bytes) {
  Bytes drawn(bytes);
  for (std::byte& each : drawn) {
    // A bool is 0 or 1.
    each = static_cast<std::byte>(dtype == POLYCCL_DTYPE_BOOL ? chance() % 2 : chance() % 256);
  }
  return drawn;
}

// The kernel's output, of memory that is just as long as it must be.
Bytes reduced(const std::vector<Bytes>& inputs, size_t offset, Dtype dtype, Reduction reduction, const Factor& factor) {
  std::vector<const void*> operands;
  for (const Bytes& input : inputs) operands.push_back(input.data() + offset);
  Bytes output(inputs[0].size());
  reduce(output.data() + offset, operands, (output.size() - offset) / dtype_size(dtype), dtype, reduction, factor);
  return output;
}

void try_out(std::mt19937_64& chance, Dtype dtype, Reduction reduction) {
  const size_t element = dtype_size(dtype);
  Factor average;
  average.kind = Factor::Kind::kAverage;
  average.ranks = kOperands;
  Bytes number(16);
  store_scalar(number.data(), 1.5, dtype);
  Factor factor;
  factor.kind = Factor::Kind::kValue;
  factor.value = number.data();
  for (const size_t n : {0, 1, 3, 17, 250}) {
    for (const size_t offset : {size_t{0}, element}) {
      std::vector<Bytes> inputs;
      for (size_t i = 0; i < kOperands; ++i) inputs.push_back(draw(chance, dtype, offset + n * element));
      for (const Factor& each : {Factor{}, average, factor}) {
        if (each.kind == Factor::Kind::kAverage && !can_reduce(dtype, POLYCCL_REDUCTION_AVG)) continue;
        if (each.kind == Factor::Kind::kValue && !can_reduce(dtype, POLYCCL_REDUCTION_PREMUL_SUM)) continue;
        const Bytes wide = reduced(inputs, offset, dtype, reduction, each);
        use_wide_vectors(false);
        require(reduced(inputs, offset, dtype, reduction, each) == wide, "wide and narrow vectors give the same bits");
        use_wide_vectors(true);
      }
    }
  }
}

}  // namespace

void arithmetic(Job&) {
  std::mt19937_64 chance(1);
  for (const Dtype dtype : all_dtypes()) {
    for (Reduction reduction = POLYCCL_REDUCTION_SUM; reduction <= POLYCCL_REDUCTION_BXOR; ++reduction) {
      if (can_reduce(dtype, reduction)) try_out(chance, dtype, reduction);
    }
  }
}

}  // namespace polyccl::native_test
