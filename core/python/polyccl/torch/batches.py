"""torch's batches of messages (``batch_isend_irecv``), each as one batch of the communicator.

A device's library runs messages in the order of its stream: two ranks that both send first, and receive next, would wait for each
other for ever, unless it is told of all messages at once. torch does so for groups of its own class only, and issues a batch on
others one by one. So the code of its function is wrapped, once, with the first group of PolyCCL's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from ..errors import Aborted, InvalidArgument
from ..graphs import untraced

if TYPE_CHECKING:
    from .._native import Work as NativeWork
    from ..comm import Comm


class Batch:
    """Messages that are gathered and issued as one. Each of them has this for its native work."""

    def __init__(self, comm: Comm) -> None:
        self.gathered = comm.batch_op_create()
        self._work: NativeWork | None = None
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []  # of before it was issued

    def issue(self) -> None:
        """Issue what was gathered. Raises what `Comm.batch_op_create` does."""
        if not self.gathered.ops:
            return
        try:
            self._work = self.gathered.issue(True)
        except BaseException:
            self.drop()
            raise
        for callback in self._callbacks:
            self._work.add_done_callback(callback)

    def drop(self) -> None:
        """End without having issued anything, since an error came meanwhile."""
        self._error = Aborted("this message was never issued: an error came between it and the end of its batch; make a new group")
        for callback in self._callbacks:
            callback()

    def wait(self, timeout: float | None = None) -> None:
        """As the native work's; raises InvalidArgument before the batch is issued."""
        self._issued().wait(timeout)

    def wait_blocking(self) -> None:
        """As `wait`, on the host."""
        self._issued().wait_blocking()

    def _issued(self) -> NativeWork:
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._work is None:
            raise InvalidArgument("this message is issued at the end of its batch, and cannot be waited for before")
        return self._work

    def is_completed(self) -> bool:
        """As the native work's."""
        return self._error is not None or (self._work is not None and self._work.is_completed())

    def exception(self) -> Exception | None:
        """As the native work's."""
        return self._error if self._work is None else self._work.exception()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """As the native work's."""
        if self._work is not None:
            self._work.add_done_callback(callback)
        elif self._error is not None:
            callback()
        else:
            self._callbacks.append(callback)


_torchs: Callable[[list[Any]], list[Any]] | None = None
"""What ``batch_isend_irecv`` does by itself; None before `serve`."""


def gathered(p2p_op_list: list[Any]) -> list[Any]:
    """torch's ``batch_isend_irecv``; messages of groups that want it go as one batch."""
    assert _torchs is not None
    group: Any = (p2p_op_list[0].group or dist.group.WORLD) if p2p_op_list else None
    with group.gathering() if getattr(group, "gathers_messages", False) else nullcontext():
        works: list[Any] = _torchs(p2p_op_list)
    return works


@untraced
def _call_gathered(p2p_op_list: list[Any]) -> list[Any]:
    from polyccl.torch.batches import gathered  # this code runs among the names of torch's module

    return gathered(p2p_op_list)


def serve() -> None:
    """Let ``batch_isend_irecv`` gather the messages of groups that want it. May be called again.

    Its code is exchanged, and not the function: a script may have imported that by name before.
    """
    global _torchs
    function = inspect.unwrap(dist.batch_isend_irecv)
    if _torchs is None and isinstance(function, FunctionType) and not function.__closure__:
        _torchs = FunctionType(function.__code__, function.__globals__, function.__name__)
        function.__code__ = _call_gathered.__code__


__all__ = ["Batch", "gathered", "serve"]
