#include "fingerprint.h"

#include <array>
#include <bit>
#include <vector>

namespace polyccl {
namespace {

uint64_t digest(const std::vector<uint64_t>& words) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (uint64_t word : words) {
    for (int shift = 0; shift < 64; shift += 8) hash = (hash ^ ((word >> shift) & 0xff)) * 0x100000001b3;
  }
  return hash;
}

// The finalizer of SplitMix64: a bijection in which every bit of the input moves about half of the output's.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

Fingerprint Fingerprint::of(const Call& call) {
  Fingerprint f;
  f.kind = call.kind();
  const uint8_t agree = call.row->agree;
  if (agree != 0) f.strict = call.strict ? 1 : 0;
  if ((agree & kAgreeDtype) != 0) f.dtype = call.dtype;
  if ((agree & kAgreeReduction) != 0) f.reduction = call.reduction;
  if ((agree & kAgreeRoot) != 0) f.root = call.peer;
  if ((agree & kAgreeCount) != 0) f.count = call.count;
  if ((agree & kAgreeCounts) != 0) {
    f.counts_digest = digest(call.row->input == Shape::kBlocks ? call.input.counts : call.output.counts);
  }
  return f;
}

uint64_t Fingerprint::hash(uint64_t within) const {
  using Words = std::array<uint64_t, sizeof(Fingerprint) / sizeof(uint64_t)>;
  uint64_t hash = within;
  for (uint64_t word : std::bit_cast<Words>(*this)) hash = mix(hash + 0x9e3779b97f4a7c15 + word);
  return hash;
}

uint64_t balance_of(const Call& call, int rank) {
  if (call.kind() != POLYCCL_KIND_ALL_TO_ALL_V) return 0;
  const auto one = [](uint64_t from, uint64_t to, uint64_t count) { return mix(mix(mix(from + 1) + to + 1) + count); };
  const auto self = static_cast<uint64_t>(rank);
  uint64_t sum = 0;  // wraps around, as it may
  for (uint64_t peer = 0; peer < call.input.counts.size(); ++peer) sum += one(self, peer, call.input.counts[peer]);
  for (uint64_t peer = 0; peer < call.output.counts.size(); ++peer) sum -= one(peer, self, call.output.counts[peer]);
  return sum;
}

uint64_t pair_fingerprint(uint64_t whole, const Call& call, int rank, int peer) {
  if (call.kind() != POLYCCL_KIND_ALL_TO_ALL_V) return whole;
  const auto at = static_cast<size_t>(peer);
  const uint64_t sent = call.input.counts[at], received = call.output.counts[at];
  return mix(mix(whole + (rank < peer ? sent : received)) + (rank < peer ? received : sent));
}

}  // namespace polyccl
