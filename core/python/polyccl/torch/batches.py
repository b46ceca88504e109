"""torch's batches of messages (``batch_isend_irecv``), each as one batch of the communicator.

A device's library runs messages in the order of its stream: two ranks that both send first, and receive next, would wait for each
other for ever, unless it is told of all messages at once. torch does so for groups of its own class only, and issues a batch on
others one by one. So its function is wrapped, once, with the first group of PolyCCL's.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

if TYPE_CHECKING:
    from .._native import Work as NativeWork
    from ..comm import Comm


class Batch:
    """Messages that are gathered and issued as one. Each of them has this for its native work."""

    def __init__(self, comm: Comm) -> None:
        self.gathered = comm.batch_op_create()
        self._work: NativeWork | None = None

    def issue(self) -> None:
        """Issue what was gathered. Raises what `Comm.batch_op_create` does."""
        if self.gathered.ops:
            self._work = self.gathered.issue(True)

    def __getattr__(self, name: str) -> Any:
        if self._work is None:
            raise AttributeError(name)
        return getattr(self._work, name)


def serve() -> None:
    """Let ``batch_isend_irecv`` gather the messages of groups that want it. May be called again."""
    original = dist.batch_isend_irecv
    if hasattr(original, "_polyccl_wraps"):
        return

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        group: Any = (p2p_op_list[0].group or dist.group.WORLD) if p2p_op_list else None
        gathering = group.gathering() if getattr(group, "gathers_messages", False) else nullcontext()
        with gathering:
            works: list[Any] = original(p2p_op_list)
        return works

    batch_isend_irecv._polyccl_wraps = original  # type: ignore[attr-defined]
    dist.batch_isend_irecv = batch_isend_irecv
    dist.distributed_c10d.batch_isend_irecv = batch_isend_irecv


__all__ = ["Batch", "serve"]
