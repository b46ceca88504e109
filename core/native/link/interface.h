// Which of this host's addresses the link listens on.
#pragma once

#include <string>
#include <vector>

namespace polyccl {

struct Interface {
  std::string name;
  std::string address;  // numeric
  bool v6 = false;
  bool up = true;
  bool loopback = false;
  bool link_local = false;     // fe80::/10 or 169.254/16: not reachable without more ado
  bool default_route = false;  // the way to other networks leads over it
};

// The addresses of this host.
std::vector<Interface> list_interfaces();

// Chooses an address. `pattern` has NCCL's syntax: a list of name prefixes, "=" before it for whole names, "^" before
// it for names to avoid ("eth,ib", "=eth0", "^docker,lo", "^=eth1"); empty for the default, a routable address before a
// loopback one. `variable` is where the pattern came from, for the error (kInvalidArgument) that names the interfaces
// at hand.
Interface choose_interface(const std::vector<Interface>& all, const std::string& pattern, const std::string& variable);

// The same on this host, by POLYCCL_SOCKET_IFNAME, else GLOO_SOCKET_IFNAME, else the default.
Interface choose_interface();

}  // namespace polyccl
