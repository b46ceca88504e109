// Opening of vendors' libraries.
//
// libnccl, NCCLX's libnccl and librccl export the same names; the first two even share a soname, by which dlopen()
// gives whatever is mapped already. So files are opened by absolute path and in a scope of their own (RTLD_LOCAL), and
// the name that the loader knows is the last resort.
#include "library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "failure.h"

namespace polyccl_ccl {
namespace {

namespace fs = std::filesystem;

struct Candidate {
  std::string file, found;
};

std::vector<std::string> mapped_files() {
  std::vector<std::string> files;
  const auto add = [](dl_phdr_info* info, size_t, void* list) {
    if (info->dlpi_name != nullptr && info->dlpi_name[0] == '/') {
      static_cast<std::vector<std::string>*>(list)->emplace_back(info->dlpi_name);
    }
    return 0;
  };
  ::dl_iterate_phdr(add, &files);
  return files;
}

// libnccl.so, libnccl.so.2, or with a wheel's hash libnccl-1a2b3c.so.2; but not libnccl-net.so.
bool is_copy_of(const std::string& file, std::string_view stem) {
  const std::string name = fs::path(file).filename();
  if (name.rfind(stem, 0) != 0) return false;
  std::string_view rest = std::string_view(name).substr(stem.size());
  if (rest.size() > 8 && rest[0] == '-') {
    const size_t end = rest.find_first_not_of("0123456789abcdef", 1);
    if (end == std::string_view::npos || end < 9) return false;
    rest = rest.substr(end);
  }
  return rest == ".so" || rest.rfind(".so.", 0) == 0;
}

// The folder of Python packages that a file lies in; "" where there is none.
std::string packages_of(const std::string& file) {
  for (const char* name : {"/site-packages/", "/dist-packages/"}) {
    const size_t at = file.rfind(name);
    if (at != std::string::npos) return file.substr(0, at + std::string_view(name).size());
  }
  return "";
}

bool is_torch(const std::string& file) {
  const std::string name = fs::path(file).filename();
  return name.rfind("libtorch", 0) == 0 || name.rfind("libc10", 0) == 0;
}

// Folders of Python packages that this process uses, torch's first.
std::vector<std::string> package_folders(const std::vector<std::string>& mapped) {
  std::vector<std::string> folders;
  for (const bool torch : {true, false}) {
    for (const std::string& file : mapped) {
      if (is_torch(file) != torch) continue;
      const std::string folder = packages_of(file);
      if (!folder.empty() && std::find(folders.begin(), folders.end(), folder) == folders.end())
        folders.push_back(folder);
    }
  }
  return folders;
}

std::vector<Candidate> mapped_candidates(const Place& place) {
  const std::vector<std::string> mapped = mapped_files();
  std::string torch;
  for (const std::string& file : mapped) {
    if (is_torch(file)) torch = packages_of(file);
  }
  std::vector<Candidate> found;
  for (const std::string& file : mapped) {
    if (is_copy_of(file, place.stem)) found.push_back({file, "this process has mapped it"});
  }
  std::stable_partition(found.begin(), found.end(),
                        [&](const Candidate& one) { return !torch.empty() && one.file.rfind(torch, 0) == 0; });
  return found;
}

std::vector<Candidate> other_candidates(const Place& place) {
  std::vector<Candidate> found;
  std::error_code ignored;
  for (const std::string& folder : package_folders(mapped_files())) {
    for (const char* below : place.packaged) {
      if (fs::exists(folder + below, ignored)) found.push_back({folder + below, "an installed Python package has it"});
    }
  }
  for (const char* name : place.sonames) found.push_back({name, "the loader found it"});
  return found;
}

std::string named(const Place& place) {
  const char* value = std::getenv(place.variable);
  return value != nullptr ? value : "";
}

// The file that an open library came from.
std::string file_of(void* handle, const std::string& fallback) {
  link_map* map = nullptr;
  if (::dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr || map->l_name == nullptr) return fallback;
  return map->l_name[0] != '\0' ? map->l_name : fallback;
}

// Open one file; where that fails or is not what is wanted, no handle, and the reason in `why`.
Library try_open(const Candidate& candidate, const Judge& judge, std::string& why) {
  Library library{::dlopen(candidate.file.c_str(), RTLD_NOW | RTLD_LOCAL), candidate.file, candidate.found};
  if (library.handle == nullptr) {
    const char* words = ::dlerror();
    why += (why.empty() ? ": " : "; ") + (words != nullptr ? std::string(words) : candidate.file + " does not open");
    return {};
  }
  library.file = file_of(library.handle, candidate.file);
  const std::string objection = judge(library);
  if (objection.empty()) return library;
  why += (why.empty() ? ": " : "; ") + library.file + " " + objection;
  ::dlclose(library.handle);  // drops what this call added, no more
  return {};
}

Library open_named(const Place& place, const Judge& judge, const std::string& file) {
  std::string why;
  std::error_code ignored;
  const fs::path whole = file.find('/') == std::string::npos ? fs::path(file) : fs::absolute(file, ignored);
  Library library =
      try_open({whole, std::string("the environment variable ") + place.variable + " names it"}, judge, why);
  if (library.handle != nullptr) return library;
  throw Failure(POLYCCL_ERROR_UNAVAILABLE, std::string("the environment variable ") + place.variable + " names '" +
                                               file + "' as " + place.what + ", and that cannot be used" + why +
                                               ". Correct it, or unset it to let PolyCCL look for itself");
}

}  // namespace

void* Symbols::find(const char* name) const { return ::dlsym(library_.handle, name); }

Library open_if_chosen(const Place& place, const Judge& judge) {
  const std::string file = named(place);
  if (!file.empty()) return open_named(place, judge, file);
  std::string why;
  for (const Candidate& candidate : mapped_candidates(place)) {
    Library library = try_open(candidate, judge, why);
    if (library.handle != nullptr) return library;
  }
  return {};
}

Library open_library(const Place& place, const Judge& judge) {
  const std::string file = named(place);
  if (!file.empty()) return open_named(place, judge, file);
  std::vector<Candidate> candidates = mapped_candidates(place);
  const std::vector<Candidate> others = other_candidates(place);
  candidates.insert(candidates.end(), others.begin(), others.end());
  std::string why;
  for (const Candidate& candidate : candidates) {
    Library library = try_open(candidate, judge, why);
    if (library.handle != nullptr) return library;
  }
  throw Failure(POLYCCL_ERROR_UNAVAILABLE, std::string("cannot open ") + place.what + why + ". " + place.install +
                                               ", or name its file in the environment variable " + place.variable);
}

}  // namespace polyccl_ccl
