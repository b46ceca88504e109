#include "job.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

#include "closing.h"
#include "transport.h"

namespace polyccl::native_test {

void require(bool holds, const std::string& what) {
  if (!holds) throw Error(Code::kInternal, "does not hold: " + what);
}

void wait_until(const std::string& what, const std::function<bool()>& holds) {
  const Deadline deadline = now_ns() + kPatience;
  while (!holds()) {
    require(!expired(deadline), what + ", in time");
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

Layout::Layout(const std::string& text) {
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t equals = part.find('=');
    islands.emplace_back();
    for (int left = std::stoi(part.substr(equals + 1)); left > 0; --left) {
      islands.back().push_back(size());
      backends.push_back(part.substr(0, equals));
    }
  }
}

// ---- the store ------------------------------------------------------------------------------------------------------

std::string FolderStore::path_of(std::string key) const {
  std::replace(key.begin(), key.end(), '/', '.');
  return prefix_ + key;
}

void FolderStore::set(const std::string& key, const std::string& value) {
  const std::string path = path_of(key), fresh = path + ".fresh";
  std::ofstream(fresh, std::ios::binary) << value;
  std::filesystem::rename(fresh, path);  // at once: nobody reads half a value
}

std::string FolderStore::get(const std::string& key, Deadline deadline) {
  const std::string path = path_of(key);
  while (!std::filesystem::exists(path)) {
    if (expired(deadline)) throw Error(Code::kTimeout, "nobody set '" + path + "'");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// ---- the job --------------------------------------------------------------------------------------------------------

struct Job::Wanted {
  Scope plans;
  bool check;
  Deadline deadline;  // of the creation
};

Job::Job(const std::string& shape, int rank, std::string folder)
    : layout_(shape), rank_(rank), folder_(std::move(folder)) {
  plans_ = std::make_shared<const PlanBook>(folder_ + "/plans." + std::to_string(rank));
  if (backend() != "host") library_ = &Backend::load(PLUGIN_FOLDER "/libpolyccl_" + backend() + ".so");
  if (library_ != nullptr && library_->table().device != nullptr) {
    device_ = std::make_shared<Device>(*library_, rank % library_->device_count());
  }
  const LinkAddress mine = Link::instance().address();
  std::ostringstream text;
  text << mine.process.hi << ' ' << mine.process.lo << ' ' << mine.host << ' ' << mine.port;
  store("address").set(std::to_string(rank), text.str());
  for (int other = 0; other < size(); ++other) addresses_.push_back(address_of(other));
}

LinkAddress Job::address_of(int rank) {
  std::istringstream text(store("address").get(std::to_string(rank), now_ns() + kPatience));
  LinkAddress address;
  text >> address.process.hi >> address.process.lo >> address.host >> address.port;
  require(!text.fail(), "the store has the address of rank " + std::to_string(rank));
  return address;
}

CommunicatorConfig Job::config(const std::vector<int>& members, const std::string& name, const Wanted& wanted) const {
  CommunicatorConfig made;
  made.name = name;
  made.group = std::hash<std::string>{}(name);
  made.rank = static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
  for (int member : members) {
    made.members.push_back(addresses_[static_cast<size_t>(member)]);
    made.descriptions.push_back("rank " + std::to_string(member) + " (" +
                                layout_.backends[static_cast<size_t>(member)] + ")");
  }
  made.token = "the token of a job of tests";
  made.device = device_;
  made.device_index = device_ ? device_->index() : 0;
  made.planner = [book = plans_, scope = wanted.plans](const Signature& s) { return book->find(scope, s); };
  made.check = wanted.check;
  made.timeout_ns = kPatience;
  made.latency_bytes = plans_->latency_bytes();
  return made;
}

std::shared_ptr<Communicator> Job::plain(const std::vector<int>& members, const std::string& name,
                                         const Wanted& wanted) {
  CommunicatorConfig made = config(members, name, wanted);
  made.islands.emplace_back();
  for (size_t i = 0; i < members.size(); ++i) made.islands[0].push_back(static_cast<int>(i));
  if (library_ != nullptr && members.size() > 1) {
    CommConfig own;
    own.rank = made.rank;
    own.size = static_cast<int>(members.size());
    own.device = device_ ? device_->index() : -1;
    own.name = name;
    own.address = addresses_[static_cast<size_t>(rank_)].host;
    own.deadline = wanted.deadline;
    if (library_->has(POLYCCL_FLAG_TRANSPORT)) {
      const uint64_t group = std::hash<std::string>{}(name + "/library");
      auto link = Link::instance().create_group(group, own.rank, made.members, made.descriptions, made.token);
      own.transport = lend_link(std::move(link), group, made.descriptions);
    }
    FolderStore bootstrap = store(name);
    made.native = std::make_shared<BackendComm>(*library_, own, bootstrap);
  }
  return make_communicator(std::move(made));
}

std::shared_ptr<Communicator> Job::communicator(const std::string& name, bool check, int64_t patience) {
  Wanted wanted{Scope::kWhole, check, now_ns() + patience};
  if (!layout_.is_bridge()) return plain(layout_.islands[0], name, wanted);
  std::vector<int> everyone;
  for (const auto& island : layout_.islands) everyone.insert(everyone.end(), island.begin(), island.end());
  CommunicatorConfig made = config(everyone, name, wanted);
  made.islands = layout_.islands;
  made.overlap = library_ == nullptr || library_->has(POLYCCL_FLAG_CONCURRENT_COMMS);
  const auto mine =
      std::find_if(layout_.islands.begin(), layout_.islands.end(), [this](const std::vector<int>& island) {
        return std::find(island.begin(), island.end(), rank_) != island.end();
      });
  if (mine->size() > 1) {
    wanted.plans = Scope::kIsland;
    const std::string label = name + "." + std::to_string(mine - layout_.islands.begin());
    made.island[0] = plain(*mine, label + ".pre", wanted);
    made.island[1] = made.overlap ? plain(*mine, label + ".post", wanted) : made.island[0];
  }
  return make_communicator(std::move(made));
}

}  // namespace polyccl::native_test
