"""A communicator's scratch does not grow with the count; where there is no memory for it, the operation fails on all ranks."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from polyccl import ReduceOp

from .marks import named
from .pool import Pool, SharedPool
from .ranks import Raised, caught, join
from .shapes import Shape

STAGING = 1 << 20
LARGE = 64 * STAGING
LIMIT = 6 * STAGING
"""The rings of the bridge and of its island's two communicators, and what the allocator takes beside them, in bytes."""


def peak() -> int:
    """The most memory that this process has held at once since `forget_peak`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def growth(rank: int, directory: str, shape: Shape, operation: str) -> int:
    """By how much an operation on 64 times the staging raises the peak over the buffers themselves, in bytes."""
    os.environ["POLYCCL_STAGING_BYTES"] = str(STAGING)
    try:
        comm = join(directory, rank, shape, timeout=60)
    finally:
        del os.environ["POLYCCL_STAGING_BYTES"]
    size = comm.get_size()
    count = LARGE // 4 // size * size
    large, small = np.ones(count, np.float32), np.ones(count // size, np.float32)
    comm.all_reduce(np.ones(size * 1000, np.float32))
    comm.barrier()
    forget_peak()
    before = peak()
    if operation == "all_reduce":
        comm.all_reduce(large)
    elif operation == "premul":
        comm.all_reduce(large, ReduceOp.PREMUL_SUM(2.0))
    elif operation == "reduce":
        comm.reduce(large, 0)
    elif operation == "all_gather":
        comm.all_gather_single(large, small)
    elif operation == "reduce_scatter":
        comm.reduce_scatter_single(small, large)
    elif operation == "broadcast":
        comm.broadcast(large, 0)
    comm.barrier()
    grown = peak() - before
    if operation in ("all_reduce", "premul"):
        assert (large == (size if operation == "all_reduce" else 2 * size)).all()
    return grown


@pytest.mark.parametrize("operation", ["all_reduce", "premul", "reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("shape", named("host=2,host=1", "~host=2,host=2", "gloo=2,gloo=1", "host=2"))
def test_scratch_at_64_times_the_staging_is_bounded(jobs: SharedPool, directory: str, shape: Shape, operation: str) -> None:
    for grown in jobs.each(growth, shape.size, directory, shape, operation):
        assert grown < LIMIT, f"{grown / 2**20:.1f} MiB"


SLACK = 2 << 20  # bytes: enough for errors, and much less than the scratch of a large operation


@contextmanager
def no_more_memory() -> Iterator[None]:
    """This process gets no more than a little from the system."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (held,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")]
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + SLACK, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def reduce_without_memory(rank: int, directory: str, shape: Shape, async_op: bool) -> Raised:
    """What a large operation raises on this rank, where rank 0 has no memory for its scratch."""
    os.environ["POLYCCL_STAGING_BYTES"] = str(LARGE)
    comm = join(directory, rank, shape, hints={"chunk_bytes": str(LARGE)}, timeout=60)
    medium, large = np.ones(LARGE // 64, np.float32), np.ones(LARGE // 4, np.float32)
    comm.all_reduce(medium, async_op=True).wait()  # the lanes have their threads
    comm.barrier()
    if rank != 0:
        return caught(lambda: comm.all_reduce(large, async_op=async_op).wait())
    with no_more_memory():
        return caught(lambda: comm.all_reduce(large, async_op=async_op).wait())


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("shape", named("host=2,host=1", "host=2"))
def test_without_memory_for_scratch_an_operation_fails_on_all_ranks(
    own_pool: Callable[[int], Pool], directory: str, shape: Shape, async_op: bool
) -> None:
    for raised in own_pool(shape.size).each(reduce_without_memory, shape.size, directory, shape, async_op, deadline=60):
        assert raised.name == "CommError"
        assert "no memory for scratch" in raised.text
        assert raised.seconds < 30, "not by the deadline"
