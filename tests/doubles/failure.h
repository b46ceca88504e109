// How the parts of the CCL stand-in report an error: NCCL's result and a sentence.
#ifndef STAND_IN_FAILURE_H_
#define STAND_IN_FAILURE_H_

#include <string>

#include "ccl_api.h"

namespace stand_in {

struct [[nodiscard]] Failure {
  ncclResult_t code = ncclSuccess;
  std::string text;

  explicit operator bool() const { return code != ncclSuccess; }
};

}  // namespace stand_in

#endif  // STAND_IN_FAILURE_H_
