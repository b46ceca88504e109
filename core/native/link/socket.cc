#include "socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "../error.h"

namespace polyccl {
namespace {

// How long unacknowledged data, or a silent host, is put up with.
constexpr int kUserTimeoutMs = 30'000;
constexpr int kKeepIdleS = 5, kKeepIntervalS = 5, kKeepCount = 5;

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Address resolve(const std::string& host, uint16_t port) {
  Address address;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    address.size = sizeof *v4;
  } else if (inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    address.size = sizeof *v6;
  } else {
    throw Error(Code::kInvalidArgument, "\"" + host + "\" is not a numeric IPv4 or IPv6 address");
  }
  return address;
}

void set(int fd, int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof value); }

// Best effort: a connection works without any of these, only slower, or it notices a loss later.
void tune(int fd) {
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleS);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalS);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepCount);
}

Fd make_socket(int family) {
  Fd fd(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) throw Error(Code::kInternal, "cannot make a socket: " + error_text(errno));
  return fd;
}

}  // namespace

void Fd::reset(int fd) {
  if (fd_ >= 0) close(fd_);
  fd_ = fd;
}

std::string describe(const Endpoint& endpoint) { return endpoint.host + " port " + std::to_string(endpoint.port); }

std::string error_text(int error) { return std::generic_category().message(error); }

Fd listen_on(const std::string& host, uint16_t* port) {
  const Address address = resolve(host, 0);
  Fd fd = make_socket(address.storage.ss_family);
  Address bound;
  bound.size = sizeof bound.storage;
  if (bind(fd.get(), address.get(), address.size) != 0 || listen(fd.get(), SOMAXCONN) != 0 ||
      getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.size) != 0) {
    throw Error(Code::kInternal, "cannot listen on " + host + ": " + error_text(errno));
  }
  *port = ntohs(bound.storage.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(&bound.storage)->sin_port
                                                   : reinterpret_cast<sockaddr_in6*>(&bound.storage)->sin6_port);
  return fd;
}

Fd start_connect(const Endpoint& to, int* error) {
  const Address address = resolve(to.host, to.port);
  Fd fd = make_socket(address.storage.ss_family);
  tune(fd.get());
  *error = connect(fd.get(), address.get(), address.size) == 0 ? 0 : errno;
  return fd;
}

Fd accept_from(int listener) {
  Fd fd(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (fd) tune(fd.get());
  return fd;
}

int socket_error(int fd) {
  int error = 0;
  socklen_t size = sizeof error;
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

}  // namespace polyccl
