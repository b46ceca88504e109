"""Ranks whose calls differ, though every message has the size that the other side expects, raise with the check off too."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polyccl import Comm, ReduceOp

from .marks import named
from .pool import SharedPool
from .ranks import Raised, caught, usable
from .shapes import Shape

SOON = 5.0
TIMEOUT = 3.0
SMALL, LARGE = 4, 3_000_000  # elements; the large call goes in several chunks


def ones(count: int, dtype: type = np.float32) -> Any:
    return np.ones(count, dtype)


def all_to_all(comm: Comm, count: int, dtype: type) -> None:
    count -= count % comm.get_size()
    comm.all_to_all_single(ones(count, dtype), ones(count, dtype), timeout=TIMEOUT)


def order(comm: Comm, odd: bool, count: int) -> None:
    if odd:
        comm.broadcast(ones(count), 0, timeout=TIMEOUT)
    else:
        comm.all_reduce(ones(count), timeout=TIMEOUT)


DIFFERENCES: dict[str, Callable[[Comm, bool, int], Any]] = {
    "dtype": lambda c, odd, n: c.all_reduce(ones(n, np.int32 if odd else np.float32), timeout=TIMEOUT),
    "dtype of all_to_all": lambda c, odd, n: all_to_all(c, n, np.int32 if odd else np.float32),
    "reduction": lambda c, odd, n: c.all_reduce(ones(n), ReduceOp.MAX if odd else ReduceOp.SUM, timeout=TIMEOUT),
    "root of broadcast": lambda c, odd, n: c.broadcast(ones(n), int(odd), timeout=TIMEOUT),
    "root of reduce": lambda c, odd, n: c.reduce(ones(n), int(odd), timeout=TIMEOUT),
    "order": order,
    "count": lambda c, odd, n: c.all_reduce(ones(n + odd * 4096), timeout=TIMEOUT),
}
SHAPES = [(Shape("host=2"), False), (Shape("host=2,host=2"), False), (Shape("host=2,host=2"), True)]
# Small receives are not announced: where ranks wait for one another, or for the wrong one, no message may tell.
MAY_MEET_NOTHING = ("root of broadcast", "root of reduce", "order")


def differ(comm: Comm, name: str, count: int, island: bool) -> tuple[Raised, int]:
    """The call, as the last rank (or the last half of the ranks) makes it unlike the others. A rank whose part was to send what a
    slot takes learns of it by the next call."""
    odd = comm.get_rank() >= (comm.get_size() // 2 if island else comm.get_size() - 1)

    def calls() -> None:
        DIFFERENCES[name](comm, odd, count)
        comm.barrier(timeout=TIMEOUT)

    return caught(calls), os.getpid()


def pid(rank: int) -> int:
    return os.getpid()


@pytest.mark.parametrize("name", DIFFERENCES)
@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize(("shape", "island"), SHAPES, ids=str)
def test_calls_that_differ_raise_on_all_ranks_and_end_no_process(
    jobs: SharedPool, shape: Shape, island: bool, count: int, name: str
) -> None:
    results = jobs.run(differ, shape, name, count, island, fresh=True, check=False)
    timed_out = count == SMALL and name in MAY_MEET_NOTHING and all(raised.name == "CommTimeout" for raised, _ in results)
    for raised, _ in results:
        assert raised.name == "Mismatch" or timed_out, raised
        assert raised.seconds < SOON
    assert timed_out or any("unlike operations" in raised.text or "bytes where" in raised.text for raised, _ in results)
    jobs.run(usable, shape, fresh=True, check=False)
    assert jobs.each(pid, shape.size) == [process for _, process in results]


@pytest.mark.parametrize("name", ["dtype", "reduction", "order", "count"])
@pytest.mark.parametrize("shape", named("gloo=2,gloo=2", "gloo=2,host=2"))
def test_islands_that_differ_raise_whatever_their_libraries(jobs: SharedPool, shape: Shape, name: str) -> None:
    for raised, _ in jobs.run(differ, shape, name, LARGE, True, fresh=True, check=False):
        assert raised.name == "Mismatch", raised
        assert raised.seconds < SOON
    jobs.run(usable, shape, fresh=True, check=False)


def views(comm: Comm) -> Any:
    """A user's message is bytes: what the receiver takes them for is his affair."""
    if comm.get_rank() == 0:
        comm.send(ones(SMALL), 1)
        return None
    into = np.zeros(SMALL, np.int32)
    comm.recv(into, 0)
    return into


def test_a_users_message_may_be_received_as_another_type_of_its_size(jobs: SharedPool) -> None:
    _, received = jobs.run(views, Shape("host=2"), fresh=True, check=False)
    assert (received.view(np.float32) == 1).all()
