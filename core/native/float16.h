// Conversions between the 16-bit floats and float32, by integer arithmetic alone: the same bits on every processor,
// without branches, so that a loop over them vectorises. They take the default floating-point environment (round to
// nearest, denormals kept).
#pragma once

#include <bit>
#include <cstdint>

namespace polyccl {

inline constexpr uint32_t kNanFloat32 = 0x7fc00000;
inline constexpr uint16_t kNanFloat16 = 0x7e00;
inline constexpr uint16_t kNanBfloat16 = 0x7fc0;

// `yes` or `no`, by masks: compilers move floating-point operations into the arms of a ?:, and then do not vectorise
// it.
[[gnu::always_inline]] inline uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

[[gnu::always_inline]] inline float bfloat16_to_float(uint16_t value) {
  return std::bit_cast<float>(uint32_t{value} << 16);
}

// Rounds to nearest even; every NaN becomes the canonical one.
[[gnu::always_inline]] inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(select(value != value, kNanBfloat16, rounded));
}

[[gnu::always_inline]] inline float float16_to_float(uint16_t value) {
  constexpr uint32_t kRebias = uint32_t{127 - 15} << 23;
  const uint32_t sign = (uint32_t{value} & 0x8000) << 16;
  const uint32_t exponent = uint32_t{value} & 0x7c00;
  const uint32_t normal = ((uint32_t{value} & 0x7fff) << 13) + kRebias;
  const uint32_t special = normal + kRebias;  // infinity and NaN: exponent 31 becomes 255
  // A denormal m * 2^-24 is read as 2^-14 + m * 2^-24, from which 2^-14 is taken away: exact.
  const uint32_t denormal = std::bit_cast<uint32_t>(std::bit_cast<float>(normal + (1u << 23)) - 0x1p-14f);
  const uint32_t magnitude = select(exponent == 0x7c00, special, select(exponent == 0, denormal, normal));
  return std::bit_cast<float>(sign | magnitude);
}

// Rounds to nearest even, overflows to infinity; every NaN becomes the canonical one.
[[gnu::always_inline]] inline uint16_t float_to_float16(float value) {
  constexpr uint32_t kInfinity = 0x7f800000, kTooLarge = 0x47800000 /* 2^16 */,
                     kSmallestNormal = 0x38800000 /* 2^-14 */;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t sign = (bits >> 16) & 0x8000;
  // Half of a unit in the last place, less what makes a tie go to even; a carry runs on into the exponent, as it
  // should.
  const uint32_t normal = (magnitude - (uint32_t{127 - 15} << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5, whose last place is 2^-24, lets the processor round to that place.
  const uint32_t denormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  const uint32_t finite = select(magnitude < kSmallestNormal, denormal, normal);
  const uint32_t bounded = select(magnitude >= kTooLarge, 0x7c00, finite);
  return static_cast<uint16_t>(select(magnitude > kInfinity, kNanFloat16, sign | bounded));
}

}  // namespace polyccl
