"""What ranks do in the tests of leaks: calls of every kind, over and over, and what they leave behind."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from torch import distributed as dist

import polyccl
from polyccl.torch import ProcessGroup

LENGTH = 16384
"""Elements of a tensor: 64 KiB, so that one that is left for each call shows."""


Call = Callable[[int], Any]


ROUNDS = 4
"""Calls are made in so many rounds. A leak makes memory grow in each, what the allocator keeps for later does not."""


def leave_nothing(kinds: tuple[str, ...], calls: int, limit: int) -> None:
    """Many calls of each kind leave memory (up to ``limit`` bytes a round), descriptors, threads and store keys as they were."""
    for kind in kinds:
        _require_nothing_left(kind, KINDS[kind](), calls, limit)


def _require_nothing_left(what: str, call: Call, calls: int, limit: int) -> None:
    numbers, growth = itertools.count(), []
    for turn in range(ROUNDS):
        settled = _Settled()
        for number in itertools.islice(numbers, calls // ROUNDS):
            call(number)
        if turn > 0:  # by then what is bounded is full
            growth.append(settled.check(what))
    assert min(growth) <= limit, f"{what}: memory has grown by {[f'{each / 2**20:.1f} MiB' for each in growth]}"


class _Settled:
    """What this process has once nothing is under way."""

    def __init__(self) -> None:
        _quiet()
        self.memory, self.descriptors, self.threads, self.keys = _memory(), _descriptors(), _threads(), _keys()

    def check(self, kind: str) -> int:
        """Return by how many bytes memory has grown. AssertionError if this process has more of anything else."""
        _quiet()
        end = monotonic() + 10
        while (_descriptors(), _threads()) > (self.descriptors, self.threads) and monotonic() < end:
            sleep(0.01)  # threads and connections that are about to end
        assert _threads() <= self.threads, f"{kind}: {self.threads} threads before, {_threads()} after"
        assert _descriptors() <= self.descriptors, f"{kind}: {self.descriptors} descriptors before; now {_open_files()}"
        assert _keys() <= self.keys, f"{kind}: {self.keys} store keys before, {_keys()} after"
        return _memory() - self.memory


def _quiet() -> None:
    gc.collect()
    dist.barrier()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is no leak


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _open_files() -> list[str]:
    return [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _keys() -> int:
    group: Any = dist.group.WORLD
    return int(group.get_group_store().num_keys())


def _other() -> int:
    return 1 - dist.get_rank()


def _collective() -> Call:
    tensor, whole, other = torch.zeros(LENGTH), torch.zeros(2 * LENGTH), torch.zeros(2 * LENGTH)

    def call(number: int) -> None:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, number % 2)
        dist.all_gather_single(whole, tensor)
        dist.reduce_scatter_single(tensor, whole)
        dist.all_to_all_single(other, whole)

    return call


def _asynchronous() -> Call:
    def call(number: int) -> None:
        works = [dist.all_reduce(torch.zeros(LENGTH), async_op=True) for _ in range(2)]
        works.append(dist.broadcast(torch.zeros(LENGTH), number % 2, async_op=True))
        for work in works:
            work.wait()

    return call


def _message() -> Call:
    def call(number: int) -> None:
        if dist.get_rank() == 0:
            dist.send(torch.zeros(LENGTH), 1, tag=number)
        else:
            dist.recv(torch.zeros(LENGTH), 0, tag=number)

    return call


def _any_source() -> Call:
    def call(number: int) -> None:
        if dist.get_rank() == 0:
            dist.send(torch.zeros(LENGTH), 1, tag=number)
        else:
            dist.recv(torch.zeros(LENGTH), tag=number)

    return call


def _objects() -> Call:
    def call(number: int) -> None:
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, {"number": number, "text": "x" * 1000})
        dist.broadcast_object_list(gathered, 0)

    return call


def _batch() -> Call:
    def call(number: int) -> None:
        operations = [
            dist.P2POp(dist.isend, torch.zeros(LENGTH), _other()),
            dist.P2POp(dist.irecv, torch.zeros(LENGTH), _other()),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return call


def _future() -> Call:
    def call(number: int) -> None:
        future = dist.all_reduce(torch.zeros(LENGTH), async_op=True).get_future()
        future.then(lambda done: done.value()[0].numel()).wait()

    return call


def _failed() -> Call:
    world: Any = dist.group.WORLD
    comm = world.get_comm()

    def call(number: int) -> None:
        try:
            comm.broadcast(torch.zeros(LENGTH), 99)
        except polyccl.InvalidArgument:
            return
        raise AssertionError("nothing was raised")

    return call


def _monitored_barrier() -> Call:
    world: Any = dist.group.WORLD
    return lambda number: world.monitored_barrier()


def _split() -> Call:
    def call(number: int) -> None:
        world: Any = dist.group.WORLD
        part = world.get_comm().split([0, 1], f"part {number}")
        part.all_reduce(torch.zeros(LENGTH), async_op=True).wait()

    return call


KINDS: dict[str, Callable[[], Call]] = {
    "collectives": _collective,
    "asynchronous collectives": _asynchronous,
    "messages with tags": _message,
    "messages from any rank": _any_source,
    "objects": _objects,
    "batches": _batch,
    "futures": _future,
    "refused calls": _failed,
    "monitored barriers": _monitored_barrier,
    "splits": _split,
}


def hold_many(alive: int, times: int) -> None:
    """Communicators that are dropped leave no thread, descriptor or memory, however many are alive beside them."""
    world: Any = dist.group.WORLD
    assert isinstance(world, ProcessGroup)
    comm = world.get_comm()
    kept = [comm.split([0, 1], f"kept {number}") for number in range(alive)]
    _require_nothing_left(f"splits beside {alive}", _split(), times, 1 << 20)
    for each in kept:
        assert each is not None
        each.barrier()
    assert threading.active_count() < 50
