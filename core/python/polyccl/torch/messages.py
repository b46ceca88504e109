"""Messages from whoever sends first, and the barrier that names who is missing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ..deadlines import bounded
from ..errors import CommError, CommTimeout
from ..graphs import untraced
from .work import Work

if TYPE_CHECKING:
    from .._native import Work as NativeWork
    from ..comm import Comm
    from ..store import Store
    from .process_group import ProcessGroup


class FromAnyone:
    """A receive whose sender is not known yet; looks like a work of the communicator. A thread of its own waits for a message."""

    def __init__(self, comm: Comm, tensor: torch.Tensor, tag: int, after: FromAnyone | None) -> None:
        self.source = -1
        self._comm, self._tag, self._after = comm, tag, after
        self._tensor: torch.Tensor | None = tensor  # until it is the operation that holds it
        self._process = os.getpid()
        self._work: NativeWork | None = None
        self._error: Exception | None = None
        self._matched = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        threading.Thread(target=self._match, name="polyccl-any-source", daemon=True).start()

    def _match(self) -> None:
        try:
            if self._after is not None:  # receives of one tag match in the order of their calls
                self._after._matched.wait()
                self._after = None
            self.source = self._comm.find_sender(self._tag)
            self._work = self._comm.recv(self._tensor, self.source, True, tag=self._tag)
        except Exception as error:  # whatever it is, who waits must learn of it
            self._error = error
        self._tensor = None
        with self._lock:
            self._matched.set()
        for callback in self._callbacks:
            self._when_received(callback)

    def _when_received(self, callback: Callable[[], None]) -> None:
        if self._work is None:
            callback()
        else:
            self._work.add_done_callback(callback)

    def wait(self, timeout: float | None = None) -> None:
        """As the native work's."""
        began = time.monotonic()
        self._give_up_in_child()
        if not self._matched.wait(None if timeout is None else bounded(timeout)):
            raise CommTimeout(f"recv from any rank on communicator '{self._comm.get_name()}': nothing came within {timeout} s")
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._work is not None:
            self._work.wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - began)))

    def _give_up_in_child(self) -> None:
        """In a forked child, where no thread waits for the message, end with an error that says so."""
        if os.getpid() != self._process and not self._matched.is_set():
            self._error = CommError(
                f"recv from any rank on communicator '{self._comm.get_name()}': it was on its way when this process was forked, "
                "and belongs to the parent process; create a communicator in the child"
            )
            self._matched.set()

    def wait_blocking(self) -> None:
        """As the native work's."""
        self.wait()

    def is_completed(self) -> bool:
        """As the native work's."""
        self._give_up_in_child()
        return self._matched.is_set() and (self._work is None or self._work.is_completed())

    def exception(self) -> Exception | None:
        """As the native work's."""
        return self._error or (self._work.exception() if self._work is not None else None)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """As the native work's."""
        with self._lock:
            if not self._matched.is_set():
                self._callbacks.append(callback)
                return
        self._when_received(callback)


@untraced
class AnySourceWork(Work):
    """A `Work` that learns its source rank."""

    def source_rank(self) -> int:
        """The rank in the group that the message came from; waits for it."""
        part: Any = self._parts[0]
        part._matched.wait()
        return int(part.source)


def monitored_barrier(group: ProcessGroup, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Wait until all ranks are here, by way of the communicator's own store; tells which are not, and breaks nothing.

    Rank 0 waits for every other rank and then lets them go. Raises CommTimeout: on rank 0 with the first rank that did not come,
    or with all of them where ``wait_all_ranks`` is set; on the others with what rank 0 says, or that it does not answer.
    """
    store = group.get_comm()._group.store
    rank, size, limit = group.rank(), group.size(), timeout.total_seconds()
    group._barriers += 1
    prefix = f"monitored_barrier/{group._barriers}"
    if rank != 0:
        store.set(f"{prefix}/{rank}", b"here")
        _wait_for_verdict(store, prefix, group, limit)
        return
    verdict = _verdict(store, prefix, size, limit, wait_all_ranks)
    store.set(f"{prefix}/verdict", verdict.encode())
    for other in range(1, size):
        store.delete(f"{prefix}/{other}")
    if not verdict:  # all have come here, so that all have read the last verdict
        store.delete(f"monitored_barrier/{group._barriers - 1}/verdict")
    if verdict:
        raise CommTimeout(f"{verdict} (group '{group.group_name}')")


def _verdict(store: Store, prefix: str, size: int, limit: float, wait_all_ranks: bool) -> str:
    """What rank 0 finds wrong, in c10d's words; empty where all ranks came."""
    end, missing, milliseconds = time.monotonic() + limit, [], int(limit * 1000)
    for other in range(1, size):
        left = max(0.0, end - time.monotonic())
        try:
            store.get(f"{prefix}/{other}", left, f"rank {other}")
        except CommTimeout:
            if not left and not wait_all_ranks:
                came = ", ".join(map(str, range(1, other))) or "none"
                return f"Rank 0 timed out in monitoredBarrier after {milliseconds} ms; ranks that had come by then: {came}"
            missing.append(other)
            if not wait_all_ranks:
                break
    ranks = ", ".join(map(str, missing))
    return f"Rank{'s' * (len(missing) > 1)} {ranks} failed to pass monitoredBarrier in {milliseconds} ms" if missing else ""


def _wait_for_verdict(store: Store, prefix: str, group: ProcessGroup, limit: float) -> None:
    where = f"Rank {group.rank()} successfully reached monitoredBarrier of group '{group.group_name}', but"
    try:
        # Rank 0 may have begun to wait later than this rank, and needs its own time.
        verdict = store.get(f"{prefix}/verdict", 2 * limit, "rank 0").decode()
    except CommTimeout:
        raise CommTimeout(f"{where} rank 0 did not answer within {2 * limit} s; check rank 0") from None
    if verdict:
        raise CommTimeout(f"{where} rank 0 says: {verdict}")


__all__ = ["AnySourceWork", "FromAnyone", "monitored_barrier"]
