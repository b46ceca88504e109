/* SPDX-License-Identifier: BSD-3-Clause
 *
 * polyccl/backend.h: the C ABI between PolyCCL and a backend, the plugin that adapts one collective library.
 *
 * This header is all that a vendor needs. It is C11 and C++17, depends on nothing, and carries no version of Python or torch:
 * a plugin is built once.
 *
 * A plugin is a shared library that exports exactly one symbol, polyccl_backend_query(); all else is hidden. No C++ type, no
 * exception and no abort() crosses this border.
 *
 * Versions
 *   The ABI has a major and a minor number. Another major is refused. A minor only appends: new fields at the end of structs,
 *   new entries at the end of tables, new enumerators. Values are never reused.
 *   Every struct that crosses begins with its size as its writer knew it. A reader reads no field that lies beyond that size: what
 *   is absent is zero, which always means the default. Arrays of structs cross as arrays of pointers.
 *   polyccl_op.required tells which appended fields must be understood: a plugin refuses an operation with bits it does not know
 *   (POLYCCL_ERROR_UNSUPPORTED), so that clipping never changes a result.
 *
 * Threads
 *   A communicator has one caller at a time; PolyCCL sees to that. Distinct communicators are used in parallel. abort() alone may
 *   be called from any thread at any time.
 *
 * Conventions
 *   Functions return a polyccl_result. `// out` marks what they write. Strings are UTF-8 and end with 0. Counts are elements, never
 *   bytes. Deadlines are absolute nanoseconds of CLOCK_MONOTONIC; 0 means none.
 */
#ifndef POLYCCL_BACKEND_H_
#define POLYCCL_BACKEND_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define POLYCCL_ABI_MAJOR 1u
#define POLYCCL_ABI_MINOR 2u
#define POLYCCL_ABI ((POLYCCL_ABI_MAJOR << 16) | POLYCCL_ABI_MINOR)

#if defined(__GNUC__)
#define POLYCCL_EXPORT __attribute__((visibility("default")))
#else
#define POLYCCL_EXPORT
#endif

/* True where the writer of *s knew `field`: read it only then. */
#define POLYCCL_HAS(s, field) ((s)->struct_size >= (size_t)((const char*)(&(s)->field + 1) - (const char*)(s)))

/* ------------------------------------------------------------------------------------------------------------------ *
 * Results
 * ------------------------------------------------------------------------------------------------------------------ */

typedef int32_t polyccl_result;

enum {
  POLYCCL_OK = 0,
  POLYCCL_ERROR_INVALID = 1,     /* an argument that no library could honour */
  POLYCCL_ERROR_UNSUPPORTED = 2, /* valid, but this library cannot do it */
  POLYCCL_ERROR_TIMEOUT = 3,     /* the deadline passed */
  POLYCCL_ERROR_PEER_LOST = 4,   /* another rank is gone */
  POLYCCL_ERROR_ABORTED = 5,     /* abort() was called */
  POLYCCL_ERROR_UNAVAILABLE = 6, /* the library or the device is not there */
  POLYCCL_ERROR_INTERNAL = 7,    /* the library failed; last_error() has its own words */
  POLYCCL_IN_PROGRESS = 8,       /* of request_test() only */
  POLYCCL_ERROR_MISMATCH = 9     /* since 1.2: ranks call unlike operations, or give unlike sizes */
};

/* ------------------------------------------------------------------------------------------------------------------ *
 * Data types. Each names one exact format; the two families of fp8 are distinct.
 * ------------------------------------------------------------------------------------------------------------------ */

enum {
  POLYCCL_DTYPE_BOOL = 1,
  POLYCCL_DTYPE_INT8 = 2,
  POLYCCL_DTYPE_UINT8 = 3,
  POLYCCL_DTYPE_INT16 = 4,
  POLYCCL_DTYPE_UINT16 = 5,
  POLYCCL_DTYPE_INT32 = 6,
  POLYCCL_DTYPE_UINT32 = 7,
  POLYCCL_DTYPE_INT64 = 8,
  POLYCCL_DTYPE_UINT64 = 9,
  POLYCCL_DTYPE_FLOAT16 = 10,
  POLYCCL_DTYPE_BFLOAT16 = 11,
  POLYCCL_DTYPE_FLOAT32 = 12,
  POLYCCL_DTYPE_FLOAT64 = 13,
  POLYCCL_DTYPE_COMPLEX64 = 14,  /* two float32 */
  POLYCCL_DTYPE_COMPLEX128 = 15, /* two float64 */
  POLYCCL_DTYPE_FLOAT8_E4M3FN = 16,
  POLYCCL_DTYPE_FLOAT8_E4M3FNUZ = 17,
  POLYCCL_DTYPE_FLOAT8_E5M2 = 18,
  POLYCCL_DTYPE_FLOAT8_E5M2FNUZ = 19,
  POLYCCL_DTYPE_FLOAT8_E8M0FNU = 20
};

/* Bytes of one element; 0 for a type that this header does not know. */
static inline uint32_t polyccl_dtype_size(uint32_t dtype) {
  switch (dtype) {
    case POLYCCL_DTYPE_BOOL:
    case POLYCCL_DTYPE_INT8:
    case POLYCCL_DTYPE_UINT8:
    case POLYCCL_DTYPE_FLOAT8_E4M3FN:
    case POLYCCL_DTYPE_FLOAT8_E4M3FNUZ:
    case POLYCCL_DTYPE_FLOAT8_E5M2:
    case POLYCCL_DTYPE_FLOAT8_E5M2FNUZ:
    case POLYCCL_DTYPE_FLOAT8_E8M0FNU:
      return 1;
    case POLYCCL_DTYPE_INT16:
    case POLYCCL_DTYPE_UINT16:
    case POLYCCL_DTYPE_FLOAT16:
    case POLYCCL_DTYPE_BFLOAT16:
      return 2;
    case POLYCCL_DTYPE_INT32:
    case POLYCCL_DTYPE_UINT32:
    case POLYCCL_DTYPE_FLOAT32:
      return 4;
    case POLYCCL_DTYPE_INT64:
    case POLYCCL_DTYPE_UINT64:
    case POLYCCL_DTYPE_FLOAT64:
    case POLYCCL_DTYPE_COMPLEX64:
      return 8;
    case POLYCCL_DTYPE_COMPLEX128:
      return 16;
    default:
      return 0;
  }
}

/* ------------------------------------------------------------------------------------------------------------------ *
 * Reductions
 * ------------------------------------------------------------------------------------------------------------------ */

enum {
  POLYCCL_REDUCTION_NONE = 0,
  POLYCCL_REDUCTION_SUM = 1,     /* on bool: or */
  POLYCCL_REDUCTION_PRODUCT = 2, /* on bool: and */
  POLYCCL_REDUCTION_MIN = 3,     /* NaN wins; on bool: and */
  POLYCCL_REDUCTION_MAX = 4,     /* NaN wins; on bool: or */
  POLYCCL_REDUCTION_BAND = 5,
  POLYCCL_REDUCTION_BOR = 6,
  POLYCCL_REDUCTION_BXOR = 7,
  POLYCCL_REDUCTION_AVG = 8,
  POLYCCL_REDUCTION_PREMUL_SUM = 9
};

/* ------------------------------------------------------------------------------------------------------------------ *
 * Kinds of operations, with what `count` means: the elements of one block. A side with blocks has one for each rank, adjacent, in
 * rank order. input and output may be the same memory in the layouts of NCCL (all_gather, gather: input is output block `rank`;
 * reduce_scatter, scatter: output is input block `rank`; the kinds of all_to_all: never; elsewhere both are the same); they never
 * overlap otherwise, and an input that is not also the output is never written.
 * ------------------------------------------------------------------------------------------------------------------ */

enum {
  POLYCCL_KIND_SEND = 1,             /* input -> peer */
  POLYCCL_KIND_RECV = 2,             /* output <- peer */
  POLYCCL_KIND_BROADCAST = 3,        /* input (root) -> output (all) */
  POLYCCL_KIND_ALL_REDUCE = 4,       /* input -> output */
  POLYCCL_KIND_REDUCE = 5,           /* input -> output (root; elsewhere output is NULL) */
  POLYCCL_KIND_ALL_GATHER = 6,       /* input -> size blocks of output */
  POLYCCL_KIND_ALL_GATHER_V = 7,     /* the same; counts[r] elements in block r */
  POLYCCL_KIND_REDUCE_SCATTER = 8,   /* size blocks of input -> output */
  POLYCCL_KIND_REDUCE_SCATTER_V = 9, /* the same; counts[r] elements in block r */
  POLYCCL_KIND_ALL_TO_ALL = 10,      /* size blocks -> size blocks */
  POLYCCL_KIND_ALL_TO_ALL_V = 11,    /* the same; counts[r] to, output_counts[r] from rank r */
  POLYCCL_KIND_SCATTER = 12,         /* size blocks of input (root) -> output */
  POLYCCL_KIND_GATHER = 13,          /* input -> size blocks of output (root) */
  POLYCCL_KIND_BARRIER = 14,         /* no data */
  POLYCCL_KIND_VENDOR = 0x8000       /* this and above: the vendor's own, see kind_name() */
};

/* Where data lies. */
enum { POLYCCL_MEMORY_HOST = 1, POLYCCL_MEMORY_DEVICE = 2 };

/* One operation. The pointers are valid until it is complete. */
typedef struct polyccl_op {
  uint32_t struct_size;
  uint32_t required;             /* bits of POLYCCL_REQUIRE_*: what must be understood */
  uint32_t kind;                 /* POLYCCL_KIND_* */
  uint32_t dtype;                /* POLYCCL_DTYPE_* */
  uint32_t reduction;            /* POLYCCL_REDUCTION_* */
  int32_t peer;                  /* root of a rooted kind, peer of send and recv; else -1 */
  const void* input;             /* NULL where this rank has none, or with 0 elements */
  void* output;                  /* the same */
  uint64_t count;                /* elements of one block */
  const uint64_t* counts;        /* the V kinds: one for each rank */
  const uint64_t* output_counts; /* ALL_TO_ALL_V: one for each rank */
  const void* factor;            /* PREMUL_SUM: one element of `dtype`, in memory of kind factor_memory */
  uint32_t factor_memory;        /* POLYCCL_MEMORY_* */
  uint32_t memory;               /* POLYCCL_MEMORY_* of input and output */
  void* stream;                  /* stream-ordered kinds: the device's stream; else NULL */
  int64_t deadline;
} polyccl_op;

/* ------------------------------------------------------------------------------------------------------------------ *
 * What a backend can do
 * ------------------------------------------------------------------------------------------------------------------ */

/* How an operation completes. */
enum {
  POLYCCL_COMPLETION_INLINE = 1, /* issue() returns when it is done, by its deadline or by abort() */
  POLYCCL_COMPLETION_POSTED = 2, /* issue() never blocks and gives a request; request_wait() blocks */
  POLYCCL_COMPLETION_STREAM = 3  /* issue() enqueues on op.stream */
};

/* Bits of the answer of supports(). */
enum {
  POLYCCL_CAN = 1,            /* the operation is native */
  POLYCCL_CAN_EQUAL_BITS = 2, /* all ranks get the same bits */
  POLYCCL_CAN_GROUP = 4       /* several may be issued together as one fused group */
};

/* Bits of polyccl_backend.flags. */
enum {
  POLYCCL_FLAG_ONE_MACHINE = 1,      /* ranks must share a machine */
  POLYCCL_FLAG_CONCURRENT_COMMS = 2, /* two communicators over the same ranks may be in use at once */
  POLYCCL_FLAG_MAY_HANG = 4,         /* calls may ignore deadline and abort(): made on threads that can be given up */
  POLYCCL_FLAG_SIZES_FATAL = 8,      /* unequal sizes among ranks end the process: PolyCCL agrees on them first */
  POLYCCL_FLAG_DEVICE_IS_HOST = 16,  /* the library's device memory is host memory (a stand-in for tests) */
  POLYCCL_FLAG_TRANSPORT = 32        /* since 1.2: communicators send by polyccl_comm_config.transport */
};

/* ------------------------------------------------------------------------------------------------------------------ *
 * What PolyCCL gives to a backend. Every function takes the table's ctx first, and may be called from any thread.
 * ------------------------------------------------------------------------------------------------------------------ */

enum { POLYCCL_LOG_ERROR = 1, POLYCCL_LOG_WARNING = 2, POLYCCL_LOG_INFO = 3, POLYCCL_LOG_DEBUG = 4 };

/* Services of the process. Valid for as long as the process lives. */
typedef struct polyccl_host {
  uint32_t struct_size;
  uint32_t abi; /* POLYCCL_ABI of the host */
  void* ctx;

  /* Write one line to PolyCCL's log. */
  void (*log)(void* ctx, int32_t level, const char* text);

  /* Combine n elements on the host: output = a (reduction) b, as PolyCCL itself does everywhere (NaN wins in MIN and MAX and is
   * canonical, 16-bit floats accumulate in float32). output may be a or b. AVG and PREMUL_SUM are refused. With n == 0 the
   * pointers are not read, and the result tells whether the type can be combined so. */
  polyccl_result (*reduce)(void* ctx, void* output, const void* a, const void* b, uint64_t n, uint32_t dtype,
                           uint32_t reduction);
} polyccl_host;

/* A key-value store that all ranks of a new communicator share; for bootstrap. Valid during comm_create() only. No other communicator,
 * past or present, sees its keys. */
typedef struct polyccl_store {
  uint32_t struct_size;
  uint32_t reserved;
  void* ctx;
  polyccl_result (*set)(void* ctx, const char* key, const void* value, uint64_t size);

  /* Wait for `key` until `deadline`, then copy at most `capacity` bytes of it. *size is the size of the value, also where that is
   * larger than the capacity: then POLYCCL_ERROR_INVALID is returned. */
  polyccl_result (*get)(void* ctx, const char* key, void* value /* out */, uint64_t capacity, uint64_t* size /* out */,
                        int64_t deadline);

  /* True once the creation has been given up: stop waiting. */
  int32_t (*cancelled)(void* ctx);
} polyccl_store;

/* A message of a transport, on its way. */
typedef struct polyccl_message polyccl_message;

/* One message. It is matched by (operation, slot, index), never by arrival: each names one message from a rank to another. */
typedef struct polyccl_message_config {
  uint32_t struct_size;
  int32_t peer;       /* the other rank; not this one */
  uint64_t operation; /* numbers the operation that it belongs to, alike on all ranks */
  uint64_t
      fingerprint; /* of that operation's arguments; ranks that differ get POLYCCL_ERROR_MISMATCH. 0: not compared */
  uint32_t slot;   /* numbers it within the operation, together with index */
  uint32_t index;
  void* memory;   /* only read by send() */
  uint64_t bytes; /* the same on both sides, else both get POLYCCL_ERROR_MISMATCH */
} polyccl_message_config;

/* Since 1.2. Messages among the ranks of a communicator over PolyCCL's own link, for a library whose transport can be replaced: it
 * authenticates peers, knows which rank is lost, and can be ended from any thread. Valid for the communicator's life, from any thread.
 * A function that fails leaves its words in last_error(), for the calling thread. */
typedef struct polyccl_transport {
  uint32_t struct_size;
  uint32_t reserved;
  void* ctx;

  /* Start to send, or to receive. Never blocks. The memory stays valid until the message is done or the transport is ended. */
  polyccl_result (*send)(void* ctx, const polyccl_message_config* config, polyccl_message** message /* out */);
  polyccl_result (*recv)(void* ctx, const polyccl_message_config* config, polyccl_message** message /* out */);

  /* Block until n messages are done, one of them fails, the deadline passes or end() is called. */
  polyccl_result (*wait)(void* ctx, polyccl_message* const* messages, uint32_t n, int64_t deadline);

  /* Free a message. One that is not done ends the transport, so that nothing touches its memory any more. */
  void (*message_free)(void* ctx, polyccl_message* message);

  /* Fail what is pending and what comes, with this result and text. The first end stays. */
  void (*end)(void* ctx, polyccl_result result, const char* text);

  void (*last_error)(void* ctx, char* text /* out */, uint64_t size);
} polyccl_transport;

/* How to create a communicator. */
typedef struct polyccl_comm_config {
  uint32_t struct_size;
  int32_t rank;
  int32_t size;
  int32_t device; /* the index of this rank's device; -1 for the host */
  const char* name;
  const polyccl_store* store;
  const char* interface;              /* network interface to use; NULL: the backend chooses */
  const char* address;                /* this rank's routable address; NULL: the backend chooses */
  const char* const* hints;           /* key, value, key, value, ..., NULL */
  int64_t deadline;                   /* of the creation */
  const polyccl_transport* transport; /* since 1.2, with POLYCCL_FLAG_TRANSPORT and more than one rank; else NULL */
} polyccl_comm_config;

/* ------------------------------------------------------------------------------------------------------------------ *
 * Device memory and streams. A backend whose operations are stream-ordered has this table; each entry may be NULL.
 * ------------------------------------------------------------------------------------------------------------------ */

typedef struct polyccl_device {
  uint32_t struct_size;
  uint32_t reserved;

  polyccl_result (*host_alloc)(int32_t device, void** memory /* out */, uint64_t bytes); /* pinned */
  polyccl_result (*host_free)(void* memory);
  polyccl_result (*alloc)(int32_t device, void** memory /* out */, uint64_t bytes);
  polyccl_result (*free)(void* memory);
  polyccl_result (*stream_create)(int32_t device, int32_t high_priority, void** stream /* out */);
  polyccl_result (*stream_destroy)(void* stream);
  polyccl_result (*stream_wait_event)(void* stream, void* event);
  polyccl_result (*event_create)(int32_t device, void** event /* out */);
  polyccl_result (*event_destroy)(void* event);
  polyccl_result (*event_record)(void* event, void* stream);
  polyccl_result (*event_query)(void* event); /* POLYCCL_IN_PROGRESS until reached */

  /* Copy `rows` rows of `bytes`, `output_stride` and `input_stride` bytes apart, on a stream, in any direction. */
  polyccl_result (*copy)(void* stream, void* output, uint64_t output_stride, const void* input, uint64_t input_stride,
                         uint64_t bytes, uint64_t rows);

  polyccl_result (*wait_flag)(void* stream, const volatile uint32_t* flag, uint32_t value); /* until *flag >= value */
  polyccl_result (*write_flag)(void* stream, volatile uint32_t* flag, uint32_t value);
  polyccl_result (*reduce)(void* stream, void* output, const void* a, const void* b, uint64_t n, uint32_t dtype,
                           uint32_t reduction);
  polyccl_result (*scale)(void* stream, void* output, const void* input, const void* factor, uint64_t n,
                          uint32_t dtype);

  /* Since 1.1. Whether what is enqueued on the stream goes into a graph instead of to the device: operations on it are then refused
   * before anything is enqueued. Never blocks. */
  polyccl_result (*stream_is_capturing)(void* stream, int32_t* capturing /* out */);

  /* Since 1.1. Make a device the calling thread's, and undo that. A stream of NULL is the default stream of the thread's device: PolyCCL
   * hands over none outside of such a pair. */
  polyccl_result (*enter)(int32_t device, int64_t* before /* out */);
  polyccl_result (*leave)(int64_t before);
} polyccl_device;

/* ------------------------------------------------------------------------------------------------------------------ *
 * The backend. The table is static and belongs to the plugin. Entries that may be NULL say so.
 * ------------------------------------------------------------------------------------------------------------------ */

typedef struct polyccl_comm polyccl_comm;       /* made by comm_create(), freed by comm_destroy() */
typedef struct polyccl_request polyccl_request; /* made by issue(), freed by request_wait() */

typedef struct polyccl_backend {
  uint32_t struct_size;
  uint32_t abi;   /* POLYCCL_ABI that the plugin was built from */
  uint32_t flags; /* POLYCCL_FLAG_* */
  uint32_t reserved;
  const char* name; /* lower case, e.g. "gloo" */

  /* Describe the library behind the plugin: its version in words, and the file it was loaded from ("" where it is linked in). */
  polyccl_result (*library)(char* version /* out */, uint64_t version_size, char* file /* out */, uint64_t file_size);

  /* Ranks can be one island if and only if these strings are equal (and the backends' names). */
  polyccl_result (*compatibility)(int32_t device, char* key /* out */, uint64_t size);

  /* How many devices this process sees; 0 for a library of host memory. */
  polyccl_result (*device_count)(int32_t* count /* out */);

  /* Bits of POLYCCL_CAN_*, 0 where not native. Never blocks, has no side effect, and must be true: PolyCCL refuses or plans by it
   * before any rank enters an operation. */
  uint32_t (*supports)(uint32_t kind, uint32_t dtype, uint32_t reduction, uint32_t memory);

  /* POLYCCL_COMPLETION_* of a kind on that kind of memory. */
  uint32_t (*completion)(uint32_t kind, uint32_t memory);

  /* Create a communicator, collectively, through the store. Returns by the deadline. */
  polyccl_result (*comm_create)(const polyccl_comm_config* config, polyccl_comm** comm /* out */);

  /* Start n operations; n > 1 is one fused group. Inline kinds return when done and give no request. */
  polyccl_result (*issue)(polyccl_comm* comm, const polyccl_op* const* ops, uint32_t n,
                          polyccl_request** request /* out */);

  /* Wait until the request's operations are complete, or their deadline, and free it. */
  polyccl_result (*request_wait)(polyccl_comm* comm, polyccl_request* request);

  /* Look whether the request is complete, without blocking and without freeing it. May be NULL. */
  polyccl_result (*request_test)(polyccl_comm* comm, polyccl_request* request);

  /* Errors that came after issue() returned. May be NULL. */
  polyccl_result (*async_error)(polyccl_comm* comm);

  /* End everything that runs or waits on the communicator, from any thread, in bounded time, as often as is wished. */
  polyccl_result (*abort)(polyccl_comm* comm);

  /* Free the communicator. Never blocks after abort(). NULL is valid. */
  polyccl_result (*comm_destroy)(polyccl_comm* comm);

  /* Copy the text of the last failure of the communicator, or with NULL of this thread. Always ends with 0. */
  void (*last_error)(polyccl_comm* comm, char* text /* out */, uint64_t size);

  /* The name of a kind at or above POLYCCL_KIND_VENDOR, or NULL. May be NULL. */
  const char* (*kind_name)(uint32_t kind);

  const polyccl_device* device; /* NULL for a library of host memory */
} polyccl_backend;

/* The one symbol of a plugin. Gives its table, or an error code where it cannot work with this host; then *backend may still be set, so
 * that last_error(NULL, ...) can say why. */
POLYCCL_EXPORT polyccl_result polyccl_backend_query(uint32_t host_abi, const polyccl_host* host,
                                                    const polyccl_backend** backend /* out */);

typedef polyccl_result (*polyccl_backend_query_fn)(uint32_t host_abi, const polyccl_host* host,
                                                   const polyccl_backend** backend);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* POLYCCL_BACKEND_H_ */
