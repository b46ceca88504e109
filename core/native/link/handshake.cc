#include "handshake.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "frame.h"

namespace polyccl {
namespace {

constexpr std::string_view kMagic = "PolyCCL\n";
constexpr uint16_t kVersion = 1;
constexpr uint16_t kByteOrder = 0x0102;
constexpr size_t kNonceBytes = 32;
constexpr size_t kNameBytes = 16;
constexpr size_t kPreambleBytes = 8 + 4 * 2;
constexpr size_t kHelloBytes = kPreambleBytes + 16 + 16 + kNonceBytes + 8 + kNameBytes;
constexpr size_t kChallengeBytes = kPreambleBytes + 16 + kNonceBytes;
constexpr size_t kProofBytes = 32;
constexpr size_t kVerdictBytes = 2 + kProofBytes;

template <class T>
void put(std::string& out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

void put(std::string& out, const ProcessId& id) {
  put(out, id.hi);
  put(out, id.lo);
}

template <class T>
T get(std::string_view in, size_t at) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= uint64_t{static_cast<uint8_t>(in[at + i])} << (8 * i);
  return static_cast<T>(value);
}

ProcessId get_id(std::string_view in, size_t at) { return {get<uint64_t>(in, at), get<uint64_t>(in, at + 8)}; }

// Magic, version, this machine's byte order, and two numbers: header size and stream in a HELLO, status and 0 in a
// CHALLENGE. The payload is not converted, so both must have one byte order.
std::string preamble(uint16_t first, uint16_t second) {
  std::string out(kMagic);
  put(out, kVersion);
  char order[2];
  std::memcpy(order, &kByteOrder, 2);
  out.append(order, 2);
  put(out, first);
  put(out, second);
  return out;
}

bool has_magic(std::string_view in) { return in.substr(0, kMagic.size()) == kMagic; }

uint16_t order_mark(std::string_view in) {
  uint16_t mark;
  std::memcpy(&mark, in.data() + 10, 2);
  return mark;
}

std::string text(const Digest& digest) { return {reinterpret_cast<const char*>(digest.data()), digest.size()}; }

bool same(const Digest& expected, std::string_view got) {
  Digest other;
  std::memcpy(other.data(), got.data(), other.size());
  return equal_digests(expected, other);
}

}  // namespace

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  size_t have = 0;
  while (have < count) {
    const ssize_t n = getrandom(bytes.data() + have, count - have, 0);
    if (n < 0 && errno != EINTR)
      throw Error(Code::kInternal, "the system gives no random numbers: " + std::string(strerror(errno)));
    if (n > 0) have += static_cast<size_t>(n);
  }
  return bytes;
}

std::string token_name(const std::string& token) {
  return text(hmac_sha256(token, "polyccl token name")).substr(0, kNameBytes);
}

std::string describe(Refusal refusal) {
  switch (refusal) {
    case Refusal::kNone:
      return "not refused";
    case Refusal::kVersion:
      return "it speaks another version of the link protocol (install the same PolyCCL everywhere)";
    case Refusal::kByteOrder:
      return "its machine has another byte order";
    case Refusal::kUnknownToken:
      return "it does not know this job's token (it belongs to another job, or has not joined this one)";
    case Refusal::kWrongProcess:
      return "another process answers at its address (the expected one has most likely ended)";
    case Refusal::kBadProof:
      return "the proof of the job's token is wrong";
    case Refusal::kYield:
      return "it uses a connection of its own";
    case Refusal::kClosing:
      return "it is about to end";
    case Refusal::kGarbage:
      return "what answers at its address does not speak the link protocol";
  }
  return "it refuses for an unknown reason";
}

Handshake Handshake::dial(const ProcessId& self, const ProcessId& peer, const std::string& token,
                          uint64_t connections) {
  Handshake h;
  h.dialing_ = true;
  h.self_ = self;
  h.peer_ = peer;
  h.token_ = token;
  std::string hello = preamble(kHeaderBytes, 0);
  put(hello, self);
  put(hello, peer);
  hello += random_bytes(kNonceBytes);
  put(hello, connections);
  hello += token_name(token);
  h.transcript_ = hello;
  h.say(std::move(hello));
  h.step_ = Step::kChallenge;
  h.wants_ = kChallengeBytes;
  return h;
}

Handshake Handshake::accept(const ProcessId& self, FindToken find, Admit admit) {
  Handshake h;
  h.self_ = self;
  h.find_ = std::move(find);
  h.admit_ = std::move(admit);
  h.step_ = Step::kHello;
  h.wants_ = kHelloBytes;
  return h;
}

void Handshake::say(std::string bytes) {
  output_.erase(0, sent_);
  sent_ = 0;
  output_ += bytes;
}

void Handshake::refuse(Refusal refusal) {
  state_ = State::kRefused;
  refusal_ = refusal;
  wants_ = 0;
  input_.clear();
}

Digest Handshake::proof(std::string_view role) const {
  return hmac_sha256(token_, std::string("polyccl ") + std::string(role) + transcript_);
}

void Handshake::feed(std::string_view bytes) {
  input_ += bytes.substr(0, wants());
  // Garbage is told from its first bytes, not after waiting for the rest.
  if ((step_ == Step::kHello || step_ == Step::kChallenge) &&
      input_.compare(0, kMagic.size(), kMagic.substr(0, input_.size())) != 0) {
    return refuse(Refusal::kGarbage);
  }
  if (state_ != State::kRunning || wants() > 0) return;
  switch (step_) {
    case Step::kHello:
      return read_hello();
    case Step::kChallenge:
      return read_challenge();
    case Step::kProof:
      return read_proof();
    case Step::kVerdict:
      return read_verdict();
  }
}

Refusal Handshake::judge_hello(const ProcessId& expected, const std::string& token_name) {
  if (get<uint16_t>(input_, 8) != kVersion || get<uint16_t>(input_, 12) != kHeaderBytes) return Refusal::kVersion;
  if (order_mark(input_) != kByteOrder) return Refusal::kByteOrder;
  if (expected != self_ || peer_ == self_) return Refusal::kWrongProcess;
  const auto token = find_(token_name);
  if (!token) return Refusal::kUnknownToken;
  token_ = *token;
  return Refusal::kNone;
}

void Handshake::read_hello() {
  if (!has_magic(input_)) return refuse(Refusal::kGarbage);
  peer_ = get_id(input_, kPreambleBytes);
  connections_ = get<uint64_t>(input_, kHelloBytes - kNameBytes - 8);
  const ProcessId expected = get_id(input_, kPreambleBytes + 16);
  const Refusal refusal = judge_hello(expected, input_.substr(kHelloBytes - kNameBytes, kNameBytes));
  std::string challenge = preamble(static_cast<uint16_t>(refusal), 0);
  put(challenge, self_);
  challenge += random_bytes(kNonceBytes);
  transcript_ = input_ + challenge;
  say(std::move(challenge));
  if (refusal != Refusal::kNone) return refuse(refusal);
  input_.clear();
  step_ = Step::kProof;
  wants_ = kProofBytes;
}

void Handshake::read_challenge() {
  if (!has_magic(input_)) return refuse(Refusal::kGarbage);
  if (get<uint16_t>(input_, 8) != kVersion) return refuse(Refusal::kVersion);
  if (order_mark(input_) != kByteOrder) return refuse(Refusal::kByteOrder);
  const auto status = static_cast<Refusal>(get<uint16_t>(input_, 12));
  if (status != Refusal::kNone) return refuse(status);
  if (get_id(input_, kPreambleBytes) != peer_) return refuse(Refusal::kWrongProcess);
  transcript_ += input_;
  input_.clear();
  say(text(proof("dialer")));
  step_ = Step::kVerdict;
  wants_ = kVerdictBytes;
}

void Handshake::read_proof() {
  Refusal refusal = same(proof("dialer"), input_) ? Refusal::kNone : Refusal::kBadProof;
  const bool proven = refusal == Refusal::kNone;
  if (proven) refusal = admit_(peer_, connections_);
  std::string verdict;
  put(verdict, static_cast<uint16_t>(refusal));
  // A dialer that proved itself gets the proof with a refusal too, so that no one can refuse in this process's name.
  verdict += proven ? text(proof("acceptor" + verdict)) : std::string(kProofBytes, '\0');
  say(std::move(verdict));
  if (refusal != Refusal::kNone) return refuse(refusal);
  state_ = State::kDone;
  wants_ = 0;
  input_.clear();
}

void Handshake::read_verdict() {
  const auto status = static_cast<Refusal>(get<uint16_t>(input_, 0));
  if (!same(proof("acceptor" + input_.substr(0, 2)), input_.substr(2))) return refuse(Refusal::kBadProof);
  if (status != Refusal::kNone) return refuse(status);
  state_ = State::kDone;
  wants_ = 0;
  input_.clear();
}

}  // namespace polyccl
