"""`new_comm` and `TorchComm`: PolyCCL's own, but for what scripts for torchcomms see another way."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from ... import arguments, comm, create, environment
from ...arguments import Timeout
from ...comm import Comm, Hints
from ...deadlines import bounded
from ...errors import InvalidArgument, UnsupportedOperation
from ...graphs import untraced
from .names import BatchP2POptions, CommOptions, P2POp, P2POpType, TorchWork

Value = TypeVar("Value")
Self = TypeVar("Self", bound="TorchComm")

FOR_TORCHCOMMS = ("persistent_store", "is_high_priority_stream")
"""Hints of torchcomms that PolyCCL serves otherwise: it always uses a store as it is, and takes the priority as an argument."""


@untraced
class TorchComm(Comm):
    """A communicator under torchcomms' name; see `polyccl.Comm`. Made by `new_comm` and `split`."""

    @classmethod
    def of(cls: type[Self], comm: Comm) -> Self:
        """The same communicator as one of this class, in place of ``comm``, which must not be used any more."""
        return cls(comm._group, comm._native)

    def get_device(self) -> Any:
        """The torch.device that tensors must be on; without an index where none was given."""
        import torch

        return torch.device(self._group.device.replace("hip", "cuda"))

    def get_options(self) -> CommOptions:  # type: ignore[override]
        """The options it was created with."""
        options = self._group.options
        return CommOptions(
            options.abort_process_on_timeout_or_error,
            timedelta(seconds=bounded(options.timeout)),
            self._group.store,
            options.enable_reconfigure,
            dict(options.hints),
        )

    def split(self: Self, ranks: Sequence[int], name: str, hints: Hints = None, timeout: Timeout = None) -> Self | None:
        """See `polyccl.Comm.split`."""
        child = super().split(ranks, name, hints, timeout)
        return None if child is None else self.of(child)

    def batch_op_create(self) -> BatchSendRecv:
        """See `polyccl.Comm.batch_op_create`."""
        return BatchSendRecv(self)

    def is_abort_supported(self) -> bool:
        """True: every communicator of PolyCCL can be aborted."""
        return True

    # ---- what PolyCCL has not -----------------------------------------------------------------------------------------------

    def get_backend_impl(self) -> NoReturn:
        """There is no such object. Raises UnsupportedOperation."""
        raise UnsupportedOperation(
            f"get_backend_impl on communicator '{self.get_name()}': a backend of PolyCCL is no Python object; get_backend() and "
            "get_backend_version() tell which library it is"
        )

    unsafe_get_backend = get_backend_impl

    def get_mem_allocator(self) -> NoReturn:
        """Allocators of a library's own are not there. Raises UnsupportedOperation."""
        self._not_yet("get_mem_allocator")

    def get_device_transport(self) -> NoReturn:
        """An interface for kernels is not there. Raises UnsupportedOperation."""
        self._not_yet("get_device_transport")

    def all_gather_p_init(self, output: Any, hints: Hints = None, timeout: Timeout = None) -> NoReturn:
        """Persistent operations are not there. Raises UnsupportedOperation."""
        self._not_yet("all_gather_p_init")


@untraced
class BatchSendRecv(comm.BatchSendRecv):
    """Sends and receives that are issued together. Made by `TorchComm.batch_op_create`; ``ops`` holds `P2POp`."""

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        """Add a send to rank ``dst``."""
        _, _, dst, tag = self._checked((True, tensor, dst, tag))
        self.ops.append(P2POp(P2POpType.SEND, tensor, dst, tag))

    def recv(self, tensor: Any, src: int, tag: int = 0) -> None:
        """Add a receive from rank ``src``."""
        _, _, src, tag = self._checked((False, tensor, src, tag))
        self.ops.append(P2POp(P2POpType.RECV, tensor, src, tag))

    def issue(
        self,
        async_op: bool = False,
        options: BatchP2POptions | None = None,  # type: ignore[override]
        timeout: Timeout = None,
    ) -> TorchWork:
        """Issue all of it. The work is done when every operation is. An empty batch raises InvalidArgument."""
        if options is None:
            return super().issue(async_op, None, timeout)
        arguments.instance("options", options, BatchP2POptions, "a BatchP2POptions, or None")
        return super().issue(async_op, options.hints, options.timeout if timeout is None else timeout)


def new_comm(
    backend: str,
    device: Any,
    name: str | None = None,
    abort_process_on_timeout_or_error: bool | None = None,
    timeout: Timeout = None,
    is_high_priority_stream: bool | None = None,
    store: Any = None,
    enable_reconfigure: bool = False,
    hints: Mapping[str, str] | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
) -> TorchComm:
    """Create a communicator; see `polyccl.new_comm`, whose errors it raises.

    The variables TORCHCOMM_RANK and TORCHCOMM_SIZE, TORCHCOMM_TIMEOUT_SECONDS and TORCHCOMM_ABORT_ON_ERROR hold where the
    arguments are not given, before PolyCCL's own.
    """
    known, priority = _hints(hints)
    if rank is None and size is None:
        rank, size = _variable("TORCHCOMM_RANK", int, "a number"), _variable("TORCHCOMM_SIZE", int, "a number")
    if timeout is None:
        timeout = _variable("TORCHCOMM_TIMEOUT_SECONDS", float, "a number of seconds")
    if abort_process_on_timeout_or_error is None:
        abort_process_on_timeout_or_error = _variable("TORCHCOMM_ABORT_ON_ERROR", _truth, "true or false")
    if is_high_priority_stream is None:
        is_high_priority_stream = priority
    made = create.new_comm(
        carrier(arguments.text("backend", backend, "a backend's name")),
        device,
        name,
        abort_process_on_timeout_or_error,
        timeout,
        is_high_priority_stream,
        store,
        enable_reconfigure,
        known,
        rank=rank,
        size=size,
    )
    return TorchComm.of(made)


def carrier(backend: str) -> str:
    """What carries a communicator for which a script names ``backend``: that, or ``auto`` where the job tells its islands."""
    told = environment.text("POLYCCL_LOCAL") or environment.text("POLYCCL_ISLAND")
    return create.AUTO if told and backend not in (create.AUTO, create.BRIDGE) else backend


def _hints(given: Mapping[str, str] | None) -> tuple[dict[str, str] | None, bool | None]:
    """The hints for PolyCCL, and what they say of the priority."""
    if given is None:
        return None, None
    hints = arguments.string_mapping("hints", given)
    priority = hints.get("is_high_priority_stream")
    known = {key: value for key, value in hints.items() if key not in FOR_TORCHCOMMS}
    try:
        return known, None if priority is None else _truth(priority)
    except ValueError:
        arguments.refuse("hint 'is_high_priority_stream'", priority, "true or false")


def _truth(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "y": True, "0": False, "false": False, "no": False, "n": False}
    if text.lower() not in values:
        raise ValueError(text)
    return values[text.lower()]


def _variable(name: str, read: Callable[[str], Value], wanted: str) -> Value | None:
    """The value of an environment variable of torchcomms; None where it is not set."""
    text = os.environ.get(name, "").strip()
    try:
        return read(text) if text else None
    except ValueError:
        raise InvalidArgument(f"environment variable {name} is {text!r}; it must be {wanted}") from None


__all__ = ["BatchSendRecv", "TorchComm", "carrier", "new_comm"]
