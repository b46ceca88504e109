#include "log.h"

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "polyccl/backend.h"

namespace polyccl {
namespace {

const char* word(int32_t level) {
  switch (level) {
    case POLYCCL_LOG_ERROR:
      return "error";
    case POLYCCL_LOG_WARNING:
      return "warning";
    case POLYCCL_LOG_INFO:
      return "info";
    default:
      return "debug";
  }
}

// The least severe level that is written: POLYCCL_LOG, read once. Python refuses values that are none.
int32_t limit() {
  static const int32_t level = [] {
    const char* named = std::getenv("POLYCCL_LOG");
    const std::string_view name = named == nullptr ? "warning" : named;
    if (name == "error") return int32_t{POLYCCL_LOG_ERROR};
    if (name == "info") return int32_t{POLYCCL_LOG_INFO};
    if (name == "debug") return int32_t{POLYCCL_LOG_DEBUG};
    return int32_t{POLYCCL_LOG_WARNING};
  }();
  return level;
}

}  // namespace

void write_log(int32_t level, const std::string& who, const std::string& text) noexcept {
  if (level > limit()) return;
  const char* const colon = who.empty() ? "" : ": ";
  std::fprintf(stderr, "polyccl: %s%s%s: %s\n", who.c_str(), colon, word(level), text.c_str());
}

}  // namespace polyccl
