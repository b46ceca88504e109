"""Many communicators: they cost no thread and no socket each, and one that ends takes nothing of the others' data with it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polyccl import Comm

from .marks import named
from .pool import Pool, SharedPool
from .ranks import join
from .shapes import Shape

ALIVE = 300
ROUNDS = 40
COUNT = 1000


def threads_and_descriptors() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def hold_many(rank: int, directory: str, shape: Shape) -> tuple[int, int]:
    """By how much so many communicators, each of which was used, raise the threads and descriptors of one."""
    first = join(directory, rank, shape, name="first", timeout=60)
    x = np.ones(4, np.float32)
    first.all_reduce(x)
    before = threads_and_descriptors()
    comms = [join(directory, rank, shape, name=f"c{i}", timeout=60) for i in range(ALIVE)]
    for comm in comms:
        comm.all_reduce(x)
    after = threads_and_descriptors()
    for comm in [first, *comms]:
        comm.finalize()
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.backend("gloo")
@pytest.mark.parametrize("shape", named("gloo=2", "gloo=2,gloo=1"))
def test_communicators_have_no_thread_and_no_descriptor_of_their_own(
    own_pool: Callable[[int], Pool], directory: str, shape: Shape
) -> None:
    for threads, descriptors in own_pool(shape.size).each(hold_many, shape.size, directory, shape, deadline=110):
        assert threads <= 2
        assert descriptors <= 2 * shape.size


KINDS: dict[str, Callable[[Comm, Any, Any], Any]] = {
    "broadcast": lambda c, mine, all_: c.broadcast(mine, 0),
    "all_reduce": lambda c, mine, all_: c.all_reduce(mine),
    "reduce": lambda c, mine, all_: c.reduce(mine, 0),
    "all_gather": lambda c, mine, all_: c.all_gather(all_, mine, async_op=True).wait(),
    "gather": lambda c, mine, all_: c.gather(all_ if c.get_rank() == 0 else [], mine, 0),
    "scatter": lambda c, mine, all_: c.scatter(mine, all_ if c.get_rank() == 0 else [], 0),
    "all_to_all": lambda c, mine, all_: c.all_to_all(all_, [mine] * c.get_size()),
    "barrier": lambda c, mine, all_: c.barrier(),
}


def operate_and_finalize(rank: int, directory: str, shape: Shape, kind: str) -> None:
    """Each communicator carries one operation, which ranks enter and leave at moments of their own."""
    moments = random.Random(rank)
    for i in range(ROUNDS):
        comm = join(directory, rank, shape, name=f"{kind}{i}", timeout=60)
        if moments.random() < 0.5:
            time.sleep(moments.random() * 0.01)
        mine = np.full(COUNT, rank, np.float32)
        KINDS[kind](comm, mine, [np.zeros(COUNT, np.float32) for _ in range(shape.size)])
        comm.finalize()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", named("gloo=4", "gloo=2,gloo=2"))
def test_an_operation_right_before_the_end_reaches_all_ranks(jobs: SharedPool, directory: str, shape: Shape, kind: str) -> None:
    jobs.each(operate_and_finalize, shape.size, directory, shape, kind)
