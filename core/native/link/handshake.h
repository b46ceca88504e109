// The handshake: how two processes show each other that they speak the same protocol and belong to the same job, before
// any frame.
//
//   dialer -> acceptor   HELLO      magic, version, byte order, both process ids, a nonce, a count,
//                        the name of a token
//   acceptor -> dialer   CHALLENGE  magic, version, byte order, a status, its process id, a nonce
//   dialer -> acceptor   PROOF      HMAC of all that was said, with the token
//   acceptor -> dialer   VERDICT    a status, and the acceptor's own HMAC
//
// The dialer proves itself first, so a stranger learns nothing. All messages have fixed sizes. The class only makes and
// reads bytes; the engine moves them and sets the deadline.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "link.h"
#include "sha256.h"

namespace polyccl {

enum class Refusal : uint16_t {
  kNone = 0,
  kVersion = 1,
  kByteOrder = 2,
  kUnknownToken = 3,  // may be known later: worth another try
  kWrongProcess = 4,
  kBadProof = 5,
  kYield = 6,    // both dialed at once, and the acceptor's own connection is to be used
  kClosing = 7,  // the acceptor is about to end
  kGarbage = 8,  // never sent: what came is no handshake
};

// A sentence for the error text.
std::string describe(Refusal refusal);

class Handshake {
 public:
  // Finds a registered token by its name; empty where there is none.
  using FindToken = std::function<std::optional<std::string>(const std::string& name)>;
  // Whether the acceptor wants the connection, asked once the dialer has proven itself. `connections` is how many the
  // dialer has had with the acceptor before: it tells a new connection after a loss from one that was begun before the
  // present one.
  using Admit = std::function<Refusal(const ProcessId& peer, uint64_t connections)>;

  static Handshake dial(const ProcessId& self, const ProcessId& peer, const std::string& token, uint64_t connections);
  static Handshake accept(const ProcessId& self, FindToken find, Admit admit);

  // Bytes to send next. The state may be kDone or kRefused and something still be left to send.
  std::string_view output() const { return std::string_view(output_).substr(sent_); }
  void sent(size_t bytes) { sent_ += bytes; }

  // How many bytes are to be read next; 0 once it is over.
  size_t wants() const { return wants_ - input_.size(); }
  void feed(std::string_view bytes);

  enum class State { kRunning, kDone, kRefused };
  State state() const { return state_; }
  Refusal refusal() const { return refusal_; }
  bool dialing() const { return dialing_; }
  const ProcessId& peer() const { return peer_; }  // certain once the state is kDone

 private:
  Handshake() = default;
  void read_hello();
  void read_challenge();
  void read_proof();
  void read_verdict();
  Refusal judge_hello(const ProcessId& expected, const std::string& token_name);
  void say(std::string bytes);
  void refuse(Refusal refusal);
  Digest proof(std::string_view role) const;

  enum class Step { kHello, kChallenge, kProof, kVerdict };
  bool dialing_ = false;
  Step step_ = Step::kHello;
  State state_ = State::kRunning;
  Refusal refusal_ = Refusal::kNone;
  ProcessId self_, peer_;
  std::string token_, input_, output_, transcript_;
  uint64_t connections_ = 0;
  size_t sent_ = 0, wants_ = 0;
  FindToken find_;
  Admit admit_;
};

// What a token is called on the wire. Says nothing useful about the token.
std::string token_name(const std::string& token);

// Bytes from the system's random source.
std::string random_bytes(size_t count);

}  // namespace polyccl
