// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for the proof of the job token in the handshake.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace polyccl {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void update(std::string_view bytes);
  Digest finish();  // ends the object's use

 private:
  void block(const uint8_t* bytes);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> buffer_{};
  size_t filled_ = 0;
  uint64_t total_ = 0;
};

Digest sha256(std::string_view bytes);
Digest hmac_sha256(std::string_view key, std::string_view bytes);

// Takes as long for equal digests as for different ones.
bool equal_digests(const Digest& a, const Digest& b);

}  // namespace polyccl
