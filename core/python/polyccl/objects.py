"""Collectives of Python objects, with torchcomms' names (its ``objcol``).

Objects travel as torch.save writes them and are read with ``weights_only=True``: tensors, numbers, strings, and lists, tuples and
dicts of these; nothing that a peer sends can run code here. torch must be installed; all calls block.
"""

from __future__ import annotations

import io
from collections.abc import MutableSequence, Sequence
from typing import Any

from .comm import Comm
from .errors import CommError, InvalidArgument
from .options import Timeout


def all_gather_object(
    comm: Comm, object_list: MutableSequence[Any], obj: Any, timeout: Timeout = None, weights_only: bool = True
) -> None:
    """Fill ``object_list``, one entry for each rank, with every rank's ``obj``."""
    size = comm.get_size()
    _require_length("object_list", object_list, size)
    blocks, data = _announce(comm, obj, timeout)
    comm.all_gather_v(blocks, data, timeout=timeout)
    for rank in range(size):
        object_list[rank] = _read(blocks[rank], weights_only)


def gather_object(
    comm: Comm,
    obj: Any,
    root: int,
    object_gather_list: MutableSequence[Any] | None = None,
    timeout: Timeout = None,
    weights_only: bool = True,
) -> None:
    """Fill ``object_gather_list`` of rank ``root`` with every rank's ``obj``; elsewhere it is None."""
    at_root = comm.get_rank() == root
    if at_root:
        _require_length("object_gather_list", object_gather_list, comm.get_size())
    blocks, data = _announce(comm, obj, timeout)
    outputs = blocks if at_root else [block[:0] for block in blocks]
    empty = data[:0]
    inputs = [data if rank == root else empty for rank in range(comm.get_size())]
    comm.all_to_all(outputs, inputs, timeout=timeout)
    if at_root and object_gather_list is not None:
        for rank, block in enumerate(blocks):
            object_gather_list[rank] = _read(block, weights_only)


def broadcast_object_list(
    comm: Comm, object_list: MutableSequence[Any], root: int, timeout: Timeout = None, weights_only: bool = True
) -> None:
    """Replace the entries of ``object_list``, equally many everywhere, by those of rank ``root``."""
    torch = _torch()
    at_root = comm.get_rank() == root
    data = _write(list(object_list)) if at_root else None
    length = torch.tensor([data.numel() if data is not None else 0], dtype=torch.int64)
    comm.broadcast(length, root, timeout=timeout)
    if data is None:
        data = torch.empty(int(length), dtype=torch.uint8)
    comm.broadcast(data, root, timeout=timeout)
    received = _read(data, weights_only)
    if len(received) != len(object_list):
        raise InvalidArgument(
            f"broadcast_object_list: rank {root} gave {len(received)} objects and this rank has {len(object_list)}"
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
    size, at_root = comm.get_size(), comm.get_rank() == root
    if len(scatter_object_output_list) < 1:
        raise InvalidArgument("scatter_object_list: the output list needs an entry to put the object in")
    empty = torch.empty(0, dtype=torch.uint8)
    blocks = [empty] * size
    lengths = torch.zeros(size, dtype=torch.int64)
    if at_root:
        _require_length("scatter_object_input_list", scatter_object_input_list, size)
        blocks = [_write(obj) for obj in scatter_object_input_list or ()]
        lengths = torch.tensor([block.numel() for block in blocks], dtype=torch.int64)
    comm.broadcast(lengths, root, timeout=timeout)
    received = torch.empty(int(lengths[comm.get_rank()]), dtype=torch.uint8)
    outputs = [received if rank == root else torch.empty(0, dtype=torch.uint8) for rank in range(size)]
    comm.all_to_all(outputs, blocks, timeout=timeout)
    scatter_object_output_list[0] = _read(received, weights_only)


def send_object_list(comm: Comm, object_list: Sequence[Any], dst: int, timeout: Timeout = None) -> None:
    """Send ``object_list`` to rank ``dst``."""
    torch = _torch()
    data = _write(list(object_list))
    comm.send(torch.tensor([data.numel()], dtype=torch.int64), dst, timeout=timeout)
    comm.send(data, dst, timeout=timeout)


def recv_object_list(
    comm: Comm, object_list: MutableSequence[Any], src: int, timeout: Timeout = None, weights_only: bool = True
) -> None:
    """Replace the entries of ``object_list`` by those that rank ``src`` sends, equally many."""
    torch = _torch()
    length = torch.zeros(1, dtype=torch.int64)
    comm.recv(length, src, timeout=timeout)
    data = torch.empty(int(length), dtype=torch.uint8)
    comm.recv(data, src, timeout=timeout)
    received = _read(data, weights_only)
    if len(received) != len(object_list):
        raise InvalidArgument(f"recv_object_list: rank {src} sent {len(received)} objects and this rank has {len(object_list)}")
    object_list[:] = received


def _announce(comm: Comm, obj: Any, timeout: Timeout) -> tuple[list[Any], Any]:
    """Tell all ranks how long this rank's object is. Returns memory for all objects, by rank, and this rank's bytes."""
    torch = _torch()
    data = _write(obj)
    lengths = torch.empty(comm.get_size(), dtype=torch.int64)
    comm.all_gather_single(lengths, torch.tensor([data.numel()], dtype=torch.int64), timeout=timeout)
    return [torch.empty(n, dtype=torch.uint8) for n in lengths.tolist()], data


def _write(obj: Any) -> Any:
    torch = _torch()
    buffer = io.BytesIO()
    torch.save(obj, buffer)
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


def _require_length(what: str, values: Any, size: int) -> None:
    if values is None or len(values) != size:
        raise InvalidArgument(f"{what} must have one entry for each of the {size} ranks")


__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]
