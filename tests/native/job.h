// One rank of a job, without Python: a store in a folder, the planner's plans from a file, and communicators put
// together from both, as polyccl.create does it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "communicator.h"
#include "device.h"
#include "loader.h"
#include "plans.h"

namespace polyccl::native_test {

inline constexpr int64_t kSecond = 1'000'000'000;
inline constexpr int64_t kPatience = 30 * kSecond;  // with whatever must happen

// Throw unless it holds; `what` says what does not.
void require(bool holds, const std::string& what);

// Let other threads and processes go on, until `holds`. Throws after kPatience.
void wait_until(const std::string& what, const std::function<bool()>& holds);

// Which library each rank has, as `polyccl launch --islands` writes it: "nccl=2,host=1".
struct Layout {
  explicit Layout(const std::string& text);

  std::vector<std::string> backends;      // by rank
  std::vector<std::vector<int>> islands;  // ranks
  int size() const { return static_cast<int>(backends.size()); }
  bool is_bridge() const { return islands.size() > 1; }
};

// Keys are files of a folder, so that processes share it.
class FolderStore : public BootstrapStore {
 public:
  explicit FolderStore(std::string prefix) : prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Deadline deadline) override;
  bool cancelled() const override { return false; }

 private:
  std::string path_of(std::string key) const;
  const std::string prefix_;
};

class Job {
 public:
  // `folder` is the job's: store and plans are there.
  Job(const std::string& shape, int rank, std::string folder);

  int rank() const { return rank_; }
  int size() const { return layout_.size(); }
  const Layout& layout() const { return layout_; }
  const std::string& backend() const { return layout_.backends[static_cast<size_t>(rank_)]; }
  const std::shared_ptr<Device>& device() const { return device_; }  // null where tensors are in host memory

  // A communicator of all ranks: the library's own where the shape has one island, else a bridge. Collective; the name
  // is used once.
  std::shared_ptr<Communicator> communicator(const std::string& name, bool check = false, int64_t patience = kPatience);

 private:
  struct Wanted;
  std::shared_ptr<Communicator> plain(const std::vector<int>& members, const std::string& name, const Wanted& wanted);
  CommunicatorConfig config(const std::vector<int>& members, const std::string& name, const Wanted& wanted) const;
  LinkAddress address_of(int rank);
  FolderStore store(const std::string& name) const { return FolderStore(folder_ + "/store." + name + "."); }

  const Layout layout_;
  const int rank_;
  const std::string folder_;
  std::shared_ptr<const PlanBook> plans_;
  Backend* library_ = nullptr;  // null for `host`
  std::shared_ptr<Device> device_;
  std::vector<LinkAddress> addresses_;
};

}  // namespace polyccl::native_test
