#include "trial.h"

#include <algorithm>
#include <cmath>

namespace polyccl::native_test {
namespace {

constexpr uint64_t kGap = 16;  // elements between the blocks of a list
constexpr float kUntouched = -77;

thread_local void* current_stream = nullptr;

int give_current_stream(int32_t, int32_t, void** stream) {
  *stream = current_stream;
  return 0;
}

// What a rank gives: small whole numbers, so that sums are exact.
float given(int rank, int block, uint64_t i) { return static_cast<float>((rank * 5 + block * 3 + i) % 11) - 4; }

// PREMUL_SUM's, by rank.
float factor_of(int rank) { return rank % 2 == 0 ? 0.5F : 2.0F; }

// Lengths of ragged blocks: some are empty.
uint64_t ragged_length(uint64_t count, int rank, int size) {
  return rank % 3 == 2 ? 0 : count * static_cast<uint64_t>(rank + 1) / static_cast<uint64_t>(size);
}

uint64_t pair_length(uint64_t count, int sender, int receiver) {
  return count * static_cast<uint64_t>((sender * 3 + receiver * 5) % 4) / 4;
}

float combine(Reduction reduction, float a, float b) {
  return reduction == POLYCCL_REDUCTION_MAX ? std::max(a, b) : a + b;
}

}  // namespace

// ---- the user's stream ----------------------------------------------------------------------------------------------

UsersStream::UsersStream(std::shared_ptr<Device> device) : device_(std::move(device)) {
  if (!device_) return;
  handle_ = device_->stream();
  current_stream = handle_.get();
}

UsersStream::~UsersStream() { current_stream = nullptr; }

UserStream UsersStream::face() const {
  if (!device_) return {};
  return {handle_.get(), give_current_stream, 2, device_->index()};
}

void UsersStream::drain() const {
  if (device_) device_->synchronize(handle_.get(), now_ns() + kPatience, {});
}

// ---- memory ---------------------------------------------------------------------------------------------------------

std::shared_ptr<char> allocate(const Job& job, uint64_t bytes) {
  bytes = std::max<uint64_t>(bytes, 1);
  if (!job.device()) {
    auto memory = std::make_shared<std::vector<char>>(bytes);
    return {memory, memory->data()};
  }
  std::shared_ptr<void> memory(job.device()->memory(bytes));
  return {memory, static_cast<char*>(memory.get())};
}

Trial::Trial(const Job& job, const Form& form, const UsersStream* stream)
    : rank_(job.rank()), size_(job.size()), form_(form), row_(*find_operation(form.kind)), stream_(stream) {
  const auto has = [this](Who who) { return who == Who::kAll || (who == Who::kRoot && rank_ == form_.root); };
  reads_ = has(row_.input_at);
  writes_ = has(row_.output_at);
  if (writes_) place(job, false);
  if (reads_) place(job, true);
  fill();
}

uint64_t Trial::length(bool input, int block) const {
  if (form_.kind == POLYCCL_KIND_ALL_TO_ALL_V) {
    return input ? pair_length(form_.count, rank_, block) : pair_length(form_.count, block, rank_);
  }
  if (!row_.ragged) return form_.count;
  const bool blocks = (input ? row_.input : row_.output) == Shape::kBlocks;
  return ragged_length(form_.count, blocks ? block : rank_, size_);
}

// Lay out one side; in place, where the other side has been laid out already.
void Trial::place(const Job& job, bool input) {
  auto& blocks = input ? inputs_ : outputs_;
  auto& memory = input ? input_memory_ : output_memory_;
  const int number = (input ? row_.input : row_.output) == Shape::kBlocks ? size_ : 1;
  if (input && form_.in_place && writes_) {
    const bool same = row_.input == row_.output;
    if (same || row_.output == Shape::kBlocks) {  // a block of the output, or all of it
      blocks = {outputs_[same ? 0 : static_cast<size_t>(rank_)]};
      return;
    }
  }
  uint64_t elements = 0;
  std::vector<uint64_t> offsets;
  for (int block = 0; block < number; ++block) {
    offsets.push_back(elements);
    elements += length(input, block) + (form_.lists ? kGap : 0);
  }
  memory = allocate(job, elements * sizeof(float));
  std::fill_n(reinterpret_cast<float*>(memory.get()), elements, kUntouched);
  for (uint64_t offset : offsets) blocks.push_back(memory.get() + offset * sizeof(float));
  if (input && form_.in_place && writes_) outputs_ = {blocks[static_cast<size_t>(rank_)]};
}

void Trial::fill() {
  for (size_t block = 0; block < inputs_.size(); ++block) {
    auto* data = reinterpret_cast<float*>(inputs_[block]);
    const uint64_t n = length(true, static_cast<int>(block));
    for (uint64_t i = 0; i < n; ++i) data[i] = given(rank_, static_cast<int>(block), i);
  }
}

// ---- the call -------------------------------------------------------------------------------------------------------

Side Trial::side(bool input) const {
  Side side;
  side.blocks = input ? inputs_ : outputs_;
  for (size_t block = 0; row_.ragged && block < side.blocks.size(); ++block) {
    side.counts.push_back(length(input, static_cast<int>(block)));
  }
  return side;
}

void Trial::issue(Communicator& comm, Waiting how, const Interrupted& interrupted) {
  Call call;
  call.row = &row_;
  call.dtype = POLYCCL_DTYPE_FLOAT32;
  call.peer = row_.rooted ? form_.root : -1;
  call.reduction = row_.reduces ? form_.reduction : Reduction{POLYCCL_REDUCTION_NONE};
  call.count = form_.count;
  call.input = side(true);
  call.output = side(false);
  call.deadline = form_.deadline != 0 ? form_.deadline : now_ns() + kPatience;
  const bool blocks = row_.input == Shape::kBlocks || row_.output == Shape::kBlocks;
  call.lists = blocks && (row_.rooted || form_.lists);
  call.strict = form_.strict && row_.reduces;
  if (row_.ragged) {
    call.count = 0;
    for (const Side* each : {&call.input, &call.output}) {
      for (uint64_t n : each->counts) call.count = std::max(call.count, n);
    }
  }
  if (form_.kind == POLYCCL_KIND_BARRIER) {
    call.dtype = POLYCCL_DTYPE_UINT8;
    call.count = 1;
  } else if (stream_ != nullptr) {
    call.stream = stream_->face();
  }
  const float factor = factor_of(rank_);
  std::copy_n(reinterpret_cast<const std::byte*>(&factor), sizeof factor, call.factor.begin());
  how_ = how;
  const Keep keep = [held = std::vector{input_memory_, output_memory_}] {
    return std::make_shared<std::vector<std::shared_ptr<char>>>(held);
  };
  work_ = comm.issue(std::move(call), how != Waiting::kSynchronous, keep, interrupted);
}

void Trial::wait() const {
  if (how_ == Waiting::kJoin && work_->join()) {
    work_->raise();
    work_->join()();
    stream_->drain();
  } else if (how_ == Waiting::kSynchronous && stream_ != nullptr) {
    stream_->drain();
  } else if (auto error = end()) {
    throw *error;
  }
}

std::optional<Error> Trial::end() const {
  if (!work_) return std::nullopt;
  require(work_->wait(now_ns() + kPatience, {}), form_.text() + " ends");
  return work_->error();
}

// ---- the result -----------------------------------------------------------------------------------------------------

float Trial::expected(int block, uint64_t i) const {
  const int from = row_.input == Shape::kBlocks ? rank_ : 0;  // the block that this rank gets of each input
  if (!row_.reduces) return given(row_.output == Shape::kBlocks ? block : form_.root, from, i);
  const auto operand = [&](int rank) {
    return given(rank, from, i) * (form_.reduction == POLYCCL_REDUCTION_PREMUL_SUM ? factor_of(rank) : 1);
  };
  float result = operand(0);
  for (int rank = 1; rank < size_; ++rank) result = combine(form_.reduction, result, operand(rank));
  return form_.reduction == POLYCCL_REDUCTION_AVG ? result / static_cast<float>(size_) : result;
}

void Trial::check() const {
  for (size_t block = 0; block < outputs_.size(); ++block) {
    const auto* data = reinterpret_cast<const float*>(outputs_[block]);
    const uint64_t n = length(false, static_cast<int>(block));
    for (uint64_t i = 0; i < n; ++i) {
      const float wanted = expected(static_cast<int>(block), i);
      if (std::abs(data[i] - wanted) <= 1e-5F) continue;
      throw Error(Code::kInternal, form_.text() + ": element " + std::to_string(i) + " of block " +
                                       std::to_string(block) + " is " + std::to_string(data[i]) + " instead of " +
                                       std::to_string(wanted));
    }
  }
}

// ---- forms ----------------------------------------------------------------------------------------------------------

std::string Form::text() const {
  std::string words(find_operation(kind)->name);
  words +=
      " of " + std::to_string(count) + ", root " + std::to_string(root) + ", reduction " + std::to_string(reduction);
  if (in_place) words += ", in place";
  if (lists) words += ", lists";
  if (strict) words += ", strict";
  return words;
}

std::vector<Form> forms(int size, uint64_t count) {
  constexpr Reduction kReductions[] = {POLYCCL_REDUCTION_SUM, POLYCCL_REDUCTION_MAX, POLYCCL_REDUCTION_AVG,
                                       POLYCCL_REDUCTION_PREMUL_SUM};
  std::vector<Form> all;
  int turn = 0;
  for (const Operation& row : operations()) {
    if (!row.collective) continue;
    const bool blocks = row.input == Shape::kBlocks || row.output == Shape::kBlocks;
    Form form;
    form.kind = row.kind;
    form.count = blocks ? count / static_cast<uint64_t>(size) + 1 : count;
    for (const bool in_place : {false, true}) {
      form.in_place =
          in_place && row.input != Shape::kNone && !(row.input == Shape::kBlocks && row.input == row.output);
      form.root = turn++ % size;
      form.reduction = kReductions[turn % 4];
      form.lists = !form.in_place && blocks && !row.rooted && turn % 4 < 2;
      form.strict = row.reduces && turn % 3 == 0;
      all.push_back(form);
    }
  }
  return all;
}

}  // namespace polyccl::native_test
