// Plans as the executor holds them: decoded from the planner's words (core/python/polyccl/planner/plan.py, which
// explains every field).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "error.h"
#include "types.h"

namespace polyccl {

__extension__ typedef __int128 Wide;  // products of two 64-bit numbers

struct Fraction {
  int64_t num = 0, den = 1;
  // The fraction of `length`, which the plan's unit makes a whole number.
  uint64_t of(uint64_t length) const { return static_cast<uint64_t>(Wide{num} * Wide{length} / den); }
};

inline constexpr int kInputBuffer = 0, kOutputBuffer = 1, kFirstScratch = 2;

struct Slice {
  int buffer = 0;
  int block = 0;
  Fraction lo, hi;
};

struct Step {
  Verb verb{};
  Lane lane{};
  Kind kind = 0;
  int root = -1;
  int peer = -1;
  FactorKind factor{};
  uint16_t ordinal = 0;
  std::vector<Slice> src, dst;
  std::vector<uint32_t> deps;
};

inline bool is_message(const Step& step) { return step.verb == Verb::kSend || step.verb == Verb::kRecv; }

struct Scratch {
  Fraction size;        // in lengths of an iteration
  bool device = false;  // whether it lies where input and output do, on a device; else it is the host's
};

struct Section {
  uint64_t unit = 1;
  uint64_t chunk = 0;  // elements of an iteration; 0: everything in one
  bool ragged = false;
  std::vector<Scratch> scratch;
  std::vector<Step> steps;
  bool uses(Lane lane) const;
};

struct Plan {
  Kind kind = 0;
  Reduction reduction = 0;
  std::vector<Section> sections;  // main, then tail where there is one

  // Read a plan for a communicator of `size` ranks. Throws kInternal where the words are not a plan: every number is
  // bounded before use.
  static Plan decode(std::string_view bytes, int size);
};

}  // namespace polyccl
