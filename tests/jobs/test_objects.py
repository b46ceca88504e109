"""Collectives of Python objects, and that nothing that a peer sends runs code."""

from __future__ import annotations

import os
from typing import Any

import pytest

from polyccl import Comm, CommError, InvalidArgument, objects

from .marks import named
from .pool import SharedPool
from .ranks import usable
from .shapes import Shape

pytest.importorskip("torch")
SHAPES = named("host=3", "gloo=2,host=1")


def thing(rank: int) -> dict[str, Any]:
    """An object of rank-dependent length."""
    return {"rank": rank, "words": ["word"] * rank * 10, "pair": (rank, None, 1.5, True)}


class Trap:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.putenv, ("POLYCCL_TRAP", "1")


def all_objects(comm: Comm) -> None:
    import torch

    rank, size = comm.get_rank(), comm.get_size()
    gathered: list[Any] = [None] * size
    objects.all_gather_object(comm, gathered, thing(rank))
    assert gathered == [thing(each) for each in range(size)]
    for root in range(size):
        at_root: list[Any] | None = [None] * size if rank == root else None
        objects.gather_object(comm, thing(rank), root, at_root)
        assert at_root is None or at_root == gathered
        words = [thing(7), "two", root] if rank == root else [None] * 3
        objects.broadcast_object_list(comm, words, root)
        assert words == [thing(7), "two", root]
        mine: list[Any] = [None]
        objects.scatter_object_list(comm, root, mine, [thing(each + root) for each in range(size)] if rank == root else None)
        assert mine == [thing(rank + root)]
    if rank == 0:
        objects.send_object_list(comm, ["a", torch.arange(5), thing(3)], 1)
    if rank == 1:
        got: list[Any] = [None] * 3
        objects.recv_object_list(comm, got, 0)
        assert got[0] == "a"
        assert got[2] == thing(3)
        assert torch.equal(got[1], torch.arange(5))
    usable(comm)


@pytest.mark.parametrize("shape", SHAPES)
def test_objects_of_all_lengths_arrive(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(all_objects, shape)


def trap(comm: Comm) -> None:
    """An object that runs code is refused by who reads it; with weights_only=False it is the user's own will."""
    rank = comm.get_rank()
    with pytest.raises(CommError, match=r"cannot be read: .*putenv"):
        objects.all_gather_object(comm, [None] * comm.get_size(), Trap() if rank == 0 else 1)
    if rank == 1:
        objects.send_object_list(comm, [Trap()], 0)
    if rank == 0:
        with pytest.raises(CommError, match="cannot be read"):
            objects.recv_object_list(comm, [None], 1)
    with pytest.raises(CommError, match="cannot be read"):
        objects.broadcast_object_list(comm, [Trap() if rank == 0 else 1], 0)
    usable(comm)


def test_an_object_that_would_run_code_is_refused(jobs: SharedPool) -> None:
    jobs.run(trap, Shape("host=3"))


def wrong_lists(comm: Comm) -> None:
    with pytest.raises(InvalidArgument, match="object_list must be a list of 3 objects, one for each rank"):
        objects.all_gather_object(comm, [None], 1)
    with pytest.raises(InvalidArgument, match="scatter_object_output_list must be a list with an entry"):
        objects.scatter_object_list(comm, 0, [], [1, 2, 3])
    rank = comm.get_rank()
    if rank != 1:
        objects.broadcast_object_list(comm, [1, 2], 0)
    else:
        with pytest.raises(InvalidArgument, match="object_list has 3 entries on this rank, and rank 0 gave 2"):
            objects.broadcast_object_list(comm, [1, 2, 3], 0)
    usable(comm)


def test_lists_of_wrong_lengths_are_refused(jobs: SharedPool) -> None:
    jobs.run(wrong_lists, Shape("host=3"))
