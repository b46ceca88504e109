// A connection: one TCP stream after its handshake. Puts frames on the wire in order, control and small messages before
// the next segment of a large one, and takes them off, payload straight into its place. Knows nothing of matching; the
// Sink does.
//
// Guarded by the engine's lock. Never blocks.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "frame.h"
#include "request.h"
#include "socket.h"

namespace polyccl {

// Where the payload of a frame goes: to a request, a slot, or (neither) nowhere.
struct Landing {
  std::shared_ptr<Request> request;
  std::byte* memory = nullptr;  // of the request, at the right offset
  std::unique_ptr<std::byte[]> slot;
};

// What a connection reports. May throw std::runtime_error for a frame that breaks the protocol.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void credits(uint32_t slots, uint32_t bytes) = 0;      // came with a header
  virtual Landing land(const Frame& frame) = 0;                  // payload follows: where to?
  virtual void landed(const Frame& frame, Landing landing) = 0;  // it is there
  virtual void control(const Frame& frame, const std::string& text) = 0;
  virtual void sent(const std::shared_ptr<Request>& request) = 0;  // all its bytes are with the kernel
};

class Connection {
 public:
  Connection(Fd fd, int epoll, uint64_t id, Sink& sink);

  uint64_t id() const { return id_; }
  int fd() const { return fd_.get(); }

  // Queue, and write what the socket takes. `send_eager` and `send_large` report the end by Sink::sent, perhaps before
  // they return.
  void send_control(const Frame& frame, std::string text = {});
  void send_eager(const std::shared_ptr<Request>& request);
  void send_large(const std::shared_ptr<Request>& request);

  // Credits to give back with the next header, whichever that is.
  void give_back(uint32_t slots, uint32_t bytes);
  uint32_t owed_slots() const { return slots_back_; }
  uint32_t owed_bytes() const { return bytes_back_; }

  // Forget a request: nothing reads or writes its memory after this. Returns true where nothing of an eager message had
  // gone out yet, so that its slot is still free.
  bool abandon(const Request* request);

  // Drop what is queued and not begun, then say goodbye.
  void close_orderly();
  void shut_down_writing();  // once it is quiet

  void flush();    // what the socket takes now
  void receive();  // what has come; bounded, so that connections take turns

  // Not 0: the connection is broken, by this error of the system, or kEof, or kProtocol (see why()).
  static constexpr int kEof = -1, kProtocol = -2;
  int broken() const { return broken_; }
  std::string why() const;
  bool quiet() const { return active_.empty() && urgent_.empty() && large_.empty(); }

  uint64_t wire_sent = 0, wire_received = 0, payload_sent = 0, payload_received = 0;

 private:
  struct Queued {
    Frame frame;
    std::shared_ptr<Request> request;
    std::string text;
  };
  struct Outgoing {  // begun, or next in line: its header is fixed
    Header header;
    const std::byte* payload = nullptr;
    size_t bytes = 0;  // of the payload
    size_t gone = 0;   // of header and payload
    bool message = false;
    std::shared_ptr<Request> request;  // ends with this frame, where `last`
    bool last = false;
    std::vector<std::byte> copy;  // the payload, where its owner has gone
    std::string text;
  };

  Outgoing begin(Queued queued);
  Outgoing begin_segment();
  void fill();
  bool write_some(size_t* budget);
  void advance(size_t bytes);
  bool read_some(size_t* budget);
  void parse();
  void start(const Frame& frame);
  void finish_payload();
  void want_write(bool on);
  void fail(int error, std::string why = {});

  Fd fd_;
  const int epoll_;
  const uint64_t id_;
  Sink& sink_;
  int broken_ = 0, write_error_ = 0;
  std::string why_;
  bool writing_ = false;  // the poller waits for room in the socket
  uint32_t slots_back_ = 0, bytes_back_ = 0;

  std::deque<Outgoing> active_;
  std::deque<Queued> urgent_;
  std::deque<std::shared_ptr<Request>> large_;

  std::vector<std::byte> buffer_;  // read, not parsed: [begin_, end_)
  size_t begin_ = 0, end_ = 0;
  bool in_payload_ = false;
  Frame frame_;
  Landing landing_;
  size_t got_ = 0;  // of the payload
  std::string text_;
  std::vector<std::byte> nowhere_;
};

}  // namespace polyccl
