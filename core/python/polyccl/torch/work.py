"""The handles of operations that torch sees: `Work`, whose future completes when the operation does.

A future's callbacks are the user's code and may take long, so that the threads which complete operations must not run them. One
Python thread does: it wakes for whatever is done by then and completes all of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d as c10d

from ..errors import CommError, CommTimeout
from ..graphs import untraced

if TYPE_CHECKING:
    from .. import _native

NO_TIMEOUT = timedelta(0)
"""What c10d means by no timeout of its own; the operation's holds."""


@untraced
class Work(c10d.Work):  # type: ignore[misc]
    """One or several operations of PolyCCL under way, as torch wants it.

    ``outputs`` is what `result` and the future give. ``finish`` runs once after the operations: it brings results home that
    were received into copies. ``on_host`` lets `wait` block the host for operations of devices too.
    """

    def __init__(
        self,
        parts: Sequence[_native.Work],
        outputs: Any,
        finish: Callable[[], None] | None = None,
        on_host: bool = False,
        source: int = -1,
    ) -> None:
        super().__init__()
        self._parts = parts
        self._outputs = outputs
        self._finish = finish
        self._on_host = on_host
        self._source = source
        self._futures: list[tuple[Any, bool]] = []

    # ---- waiting ------------------------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until done; for operations of devices let the current stream wait. Raises the operation's own error.

        With a timeout, raises CommTimeout after it; the operation then goes on.
        """
        if timeout == NO_TIMEOUT:
            for part in self._parts:
                if self._on_host:
                    part.wait_blocking()
                else:
                    part.wait()
        else:
            end = monotonic() + timeout.total_seconds()
            for part in self._parts:
                part.wait(max(0.0, end - monotonic()))
        if self._finish is not None:
            self._bring_home()
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As `wait`, which lets the current stream wait."""
        self.wait()

    def _bring_home(self) -> None:
        """Run ``finish``, once; others that come meanwhile wait for it."""
        with _finishing:
            finish, self._finish = self._finish, None
            if finish is not None:
                with torch.no_grad():
                    finish()

    # ---- how it stands ------------------------------------------------------------------------------------------------------

    def is_completed(self) -> bool:
        """True once it is done, with or without an error. Does not block."""
        if not all(part.is_completed() for part in self._parts):
            return False
        if self._finish is not None and self.exception() is None:
            self._bring_home()
        return True

    def is_success(self) -> bool:
        """True once it is done without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """The error of the first operation that failed; None while there is none."""
        for part in self._parts:
            error = part.exception()
            if error is not None:
                return error
        return None

    def result(self) -> Any:
        """The output tensors, as the call got them. Does not wait."""
        return self._outputs

    def source_rank(self) -> int:
        """The rank in the group that a message came from; -1 where it was named by the caller."""
        return self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    # ---- futures ------------------------------------------------------------------------------------------------------------

    def get_future(self) -> Any:
        """A torch Future that completes when the operation does, with `result`, or the operation's error."""
        return self._future(verdict=False)

    def get_future_result(self) -> Any:
        """A torch Future of c10d's WorkResult: how the operation ended, never an error."""
        return self._future(verdict=True)

    def _future(self, verdict: bool) -> Any:
        future = torch.futures.Future(devices=_devices_of(self._outputs))
        if all(part.is_completed() for part in self._parts):
            self._complete(future, verdict)
            return future
        first = not self._futures
        self._futures.append((future, verdict))
        if first:
            for part in self._parts:
                part.add_done_callback(self._part_is_done)
        elif self.is_completed():  # the callbacks may have come before the future was in the list
            _completer.take(self)
        return future

    def _part_is_done(self) -> None:
        if all(part.is_completed() for part in self._parts):
            _completer.take(self)

    def _complete_futures(self) -> None:
        while self._futures:
            self._complete(*self._futures.pop(0))

    def _complete(self, future: Any, verdict: bool) -> None:
        error = self.exception()
        if error is None and self._finish is not None:
            try:
                self._bring_home()
            except Exception as raised:
                error = raised
        if verdict:
            future.set_result(_verdict(error))
        elif error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(error)

    def __repr__(self) -> str:
        return f"<polyccl.torch Work of {len(self._parts)}: {', '.join(map(repr, self._parts)) or 'done'}>"


_finishing = threading.RLock()


def _verdict(error: Exception | None) -> int:
    results = c10d.WorkResult
    if error is None:
        return int(results.SUCCESS)
    if isinstance(error, CommTimeout):
        return int(results.TIMEOUT)
    return int(results.COMM_ERROR if isinstance(error, CommError) else results.UNKNOWN)


def _devices_of(outputs: Any) -> list[torch.device]:
    """The accelerators that outputs lie on: a Future has to know them."""
    if isinstance(outputs, torch.Tensor):
        return [] if outputs.is_cpu else [outputs.device]
    found: list[torch.device] = []
    for each in outputs or ():
        found += [device for device in _devices_of(each) if device not in found]
    return found


class _Completer:
    """The thread that completes futures. Starts with the first one; a daemon, so that it holds up no exit."""

    def __init__(self) -> None:
        self._done: deque[Work] = deque()
        self._wake = threading.Event()
        self._starting = threading.Lock()
        self._started = False

    def take(self, work: Work) -> None:
        """Complete the futures of ``work`` soon. From any thread; does not block."""
        self._done.append(work)
        self._wake.set()
        if not self._started:
            with self._starting:
                if not self._started:
                    threading.Thread(target=self._run, name="polyccl-futures", daemon=True).start()
                    self._started = True

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._done:
                self._done.popleft()._complete_futures()


_completer = _Completer()

__all__ = ["NO_TIMEOUT", "Work"]
