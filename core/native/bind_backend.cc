// Python face of a loaded plugin: what it is and what it can do. Tests and `polyccl info` use it; communicators do not
// pass through it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "gil.h"
#include "loader.h"

namespace polyccl {

namespace nb = nanobind;
using namespace nb::literals;

void bind_backend(nb::module_& m) {
  nb::class_<Backend>(m, "Backend",
                      "A loaded backend plugin. Lives as long as the process; make one with `Backend.load(path)`.")
      .def_static("load", &Backend::load, "path"_a, nb::rv_policy::reference, nb::call_guard<GilRelease>(),
                  "Load the plugin at `path`, or give the one that was loaded from that file. Raises "
                  "BackendUnavailable with the "
                  "path, what is wrong and what to do.")
      .def_prop_ro("name", &Backend::name, "The backend's name, e.g. 'gloo'.")
      .def_prop_ro("path", &Backend::path, "The plugin's file, with symbolic links resolved.")
      .def_prop_ro("flags", &Backend::flags, "Bits of POLYCCL_FLAG_*.")
      .def_prop_ro("abi", &Backend::abi, "The plugin ABI it was built from: major << 16 | minor.")
      .def_prop_ro("library_version", &Backend::library_version,
                   "The version of the library behind the plugin, in words.")
      .def_prop_ro("library_file", &Backend::library_file,
                   "The file the library was loaded from; empty where it is linked into the plugin.")
      .def_prop_ro(
          "has_device", [](const Backend& b) { return b.table().device != nullptr; },
          "True where it works on device memory, in the order of streams.")
      .def_prop_ro("device_count", &Backend::device_count, "How many devices it sees; 0 for a library of host memory.")
      .def("compatibility", &Backend::compatibility, "device"_a,
           "Ranks can be one island if and only if these strings (and the backends' names) are equal.")
      .def("supports", &Backend::supports, "kind"_a, "dtype"_a, "reduction"_a, "memory"_a,
           "Bits of POLYCCL_CAN_*; 0 where the operation is not native.")
      .def("completion", &Backend::completion, "kind"_a, "memory"_a, "POLYCCL_COMPLETION_* of a kind.")
      .def("__repr__", [](const Backend& b) { return "<polyccl Backend '" + b.name() + "' from " + b.path() + ">"; });
}

}  // namespace polyccl
