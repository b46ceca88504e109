"""Messages between two ranks: every pair, every size, posted in any order, alone and in batches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import polyccl

from .marks import named
from .pool import SharedPool
from .shapes import Shape

SIZES = (0, 1, 333, 65536, 65537, 1 << 20)
SHAPES = named("host=3", "gloo=3", "host=2,host=2", "gloo=2,host=1,host=1", "~gloo=2,gloo=2")


def payload(source: int, target: int, number: int, size: int) -> Any:
    """Bytes that no other message of a test has."""
    return np.random.default_rng((source, target, number)).integers(0, 256, size, np.uint8)


def usable(comm: polyccl.Comm) -> None:
    """The communicator still works."""
    total = np.array([comm.get_rank() + 1.0])
    comm.all_reduce(total)
    assert total[0] == sum(range(1, comm.get_size() + 1))


def exchange_all_pairs(comm: polyccl.Comm, async_op: bool) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for a, b in itertools.permutations(range(size), 2):
        for number, length in enumerate(SIZES):
            sent = payload(a, b, number, length)
            if rank == a:
                comm.send(sent, b, async_op=async_op).wait()
            if rank == b:
                got = np.zeros(length, np.uint8)
                comm.recv(got, a, async_op=async_op).wait()
                assert np.array_equal(got, sent), f"{length} bytes from {a} to {b}"
    usable(comm)


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_pair_exchanges_every_size_both_ways(jobs: SharedPool, shape: Shape, async_op: bool) -> None:
    jobs.run(exchange_all_pairs, shape, async_op)


def all_at_once(comm: polyccl.Comm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    peers = [peer for peer in range(size) if peer != rank]
    got = {(peer, n): np.zeros(length, np.uint8) for peer in peers for n, length in enumerate(SIZES)}
    works = [comm.recv(array, peer, async_op=True) for (peer, _), array in got.items()]
    works += [comm.send(payload(rank, peer, n, length), peer, async_op=True) for n, length in enumerate(SIZES) for peer in peers]
    for work in works:
        work.wait(20)
    for (peer, number), array in got.items():
        assert np.array_equal(array, payload(peer, rank, number, len(array))), f"message {number} from {peer}"


@pytest.mark.parametrize("shape", SHAPES)
def test_all_pairs_exchange_at_once(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(all_at_once, shape)


def ten_receives_first(comm: polyccl.Comm) -> None:
    if comm.get_rank() == 0:
        got = [np.zeros(1000 + n, np.uint8) for n in range(10)]
        works = [comm.recv(array, 1, async_op=True) for array in got]
        comm.send(np.zeros(1, np.uint8), 1)  # all are posted
        for work in works:
            work.wait(20)
        for number, array in enumerate(got):
            assert np.array_equal(array, payload(1, 0, number, 1000 + number))
    if comm.get_rank() == 1:
        comm.recv(np.zeros(1, np.uint8), 0)
        for number in range(10):
            comm.send(payload(1, 0, number, 1000 + number), 0)


@pytest.mark.parametrize("shape", named("host=2", "gloo=2", "host=1,host=1"))
def test_ten_receives_wait_for_their_sends_in_order(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(ten_receives_first, shape)


def mixed_ways(comm: polyccl.Comm) -> None:
    """Plain asynchronous sends and batches to one peer, in turn: the receiver takes them the other way round, in the same order."""
    rank = comm.get_rank()
    if rank > 1:
        return
    sizes = [7, 70000, 7, 7, 70000, 7]
    if rank == 0:
        works = []
        for first in (0, 3):
            works.append(comm.send(payload(0, 1, first, sizes[first]), 1, async_op=True))
            batch = comm.batch_op_create()
            for number in (first + 1, first + 2):
                batch.send(payload(0, 1, number, sizes[number]), 1)
            works.append(batch.issue(async_op=True))
        for work in works:
            work.wait(20)
        return
    got = [np.zeros(size, np.uint8) for size in sizes]
    batch = comm.batch_op_create()
    for number in (0, 1):
        batch.recv(got[number], 0)
    pending = batch.issue(async_op=True)
    rest = [comm.recv(got[number], 0, async_op=True) for number in (2, 3, 4, 5)]
    for work in [pending, *rest]:
        work.wait(20)
    for number, array in enumerate(got):
        assert np.array_equal(array, payload(0, 1, number, sizes[number])), f"message {number}"


@pytest.mark.parametrize("shape", named("host=2", "gloo=2", "host=1,host=1", "gloo=2,gloo=2"))
def test_plain_sends_and_batches_never_mix_up_their_payloads(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(mixed_ways, shape)


def ring_by_batch(comm: polyccl.Comm, async_op: bool) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    got = np.zeros(1 << 20, np.uint8)
    batch = comm.batch_op_create()
    batch.send(payload(rank, after, 0, 1 << 20), after)
    batch.recv(got, before)
    batch.issue(async_op=async_op).wait()
    assert np.array_equal(got, payload(before, rank, 0, 1 << 20))


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_ring_of_batches_does_not_deadlock(jobs: SharedPool, shape: Shape, async_op: bool) -> None:
    jobs.run(ring_by_batch, shape, async_op)


def unequal(comm: polyccl.Comm, sent: int, wanted: int, async_op: bool) -> str:
    text = ""
    if comm.get_rank() == 0:
        # The send of a small message is done once it is on its way, whatever the receiver makes of it.
        try:
            comm.send(np.zeros(sent, np.uint8), 1, async_op=async_op).wait()
            text = "sent"
        except polyccl.Mismatch as error:
            text = str(error)
    if comm.get_rank() == 1:
        with pytest.raises(polyccl.Mismatch) as caught:
            comm.recv(np.zeros(wanted, np.uint8), 0, async_op=async_op).wait()
        text = str(caught.value)
    usable(comm)
    pair(comm)
    return text


def pair(comm: polyccl.Comm) -> None:
    """The next message of the pair arrives."""
    if comm.get_rank() == 0:
        comm.send(payload(0, 1, 99, 50), 1)
    if comm.get_rank() == 1:
        got = np.zeros(50, np.uint8)
        comm.recv(got, 0)
        assert np.array_equal(got, payload(0, 1, 99, 50))


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("sent", "wanted"), [(100000, 200000), (200000, 100000), (100000, 10), (100000, 0)])
@pytest.mark.parametrize("shape", named("host=2", "gloo=2", "host=1,host=1"))
def test_unequal_sizes_raise_on_both_ranks_and_harm_nothing_else(
    jobs: SharedPool, shape: Shape, sent: int, wanted: int, async_op: bool
) -> None:
    texts = jobs.run(unequal, shape, sent, wanted, async_op, fresh=True)
    for text in texts:
        assert str(sent) in text, text
        assert str(wanted) in text, text


@pytest.mark.parametrize(("sent", "wanted"), [(10, 20), (20, 10), (0, 10), (10, 0), (10, 100000)])
@pytest.mark.parametrize("shape", named("host=2", "host=1,host=1"))
def test_unequal_small_sizes_raise_on_the_receiver_and_harm_nothing_else(
    jobs: SharedPool, shape: Shape, sent: int, wanted: int
) -> None:
    texts = jobs.run(unequal, shape, sent, wanted, False, fresh=True)
    assert str(sent) in texts[1]
    assert str(wanted) in texts[1]


def count_payload(comm: polyccl.Comm) -> list[int]:
    before = comm.payload_sent()
    if comm.get_rank() == 0:
        comm.send(np.zeros(1000, np.float32), 1)
    if comm.get_rank() == 1:
        comm.recv(np.zeros(1000, np.float32), 0)
    return [after - then for after, then in zip(comm.payload_sent(), before, strict=True)]


def test_payload_is_counted_by_peer(jobs: SharedPool) -> None:
    assert jobs.run(count_payload, Shape("host=1,host=1")) == [[0, 4000], [0, 0]]
