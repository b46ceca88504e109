// What tells one backend of this family from another. Each plugin defines family(); all else is common.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace polyccl_ccl {

struct Runtime;
class Symbols;

// Whose library it is: they export the same names, and extend them in ways that clash.
enum class Flavour { kNccl, kNcclx, kRccl, kRcclx };

// Where a shared library may be found.
struct Place {
  const char* what;                       // in words, for texts
  const char* variable;                   // the environment variable that names its file
  const char* stem;                       // "libnccl": what a mapped file's name begins with
  std::span<const char* const> sonames;   // for the loader, the best first
  std::span<const char* const> packaged;  // below a folder of Python packages
  const char* install;                    // what a user without it can do, in words
};

struct Family {
  const char* backend;  // the plugin's name
  Flavour flavour;
  Place library;
  Place runtime;

  // Whether all ranks get the same bits from an all_reduce whose result depends on the order of operands.
  bool equal_bits;

  // Fill the table of the runtime from an opened one.
  void (*fill)(Runtime& runtime, Symbols& symbols);

  // The library's number of an fp8 type on a device of this architecture; -1 where it has none there.
  int (*fp8)(uint32_t dtype, int major, int minor);

  // What a user without driver or device can do.
  const char* advice;
};

const Family& family();

const char* flavour_name(Flavour flavour);

}  // namespace polyccl_ccl
