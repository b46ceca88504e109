"""Splits: into islands, across them, alone, nothing, other orders of ranks; what they inherit, and what is refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from polyccl import Comm, InvalidArgument

from .marks import named
from .pool import SharedPool
from .ranks import caught, join, usable
from .shapes import Shape

FOUR = named("host=2,host=2", "gloo=2,gloo=2", "gloo=2,host=2", "~gloo=2,host=2")


def ordered(comm: Comm, parent_ranks: list[int], parent: Comm) -> None:
    """The part holds these ranks of the parent, in this order."""
    seen = np.zeros(comm.get_size(), np.int64)
    comm.all_gather_single(seen, np.array([parent.get_rank()]))
    assert seen.tolist() == parent_ranks
    assert parent_ranks[comm.get_rank()] == parent.get_rank()


def part(parent: Comm, ranks: list[int], name: str = "part", **options: Any) -> Comm:
    """The part that this rank is in."""
    made = parent.split(ranks, name, **options)
    assert made is not None
    return made


def into_islands(parent: Comm) -> str:
    mine = next(ranks for ranks in parent.islands if parent.get_rank() in ranks)
    child = part(parent, mine)
    ordered(child, mine, parent)
    usable(child)
    usable(parent)
    assert len(child.islands) == 1
    return child.get_backend()


@pytest.mark.parametrize("shape", FOUR)
def test_an_island_gets_a_plain_communicator_of_its_library(jobs: SharedPool, shape: Shape) -> None:
    assert jobs.run(into_islands, shape) == [local for local, _ in shape.places]


def across_islands(parent: Comm) -> str:
    position = next(ranks.index(parent.get_rank()) for ranks in parent.islands if parent.get_rank() in ranks)
    ranks = sorted(each[position] for each in parent.islands)
    child = part(parent, ranks)
    ordered(child, ranks, parent)
    usable(child)
    assert child.islands == [[0], [1]]
    return child.get_backend()


@pytest.mark.parametrize("shape", FOUR)
def test_ranks_of_several_islands_get_a_bridge(jobs: SharedPool, shape: Shape) -> None:
    assert jobs.run(across_islands, shape) == ["bridge"] * 4


def one_alone(parent: Comm) -> int:
    child = part(parent, [parent.get_rank()])
    usable(child)
    child.broadcast(np.ones(3), 0)
    return child.get_size()


def some_stay_out(parent: Comm) -> int:
    inside = [0, 2]
    child = parent.split(inside if parent.get_rank() in inside else [], "some")
    if child is None:
        return 0
    ordered(child, inside, parent)
    usable(child)
    return child.get_size()


def reordered(parent: Comm) -> list[int]:
    ranks = [3, 1, 0, 2]
    child = part(parent, ranks, "reordered")
    ordered(child, ranks, parent)
    usable(child)
    data = np.array([float(parent.get_rank())])
    child.broadcast(data, 0)
    assert data[0] == 3
    return [ranks[rank] for each in child.islands for rank in each]


@pytest.mark.parametrize("shape", FOUR)
def test_a_rank_may_be_alone(jobs: SharedPool, shape: Shape) -> None:
    assert jobs.run(one_alone, shape) == [1] * 4


@pytest.mark.parametrize("shape", [*FOUR, *named("host=4", "gloo=4")])
def test_ranks_that_give_an_empty_list_get_none(jobs: SharedPool, shape: Shape) -> None:
    assert jobs.run(some_stay_out, shape) == [2, 0, 2, 0]


@pytest.mark.parametrize("shape", [*FOUR, *named("host=4", "gloo=4")])
def test_the_list_orders_the_ranks(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(reordered, shape)


def splits_of_splits(parent: Comm) -> None:
    rank = parent.get_rank()
    three = parent.split([0, 1, 2] if rank < 3 else [], "three")
    if three is None:
        return
    usable(three)
    two = three.split([2, 0] if rank != 1 else [1], "two")
    assert two is not None
    usable(two)
    if rank != 1:
        ordered(two, [2, 0], three)
        usable(part(two, [two.get_rank()], "one"))
    usable(three)


@pytest.mark.parametrize("shape", [*FOUR, *named("host=4", "gloo=4")])
def test_parts_are_split_again(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(splits_of_splits, shape)


def same_name_twice(parent: Comm) -> None:
    """A name and a list may come again: the number of the split keeps them apart."""
    everyone = list(range(parent.get_size()))
    first, second = part(parent, everyone, "same"), part(parent, everyone, "same")
    works = [each.all_reduce(data, async_op=True) for each, data in ((first, np.ones(3)), (second, np.ones(5)))]
    for work in works:
        work.wait()


def test_a_name_may_be_used_again(jobs: SharedPool) -> None:
    jobs.run(same_name_twice, Shape("host=2,host=1"))


def inherits(rank: int, directory: str) -> None:
    shape = Shape("host=2,host=1")
    parent = join(directory, rank, shape, timeout=7.5, hints={"deterministic": "strict", "chunk_bytes": "65536"})
    everyone = list(range(3))
    child = part(parent, everyone)
    assert child.get_options().timeout == 7.5
    assert child.get_options().check
    assert child.get_options().strict
    assert child.get_options().hints["chunk_bytes"] == "65536"
    assert child.get_device() == "cpu"
    assert child.get_name() == "part"
    other = part(parent, everyone, timeout=timedelta(seconds=3), hints={"chunk_bytes": "128KiB"})
    assert other.get_options().timeout == 3
    assert other.get_options().strict
    assert other.get_options().hints["chunk_bytes"] == "128KiB"
    for each in (child, other, part(other, everyone, "again")):
        usable(each)
    raised = caught(other.barrier if rank == 0 else lambda: other.recv(np.ones(1), 0, timeout=10))
    assert rank != 0 or 2.9 < raised.seconds < 4, raised


def test_options_timeout_and_hints_are_inherited_unless_given(jobs: SharedPool, directory: str) -> None:
    jobs.each(inherits, 3, directory)


def refuses(parent: Comm) -> None:
    rank = parent.get_rank()
    for ranks, text in (
        ([0, 9], r"ranks\[1\] must be a rank from 0 to .*, and is 9"),
        ([-1], r"ranks\[0\] must be a rank .* is -1"),
        ([0, 0, 1], "has each rank once"),
        ([1 - rank], "is not in its own group"),
        (["a"], r"ranks\[0\] must be a rank .* is 'a'"),
        ([True], r"ranks\[0\] must be a rank .* is True"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            parent.split(ranks, "bad")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="timeout must be a"):
        parent.split([rank], "bad", timeout=-1)
    with pytest.raises(InvalidArgument, match="must be 'strict'"):
        parent.split([rank], "bad", hints={"deterministic": "no"})
    usable(parent)
    usable(part(parent, [0, 1], "good"))


def test_wrong_lists_are_refused_and_the_parent_works_on(jobs: SharedPool) -> None:
    jobs.run(refuses, Shape("host=1,host=1"))


def disagrees(parent: Comm) -> None:
    lists = ([0, 1], [1, 0])
    raised = caught(lambda: parent.split(lists[parent.get_rank()], "torn", timeout=0.5))
    assert raised.name == "CommTimeout"
    usable(parent)


def test_lists_that_differ_time_out(jobs: SharedPool) -> None:
    jobs.run(disagrees, Shape("host=1,host=1"), fresh=True)


def parent_ends(parent: Comm) -> None:
    everyone = list(range(parent.get_size()))
    child = part(parent, everyone)
    parent.abort()
    usable(child)
    assert not child.is_aborted()


@pytest.mark.parametrize("shape", named("host=2,host=1", "gloo=3"))
def test_a_part_outlives_its_parent(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(parent_ends, shape, fresh=True)
