// Python face of communicators and works.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdio>

#include "arguments.h"
#include "bindings.h"
#include "closing.h"
#include "communicator.h"
#include "gil.h"
#include "log.h"
#include "transport.h"

namespace polyccl {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Seconds = std::optional<double>;

constexpr double kForever = 1e9;  // seconds; beyond it nanoseconds might not fit

Deadline deadline_in(double seconds) {
  if (!(seconds >= 0)) throw Error(Code::kInvalidArgument, "a timeout must be a number of seconds, at least 0");
  return seconds > kForever ? 0 : now_ns() + static_cast<int64_t>(std::ceil(seconds * 1e9));
}

// A communicator's default timeout in nanoseconds; 0, which no number of seconds becomes otherwise, is none.
int64_t standard_timeout(double seconds) {
  return seconds > kForever ? 0 : std::max<int64_t>(1, static_cast<int64_t>(std::ceil(seconds * 1e9)));
}

Deadline deadline_of(const Communicator& comm, const Seconds& timeout) {
  if (timeout) return deadline_in(*timeout);
  const int64_t standard = comm.timeout_ns();
  return standard == 0 ? 0 : now_ns() + standard;
}

// Whether the user pressed Ctrl-C. The exception that his handler raised stays set in the thread.
bool signalled() {
  GilAcquire gil;
  return PyErr_CheckSignals() != 0;
}

// Objects that threads without the GIL let go of.
using Objects = std::vector<nb::object>;

std::shared_ptr<void> share(Objects objects) {
  return std::shared_ptr<void>(new Objects(std::move(objects)), [](void* p) {
    with_gil([p] { delete static_cast<Objects*>(p); });  // at the interpreter's end there is nothing left to release
  });
}

void append_holders(Objects& objects, const Tensor& tensor) {
  objects.push_back(tensor.owner);
  if (tensor.guard.is_valid()) objects.push_back(tensor.guard);
}

Keep keep_tensors(const CheckedCall& c) {
  return [&c] {
    GilAcquire gil;
    Objects objects;
    for (const auto* side : {&c.inputs, &c.outputs}) {
      for (const Tensor& t : *side) append_holders(objects, t);
    }
    return share(std::move(objects));
  };
}

std::shared_ptr<Work> finished_work(const char* name) {
  auto work = std::make_shared<Work>(name, 0);
  work->complete(std::nullopt);
  return work;
}

CheckedCall checked(Communicator& comm, const Arguments& arguments) {
  try {
    return check_arguments(comm, arguments);
  } catch (const Error&) {
    const Operation* row = find_operation(arguments.kind);
    GilRelease release;
    if (row != nullptr && row->collective) comm.announce_refusal();  // a message concerns no one but its peer
    throw;
  }
}

std::shared_ptr<Work> issue(Communicator& comm, Kind kind, nb::handle input, nb::handle output, Reduction reduction,
                            nb::handle factor, int peer, std::optional<std::vector<int64_t>> input_splits,
                            std::optional<std::vector<int64_t>> output_splits, bool async, Seconds timeout, bool strict,
                            uint32_t tag, const char* input_name, const char* output_name) {
  const Deadline deadline = deadline_of(comm, timeout);
  CheckedCall c = checked(comm, {kind, input, output, reduction, factor, peer, std::move(input_splits),
                                 std::move(output_splits), tag, input_name, output_name});
  c.call.deadline = deadline;
  c.call.strict = strict;
  std::shared_ptr<Work> work;
  {
    const Keep keep = keep_tensors(c);
    GilRelease release;
    work = comm.issue(std::move(c.call), async, keep, signalled);
  }
  if (work) return work;
  static const std::shared_ptr<Work> done = finished_work("a finished operation");
  return done;
}

// A batch's operations: (sends, tensor, peer, tag).
using BatchItem = std::tuple<bool, nb::object, int, uint32_t>;

std::shared_ptr<Work> issue_batch(Communicator& comm, const std::vector<BatchItem>& items, bool async,
                                  Seconds timeout) {
  const Deadline deadline = deadline_of(comm, timeout);
  if (items.empty()) throw Error(Code::kInvalidArgument, comm.where("batch") + ": there is nothing to issue");
  std::vector<Call> calls;
  Objects owners;
  for (const auto& [sends, tensor, peer, tag] : items) {
    const nb::object none = nb::none();
    CheckedCall c = checked(comm, {sends ? Kind{POLYCCL_KIND_SEND} : Kind{POLYCCL_KIND_RECV},
                                   sends ? tensor : none,
                                   sends ? none : tensor,
                                   0,
                                   none,
                                   peer,
                                   {},
                                   {},
                                   tag});
    c.call.deadline = deadline;
    for (auto* side : {&c.inputs, &c.outputs}) {
      for (const Tensor& t : *side) append_holders(owners, t);
    }
    calls.push_back(std::move(c.call));
  }
  const Keep keep = [&owners] {
    GilAcquire gil;
    return share(owners);
  };
  std::shared_ptr<Work> work;
  {
    GilRelease release;
    work = comm.issue_batch(std::move(calls), async, keep, signalled);
  }
  return work ? work : finished_work("batch");
}

// The planner of a communicator, held so that threads without the GIL may let go of it.
std::function<std::string(const Signature&)> planner_of(nb::object callable) {
  auto held = share({std::move(callable)});
  return [held](const Signature& s) {
    std::string encoded;
    const bool asked = with_gil([&] {
      const nb::object& planner = static_cast<Objects*>(held.get())->front();
      try {
        nb::bytes plan(planner(s.kind, std::string(dtype_name(s.dtype)), s.reduction, s.root, s.small, s.strict));
        encoded.assign(plan.c_str(), plan.size());
      } catch (const nb::python_error& error) {
        throw Error(Code::kInternal, std::string("the planner failed: ") + error.what());
      }
    });
    if (!asked) throw Error(Code::kAborted, "the process ends");
    return encoded;
  };
}

// The store that the user gave, for a library's bootstrap. Lives within the call that uses it, which holds a reference.
class PythonStore : public BootstrapStore {
 public:
  explicit PythonStore(nb::handle store) : store_(store) {}

  void set(const std::string& key, const std::string& value) override {
    guarded([&] { store_.attr("set")(key, nb::bytes(value.data(), value.size())); });
  }

  std::string get(const std::string& key, Deadline deadline) override {
    std::string value;
    guarded([&] {
      nb::object timeout = nb::none();
      if (deadline != 0) timeout = nb::float_(std::max(0.0, static_cast<double>(deadline - now_ns()) / 1e9));
      nb::bytes found(store_.attr("get")(key, timeout));
      value.assign(found.c_str(), found.size());
    });
    return value;
  }

  bool cancelled() const override {
    nb::gil_scoped_acquire gil;
    try {
      return nb::cast<bool>(store_.attr("cancelled")());
    } catch (const nb::python_error&) {  // a store that cannot tell; whoever waits for its keys learns the cause
      return false;
    }
  }

 private:
  template <class F>
  static void guarded(const F& f) {
    const bool asked = with_gil([&f] {
      try {
        f();
      } catch (const nb::python_error& error) {
        const bool late = error.matches(PyExc_TimeoutError);
        throw Error(late ? Code::kTimeout : Code::kInternal,
                    std::string("the store failed: ") + nb::str(error.value()).c_str());
      }
    });
    if (!asked) throw Error(Code::kAborted, "the process ends");
  }

  nb::handle store_;
};

ProcessId parse_process(const std::string& hex) {
  if (hex.size() != 32) throw Error(Code::kInvalidArgument, "'" + hex + "' is no process id");
  return {std::stoull(hex.substr(0, 16), nullptr, 16), std::stoull(hex.substr(16), nullptr, 16)};
}

using Member = std::tuple<std::string, std::string, uint16_t>;  // process, host, port

std::vector<LinkAddress> addresses_of(const std::vector<Member>& members) {
  std::vector<LinkAddress> addresses;
  for (const auto& [process, host, port] : members) addresses.push_back({parse_process(process), host, port});
  return addresses;
}

std::shared_ptr<BackendComm> create_backend_comm(Backend& backend, int rank, int size, int device,
                                                 const std::string& name, const std::string& interface,
                                                 const std::string& address, nb::object store, double timeout,
                                                 uint64_t group, const std::vector<Member>& members,
                                                 std::vector<std::string> descriptions, const std::string& token) {
  PythonStore python_store(store);
  CommConfig config;
  config.rank = rank;
  config.size = size;
  config.device = device;
  config.name = name;
  config.interface = interface;
  config.address = address;
  config.deadline = deadline_in(timeout);
  if (backend.has(POLYCCL_FLAG_TRANSPORT) && size > 1) {
    auto link = Link::instance().create_group(group, rank, addresses_of(members), descriptions, token);
    config.transport = lend_link(std::move(link), group, std::move(descriptions));
  }
  try {
    GilRelease release;
    return std::make_shared<BackendComm>(backend, config, python_store, signalled);
  } catch (const Error&) {
    if (PyErr_Occurred()) throw InterruptedWait();  // the user's Ctrl-C
    throw;
  }
}

std::tuple<std::string, std::string, int> link_address() {
  const LinkAddress address = Link::instance().address();
  char hex[33];
  std::snprintf(hex, sizeof hex, "%016llx%016llx", static_cast<unsigned long long>(address.process.hi),
                static_cast<unsigned long long>(address.process.lo));
  return {hex, address.host, address.port};
}

// Threads of a communicator may need the GIL (for a plan, to let go of tensors): whoever destroys it must not hold it,
// and at the interpreter's end it has to wait for the process's.
bool run_destruction(const std::function<void()>& destroy) {
  if (!interpreter_lives()) return false;
  std::optional<GilRelease> release;
  if (PyGILState_Check() != 0) release.emplace();
  destroy();
  return true;
}

// After the interpreter's end, when all handlers of the user's have run, and before statics of libraries are destroyed.
// A thread that is parked for want of the GIL is nothing to wait for.
void end_process() {
  const bool parked = threads_at_gil() != 0;
  const Deadline deadline = deadline_in(parked ? 0.2 : 5);
  if (!parked) Device::all_gone(deadline);
  end_communicators(deadline, !parked);
  Link::end();
}

std::shared_ptr<Communicator> create(std::string name, uint64_t group, int rank, const std::vector<Member>& members,
                                     std::vector<std::string> descriptions, std::vector<std::vector<int>> islands,
                                     std::string token, std::shared_ptr<Device> device, std::string device_name,
                                     int device_type, std::shared_ptr<BackendComm> native,
                                     std::shared_ptr<Communicator> pre, std::shared_ptr<Communicator> post,
                                     bool overlap, nb::object planner, bool check, double timeout,
                                     uint64_t latency_bytes, int window) {
  CommunicatorConfig config;
  config.name = std::move(name);
  config.group = group;
  config.rank = rank;
  config.members = addresses_of(members);
  config.descriptions = std::move(descriptions);
  config.islands = std::move(islands);
  config.token = std::move(token);
  config.device_index = device ? device->index() : 0;
  config.device = std::move(device);
  config.device_name = std::move(device_name);
  config.device_type = device_type;
  config.native = std::move(native);
  config.island = {std::move(pre), std::move(post)};
  config.overlap = overlap;
  config.planner = planner_of(std::move(planner));
  config.check = check;
  config.timeout_ns = standard_timeout(timeout);
  config.latency_bytes = latency_bytes;
  config.window = window;
  GilRelease release;
  return make_communicator(std::move(config));
}

nb::object exception_of(const std::optional<Error>& error) {
  if (!error) return nb::none();
  return nb::module_::import_("polyccl.errors").attr(error_class(error->code()))(error->what());
}

// The seconds of a timedelta or a number; nothing for None.
Seconds seconds_of(nb::handle timeout) {
  if (timeout.is_none()) return {};
  return nb::cast<double>(nb::module_::import_("polyccl.arguments").attr("seconds")(timeout));
}

void wait_on_host(Work& work, const Seconds& limit) {
  {
    GilRelease release;
    if (!work.wait(limit ? deadline_in(*limit) : 0, signalled)) {
      GilAcquire gil;
      if (PyErr_Occurred()) throw InterruptedWait();
      throw Error(Code::kTimeout, work.description() + ": not done within " + std::to_string(*limit) +
                                      " s; it goes on, wait again or abort the communicator");
    }
  }
  work.raise();
}

// wait() of an operation of a device lets the user's stream wait, and not the host.
void wait(Work& work, nb::handle timeout) {
  const Seconds limit = seconds_of(timeout);
  if (!limit && work.join()) {
    if (!work.done()) {
      GilRelease release;  // a stream whose queue is full blocks, maybe until a thread that wants the GIL
      work.join()();
    }
    work.raise();
    return;
  }
  wait_on_host(work, limit);
}

void bind_work(nb::module_& m) {
  nb::class_<Work>(m, "Work", "An operation that was issued.")
      .def("wait", &wait, "timeout"_a = nb::none(),
           "Block until the operation is done; raise its error. With `timeout` (seconds), raise CommTimeout after it; "
           "the operation "
           "then goes on.")
      .def(
          "wait_blocking", [](Work& w) { wait_on_host(w, {}); }, "As wait(), for operations of devices too.")
      .def("is_completed", &Work::done, "True once the operation is done, with or without an error. Does not block.")
      .def(
          "exception", [](const Work& w) { return exception_of(w.error()); },
          "The operation's error, or None. Does not block.")
      .def(
          "add_done_callback",
          [](std::shared_ptr<Work> work, nb::object callback) {
            if (!PyCallable_Check(callback.ptr())) {
              throw Error(Code::kInvalidArgument, "callback must be a function that takes no arguments, and is " +
                                                      std::string(nb::repr(callback).c_str()));
            }
            auto held = share({callback});
            Work& w = *work;
            GilRelease release;
            w.on_done([held] {
              with_gil([&held] {
                try {
                  static_cast<Objects*>(held.get())->front()();
                } catch (nb::python_error& error) {
                  error.discard_as_unraisable("a callback of a Work");
                }
              });
            });
          },
          "callback"_a.none(),
          "Call `callback()` once the operation is done: at once, or from the thread that completes it.")
      .def("__repr__", [](const Work& w) {
        return "<polyccl Work: " + w.description() +
               (w.done() ? (w.error() ? ", failed>" : ", done>") : ", on its way>");
      });
}

int find_sender(Communicator& comm, uint32_t tag, Seconds timeout) {
  const Deadline deadline = deadline_of(comm, timeout);
  GilRelease release;
  return comm.find_sender(tag, deadline, signalled);
}

void finalize(Communicator& comm, Seconds timeout) {
  const Deadline deadline = deadline_of(comm, timeout);
  GilRelease release;
  comm.finalize(deadline, signalled);
}

nb::list take_trace(Communicator& comm) {
  nb::list events;
  for (const TraceEvent& e : comm.trace().take()) {
    events.append(nb::make_tuple(e.sequence, e.chunk, static_cast<int>(e.lane), static_cast<int>(e.verb), e.kind,
                                 e.peer, e.bytes, e.begin, e.end));
  }
  return events;
}

}  // namespace

void bind_comm(nb::module_& m) {
  bind_work(m);
  set_run_destruction(run_destruction);
  if (Py_AtExit(end_process) != 0)
    throw Error(Code::kInternal, "Python has no room for what ends communicators at exit");
  m.attr("ABI") = POLYCCL_ABI;
  m.def(
      "log", [](int level, const std::string& text) { write_log(level, "", text); }, "level"_a, "text"_a,
      "Write a line to standard error if POLYCCL_LOG asks for its level, POLYCCL_LOG_* of the ABI.");
  m.def(
      "raise_error",
      [](nb::handle error) {
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
        throw nb::python_error();
      },
      "error"_a, "Raise `error`, without a traceback: torch would append that to the text.");
  m.def("link_address", &link_address,
        "Where this process's link listens: (process id in hex, host, port). Starts the link.");
  nb::class_<Device>(m, "Device", "A device, through its backend.")
      .def(nb::new_([](const Backend& backend, int index, bool high_priority) {
             return std::make_shared<Device>(backend, index, high_priority);
           }),
           "backend"_a, "index"_a, "high_priority"_a = false)
      .def_prop_ro("index", &Device::index)
      .def_prop_ro("is_host", &Device::is_host, "True for a stand-in, whose memory is the host's.")
      .def_prop_ro("waits_for_host", &Device::has_flags,
                   "True where a stream can wait for the host: then operations of a bridge do not block.");
  nb::class_<BackendComm>(m, "BackendComm", "A communicator of a backend's library.")
      .def("abort", &BackendComm::abort, nb::call_guard<GilRelease>());
  m.def("create_backend_comm", &create_backend_comm, "backend"_a, "rank"_a, "size"_a, "device"_a, "name"_a,
        "interface"_a, "address"_a, "store"_a, "timeout"_a, "group"_a, "members"_a, "descriptions"_a, "token"_a,
        "Create a communicator of a backend's library through a store. Blocks until all ranks did, or `timeout` "
        "seconds. The last four are those of create_communicator, for a library whose messages the link carries; its "
        "group is none other's.");

  nb::class_<Communicator>(m, "Communicator", "What polyccl.Comm wraps: all ranks, islands and members are given.")
      .def("issue", &issue, "kind"_a, "input"_a.none(), "output"_a.none(), "reduction"_a, "factor"_a.none(), "peer"_a,
           "input_splits"_a.none(), "output_splits"_a.none(), "async_op"_a, "timeout"_a = nb::none(),
           "strict"_a = false, "tag"_a = 0, "input_name"_a = "tensor", "output_name"_a = "tensor")
      .def("find_sender", &find_sender, "tag"_a, "timeout"_a = nb::none(),
           "Block until a message with this tag has come that no receive was issued for; the rank that sends it.")
      .def("issue_batch", &issue_batch, "items"_a, "async_op"_a, "timeout"_a = nb::none())
      .def("announce_refusal", &Communicator::announce_refusal, nb::call_guard<GilRelease>(),
           "Where calls are checked, tell the other ranks that this rank refused its call. Does not block.")
      .def("abort", &Communicator::abort, nb::call_guard<GilRelease>())
      .def("finalize", &finalize, "timeout"_a = nb::none())
      .def_prop_ro("broken", [](const Communicator& c) { return c.failure().has_value(); })
      .def_prop_ro(
          "failure", [](const Communicator& c) { return exception_of(c.failure()); },
          "What broke it, as an exception; None while it works.")
      .def("departed", &Communicator::departed, "Ranks that have left it in good order, as far as this rank is told.")
      .def_prop_rw(
          "timeout", [](const Communicator& c) { return static_cast<double>(c.timeout_ns()) / 1e9; },
          [](Communicator& c, double seconds) { c.set_timeout(standard_timeout(seconds)); })
      .def("is_native", &Communicator::is_native, "kind"_a, "dtype"_a, "reduction"_a)
      .def("payload_sent", &Communicator::payload_sent)
      .def(
          "trace", [](Communicator& c, bool on) { c.trace().enable(on); }, "on"_a)
      .def("take_trace", &take_trace);
  m.def("create_communicator", &create, "name"_a, "group"_a, "rank"_a, "members"_a, "descriptions"_a, "islands"_a,
        "token"_a, "device"_a.none(), "device_name"_a, "device_type"_a, "native"_a.none(), "pre"_a.none(),
        "post"_a.none(), "overlap"_a, "planner"_a, "check"_a, "timeout"_a, "latency_bytes"_a, "window"_a);
}

}  // namespace polyccl
