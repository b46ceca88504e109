#include "arguments.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "reduce.h"

namespace polyccl {
namespace {

// What is being checked, and how to say that it is wrong.
struct Check {
  const Communicator& comm;
  const Operation& row;
  size_t size;
  const char *input, *output;  // what the user calls the sides

  [[noreturn]] void refuse(const std::string& why, Code code = Code::kInvalidArgument) const {
    throw Error(code, comm.where(std::string(row.name)) + ": " + why);
  }
};

bool is_list(nb::handle h) { return PyList_Check(h.ptr()) || PyTuple_Check(h.ptr()); }

std::vector<Tensor> take(const Check& check, nb::handle side, Access access, const char* what) {
  std::vector<Tensor> tensors;
  const std::string name = std::string(check.row.name) + ": " + what;
  if (side.is_none()) return tensors;
  if (!is_list(side)) {
    tensors.push_back(intake(side, access, name));
    return tensors;
  }
  const auto n = static_cast<size_t>(PySequence_Fast_GET_SIZE(side.ptr()));
  tensors.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    nb::handle item = PySequence_Fast_GET_ITEM(side.ptr(), static_cast<Py_ssize_t>(i));
    tensors.push_back(intake(item, access, name + " " + std::to_string(i)));
  }
  return tensors;
}

bool has_side(const Check& check, Who who, int root) {
  return who == Who::kAll || (who == Who::kRoot && root == check.comm.rank());
}

// Python has checked that it is a rank (polyccl/arguments.py).
void check_peer(const Check& check, int peer) {
  if (!check.row.rooted && check.row.collective) return;
  if (peer < 0 || static_cast<size_t>(peer) >= check.size) check.refuse(std::to_string(peer) + " is no rank");
  if (check.row.collective || peer != check.comm.rank()) return;
  check.refuse(std::string(check.row.kind == POLYCCL_KIND_SEND ? "dst" : "src") + " is " + std::to_string(peer) +
               ", this rank itself; copy the tensor instead");
}

constexpr int32_t kCpu = 1;  // DLPack's kDLCPU

// A tensor must be where the communicator is.
void check_device(const Check& check, const Tensor& t) {
  const CommunicatorConfig& config = check.comm.config();
  if (t.device_type == config.device_type && (t.device_type == kCpu || t.device_index == config.device_index)) return;
  if (t.device_type == kCpu) {
    check.refuse("a tensor is in host memory, but the communicator's device is " + config.device_name +
                 "; move it there");
  }
  if (config.device_type == kCpu) {
    check.refuse("a tensor is not in host memory, but the communicator's device is cpu; move it with .cpu()");
  }
  check.refuse("a tensor is on another device (type " + std::to_string(t.device_type) + ", index " +
               std::to_string(t.device_index) + ") than the communicator, whose device is " + config.device_name);
}

void check_tensors(const Check& check, const CheckedCall& c) {
  const Tensor* first = nullptr;
  for (const auto* side : {&c.inputs, &c.outputs}) {
    for (const Tensor& t : *side) {
      check_device(check, t);
      if (first == nullptr) first = &t;
      if (t.dtype != first->dtype) {
        check.refuse("tensors have unlike dtypes, " + std::string(dtype_name(first->dtype)) + " and " +
                     std::string(dtype_name(t.dtype)));
      }
    }
  }
}

// A graph would repeat the device's part of an operation, and not the host's.
void check_capture(const Check& check, const UserStream& stream) {
  const Device* device = check.comm.config().device.get();
  if (device == nullptr || !stream.known() || !device->capturing(stream.handle)) return;
  check.refuse(
      "the current stream is being captured into a graph, which would repeat only the device's part of the operation, "
      "and not the host's; end the capture before, call this outside of it, and capture what comes after apart",
      Code::kUnsupportedOperation);
}

void check_reduction(const Check& check, const Call& call) {
  if (!check.row.reduces) return;
  const std::string name(reduction_name(call.reduction));
  if (call.reduction == POLYCCL_REDUCTION_NONE || name == "unknown") check.refuse("there is no such reduction");
  if (!can_reduce(call.dtype, call.reduction)) {
    check.refuse(name + " is not defined on " + std::string(dtype_name(call.dtype)) + "; convert the tensor",
                 Code::kUnsupportedOperation);
  }
}

void set_factor(const Check& check, CheckedCall& c, nb::handle factor) {
  if (c.call.reduction != POLYCCL_REDUCTION_PREMUL_SUM || !check.row.reduces) return;
  if (PyFloat_Check(factor.ptr()) || PyLong_Check(factor.ptr())) {
    const double value = PyFloat_AsDouble(factor.ptr());
    if (value == -1.0 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      check.refuse("the factor of PREMUL_SUM is too large for a float");
    }
    store_scalar(c.call.factor.data(), value, c.call.dtype);
    return;
  }
  const Tensor t = intake(factor, Access::kRead, std::string(check.row.name) + ": factor");
  if (t.count != 1 || t.dtype != c.call.dtype || t.device_type != kCpu) {
    check.refuse("the factor of PREMUL_SUM must be a number, or one element of the tensor's dtype (" +
                 std::string(dtype_name(c.call.dtype)) + ") in host memory");
  }
  std::memcpy(c.call.factor.data(), t.data, dtype_size(t.dtype));
}

struct Given {
  bool input_list, output_list;
};

// A list of blocks has one for each rank.
void check_lists(const Check& check, const CheckedCall& c, Given given, bool reads, bool writes) {
  const auto require = [&](const std::vector<Tensor>& tensors, const char* what) {
    if (tensors.size() == check.size) return;
    check.refuse(std::string(what) + " must list one tensor for each of the " + std::to_string(check.size) +
                 " ranks, and has " + std::to_string(tensors.size()));
  };
  if (reads && given.input_list) require(c.inputs, check.input);
  if (writes && given.output_list) require(c.outputs, check.output);
}

uint64_t total_count(const std::vector<Tensor>& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), uint64_t{0},
                         [](uint64_t n, const Tensor& t) { return n + t.count; });
}

Side one_block(const Tensor& t) { return {{static_cast<char*>(t.data)}, {}}; }

// Blocks of equal length: a list of `size` tensors of `count` elements, or one tensor of size * count.
Side equal_blocks(const Check& check, const std::vector<Tensor>& tensors, bool list, uint64_t count, const char* what) {
  if (!list && tensors[0].count != count * check.size) {
    check.refuse(std::string(what) + " must have " + std::to_string(check.size) + " times " + std::to_string(count) +
                 " elements, and has " + std::to_string(tensors[0].count));
  }
  if (!list)
    return {adjacent_blocks(static_cast<char*>(tensors[0].data), check.size, count * dtype_size(tensors[0].dtype)), {}};
  Side side;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].count != count) {
      check.refuse(std::string(what) + " " + std::to_string(i) + " must have " + std::to_string(count) +
                   " elements, and has " + std::to_string(tensors[i].count));
    }
    side.blocks.push_back(static_cast<char*>(tensors[i].data));
  }
  return side;
}

// Blocks of unlike lengths: a list, or one tensor with the rows of each block.
Side ragged_blocks(const Check& check, const std::vector<Tensor>& tensors, bool list,
                   const std::optional<std::vector<int64_t>>& splits, const char* what) {
  Side side;
  const std::string name(what);
  if (list) {
    for (const Tensor& t : tensors) {
      side.blocks.push_back(static_cast<char*>(t.data));
      side.counts.push_back(t.count);
    }
    return side;
  }
  if (!splits || splits->size() != check.size)
    check.refuse(name + " needs split sizes, one for each of the " + std::to_string(check.size) + " ranks");
  const Tensor& t = tensors[0];
  const uint64_t row = t.rows > 0 ? t.count / static_cast<uint64_t>(t.rows) : 0;
  int64_t rows = 0;
  for (int64_t split : *splits) {
    if (split < 0 || split > t.rows - rows) {
      check.refuse("the split sizes of " + name + " must be at least 0 and add up to its " + std::to_string(t.rows) +
                   " rows");
    }
    side.blocks.push_back(static_cast<char*>(t.data) + static_cast<uint64_t>(rows) * row * dtype_size(t.dtype));
    side.counts.push_back(static_cast<uint64_t>(split) * row);
    rows += split;
  }
  if (rows != t.rows)
    check.refuse("the split sizes of " + name + " add up to " + std::to_string(rows) + ", but it has " +
                 std::to_string(t.rows) + " rows");
  return side;
}

void shape_ragged(const Check& check, CheckedCall& c, const Arguments& a, Given given) {
  Call& call = c.call;
  const auto me = static_cast<size_t>(check.comm.rank());
  if (check.row.input == Shape::kBlocks)
    call.input = ragged_blocks(check, c.inputs, given.input_list, a.input_splits, check.input);
  if (check.row.output == Shape::kBlocks)
    call.output = ragged_blocks(check, c.outputs, given.output_list, a.output_splits, check.output);
  if (check.row.input == Shape::kOne) {
    call.input = {{static_cast<char*>(c.inputs[0].data)}, {c.inputs[0].count}};
    if (call.input.counts[0] != call.output.counts[me])
      check.refuse(std::string(check.input) + " must be as long as " + check.output + " " + std::to_string(me));
  }
  if (check.row.output == Shape::kOne) {
    call.output = {{static_cast<char*>(c.outputs[0].data)}, {c.outputs[0].count}};
    if (call.output.counts[0] != call.input.counts[me])
      check.refuse(std::string(check.output) + " must be as long as " + check.input + " " + std::to_string(me));
  }
  if (call.kind() == POLYCCL_KIND_ALL_TO_ALL_V && call.input.counts[me] != call.output.counts[me]) {
    check.refuse("the block that stays on this rank has unlike lengths in input and output");
  }
  for (const Side* side : {&call.input, &call.output}) {
    for (uint64_t n : side->counts) call.count = std::max(call.count, n);
  }
}

void shape_equal(const Check& check, CheckedCall& c, Given given) {
  Call& call = c.call;
  const Operation& row = check.row;
  const auto block_of = [&](const std::vector<Tensor>& tensors, bool list, const char* what) {
    if (list) return tensors.empty() ? uint64_t{0} : tensors[0].count;
    if (tensors[0].count % check.size != 0) {
      check.refuse(std::string(what) + " has " + std::to_string(tensors[0].count) +
                   " elements, which do not divide among " + std::to_string(check.size) + " ranks");
    }
    return tensors[0].count / check.size;
  };
  if (row.input == Shape::kOne && !c.inputs.empty()) {
    call.count = c.inputs[0].count;
  } else if (row.output == Shape::kOne && !c.outputs.empty()) {
    call.count = c.outputs[0].count;
  } else {
    call.count = block_of(c.inputs, given.input_list, check.input);
  }
  if (!c.inputs.empty()) {
    call.input = row.input == Shape::kOne ? one_block(c.inputs[0])
                                          : equal_blocks(check, c.inputs, given.input_list, call.count, check.input);
  }
  if (c.outputs.empty()) return;
  call.output = row.output == Shape::kOne ? one_block(c.outputs[0])
                                          : equal_blocks(check, c.outputs, given.output_list, call.count, check.output);
  if (row.output == Shape::kOne && c.outputs[0].count != call.count) {
    check.refuse("input and output must have equally many elements, and have " + std::to_string(call.count) + " and " +
                 std::to_string(c.outputs[0].count));
  }
}

struct Range {
  const char *begin, *end;
};

std::vector<Range> ranges(const std::vector<Tensor>& tensors) {
  std::vector<Range> result;
  for (const Tensor& t : tensors) {
    const auto* begin = static_cast<const char*>(t.data);
    if (t.count != 0) result.push_back({begin, begin + t.bytes()});
  }
  std::sort(result.begin(), result.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  return result;
}

// Exactly the layouts of NCCL's in-place calls.
bool in_place(const Call& call, int rank) {
  const auto me = static_cast<size_t>(rank);
  const Shape input = call.row->input, output = call.row->output;
  if (input == output) return input == Shape::kOne && call.input.blocks[0] == call.output.blocks[0];
  return input == Shape::kOne ? call.input.blocks[0] == call.output.blocks[me]
                              : call.output.blocks[0] == call.input.blocks[me];
}

void check_overlap(const Check& check, const CheckedCall& c) {
  const auto outputs = ranges(c.outputs);
  for (size_t i = 1; i < outputs.size(); ++i) {
    if (outputs[i].begin < outputs[i - 1].end) check.refuse("two outputs share memory; give each its own");
  }
  if (c.call.input.empty() || c.call.output.empty() || in_place(c.call, check.comm.rank())) return;
  for (const Range& in : ranges(c.inputs)) {
    auto after = std::upper_bound(outputs.begin(), outputs.end(), in.begin,
                                  [](const char* p, const Range& r) { return p < r.end; });
    if (after != outputs.end() && after->begin < in.end) {
      check.refuse("input and output overlap in part; give the in-place layout exactly, or separate memory");
    }
  }
}

}  // namespace

CheckedCall check_arguments(const Communicator& comm, const Arguments& a) {
  const Operation* row = find_operation(a.kind);
  if (row == nullptr)
    throw Error(Code::kUnsupportedOperation,
                comm.where("operation " + std::to_string(a.kind)) + ": there is no such kind");
  const Given given{!a.input.is_none() && is_list(a.input), !a.output.is_none() && is_list(a.output)};
  const Check check{comm, *row, static_cast<size_t>(comm.size()), a.input_name, a.output_name};
  check_peer(check, a.peer);
  CheckedCall c;
  c.call.row = row;
  c.call.peer = a.peer;
  c.call.tag = a.tag;
  c.call.reduction = row->reduces ? a.reduction : Reduction{POLYCCL_REDUCTION_NONE};
  if (row->kind == POLYCCL_KIND_BARRIER) {
    c.call.dtype = POLYCCL_DTYPE_UINT8;
    c.call.count = 1;
    return c;
  }
  const bool reads = has_side(check, row->input_at, a.peer), writes = has_side(check, row->output_at, a.peer);
  const auto require = [&](nb::handle side, bool one, const char* what) {
    if (side.is_none()) check.refuse(std::string(what) + " is None; this rank must give a tensor");
    if (one && is_list(side)) check.refuse(std::string(what) + " must be one tensor, and is a list");
  };
  if (reads) require(a.input, row->input == Shape::kOne, check.input);
  if (writes) require(a.output, row->output == Shape::kOne, check.output);
  if (writes) c.outputs = take(check, a.output, Access::kWrite, check.output);
  if (reads && writes && a.input.is(a.output)) {
    c.inputs = c.outputs;
  } else if (reads) {
    c.inputs = take(check, a.input, Access::kRead, check.input);
  }
  check_lists(check, c, given, reads, writes);
  check_tensors(check, c);
  c.call.dtype = c.inputs.empty() && c.outputs.empty() ? Dtype{POLYCCL_DTYPE_UINT8}
                                                       : (c.inputs.empty() ? c.outputs : c.inputs)[0].dtype;
  const Tensor* first = c.inputs.empty() ? (c.outputs.empty() ? nullptr : &c.outputs[0]) : &c.inputs[0];
  if (first != nullptr) c.call.stream = {first->stream, first->current_stream, first->device_type, first->device_index};
  check_reduction(check, c.call);
  if (total_count(c.inputs) > std::numeric_limits<uint64_t>::max() / 32 / check.size)
    check.refuse("the tensors are too large");
  const bool rooted_blocks = row->rooted && (row->input == Shape::kBlocks || row->output == Shape::kBlocks);
  c.call.lists = rooted_blocks || given.input_list || given.output_list;
  row->ragged ? shape_ragged(check, c, a, given) : shape_equal(check, c, given);
  check_overlap(check, c);
  set_factor(check, c, a.factor);
  check_capture(check, c.call.stream);
  return c;
}

}  // namespace polyccl
