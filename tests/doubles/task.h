// One operation while it runs: what it sends and receives, and what it computes when that is done. Every collective is
// one exchange of whole contributions, followed by arithmetic in rank order on each rank that has a result: slow, and
// plain enough to be right.
#ifndef STAND_IN_TASK_H_
#define STAND_IN_TASK_H_

#include <cstddef>
#include <vector>

#include "comm.h"
#include "exchange.h"

namespace stand_in {

class Task {
 public:
  // The operation must outlive the task.
  Task(const Operation& operation, int rank, int ranks);

  // Read what the stream's earlier work left, and add the messages.
  void prepare(Exchange& exchange);
  // Compute and write the result.
  void finish();

 private:
  Fingerprint fingerprint(std::size_t bytes) const;
  void scale_input();
  void prepare_reduction(Exchange& exchange);
  void prepare_movement(Exchange& exchange);
  void prepare_all_to_all_v(Exchange& exchange);

  const Operation& operation_;
  const int rank_;
  const int ranks_;
  const std::size_t bytes_;  // of one block
  const std::byte* input_;
  std::byte* output_;
  std::vector<std::byte> scaled_;
  std::vector<std::vector<std::byte>> contributions_;  // by rank; this rank's own is empty
};

}  // namespace stand_in

#endif  // STAND_IN_TASK_H_
