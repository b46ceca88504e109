// Loading of backend plugins, and the thin C++ face of their C ABI.
//
// Nothing of a plugin is trusted before it is checked, and no C++ exception crosses into one: callbacks turn them into
// result codes.
#include "loader.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <list>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "log.h"
#include "reduce.h"
#include "results.h"

namespace polyccl {
namespace {

constexpr size_t kTextSize = 4096;           // of error texts and file names
constexpr size_t kLargestTable = 64 * 1024;  // a table that claims more is garbage

// ---------------------------------------------------------------------------------------------------------------------
// Text from a plugin
// ---------------------------------------------------------------------------------------------------------------------

// Length of the UTF-8 sequence at text[i], or 0 where it is malformed.
size_t sequence_length(const std::string& text, size_t i) {
  const auto lead = static_cast<unsigned char>(text[i]);
  const size_t length = lead < 0x80 ? 1 : (lead >> 5) == 6 ? 2 : (lead >> 4) == 14 ? 3 : (lead >> 3) == 30 ? 4 : 0;
  if (length == 0 || i + length > text.size()) return 0;
  uint32_t point = length == 1 ? lead : lead & (0x7Fu >> length);
  for (size_t k = 1; k < length; ++k) {
    const auto next = static_cast<unsigned char>(text[i + k]);
    if ((next & 0xC0) != 0x80) return 0;
    point = (point << 6) | (next & 0x3F);
  }
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = point >= 0xD800 && point <= 0xDFFF;
  return point < kSmallest[length] || surrogate || point > 0x10FFFF ? 0 : length;
}

// A plugin's buffer as valid UTF-8 in one line: Python refuses anything else.
std::string clean(const char* buffer, size_t size) {
  const std::string text(buffer, strnlen(buffer, size));
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const size_t length = sequence_length(text, i);
    if (length == 0) {
      out += '?';
    } else if (length == 1 && static_cast<unsigned char>(text[i]) < 0x20) {
      out += ' ';
    } else {
      out.append(text, i, length);
    }
    i += std::max<size_t>(length, 1);
  }
  out.erase(out.find_last_not_of(' ') + 1);
  return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// What a plugin is given: the host table, one for each plugin, so that its log lines carry its name
// ---------------------------------------------------------------------------------------------------------------------

void print_log(int32_t level, const std::string& path, const char* text) {
  write_log(level, path, text == nullptr ? "" : text);
}

std::atomic<LogSink> log_sink{print_log};

struct PluginHost {
  std::string path;
  polyccl_host table{};
};

extern "C" void host_log(void* ctx, int32_t level, const char* text) {
  try {
    log_sink.load()(level, static_cast<PluginHost*>(ctx)->path, text != nullptr ? text : "");
  } catch (...) {  // a lost line of log is no reason to end the process
  }
}

extern "C" polyccl_result host_reduce(void*, void* output, const void* a, const void* b, uint64_t n, uint32_t dtype,
                                      uint32_t reduction) {
  try {
    if (reduction == POLYCCL_REDUCTION_AVG || reduction == POLYCCL_REDUCTION_PREMUL_SUM)
      return POLYCCL_ERROR_UNSUPPORTED;
    if (!can_reduce(dtype, reduction)) return POLYCCL_ERROR_UNSUPPORTED;
    if (n == 0) return POLYCCL_OK;
    if (output == nullptr || a == nullptr || b == nullptr) return POLYCCL_ERROR_INVALID;
    const void* operands[] = {a, b};
    reduce(output, operands, n, dtype, reduction);
    return POLYCCL_OK;
  } catch (const Error& e) {
    return e.code() == Code::kUnsupportedOperation ? POLYCCL_ERROR_UNSUPPORTED : POLYCCL_ERROR_INTERNAL;
  } catch (...) {
    return POLYCCL_ERROR_INTERNAL;
  }
}

// The host table for the plugin at `path`; valid for as long as the process lives, whether loading succeeds or not.
const polyccl_host* host_for(const std::string& path) {
  // Under the loader's mutex; nodes never move. Never destroyed: threads of plugins may log until the process ends.
  static auto& hosts = *std::make_unique<std::map<std::string, PluginHost>>().release();
  PluginHost& host = hosts[path];
  host.path = path;
  host.table = {sizeof(polyccl_host), POLYCCL_ABI, &host, host_log, host_reduce};
  return &host.table;
}

// ---------------------------------------------------------------------------------------------------------------------
// Checks of a plugin
// ---------------------------------------------------------------------------------------------------------------------

[[noreturn]] void refuse(const std::string& path, const std::string& why, const std::string& advice) {
  throw Error(Code::kBackendUnavailable, "cannot load the backend plugin '" + path + "': " + why + ". " + advice);
}

std::string version_text(uint32_t abi) { return std::to_string(abi >> 16) + "." + std::to_string(abi & 0xFFFF); }

std::string real_path(const std::string& path) {
  char* resolved = ::realpath(path.c_str(), nullptr);
  if (resolved == nullptr) refuse(path, std::strerror(errno), "Give the path of a plugin's shared library.");
  std::string result(resolved);
  std::free(resolved);
  return result;
}

polyccl_backend_query_fn open_plugin(const std::string& path) {
  // A scope of its own: what the plugin links is not offered to others, nor are two libraries' equal names mixed up.
  void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* words = ::dlerror();
    refuse(path, words != nullptr ? words : "dlopen failed",
           "If it names a library that is missing, install that; else rebuild the plugin for this machine.");
  }
  void* symbol = ::dlsym(handle, "polyccl_backend_query");
  if (symbol == nullptr) {
    refuse(path, "it does not export polyccl_backend_query",
           "It is no PolyCCL plugin, or was linked without exporting its one symbol (see polyccl/backend.h).");
  }
  return reinterpret_cast<polyccl_backend_query_fn>(symbol);
}

void check_version(const std::string& path, uint32_t abi) {
  if ((abi >> 16) == POLYCCL_ABI_MAJOR) return;
  refuse(
      path,
      "it speaks version " + version_text(abi) + " of the plugin ABI, and this PolyCCL speaks " +
          version_text(POLYCCL_ABI),
      "Rebuild the plugin from this version's polyccl/backend.h, or install a PolyCCL of the plugin's major version.");
}

// A copy of `source` with what both sides know; the rest is zero. Both begin with struct_size.
template <typename Table>
Table clip(const Table* source) {
  Table copy{};
  std::memcpy(static_cast<void*>(&copy), source, std::min<size_t>(source->struct_size, sizeof(Table)));
  copy.struct_size = sizeof(Table);
  return copy;
}

const char* missing_entry(const polyccl_backend& t) {
  const std::pair<const char*, bool> entries[] = {
      {"library", t.library != nullptr},
      {"compatibility", t.compatibility != nullptr},
      {"device_count", t.device_count != nullptr},
      {"supports", t.supports != nullptr},
      {"completion", t.completion != nullptr},
      {"comm_create", t.comm_create != nullptr},
      {"issue", t.issue != nullptr},
      {"request_wait", t.request_wait != nullptr},
      {"abort", t.abort != nullptr},
      {"comm_destroy", t.comm_destroy != nullptr},
      {"last_error", t.last_error != nullptr},
  };
  for (const auto& [name, present] : entries) {
    if (!present) return name;
  }
  return nullptr;
}

// What the plugin said about refusing this host, where its table can be read at all.
std::string refusal_words(const polyccl_backend* table) {
  if (table == nullptr || table->struct_size > kLargestTable || !POLYCCL_HAS(table, last_error)) return "";
  if ((table->abi >> 16) != POLYCCL_ABI_MAJOR || table->last_error == nullptr) return "";
  char text[kTextSize] = "";
  table->last_error(nullptr, text, sizeof text);
  return clean(text, sizeof text);
}

void check_table(const std::string& path, const polyccl_backend* table) {
  const std::string advice = "The plugin is broken: report it to its vendor.";
  if (table == nullptr) refuse(path, "polyccl_backend_query() gave no table", advice);
  constexpr size_t kHead = 2 * sizeof(uint32_t);
  if (table->struct_size < kHead || table->struct_size > kLargestTable) {
    refuse(path, "its table claims a size of " + std::to_string(table->struct_size) + " bytes", advice);
  }
  check_version(path, table->abi);
  const polyccl_backend known = clip(table);
  if (known.name == nullptr || known.name[0] == '\0') refuse(path, "its table has no name", advice);
  if (const char* entry = missing_entry(known)) {
    refuse(path, std::string("its table has no ") + entry + "(), which every backend must have", advice);
  }
}

// Run the plugin's query and check what it gives.
const polyccl_backend* query(const std::string& path, polyccl_backend_query_fn function) {
  const polyccl_backend* table = nullptr;
  const polyccl_result result = function(POLYCCL_ABI, host_for(path), &table);
  if (result == POLYCCL_OK) {
    check_table(path, table);
    return table;
  }
  if (table != nullptr && table->struct_size >= 2 * sizeof(uint32_t)) check_version(path, table->abi);
  const std::string words = refusal_words(table);
  refuse(
      path, "it refused this PolyCCL with result " + std::to_string(result) + (words.empty() ? "" : ": " + words),
      "Install what it asks for, or a plugin for this version (" + version_text(POLYCCL_ABI) + " of the plugin ABI).");
}

// ---------------------------------------------------------------------------------------------------------------------
// A BootstrapStore as a polyccl_store
// ---------------------------------------------------------------------------------------------------------------------

struct StoreBridge {
  explicit StoreBridge(BootstrapStore& s) : store(&s) {}

  // A creation that was given up finds no store any more. Waits for a call of the store that is under way.
  void close() {
    const std::lock_guard lock(calling);
    store = nullptr;
  }

  // Run `body`, keeping the text of what it throws: the plugin only gets a code.
  template <typename Body>
  polyccl_result guarded(const char* doing, const char* key, Body body) noexcept {
    try {
      const std::lock_guard lock(calling);
      if (store == nullptr) return POLYCCL_ERROR_ABORTED;
      return body(*store);
    } catch (const Error& e) {
      note(doing, key, e.what());
      return result_of(e.code());
    } catch (const std::exception& e) {
      note(doing, key, e.what());
      return POLYCCL_ERROR_INTERNAL;
    } catch (...) {
      note(doing, key, "unknown exception");
      return POLYCCL_ERROR_INTERNAL;
    }
  }

  void note(const char* doing, const char* key, const char* what) noexcept {
    try {
      const std::lock_guard lock(mutex);
      if (failure.empty()) failure = std::string("the store could not ") + doing + " '" + key + "': " + what;
    } catch (...) {  // without memory for the text the code alone must do
    }
  }

  std::mutex calling;
  BootstrapStore* store;
  std::mutex mutex;
  std::string failure;
};

extern "C" polyccl_result store_set(void* ctx, const char* key, const void* value, uint64_t size) {
  auto* bridge = static_cast<StoreBridge*>(ctx);
  return bridge->guarded("set", key, [&](BootstrapStore& store) {
    store.set(key, std::string(static_cast<const char*>(value), size));
    return POLYCCL_OK;
  });
}

extern "C" polyccl_result store_get(void* ctx, const char* key, void* value, uint64_t capacity, uint64_t* size,
                                    int64_t deadline) {
  auto* bridge = static_cast<StoreBridge*>(ctx);
  return bridge->guarded("get", key, [&](BootstrapStore& store) {
    const std::string found = store.get(key, deadline);
    if (size != nullptr) *size = found.size();
    if (capacity != 0) std::memcpy(value, found.data(), std::min<uint64_t>(found.size(), capacity));
    return found.size() > capacity ? POLYCCL_ERROR_INVALID : POLYCCL_OK;
  });
}

extern "C" int32_t store_cancelled(void* ctx) {
  auto* bridge = static_cast<StoreBridge*>(ctx);
  try {
    const std::lock_guard lock(bridge->calling);
    return bridge->store == nullptr || bridge->store->cancelled() ? 1 : 0;
  } catch (...) {
    return 1;
  }
}

const char* or_null(const std::string& text) { return text.empty() ? nullptr : text.c_str(); }

}  // namespace

void set_plugin_log(LogSink sink) { log_sink = sink != nullptr ? sink : print_log; }

// ---------------------------------------------------------------------------------------------------------------------
// Backend
// ---------------------------------------------------------------------------------------------------------------------

Backend::Backend(Private, std::string path, const polyccl_backend& table)
    : path_(std::move(path)), name_(table.name), table_(clip(&table)) {
  if (table_.device == nullptr) return;
  device_ = clip(table_.device);
  table_.device = &device_;
}

Backend& Backend::load(const std::string& path) {
  static std::mutex mutex;
  // Never destroyed: a thread that was left behind with a call may use it until the process ends.
  static auto& loaded = *std::make_unique<std::map<std::string, std::unique_ptr<Backend>>>().release();
  const std::string real = real_path(path);
  const std::lock_guard lock(mutex);
  auto& backend = loaded[real];
  if (!backend) backend = std::make_unique<Backend>(Private{}, real, *query(real, open_plugin(real)));
  return *backend;
}

std::string Backend::library_version() const {
  char version[kTextSize] = "", file[kTextSize] = "";
  check(table_.library(version, sizeof version, file, sizeof file), nullptr, "asking for the library's version");
  return clean(version, sizeof version);
}

std::string Backend::library_file() const {
  char version[kTextSize] = "", file[kTextSize] = "";
  check(table_.library(version, sizeof version, file, sizeof file), nullptr, "asking for the library's file");
  return clean(file, sizeof file);
}

std::string Backend::compatibility(int device) const {
  char key[kTextSize] = "";
  check(table_.compatibility(device, key, sizeof key), nullptr, "asking which libraries it can talk to");
  return clean(key, sizeof key);
}

int Backend::device_count() const {
  int32_t count = 0;
  check(table_.device_count(&count), nullptr, "counting devices");
  return count;
}

uint32_t Backend::supports(Kind kind, Dtype dtype, Reduction reduction, uint32_t memory) const {
  return table_.supports(kind, dtype, reduction, memory);
}

uint32_t Backend::completion(Kind kind, uint32_t memory) const { return table_.completion(kind, memory); }

std::string Backend::last_error(polyccl_comm* comm) const {
  char text[kTextSize] = "";
  table_.last_error(comm, text, sizeof text);
  return clean(text, sizeof text);
}

void Backend::check(polyccl_result result, polyccl_comm* comm, const std::string& doing) const {
  if (result != POLYCCL_OK) check(result, last_error(comm), doing);
}

void Backend::check(polyccl_result result, std::string words, const std::string& doing) const {
  if (result == POLYCCL_OK) return;
  const Meaning meaning = meaning_of(result);
  if (words.empty()) words = "it gave result " + std::to_string(result) + " and no words";
  const std::string advice = meaning.advice[0] == '\0' ? "" : std::string(". ") + meaning.advice;
  throw Error(meaning.code, doing + ": backend '" + name_ + "' " + meaning.what + " (" + words + ")" + advice);
}

// ---------------------------------------------------------------------------------------------------------------------
// BackendComm
// ---------------------------------------------------------------------------------------------------------------------

namespace {

// A creation, with all that the plugin is given: it may outlive the one who asked for it.
struct Creation {
  Creation(const CommConfig& given, BootstrapStore& s) : config(given), bridge(s) {
    for (const std::string& hint : config.hints) hints.push_back(hint.c_str());
    hints.push_back(nullptr);
    c.struct_size = sizeof c;
    c.rank = config.rank;
    c.size = config.size;
    c.device = config.device;
    c.name = config.name.c_str();
    c.store = &c_store;
    c.interface = or_null(config.interface);
    c.address = or_null(config.address);
    c.hints = hints.data();
    c.deadline = config.deadline;
    c.transport = config.transport.get();
  }
  Creation(const Creation&) = delete;
  Creation& operator=(const Creation&) = delete;

  void run(const Backend& backend) {
    result = backend.table().comm_create(&c, &comm);
    if (result != POLYCCL_OK) words = backend.last_error(nullptr);  // of this thread
    if (result == POLYCCL_OK && comm == nullptr) result = POLYCCL_ERROR_INTERNAL;
  }

  const CommConfig config;
  StoreBridge bridge;
  const polyccl_store c_store = {sizeof(polyccl_store), 0, &bridge, store_set, store_get, store_cancelled};
  std::vector<const char*> hints;
  polyccl_comm_config c{};
  polyccl_comm* comm = nullptr;
  polyccl_result result = POLYCCL_OK;
  std::string words;
};

bool is_ragged(uint32_t kind) {
  return kind == POLYCCL_KIND_ALL_GATHER_V || kind == POLYCCL_KIND_REDUCE_SCATTER_V ||
         kind == POLYCCL_KIND_ALL_TO_ALL_V;
}

// One group of operations, with all but the data that they are about.
struct Issue {
  Issue(const std::vector<const polyccl_op*>& given, int size) {
    for (const polyccl_op* op : given) {
      ops.push_back(*op);
      own_counts(ops.back().counts, is_ragged(op->kind), size);
      own_counts(ops.back().output_counts, op->kind == POLYCCL_KIND_ALL_TO_ALL_V, size);
      if (op->reduction != POLYCCL_REDUCTION_PREMUL_SUM) ops.back().factor = nullptr;
      if (op->factor != nullptr && ops.back().factor != nullptr && op->factor_memory == POLYCCL_MEMORY_HOST) {
        const auto* bytes = static_cast<const std::byte*>(op->factor);
        factors.emplace_back(bytes, bytes + dtype_size(op->dtype));
        ops.back().factor = factors.back().data();
      }
      if (op->deadline != 0 && (deadline == 0 || op->deadline < deadline)) deadline = op->deadline;
    }
    for (const polyccl_op& op : ops) pointers.push_back(&op);
  }
  Issue(const Issue&) = delete;
  Issue& operator=(const Issue&) = delete;

  void run(const Backend& backend, polyccl_comm* comm) {
    const polyccl_backend& table = backend.table();
    polyccl_request* request = nullptr;
    result = table.issue(comm, pointers.data(), static_cast<uint32_t>(pointers.size()), &request);
    if (request != nullptr) {  // also after an error: the wait is what frees it
      const polyccl_result waited = table.request_wait(comm, request);
      if (result == POLYCCL_OK) result = waited;
    }
    if (result != POLYCCL_OK) words = backend.last_error(comm);
  }

  Deadline deadline = 0;  // the first of the operations'
  polyccl_result result = POLYCCL_OK;
  std::string words;

 private:
  void own_counts(const uint64_t*& counts, bool used, int size) {
    if (!used || counts == nullptr) {
      counts = nullptr;
      return;
    }
    owned_counts.emplace_back(counts, counts + size);
    counts = owned_counts.back().data();
  }

  std::vector<polyccl_op> ops;
  std::vector<const polyccl_op*> pointers;
  std::list<std::vector<uint64_t>> owned_counts;
  std::list<std::vector<std::byte>> factors;
};

}  // namespace

BackendComm::BackendComm(Backend& backend, const CommConfig& config, BootstrapStore& store,
                         const std::function<bool()>& interrupted)
    : backend_(backend), size_(config.size), transport_(config.transport) {
  if (backend.has(POLYCCL_FLAG_MAY_HANG)) thread_ = std::make_unique<CallThread>();
  create(config, store, interrupted);
}

void BackendComm::create(const CommConfig& config, BootstrapStore& store, const std::function<bool()>& interrupted) {
  auto creation = std::make_shared<Creation>(config, store);
  std::string doing = "creating communicator '" + config.name + "' (rank " + std::to_string(config.rank) + " of " +
                      std::to_string(config.size) + ")";
  if (thread_) {
    const auto call = [creation, &backend = backend_] { creation->run(backend); };
    const auto end = thread_->run(call, config.deadline, interrupted);
    if (end != CallThread::End::kDone) {
      creation->bridge.close();
      give_up(end, doing);
    }
  } else {
    creation->run(backend_);
  }
  comm_ = creation->result == POLYCCL_OK ? creation->comm : nullptr;
  if (!creation->bridge.failure.empty()) doing += ": " + creation->bridge.failure;
  backend_.check(creation->result, creation->words, doing);
}

BackendComm::~BackendComm() {
  if (comm_ == nullptr) return;
  const polyccl_backend& table = backend_.table();
  if (!thread_) {
    // In good order, so that work that was enqueued comes to its end; at once where abort() was called.
    (void)table.comm_destroy(comm_);
    return;
  }
  // After an abort it stays: taking it apart could hang as well.
  constexpr int64_t kPatience = 5'000'000'000;
  (void)thread_->run([&table, comm = comm_] { (void)table.comm_destroy(comm); }, now_ns() + kPatience);
}

void BackendComm::run(const std::vector<const polyccl_op*>& ops, const std::string& doing) {
  if (thread_) return run_on_thread(ops, doing);
  const polyccl_backend& table = backend_.table();
  polyccl_request* request = nullptr;
  polyccl_result result = table.issue(comm_, ops.data(), static_cast<uint32_t>(ops.size()), &request);
  if (request != nullptr) {  // also after an error: the wait is what frees it
    const polyccl_result waited = table.request_wait(comm_, request);
    if (result == POLYCCL_OK) result = waited;
  }
  backend_.check(result, comm_, doing);
}

void BackendComm::check_async(const std::string& doing) const {
  const polyccl_backend& table = backend_.table();
  if (table.async_error != nullptr) backend_.check(table.async_error(comm_), comm_, doing);
}

void BackendComm::run_on_thread(const std::vector<const polyccl_op*>& ops, const std::string& doing) {
  const auto issue = std::make_shared<Issue>(ops, size_);
  const auto end =
      thread_->run([issue, &backend = backend_, comm = comm_] { issue->run(backend, comm); }, issue->deadline);
  if (end != CallThread::End::kDone) give_up(end, doing);
  backend_.check(issue->result, issue->words, doing);
}

void BackendComm::give_up(CallThread::End end, const std::string& doing) const {
  const std::string what = doing + ": backend '" + backend_.name() + "' ";
  if (end == CallThread::End::kTimeout) {
    throw Error(Code::kTimeout, what +
                                    "did not return by the deadline, and its call was given up. See whether every "
                                    "rank makes this call, or give it a longer timeout");
  }
  throw Error(Code::kAborted, what + (end == CallThread::End::kInterrupted ? "was interrupted" : "was aborted") +
                                  ", and its call was given up. Make a new communicator");
}

void BackendComm::abort() noexcept {
  if (thread_) thread_->give_up();
  if (comm_ != nullptr) (void)backend_.table().abort(comm_);
}

}  // namespace polyccl
