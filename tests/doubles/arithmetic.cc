// Element types and reductions: see arithmetic.h.
#include "arithmetic.h"

#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

namespace stand_in {
namespace {

std::atomic<bool> fnuz = false;

enum class Top {
  kInfinity,
  kFn,
  kFnuz
};  // what the largest exponent means: IEEE's, NaN alone, or NaN is the negative zero

// A floating format of 8 or 16 bits.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  Top top;
  bool saturates;

  constexpr std::uint32_t sign() const { return 1u << (exponent_bits + mantissa_bits); }
  constexpr std::uint32_t nan() const {
    if (top == Top::kFnuz) return sign();
    return top == Top::kFn ? sign() - 1 : sign() - 1 - ((1u << (mantissa_bits - 1)) - 1);
  }
  constexpr std::uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
  constexpr std::uint32_t largest() const {
    if (top == Top::kInfinity) return infinity() - 1;
    return top == Top::kFn ? sign() - 2 : sign() - 1;
  }
};

constexpr Format kHalf{5, 10, 15, Top::kInfinity, false};
constexpr Format kBfloat{8, 7, 127, Top::kInfinity, false};
constexpr Format kE4m3{4, 3, 7, Top::kFn, true};
constexpr Format kE5m2{5, 2, 15, Top::kInfinity, true};
constexpr Format kE4m3Fnuz{4, 3, 8, Top::kFnuz, true};
constexpr Format kE5m2Fnuz{5, 2, 16, Top::kFnuz, true};

float decode_slowly(std::uint32_t bits, const Format& format) {
  const std::uint32_t magnitude = bits & (format.sign() - 1);
  const bool negative = (bits & format.sign()) != 0;
  if (format.top == Top::kFnuz && bits == format.sign()) return std::numeric_limits<float>::quiet_NaN();
  if (format.top == Top::kFn && magnitude == format.sign() - 1) return std::numeric_limits<float>::quiet_NaN();
  if (format.top == Top::kInfinity && magnitude >= format.infinity()) {
    if (magnitude > format.infinity()) return std::numeric_limits<float>::quiet_NaN();
    return negative ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::infinity();
  }
  const auto exponent = static_cast<int>(magnitude >> format.mantissa_bits);
  const auto mantissa = static_cast<int>(magnitude & ((1u << format.mantissa_bits) - 1));
  const int whole = exponent == 0 ? mantissa : mantissa + (1 << format.mantissa_bits);
  const float value = std::ldexp(static_cast<float>(whole), std::max(exponent, 1) - format.bias - format.mantissa_bits);
  return negative ? -value : value;
}

// Rounded to nearest, ties to even.
std::uint32_t encode(float value, const Format& format) {
  if (std::isnan(value)) return format.nan();
  const float size = std::fabs(value);
  std::uint32_t bits = 0;
  if (std::isinf(size)) {
    bits = format.largest() + 1;
  } else if (size > 0) {
    const int exponent = std::max(std::ilogb(size), 1 - format.bias);
    const auto steps = static_cast<std::int64_t>(std::nearbyint(std::ldexp(size, format.mantissa_bits - exponent)));
    bits = static_cast<std::uint32_t>((static_cast<std::int64_t>(exponent + format.bias - 1) << format.mantissa_bits) +
                                      steps);
  }
  if (bits > format.largest()) bits = format.saturates ? format.largest() : format.infinity();
  if (format.top == Top::kFnuz && bits == 0) return 0;  // there is no negative zero
  return std::signbit(value) ? bits | format.sign() : bits;
}

// All values of a format, computed once.
const std::vector<float>& table(const Format& format) {
  const auto make = [](const Format& of) {
    std::vector<float> values(std::size_t{of.sign()} * 2);
    for (std::uint32_t bits = 0; bits < values.size(); ++bits) values[bits] = decode_slowly(bits, of);
    return values;
  };
  if (&format == &kHalf) {
    static const std::vector<float> half = make(kHalf);
    return half;
  }
  static const std::array<std::vector<float>, 5> others{make(kBfloat), make(kE4m3), make(kE5m2), make(kE4m3Fnuz),
                                                        make(kE5m2Fnuz)};
  if (&format == &kBfloat) return others[0];
  if (&format == &kE4m3) return others[1];
  if (&format == &kE5m2) return others[2];
  return &format == &kE4m3Fnuz ? others[3] : others[4];
}

const Format& format_of(unsigned dtype) {
  switch (dtype) {
    case 6:
      return kHalf;
    case 9:
      return kBfloat;
    case 10:
      return fnuz ? kE4m3Fnuz : kE4m3;
    default:
      return fnuz ? kE5m2Fnuz : kE5m2;
  }
}

// What the kernels compute 8-bit floats in: half precision, then the format.
std::uint32_t round_to(float value, const Format& format) {
  if (format.exponent_bits + format.mantissa_bits < 8) value = table(kHalf)[encode(value, kHalf)];
  return encode(value, format);
}

template <typename T>
T apply(unsigned op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    switch (op) {
      case 0:
        return a + b;
      case 1:
        return a * b;
      case 2:
        return std::fmax(a, b);
      default:
        return std::fmin(a, b);
    }
  } else {
    using Wrapping = std::conditional_t<sizeof(T) < 8, std::uint32_t, std::uint64_t>;  // overflow wraps, as on a device
    switch (op) {
      case 0:
        return static_cast<T>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b));
      case 1:
        return static_cast<T>(static_cast<Wrapping>(a) * static_cast<Wrapping>(b));
      case 2:
        return a > b ? a : b;
      default:
        return a < b ? a : b;
    }
  }
}

template <typename T>
T load(const void* from, std::size_t i) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(from) + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void store(void* to, std::size_t i, T value) {
  std::memcpy(static_cast<std::byte*>(to) + i * sizeof(T), &value, sizeof(T));
}

// output[i] = op(a[i], b[i * step]): step 0 makes b one scalar.
template <typename T>
void each(unsigned op, void* output, const void* a, const void* b, std::size_t step, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) store<T>(output, i, apply<T>(op, load<T>(a, i), load<T>(b, i * step)));
}

template <typename Bits>
void each_small(const Format& format, unsigned op, void* output, const void* a, const void* b, std::size_t step,
                std::size_t n) {
  const std::vector<float>& values = table(format);
  for (std::size_t i = 0; i < n; ++i) {
    const float value = apply<float>(op, values[load<Bits>(a, i)], values[load<Bits>(b, i * step)]);
    store<Bits>(output, i, static_cast<Bits>(round_to(value, format)));
  }
}

void run(unsigned dtype, unsigned op, void* output, const void* a, const void* b, std::size_t step, std::size_t n) {
  switch (dtype) {
    case 0:
      return each<std::int8_t>(op, output, a, b, step, n);
    case 1:
      return each<std::uint8_t>(op, output, a, b, step, n);
    case 2:
      return each<std::int32_t>(op, output, a, b, step, n);
    case 3:
      return each<std::uint32_t>(op, output, a, b, step, n);
    case 4:
      return each<std::int64_t>(op, output, a, b, step, n);
    case 5:
      return each<std::uint64_t>(op, output, a, b, step, n);
    case 7:
      return each<float>(op, output, a, b, step, n);
    case 8:
      return each<double>(op, output, a, b, step, n);
    case 6:
    case 9:
      return each_small<std::uint16_t>(format_of(dtype), op, output, a, b, step, n);
    default:
      return each_small<std::uint8_t>(format_of(dtype), op, output, a, b, step, n);
  }
}

template <typename T>
void divide_each(void* total, std::size_t ranks, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) store<T>(total, i, static_cast<T>(load<T>(total, i) / static_cast<T>(ranks)));
}

}  // namespace

std::size_t size_of(unsigned dtype) {
  constexpr std::array<std::size_t, kDtypes> sizes{1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[dtype];
}

bool is_integer(unsigned dtype) { return dtype < 6; }

void use_fnuz(bool wanted) { fnuz = wanted; }

void combine(unsigned dtype, unsigned op, void* total, const void* next, std::size_t n) {
  run(dtype, op, total, total, next, 1, n);
}

void scale(unsigned dtype, void* output, const void* input, const void* factor, std::size_t n) {
  run(dtype, 1, output, input, factor, 0, n);
}

void divide(unsigned dtype, void* total, std::size_t ranks, std::size_t n) {
  switch (dtype) {
    case 0:
      return divide_each<std::int8_t>(total, ranks, n);
    case 1:
      return divide_each<std::uint8_t>(total, ranks, n);
    case 2:
      return divide_each<std::int32_t>(total, ranks, n);
    case 3:
      return divide_each<std::uint32_t>(total, ranks, n);
    case 4:
      return divide_each<std::int64_t>(total, ranks, n);
    default:
      return divide_each<std::uint64_t>(total, ranks, n);
  }
}

void reciprocal(unsigned dtype, void* factor, std::size_t ranks) {
  const double value = 1.0 / static_cast<double>(ranks);
  if (dtype == 8) return store<double>(factor, 0, value);
  const auto single = static_cast<float>(value);
  if (dtype == 7) return store<float>(factor, 0, single);
  const std::uint32_t bits = encode(single, format_of(dtype));
  if (size_of(dtype) == 2) return store<std::uint16_t>(factor, 0, static_cast<std::uint16_t>(bits));
  store<std::uint8_t>(factor, 0, static_cast<std::uint8_t>(bits));
}

}  // namespace stand_in
