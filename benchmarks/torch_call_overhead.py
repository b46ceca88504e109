"""The cost of a small call through torch.distributed: PolyCCL's process group beside c10d's own Gloo.

    python benchmarks/torch_call_overhead.py --ranks 2

Starts the ranks itself. The groups live in the same processes, and take turns, so that a busy machine disturbs all alike. Prints
microseconds per call, the median of the rounds' means: blocking (``async_op=False``), and issued and waited for
(``async_op=True``).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import distributed as dist
from torch import multiprocessing as mp

import polyccl.torch

CALLS: dict[str, Callable[[torch.Tensor, dist.ProcessGroup, bool], dist.Work | None]] = {
    "all_reduce": lambda tensor, group, later: dist.all_reduce(tensor, group=group, async_op=later),
    "broadcast": lambda tensor, group, later: dist.broadcast(tensor, 0, group=group, async_op=later),
    "all_gather_into_tensor": lambda tensor, group, later: dist.all_gather_into_tensor(
        tensor.new_empty(tensor.numel() * group.size()), tensor, group=group, async_op=later
    ),
    "barrier": lambda tensor, group, later: dist.barrier(group=group, async_op=later),
}


def mean(call: Callable[[], dist.Work | None], calls: int) -> float:
    """Microseconds per call."""
    began = time.perf_counter()
    for _ in range(calls):
        work = call()
        if work is not None:
            work.wait()
    return (time.perf_counter() - began) / calls * 1e6


def measure(rank: int, size: int, folder: str, rounds: int, calls: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    groups = {"c10d gloo": dist.group.WORLD}
    for backend in ("gloo", "host"):
        options = polyccl.torch.Options(backend=backend)
        groups[f"polyccl {backend}"] = dist.new_group(list(range(size)), backend="polyccl", pg_options=options)
    tensor = torch.ones(4)
    if rank == 0:
        print(f"{'call':<28}" + "".join(f"{name:>16}" for name in groups))
    for name, call in CALLS.items():
        for later in (False, True):
            times: dict[str, list[float]] = {group: [] for group in groups}
            for _ in range(rounds):
                for label, group in groups.items():
                    times[label].append(mean(lambda call=call, group=group, later=later: call(tensor, group, later), calls))
            if rank == 0:
                title = name + (", async" if later else "")
                print(f"{title:<28}" + "".join(f"{statistics.median(each):16.1f}" for each in times.values()), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=100, help="in a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (options.ranks, folder, options.rounds, options.calls), nprocs=options.ranks)


if __name__ == "__main__":
    main()
