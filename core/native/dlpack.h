// The part of DLPack's ABI, major version 1, that intake reads: https://dmlc.github.io/dlpack/latest/c_api.html
//
// What DLPack promises, and what is relied on here: within a major version these layouts do not change, minor versions
// only add codes; whatever the major version, the fields of ManagedTensorVersioned up to `flags` and all of
// ExchangeHeader stay where they are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyccl::dlpack {

inline constexpr uint32_t kMajor = 1, kMinor = 3;  // of the text that this was written from

struct Version {
  uint32_t major, minor;
};

enum DeviceType : int32_t {
  kCpu = 1,
  kCuda = 2,
  kCudaHost = 3,  // pinned memory
  kRocm = 10,
  kRocmHost = 11,  // pinned memory
  kCudaManaged = 13,
  kOneApi = 14,
};

struct Device {
  int32_t type;  // DeviceType, and others
  int32_t index;
};

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4M3Fn = 10,
  kFloat8E4M3Fnuz = 11,
  kFloat8E5M2 = 12,
  kFloat8E5M2Fnuz = 13,
  kFloat8E8M0Fnu = 14,
};

struct DataType {
  uint8_t code;  // TypeCode, and others
  uint8_t bits;
  uint16_t lanes;
};

struct View {  // DLTensor
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;    // may be null where ndim is 0
  int64_t* strides;  // in elements; null for contiguous, which versions from 1.2 on no longer allow
  uint64_t byte_offset;
};

struct ManagedTensor {  // DLManagedTensor, before version 1; in capsules named "dltensor"
  View view;
  void* manager;
  void (*deleter)(ManagedTensor*);
};

inline constexpr uint64_t kReadOnly = 1, kIsCopied = 2;

struct ManagedTensorVersioned {  // DLManagedTensorVersioned; in capsules named "dltensor_versioned"
  Version version;
  void* manager;
  void (*deleter)(ManagedTensorVersioned*);  // may be null; safe to call whatever the version
  uint64_t flags;
  View view;  // only where version.major is kMajor
};

struct ExchangeHeader {
  Version version;
  const ExchangeHeader* previous;  // an older table of the same library, or null
};

// What a type's `__dlpack_c_exchange_api__` points at, a capsule named "dlpack_exchange_api". It lives as long as the
// process. The functions need the GIL, return 0, or -1 with a Python error set, and wait for no stream.
struct ExchangeApi {
  ExchangeHeader header;
  void* allocate;  // of no use here
  int (*managed_from_object)(void* object, ManagedTensorVersioned** out);
  void* to_object;  // of no use here
  int (*view_from_object)(void* object,
                          View* out);  // may be null; the view's shape and strides are borrowed from the object
  int (*current_stream)(int32_t type, int32_t index, void** out);
};

static_assert(sizeof(View) == 48 && offsetof(ManagedTensorVersioned, view) == 32 &&
              offsetof(ExchangeApi, allocate) == 16);

}  // namespace polyccl::dlpack
