// Opening of vendors' libraries: which file, and never so that two libraries' equal names mix.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "family.h"

namespace polyccl_ccl {

// An open library. It is never closed: code of it may run at any time.
struct Library {
  void* handle = nullptr;
  std::string file;   // absolute, where the loader tells
  std::string found;  // how, in words
};

// Looks up names of one library, and notes those that it must have and lacks.
class Symbols {
 public:
  explicit Symbols(const Library& library) : library_(library) {}

  template <typename Function>
  void require(const char* name, Function& slot) {
    if (!optional(name, slot)) missing_ += (missing_.empty() ? "" : ", ") + std::string(name);
  }

  // The same for a name that the library may lack: then the slot stays empty.
  template <typename Function>
  bool optional(const char* name, Function& slot) {
    slot = reinterpret_cast<Function>(find(name));
    return slot != nullptr;
  }

  bool has(const char* name) const { return find(name) != nullptr; }
  const std::string& missing() const { return missing_; }

 private:
  void* find(const char* name) const;

  const Library& library_;
  std::string missing_;
};

// Why a library that was opened is not the one that is wanted; "" where it is.
using Judge = std::function<std::string(const Library&)>;

// Open a library: the file that the user named, else the copy that this process has mapped (torch's first), else that
// of an installed Python package, else what the loader finds. Throws a Failure (UNAVAILABLE) that lists what was tried;
// a file that the user named has no substitute.
Library open_library(const Place& place, const Judge& judge);

// Open it only if the user named it or the process has mapped it: gives no handle else.
Library open_if_chosen(const Place& place, const Judge& judge);

}  // namespace polyccl_ccl
