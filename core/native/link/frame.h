// Frames: what the link puts on a connection once the handshake is over. A header of fixed size, little-endian, and for
// some types a payload. Every length is checked here or by the reader before it is used.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "link.h"

namespace polyccl {

enum class FrameType : uint8_t {
  kEager = 1,  // a whole small message; takes a slot of the receiver
  kWant = 2,  // "I have a message of `bytes` for you": sent where no slot is free, or it is large and no READY has come
  kReady = 3,   // "I receive `bytes` under this tag": clear to send
  kData = 4,    // `bytes` of a message at offset `other`, after a READY
  kCredit = 5,  // nothing but the credits that every header carries
  // Where the two sizes are equal, the fingerprints differ.
  kSendMismatch = 6,  // "my message has `bytes`, your receive `other`"
  kReceiveMismatch =
      7,           // "my receive has `bytes`, your message `other`"; `detail` is 1 where the message had come whole
  kGroupFail = 8,  // the group failed with code `other`; `bytes` of text follow
  kGroupEnd = 9,   // this process has left the group
  kGoodbye = 10,   // this process closes the connection in good order
};

inline constexpr size_t kHeaderBytes = 64;
inline constexpr size_t kSegmentBytes = 1024 * 1024;  // a large message goes in DATA frames of at most this size
inline constexpr size_t kMaxFailText = 4096;

// Slots that a receiver keeps for messages whose receive is not posted yet, per connection.
inline constexpr uint32_t kSlots = 64;
inline constexpr uint32_t kSlotBytes = 4 * 1024 * 1024;

struct Frame {
  FrameType type = FrameType::kCredit;
  uint16_t credit_slots = 0;  // slots, and bytes in them, that the sender of the frame gives back
  uint32_t credit_bytes = 0;
  Tag tag;
  uint64_t bytes = 0;
  uint64_t other = 0;
  uint64_t detail = 0;  // EAGER, WANT, READY: the fingerprint of the operation
};

using Header = std::array<std::byte, kHeaderBytes>;

Header encode(const Frame& frame);

// Throws std::runtime_error where the header cannot be a frame.
Frame decode(const std::byte* header);

// How much follows the header.
size_t payload_bytes(const Frame& frame);

// "sequence 4, chunk 0, ordinal 1, channel 2", for error texts.
std::string describe(const Tag& tag);

}  // namespace polyccl
