// What the CCL stand-in uses of its vendor's runtime: public calls only, but for the view of guarded memory.
#ifndef STAND_IN_DEVICE_H_
#define STAND_IN_DEVICE_H_

#include <cstddef>
#include <functional>

#include "failure.h"

namespace stand_in {

// The calling thread's device, 0 where it has none yet.
Failure current_device(int* device);

// Makes a device current as long as it lives.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// The rest needs the device to be current.
Failure launch(Stream stream, std::function<void()> work);
// What is enqueued on `later` from now on comes after what is on `earlier` now.
Failure order(Stream earlier, Stream later);
Failure is_capturing(Stream stream, bool* capturing);
Failure allocate(void** memory, std::size_t bytes);
Failure release(void* memory);

std::byte* view(const void* pointer);

}  // namespace stand_in

#endif  // STAND_IN_DEVICE_H_
