// Compares a function's type with that of a pointer it is called through: as many arguments, each passed alike.
// For tests that generate static_asserts from a plugin's table of names.
#pragma once

#include <cstddef>
#include <type_traits>

namespace signatures {

// Pointers, and integers that hold an address, go into the same registers; so do enums and their integers.
template <typename A, typename B>
constexpr bool passed_alike() {
  constexpr bool a = std::is_pointer_v<A> || std::is_integral_v<A> || std::is_enum_v<A>;
  constexpr bool b = std::is_pointer_v<B> || std::is_integral_v<B> || std::is_enum_v<B>;
  if (std::is_void_v<A> || std::is_void_v<B>) return std::is_void_v<A> && std::is_void_v<B>;
  if constexpr (!std::is_void_v<A> && !std::is_void_v<B>) {
    const bool records = std::is_class_v<A> && std::is_class_v<B> && std::is_trivially_copyable_v<A>;
    return sizeof(A) == sizeof(B) && ((a && b) || records);
  }
  return false;
}

template <typename A, typename B>
struct Alike : std::false_type {};

template <typename R, typename... P, typename S, typename... Q>
struct Alike<R (*)(P...), S (*)(Q...)> {
  static constexpr bool arguments() {
    if constexpr (sizeof...(P) == sizeof...(Q)) return (passed_alike<P, Q>() && ...);
    return false;
  }
  static constexpr bool value = passed_alike<R, S>() && arguments();
};

template <typename Vendor, typename Ours>
inline constexpr bool alike = Alike<std::decay_t<Vendor>, std::decay_t<Ours>>::value;

static_assert(alike<int(const char*, unsigned), int (*)(void*, int)>);
static_assert(!alike<int(const char*, unsigned), int (*)(void*)>);
static_assert(!alike<int(const char*, unsigned), int (*)(void*, size_t)>);

}  // namespace signatures
