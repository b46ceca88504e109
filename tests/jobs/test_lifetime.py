"""What an operation holds until it is done: its memory, whatever becomes of the tensor, and its communicator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import polyccl
from polyccl import Comm

from .marks import named
from .pool import SharedPool
from .shapes import Shape

SHAPES = named("host=2", "host=1,host=1", "gloo=2")
LENGTH = 1 << 20


def drop_a_communicator(comm: Comm) -> None:
    part = comm.split([0, 1], "part")
    assert part is not None
    total, got = np.ones(LENGTH, np.float32), np.zeros(3)
    works = [part.recv(got, 1 - comm.get_rank(), async_op=True), part.all_reduce(total, async_op=True)]
    other = part.send(np.ones(3), 1 - comm.get_rank(), async_op=True)
    del part
    gc.collect()
    for work in (*works, other):
        work.wait(20)
    assert (total == 2).all()
    assert (got == 1).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_communicator_lives_until_its_works_are_done(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(drop_a_communicator, shape)


def change_tensors(comm: Comm) -> None:
    torch = pytest.importorskip("torch")

    def set_storage(tensor: Any) -> None:
        tensor.set_(torch.zeros(1).untyped_storage())

    def set_data(tensor: Any) -> None:
        tensor.data = torch.zeros(1)

    for change in (set_storage, set_data):
        for _ in range(3):
            first = comm.get_rank() == 0
            tensor = torch.full((LENGTH,), 1.0)
            view = tensor.numpy() if first else None  # sees the memory itself
            if first:
                work = comm.all_reduce(tensor, async_op=True)
                change(tensor)
            foreign = [torch.full((LENGTH,), 7.0) for _ in range(3)]
            comm.send(np.zeros(1), 1, tag=9) if first else comm.recv(np.zeros(1), 0, tag=9)
            if first:
                work.wait()
                assert (view == 2).all()
            else:
                comm.all_reduce(tensor)
            assert all(bool((each == 7).all()) for each in foreign), "foreign memory was overwritten"


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_stays_though_a_tensor_is_given_other(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(change_tensors, shape)


def resize_arrays(comm: Comm) -> None:
    if comm.get_rank() == 0:
        arrays: list[Callable[[], tuple[Any, Any]]] = [lambda: (np.ones(LENGTH),) * 2, lambda: _viewed(np.ones(LENGTH))]
        for make in arrays:
            owner, view = make()
            work = comm.all_reduce(view, async_op=True)
            with pytest.raises(ValueError, match="cannot resize"):
                owner.resize((1,), refcheck=False)
            comm.send(np.zeros(1), 1)
            work.wait()
            assert (owner == 2).all()
            comm.barrier()
    else:
        for _ in range(2):
            comm.recv(np.zeros(1), 0)
            comm.all_reduce(np.ones(LENGTH))
            comm.barrier()


def _viewed(array: Any) -> tuple[Any, Any]:
    return array, array[:][:]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_array_is_not_resized_under_an_operation(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(resize_arrays, shape)


def resize_storages(comm: Comm) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(LENGTH)
    if comm.get_rank() == 0:
        work = comm.all_reduce(tensor[1:], async_op=True)
        with pytest.raises(RuntimeError, match="cannot be resized: an operation"):
            tensor.untyped_storage().resize_(0)
        comm.send(np.zeros(1), 1)
        work.wait()
    else:
        comm.recv(np.zeros(1), 0)
        comm.all_reduce(tensor[1:])
    assert (tensor[1:] == 2).all()
    comm.barrier()
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_storage_is_not_resized_under_an_operation(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(resize_storages, shape)


def resize_afterwards(comm: Comm) -> None:
    array = np.ones(1000)
    comm.all_reduce(array)
    array.resize((10,), refcheck=False)
    assert isinstance(comm, polyccl.Comm)


def test_an_array_may_be_resized_once_the_operation_is_done(jobs: SharedPool) -> None:
    jobs.run(resize_afterwards, Shape("host=2"))
