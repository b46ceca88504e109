"""On communicators of devices: collectives of objects, and the priority of streams."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import polyccl
import polyccl.backends
from polyccl import objects
from polyccl.store import FileStore

from .pool import SharedPool, shared_pool
from .test_objects import thing

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.backend("nccl", "rccl"),
    pytest.mark.skipif(
        not {"nccl", "rccl"} <= set(polyccl.backends.available()), reason="the installed polyccl lacks the nccl or the rccl plugin"
    ),
]


@pytest.fixture(scope="module")
def devices(stand_ins: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """Ranks whose devices are stand-ins, and do not show their memory to the host."""
    with shared_pool(tmp_path_factory.mktemp("store"), stand_ins) as pool:
        yield pool


def communicator(rank: int, size: int, directory: str, backend: str, device: str, **options: Any) -> polyccl.Comm:
    """A communicator whose tensors must be on a device."""
    return polyccl.new_comm(
        backend, f"{device}:{rank}", f"{backend} {options}", store=FileStore(directory), rank=rank, size=size, timeout=30, **options
    )


def exchange_objects(rank: int, size: int, directory: str, backend: str, device: str) -> None:
    comm = communicator(rank, size, directory, backend, device)
    with pytest.raises(polyccl.InvalidArgument, match="a tensor is in host memory, but the communicator's device is"):
        comm.all_reduce(np.ones(2))
    for _ in range(2):
        gathered: list[Any] = [None] * size
        objects.all_gather_object(comm, gathered, thing(rank))
        assert gathered == [thing(each) for each in range(size)]
        at_root: list[Any] | None = [None] * size if rank == 1 else None
        objects.gather_object(comm, thing(rank), 1, at_root)
        assert at_root is None or at_root == gathered
        words = ["one", thing(3)] if rank == 0 else [None] * 2
        objects.broadcast_object_list(comm, words, 0)
        assert words == ["one", thing(3)]
        mine: list[Any] = [None]
        objects.scatter_object_list(comm, 0, mine, [thing(each) for each in range(size)] if rank == 0 else None)
        assert mine == [thing(rank)]
        if rank == 0:
            objects.send_object_list(comm, [thing(5)], 1)
        if rank == 1:
            objects.recv_object_list(comm, mine, 0)
            assert mine == [thing(5)]
    with pytest.raises(polyccl.InvalidArgument, match="object_list"):
        objects.all_gather_object(comm, [], 1)
    child = comm.split([0, 1] if rank < 2 else [], "child")
    if child is not None:
        pair: list[Any] = [None] * 2
        objects.all_gather_object(child, pair, rank)
        assert pair == [0, 1]
    comm.barrier()
    comm.finalize()
    with pytest.raises(polyccl.InvalidArgument, match="finalized"):
        objects.all_gather_object(comm, [None] * size, 1)


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cuda"), ("rccl", "hip"), ("bridge", "cuda")])
def test_objects_travel_whatever_the_device_is(devices: SharedPool, directory: str, backend: str, device: str) -> None:
    devices.each(exchange_objects, 3, 3, directory, backend, device)


def abort_while_gathering(rank: int, size: int, directory: str) -> str:
    comm = communicator(rank, size, directory, "nccl", "cuda")
    objects.all_gather_object(comm, [None] * size, rank)
    if rank == 0:
        comm.abort()
    with pytest.raises(polyccl.CommError) as error:
        objects.all_gather_object(comm, [None] * size, rank)
    assert comm.is_aborted()
    return type(error.value).__name__


def test_abort_ends_object_collectives_of_all(devices: SharedPool, directory: str) -> None:
    assert devices.each(abort_while_gathering, 2, 2, directory) == ["Aborted", "Aborted"]


def streams_by_priority(rank: int, size: int, directory: str, backend: str, device: str) -> tuple[int, int]:
    """How many urgent streams this rank's device has, with a communicator of plain ones and then with one of urgent ones."""
    library = ctypes.CDLL(os.environ["POLYCCL_CUDA_LIBRARY" if device == "cuda" else "POLYCCL_HIP_LIBRARY"])
    urgent = getattr(library, f"polyccl_stand_in_{device}_urgent_streams")
    plain = communicator(rank, size, directory, backend, device)
    before = urgent(rank)
    high = communicator(rank, size, directory, backend, device, is_high_priority_stream=True)
    after = urgent(rank)
    assert not plain.get_options().is_high_priority_stream
    assert high.get_options().is_high_priority_stream
    return before, after


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cuda"), ("rccl", "hip")])
def test_streams_have_the_priority_that_was_asked_for(devices: SharedPool, directory: str, backend: str, device: str) -> None:
    for before, after in devices.each(streams_by_priority, 2, 2, directory, backend, device):
        assert before == 0
        assert after > 0
