// What a job can be made to do. Every rank runs the same scenario; each throws where something does not hold.
#pragma once

#include "job.h"

namespace polyccl::native_test {

// operations.cc: what goes well.
void operations(Job& job);      // every collective, one at a time, in every form
void in_flight(Job& job);       // many at once, awaited by several threads, with messages meanwhile
void messages(Job& job);        // send and recv: alone, in batches, with tags, from any rank
void two_at_once(Job& job);     // two communicators, each used by a thread of its own
void finalize(Job& job);        // with operations in flight: they are done when it returns
void drop_on_stream(Job& job);  // a communicator that is destroyed right after calls that returned: they are done

// endings.cc: what goes wrong.
void destroy(Job& job);     // with operations in flight: they end
void abort(Job& job);       // by other threads, in mid-operation
void lose_first(Job& job);  // rank 0 is gone in mid-operation
void lose_last(Job& job);   // the last rank is
void time_out(Job& job);    // one rank does not call
void interrupt(Job& job);   // the user presses Ctrl-C
void mismatch(Job& job);    // calls differ, and the communicator stays usable
void absent(Job& job);      // a rank does not come to a creation

// arithmetic.cc: every kernel on every bit pattern; no communicator.
void arithmetic(Job& job);

}  // namespace polyccl::native_test
