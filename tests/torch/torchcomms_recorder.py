"""Each rank records what two all_reduces do on a bridge, and looks at it."""

import torch

from polyccl.compat.torchcomms import ReduceOp, hooks, new_comm

comm = new_comm("bridge", "cpu", "recorded")
silent, small, recorder = hooks.FlightRecorderHook(0), hooks.FlightRecorderHook(3), hooks.FlightRecorderHook(2048)
silent.register_with_comm(comm)
assert not silent.is_enabled()
recorder.register_with_comm(comm)
assert recorder.is_enabled()
for _ in range(2):
    comm.all_reduce(torch.ones(1000), ReduceOp.SUM, False)
steps = recorder.steps()["recorded"]
assert len({step.sequence for step in steps}) == 2
assert {step.peer for step in steps} >= {1 - comm.get_rank()}
assert recorder.size() == len(recorder) == len(steps) > 3
recorder.reset()
assert recorder.size() == 0
small.register_with_comm(comm)
comm.all_reduce(torch.ones(1000), ReduceOp.SUM, False)
assert small.size() == 3
print("recorded", flush=True)
comm.finalize()
