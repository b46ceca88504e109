// Decoding of plans. Nothing is trusted: a plan may come from a user's own algorithm.
#include "plan.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace polyccl {
namespace {

constexpr int64_t kFormatVersion = 2;
constexpr int64_t kMaxSteps = 1 << 22;
constexpr int64_t kMaxScratch = 1 << 16;
constexpr int64_t kMaxFraction = int64_t{1} << 40;

// Takes words off the encoded plan, each within bounds that the caller gives.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  int64_t word(int64_t lo, int64_t hi, const char* what) {
    int64_t value = 0;
    if (position_ + sizeof value > bytes_.size()) throw bad(std::string("it ends before ") + what);
    std::memcpy(&value, bytes_.data() + position_, sizeof value);
    position_ += sizeof value;
    if (value < lo || value > hi) throw bad(std::string(what) + " is " + std::to_string(value));
    return value;
  }

  // A count of items that follow, each of at least `words` words: never more than there can be.
  size_t count(int64_t limit, size_t words, const char* what) {
    const auto n = static_cast<size_t>(word(0, limit, what));
    if (n * words * sizeof(int64_t) > bytes_.size() - position_) throw bad(std::string("it ends within ") + what);
    return n;
  }

  Fraction fraction(const char* what) {
    Fraction f;
    f.num = word(0, kMaxFraction, what);
    f.den = word(1, kMaxFraction, what);
    return f;
  }

  void end() const {
    if (position_ != bytes_.size()) throw bad("words are left over");
  }

  static Error bad(const std::string& why) {
    return Error(Code::kInternal, "the planner gave a malformed plan: " + why);
  }

 private:
  std::string_view bytes_;
  size_t position_ = 0;
};

bool less(const Fraction& a, const Fraction& b) { return Wide{a.num} * b.den < Wide{b.num} * a.den; }

std::vector<Slice> read_slices(Reader& in, const Section& section, int size) {
  std::vector<Slice> slices(in.count(kMaxSteps, 6, "the slices of a step"));
  for (Slice& s : slices) {
    s.buffer =
        static_cast<int>(in.word(0, kFirstScratch + static_cast<int64_t>(section.scratch.size()) - 1, "a buffer"));
    s.block = static_cast<int>(in.word(s.buffer < kFirstScratch ? 0 : -size, size - 1, "a block"));
    s.lo = in.fraction("the begin of a slice");
    s.hi = in.fraction("the end of a slice");
    const Fraction limit = s.buffer >= kFirstScratch ? section.scratch[s.buffer - kFirstScratch].size : Fraction{1, 1};
    if (less(s.hi, s.lo) || less(limit, s.hi)) throw Reader::bad("a slice leaves its buffer");
    if (section.unit % s.lo.den != 0 || section.unit % s.hi.den != 0) throw Reader::bad("a slice is not whole");
    if (section.ragged && (s.lo.den != 1 || s.hi.den != 1)) throw Reader::bad("a ragged slice is not whole");
  }
  return slices;
}

void check_operands(const Step& step) {
  const size_t src = step.src.size(), dst = step.dst.size();
  bool good = true;
  switch (step.verb) {
    case Verb::kLocal:
      good = src <= 1 && dst <= 1 && step.lane != Lane::kCross && find_operation(step.kind);
      break;
    case Verb::kSend:
      good = src == 1 && dst == 0 && step.peer >= 0;
      break;
    case Verb::kRecv:
      good = src == 0 && dst == 1 && step.peer >= 0;
      break;
    case Verb::kCopy:
      good = src == dst;
      break;
    case Verb::kReduce:
      good = src >= 1 && dst == 1;
      break;
    case Verb::kScale:
      good = src == 1 && dst == 1;
      break;
  }
  if (!good) throw Reader::bad("a step has the wrong operands");
}

Step read_step(Reader& in, const Section& section, size_t position, int size) {
  Step step;
  step.verb = static_cast<Verb>(in.word(0, 5, "a verb"));
  step.lane = static_cast<Lane>(in.word(0, kLanes - 1, "a lane"));
  step.kind = static_cast<Kind>(in.word(0, UINT16_MAX, "a kind"));
  step.root = static_cast<int>(in.word(-1, size - 1, "a root"));
  step.peer = static_cast<int>(in.word(-1, size - 1, "a peer"));
  step.factor = static_cast<FactorKind>(in.word(0, 2, "a factor"));
  step.ordinal = static_cast<uint16_t>(in.word(0, UINT16_MAX, "an ordinal"));
  step.src = read_slices(in, section, size);
  step.dst = read_slices(in, section, size);
  step.deps.resize(in.count(kMaxSteps, 1, "the dependencies of a step"));
  for (uint32_t& dep : step.deps) {
    dep = static_cast<uint32_t>(in.word(0, static_cast<int64_t>(position) - 1, "a dependency"));
    if (section.steps[dep].lane > step.lane) throw Reader::bad("a dependency goes backward");
  }
  check_operands(step);
  return step;
}

Section read_section(Reader& in, int size) {
  Section section;
  section.unit = static_cast<uint64_t>(in.word(1, kMaxFraction, "a unit"));
  section.chunk = static_cast<uint64_t>(in.word(0, kMaxFraction, "a chunk"));
  section.ragged = in.word(0, 1, "the ragged flag") != 0;
  if (section.chunk % section.unit != 0) throw Reader::bad("the chunk is not a multiple of the unit");
  section.scratch.resize(in.count(kMaxScratch, 3, "the scratch buffers"));
  for (Scratch& scratch : section.scratch) {
    scratch.size = in.fraction("the size of a scratch buffer");
    scratch.device = in.word(0, 1, "a scratch buffer's memory") != 0;
  }
  const size_t steps = in.count(kMaxSteps, 10, "the steps");
  section.steps.reserve(steps);
  for (size_t i = 0; i < steps; ++i) section.steps.push_back(read_step(in, section, i, size));
  return section;
}

}  // namespace

bool Section::uses(Lane lane) const {
  return std::any_of(steps.begin(), steps.end(), [lane](const Step& s) { return s.lane == lane; });
}

Plan Plan::decode(std::string_view bytes, int size) {
  Reader in(bytes);
  in.word(kFormatVersion, kFormatVersion, "the format's version");
  Plan plan;
  plan.kind = static_cast<Kind>(in.word(1, UINT16_MAX, "the kind"));
  plan.reduction = static_cast<Reduction>(in.word(0, POLYCCL_REDUCTION_BXOR, "the reduction"));
  const int64_t sections = in.word(1, 2, "the number of sections");
  for (int64_t i = 0; i < sections; ++i) plan.sections.push_back(read_section(in, size));
  in.end();
  return plan;
}

}  // namespace polyccl
