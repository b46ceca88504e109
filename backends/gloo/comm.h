// A communicator on Gloo: what its operations share, and how it ends.
#pragma once

#include <polyccl/backend.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport.h"

namespace polyccl_gloo {

class Comm {
 public:
  // Sends nothing: messages find their way when there are some. Throws Failure.
  explicit Comm(const polyccl_comm_config& config);
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  Transport& transport() { return *transport_; }                        // with more than one rank
  const std::shared_ptr<Context>& context() const { return context_; }  // null for a single rank

  // Memory that stays with the communicator, for small things.
  std::byte* scratch(size_t bytes);

  // Run one operation. Whatever `body` throws, but a refusal, ends the communicator.
  polyccl_result run(const std::function<void()>& body);

  void abort();

  void set_error(const std::string& text);
  std::string error() const;

 private:
  polyccl_result end(polyccl_result result, const std::string& text);

  const int rank_, size_;
  const std::string name_;
  std::unique_ptr<Transport> transport_;
  std::shared_ptr<Context> context_;
  std::vector<std::byte> scratch_;
  mutable std::mutex mutex_;  // of what follows: abort() may come from any thread
  std::optional<Failure> ended_;
  std::string error_;
};

// A refusal: the arguments are wrong or not supported. Nothing was sent, and the communicator stays usable.
class Refusal : public Failure {
 public:
  using Failure::Failure;
};

}  // namespace polyccl_gloo
