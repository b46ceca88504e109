// What every stand-in library exports beside its vendor's API.
#ifndef STAND_IN_STAND_IN_H_
#define STAND_IN_STAND_IN_H_

#define STAND_IN_API extern "C" __attribute__((visibility("default")))

// Says what the library stands in for. A vendor's own library has no such symbol: who finds it knows that device memory
// is host memory.
STAND_IN_API const char* polyccl_stand_in(void);

// Where a worker reaches the memory that a device pointer names (the pointer itself unless memory is guarded). Named by
// vendor, so that no library ever binds to the other vendor's; a library that finds its vendor's real runtime in its
// place does not load.
STAND_IN_API void* polyccl_stand_in_cuda_view(const void* pointer);
STAND_IN_API void* polyccl_stand_in_hip_view(const void* pointer);

// How many streams of the device were created with a priority above the default, and are still there.
STAND_IN_API int polyccl_stand_in_cuda_urgent_streams(int device);
STAND_IN_API int polyccl_stand_in_hip_urgent_streams(int device);

#endif  // STAND_IN_STAND_IN_H_
