// The library oneCCL: where it is found, what it exports, and the environment that it starts in.
#include "library.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace polyccl_xccl {
namespace {

namespace fs = std::filesystem;

// Set a variable of the environment, unless the user has.
void set_default(const char* name, const std::string& value) { ::setenv(name, value.c_str(), 0); }

// What backends/xccl/fetch.py fills; "" without a home.
std::string cache_file() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const bool named = cache != nullptr && cache[0] == '/';
  if (!named && (home == nullptr || home[0] != '/')) return "";
  const fs::path base = named ? fs::path(cache) : fs::path(home) / ".cache";
  const fs::path file = base / "polyccl" / "xccl" / "lib" / "libccl.so.2";
  std::error_code ignored;
  return fs::exists(file, ignored) ? file.string() : "";
}

constexpr const char* kInstall =
    "For the CPU run `python backends/xccl/fetch.py` of PolyCCL's sources; for Intel's GPUs install oneCCL";

std::string judge(const Library& library) {
  polyccl_ccl::Symbols symbols(library);
  return symbols.has("onecclCommInitRank") ? "" : "is not version 2 of oneCCL (it has no onecclCommInitRank)";
}

Library find_library() {
  const std::string cached = cache_file();
  std::vector<const char*> names;
  if (!cached.empty()) names.push_back(cached.c_str());
  names.push_back("libccl.so.2");
  // Python packages put it into the lib folder of their environment, three levels above the folder of packages.
  static constexpr const char* kPackaged[] = {"../../libccl.so.2"};
  return polyccl_ccl::open_library({.what = "oneCCL (libccl.so.2 of 2022.2 or newer)",
                                    .variable = "POLYCCL_XCCL_LIBRARY",
                                    .stem = "libccl",
                                    .sonames = names,
                                    .packaged = kPackaged,
                                    .install = kInstall},
                                   judge);
}

// oneCCL reads all of these at its first call. Host memory only: on devices, plugin and provider are oneCCL's choice.
void prepare_environment(const std::string& library_file) {
#ifndef POLYCCL_XCCL_SYCL
  set_default("CCL_PLUGIN", "ONECCL_LEGACY_CPU");
  set_default("FI_PROVIDER", "tcp");
#endif
  set_default("CCL_ATL_TRANSPORT", "ofi");
  set_default("CCL_PROCESS_LAUNCHER", "none");  // ranks meet through PolyCCL's store
  set_default("CCL_YIELD", "sleep");            // its default spins, and starves ranks that share cores
  set_default("CCL_LOG_LEVEL", "error");
  // Debian's libfabric brings libraries along that catch the process's signals.
  set_default("IPATH_NO_BACKTRACE", "1");
  set_default("HFI_NO_BACKTRACE", "1");
  const fs::path folder = fs::path(library_file).parent_path();
  std::error_code ignored;
  if (!fs::exists(folder / "libfabric.so.1", ignored)) return;
  set_default("CCL_OFI_LIBRARY_PATH", (folder / "libfabric.so.1").string());
  if (fs::exists(folder / "libtcp-fi.so", ignored)) set_default("FI_PROVIDER_PATH", folder.string());
}

OneCcl open() {
  OneCcl one;
  one.library = find_library();
  polyccl_ccl::Symbols symbols(one.library);
#define POLYCCL_REQUIRE(name, result, arguments) symbols.require("oneccl" #name, one.api.name);
#define POLYCCL_OPTION(name, result, arguments) symbols.optional("oneccl" #name, one.api.name);
  POLYCCL_ONECCL_REQUIRED(POLYCCL_REQUIRE)
  POLYCCL_ONECCL_OPTIONAL(POLYCCL_OPTION)
#undef POLYCCL_REQUIRE
#undef POLYCCL_OPTION
  if (!symbols.missing().empty()) {
    throw Failure(POLYCCL_ERROR_UNAVAILABLE, one.library.file + " lacks " + symbols.missing() +
                                                 ": it is too old; this plugin was made for oneCCL 2022.2");
  }
  prepare_environment(one.library.file);
  if (const oneccl::Result result = one.api.GetVersion(&one.version); result != oneccl::kSuccess) {
    throw Failure(POLYCCL_ERROR_UNAVAILABLE, one.library.file + " does not start: onecclGetVersion gave " +
                                                 std::to_string(result) +
                                                 "; its companions (libccl_legacy_cpu.so and libccl.so.1 of the CPU "
                                                 "package) must lie beside it, see backends/xccl/README.md");
  }
  return one;
}

// The interface that has this address; "" where none has.
std::string interface_of(const std::string& address) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> guard(list, ::freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    char text[INET6_ADDRSTRLEN] = "";
    if (entry->ifa_addr->sa_family == AF_INET) {
      inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr, text, sizeof text);
    } else if (entry->ifa_addr->sa_family == AF_INET6) {
      inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr)->sin6_addr, text, sizeof text);
    }
    if (address == text) return entry->ifa_name;
  }
  return "";
}

}  // namespace

std::string OneCcl::version_text() const {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

const OneCcl& open_oneccl() {
  static std::mutex mutex;
  static std::optional<OneCcl> opened;
  const std::lock_guard lock(mutex);
  if (!opened) opened = open();  // a failure is not kept: the user may mend it
  return *opened;
}

const OneCcl* open_oneccl_if_there() noexcept {
  try {
    return &open_oneccl();
  } catch (...) {
    return nullptr;
  }
}

void choose_interface(const char* address, const char* interface) {
  std::string name = interface != nullptr ? interface : "";
  if (name.empty() && address != nullptr) name = interface_of(address);
  if (name.empty()) return;
  set_default("CCL_KVS_IFACE", name);
#ifndef POLYCCL_XCCL_SYCL
  set_default("FI_TCP_IFACE", name);
#endif
}

}  // namespace polyccl_xccl
