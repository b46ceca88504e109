"""A pool of rank processes that lives over many tests, so that they start once.

`Pool.run` runs a function on the first n processes, each with its own rank's communicator; communicators are kept by shape.
`Pool.each` runs a function without one. `SharedPool` is what tests share: it grows, and starts afresh after a failure.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing as mp
import os
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any
from unittest import mock

from .shapes import Shape


class RankFailed(AssertionError):
    """A rank raised, or ended. The text has every rank's traceback."""


def _serve(pipe: Connection, directory: str) -> None:
    """The life of a rank process: take orders, answer them."""
    os.environ["POLYCCL_CHECK"] = "1"
    import polyccl
    from polyccl.store import FileStore

    comms: dict[tuple[Any, ...], polyccl.Comm] = {}
    while (order := pipe.recv()) is not None:
        module, name, shape, rank, arguments, fresh, check = order
        comm = None
        try:
            os.environ["POLYCCL_CHECK"] = "1" if check else "0"
            function = getattr(importlib.import_module(module), name)
            if shape is None:
                pipe.send((True, function(rank, *arguments)))
                continue
            key = (shape, check)
            if fresh or key not in comms:
                local, label = shape.places[rank]
                backend = "bridge" if "," in shape.islands else local
                hints = {"local": local, "island": label} if backend == "bridge" else {}
                comm = polyccl.new_comm(
                    backend,
                    "cpu",
                    f"{shape}-{check}-{fresh}",
                    timeout=30,
                    store=FileStore(directory),
                    hints=hints,
                    rank=rank,
                    size=shape.size,
                )
            else:
                comm = comms[key]
            if not fresh:
                comms[key] = comm
            pipe.send((True, function(comm, *arguments)))
        except BaseException as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class Pool:
    """``size`` rank processes."""

    def __init__(self, size: int, directory: str) -> None:
        self._directory = directory
        self._numbers = itertools.count(1)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self.grow(size)

    def grow(self, size: int) -> None:
        """Start processes, until there are ``size``."""
        context = mp.get_context("spawn")
        while len(self._processes) < size:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, self._directory), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(
        self,
        function: Callable[..., Any],
        shape: Shape,
        *arguments: Any,
        fresh: bool = False,
        check: bool = True,
        deadline: float = 60.0,
        lost: Collection[int] = (),
    ) -> list[Any]:
        """``function(comm, *arguments)`` on every rank of ``shape``: the results by rank. Raises RankFailed.

        ``fresh`` makes a communicator for this call alone; ``check`` is POLYCCL_CHECK of the communicator. The processes of the
        ranks ``lost`` are to end; their result is None.
        """
        token = next(self._numbers) if fresh else 0
        size = shape.size
        for rank in range(size):
            self._pipes[rank].send((function.__module__, function.__name__, shape, rank, arguments, token, check))
        return self._collect(range(size), deadline, lost)

    def each(
        self,
        function: Callable[..., Any],
        ranks: int | Sequence[int],
        *arguments: Any,
        deadline: float = 60.0,
        lost: Collection[int] = (),
    ) -> list[Any]:
        """``function(rank, *arguments)``, without a communicator, on some ranks or on the first ``ranks``: the results in order."""
        chosen = range(ranks) if isinstance(ranks, int) else ranks
        for rank in chosen:
            self._pipes[rank].send((function.__module__, function.__name__, None, rank, arguments, 0, True))
        return self._collect(chosen, deadline, lost)

    def _collect(self, ranks: Sequence[int], deadline: float, lost: Collection[int]) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        end = monotonic() + deadline
        while len(results) + len(failures) < len(ranks):
            waiting = {self._pipes[rank]: rank for rank in ranks if rank not in results and rank not in failures}
            ready = wait(list(waiting), max(0.0, end - monotonic()))
            if not ready:
                failures |= dict.fromkeys(waiting.values(), "no answer")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    good, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self._processes[rank].join(5)
                    ended = f"the process ended, exit code {self._processes[rank].exitcode}"
                    good, value = (True, None) if rank in lost else (False, ended)
                (results if good else failures)[rank] = value
        if failures:
            text = "\n".join(f"--- rank {rank}: {failures[rank]}" for rank in sorted(failures))
            if any(value.startswith(("no answer", "the process ended")) for value in failures.values()):
                self.close()
            raise RankFailed(text)
        return [results[rank] for rank in ranks]

    @property
    def usable(self) -> bool:
        """False once a rank did not answer."""
        return bool(self._pipes)

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(3)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes.clear()
        self._processes.clear()


class SharedPool:
    """A pool that starts when it is needed, grows to what a test needs, and starts afresh after a rank failed."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._pool: Pool | None = None

    def run(self, function: Callable[..., Any], shape: Shape, *arguments: Any, **options: Any) -> list[Any]:
        """See `Pool.run`."""
        return self._guarded(shape.size, "run", function, shape, *arguments, **options)

    def each(self, function: Callable[..., Any], ranks: int, *arguments: Any, **options: Any) -> list[Any]:
        """See `Pool.each`."""
        return self._guarded(ranks, "each", function, ranks, *arguments, **options)

    def _guarded(self, size: int, method: str, *arguments: Any, **options: Any) -> list[Any]:
        if self._pool is None:
            self._pool = Pool(0, self._directory)
        self._pool.grow(size)
        try:
            result: list[Any] = getattr(self._pool, method)(*arguments, **options)
        except BaseException:
            self.close()  # communicators of ranks that failed are out of step
            raise
        return result

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


@contextmanager
def shared_pool(directory: object, variables: Mapping[str, str] | None = None) -> Iterator[SharedPool]:
    """A pool for the tests of a scope, whose ranks have these environment variables too."""
    with mock.patch.dict(os.environ, variables or {}):
        pool = SharedPool(str(directory))
        yield pool
        pool.close()


def same(values: Sequence[Any]) -> bool:
    """Whether all values are equal."""
    return all(value == values[0] for value in values)
