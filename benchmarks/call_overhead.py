"""The cost of a synchronous all_reduce of 4 bytes in a world of one rank: what a call costs beside the network."""

from __future__ import annotations

import argparse
import statistics
import sys
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np

import polyccl


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--calls", type=int, default=20000)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True, help="compare with torch.distributed")
    arguments = options.parse_args()
    comm = polyccl.new_comm("host", "cpu", "overhead", rank=0, size=1)
    array = np.ones(1, np.float32)
    calls: dict[str, Callable[[], Any]] = {"polyccl, NumPy array": lambda: comm.all_reduce(array)}
    if arguments.torch:
        import torch
        import torch.distributed as dist

        tensor = torch.ones(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        calls["polyccl, torch tensor"] = lambda: comm.all_reduce(tensor)
        calls["torch.distributed, Gloo"] = lambda: dist.all_reduce(tensor)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(arguments.rounds):
        for name, call in calls.items():
            number = arguments.calls if name.startswith("polyccl") else arguments.calls // 20
            times[name].append(timeit.timeit(call, number=number) / number * 1e6)
    for name, taken in times.items():
        print(f"{name:26}{statistics.median(taken):8.2f} us  (least {min(taken):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
