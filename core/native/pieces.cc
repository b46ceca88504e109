#include "pieces.h"

#include <algorithm>
#include <string>

namespace polyccl {
namespace {

// Elements of `block` of a side in a ragged section's iteration.
uint64_t ragged_length(const std::vector<uint64_t>& counts, int block, const Iteration& it) {
  const uint64_t count = counts[static_cast<size_t>(block)];
  return count <= it.start ? 0 : std::min(it.section->chunk, count - it.start);
}

Piece resolve_scratch(const Iteration& it, const Slice& s) {
  const Call& call = it.execution->call;
  const size_t element = call.element();
  const auto number = static_cast<size_t>(s.buffer - kFirstScratch);
  const bool device = it.section->scratch[number].device;
  char* base = it.scratch[device ? 1 : 0] + (*it.scratch_offsets)[number];
  if (!it.section->ragged) {
    const uint64_t lo = s.lo.of(it.length), hi = s.hi.of(it.length);
    return {base + lo * element, hi - lo, device};
  }
  const bool outputs = s.block < 0 || call.row->input != Shape::kBlocks;
  const auto& counts = (outputs ? call.output : call.input).counts;
  const uint64_t parts = s.hi.of(1) - s.lo.of(1);
  return {base + s.lo.of(it.section->chunk) * element,
          parts * ragged_length(counts, s.block < 0 ? ~s.block : s.block, it), device};
}

}  // namespace

Piece resolve(const Iteration& it, const Slice& s) {
  if (s.buffer >= kFirstScratch) return resolve_scratch(it, s);
  const Call& call = it.execution->call;
  const Side& side = s.buffer == kInputBuffer ? call.input : call.output;
  if (static_cast<size_t>(s.block) >= side.blocks.size()) {
    throw Error(Code::kInternal, std::string("the plan of ") + std::string(call.row->name) +
                                     " uses memory that this rank does not have");
  }
  char* base = side.blocks[static_cast<size_t>(s.block)] + it.start * call.element();
  if (it.section->ragged) return {base, ragged_length(side.counts, s.block, it), true};
  const uint64_t lo = s.lo.of(it.length), hi = s.hi.of(it.length);
  return {base + lo * call.element(), hi - lo, true};
}

}  // namespace polyccl
