// What the binding files share.
#pragma once

#include "error.h"

namespace polyccl {

// The class in polyccl.errors for a code.
const char* error_class(Code code);

}  // namespace polyccl
