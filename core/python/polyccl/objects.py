"""Collectives of Python objects, with torchcomms' names (its ``objcol``).

Objects travel as torch.save writes them and are read with ``weights_only=True``: tensors, numbers, strings, and lists, tuples and
dicts of these; nothing that a peer sends can run code here. They travel in host memory, whatever the communicator's device is.
torch must be installed; all calls block. Tensors among the objects arrive on the device that they were on.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from typing import Any

from . import arguments
from .arguments import Timeout
from .comm import Comm
from .errors import CommError, InvalidArgument


def all_gather_object(
    comm: Comm, object_list: MutableSequence[Any], obj: Any, timeout: Timeout = None, weights_only: bool = True
) -> None:
    """Fill ``object_list``, one entry for each rank, with every rank's ``obj``."""
    with _refusals("all_gather_object", comm) as host:
        arguments.object_list("object_list", object_list, host.get_size())
        timeout, weights_only = _terms(timeout, weights_only)
        data = _write("obj", obj)
    blocks = _announce(host, data, timeout)
    host.all_gather_v(blocks, data, timeout=timeout)
    for rank, block in enumerate(blocks):
        object_list[rank] = _read(block, weights_only)


def gather_object(
    comm: Comm,
    obj: Any,
    root: int,
    object_gather_list: MutableSequence[Any] | None = None,
    timeout: Timeout = None,
    weights_only: bool = True,
) -> None:
    """Fill ``object_gather_list`` of rank ``root`` with every rank's ``obj``; elsewhere it is None."""
    with _refusals("gather_object", comm) as host:
        root = arguments.rank("root", root, host.get_size())
        at_root = host.get_rank() == root
        if at_root:
            arguments.object_list("object_gather_list", object_gather_list, host.get_size())
        timeout, weights_only = _terms(timeout, weights_only)
        data = _write("obj", obj)
    blocks = _announce(host, data, timeout)
    outputs = blocks if at_root else [block[:0] for block in blocks]
    empty = data[:0]
    inputs = [data if rank == root else empty for rank in range(host.get_size())]
    host.all_to_all(outputs, inputs, timeout=timeout)
    if at_root and object_gather_list is not None:
        for rank, block in enumerate(blocks):
            object_gather_list[rank] = _read(block, weights_only)


def broadcast_object_list(
    comm: Comm, object_list: MutableSequence[Any], root: int, timeout: Timeout = None, weights_only: bool = True
) -> None:
    """Replace the entries of ``object_list``, equally many everywhere, by those of rank ``root``."""
    torch = _torch()
    with _refusals("broadcast_object_list", comm) as host:
        root = arguments.rank("root", root, host.get_size())
        arguments.object_list("object_list", object_list)
        timeout, weights_only = _terms(timeout, weights_only)
        data = _write("object_list", list(object_list)) if host.get_rank() == root else None
    length = torch.tensor([data.numel() if data is not None else 0], dtype=torch.int64)
    host.broadcast(length, root, timeout=timeout)
    if data is None:
        data = torch.empty(int(length), dtype=torch.uint8)
    host.broadcast(data, root, timeout=timeout)
    received = _read(data, weights_only)
    if len(received) != len(object_list):
        raise InvalidArgument(
            f"broadcast_object_list: object_list has {len(object_list)} entries on this rank, and rank {root} gave {len(received)}"
        )
    object_list[:] = received


def scatter_object_list(
    comm: Comm,
    root: int,
    scatter_object_output_list: MutableSequence[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    timeout: Timeout = None,
    weights_only: bool = True,
) -> None:
    """Put entry r of rank ``root``'s input list into entry 0 of rank r's output list."""
    torch = _torch()
    size = 0
    with _refusals("scatter_object_list", comm) as host:
        size = host.get_size()
        root = arguments.rank("root", root, size)
        arguments.object_list("scatter_object_output_list", scatter_object_output_list)
        if len(scatter_object_output_list) < 1:
            arguments.refuse("scatter_object_output_list", scatter_object_output_list, "a list with an entry for the object")
        timeout, weights_only = _terms(timeout, weights_only)
        blocks = [torch.empty(0, dtype=torch.uint8)] * size
        if host.get_rank() == root:
            given = arguments.object_list("scatter_object_input_list", scatter_object_input_list, size, filled=False)
            blocks = [_write(f"scatter_object_input_list[{rank}]", each) for rank, each in enumerate(given)]
    lengths = torch.tensor([block.numel() for block in blocks], dtype=torch.int64)
    host.broadcast(lengths, root, timeout=timeout)
    received = torch.empty(int(lengths[host.get_rank()]), dtype=torch.uint8)
    outputs = [received if rank == root else torch.empty(0, dtype=torch.uint8) for rank in range(size)]
    host.all_to_all(outputs, blocks, timeout=timeout)
    scatter_object_output_list[0] = _read(received, weights_only)


def send_object_list(comm: Comm, object_list: Sequence[Any], dst: int, timeout: Timeout = None) -> None:
    """Send ``object_list`` to rank ``dst``."""
    torch = _torch()
    with _refusals("send_object_list", comm, collective=False) as host:
        dst = arguments.rank("dst", dst, host.get_size())
        timeout, _ = _terms(timeout, True)
        data = _write("object_list", list(arguments.object_list("object_list", object_list, filled=False)))
    host.send(torch.tensor([data.numel()], dtype=torch.int64), dst, timeout=timeout)
    host.send(data, dst, timeout=timeout)


def recv_object_list(
    comm: Comm, object_list: MutableSequence[Any], src: int, timeout: Timeout = None, weights_only: bool = True
) -> None:
    """Replace the entries of ``object_list`` by those that rank ``src`` sends, equally many."""
    torch = _torch()
    with _refusals("recv_object_list", comm, collective=False) as host:
        src = arguments.rank("src", src, host.get_size())
        timeout, weights_only = _terms(timeout, weights_only)
        arguments.object_list("object_list", object_list)
    length = torch.zeros(1, dtype=torch.int64)
    host.recv(length, src, timeout=timeout)
    data = torch.empty(int(length), dtype=torch.uint8)
    host.recv(data, src, timeout=timeout)
    received = _read(data, weights_only)
    if len(received) != len(object_list):
        raise InvalidArgument(
            f"recv_object_list: object_list has {len(object_list)} entries on this rank, and rank {src} sent {len(received)}"
        )
    object_list[:] = received


@contextmanager
def _refusals(call: str, comm: Comm, collective: bool = True) -> Iterator[Comm]:
    """Give the communicator that carries the objects of ``comm``; announce the block's refusals if the call is collective."""
    arguments.instance("comm", comm, Comm, "a communicator")
    host = comm._on_host()
    with comm._refusals(call, host._native.announce_refusal if collective else None):
        yield host


def _terms(timeout: Timeout, weights_only: bool) -> tuple[float | None, bool]:
    return arguments.optional_seconds(timeout), arguments.flag("weights_only", weights_only)


def _announce(host: Comm, data: Any, timeout: Timeout) -> list[Any]:
    """Tell all ranks how long this rank's object is. Returns memory for all objects, by rank."""
    torch = _torch()
    lengths = torch.empty(host.get_size(), dtype=torch.int64)
    host.all_gather_single(lengths, torch.tensor([data.numel()], dtype=torch.int64), timeout=timeout)
    return [torch.empty(n, dtype=torch.uint8) for n in lengths.tolist()]


def _write(name: str, obj: Any) -> Any:
    torch = _torch()
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
    except Exception as error:  # of pickle, or of a method of the object's own
        lines = str(error).splitlines() or [type(error).__name__]
        arguments.refuse(name, obj, f"an object that torch.save can write ({lines[0]})")
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _read(data: Any, weights_only: bool) -> Any:
    try:
        return _torch().load(io.BytesIO(data.numpy().tobytes()), weights_only=weights_only)
    except Exception as error:
        # torch's text is long, and begins with advice that a peer must not talk anyone into.
        lines = str(error).splitlines() or [type(error).__name__]
        said = next((line.partition("WeightsUnpickler error: ")[2] or line for line in lines if "GLOBAL" in line), lines[0])
        raise CommError(f"an object from another rank cannot be read: {said.strip()}") from None


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise InvalidArgument("object collectives write objects with torch, which is not installed; send tensors instead") from None
    return torch


__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]
