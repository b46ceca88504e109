// Lines on standard error about what PolyCCL does, as far as POLYCCL_LOG asks for them.
#pragma once

#include <cstdint>
#include <string>

namespace polyccl {

// Write "polyccl: <who>: <level>: <text>", or without `who` if it is empty. `level` is one of POLYCCL_LOG_*
// (polyccl/backend.h). Never throws, and does nothing for levels that are not asked for.
void write_log(int32_t level, const std::string& who, const std::string& text) noexcept;

}  // namespace polyccl
