// Host arithmetic: the reductions and scalings that PolyCCL does itself, the same on every rank and every island.
//
// All ranks that combine the same operands in the same order get the same bits: the order of operations does not depend
// on alignment, length or the processor, and every NaN that comes out is the canonical quiet NaN of its type. 16-bit
// floats accumulate in float32 and are rounded once, to nearest even. Integers wrap. MIN and MAX let NaN win, as torch
// does.
#pragma once

#include <cstddef>
#include <span>

#include "types.h"

namespace polyccl {

// What a result is multiplied by before it is stored.
struct Factor {
  enum class Kind { kNone, kAverage, kValue } kind = Kind::kNone;
  size_t ranks = 1;             // kAverage: floats are multiplied by 1 / ranks, integers are divided with truncation
  const void* value = nullptr;  // kValue: one element of the data's type
};

// output[i] = (operands[0][i] op operands[1][i] op ...) * factor, from left to right, for n elements. output may be any
// of the operands, exactly; it overlaps none of them otherwise. `reduction` is none of AVG and PREMUL_SUM. Throws
// kUnsupportedOperation.
void reduce(void* output, std::span<const void* const> operands, size_t n, Dtype dtype, Reduction reduction,
            const Factor& factor = {});

// output[i] = input[i] * factor. In place is fine.
void scale(void* output, const void* input, size_t n, Dtype dtype, const Factor& factor);

// Write one element of `dtype` with the value (rounded to it); for factors given as Python numbers.
void store_scalar(void* output, double value, Dtype dtype);

// Whether to use the widest vectors that the processor has (the default) or the least that every processor has; the
// bits are the same. For tests, which compare both: call it while nothing reduces. Returns the setting before.
bool use_wide_vectors(bool wanted);

}  // namespace polyccl
