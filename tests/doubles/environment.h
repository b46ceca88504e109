// Settings of the stand-ins: environment variables that are whole numbers.
#ifndef STAND_IN_ENVIRONMENT_H_
#define STAND_IN_ENVIRONMENT_H_

#include <cstdlib>

namespace stand_in {

inline long environment(const char* name, long fallback) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == 0 ? fallback : std::strtol(value, nullptr, 10);
}

}  // namespace stand_in

#endif  // STAND_IN_ENVIRONMENT_H_
