"""all_reduce over a bridge against torch.distributed's Gloo (flat, over all ranks), interleaved in the same processes."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from common import bridge, parser, rank, say
from polyccl import ReduceOp


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--sizes", default="4096,65536,4194304", help="bytes of the buffer, separated by commas")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--mbit", type=float, default=100.0, help="the link's rate, for the share that is filled")
    options.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True, help="compare with torch.distributed")
    options.add_argument("--json", help="write the rows there")
    arguments = options.parse_args()
    comm = bridge(arguments, "link-time")
    contestants: dict[str, Callable[[Any], Any]] = {"polyccl": comm.all_reduce}
    if arguments.torch:
        contestants["torch gloo"] = torch_all_reduce()
    rows = []
    say(comm, f"islands {[len(ranks) for ranks in comm.islands]}, all_reduce, float32, median of {arguments.rounds}, interleaved")
    say(comm, f"{'bytes':>10}  {'who':12}{'ms':>10}{'least ms':>10}   share of {arguments.mbit:g} Mbit/s")
    for size in map(int, arguments.sizes.split(",")):
        times = measure(comm, contestants, size, arguments.rounds)
        for who, taken in times.items():
            median = statistics.median(taken)
            share = size * 8 / (arguments.mbit * 1e6) / median
            rows.append({"bytes": size, "who": who, "median_ms": median * 1e3, "min_ms": min(taken) * 1e3, "share": share})
            say(comm, f"{size:>10}  {who:12}{median * 1e3:>10.3f}{min(taken) * 1e3:>10.3f}   {share:6.1%}")
    if arguments.json and rank() == 0:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


def torch_all_reduce() -> Callable[[Any], Any]:
    """An all_reduce of torch.distributed over all ranks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return lambda array: dist.all_reduce(torch.from_numpy(array))


def measure(comm: Any, contestants: dict[str, Callable[[Any], Any]], size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant, by round; the slowest rank's."""
    repeats = max(1, min(50, (1 << 18) // size))
    times: dict[str, list[float]] = {who: [] for who in contestants}
    array = np.ones(size // 4, np.float32)
    for turn in range(rounds + 1):
        for who, call in contestants.items():
            array[:] = 1
            comm.barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                call(array)
            taken = np.array([(time.perf_counter() - begin) / repeats])
            comm.all_reduce(taken, ReduceOp.MAX)
            if turn:
                times[who].append(float(taken[0]))
    return times


if __name__ == "__main__":
    sys.exit(main())
