// The native module: joins the parts, and turns the core's errors into Python's classes.
#include "bindings.h"

#include <nanobind/nanobind.h>

#include "executor.h"

namespace polyccl {

namespace nb = nanobind;

void bind_arithmetic(nb::module_& m);
void bind_backend(nb::module_& m);
void bind_comm(nb::module_& m);
void bind_link(nb::module_& m);

const char* error_class(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return "InvalidArgument";
    case Code::kBackendUnavailable:
      return "BackendUnavailable";
    case Code::kUnsupportedOperation:
      return "UnsupportedOperation";
    case Code::kTimeout:
      return "CommTimeout";
    case Code::kPeerLost:
      return "PeerLost";
    case Code::kAborted:
      return "Aborted";
    case Code::kMismatch:
      return "Mismatch";
    case Code::kInternal:
      break;
  }
  return "CommError";
}

namespace {

void raise_python(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const InterruptedWait&) {
    // The signal's handler has raised already, where it raised.
    if (!PyErr_Occurred()) PyErr_SetNone(PyExc_KeyboardInterrupt);
  } catch (const Error& error) {
    nb::object type = nb::module_::import_("polyccl.errors").attr(error_class(error.code()));
    PyErr_SetString(type.ptr(), error.what());
  }
}

}  // namespace
}  // namespace polyccl

NB_MODULE(_native, m) {
  m.doc() = "The native core of PolyCCL. Use the package polyccl; what is here may change.";
  // What a process group of torch holds lives until the process ends, which is no leak that a user could mend.
  nanobind::set_leak_warnings(false);
  nanobind::register_exception_translator(polyccl::raise_python);
  polyccl::bind_arithmetic(m);
  polyccl::bind_backend(m);
  polyccl::bind_link(m);
  polyccl::bind_comm(m);
}
