// Which address of this machine Gloo is to listen on. Left to itself, Gloo takes loopback without a word where the
// host's name resolves to it, so that ranks on other machines never connect.
#include "address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <polyccl/backend.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "transport.h"

namespace polyccl_gloo {
namespace {

struct Interface {
  std::string name, address;
  bool loopback = false, version4 = false;
};

std::string text_of(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    return inet_ntop(AF_INET, &v4->sin_addr, text, sizeof text) != nullptr ? text : "";
  }
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
  return inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof text) != nullptr ? text : "";
}

bool usable(const ifaddrs& entry) {
  if (entry.ifa_addr == nullptr || (entry.ifa_flags & IFF_UP) == 0) return false;
  if (entry.ifa_addr->sa_family == AF_INET) return true;
  if (entry.ifa_addr->sa_family != AF_INET6) return false;
  // A link-local address means nothing without its interface, which Gloo does not carry along.
  return !IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr)->sin6_addr);
}

// Addresses of interfaces that are up: IPv4 first, else in the system's order.
std::vector<Interface> interfaces() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) {
    throw Failure(POLYCCL_ERROR_INTERNAL, std::string("cannot list the network interfaces: ") + std::strerror(errno));
  }
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> guard(list, ::freeifaddrs);
  std::vector<Interface> found;
  for (const bool version4 : {true, false}) {
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
      if (!usable(*entry) || (entry->ifa_addr->sa_family == AF_INET) != version4) continue;
      found.push_back({entry->ifa_name, text_of(entry->ifa_addr), (entry->ifa_flags & IFF_LOOPBACK) != 0, version4});
    }
  }
  return found;
}

std::string address_of(const std::string& name, const char* source) {
  std::string known;
  for (const Interface& interface : interfaces()) {
    if (interface.name == name) return interface.address;
    if ((" " + known).find(" " + interface.name) == std::string::npos) known += interface.name + " ";
  }
  throw Failure(POLYCCL_ERROR_INVALID, "network interface '" + name + "' (from " + source +
                                           ") is not there, not up, or has no address; up are: " + known);
}

// The local address by which the default route leaves; "" without one. Connecting a datagram socket sends nothing.
std::string routed_address() {
  const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return "";
  sockaddr_in far{};
  far.sin_family = AF_INET;
  far.sin_port = htons(9);
  inet_pton(AF_INET, "198.51.100.1", &far.sin_addr);  // TEST-NET-2: nobody's address
  sockaddr_in local{};
  socklen_t size = sizeof local;
  const bool found = ::connect(fd, reinterpret_cast<const sockaddr*>(&far), sizeof far) == 0 &&
                     ::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &size) == 0;
  ::close(fd);
  return found ? text_of(reinterpret_cast<const sockaddr*>(&local)) : "";
}

}  // namespace

std::string choose_address(const std::string& address, const std::string& interface) {
  if (!address.empty()) return address;
  if (!interface.empty()) return address_of(interface, "the communicator's options");
  const char* environment = std::getenv("GLOO_SOCKET_IFNAME");
  if (environment != nullptr && environment[0] != '\0') {
    const std::string names(environment);  // torch allows several; one is what a communicator uses
    return address_of(names.substr(0, names.find(',')), "GLOO_SOCKET_IFNAME");
  }
  const std::string routed = routed_address();
  if (!routed.empty()) return routed;
  const std::vector<Interface> all = interfaces();
  for (const Interface& one : all) {
    if (!one.loopback) return one.address;
  }
  return all.empty() ? "127.0.0.1" : all.front().address;
}

}  // namespace polyccl_gloo
