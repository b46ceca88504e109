"""The handles of operations that torch sees: `Work`, and the futures that complete when its operations do.

Callbacks of futures are user code, which may block, so that a `Queue` completes futures: the threads which complete operations
only hand them over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from operator import methodcaller
from threading import Lock
from time import monotonic
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from .. import _native
from ..completion import Queue, queue_here
from ..errors import CommError, CommTimeout
from ..graphs import untraced

NO_TIMEOUT = timedelta(0)
"""What c10d means by no timeout of its own; the operation's holds."""


@untraced
class Work(c10d.Work):  # type: ignore[misc]
    """One or several operations of PolyCCL under way, as torch wants it.

    ``outputs`` is what `result` and the future give. ``finish`` runs once after the operations: it brings results home that
    were received into copies. ``on_host`` lets `wait` block the host for operations of devices too. ``queue`` completes its
    futures: the group's.
    """

    def __init__(
        self,
        parts: Sequence[_native.Work],
        outputs: Any,
        finish: Callable[[], None] | None = None,
        on_host: bool = False,
        source: int = -1,
        queue: Queue | None = None,
    ) -> None:
        super().__init__()
        self._parts = parts
        self._outputs = outputs
        self._finish = finish
        self._on_host = on_host
        self._source = source
        self._queue = queue or _stray
        self._lock = Lock()  # held while ``finish`` runs
        self._error: Exception | None = None  # what ``finish`` raised

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
        if (error := self._brought_home()) is not None:
            raise error.with_traceback(None)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As `wait`, which lets the current stream wait."""
        self.wait()

    def _brought_home(self) -> Exception | None:
        """Run ``finish``, once, and return what it raised. Others that come meanwhile wait for it."""
        if self._finish is None:
            return self._error
        with self._lock:
            if self._finish is not None:
                try:
                    self._finish()
                except Exception as error:
                    self._error = error
                self._finish = None
            return self._error

    # ---- how it stands ------------------------------------------------------------------------------------------------------

    def is_completed(self) -> bool:
        """True once it is done, with or without an error. Does not block."""
        if not self._is_over():
            return False
        self.exception()
        return True

    def is_success(self) -> bool:
        """True once it is done without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """The error of the first operation that failed; None while there is none. Once the work is done it stays the same."""
        over = self._is_over()
        for part in self._parts:
            error = part.exception()
            if error is not None:
                return error
        return self._brought_home() if over else None

    def _is_over(self) -> bool:
        """Whether all operations are done; results may still have to be brought home."""
        return all(part.is_completed() for part in self._parts)

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
        """A torch Future that completes when the operation does, with `result` or the operation's error.

        The error is a RuntimeError, since C++ may read it too; its text names the class of `exception`.
        """
        future = torch._C.Future(_devices_of(self._outputs))
        if self.is_success():
            future.set_result(self._outputs)
            return future
        # C++ cannot read an error that a future was given in Python, but that of a callback.
        outcome = future.then(methodcaller("value"))
        self._when_done(partial(self._complete, future))
        return outcome

    def get_future_result(self) -> Any:
        """A torch Future of c10d's WorkResult: how the operation ended, never an error."""
        future = torch._C.Future([])
        self._when_done(lambda: future.set_result(_verdict(self.exception())))
        return future

    def boxed(self) -> Any:
        """The work as torch's operators take it."""
        return self.for_waiting().boxed()

    def for_waiting(self) -> c10d.Work:
        """A work for torch's C++ to keep and to wait for. Of this one it would keep the C++ half only, which never ends."""
        return c10d.PythonCallbackWork(self.wait)

    def for_reading(self) -> c10d.Work:
        """A work for torch's C++ to keep and to read the future of; its ``wait`` raises nothing."""
        return c10d._create_work_from_future(self.get_future())

    def _when_done(self, job: Callable[[], None]) -> None:
        """Run ``job``, which completes a future: now if the work is done, else from the queue."""
        if self._is_over():
            job()
            return
        queue = queue_here(self._queue)
        queue.expect()
        self._pass_on(iter(self._parts), partial(queue.put, job))

    def _pass_on(self, parts: Iterator[Any], put: Callable[[], None]) -> None:
        """Call ``put`` when all ``parts`` are done."""
        for part in parts:
            if not part.is_completed():
                part.add_done_callback(partial(self._pass_on, parts, put))
                return
        put()

    def _complete(self, future: Any) -> None:
        error = self.exception()
        if error is None:
            future.set_result(self._outputs)
        else:
            future._set_unwrap_func(_native.raise_error)
            future.set_result(error.with_traceback(None))

    def __repr__(self) -> str:
        return f"<polyccl.torch Work of {len(self._parts)}: {', '.join(map(repr, self._parts)) or 'done'}>"


_stray = Queue()
"""For works of no group."""


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


__all__ = ["NO_TIMEOUT", "Work"]
