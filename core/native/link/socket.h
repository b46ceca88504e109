// Sockets: owned descriptors, and the few calls that make them.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <utility>

namespace polyccl {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

struct Endpoint {
  std::string host;
  uint16_t port = 0;
};

// "10.0.0.1 port 4711".
std::string describe(const Endpoint& endpoint);

// Throw kInternal (kInvalidArgument for an address that is none) with the system's text. All sockets are non-blocking,
// closed on exec, and without Nagle's delay.
Fd listen_on(const std::string& host, uint16_t* port);
Fd start_connect(const Endpoint& to, int* error);  // *error: 0 or EINPROGRESS, else why it failed at once
Fd accept_from(int listener);                      // empty where none waits

// The pending error of a socket; 0 for none.
int socket_error(int fd);

// "Connection refused", ...
std::string error_text(int error);

}  // namespace polyccl
