#include "results.h"

namespace polyccl {

Meaning meaning_of(polyccl_result result) {
  switch (result) {
    case POLYCCL_ERROR_INVALID:
      return {Code::kInvalidArgument, "refused an argument", "Check the argument that it names."};
    case POLYCCL_ERROR_UNSUPPORTED:
      return {Code::kUnsupportedOperation, "cannot do this", "Use another data type, reduction or backend."};
    case POLYCCL_ERROR_TIMEOUT:
      return {Code::kTimeout, "did not finish by the deadline",
              "See whether every rank makes this call, or give it a longer timeout."};
    case POLYCCL_ERROR_PEER_LOST:
      return {Code::kPeerLost, "lost another rank", "Look for the first error among the other ranks."};
    case POLYCCL_ERROR_ABORTED:
      return {Code::kAborted, "was aborted", "Make a new communicator."};
    case POLYCCL_ERROR_UNAVAILABLE:
      return {Code::kBackendUnavailable, "is not available", "Install its library, or choose another backend."};
    case POLYCCL_ERROR_MISMATCH:
      return {Code::kMismatch, "found that ranks differ", ""};
    default:
      return {Code::kInternal, "failed", "Its own words say why; if they do not help, report them with this text."};
  }
}

polyccl_result result_of(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return POLYCCL_ERROR_INVALID;
    case Code::kBackendUnavailable:
      return POLYCCL_ERROR_UNAVAILABLE;
    case Code::kUnsupportedOperation:
      return POLYCCL_ERROR_UNSUPPORTED;
    case Code::kTimeout:
      return POLYCCL_ERROR_TIMEOUT;
    case Code::kPeerLost:
      return POLYCCL_ERROR_PEER_LOST;
    case Code::kAborted:
      return POLYCCL_ERROR_ABORTED;
    case Code::kMismatch:
      return POLYCCL_ERROR_MISMATCH;
    default:
      return POLYCCL_ERROR_INTERNAL;
  }
}

}  // namespace polyccl
