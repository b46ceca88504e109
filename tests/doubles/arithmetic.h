// NCCL's reductions on the host: element types 0 to 11, the five operations, and the scaling that AVG and PREMUL_SUM
// put before a sum. Results are rounded to the element type after each step, ranks are combined in rank order, MIN and
// MAX drop NaN: as the vendors' kernels do.
#ifndef STAND_IN_ARITHMETIC_H_
#define STAND_IN_ARITHMETIC_H_

#include <cstddef>

namespace stand_in {

constexpr unsigned kDtypes = 12;

// Bytes of one element.
std::size_t size_of(unsigned dtype);
bool is_integer(unsigned dtype);

// total = total (op) next, n elements. op is 0 sum, 1 product, 2 max, 3 min.
void combine(unsigned dtype, unsigned op, void* total, const void* next, std::size_t n);

// output = input * factor, n elements; factor is one element.
void scale(unsigned dtype, void* output, const void* input, const void* factor, std::size_t n);

// Integers only: total = total / ranks, towards zero.
void divide(unsigned dtype, void* total, std::size_t ranks, std::size_t n);

// Writes one element: 1 / ranks. Floating types only.
void reciprocal(unsigned dtype, void* factor, std::size_t ranks);

// The two 8-bit numbers of AMD's gfx94x have a different meaning (FNUZ); FAKE_HIP_ARCH chooses on the RCCL stand-in.
void use_fnuz(bool fnuz);

}  // namespace stand_in

#endif  // STAND_IN_ARITHMETIC_H_
