"""A sample of all operations as a job of its own, under any launcher::

    polyccl launch --islands host=2,gloo=2 -- python -m tests.jobs --sample 200 --seed 7

Ends with status 1, and the name of the case, where a result is wrong.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import polyccl

from .cases import run_cases, sample


def main() -> int:
    """One rank."""
    parser = argparse.ArgumentParser(prog="python -m tests.jobs")
    parser.add_argument("--sample", type=int, default=100, help="how many cases")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--backend", default="bridge", help="bridge, auto, host, gloo, ...")
    parser.add_argument("--fault", type=int, default=-1, help="a rank that gives a wrong input, to see that the job fails")
    options = parser.parse_args()
    comm = polyccl.new_comm(options.backend, "cpu", name="jobs", timeout=60)
    try:
        check_sum(comm, options.fault)
        number = run_cases(comm, sample(comm.get_size(), options.sample, options.seed))
    except (AssertionError, polyccl.CommError) as error:
        print(f"rank {comm.get_rank()}: {error}", file=sys.stderr, flush=True)
        return 1
    comm.barrier()
    if comm.get_rank() == 0:
        print(f"{number} cases on {comm.get_size()} ranks, islands {comm.islands}", flush=True)
    comm.finalize()
    return 0


def check_sum(comm: polyccl.Comm, fault: int) -> None:
    """The sum of all ranks' numbers; wrong where a rank has a fault."""
    total = np.array([comm.get_rank() + (100 if comm.get_rank() == fault else 0)])
    comm.all_reduce(total)
    wanted = sum(range(comm.get_size()))
    assert total[0] == wanted, f"the sum of the ranks is {total[0]} and not {wanted}"


if __name__ == "__main__":
    sys.exit(main())
