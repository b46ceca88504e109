#include "interface.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <string_view>
#include <tuple>

#include "../error.h"

namespace polyccl {
namespace {

struct Pattern {
  std::vector<std::string> names;
  bool exclude = false, exact = false;

  // The place in the list of the first name that fits; names.size() for none.
  size_t position(const std::string& name) const {
    const auto fits = [&](const std::string& entry) { return exact ? name == entry : name.starts_with(entry); };
    return static_cast<size_t>(std::find_if(names.begin(), names.end(), fits) - names.begin());
  }
  bool allows(const std::string& name) const { return names.empty() || (position(name) < names.size()) != exclude; }
};

Pattern parse(std::string_view text) {
  Pattern pattern;
  if (text.starts_with('^')) {
    pattern.exclude = true;
    text.remove_prefix(1);
  }
  if (text.starts_with('=')) {
    pattern.exact = true;
    text.remove_prefix(1);
  }
  std::istringstream stream{std::string(text)};
  for (std::string name; std::getline(stream, name, ',');) {
    // "eth0:port", as NCCL allows; the port has no use here.
    name = name.substr(0, name.find(':'));
    if (!name.empty()) pattern.names.push_back(name);
  }
  return pattern;
}

bool for_containers(const std::string& name) {
  static constexpr std::string_view kPrefixes[] = {"docker", "veth", "virbr", "br-", "cni", "flannel", "podman"};
  return std::any_of(std::begin(kPrefixes), std::end(kPrefixes), [&](auto prefix) { return name.starts_with(prefix); });
}

std::set<std::string> default_route_interfaces() {
  std::set<std::string> names;
  std::ifstream routes("/proc/net/route");
  std::string line;
  std::getline(routes, line);  // titles
  while (std::getline(routes, line)) {
    std::istringstream fields(line);
    std::string name, destination, gateway, flags, count, use, metric, mask;
    fields >> name >> destination >> gateway >> flags >> count >> use >> metric >> mask;
    if (destination == "00000000" && mask == "00000000") names.insert(name);
  }
  return names;
}

std::string at_hand(const std::vector<Interface>& all) {
  std::string text;
  for (const Interface& i : all) {
    if (!text.empty()) text += ", ";
    text += i.name + " (" + i.address + (i.up ? ")" : ", down)");
  }
  return text.empty() ? "none" : text;
}

bool read_address(const ifaddrs& entry, Interface& out) {
  char text[INET6_ADDRSTRLEN];
  if (entry.ifa_addr == nullptr) return false;
  if (entry.ifa_addr->sa_family == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, entry.ifa_addr, sizeof in);
    inet_ntop(AF_INET, &in.sin_addr, text, sizeof text);
    out.link_local = ntohl(in.sin_addr.s_addr) >> 16 == 0xA9FE;
  } else if (entry.ifa_addr->sa_family == AF_INET6) {
    sockaddr_in6 in;
    std::memcpy(&in, entry.ifa_addr, sizeof in);
    inet_ntop(AF_INET6, &in.sin6_addr, text, sizeof text);
    out.v6 = true;
    out.link_local = IN6_IS_ADDR_LINKLOCAL(&in.sin6_addr);
  } else {
    return false;
  }
  out.address = text;
  return true;
}

}  // namespace

std::vector<Interface> list_interfaces() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) {
    throw Error(Code::kInternal, std::string("cannot list the network interfaces of this host: ") + strerror(errno));
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> guard(first, &freeifaddrs);
  const std::set<std::string> routed = default_route_interfaces();
  std::vector<Interface> all;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    Interface i;
    if (!read_address(*entry, i)) continue;
    i.name = entry->ifa_name;
    i.up = (entry->ifa_flags & IFF_UP) != 0;
    i.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    i.default_route = routed.contains(i.name);
    all.push_back(i);
  }
  return all;
}

Interface choose_interface(const std::vector<Interface>& all, const std::string& text, const std::string& variable) {
  const Pattern pattern = parse(text);
  std::vector<Interface> fit;
  for (const Interface& i : all) {
    // An address of link scope is of no use to a peer that knows nothing but its text.
    if (i.up && !(i.link_local && i.v6) && pattern.allows(i.name)) fit.push_back(i);
  }
  if (fit.empty()) {
    const std::string why = text.empty() ? "this host has no usable network address"
                                         : variable + "=" + text + " fits no interface that is up and has an address";
    throw Error(Code::kInvalidArgument, why + ". Interfaces here: " + at_hand(all) +
                                            ". Set POLYCCL_SOCKET_IFNAME to one of them (prefixes; \"=\" for whole "
                                            "names, \"^\" for names to avoid).");
  }
  const auto order = [&](const Interface& i) {
    const size_t place = pattern.exclude ? 0 : pattern.position(i.name);
    return std::make_tuple(place, i.loopback, for_containers(i.name), i.link_local, !i.default_route, i.v6);
  };
  return *std::min_element(fit.begin(), fit.end(), [&](const auto& a, const auto& b) { return order(a) < order(b); });
}

Interface choose_interface() {
  for (const char* variable : {"POLYCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}) {
    const char* value = std::getenv(variable);
    if (value != nullptr && *value != '\0') return choose_interface(list_interfaces(), value, variable);
  }
  return choose_interface(list_interfaces(), "", "");
}

}  // namespace polyccl
