// The ABI's result codes as errors of the core, and back.
#pragma once

#include "error.h"
#include "polyccl/backend.h"

namespace polyccl {

// What a result of a plugin means to the user.
struct Meaning {
  Code code;
  const char* what;    // goes on "backend 'x' ..."
  const char* advice;  // a sentence; empty if the plugin's own words say what to do
};

Meaning meaning_of(polyccl_result result);
polyccl_result result_of(Code code);

}  // namespace polyccl
