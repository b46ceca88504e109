"""A barrier lets nobody through before all have come."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import polyccl

from .marks import named
from .pool import SharedPool
from .shapes import Shape

SHAPES = named("host=2", "host=3", "gloo=3", "host=2,host=2", "host=2,host=1,host=1", "gloo=2,host=2")


def come_late(comm: polyccl.Comm, folder: str, latest: int) -> bool:
    """Rank ``latest`` comes a little after the others; True where it had come when the barrier let this rank through."""
    mark = Path(folder, f"{comm.get_name()}-{latest}")
    if comm.get_rank() == latest:
        time.sleep(0.05)  # the others are to be inside by then; where they are not, the test only shows less
        mark.touch()
    comm.barrier()
    return mark.exists()


def wait_for_asynchronous_ones(comm: polyccl.Comm) -> None:
    for work in [comm.barrier(async_op=True) for _ in range(3)]:
        work.wait()


@pytest.mark.parametrize("shape", [*SHAPES, *named("host=1", "gloo=1")])
def test_asynchronous_barriers_end(jobs: SharedPool, shape: Shape) -> None:
    """Those of a rank alone too, which have no step to take."""
    jobs.run(wait_for_asynchronous_ones, shape, deadline=20)


@pytest.mark.parametrize("shape", SHAPES)
def test_nobody_leaves_before_the_last_has_come(jobs: SharedPool, shape: Shape, tmp_path: Path) -> None:
    for latest in range(shape.size):
        assert all(jobs.run(come_late, shape, str(tmp_path), latest))
