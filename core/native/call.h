// A call: one operation with its memory and its numbers, as the user or a plan asked for it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "clock.h"
#include "types.h"

namespace polyccl {

// One side (input or output) of a call on this rank. `blocks` is empty where this rank has no such side.
struct Side {
  std::vector<char*> blocks;     // one, or one for each rank
  std::vector<uint64_t> counts;  // ragged calls: elements of each block
  bool empty() const { return blocks.empty(); }
};

// The user's stream, for tensors on a device.
struct UserStream {
  void* handle = nullptr;  // at the call; may be null, the device's default stream
  int (*current)(int32_t device_type, int32_t device_index, void** stream) = nullptr;
  int32_t device_type = 1, device_index = 0;
  bool known() const { return current != nullptr; }
};

struct Call {
  const Operation* row = nullptr;
  Dtype dtype = 0;
  Reduction reduction = 0;
  int peer = -1;       // root, or peer of send and recv
  uint32_t tag = 0;    // of send and recv: messages of one pair and tag match in order
  uint64_t count = 0;  // elements of one block; of the longest that this rank knows, where ragged
  Side input, output;
  alignas(16) std::array<std::byte, 16> factor{};  // PREMUL_SUM: one element of dtype
  Deadline deadline = 0;
  uint64_t within = 0;  // fingerprint of the operation that this is a leg of
  UserStream stream;
  bool lists = false;   // the layout of blocks is this rank's own affair (a list, or at the root alone): no library can
                        // be given them
  bool strict = false;  // sum by rank, whatever the size and the islands

  // Of messages of device memory: pinned memory that stands in for it, and what brings it home.
  std::shared_ptr<void> staging;
  std::function<void()> unstage;

  Kind kind() const { return row->kind; }
  size_t element() const { return dtype_size(dtype); }

  // Bytes of the full buffer that the operation is about, which size classes and the tables of bounds are measured in.
  uint64_t full_bytes(int size) const {
    const bool blocks = row->input == Shape::kBlocks || row->output == Shape::kBlocks;
    return count * element() * (blocks ? static_cast<uint64_t>(size) : 1);
  }
};

// The blocks of a side, where they lie one after another: `n` blocks of `bytes` each.
inline std::vector<char*> adjacent_blocks(char* base, size_t n, uint64_t bytes) {
  std::vector<char*> blocks(n);
  for (size_t i = 0; i < n; ++i) blocks[i] = base + i * bytes;
  return blocks;
}

}  // namespace polyccl
