// A thin Python view of the link, for its tests and for diagnosis. Users of PolyCCL never see it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gil.h"
#include "link/handshake.h"
#include "link/interface.h"
#include "link/link.h"
#include "link/sha256.h"
#include "transport.h"

namespace nb = nanobind;

namespace polyccl {
namespace {

using AddressTuple = std::tuple<uint64_t, uint64_t, std::string, uint16_t>;
using TagTuple = std::tuple<uint64_t, uint32_t, uint16_t, uint16_t>;  // sequence, chunk, ordinal, channel
using ErrorTuple = std::pair<std::string, std::string>;               // name of the code, text

constexpr std::pair<Code, const char*> kCodes[] = {{Code::kInvalidArgument, "InvalidArgument"},
                                                   {Code::kBackendUnavailable, "BackendUnavailable"},
                                                   {Code::kUnsupportedOperation, "UnsupportedOperation"},
                                                   {Code::kTimeout, "CommTimeout"},
                                                   {Code::kPeerLost, "PeerLost"},
                                                   {Code::kAborted, "Aborted"},
                                                   {Code::kMismatch, "Mismatch"},
                                                   {Code::kInternal, "CommError"}};

ErrorTuple to_tuple(const Error& error) {
  for (const auto& [code, name] : kCodes) {
    if (code == error.code()) return {name, error.what()};
  }
  return {"CommError", error.what()};
}

Code to_code(const std::string& name) {
  for (const auto& [code, known] : kCodes) {
    if (name == known) return code;
  }
  throw nb::value_error("no such error code");
}

// A buffer of Python's, held while the link may touch it.
class Buffer {
 public:
  Buffer(nb::handle object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
      throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* data() const { return view_.buf; }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

// A group, and the buffers of its pending requests.
class GroupView {
 public:
  GroupView(uint64_t id, std::shared_ptr<LinkGroup> group, std::vector<std::string> names)
      : id_(id), group_(std::move(group)), names_(std::move(names)) {
    group_->on_late_mismatch([late = late_](int, const Tag&, const Error& error) {
      const std::lock_guard lock(late->mutex);
      late->texts.emplace_back(error.what());
    });
  }
  GroupView(const GroupView&) = delete;
  GroupView& operator=(const GroupView&) = delete;

  std::shared_ptr<LinkRequest> send(int peer, const TagTuple& tag, nb::handle object, uint64_t fingerprint) {
    return post(peer, tag, object, true, fingerprint);
  }
  std::shared_ptr<LinkRequest> recv(int peer, const TagTuple& tag, nb::handle object, uint64_t fingerprint) {
    return post(peer, tag, object, false, fingerprint);
  }

  void fail(const std::string& code, const std::string& text, bool tell) {
    const GilRelease release;
    open().fail(Error(to_code(code), text), tell);
  }
  std::optional<ErrorTuple> failure() {
    const auto error = open().failure();
    return error ? std::optional(to_tuple(*error)) : std::nullopt;
  }
  void connect(const std::vector<int>& peers) { open().connect(peers); }
  void close() {
    lent_.reset();
    group_.reset();
  }
  uintptr_t lend() {
    if (!lent_) lent_ = lend_link(group_, id_, names_);
    return reinterpret_cast<uintptr_t>(lent_.get());
  }
  std::vector<std::string> late_mismatches() {
    const std::lock_guard lock(late_->mutex);
    return late_->texts;
  }

 private:
  struct Late {
    std::mutex mutex;
    std::vector<std::string> texts;
  };

  LinkGroup& open() {
    if (!group_) throw nb::value_error("the group is closed");
    return *group_;
  }

  std::shared_ptr<LinkRequest> post(int peer, const TagTuple& tag, nb::handle object, bool sending,
                                    uint64_t fingerprint) {
    std::erase_if(held_, [](const auto& held) { return held.first->done(); });
    auto buffer = std::make_unique<Buffer>(object, !sending);
    const auto [sequence, chunk, ordinal, channel] = tag;
    const Tag full{id_, sequence, chunk, ordinal, channel};
    auto request = sending ? open().send(peer, full, buffer->data(), buffer->size(), fingerprint)
                           : open().recv(peer, full, buffer->data(), buffer->size(), fingerprint);
    held_.emplace_back(request, std::move(buffer));
    return request;
  }

  const uint64_t id_;
  std::vector<std::pair<std::shared_ptr<LinkRequest>, std::unique_ptr<Buffer>>> held_;
  std::shared_ptr<Late> late_ = std::make_shared<Late>();
  std::shared_ptr<LinkGroup> group_;  // ends before the buffers are released
  const std::vector<std::string> names_;
  std::shared_ptr<const polyccl_transport> lent_;
};

AddressTuple address() {
  const LinkAddress a = Link::instance().address();
  return {a.process.hi, a.process.lo, a.host, a.port};
}

std::shared_ptr<GroupView> create_group(uint64_t id, int rank, const std::vector<AddressTuple>& members,
                                        const std::vector<std::string>& names, const std::string& token) {
  std::vector<LinkAddress> addresses;
  for (const auto& [hi, lo, host, port] : members) addresses.push_back({{hi, lo}, host, port});
  return std::make_shared<GroupView>(id, Link::instance().create_group(id, rank, std::move(addresses), names, token),
                                     names);
}

bool wait_until(const std::function<bool()>& ready, double timeout_s) {
  const Deadline deadline = now_ns() + std::max<int64_t>(std::llround(timeout_s * 1e9), 1);
  bool interrupted = false;
  bool done = false;
  {
    const GilRelease release;
    done = Link::instance().wait(ready, deadline, [&] {
      const GilAcquire acquire;
      return interrupted = PyErr_CheckSignals() != 0;
    });
  }
  if (interrupted) throw nb::python_error();
  return done;
}

bool wait(const std::vector<std::shared_ptr<LinkRequest>>& requests, double timeout_s) {
  return wait_until(
      [&] { return std::all_of(requests.begin(), requests.end(), [](const auto& r) { return r->done(); }); },
      timeout_s);
}

bool wait_failure(GroupView& group, double timeout_s) {
  return wait_until([&] { return group.failure().has_value(); }, timeout_s);
}

nb::dict to_dict(const LinkCounters& counters) {
  nb::dict dict;
  dict["bytes_sent"] = counters.bytes_sent;
  dict["bytes_received"] = counters.bytes_received;
  dict["wire_bytes_sent"] = counters.wire_bytes_sent;
  dict["wire_bytes_received"] = counters.wire_bytes_received;
  return dict;
}

std::string pick_interface(const std::vector<std::tuple<std::string, std::string, bool, bool>>& all,
                           const std::string& pattern) {
  std::vector<Interface> interfaces;
  for (const auto& [name, address, up, loopback] : all) {
    Interface i;
    i.name = name;
    i.address = address;
    i.up = up;
    i.loopback = loopback;
    i.v6 = address.find(':') != std::string::npos;
    i.link_local = address.starts_with("fe80:") || address.starts_with("169.254.");
    interfaces.push_back(i);
  }
  return choose_interface(interfaces, pattern, "POLYCCL_SOCKET_IFNAME").address;
}

nb::bytes to_bytes(const Digest& digest) { return nb::bytes(digest.data(), digest.size()); }

std::string_view to_view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

}  // namespace

void bind_link(nb::module_& module) {
  nb::module_ m = module.def_submodule("link", "The transport between processes, for tests and diagnosis.");
  nb::class_<LinkRequest>(m, "LinkRequest", "A message on its way.")
      .def_prop_ro("done", &LinkRequest::done)
      .def_prop_ro("error", [](const LinkRequest& request) -> std::optional<ErrorTuple> {
        if (!request.done() || !request.error()) return std::nullopt;
        return to_tuple(*request.error());
      });
  nb::class_<GroupView>(m, "LinkGroup",
                        "The members of one communicator, by rank. Tags are (sequence, chunk, ordinal, channel).")
      .def("send", &GroupView::send, nb::arg("peer"), nb::arg("tag"), nb::arg("buffer"), nb::arg("fingerprint") = 0)
      .def("recv", &GroupView::recv, nb::arg("peer"), nb::arg("tag"), nb::arg("buffer"), nb::arg("fingerprint") = 0)
      .def("fail", &GroupView::fail, nb::arg("code"), nb::arg("text"), nb::arg("tell"))
      .def("failure", &GroupView::failure)
      .def("connect", &GroupView::connect, nb::arg("peers"))
      .def("close", &GroupView::close, nb::call_guard<GilRelease>())
      .def("lend", &GroupView::lend,
           "The address of a polyccl_transport over this group, for driving a plugin; valid until close().")
      .def("late_mismatches", &GroupView::late_mismatches);
  m.def("address", &address, "This process on the link: (id, id, numeric host, port). Starts the link.");
  m.def(
      "add_token", [](const std::string& token) { Link::instance().add_token(token); }, nb::arg("token"));
  m.def("create_group", &create_group, nb::arg("group"), nb::arg("rank"), nb::arg("members"), nb::arg("names"),
        nb::arg("token"));
  m.def("wait", &wait, nb::arg("requests"), nb::arg("timeout_s"), "Blocks until all are done; False at the deadline.");
  m.def("wait_failure", &wait_failure, nb::arg("group"), nb::arg("timeout_s"));
  m.def(
      "progress", [] { Link::instance().progress(); }, nb::call_guard<GilRelease>());
  m.def("wake", [] { Link::instance().wake(); });
  m.def(
      "shutdown", [] { Link::instance().shutdown(); }, nb::call_guard<GilRelease>());
  m.def(
      "set_connect_timeout", [](double seconds) { Link::instance().set_connect_timeout(std::llround(seconds * 1e9)); },
      nb::arg("seconds"));
  m.def(
      "counters",
      [](std::optional<std::pair<uint64_t, uint64_t>> peer) {
        return to_dict(peer ? Link::instance().counters({peer->first, peer->second}) : Link::instance().counters());
      },
      nb::arg("peer") = nb::none());
  m.def("choose_interface", &pick_interface, nb::arg("interfaces"), nb::arg("pattern"),
        "For tests: which address a pattern chooses among (name, address, up, loopback).");
  m.def("sha256", [](const nb::bytes& data) { return to_bytes(sha256(to_view(data))); });
  m.def("hmac_sha256",
        [](const nb::bytes& key, const nb::bytes& data) { return to_bytes(hmac_sha256(to_view(key), to_view(data))); });
  m.def("token_name", [](const std::string& token) {
    const std::string name = token_name(token);
    return nb::bytes(name.data(), name.size());
  });
}

}  // namespace polyccl
