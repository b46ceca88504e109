// The fingerprint of a call: the fields that must be equal on all ranks, to compare whole (agreement.h) or as 64 bits
// (every message of a plan carries them).
#pragma once

#include <cstdint>

#include "call.h"

namespace polyccl {

// Crosses the link as it lies in memory: ranks of a communicator have one byte order (the hello sees to that).
struct Fingerprint {
  uint64_t count = 0;
  uint64_t counts_digest = 0;  // of the counts of a ragged operation
  uint64_t balance = 0;        // all_to_all_v, see balance_of(); not the same on all ranks
  uint32_t kind = 0;
  uint32_t dtype = 0;
  uint32_t reduction = 0;
  int32_t root = -1;
  uint32_t refused = 0;  // 1: this rank's call was refused before it sent anything
  uint32_t strict = 0;
  uint32_t native = 0;  // 1: the library does it, which needs one tensor instead of a list on every rank
  uint32_t reserved = 0;
  bool operator==(const Fingerprint&) const = default;

  // Of the fields that must agree for this kind; without a balance.
  static Fingerprint of(const Call& call);

  // Whether two ranks' calls go together, as far as the two can tell.
  bool goes_with(Fingerprint other) const {
    other.balance = balance;
    return *this == other;
  }

  // All fields as one number, mixed with that of the operation `within` which the call is a leg. Calls that differ have
  // the same one by chance only, of 2^-64.
  uint64_t hash(uint64_t within) const;
};

// What a rank of an all_to_all_v expects to send, less what it expects to receive, each pair's count as a random number. The
// sum over all ranks is 0 if every pair agrees on its counts, and else by chance only.
uint64_t balance_of(const Call& call, int rank);

// The fingerprint of the messages between this rank and a peer: of an all_to_all_v it holds both counts, so that one that
// differs shows on both sides.
uint64_t pair_fingerprint(uint64_t whole, const Call& call, int rank, int peer);

}  // namespace polyccl
