// Build this file with -O3 -ffp-contract=off: the loops are written for the vectoriser, and a fused multiply-add, which
// only some processors have, would give other bits.
#include "reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "elements.h"
#include "error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Said of loops whose iterations are independent although output may be an operand: both are read and written at the
// same index.
#if defined(__clang__)
#define POLYCCL_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define POLYCCL_INDEPENDENT _Pragma("GCC ivdep")
#endif
// Said of functions that run only where wide_vectors_exist(). By hand, not by target_clones: sanitizers and ifunc
// resolvers do not mix.
#if defined(__x86_64__)
#define POLYCCL_WIDE [[gnu::target("avx2,f16c")]]
#else
#define POLYCCL_WIDE
#endif

namespace polyccl {
namespace {

// ---- Loops

// Through memcpy, since nothing promises alignment.
template <class E>
POLYCCL_INLINE typename E::Wide load(const std::byte* from, size_t i) {
  typename E::Stored stored;
  std::memcpy(&stored, from + i * sizeof stored, sizeof stored);
  return E::widen(stored);
}

template <class E>
POLYCCL_INLINE void store(std::byte* to, size_t i, typename E::Wide value) {
  const typename E::Stored stored = E::narrow(value);
  std::memcpy(to + i * sizeof stored, &stored, sizeof stored);
}

struct Job {
  std::byte* output;
  std::span<const void* const> operands;
  size_t n;
  const Factor& factor;
};

// Types that are computed in themselves, so that loops may load, compute and store in one go.
template <class E>
inline constexpr bool kDirect = std::is_same_v<typename E::Stored, typename E::Wide>;

// Blocks of a size that stays in the first-level cache, however many operands there are.
template <class E>
inline constexpr size_t kBlock = 8192 / sizeof(typename E::Wide);

#if defined(__x86_64__)
// The processor's own conversions: the same bits as those of float16.h, once NaNs are canonical. Both give back how
// many elements they did; the rest is fewer than one vector.
POLYCCL_WIDE size_t widen_float16(float* wide, const std::byte* from, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i));
    _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(halves));
  }
  return i;
}

POLYCCL_WIDE size_t narrow_float16(std::byte* to, const float* wide, size_t n) {
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kNanFloat32)));
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 value = _mm256_loadu_ps(wide + i);
    const __m256 clean = _mm256_blendv_ps(value, nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), _mm256_cvtps_ph(clean, _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}
#else
size_t widen_float16(float*, const std::byte*, size_t) { return 0; }
size_t narrow_float16(std::byte*, const float*, size_t) { return 0; }
#endif

// kWide: the loop may use what wide_vectors_exist() asks for.
template <class E, bool kWide>
POLYCCL_INLINE void load_block(typename E::Wide* wide, const std::byte* from, size_t n) {
  size_t done = 0;
  if constexpr (kWide && std::is_same_v<E, Float16>) done = widen_float16(wide, from, n);
  POLYCCL_INDEPENDENT
  for (size_t i = done; i < n; ++i) wide[i] = load<E>(from, i);
}

template <class E, bool kWide>
POLYCCL_INLINE void store_block(std::byte* to, const typename E::Wide* wide, size_t n) {
  size_t done = 0;
  if constexpr (kWide && std::is_same_v<E, Float16>) done = narrow_float16(to, wide, n);
  POLYCCL_INDEPENDENT
  for (size_t i = done; i < n; ++i) store<E>(to, i, wide[i]);
}

template <class Wide, class Scale>
POLYCCL_INLINE void scale_block(Wide* wide, size_t n, Scale scale) {
  POLYCCL_INDEPENDENT
  for (size_t i = 0; i < n; ++i) wide[i] = scale.apply(wide[i]);
}

template <class E>
POLYCCL_INLINE void apply_factor(typename E::Wide* wide, size_t n, const Factor& factor) {
  using Wide = typename E::Wide;
  if (factor.kind == Factor::Kind::kAverage) {
    if constexpr (std::is_arithmetic_v<Wide>) {
      scale_block(wide, n, Average<Wide>(factor.ranks));
    } else {
      scale_block(wide, n, Average<decltype(Wide::real)>(factor.ranks));
    }
  } else if (factor.kind == Factor::Kind::kValue) {
    scale_block(wide, n, Multiply<Wide>{load<E>(static_cast<const std::byte*>(factor.value), 0)});
  }
}

// Combine one more operand into a block. `space` is scratch of the same size.
template <class E, class Op, bool kWide>
POLYCCL_INLINE void combine_block(typename E::Wide* wide, typename E::Wide* space, const std::byte* next, size_t n) {
  if constexpr (kDirect<E>) {
    POLYCCL_INDEPENDENT
    for (size_t i = 0; i < n; ++i) wide[i] = Op::apply(wide[i], load<E>(next, i));
  } else {
    load_block<E, kWide>(space, next, n);
    POLYCCL_INDEPENDENT
    for (size_t i = 0; i < n; ++i) wide[i] = Op::apply(wide[i], space[i]);
  }
}

// Not inlined: jammed with the loop over the operands, the loop over the elements would not vectorise.
template <class E, class Op>
[[gnu::noinline]] void combine_plain(typename E::Wide* wide, typename E::Wide* space, const std::byte* next, size_t n) {
  combine_block<E, Op, false>(wide, space, next, n);
}

template <class E, class Op>
POLYCCL_WIDE [[gnu::noinline]] void combine_wide(typename E::Wide* wide, typename E::Wide* space, const std::byte* next,
                                                 size_t n) {
  combine_block<E, Op, true>(wide, space, next, n);
}

template <class E, class Op>
POLYCCL_INLINE void reduce_two(std::byte* output, const std::byte* a, const std::byte* b, size_t n) {
  POLYCCL_INDEPENDENT
  for (size_t i = 0; i < n; ++i) store<E>(output, i, Op::apply(load<E>(a, i), load<E>(b, i)));
}

template <class E, class Op, bool kWide>
POLYCCL_INLINE void reduce_job(const Job& job) {
  const auto operand = [&](size_t k) { return static_cast<const std::byte*>(job.operands[k]); };
  if (kDirect<E> && job.operands.size() == 2 && job.factor.kind == Factor::Kind::kNone) {
    return reduce_two<E, Op>(job.output, operand(0), operand(1), job.n);
  }
  std::array<typename E::Wide, kBlock<E>> wide;
  std::array<typename E::Wide, kDirect<E> ? 1 : kBlock<E>> space;
  for (size_t start = 0; start < job.n; start += kBlock<E>) {
    const size_t n = std::min(kBlock<E>, job.n - start);
    const size_t offset = start * sizeof(typename E::Stored);
    load_block<E, kWide>(wide.data(), operand(0) + offset, n);
    for (size_t k = 1; k < job.operands.size(); ++k) {
      if constexpr (kWide) {
        combine_wide<E, Op>(wide.data(), space.data(), operand(k) + offset, n);
      } else {
        combine_plain<E, Op>(wide.data(), space.data(), operand(k) + offset, n);
      }
    }
    apply_factor<E>(wide.data(), n, job.factor);
    store_block<E, kWide>(job.output + offset, wide.data(), n);
  }
}

// ---- Choice of the processor's vectors

template <class E, class Op>
void reduce_plain(const Job& job) {
  reduce_job<E, Op, false>(job);
}

template <class E, class Op>
POLYCCL_WIDE void reduce_wide(const Job& job) {
  reduce_job<E, Op, true>(job);
}

bool wide_vectors_exist() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0;
#else
  return false;
#endif
}

bool wide_vectors = wide_vectors_exist();

template <class E, class Op>
void run(const Job& job) {
  if (wide_vectors) {
    reduce_wide<E, Op>(job);
  } else {
    reduce_plain<E, Op>(job);
  }
}

// ---- Choice of the loop

template <class E>
void run_arithmetic(const Job& job, Reduction reduction) {
  if (reduction == POLYCCL_REDUCTION_SUM) return run<E, Sum>(job);
  if (reduction == POLYCCL_REDUCTION_PRODUCT) return run<E, Product>(job);
  if constexpr (std::is_arithmetic_v<typename E::Wide>) {
    if (reduction == POLYCCL_REDUCTION_MIN) return run<E, Min>(job);
    if (reduction == POLYCCL_REDUCTION_MAX) return run<E, Max>(job);
  }
  if constexpr (std::is_integral_v<typename E::Wide>) {
    if (reduction == POLYCCL_REDUCTION_BAND) return run<E, And>(job);
    if (reduction == POLYCCL_REDUCTION_BOR) return run<E, Or>(job);
    if (reduction == POLYCCL_REDUCTION_BXOR) return run<E, Xor>(job);
  }
  throw Error(Code::kInternal, "reduce: no loop for this reduction; this is a bug of PolyCCL, please report it");
}

void run_bool(const Job& job, Reduction reduction) {
  switch (reduction) {
    case POLYCCL_REDUCTION_SUM:
    case POLYCCL_REDUCTION_MAX:
    case POLYCCL_REDUCTION_BOR:
      return run<Bool, Or>(job);
    case POLYCCL_REDUCTION_BXOR:
      return run<Bool, Xor>(job);
    default:
      return run<Bool, And>(job);
  }
}

void run_dtype(const Job& job, Dtype dtype, Reduction reduction) {
  switch (dtype) {
    case POLYCCL_DTYPE_BOOL:
      return run_bool(job, reduction);
    case POLYCCL_DTYPE_INT8:
      return run_arithmetic<Integer<int8_t>>(job, reduction);
    case POLYCCL_DTYPE_UINT8:
      return run_arithmetic<Integer<uint8_t>>(job, reduction);
    case POLYCCL_DTYPE_INT16:
      return run_arithmetic<Integer<int16_t>>(job, reduction);
    case POLYCCL_DTYPE_UINT16:
      return run_arithmetic<Integer<uint16_t>>(job, reduction);
    case POLYCCL_DTYPE_INT32:
      return run_arithmetic<Integer<int32_t>>(job, reduction);
    case POLYCCL_DTYPE_UINT32:
      return run_arithmetic<Integer<uint32_t>>(job, reduction);
    case POLYCCL_DTYPE_INT64:
      return run_arithmetic<Integer<int64_t>>(job, reduction);
    case POLYCCL_DTYPE_UINT64:
      return run_arithmetic<Integer<uint64_t>>(job, reduction);
    case POLYCCL_DTYPE_FLOAT16:
      return run_arithmetic<Float16>(job, reduction);
    case POLYCCL_DTYPE_BFLOAT16:
      return run_arithmetic<Bfloat16>(job, reduction);
    case POLYCCL_DTYPE_FLOAT32:
      return run_arithmetic<Float<float>>(job, reduction);
    case POLYCCL_DTYPE_FLOAT64:
      return run_arithmetic<Float<double>>(job, reduction);
    case POLYCCL_DTYPE_COMPLEX64:
      return run_arithmetic<Complex<float>>(job, reduction);
    case POLYCCL_DTYPE_COMPLEX128:
      return run_arithmetic<Complex<double>>(job, reduction);
    default:
      throw Error(Code::kInternal, "reduce: no loop for this type; this is a bug of PolyCCL, please report it");
  }
}

// ---- Guards

// The default floating-point environment while it lives: a thread may have been told to flush denormals
// (torch.set_flush_denormal) or to round otherwise, and its rank would then get other bits.
class DefaultFloatingPoint {
 public:
#if defined(__x86_64__)
  DefaultFloatingPoint() : saved_(_mm_getcsr()) {
    if ((saved_ & ~kFlags) != kDefault) _mm_setcsr(kDefault);
  }
  ~DefaultFloatingPoint() {
    if ((saved_ & ~kFlags) != kDefault) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kFlags = 0x3f,
                            kDefault = 0x1f80;  // sticky exception flags; all masked, nearest, denormals kept
  unsigned saved_;
#else
  DefaultFloatingPoint() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
 public:
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;
};

std::string named(Dtype dtype) {
  return dtype_size(dtype) == 0 ? "dtype " + std::to_string(dtype) : std::string(dtype_name(dtype));
}

void check_factor(Dtype dtype, const Factor& factor, const char* doing) {
  if (factor.kind == Factor::Kind::kNone) return;
  if (dtype == POLYCCL_DTYPE_BOOL) {
    throw Error(Code::kUnsupportedOperation,
                std::string(doing) +
                    ": bool cannot be scaled or averaged; use SUM (or) or PRODUCT (and), or convert the tensor first");
  }
  if (factor.kind == Factor::Kind::kAverage ? factor.ranks == 0 : factor.value == nullptr) {
    throw Error(Code::kInternal,
                std::string(doing) + ": a factor without its value; this is a bug of PolyCCL, please report it");
  }
}

// ---- Scalars

// To float32 with the last bit set where something was lost, so that a second rounding, to 16 bits, comes out as if it
// were the only one.
float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (value != value || static_cast<double>(nearest) == value || (bits & 1) != 0) return nearest;
  return std::bit_cast<float>(std::fabs(static_cast<double>(nearest)) > std::fabs(value) ? bits - 1 : bits + 1);
}

template <class T>
T to_integer(double value) {
  if (value != value) return 0;
  const double nearest = std::nearbyint(value);
  // Compared as doubles: the limit itself may be rounded up, so it is outside.
  if (nearest >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  if (nearest <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  return static_cast<T>(nearest);
}

template <class T>
void put(void* output, T value) {
  std::memcpy(output, &value, sizeof value);
}

}  // namespace

void reduce(void* output, std::span<const void* const> operands, size_t n, Dtype dtype, Reduction reduction,
            const Factor& factor) {
  if (reduction == POLYCCL_REDUCTION_AVG || reduction == POLYCCL_REDUCTION_PREMUL_SUM ||
      !can_reduce(dtype, reduction)) {
    throw Error(Code::kUnsupportedOperation,
                "reduce: " + named(dtype) + " cannot be combined by " + std::string(reduction_name(reduction)) +
                    " on the host; use another reduction, or convert the tensor to a type that has it");
  }
  if (operands.empty()) {
    throw Error(Code::kInternal, "reduce: no operands; this is a bug of PolyCCL, please report it");
  }
  check_factor(dtype, factor, "reduce");
  const DefaultFloatingPoint guard;
  run_dtype(Job{static_cast<std::byte*>(output), operands, n, factor}, dtype, reduction);
}

void scale(void* output, const void* input, size_t n, Dtype dtype, const Factor& factor) {
  // A sum of one operand.
  if (!can_reduce(dtype, POLYCCL_REDUCTION_SUM)) {
    throw Error(
        Code::kUnsupportedOperation,
        "scale: " + named(dtype) + " cannot be scaled on the host; convert the tensor to float16, bfloat16 or float32");
  }
  check_factor(dtype, factor, "scale");
  const DefaultFloatingPoint guard;
  run_dtype(Job{static_cast<std::byte*>(output), {&input, 1}, n, factor}, dtype, POLYCCL_REDUCTION_SUM);
}

void store_scalar(void* output, double value, Dtype dtype) {
  const DefaultFloatingPoint guard;
  switch (dtype) {
    case POLYCCL_DTYPE_BOOL:
      return put(output, static_cast<uint8_t>(value != 0));
    case POLYCCL_DTYPE_INT8:
      return put(output, to_integer<int8_t>(value));
    case POLYCCL_DTYPE_UINT8:
      return put(output, to_integer<uint8_t>(value));
    case POLYCCL_DTYPE_INT16:
      return put(output, to_integer<int16_t>(value));
    case POLYCCL_DTYPE_UINT16:
      return put(output, to_integer<uint16_t>(value));
    case POLYCCL_DTYPE_INT32:
      return put(output, to_integer<int32_t>(value));
    case POLYCCL_DTYPE_UINT32:
      return put(output, to_integer<uint32_t>(value));
    case POLYCCL_DTYPE_INT64:
      return put(output, to_integer<int64_t>(value));
    case POLYCCL_DTYPE_UINT64:
      return put(output, to_integer<uint64_t>(value));
    case POLYCCL_DTYPE_FLOAT16:
      return put(output, float_to_float16(round_to_odd(value)));
    case POLYCCL_DTYPE_BFLOAT16:
      return put(output, float_to_bfloat16(round_to_odd(value)));
    case POLYCCL_DTYPE_FLOAT32:
      return put(output, canonical(static_cast<float>(value)));
    case POLYCCL_DTYPE_FLOAT64:
      return put(output, canonical(value));
    case POLYCCL_DTYPE_COMPLEX64:
      return put(output, Pair<float>{canonical(static_cast<float>(value)), 0});
    case POLYCCL_DTYPE_COMPLEX128:
      return put(output, Pair<double>{canonical(value), 0});
    default:
      throw Error(Code::kUnsupportedOperation,
                  "a factor cannot be given in " + named(dtype) + "; use float16, bfloat16, float32 or float64");
  }
}

bool use_wide_vectors(bool wanted) {
  const bool before = wide_vectors;
  wide_vectors = wanted && wide_vectors_exist();
  return before;
}

}  // namespace polyccl
