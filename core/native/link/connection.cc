#include "connection.h"

#include <sys/epoll.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace polyccl {
namespace {

constexpr size_t kBufferBytes = 16 * 1024;  // a small message comes with its header in one call
constexpr size_t kCallBytes = 256 * 1024;   // most that one system call moves; bounds the time under the lock
constexpr size_t kTurnBytes = 512 * 1024;   // most that one turn moves each way
constexpr size_t kGather = 16;              // frames in one call
constexpr size_t kNowhereBytes = 64 * 1024;

}  // namespace

Connection::Connection(Fd fd, int epoll, uint64_t id, Sink& sink)
    : fd_(std::move(fd)), epoll_(epoll), id_(id), sink_(sink), buffer_(kBufferBytes) {
  want_write(false);
}

void Connection::want_write(bool on) {
  writing_ = on;
  epoll_event event{};
  event.events = on ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.u64 = id_;
  if (epoll_ctl(epoll_, EPOLL_CTL_MOD, fd_.get(), &event) != 0) write_error_ = errno;
}

void Connection::fail(int error, std::string why) {
  if (broken_ != 0) return;
  broken_ = error;
  why_ = std::move(why);
}

void Connection::shut_down_writing() { ::shutdown(fd_.get(), SHUT_WR); }

std::string Connection::why() const {
  if (broken_ == kEof && write_error_ != 0) return error_text(write_error_);
  if (broken_ == kEof) return "the connection was closed without a goodbye";
  if (broken_ == kProtocol) return "it sent " + why_;
  return error_text(broken_);
}

void Connection::give_back(uint32_t slots, uint32_t bytes) {
  slots_back_ += slots;
  bytes_back_ += bytes;
}

// ---- Outgoing ----

Connection::Outgoing Connection::begin(Queued queued) {
  queued.frame.credit_slots = static_cast<uint16_t>(std::exchange(slots_back_, 0));
  queued.frame.credit_bytes = std::exchange(bytes_back_, 0);
  Outgoing out;
  out.header = encode(queued.frame);
  out.text = std::move(queued.text);
  out.bytes = payload_bytes(queued.frame);
  if (queued.request) {
    out.payload = queued.request->memory;
    out.request = std::move(queued.request);
    out.last = true;
    out.message = true;
  }
  return out;
}

Connection::Outgoing Connection::begin_segment() {
  const std::shared_ptr<Request> request = large_.front();
  Frame frame;
  frame.type = FrameType::kData;
  frame.tag = request->tag;
  frame.other = request->moved;
  frame.bytes = std::min(kSegmentBytes, request->bytes - request->moved);
  Outgoing out = begin({frame, request, {}});
  out.payload += request->moved;
  request->moved += frame.bytes;
  out.last = request->moved == request->bytes;
  if (out.last) large_.pop_front();
  return out;
}

void Connection::send_control(const Frame& frame, std::string text) {
  urgent_.push_back({frame, nullptr, std::move(text)});
  if (!writing_) flush();
}

void Connection::send_eager(const std::shared_ptr<Request>& request) {
  Frame frame;
  frame.type = FrameType::kEager;
  frame.tag = request->tag;
  frame.bytes = request->bytes;
  frame.detail = request->fingerprint;
  urgent_.push_back({frame, request, {}});
  if (!writing_) flush();
}

void Connection::send_large(const std::shared_ptr<Request>& request) {
  large_.push_back(request);
  if (!writing_) flush();
}

// Chooses what goes next: all that is urgent, then one segment of a large message.
void Connection::fill() {
  size_t bytes = 0;
  for (const Outgoing& out : active_) bytes += kHeaderBytes + out.bytes - out.gone;
  while (active_.size() < kGather && bytes < kCallBytes && (!urgent_.empty() || !large_.empty())) {
    if (!urgent_.empty()) {
      Queued next = std::move(urgent_.front());
      urgent_.pop_front();
      active_.push_back(begin(std::move(next)));
      // Text lies in the frame itself, which moves no more once it is in the queue.
      if (!active_.back().message)
        active_.back().payload = reinterpret_cast<const std::byte*>(active_.back().text.data());
    } else {
      active_.push_back(begin_segment());
    }
    bytes += kHeaderBytes + active_.back().bytes;
  }
}

bool Connection::write_some(size_t* budget) {
  fill();
  if (active_.empty()) return false;
  std::array<iovec, 2 * kGather> parts;
  size_t count = 0, total = 0;
  for (Outgoing& out : active_) {
    if (count + 2 > parts.size() || total >= kCallBytes) break;
    const size_t header_gone = std::min(out.gone, kHeaderBytes), payload_gone = out.gone - header_gone;
    if (header_gone < kHeaderBytes) parts[count++] = {out.header.data() + header_gone, kHeaderBytes - header_gone};
    const size_t take = std::min(out.bytes - payload_gone, kCallBytes - total);
    if (take > 0) parts[count++] = {const_cast<std::byte*>(out.payload) + payload_gone, take};
    total += kHeaderBytes - header_gone + take;
  }
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = count;
  const ssize_t n = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n < 0) {
    if (errno == EINTR) return true;
    const bool full = errno == EAGAIN || errno == EWOULDBLOCK;
    // A loss is declared by the reading side, which first takes what the other side had to say.
    if (!full) write_error_ = errno;
    if (full != writing_) want_write(full);
    return false;
  }
  wire_sent += static_cast<uint64_t>(n);
  advance(static_cast<size_t>(n));
  *budget -= std::min(*budget, static_cast<size_t>(n));
  return true;
}

void Connection::advance(size_t bytes) {
  while (bytes > 0) {
    Outgoing& out = active_.front();
    const size_t take = std::min(bytes, kHeaderBytes + out.bytes - out.gone);
    out.gone += take;
    bytes -= take;
    if (out.gone < kHeaderBytes + out.bytes) return;
    if (out.message) payload_sent += out.bytes;
    const std::shared_ptr<Request> done = out.last ? std::move(out.request) : nullptr;
    active_.pop_front();
    if (done) sink_.sent(done);
  }
}

void Connection::flush() {
  if (write_error_ != 0) return;
  size_t budget = kTurnBytes;
  while (budget > 0) {
    if (write_some(&budget)) continue;
    if (writing_ && quiet()) want_write(false);
    return;
  }
  if (!writing_) want_write(true);  // the rest at the next turn
}

bool Connection::abandon(const Request* request) {
  const auto is_it = [&](const auto& entry) { return entry.request.get() == request; };
  const bool unsent = std::erase_if(urgent_, is_it) > 0;
  std::erase_if(large_, [&](const auto& entry) { return entry.get() == request; });
  for (Outgoing& out : active_) {
    if (!is_it(out)) continue;
    // The frame has been promised to the other side: finish it from a copy.
    out.copy.assign(out.payload, out.payload + out.bytes);
    out.payload = out.copy.data();
    out.request.reset();
    out.last = false;
  }
  if (landing_.request.get() == request) {
    landing_.request.reset();
    landing_.memory = nullptr;
  }
  return unsent;
}

void Connection::close_orderly() {
  std::erase_if(active_, [](const Outgoing& out) { return out.gone == 0; });
  urgent_.clear();
  large_.clear();
  Frame frame;
  frame.type = FrameType::kGoodbye;
  send_control(frame);
}

// ---- Incoming ----

void Connection::receive() {
  size_t budget = kTurnBytes;
  try {
    while (broken_ == 0 && budget > 0 && read_some(&budget)) {
    }
  } catch (const std::runtime_error& error) {
    fail(kProtocol, error.what());
  }
}

// Reads once and handles what came. False where the socket has no more for now.
bool Connection::read_some(size_t* budget) {
  std::array<iovec, 2> parts;
  int count = 0;
  size_t asked = 0;
  const size_t left = in_payload_ ? payload_bytes(frame_) - got_ : 0;
  if (left > 0) {
    std::byte* place = landing_.memory != nullptr ? landing_.memory + got_
                       : landing_.slot            ? landing_.slot.get() + got_
                                                  : nullptr;
    size_t most = std::min(left, kCallBytes);
    if (place == nullptr) {
      nowhere_.resize(kNowhereBytes);
      place = nowhere_.data();
      most = std::min(most, kNowhereBytes);
    }
    parts[static_cast<size_t>(count++)] = {place, most};
    asked += most;
  }
  if (asked == left) {  // what follows the payload comes along
    parts[static_cast<size_t>(count++)] = {buffer_.data() + end_, buffer_.size() - end_};
    asked += buffer_.size() - end_;
  }
  const ssize_t n = readv(fd_.get(), parts.data(), count);
  if (n < 0) {
    if (errno == EINTR) return true;
    if (errno != EAGAIN && errno != EWOULDBLOCK) fail(errno);
    return false;
  }
  if (n == 0) {
    fail(kEof);
    return false;
  }
  const auto bytes = static_cast<size_t>(n);
  wire_received += bytes;
  *budget -= std::min(*budget, bytes);
  const size_t direct = std::min(bytes, std::min(left, left > 0 ? parts[0].iov_len : 0));
  got_ += direct;
  end_ += bytes - direct;
  parse();
  return bytes == asked;
}

void Connection::parse() {
  while (true) {
    if (in_payload_) {
      const size_t take = std::min(payload_bytes(frame_) - got_, end_ - begin_);
      std::byte* place = landing_.memory != nullptr ? landing_.memory : landing_.slot.get();
      if (place != nullptr && take > 0) std::memcpy(place + got_, buffer_.data() + begin_, take);
      got_ += take;
      begin_ += take;
      if (got_ < payload_bytes(frame_)) break;
      finish_payload();
    } else if (end_ - begin_ >= kHeaderBytes) {
      const Frame frame = decode(buffer_.data() + begin_);
      begin_ += kHeaderBytes;
      start(frame);
    } else {
      break;
    }
  }
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
}

void Connection::start(const Frame& frame) {
  if (frame.credit_slots > 0 || frame.credit_bytes > 0) sink_.credits(frame.credit_slots, frame.credit_bytes);
  frame_ = frame;
  got_ = 0;
  switch (frame.type) {
    case FrameType::kEager:
    case FrameType::kData:
      landing_ = sink_.land(frame);
      in_payload_ = true;
      return;
    case FrameType::kGroupFail:
      landing_ = {};
      landing_.slot = std::make_unique<std::byte[]>(frame.bytes + 1);
      in_payload_ = true;
      return;
    default:
      sink_.control(frame, {});
  }
}

void Connection::finish_payload() {
  in_payload_ = false;
  Landing landing = std::move(landing_);
  landing_ = {};
  if (frame_.type == FrameType::kGroupFail) {
    sink_.control(frame_, std::string(reinterpret_cast<const char*>(landing.slot.get()), frame_.bytes));
    return;
  }
  payload_received += frame_.bytes;
  sink_.landed(frame_, std::move(landing));
}

}  // namespace polyccl
