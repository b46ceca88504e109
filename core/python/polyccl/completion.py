"""Threads that run user code once operations complete.

User code may block, also until another operation's user code has run. So the threads that complete operations hand it over: each
communicator has a `Queue`, whose jobs run in order and one at a time. While a job blocks, another thread goes on with the next one.
Threads start when they are needed and end when they are idle.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

Job = Callable[[], None]

LINGER = 2.0
"""Seconds after which an idle thread ends."""

PATIENCE = 0.02
"""Seconds without processor time after which a job that sleeps counts as blocked. A thread that waits for the GIL wakes sooner."""


class Queue:
    """Jobs that run in the order of `put`, one at a time, except that no job waits for one that blocks."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._turn: _Turn | None = None  # of the thread that runs them
        self._attended = False  # whether another thread waits for its turn

    def expect(self) -> None:
        """Announce a job, so that there is a thread for it. Raises RuntimeError if the system has none."""
        _threads.expect()

    def put(self, job: Job) -> None:
        """Run an announced job. Return at once, whatever the caller's thread; ``job`` must raise nothing."""
        with _threads.changed:
            _threads.expected -= 1
            self._jobs.append(job)
            self._attend()

    def _attend(self) -> None:
        """Have a thread wait for its turn if there are jobs. The lock is held."""
        if self._jobs and not self._attended:
            self._attended = True
            _threads.give(self)

    def serve(self) -> None:
        """Wait for a turn, then run jobs until there are none, or another thread has the turn."""
        turn = self._take_turn()
        while turn is not None and (job := self._next(turn)) is not None:
            _here.running, _here.nested = True, None
            job()

    def _take_turn(self) -> _Turn | None:
        with _threads.changed:
            while self._jobs and self._turn is not None and not self._turn.is_blocked():
                _threads.changed.wait(PATIENCE)
            self._attended = False
            if not self._jobs:
                return None
            self._turn = _Turn()
            return self._turn

    def _next(self, turn: _Turn) -> Job | None:
        with _threads.changed:
            if self._turn is not turn:
                return None  # it took long, and another thread has gone on
            if not self._jobs:
                self._turn = None
                _threads.changed.notify_all()
                return None
            job = self._jobs.popleft()
            turn.begin()
            self._attend()  # in case this one blocks
            return job


class _Turn:
    """The thread that runs a queue's jobs, as others see it."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._thread = threading.get_native_id()
        self.begin()

    def begin(self) -> None:
        """Note that a job begins."""
        self._seen = (-1.0, time.monotonic())

    def is_blocked(self) -> bool:
        """Return true if the job sleeps, and has used no processor time for `PATIENCE`. Called while it runs."""
        used, now = time.clock_gettime(self._clock), time.monotonic()
        before, since = self._seen
        if used != before:
            self._seen = used, now
            return False
        return now - since >= PATIENCE and self._sleeps()

    def _sleeps(self) -> bool:
        try:
            with open(f"/proc/self/task/{self._thread}/stat", "rb") as status:
                return status.read().rpartition(b")")[2].split()[0] != b"R"
        except OSError:
            return True


class _Threads:
    """The threads, and the lock of all queues."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.expected = 0
        self._ready: deque[Queue] = deque()  # queues that want a thread
        self._idle = 0
        self._all = 0
        self._linger = LINGER

    def expect(self) -> None:
        """Announce a job. The last thread does not end before it."""
        with self.changed:
            if self._all == 0:
                self._start()
            self.expected += 1

    def give(self, queue: Queue) -> None:
        """Give ``queue`` a thread: an idle one, else a new one, else the first that is done. The lock is held."""
        self._ready.append(queue)
        if self._idle >= len(self._ready):
            self.changed.notify_all()
        else:
            with suppress(RuntimeError):
                self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name="polyccl-callbacks", daemon=True)
        self._all += 1
        try:
            thread.start()
        except BaseException:
            self._all -= 1
            raise

    def _serve(self) -> None:
        while (queue := self._next()) is not None:
            queue.serve()

    def _next(self) -> Queue | None:
        """A queue that wants a thread; None if this thread has been idle for long."""
        with self.changed:
            self._idle += 1
            end = time.monotonic() + self._linger
            while not self._ready:
                left = min(end - time.monotonic(), self._linger)
                if left <= 0 and not (self.expected and self._all == 1 and self._linger):
                    break
                self.changed.wait(left if left > 0 else None)
            self._idle -= 1
            if self._ready:
                return self._ready.popleft()
            self._all -= 1
            self.changed.notify_all()
            return None

    def settle(self, seconds: float) -> bool:
        """Wait until all jobs are done and all threads have ended; False if some have not after ``seconds``."""
        with self.changed:
            self._linger = 0.0
            self.changed.notify_all()
            return self.changed.wait_for(lambda: self._all == 0, seconds)


class _Here(threading.local):
    """What the calling thread is to this module."""

    running = False
    """Whether it runs jobs."""
    nested: Queue | None = None
    """The queue of what the present job has asked for."""


def queue_here(usual: Queue) -> Queue:
    """Return the queue for what the caller may wait for: ``usual``, but within a job one of that job's own.

    So a job may wait for what it has started itself, at no cost.
    """
    if not _here.running:
        return usual
    if _here.nested is None:
        _here.nested = Queue()
    return _here.nested


def settle(seconds: float) -> bool:
    """Wait until all jobs are done and their threads have ended; return False if some have not after ``seconds``."""
    return _threads.settle(seconds)


_here = _Here()
_threads = _Threads()
os.register_at_fork(after_in_child=_threads.__init__)  # type: ignore[misc]  # a child has none of the threads
atexit.register(settle, 2.0)  # callbacks of what has completed may end

__all__ = ["Queue", "queue_here", "settle"]
