#include "types.h"

#include <algorithm>
#include <array>

namespace polyccl {
namespace {

enum class Family : uint8_t { kBool, kInteger, kFloat, kComplex, kMovesOnly };

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  Family family;
};

// The names are those of torch and NumPy. A row's place is its number minus one.
constexpr std::array kDtypes = {
    DtypeRow{POLYCCL_DTYPE_BOOL, "bool", Family::kBool},
    DtypeRow{POLYCCL_DTYPE_INT8, "int8", Family::kInteger},
    DtypeRow{POLYCCL_DTYPE_UINT8, "uint8", Family::kInteger},
    DtypeRow{POLYCCL_DTYPE_INT16, "int16", Family::kInteger},
    DtypeRow{POLYCCL_DTYPE_UINT16, "uint16", Family::kInteger},
    DtypeRow{POLYCCL_DTYPE_INT32, "int32", Family::kInteger},
    DtypeRow{POLYCCL_DTYPE_UINT32, "uint32", Family::kInteger},
    DtypeRow{POLYCCL_DTYPE_INT64, "int64", Family::kInteger},
    DtypeRow{POLYCCL_DTYPE_UINT64, "uint64", Family::kInteger},
    DtypeRow{POLYCCL_DTYPE_FLOAT16, "float16", Family::kFloat},
    DtypeRow{POLYCCL_DTYPE_BFLOAT16, "bfloat16", Family::kFloat},
    DtypeRow{POLYCCL_DTYPE_FLOAT32, "float32", Family::kFloat},
    DtypeRow{POLYCCL_DTYPE_FLOAT64, "float64", Family::kFloat},
    DtypeRow{POLYCCL_DTYPE_COMPLEX64, "complex64", Family::kComplex},
    DtypeRow{POLYCCL_DTYPE_COMPLEX128, "complex128", Family::kComplex},
    DtypeRow{POLYCCL_DTYPE_FLOAT8_E4M3FN, "float8_e4m3fn", Family::kMovesOnly},
    DtypeRow{POLYCCL_DTYPE_FLOAT8_E4M3FNUZ, "float8_e4m3fnuz", Family::kMovesOnly},
    DtypeRow{POLYCCL_DTYPE_FLOAT8_E5M2, "float8_e5m2", Family::kMovesOnly},
    DtypeRow{POLYCCL_DTYPE_FLOAT8_E5M2FNUZ, "float8_e5m2fnuz", Family::kMovesOnly},
    DtypeRow{POLYCCL_DTYPE_FLOAT8_E8M0FNU, "float8_e8m0fnu", Family::kMovesOnly},
};

constexpr auto kNumbers = [] {
  std::array<Dtype, kDtypes.size()> numbers{};
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
  return dtype >= 1 && dtype <= kDtypes.size() ? &kDtypes[dtype - 1] : nullptr;
}

constexpr std::array<std::string_view, 10> kReductionNames = {"NONE", "SUM", "PRODUCT", "MIN", "MAX",
                                                              "BAND", "BOR", "BXOR",    "AVG", "PREMUL_SUM"};
static_assert(POLYCCL_REDUCTION_PREMUL_SUM + 1 == kReductionNames.size());

constexpr Operation kOperations[] = {
#define POLYCCL_OPERATION(kind, name, input, output, input_at, output_at, rooted, reduces, ragged) \
  Operation{kind, name, Shape{input}, Shape{output}, Who{input_at}, Who{output_at}, rooted, reduces, ragged},
#include "operations.inc"
#undef POLYCCL_OPERATION
};

}  // namespace

std::string_view dtype_name(Dtype dtype) {
  const DtypeRow* row = find_dtype(dtype);
  return row == nullptr ? "unknown" : row->name;
}

std::span<const Dtype> all_dtypes() { return kNumbers; }

std::string_view reduction_name(Reduction reduction) {
  return reduction < kReductionNames.size() ? kReductionNames[reduction] : "unknown";
}

bool can_reduce(Dtype dtype, Reduction reduction) {
  const DtypeRow* row = find_dtype(dtype);
  if (row == nullptr) return false;
  const Family family = row->family;
  switch (reduction) {
    case POLYCCL_REDUCTION_SUM:
    case POLYCCL_REDUCTION_PRODUCT:
      return family != Family::kMovesOnly;
    case POLYCCL_REDUCTION_MIN:
    case POLYCCL_REDUCTION_MAX:  // complex numbers have no order
      return family == Family::kBool || family == Family::kInteger || family == Family::kFloat;
    case POLYCCL_REDUCTION_BAND:
    case POLYCCL_REDUCTION_BOR:
    case POLYCCL_REDUCTION_BXOR:
      return family == Family::kBool || family == Family::kInteger;
    case POLYCCL_REDUCTION_AVG:
      return family == Family::kInteger || family == Family::kFloat || family == Family::kComplex;
    case POLYCCL_REDUCTION_PREMUL_SUM:  // the types that NCCL and RCCL take
      return family == Family::kFloat;
    default:
      return false;
  }
}

std::span<const Operation> operations() { return kOperations; }

const Operation* find_operation(Kind kind) {
  const auto* row = std::ranges::find(kOperations, kind, &Operation::kind);
  return row == std::end(kOperations) ? nullptr : row;
}

}  // namespace polyccl
