// Which address of this machine Gloo is to listen on.
#pragma once

#include <string>

namespace polyccl_gloo {

// A numeric address: `address` where given, else the first of `interface`, else of the interface that
// GLOO_SOCKET_IFNAME names, else the one by which this machine reaches others. Loopback only where there is no other.
// Empty strings are not given. Throws Failure.
std::string choose_address(const std::string& address, const std::string& interface);

}  // namespace polyccl_gloo
