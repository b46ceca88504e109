// The vendor's library: which flavour it is, and its functions.
#include "nccl_api.h"

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "failure.h"

namespace polyccl_ccl {
namespace {

// By names that only one flavour has. `usual`: an old RCCL has none of its own, so that its file's name decides.
Flavour flavour_of(const Library& library) {
  const Symbols symbols(library);
  const auto any = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (symbols.has(name)) return true;
    }
    return false;
  };
  if (any({"ncclCommGetUniqueHash", "ncclGlobalRegisterWithPtr"})) return Flavour::kNcclx;
  if (any({"ncclShardedRelayMultiGroupAllReduce"})) return Flavour::kRcclx;
  if (any({"ncclAllReduceWithBias", "mscclLoadAlgo"})) return Flavour::kRccl;
  return library.file.find("librccl") != std::string::npos ? Flavour::kRccl : Flavour::kNccl;
}

void fill(Api& api, Symbols& symbols) {
  symbols.require("ncclGetVersion", api.get_version);
  symbols.require("ncclGetUniqueId", api.get_unique_id);
  symbols.require("ncclGetErrorString", api.get_error_string);
  symbols.optional("ncclGetLastError", api.get_last_error);
  symbols.require("ncclCommInitRank", api.comm_init_rank);
  symbols.optional("ncclCommInitRankConfig", api.comm_init_rank_config);
  symbols.optional("ncclCommFinalize", api.comm_finalize);
  symbols.require("ncclCommDestroy", api.comm_destroy);
  symbols.require("ncclCommAbort", api.comm_abort);
  symbols.require("ncclCommGetAsyncError", api.comm_get_async_error);
  symbols.optional("ncclMemAlloc", api.mem_alloc);
  symbols.require("ncclGroupStart", api.group_start);
  symbols.require("ncclGroupEnd", api.group_end);
  symbols.require("ncclAllReduce", api.all_reduce);
  symbols.require("ncclReduceScatter", api.reduce_scatter);
  symbols.require("ncclReduce", api.reduce);
  symbols.require("ncclBroadcast", api.broadcast);
  symbols.require("ncclAllGather", api.all_gather);
  symbols.require("ncclSend", api.send);
  symbols.require("ncclRecv", api.recv);
  if (!symbols.optional("ncclAlltoAll", api.all_to_all)) symbols.optional("ncclAllToAll", api.all_to_all);
  symbols.optional("ncclGather", api.gather);
  symbols.optional("ncclScatter", api.scatter);
  symbols.optional("ncclRedOpCreatePreMulSum", api.create_premul_sum);
  symbols.optional("ncclRedOpDestroy", api.destroy_op);
}

// Why an open library is not this backend's; "" where it is.
std::string objection(const Library& library) {
  const Family& mine = family();
  const Flavour flavour = flavour_of(library);
  if (flavour != mine.flavour) {
    return std::string("is ") + flavour_name(flavour) + ", not " + flavour_name(mine.flavour);
  }
  Api api;
  Symbols symbols(library);
  fill(api, symbols);
  if (symbols.missing().empty()) return "";
  return "lacks " + symbols.missing() + ": it is no " + flavour_name(mine.flavour) + ", or older than 2.7";
}

// Inside a library, calls of its own public functions go to whatever has the name in the process's global scope.
void warn_of_global_names(const Vendor& vendor) {
  void* global = ::dlsym(RTLD_DEFAULT, "ncclGetVersion");
  Dl_info info{};
  if (global == nullptr || global == reinterpret_cast<void*>(vendor.api.get_version)) return;
  const bool known = ::dladdr(global, &info) != 0 && info.dli_fname != nullptr;
  log(POLYCCL_LOG_WARNING, std::string(known ? info.dli_fname : "a library") +
                               " is in this process's global scope and exports the names of " + vendor.library.file +
                               ", which may then call it instead of itself; open it with RTLD_LOCAL, or do not link it "
                               "into the program");
}

std::unique_ptr<Vendor> open_vendor() {
  auto vendor = std::make_unique<Vendor>();
  vendor->library = open_library(family().library, objection);
  Symbols symbols(vendor->library);
  fill(vendor->api, symbols);
  vendor->flavour = flavour_of(vendor->library);
  vendor->stand_in = symbols.has("polyccl_stand_in");
  if (const int result = vendor->api.get_version(&vendor->version); result != kSuccess) {
    throw Failure(POLYCCL_ERROR_UNAVAILABLE,
                  vendor->library.file + " does not tell its version: " + vendor->words(result, nullptr));
  }
  log(POLYCCL_LOG_INFO, std::string(flavour_name(vendor->flavour)) + " " + vendor->version_text() + " from " +
                            vendor->library.file + ": " + vendor->library.found);
  warn_of_global_names(*vendor);
  return vendor;
}

}  // namespace

const char* flavour_name(Flavour flavour) {
  switch (flavour) {
    case Flavour::kNcclx:
      return "NCCLX";
    case Flavour::kRccl:
      return "RCCL";
    case Flavour::kRcclx:
      return "RCCLX";
    default:
      return "NCCL";
  }
}

Config Config::for_version(int version, const char* name) {
  Config config;
  config.blocking = 0;
  if (version >= 22700) config.comm_name = name;
  // A library resets what is newer than the version that it is told.
  if (version >= 22800) {
    config.size = sizeof(Config);
    config.version = 22800;
  } else if (version >= 22700) {
    config.size = offsetof(Config, channels_per_net_peer);
    config.version = 22700;
  } else {
    config.size = 24;  // `blocking` with its padding
    config.version = 21400;
  }
  return config;
}

std::string Vendor::version_text() const {
  const int thousand = version >= 10000 ? 10000 : 1000;  // 2.8.4 was 2804
  return std::to_string(version / thousand) + "." + std::to_string(version % thousand / 100) + "." +
         std::to_string(version % 100);
}

std::string Vendor::words(int result, Handle comm) const {
  const char* name = api.get_error_string(result);
  std::string text = name != nullptr ? name : "result " + std::to_string(result);
  const char* last = api.get_last_error != nullptr ? api.get_last_error(comm) : nullptr;
  if (last != nullptr && last[0] != '\0') text += std::string(": ") + last;
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

const Vendor& vendor() {
  static std::mutex mutex;
  static std::atomic<const Vendor*> opened{nullptr};
  if (const Vendor* known = opened.load(std::memory_order_acquire)) return *known;
  const std::lock_guard lock(mutex);
  if (const Vendor* known = opened.load(std::memory_order_acquire)) return *known;
  const Vendor* made = open_vendor().release();  // for as long as the process lives
  opened.store(made, std::memory_order_release);
  return *made;
}

}  // namespace polyccl_ccl
