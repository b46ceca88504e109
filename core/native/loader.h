// Loading of backend plugins: by absolute path, each in a scope of its own, never unloaded.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "call_thread.h"
#include "clock.h"
#include "error.h"
#include "polyccl/backend.h"
#include "types.h"

namespace polyccl {

// Where the lines go that plugins log; `path` is the plugin's file. The default prints errors and warnings to stderr.
// Called from any thread; must not throw.
using LogSink = void (*)(int32_t level, const std::string& path, const char* text);
void set_plugin_log(LogSink sink);  // nullptr: the default

// A loaded plugin. Lives as long as the process.
class Backend {
 public:
  // Load the plugin at this path, or give the one that was loaded from it (symbolic links are followed first). Throws
  // kBackendUnavailable with the path, what is wrong (not there, no symbol, another ABI: both numbers, the library's
  // own words) and what to do.
  static Backend& load(const std::string& path);

  const polyccl_backend& table() const {
    return table_;
  }  // clipped to what both sides know; entries that may be absent are null
  const std::string& name() const { return name_; }
  const std::string& path() const { return path_; }
  uint32_t flags() const { return table_.flags; }
  uint32_t abi() const { return table_.abi; }
  bool has(uint32_t flag) const { return (table_.flags & flag) != 0; }

  // The library's version in words, and the file it was loaded from ("" where it is linked into the plugin).
  std::string library_version() const;
  std::string library_file() const;
  std::string compatibility(int device) const;
  int device_count() const;

  // POLYCCL_CAN_* bits; 0 where the plugin cannot.
  uint32_t supports(Kind kind, Dtype dtype, Reduction reduction, uint32_t memory) const;
  uint32_t completion(Kind kind, uint32_t memory) const;

  // The plugin's words for the last failure; for comm == nullptr, of this thread.
  std::string last_error(polyccl_comm* comm) const;

  // Turn a result into an Error (`doing` is e.g. "all_reduce on communicator 'dp'"); does nothing for POLYCCL_OK.
  void check(polyccl_result result, polyccl_comm* comm, const std::string& doing) const;
  // The same, with the plugin's words for it.
  void check(polyccl_result result, std::string words, const std::string& doing) const;

  // Made by load() alone.
  struct Private {};
  Backend(Private, std::string path, const polyccl_backend& table);
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

 private:
  std::string path_, name_;
  polyccl_backend table_{};
  polyccl_device device_{};
};

// A store for polyccl_comm_config: what a plugin's bootstrap calls. Implemented over the store that the user gave.
class BootstrapStore {
 public:
  virtual ~BootstrapStore() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;  // throws Error
  virtual std::string get(const std::string& key, Deadline deadline) = 0;  // waits; throws Error
  virtual bool cancelled() const = 0;
};

struct CommConfig {
  int rank = 0, size = 1, device = -1;
  std::string name, interface, address;
  std::vector<std::string> hints;  // key, value, ...
  Deadline deadline = 0;
  std::shared_ptr<const polyccl_transport> transport;  // for POLYCCL_FLAG_TRANSPORT; null for a single rank
};

// A communicator of a plugin. One caller at a time, but for abort().
//
// The calls of a backend that may hang (POLYCCL_FLAG_MAY_HANG) are made on a thread of the communicator's own. Where
// one is not over by its deadline, or when abort() is called, it is given up: run() throws, the plugin's communicator
// is never touched again, and what the call was given must stay (memory_in_use()).
class BackendComm : public std::enable_shared_from_this<BackendComm> {
 public:
  // Blocks; throws Error. `interrupted` is asked now and then where the backend may hang, and ends the wait.
  BackendComm(Backend& backend, const CommConfig& config, BootstrapStore& store,
              const std::function<bool()>& interrupted = {});
  ~BackendComm();  // in good order, which takes what the plugin lets it take; after abort(), at once
  BackendComm(const BackendComm&) = delete;
  BackendComm& operator=(const BackendComm&) = delete;

  Backend& backend() const { return backend_; }

  // Issue one fused group and wait for it: inline and posted operations are done on the host when this returns,
  // stream-ordered ones are enqueued. Throws Error.
  void run(const std::vector<const polyccl_op*>& ops, const std::string& doing);

  // Throw the error that came after an operation was enqueued, if one did.
  void check_async(const std::string& doing) const;

  void abort() noexcept;

  // True once a call was given up: for as long as the process lives it may read and write all memory that run() was
  // ever given.
  bool memory_in_use() const { return thread_ && thread_->hangs(); }

 private:
  void create(const CommConfig& config, BootstrapStore& store, const std::function<bool()>& interrupted);
  void run_on_thread(const std::vector<const polyccl_op*>& ops, const std::string& doing);
  [[noreturn]] void give_up(CallThread::End end, const std::string& doing) const;

  Backend& backend_;
  const int size_;
  const std::shared_ptr<const polyccl_transport> transport_;  // outlives the plugin's communicator
  polyccl_comm* comm_ = nullptr;
  std::unique_ptr<CallThread> thread_;  // of a backend that may hang
};

}  // namespace polyccl
