"""Torch's tensors that have no memory of their own, or other values in it than they show, are refused with what to do instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from polyccl import Comm, CommError, InvalidArgument, ReduceOp, UnsupportedOperation

from .pool import SharedPool
from .ranks import usable
from .shapes import Shape

pytest.importorskip("torch")
SHAPE = Shape("host=1,host=1")


def fake() -> Any:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(4)


def distributed() -> Any:
    import torch
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (1,)), [Replicate()])


def emptied() -> Any:
    import torch

    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def make(what: str) -> Any:
    import torch

    makers: dict[str, Callable[[], Any]] = {
        "FakeTensor": fake,
        "DTensor": distributed,
        "meta": lambda: torch.ones(4, device="meta"),
        "sparse": lambda: torch.ones(4).to_sparse(),
        "conj": lambda: torch.ones(4, dtype=torch.complex64).conj(),
        "neg": lambda: torch._neg_view(torch.ones(4)),
        "freed": emptied,
        "transposed": lambda: torch.ones(4, 3).T,
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.quint8),
    }
    return makers[what]()


REFUSED = {
    "FakeTensor": "FakeTensor",
    "DTensor": "DTensor",
    "meta": "all_reduce",
    "sparse": "all_reduce",
    "conj": ".resolve_conj()",
    "neg": ".resolve_neg()",
    "freed": "all_reduce",
    "transposed": ".contiguous()",
    "quantized": "all_reduce",
}


def refused(comm: Comm, what: str) -> str:
    tensor = make(what)
    with pytest.raises(InvalidArgument) as error:
        comm.all_reduce(tensor)
    usable(comm)
    return str(error.value)


@pytest.mark.parametrize("what", REFUSED)
def test_a_tensor_without_plain_memory_is_refused(jobs: SharedPool, what: str) -> None:
    for text in jobs.run(refused, SHAPE, what):
        assert REFUSED[what] in text


def sums_that_are_not_defined(comm: Comm) -> None:
    import torch

    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz):
        tensor = torch.ones(8).to(dtype)
        with pytest.raises(UnsupportedOperation, match=re.escape("SUM is not defined on float8")):
            comm.all_reduce(tensor)
        comm.broadcast(tensor, 0)  # moving them is fine
    with pytest.raises(UnsupportedOperation, match="BXOR is not defined on bfloat16"):
        comm.all_reduce(torch.ones(4, dtype=torch.bfloat16), ReduceOp.BXOR)
    usable(comm)


def test_eight_bit_floats_move_but_are_not_summed(jobs: SharedPool) -> None:
    jobs.run(sums_that_are_not_defined, SHAPE)


def torch_works(comm: Comm) -> None:
    import torch

    rank, size = comm.get_rank(), comm.get_size()
    leaf = torch.ones(4, requires_grad=True)
    try:
        comm.all_reduce(leaf)
    except CommError as error:
        raise AssertionError("a tensor that requires grad is an ordinary tensor") from error
    assert leaf.detach().tolist() == [float(size)] * 4
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool):
        tensor = torch.ones(3, 5, dtype=dtype)
        comm.all_reduce(tensor)
        assert tensor.eq(1 if dtype == torch.bool else size).all()
    view = torch.zeros(4, 6)[1:3]
    comm.broadcast(view.fill_(rank + 1), 0)
    assert view.eq(1).all()
    factor = torch.tensor(2.0)
    scaled = torch.ones(4)
    comm.all_reduce(scaled, ReduceOp.PREMUL_SUM(factor))
    assert scaled.eq(2.0 * size).all()
    empty = torch.empty(0, 3)
    comm.all_reduce(empty)


def test_ordinary_tensors_of_torch_work(jobs: SharedPool) -> None:
    jobs.run(torch_works, SHAPE)
