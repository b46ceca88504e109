// Python's view of the arithmetic, the tables and the intake: for tests and tools. Operations use them from C++.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "gil.h"
#include "reduce.h"
#include "tensor.h"

namespace polyccl {
namespace {

using Named = std::variant<uint32_t, std::string>;  // a number or its name

Dtype parse_dtype(const Named& dtype) {
  if (const auto* number = std::get_if<uint32_t>(&dtype)) return *number;
  for (const Dtype known : all_dtypes()) {
    if (dtype_name(known) == std::get<std::string>(dtype)) return known;
  }
  throw Error(Code::kInvalidArgument, "dtype '" + std::get<std::string>(dtype) + "' is none of dtypes()");
}

Reduction parse_reduction(const Named& reduction) {
  if (const auto* number = std::get_if<uint32_t>(&reduction)) return *number;
  for (Reduction known = POLYCCL_REDUCTION_NONE; known <= POLYCCL_REDUCTION_PREMUL_SUM; ++known) {
    if (reduction_name(known) == std::get<std::string>(reduction)) return known;
  }
  throw Error(Code::kInvalidArgument, "reduction '" + std::get<std::string>(reduction) + "' is none of reductions()");
}

// A Factor and the element that it points to.
class HeldFactor {
 public:
  HeldFactor(Dtype dtype, size_t average, std::optional<double> value) {
    if (average != 0 && value) throw Error(Code::kInvalidArgument, "give average or factor, not both");
    if (average != 0) factor_ = {Factor::Kind::kAverage, average, nullptr};
    if (value) {
      store_scalar(element_.data(), *value, dtype);
      factor_ = {Factor::Kind::kValue, 1, element_.data()};
    }
  }
  HeldFactor(const HeldFactor&) = delete;
  HeldFactor& operator=(const HeldFactor&) = delete;
  const Factor& get() const { return factor_; }

 private:
  std::array<std::byte, 16> element_{};
  Factor factor_;
};

// Operands of one type and length in host memory. A given dtype says how to read their bytes.
class Operands {
 public:
  Operands(nb::handle output, const std::vector<nb::object>& inputs, const std::optional<Named>& dtype) {
    add(output, Access::kWrite, "output");
    for (size_t i = 0; i < inputs.size(); ++i) add(inputs[i], Access::kRead, "operands[" + std::to_string(i) + "]");
    if (dtype) read_as(parse_dtype(*dtype));
    for (size_t i = 1; i < tensors_.size(); ++i) pointers_.push_back(tensors_[i].data);
  }
  void* output() const { return tensors_[0].data; }
  std::span<const void* const> inputs() const { return pointers_; }
  uint64_t count() const { return tensors_[0].count; }
  Dtype dtype() const { return dtype_; }

 private:
  void add(nb::handle object, Access access, const std::string& what) {
    Tensor tensor = intake(object, access, what);
    if (tensor.device_type != 1) throw Error(Code::kInvalidArgument, what + " is not in host memory; pass its .cpu()");
    if (tensors_.empty()) dtype_ = tensor.dtype;
    if (tensor.dtype != dtype_ || (!tensors_.empty() && tensor.count != tensors_[0].count)) {
      throw Error(Code::kInvalidArgument, what + " differs from output in dtype or length; convert it first");
    }
    tensors_.push_back(std::move(tensor));
  }
  void read_as(Dtype dtype) {
    if (dtype_size(dtype) != dtype_size(dtype_)) {
      throw Error(Code::kInvalidArgument, "dtype is of another size than the tensors' own; pass one of equal size");
    }
    dtype_ = dtype;
  }
  std::vector<Tensor> tensors_;
  std::vector<const void*> pointers_;
  Dtype dtype_ = 0;
};

void bind_reduce(nb::handle output, const std::vector<nb::object>& inputs, const Named& reduction,
                 const std::optional<Named>& dtype, size_t average, std::optional<double> value) {
  const Operands operands(output, inputs, dtype);
  const HeldFactor factor(operands.dtype(), average, value);
  const Reduction combine = parse_reduction(reduction);
  const GilRelease unlocked;
  reduce(operands.output(), operands.inputs(), operands.count(), operands.dtype(), combine, factor.get());
}

void bind_scale(nb::handle output, const nb::object& input, const std::optional<Named>& dtype, size_t average,
                std::optional<double> value) {
  const Operands operands(output, {input}, dtype);
  const HeldFactor factor(operands.dtype(), average, value);
  const GilRelease unlocked;
  scale(operands.output(), operands.inputs()[0], operands.count(), operands.dtype(), factor.get());
}

nb::bytes scalar_bytes(double value, const Named& dtype) {
  std::array<std::byte, 16> element{};
  const Dtype parsed = parse_dtype(dtype);
  store_scalar(element.data(), value, parsed);
  return nb::bytes(element.data(), dtype_size(parsed));
}

nb::dict summary(nb::handle object, bool write, const std::string& what) {
  const Tensor tensor = intake(object, write ? Access::kWrite : Access::kRead, what);
  nb::dict fields;
  fields["data"] = reinterpret_cast<uintptr_t>(tensor.data);
  fields["count"] = tensor.count;
  fields["dtype"] = dtype_name(tensor.dtype);
  fields["device"] = nb::make_tuple(tensor.device_type, tensor.device_index);
  fields["rows"] = tensor.rows;
  fields["stream"] = reinterpret_cast<uintptr_t>(tensor.stream);
  return fields;
}

nb::list dtype_table() {
  nb::list rows;
  for (const Dtype dtype : all_dtypes()) rows.append(nb::make_tuple(dtype, dtype_name(dtype), dtype_size(dtype)));
  return rows;
}

nb::list reduction_table() {
  nb::list names;
  for (Reduction known = POLYCCL_REDUCTION_NONE; known <= POLYCCL_REDUCTION_PREMUL_SUM; ++known)
    names.append(reduction_name(known));
  return names;
}

nb::list operation_table() {
  nb::list rows;
  for (const Operation& row : operations()) {
    rows.append(nb::make_tuple(row.kind, row.name, static_cast<int>(row.input), static_cast<int>(row.output),
                               static_cast<int>(row.input_at), static_cast<int>(row.output_at), row.rooted, row.reduces,
                               row.ragged));
  }
  return rows;
}

}  // namespace

void bind_arithmetic(nb::module_& module) {
  module.def(
      "reduce", &bind_reduce, nb::arg("output"), nb::arg("operands"), nb::arg("reduction"), nb::kw_only(),
      nb::arg("dtype") = nb::none(), nb::arg("average") = 0, nb::arg("factor") = nb::none(),
      "Combine host tensors of one dtype and length, from left to right, into output, which may be one of them.");
  module.def("scale", &bind_scale, nb::arg("output"), nb::arg("input"), nb::kw_only(), nb::arg("dtype") = nb::none(),
             nb::arg("average") = 0, nb::arg("factor") = nb::none(), "Write input times the factor into output.");
  module.def("scalar_bytes", &scalar_bytes, nb::arg("value"), nb::arg("dtype"),
             "The number as one element of dtype, rounded once.");
  module.def("intake", &summary, nb::arg("object").none(), nb::arg("write") = false, nb::arg("what") = "tensor",
             "What a tensor's memory is: data, count, dtype, device (DLPack type, index), rows, stream.");
  module.def("dtypes", &dtype_table, "Rows (number, name, bytes of an element).");
  module.def("reductions", &reduction_table, "Names; the index is the number.");
  module.def("operations", &operation_table, "The rows of polyccl.operations, as C++ knows them.");
  module.def(
      "can_reduce",
      [](const Named& dtype, const Named& reduction) {
        return can_reduce(parse_dtype(dtype), parse_reduction(reduction));
      },
      nb::arg("dtype"), nb::arg("reduction"), "Whether the host kernels combine this dtype so.");
  module.def("use_wide_vectors", &use_wide_vectors, nb::arg("wanted"),
             "For tests: whether kernels may use what only some processors have. Returns the setting before.");
}

}  // namespace polyccl
