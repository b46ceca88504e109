// What the host kernels compute with: how each data type is stored and in what it is computed, and the operators. For
// reduce.cc, which says how to compile them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "float16.h"

#define POLYCCL_INLINE [[gnu::always_inline]] inline

namespace polyccl {

// ---- Elements

// `narrow` of a float gives canonical NaNs.
POLYCCL_INLINE float canonical(float value) { return value != value ? std::bit_cast<float>(kNanFloat32) : value; }
POLYCCL_INLINE double canonical(double value) {
  return value != value ? std::bit_cast<double>(uint64_t{0x7ff8000000000000}) : value;
}

template <class T>
struct Pair {
  T real, imag;
};

template <class T>
struct Integer {
  using Stored = T;
  using Wide = T;
  POLYCCL_INLINE static T widen(T value) { return value; }
  POLYCCL_INLINE static T narrow(T value) { return value; }
};

// Any byte but 0 is true; what is stored is 0 or 1.
struct Bool {
  using Stored = uint8_t;
  using Wide = uint8_t;
  POLYCCL_INLINE static uint8_t widen(uint8_t value) { return value != 0; }
  POLYCCL_INLINE static uint8_t narrow(uint8_t value) { return value; }
};

template <class T>
struct Float {
  using Stored = T;
  using Wide = T;
  POLYCCL_INLINE static T widen(T value) { return value; }
  POLYCCL_INLINE static T narrow(T value) { return canonical(value); }
};

struct Float16 {
  using Stored = uint16_t;
  using Wide = float;
  POLYCCL_INLINE static float widen(uint16_t value) { return float16_to_float(value); }
  POLYCCL_INLINE static uint16_t narrow(float value) { return float_to_float16(value); }
};

struct Bfloat16 {
  using Stored = uint16_t;
  using Wide = float;
  POLYCCL_INLINE static float widen(uint16_t value) { return bfloat16_to_float(value); }
  POLYCCL_INLINE static uint16_t narrow(float value) { return float_to_bfloat16(value); }
};

template <class T>
struct Complex {
  using Stored = Pair<T>;
  using Wide = Pair<T>;
  POLYCCL_INLINE static Pair<T> widen(Pair<T> value) { return value; }
  POLYCCL_INLINE static Pair<T> narrow(Pair<T> value) { return {canonical(value.real), canonical(value.imag)}; }
};

// ---- Operators

// Unsigned, so that overflow wraps, and not narrower than int, so that uint16_t * uint16_t is not a product of ints.
template <class T>
POLYCCL_INLINE auto wrapping(T value) {
  if constexpr (sizeof(T) < 4) {
    return static_cast<uint32_t>(value);
  } else {
    return static_cast<std::make_unsigned_t<T>>(value);
  }
}

struct Sum {
  template <class T>
  POLYCCL_INLINE static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(wrapping(a) + wrapping(b));
    } else {
      return a + b;
    }
  }
  template <class T>
  POLYCCL_INLINE static Pair<T> apply(Pair<T> a, Pair<T> b) {
    return {a.real + b.real, a.imag + b.imag};
  }
};

struct Product {
  template <class T>
  POLYCCL_INLINE static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(wrapping(a) * wrapping(b));
    } else {
      return a * b;
    }
  }
  // The schoolbook formula, as NumPy's; std::complex would mend infinities by a branch.
  template <class T>
  POLYCCL_INLINE static Pair<T> apply(Pair<T> a, Pair<T> b) {
    return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
  }
};

// A NaN on either side wins. Of equals, +0 and -0 among them, the left one stays.
struct Min {
  template <class T>
  POLYCCL_INLINE static T apply(T a, T b) {
    return (b < a) | (b != b) ? b : a;
  }
};

struct Max {
  template <class T>
  POLYCCL_INLINE static T apply(T a, T b) {
    return (b > a) | (b != b) ? b : a;
  }
};

struct And {
  template <class T>
  POLYCCL_INLINE static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Or {
  template <class T>
  POLYCCL_INLINE static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Xor {
  template <class T>
  POLYCCL_INLINE static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// Multiplication by 1 / ranks; for integers the truncating division by ranks.
template <class T>
struct Average {
  T inverse;
  explicit Average(size_t ranks) : inverse(T{1} / static_cast<T>(ranks)) {}
  POLYCCL_INLINE T apply(T value) const { return value * inverse; }
  POLYCCL_INLINE Pair<T> apply(Pair<T> value) const { return {value.real * inverse, value.imag * inverse}; }
};

template <class T>
requires std::is_integral_v<T>
struct Average<T> {
  // A float64 quotient of integers of up to 32 bits is exact enough to truncate, and vectorises.
  using Divisor = std::conditional_t<(sizeof(T) <= 4), double, T>;
  Divisor ranks;
  explicit Average(size_t count) : ranks(static_cast<Divisor>(count)) {}
  POLYCCL_INLINE T apply(T value) const { return static_cast<T>(static_cast<Divisor>(value) / ranks); }
};

template <class W>
struct Multiply {
  W factor;
  POLYCCL_INLINE W apply(W value) const { return Product::apply(value, factor); }
};

}  // namespace polyccl
