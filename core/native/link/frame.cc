#include "frame.h"

#include <stdexcept>

namespace polyccl {
namespace {

constexpr uint16_t kMagic = 0xCC1F;

template <class T>
void put(Header& header, size_t at, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) header[at + i] = static_cast<std::byte>(value >> (8 * i));
}

template <class T>
T get(const std::byte* header, size_t at) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= std::to_integer<uint64_t>(header[at + i]) << (8 * i);
  return static_cast<T>(value);
}

// The largest `bytes` that a header of this type may announce.
uint64_t limit(FrameType type) {
  switch (type) {
    case FrameType::kEager:
      return kEagerBytes;
    case FrameType::kData:
      return kSegmentBytes;
    case FrameType::kGroupFail:
      return kMaxFailText;
    case FrameType::kWant:
    case FrameType::kReady:
    case FrameType::kSendMismatch:
    case FrameType::kReceiveMismatch:
      return UINT64_MAX;
    case FrameType::kCredit:
    case FrameType::kGroupEnd:
    case FrameType::kGoodbye:
      return 0;
  }
  throw std::runtime_error("a frame of unknown type " + std::to_string(static_cast<int>(type)));
}

}  // namespace

Header encode(const Frame& frame) {
  Header header{};
  put<uint16_t>(header, 0, kMagic);
  put<uint8_t>(header, 2, static_cast<uint8_t>(frame.type));
  put<uint32_t>(header, 4, frame.credit_bytes);
  put<uint16_t>(header, 8, frame.credit_slots);
  put<uint16_t>(header, 12, frame.tag.ordinal);
  put<uint16_t>(header, 14, frame.tag.channel);
  put<uint32_t>(header, 16, frame.tag.chunk);
  put<uint64_t>(header, 24, frame.tag.group);
  put<uint64_t>(header, 32, frame.tag.sequence);
  put<uint64_t>(header, 40, frame.bytes);
  put<uint64_t>(header, 48, frame.other);
  put<uint64_t>(header, 56, frame.detail);
  return header;
}

Frame decode(const std::byte* header) {
  if (get<uint16_t>(header, 0) != kMagic) throw std::runtime_error("bytes that are no frame header");
  Frame frame;
  frame.type = static_cast<FrameType>(get<uint8_t>(header, 2));
  frame.credit_bytes = get<uint32_t>(header, 4);
  frame.credit_slots = get<uint16_t>(header, 8);
  frame.tag.ordinal = get<uint16_t>(header, 12);
  frame.tag.channel = get<uint16_t>(header, 14);
  frame.tag.chunk = get<uint32_t>(header, 16);
  frame.tag.group = get<uint64_t>(header, 24);
  frame.tag.sequence = get<uint64_t>(header, 32);
  frame.bytes = get<uint64_t>(header, 40);
  frame.other = get<uint64_t>(header, 48);
  frame.detail = get<uint64_t>(header, 56);
  if (frame.bytes > limit(frame.type)) {
    throw std::runtime_error("a frame of type " + std::to_string(static_cast<int>(frame.type)) + " that announces " +
                             std::to_string(frame.bytes) + " bytes");
  }
  return frame;
}

size_t payload_bytes(const Frame& frame) {
  switch (frame.type) {
    case FrameType::kEager:
    case FrameType::kData:
    case FrameType::kGroupFail:
      return frame.bytes;
    default:
      return 0;
  }
}

std::string describe(const Tag& tag) {
  return "sequence " + std::to_string(tag.sequence) + ", chunk " + std::to_string(tag.chunk) + ", ordinal " +
         std::to_string(tag.ordinal) + ", channel " + std::to_string(tag.channel);
}

}  // namespace polyccl
