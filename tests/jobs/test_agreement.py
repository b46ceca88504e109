"""Ranks that disagree all raise, with what differs and on which ranks; and no disagreement ends a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import polyccl
from polyccl import Comm, ReduceOp

from .marks import named
from .pool import SharedPool
from .ranks import Raised, caught, join, usable
from .shapes import Shape
from .test_failure import broken_at_once, until

SOON = 5.0
SHAPES = named("host=3", "gloo=3", "host=2,host=1", "gloo=2,gloo=2", "gloo=2,host=1", "~host=2,host=2")


def f32(count: int) -> Any:
    return np.ones(count, np.float32)


def ragged(comm: Comm, odd: bool) -> Any:
    """A gather of unlike lengths, about one of which (of a block that is not its own) the odd rank is mistaken."""
    lengths = [1 + rank for rank in range(comm.get_size())]
    lengths[0] += odd
    return comm.all_gather_v([f32(n) for n in lengths], f32(lengths[comm.get_rank()]))


DIFFERENCES: dict[str, tuple[Callable[[Comm, bool], Any], str]] = {
    "count": (lambda c, odd: c.all_reduce(f32(5 if odd else 4)), "count differs: 4 elements on"),
    "a large count": (lambda c, odd: c.all_reduce(f32(500001 if odd else 500000)), "count differs: 500000 elements on"),
    "count of a gather": (
        lambda c, odd: c.all_gather_single(f32((2 + odd) * c.get_size()), f32(2 + odd)),
        "count differs: 2",
    ),
    "dtype": (lambda c, odd: c.all_reduce(np.ones(4, np.int32 if odd else np.float32)), "dtype differs: float32 on"),
    "reduction": (lambda c, odd: c.all_reduce(f32(4), ReduceOp.MAX if odd else ReduceOp.SUM), "reduction differs: MAX on"),
    "root": (lambda c, odd: c.broadcast(f32(4), 1 if odd else 0), "root differs: 0 on"),
    "order": (lambda c, odd: c.barrier() if odd else c.all_reduce(f32(4)), "the operation differs: all_reduce on"),
    "the strict hint": (
        lambda c, odd: c.all_reduce(f32(4), hints={"deterministic": "strict" if odd else ""}),
        "the hint 'deterministic' differs: strict on",
    ),
    "ragged counts": (ragged, "the list of counts differs"),
    "asynchronous": (lambda c, odd: c.all_reduce(f32(5 if odd else 4), async_op=True).wait(), "count differs: 4 elements on"),
}


def disagree(comm: Comm, name: str) -> Raised:
    call, _ = DIFFERENCES[name]
    raised = caught(lambda: call(comm, comm.get_rank() == comm.get_size() - 1))
    usable(comm)
    return raised


@pytest.mark.parametrize("name", DIFFERENCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_says_what_differs_and_the_communicator_works_on(jobs: SharedPool, shape: Shape, name: str) -> None:
    for raised in jobs.run(disagree, shape, name):
        assert raised.name == "Mismatch", raised
        assert DIFFERENCES[name][1] in raised.text
        for rank in range(shape.size):
            assert f"rank {rank} (" in raised.text
        assert raised.seconds < SOON


# ---- with the check off --------------------------------------------------------------------------------------------

SIZES: dict[str, Callable[[Comm, bool, float], Any]] = {
    "all_reduce, small": lambda c, odd, t: c.all_reduce(f32(100 if odd else 4), timeout=t),
    "all_reduce, smaller": lambda c, odd, t: c.all_reduce(f32(2 if odd else 50), timeout=t),
    "all_reduce, large": lambda c, odd, t: c.all_reduce(f32(300000 if odd else 500000), timeout=t),
    "all_reduce, asynchronous": lambda c, odd, t: c.all_reduce(f32(7 if odd else 4), async_op=True, timeout=t).wait(),
    "all_gather": lambda c, odd, t: c.all_gather_single(f32((3 if odd else 9) * c.get_size()), f32(3 if odd else 9), timeout=t),
    "reduce_scatter": lambda c, odd, t: c.reduce_scatter_single(
        f32(9 if odd else 3), f32((9 if odd else 3) * c.get_size()), timeout=t
    ),
    "all_to_all": lambda c, odd, t: c.all_to_all_single(
        f32((9 if odd else 3) * c.get_size()), f32((9 if odd else 3) * c.get_size()), timeout=t
    ),
}


def unchecked(comm: Comm, name: str) -> tuple[Raised, int]:
    odd = comm.get_rank() == comm.get_size() - 1
    return caught(lambda: SIZES[name](comm, odd, 1.0)), os.getpid()


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("shape", named("host=3", "gloo=3", "gloo=2,gloo=2", "gloo=2,host=1"))
def test_unequal_sizes_are_errors_with_the_check_off_too_and_end_no_process(jobs: SharedPool, shape: Shape, name: str) -> None:
    results = jobs.run(unchecked, shape, name, fresh=True, check=False)
    for raised, _ in results:
        assert raised.name in ("Mismatch", "CommTimeout"), raised
        assert raised.seconds < SOON
    assert jobs.each(pid, shape.size) == [process for _, process in results]


def pid(rank: int) -> int:
    return os.getpid()


def unequal_broadcast(comm: Comm) -> int:
    """Ranks that the odd one does not concern may have theirs."""
    odd = comm.get_rank() == comm.get_size() - 1
    try:
        comm.broadcast(f32(10 if odd else 500), 0, timeout=1)
    except (polyccl.Mismatch, polyccl.CommTimeout):
        return 1
    return 0


@pytest.mark.parametrize("shape", named("host=3", "gloo=3", "gloo=2,gloo=2"))
def test_an_unequal_broadcast_is_an_error_where_it_concerns(jobs: SharedPool, shape: Shape) -> None:
    assert jobs.run(unequal_broadcast, shape, fresh=True, check=False)[-1] == 1


def right_after_wrong(comm: Comm) -> tuple[Raised, Raised]:
    odd = comm.get_rank() == 1
    return caught(lambda: comm.all_reduce(f32(5 if odd else 4))), broken_at_once(comm)


@pytest.mark.parametrize("shape", named("host=3", "gloo=3", "gloo=2,host=1", "gloo=2,gloo=2"))
def test_unequal_sizes_break_the_communicator_on_all_ranks_at_once_with_the_check_off(jobs: SharedPool, shape: Shape) -> None:
    for first, after in jobs.run(right_after_wrong, shape, fresh=True, check=False):
        assert first.name == after.name == "Mismatch"
        assert first.seconds < SOON
        assert after.seconds < SOON


def unequal_all_to_all(comm: Comm, count: int) -> Raised:
    """Rank 1 sends rank 0 one element more than that expects."""
    rank, size = comm.get_rank(), comm.get_size()
    to = [count + (rank == 1 and peer == 0) for peer in range(size)]

    def call() -> None:
        comm.all_to_all([f32(count) for _ in range(size)], [f32(n) for n in to], timeout=3)
        if rank > 1:  # it has all of its own, and is told in time
            until(comm.is_aborted)
            comm.barrier()

    return caught(call)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("count", [10, 100_000])
@pytest.mark.parametrize("shape", named("host=2", "gloo=2", "gloo=2,host=1", "host=1,gloo=1"))
def test_unequal_counts_of_an_all_to_all_are_told_to_both(jobs: SharedPool, shape: Shape, count: int, check: bool) -> None:
    for raised in jobs.run(unequal_all_to_all, shape, count, fresh=True, check=check):
        assert raised.name == "Mismatch"
        assert raised.seconds < SOON


def unlike_forms(comm: Comm) -> Raised:
    """A library takes one tensor, a plan takes lists: ranks must not go different ways."""
    output = np.ones(comm.get_size() * 4, np.float32)
    lists = comm.get_rank() == 1
    call = comm.all_gather if lists else comm.all_gather_single
    raised = caught(lambda: call(list(output.reshape(-1, 4)) if lists else output, f32(4), timeout=3))
    usable(comm)
    return raised


@pytest.mark.backend("gloo")
def test_lists_and_one_tensor_do_not_meet_in_a_library(jobs: SharedPool) -> None:
    for raised in jobs.run(unlike_forms, Shape("gloo=3"), fresh=True, check=True):
        assert raised.name == "Mismatch"
        assert "a list of tensors on rank 1 (" in raised.text


def forms_of_plans(comm: Comm) -> None:
    """Where every call is planned, the layout is each rank's own affair."""
    output = np.zeros(comm.get_size() * 4, np.float32)
    if comm.get_rank() == 1:
        comm.all_gather(list(output.reshape(-1, 4)), f32(4))
    else:
        comm.all_gather_single(output, f32(4))
    assert (output == 1).all()


@pytest.mark.parametrize("shape", named("host=3", "host=2,host=1", "gloo=2,gloo=1"))
def test_lists_and_one_tensor_meet_in_plans(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(forms_of_plans, shape)


# ---- creation ------------------------------------------------------------------------------------------------------


def odd_hint(rank: int, directory: str, key: str) -> Raised:
    hints = {key: {"chunk_bytes": "65536", "latency_bytes": "1KiB", "deterministic": "strict"}[key]} if rank == 2 else {}
    return caught(lambda: join(directory, rank, Shape("host=2,host=1"), hints=hints, timeout=10))


@pytest.mark.parametrize("key", ["chunk_bytes", "latency_bytes", "deterministic"])
def test_options_that_differ_are_refused_on_all_ranks(jobs: SharedPool, directory: str, key: str) -> None:
    for raised in jobs.each(odd_hint, 3, directory, key):
        assert raised.name == "Mismatch"
        assert f"option '{key}'" in raised.text
        assert "rank 2 (" in raised.text
        assert "ranks 0-1" in raised.text
        assert raised.seconds < SOON


def odd_backend(rank: int, directory: str) -> Raised:
    backend = "bridge" if rank else "host"
    return caught(lambda: join(directory, rank, Shape("host=2"), backend=backend, timeout=10))


def test_backends_that_differ_are_refused_on_all_ranks(jobs: SharedPool, directory: str) -> None:
    for raised in jobs.each(odd_backend, 2, directory):
        assert raised.name == "Mismatch"
        assert "option 'backend'" in raised.text


def odd_size(rank: int, directory: str) -> str:
    if rank < 2:
        return str(join(directory, rank, Shape("host=2")).get_size())
    return caught(lambda: join(directory, rank, Shape("host=3"), timeout=20)).name


def test_a_rank_that_expects_another_size_is_not_taken_in(jobs: SharedPool, directory: str) -> None:
    assert jobs.each(odd_size, 3, directory) == ["2", "2", "Mismatch"]


def one_is_missing(rank: int, directory: str) -> Raised:
    return caught(lambda: join(directory, rank, Shape("host=3"), timeout=1))


def test_a_missing_rank_is_named(jobs: SharedPool, directory: str) -> None:
    for raised in jobs.each(one_is_missing, 2, directory):
        assert raised.name == "CommTimeout"
        assert "rank 2" in raised.text
        assert 0.9 < raised.seconds < 3


def odd_check(rank: int, directory: str) -> Raised:
    os.environ["POLYCCL_CHECK"] = str(int(rank == 0))
    return caught(lambda: join(directory, rank, Shape("host=2"), timeout=10))


def test_the_check_itself_must_be_on_everywhere_or_nowhere(jobs: SharedPool, directory: str) -> None:
    for raised in jobs.each(odd_check, 2, directory):
        assert raised.name == "Mismatch"
        assert "option 'POLYCCL_CHECK'" in raised.text
