/* A plugin without a library: what it exports and answers is chosen when it is compiled, by -DVARIANT=...
 * (test_loader.py lists them).
 *
 * Its communicators count what happens to them; the counts are the "version of the library". A send is posted: it gives
 * a request, and request_wait() returns the send's `count` as its result. Any other operation returns its `count` at
 * once. */
#define _DEFAULT_SOURCE
#include <polyccl/backend.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GOOD 0
#define WRONG_MAJOR 1   /* built from ABI 2.0 */
#define NEWER_MINOR 2   /* built from ABI 1.7, whose table is longer */
#define SHORTER 3       /* its table ends before the entries that may be absent */
#define NO_SYMBOL 4     /* exports nothing of the ABI */
#define NULL_TABLE 5    /* says OK and gives no table */
#define MISSING_ENTRY 6 /* has no issue() */
#define NO_NAME 7       /* has an empty name */
#define REFUSES 8       /* refuses the host, with words */
#define TINY 9          /* a table of 4 bytes */
#define HUGE_TABLE 10   /* a table that claims 1 MiB */
#define GARBLED 11      /* its words are not UTF-8 */
#define MISSING_LIBRARY 12
/* May hang: an all_reduce ends once the first element of its output is 0, then fills that with 7; the creation does not
 * end where the store greets with "hang". */
#define HANGS 13
#define OLD_DEVICE \
  14 /* has a device, as ABI 1.0 had them: its table ends before what 1.1 appended, and nonsense follows */

#ifndef VARIANT
#define VARIANT GOOD
#endif

struct polyccl_comm {
  int unused;
};
struct polyccl_request {
  polyccl_result result;
};

static const polyccl_host* host;
static int created, destroyed, aborted, waited;
static char words[256] = "the double's own words";

static polyccl_result library(char* version, uint64_t version_size, char* file, uint64_t file_size) {
  snprintf(version, version_size, "created %d destroyed %d aborted %d waited %d", created, destroyed, aborted, waited);
  snprintf(file, file_size, "%s", "");
  return POLYCCL_OK;
}

static polyccl_result compatibility(int32_t device, char* key, uint64_t size) {
  snprintf(key, size, "double for device %d, host abi %u.%u", device, host->abi >> 16, host->abi & 0xFFFF);
  return device < 100 ? POLYCCL_OK : POLYCCL_ERROR_INVALID;
}

static polyccl_result device_count(int32_t* count) {
  *count = 3;
  return POLYCCL_OK;
}

/* What the host's own arithmetic says, so that a test sees the host table work. */
static uint32_t supports(uint32_t kind, uint32_t dtype, uint32_t reduction, uint32_t memory) {
  float a[2] = {1, 2}, b[2] = {10, 20}, sum[2] = {0, 0};
  (void)memory;
  if (kind != POLYCCL_KIND_ALL_REDUCE) return POLYCCL_CAN;
  if (host->reduce(host->ctx, NULL, NULL, NULL, 0, dtype, reduction) != POLYCCL_OK) return 0;
  if (host->reduce(host->ctx, sum, a, b, 2, POLYCCL_DTYPE_FLOAT32, POLYCCL_REDUCTION_SUM) != POLYCCL_OK) return 0;
  return sum[0] == 11 && sum[1] == 22 ? POLYCCL_CAN | POLYCCL_CAN_EQUAL_BITS : 0;
}

static uint32_t completion(uint32_t kind, uint32_t memory) {
  (void)memory;
  return kind == POLYCCL_KIND_SEND ? POLYCCL_COMPLETION_POSTED : POLYCCL_COMPLETION_INLINE;
}

/* Reads "greeting" from the store, into a buffer that is too small at first, and sets "answer" to it. */
static polyccl_result comm_create(const polyccl_comm_config* config, polyccl_comm** comm) {
  const polyccl_store* store = config->store;
  char value[64];
  uint64_t size = 0;
  polyccl_result result = store->get(store->ctx, "greeting", value, 1, &size, config->deadline);
  if (result == POLYCCL_ERROR_INVALID && size > 1) {
    result = store->get(store->ctx, "greeting", value, sizeof value, &size, config->deadline);
  }
  if (result == POLYCCL_OK) result = store->set(store->ctx, "answer", value, size);
  if (result == POLYCCL_OK && store->cancelled(store->ctx)) result = POLYCCL_ERROR_ABORTED;
  if (result != POLYCCL_OK) return result;
  if (VARIANT == HANGS && size == 4 && memcmp(value, "hang", 4) == 0) {
    for (;;) pause();
  }
  *comm = calloc(1, sizeof **comm);
  created++;
  return POLYCCL_OK;
}

static polyccl_result issue(polyccl_comm* comm, const polyccl_op* const* ops, uint32_t n, polyccl_request** request) {
  (void)comm;
  (void)n;
  if (VARIANT == HANGS && ops[0]->kind == POLYCCL_KIND_ALL_REDUCE) {
    volatile float* output = (volatile float*)ops[0]->output;
    while (output[0] != 0) usleep(1000);
    for (uint64_t i = 0; i < ops[0]->count; i++) output[i] = 7;
    return POLYCCL_OK;
  }
  if (ops[0]->kind != POLYCCL_KIND_SEND) return (polyccl_result)ops[0]->count;
  *request = calloc(1, sizeof **request);
  (*request)->result = (polyccl_result)ops[0]->count;
  return POLYCCL_OK;
}

static polyccl_result request_wait(polyccl_comm* comm, polyccl_request* request) {
  const polyccl_result result = request->result;
  (void)comm;
  free(request);
  waited++;
  return result;
}

static polyccl_result abort_comm(polyccl_comm* comm) {
  (void)comm;
  aborted++;
  return POLYCCL_OK;
}

static polyccl_result comm_destroy(polyccl_comm* comm) {
  free(comm);
  destroyed++;
  return POLYCCL_OK;
}

static void last_error(polyccl_comm* comm, char* text, uint64_t size) {
  (void)comm;
  snprintf(text, size, "%s", VARIANT == GARBLED ? "caf\xc3\xa9 \xff\xc3(\x01" : words);
}

/* A device of host memory, with one stream, a default one, on which all is done at once. */
static polyccl_result allocate(int32_t device, void** memory, uint64_t bytes) {
  (void)device;
  *memory = calloc(1, bytes);
  return *memory == NULL ? POLYCCL_ERROR_UNAVAILABLE : POLYCCL_OK;
}

static polyccl_result release(void* memory) {
  free(memory);
  return POLYCCL_OK;
}

static polyccl_result stream_create(int32_t device, int32_t high_priority, void** stream) {
  (void)device;
  (void)high_priority;
  *stream = NULL;
  return POLYCCL_OK;
}

static polyccl_result event_create(int32_t device, void** event) { return allocate(device, event, 1); }

static polyccl_result done(void* handle) {
  (void)handle;
  return POLYCCL_OK;
}

static polyccl_result done_on_stream(void* first, void* second) {
  (void)first;
  (void)second;
  return POLYCCL_OK;
}

static polyccl_result copy(void* stream, void* output, uint64_t output_stride, const void* input, uint64_t input_stride,
                           uint64_t bytes, uint64_t rows) {
  (void)stream;
  for (uint64_t row = 0; row < rows; row++) {
    memcpy((char*)output + row * output_stride, (const char*)input + row * input_stride, bytes);
  }
  return POLYCCL_OK;
}

static polyccl_result wait_flag(void* stream, const volatile uint32_t* flag, uint32_t value) {
  (void)stream;
  return *flag >= value ? POLYCCL_OK : POLYCCL_ERROR_INTERNAL;
}

static polyccl_device device_table = {
    .struct_size = offsetof(polyccl_device, stream_is_capturing),
    .host_alloc = allocate,
    .host_free = release,
    .alloc = allocate,
    .free = release,
    .stream_create = stream_create,
    .stream_destroy = done,
    .stream_wait_event = done_on_stream,
    .event_create = event_create,
    .event_destroy = release,
    .event_record = done_on_stream,
    .event_query = done,
    .copy = copy,
    .wait_flag = wait_flag,
};

struct longer_table {
  polyccl_backend known;
  void* appended[4];
};

static struct longer_table table = {
    .known =
        {
            .struct_size = sizeof(polyccl_backend),
            .abi = POLYCCL_ABI,
            .flags = VARIANT == HANGS ? POLYCCL_FLAG_MAY_HANG : POLYCCL_FLAG_ONE_MACHINE,
            .name = "double",
            .library = library,
            .compatibility = compatibility,
            .device_count = device_count,
            .supports = supports,
            .completion = completion,
            .comm_create = comm_create,
            .issue = issue,
            .request_wait = request_wait,
            .abort = abort_comm,
            .comm_destroy = comm_destroy,
            .last_error = last_error,
            .device = VARIANT == OLD_DEVICE ? &device_table : NULL,
        },
    .appended = {&table, &table, &table, &table},
};

#if VARIANT == NO_SYMBOL
#define polyccl_backend_query another_name
#elif VARIANT == MISSING_LIBRARY
extern int function_of_a_library_that_is_not_there(void);
#endif

POLYCCL_EXPORT polyccl_result polyccl_backend_query(uint32_t host_abi, const polyccl_host* given,
                                                    const polyccl_backend** backend) {
  (void)host_abi;
  host = given;
  *backend = &table.known;
#if VARIANT == WRONG_MAJOR
  table.known.abi = 2u << 16;
#elif VARIANT == NEWER_MINOR
  table.known.abi = POLYCCL_ABI + 7;
  table.known.struct_size = sizeof(struct longer_table);
#elif VARIANT == SHORTER
  table.known.struct_size = offsetof(polyccl_backend, kind_name);
  memset(&table.known.kind_name, 0xA5, sizeof table.known.kind_name + sizeof table.known.device); /* must not be read */
#elif VARIANT == OLD_DEVICE
  memset((char*)&device_table + device_table.struct_size, 0xA5, sizeof device_table - device_table.struct_size);
#elif VARIANT == NULL_TABLE
  *backend = NULL;
#elif VARIANT == MISSING_ENTRY
  table.known.issue = NULL;
#elif VARIANT == NO_NAME
  table.known.name = "";
#elif VARIANT == REFUSES
  strcpy(words, "no such device on this machine");
  return POLYCCL_ERROR_UNAVAILABLE;
#elif VARIANT == TINY
  table.known.struct_size = 4;
#elif VARIANT == HUGE_TABLE
  table.known.struct_size = 1u << 20;
#elif VARIANT == MISSING_LIBRARY
  return function_of_a_library_that_is_not_there();
#endif
  given->log(given->ctx, POLYCCL_LOG_DEBUG, "the double is there");
  return POLYCCL_OK;
}
