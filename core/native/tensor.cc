#include "tensor.h"

#include <nanobind/stl/string.h>

#include <optional>
#include <string_view>
#include <unordered_map>

#include "dlpack.h"

namespace polyccl {
namespace {

using std::string_literals::operator""s;

// ---- Words for errors

// What an error names: the argument, and the object's class.
struct Subject {
  nb::handle object;
  const std::string& what;
};

std::string class_name(nb::handle type) {
  const std::string module = nb::cast<std::string>(nb::str(nb::getattr(type, "__module__", nb::str(""))));
  const std::string name = nb::cast<std::string>(nb::str(nb::getattr(type, "__qualname__", nb::str("object"))));
  return module.empty() || module == "builtins" ? name : module + "." + name;
}

[[noreturn]] void refuse(const Subject& subject, const std::string& text) {
  throw Error(Code::kInvalidArgument, subject.what + ": " + class_name(subject.object.type()) + " " + text);
}

// An attribute's truth, false where it is not there or does not tell. For the way into an error only.
bool flag(nb::handle object, const char* name) {
  try {
    return nb::cast<bool>(nb::bool_(nb::getattr(object, name, nb::bool_(false))));
  } catch (const std::exception&) {
    return false;
  }
}

// What the caller may do about a tensor that its library does not export.
const char* advice(nb::handle object) {
  if (flag(object, "is_meta")) return "a meta tensor has no memory; make a real one, e.g. by .to_empty(device=...)";
  if (flag(object, "is_nested")) return "pass its parts, e.g. .values(), one by one";
  if (flag(object, "is_quantized")) return "pass its .int_repr() or .dequantize()";
  if (flag(object, "is_mkldnn") || flag(object, "is_sparse") || flag(object, "is_sparse_csr"))
    return "pass its .to_dense()";
  return "pass a dense tensor of numbers, and call this outside of vmap, grad and tracing";
}

// The first line: torch appends a C++ stack to it.
std::string first_line(const nb::python_error& error) {
  std::string text;
  try {
    text = nb::cast<std::string>(nb::str(error.value()));
  } catch (const std::exception&) {
  }
  text = text.substr(0, text.find('\n'));
  while (!text.empty() && (text.back() == ' ' || text.back() == '.')) text.pop_back();
  return text.empty() ? class_name(error.type()) : text;
}

// The error of a library that does not export the object. Ctrl-C and the like pass as they are.
[[noreturn]] void refuse_export(const Subject& subject, nb::python_error& error) {
  if (!error.matches(PyExc_Exception)) throw nb::python_error(error);
  refuse(subject, "cannot be read through DLPack (" + first_line(error) + "); " + advice(subject.object));
}

// ---- What is known of a class

struct TypeEntry {
  nb::object type;  // kept, so that its address stays its own
  const dlpack::ExchangeApi* api = nullptr;
  nb::object capsule;          // keeps the api's capsule
  nb::object wait;             // AsyncCollectiveTensor: the method that waits and unwraps
  nb::object is_neg, is_conj;  // torch: what DLPack does not show
  nb::object int8, uint8;      // torch: the two types of 8 bits
  nb::object storage;          // torch: the method that gives the storage
  nb::object in_use;           // torch: the callback of the weak references that mark a storage
  nb::object array;            // NumPy: ndarray
  bool torch = false;
};

// The newest table of a major version that we know, or null.
const dlpack::ExchangeApi* find_api(nb::handle capsule) {
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  auto* header = static_cast<const dlpack::ExchangeHeader*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (header != nullptr && header->version.major != dlpack::kMajor) header = header->previous;
  return reinterpret_cast<const dlpack::ExchangeApi*>(header);
}

nb::object loaded_module(const char* name) {
  return nb::borrow(nb::module_::import_("sys").attr("modules")).attr("get")(name);
}

bool is_subclass(nb::handle type, nb::handle base) {
  const int answer = PyObject_IsSubclass(type.ptr(), base.ptr());
  if (answer < 0) throw nb::python_error();
  return answer != 0;
}

TypeEntry describe(nb::handle type) {
  TypeEntry entry;
  entry.type = nb::borrow(type);
  entry.capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  entry.api = find_api(entry.capsule);
  if (const nb::object torch = loaded_module("torch"); !torch.is_none() && nb::hasattr(torch, "Tensor")) {
    entry.torch = is_subclass(type, torch.attr("Tensor"));
  }
  if (const nb::object numpy = loaded_module("numpy"); !numpy.is_none() && nb::hasattr(numpy, "ndarray")) {
    const nb::object array = numpy.attr("ndarray");
    if (is_subclass(type, array)) entry.array = array;
  }
  if (!entry.torch) return entry;
  entry.is_neg = type.attr("is_neg");
  entry.is_conj = type.attr("is_conj");
  entry.int8 = loaded_module("torch").attr("int8");
  entry.uint8 = loaded_module("torch").attr("uint8");
  entry.storage = type.attr("untyped_storage");
  entry.in_use = nb::module_::import_("polyccl.storages").attr("guard")();
  // Where torch.distributed is not loaded, nothing can be of this class.
  const nb::object collectives = loaded_module("torch.distributed._functional_collectives");
  if (!collectives.is_none() && nb::hasattr(collectives, "AsyncCollectiveTensor") &&
      is_subclass(type, collectives.attr("AsyncCollectiveTensor"))) {
    entry.wait = type.attr("trigger_wait");
  }
  return entry;
}

// Never destroyed: at exit it would outlive the interpreter. Guarded by the GIL; node addresses are stable.
TypeEntry& entry_of(nb::handle type) {
  static auto& entries = *new std::unordered_map<PyObject*, TypeEntry>;
  static PyObject* last_type = nullptr;
  static TypeEntry* last = nullptr;
  if (type.ptr() == last_type) return *last;
  auto found = entries.find(type.ptr());
  if (found == entries.end()) {
    TypeEntry described = describe(type);  // runs Python, which may come back here
    found = entries.try_emplace(type.ptr(), std::move(described)).first;
  }
  last_type = type.ptr();
  last = &found->second;
  return *last;
}

// ---- From a view to a Tensor

Dtype dtype_of(dlpack::DataType type) {
  if (type.lanes != 1) return 0;
  const auto pick = [&](std::initializer_list<std::pair<int, Dtype>> sizes) -> Dtype {
    for (const auto& [bits, dtype] : sizes) {
      if (bits == type.bits) return dtype;
    }
    return 0;
  };
  switch (type.code) {
    case dlpack::kFloat:
      return pick({{32, POLYCCL_DTYPE_FLOAT32}, {16, POLYCCL_DTYPE_FLOAT16}, {64, POLYCCL_DTYPE_FLOAT64}});
    case dlpack::kBfloat:
      return pick({{16, POLYCCL_DTYPE_BFLOAT16}});
    case dlpack::kInt:
      return pick(
          {{64, POLYCCL_DTYPE_INT64}, {32, POLYCCL_DTYPE_INT32}, {16, POLYCCL_DTYPE_INT16}, {8, POLYCCL_DTYPE_INT8}});
    case dlpack::kUInt:
      return pick({{8, POLYCCL_DTYPE_UINT8},
                   {16, POLYCCL_DTYPE_UINT16},
                   {32, POLYCCL_DTYPE_UINT32},
                   {64, POLYCCL_DTYPE_UINT64}});
    case dlpack::kComplex:
      return pick({{64, POLYCCL_DTYPE_COMPLEX64}, {128, POLYCCL_DTYPE_COMPLEX128}});
    case dlpack::kBool:
      return pick({{8, POLYCCL_DTYPE_BOOL}});
    case dlpack::kFloat8E4M3Fn:
      return pick({{8, POLYCCL_DTYPE_FLOAT8_E4M3FN}});
    case dlpack::kFloat8E4M3Fnuz:
      return pick({{8, POLYCCL_DTYPE_FLOAT8_E4M3FNUZ}});
    case dlpack::kFloat8E5M2:
      return pick({{8, POLYCCL_DTYPE_FLOAT8_E5M2}});
    case dlpack::kFloat8E5M2Fnuz:
      return pick({{8, POLYCCL_DTYPE_FLOAT8_E5M2FNUZ}});
    case dlpack::kFloat8E8M0Fnu:
      return pick({{8, POLYCCL_DTYPE_FLOAT8_E8M0FNU}});
    default:
      return 0;
  }
}

bool is_complex(Dtype dtype) { return dtype == POLYCCL_DTYPE_COMPLEX64 || dtype == POLYCCL_DTYPE_COMPLEX128; }
bool is_float(Dtype dtype) { return dtype >= POLYCCL_DTYPE_FLOAT16 && dtype <= POLYCCL_DTYPE_FLOAT64; }

uint64_t count_of(const Subject& subject, const dlpack::View& view) {
  if (view.ndim < 0 || (view.ndim > 0 && view.shape == nullptr))
    refuse(subject, "gives no valid shape; pass another tensor");
  uint64_t count = 1;
  bool empty = false, overflow = false;
  for (int32_t i = 0; i < view.ndim; ++i) {
    if (view.shape[i] < 0) refuse(subject, "gives a negative size; pass another tensor");
    empty |= view.shape[i] == 0;
    overflow |= __builtin_mul_overflow(count, static_cast<uint64_t>(view.shape[i]), &count);
  }
  if (empty) return 0;
  if (overflow) refuse(subject, "gives a shape of more elements than memory holds; pass another tensor");
  return count;
}

bool contiguous(const dlpack::View& view) {
  if (view.strides == nullptr) return true;
  int64_t expected = 1;
  for (int32_t i = view.ndim - 1; i >= 0; --i) {
    if (view.shape[i] != 1 && view.strides[i] != expected) return false;
    expected *= view.shape[i];
  }
  return true;
}

std::string type_text(dlpack::DataType type) {
  return "code " + std::to_string(type.code) + ", " + std::to_string(type.bits) + " bits, " +
         std::to_string(type.lanes) + (type.lanes == 1 ? " lane" : " lanes");
}

[[noreturn]] void refuse_missing_memory(const Subject& subject, uint64_t count) {
  const char* cure = "pass a tensor with memory of its own";
  if (nb::hasattr(subject.object.type(), "to_local")) {
    cure = "pass its .to_local()";
  } else if (nb::hasattr(subject.object.type(), "fake_mode") || flag(subject.object, "fake_mode")) {
    cure = "call this outside of FakeTensorMode and tracing";
  }
  refuse(subject, "has " + std::to_string(count) +
                      " elements but no memory of its own (a wrapper, a fake tensor, or storage that was freed); " +
                      cure);
}

// Pinned memory is the host's; managed memory is the device's.
int32_t plain_device_type(int32_t type) {
  switch (type) {
    case dlpack::kCudaHost:
    case dlpack::kRocmHost:
      return dlpack::kCpu;
    case dlpack::kCudaManaged:
      return dlpack::kCuda;
    default:
      return type;
  }
}

void read_view(Tensor& tensor, const dlpack::View& view, Access access, const Subject& subject) {
  tensor.dtype = dtype_of(view.dtype);
  if (tensor.dtype == 0) {
    refuse(subject, "has a data type that PolyCCL does not know (DLPack " + type_text(view.dtype) +
                        "); view it as a known type of the same size, e.g. uint8");
  }
  tensor.count = count_of(subject, view);
  if (tensor.count != 0) {
    if (!contiguous(view)) {
      refuse(subject, "is not contiguous; pass its .contiguous() (NumPy: numpy.ascontiguousarray())"s +
                          (access == Access::kWrite ? ", and copy the result back" : ""));
    }
    if (view.data == nullptr) refuse_missing_memory(subject, tensor.count);
  }
  tensor.data = view.data == nullptr ? nullptr : static_cast<char*>(view.data) + view.byte_offset;
  tensor.rows = view.ndim == 0 ? 1 : view.shape[0];
  tensor.device_type = plain_device_type(view.device.type);
  tensor.device_index = tensor.device_type == dlpack::kCpu ? 0 : view.device.index;
}

nb::object call(const nb::object& method, nb::handle object) {
  PyObject* argument = object.ptr();
  nb::object answer = nb::steal(PyObject_Vectorcall(method.ptr(), &argument, 1, nullptr));
  if (!answer.is_valid()) throw nb::python_error();
  return answer;
}

bool says(const nb::object& method, nb::handle object) { return call(method, object).ptr() == Py_True; }

// torch conjugates and negates lazily, by a bit that DLPack drops and that floats and complex numbers can have. It also
// shows torch.int4, uint2 and their like as the integers of 8 bits that they are stored in.
void check_hidden_state(const TypeEntry& entry, Dtype dtype, const Subject& subject) {
  if (!entry.torch) return;
  if (is_complex(dtype) && says(entry.is_conj, subject.object)) {
    refuse(subject, "is a lazily conjugated view, whose memory holds other values; pass its .resolve_conj()");
  }
  if ((is_float(dtype) || is_complex(dtype)) && says(entry.is_neg, subject.object)) {
    refuse(subject, "is a lazily negated view, whose memory holds other values; pass its .resolve_neg()");
  }
  if (dtype == POLYCCL_DTYPE_INT8 || dtype == POLYCCL_DTYPE_UINT8) {
    const nb::object type = subject.object.attr("dtype");
    if (!type.is(dtype == POLYCCL_DTYPE_INT8 ? entry.int8 : entry.uint8)) {
      refuse(subject, "has a data type that PolyCCL does not know (" + nb::cast<std::string>(nb::str(type)) +
                          "); pass its .view(torch.uint8) to move its bytes");
    }
  }
}

// ---- What keeps the memory

// torch lets a tensor change to other memory (`set_()`, `.data = `), and its own DLPack capsules change with it: only
// the storage stays what it is.
nb::object storage_of(const TypeEntry& entry, const Subject& subject) {
  try {
    return call(entry.storage, subject.object);
  } catch (nb::python_error& error) {
    refuse_export(subject, error);
  }
}

nb::object weak_reference(nb::handle object, nb::handle callback) {
  nb::object reference = nb::steal(PyWeakref_NewRef(object.ptr(), callback.ptr()));
  if (!reference.is_valid()) throw nb::python_error();
  return reference;
}

// Keeps torch's `resize_()` from a storage in host memory (polyccl/storages.py).
nb::object storage_guard(const TypeEntry& entry, const Tensor& tensor, nb::handle storage) {
  return tensor.device_type == dlpack::kCpu ? weak_reference(storage, entry.in_use) : nb::none();
}

// NumPy's `resize(refcheck=False)` frees an array's memory under those who use it, unless somebody has a weak reference
// to the array that owns it.
nb::object resize_guard(const TypeEntry& entry, nb::handle array) {
  nb::object owner = nb::borrow(array);
  for (nb::object base = owner.attr("base"); nb::isinstance(base, entry.array); base = owner.attr("base")) owner = base;
  return weak_reference(owner, nb::handle());
}

// ---- The ways in

void check_flags(uint64_t flags, Access access, const Subject& subject) {
  if (access != Access::kWrite) return;
  if ((flags & dlpack::kReadOnly) != 0)
    refuse(subject, "is read-only, but the result is written to it; pass a writable copy");
  if ((flags & dlpack::kIsCopied) != 0) {
    refuse(subject,
           "gives only a copy of its memory, so the result would be lost; pass a tensor that shares its memory");
  }
}

void check_version(dlpack::Version version, const Subject& subject) {
  if (version.major != dlpack::kMajor) {
    refuse(subject, "speaks DLPack " + std::to_string(version.major) + "." + std::to_string(version.minor) +
                        ", PolyCCL speaks " + std::to_string(dlpack::kMajor) +
                        ".x; update PolyCCL or convert the tensor");
  }
}

// Read what the library hands over and keep it alive by `tensor.owner`.
void read_managed(Tensor& tensor, dlpack::ManagedTensorVersioned* managed, Access access, const Subject& subject) {
  check_version(managed->version, subject);
  check_flags(managed->flags, access, subject);
  read_view(tensor, managed->view, access, subject);
}

Tensor by_exchange(const TypeEntry& entry, Access access, const Subject& subject) {
  Tensor tensor;
  dlpack::Device device{};
  if (entry.api->view_from_object != nullptr) {
    dlpack::View view{};
    if (entry.api->view_from_object(subject.object.ptr(), &view) != 0) {
      nb::python_error error;
      refuse_export(subject, error);
    }
    device = view.device;
    read_view(tensor, view, access, subject);
    tensor.owner = nb::borrow(subject.object);
    if (entry.torch && tensor.count != 0) {
      tensor.owner = storage_of(entry, subject);
      tensor.guard = storage_guard(entry, tensor, tensor.owner);
    }
  } else {
    dlpack::ManagedTensorVersioned* managed = nullptr;
    if (entry.api->managed_from_object(subject.object.ptr(), &managed) != 0) {
      nb::python_error error;
      refuse_export(subject, error);
    }
    tensor.owner = nb::capsule(managed, [](void* pointer) noexcept {
      auto* held = static_cast<dlpack::ManagedTensorVersioned*>(pointer);
      if (held->deleter != nullptr) held->deleter(held);
    });
    read_managed(tensor, managed, access, subject);
    device = managed->view.device;
  }
  check_hidden_state(entry, tensor.dtype, subject);
  if (tensor.device_type != dlpack::kCpu) tensor.current_stream = entry.api->current_stream;
  if (tensor.device_type != dlpack::kCpu && entry.api->current_stream(device.type, device.index, &tensor.stream) != 0) {
    nb::python_error error;
    refuse_export(subject, error);
  }
  return tensor;
}

// Call __dlpack__, with the newest version that we read where it takes one.
nb::object call_dlpack(nb::handle object) {
  const nb::object method = object.attr("__dlpack__");
  try {
    return method(nb::arg("max_version") = nb::make_tuple(dlpack::kMajor, dlpack::kMinor));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;  // a TypeError: from before version 1, which knew no max_version
  }
  return method();
}

// torch from before the exchange API. It does not export what requires grad, nor say its current stream.
nb::object prepare_old_torch(nb::handle object, const Subject& subject) {
  if (!flag(object, "is_cpu") && !flag(object, "is_meta")) {
    refuse(subject,
           "is on a device, and this torch cannot say which stream is current there (no __dlpack_c_exchange_api__); "
           "use torch "
           "2.10 or newer");
  }
  return flag(object, "requires_grad") ? nb::object(object.attr("detach")()) : nb::borrow(object);
}

Tensor by_capsule(const TypeEntry& entry, Access access, const Subject& subject) {
  Tensor tensor;
  try {
    const nb::object source = entry.torch ? prepare_old_torch(subject.object, subject) : nb::borrow(subject.object);
    // Never renamed to "used_...": the capsule stays the owner, and its destructor gives the memory back.
    tensor.owner = call_dlpack(source);
  } catch (nb::python_error& error) {
    refuse_export(subject, error);
  }
  PyObject* capsule = tensor.owner.ptr();
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    auto* managed = static_cast<dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    read_managed(tensor, managed, access, subject);
  } else if (PyCapsule_IsValid(capsule, "dltensor")) {
    read_view(tensor, static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"))->view, access,
              subject);
  } else {
    refuse(subject, "gives no DLPack capsule from __dlpack__(); pass a torch tensor or a NumPy array");
  }
  check_hidden_state(entry, tensor.dtype, subject);
  if (entry.torch && tensor.count != 0) {
    const nb::object storage = storage_of(entry, subject);
    tensor.guard = nb::make_tuple(storage, storage_guard(entry, tensor, storage));
  }
  if (entry.array.is_valid()) tensor.guard = resize_guard(entry, subject.object);
  return tensor;
}

// A NumPy scalar (numpy.float32(1)) as a 0-d array; nothing for other objects. It is immutable, and has no __dlpack__.
std::optional<nb::object> scalar_array(nb::handle object, Access access, const Subject& subject) {
  const nb::object numpy = loaded_module("numpy");
  if (numpy.is_none() || !is_subclass(object.type(), numpy.attr("generic"))) return std::nullopt;
  if (access == Access::kWrite) refuse(subject, "is read-only, but the result is written to it; pass a numpy.ndarray");
  return nb::object(numpy.attr("asarray")(object));
}

}  // namespace

Tensor intake(nb::handle object, Access access, const std::string& what) {
  const Subject subject{object, what};
  const TypeEntry& entry = entry_of(object.type());
  if (entry.wait.is_valid()) return intake(entry.wait(object), access, what);
  if (entry.api != nullptr) return by_exchange(entry, access, subject);
  if (nb::hasattr(object.type(), "__dlpack__")) return by_capsule(entry, access, subject);
  if (const auto array = scalar_array(object, access, subject)) return intake(*array, access, what);
  refuse(subject, "is no tensor; pass a torch tensor, a NumPy array or another object with __dlpack__");
}

}  // namespace polyccl
