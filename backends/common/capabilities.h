// What the opened library can do, and how PolyCCL's types and reductions are handed to it.
#pragma once

#include <polyccl/backend.h>

#include <cstdint>
#include <optional>

namespace polyccl_ccl {

// How a reduction is asked for: `units` elements of the library's `type` stand for one of ours.
struct Reduction {
  int type = 0;
  int op = 0;  // of PREMUL_SUM: made for each operation
  uint64_t units = 1;
};

// Nothing where the library cannot reduce so, exactly, on the devices of this process.
std::optional<Reduction> reduction_of(uint32_t dtype, uint32_t reduction);

bool has_peer(uint32_t kind);
bool reduces(uint32_t kind);

// Bits of POLYCCL_CAN_*; 0 also where there is no library. Never throws.
uint32_t supports(uint32_t kind, uint32_t dtype, uint32_t reduction, uint32_t memory) noexcept;

}  // namespace polyccl_ccl
