"""A pool of rank processes that lives over many tests, so that they start once.

`Pool.run` runs a function on the first n processes, each with its own rank's communicator; communicators are kept by shape.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing as mp
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

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
        try:
            os.environ["POLYCCL_CHECK"] = "1" if check else "0"
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
            function = getattr(importlib.import_module(module), name)
            pipe.send((True, function(comm, *arguments)))
        except BaseException as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class Pool:
    """``size`` rank processes."""

    def __init__(self, size: int, directory: str) -> None:
        context = mp.get_context("spawn")
        self._directory = directory
        self._numbers = itertools.count(1)
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, directory), daemon=True)
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
    ) -> list[Any]:
        """``function(comm, *arguments)`` on every rank of ``shape``: the results by rank. Raises RankFailed.

        ``fresh`` makes a communicator for this call alone; ``check`` is POLYCCL_CHECK of the communicator.
        """
        token = next(self._numbers) if fresh else 0
        size = shape.size
        for rank in range(size):
            self._pipes[rank].send((function.__module__, function.__name__, shape, rank, arguments, token, check))
        return self._collect(size, deadline)

    def _collect(self, size: int, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        end = monotonic() + deadline
        while len(results) + len(failures) < size:
            waiting = {self._pipes[rank]: rank for rank in range(size) if rank not in results and rank not in failures}
            ready = wait(list(waiting), max(0.0, end - monotonic()))
            if not ready:
                failures |= {rank: "no answer" for rank in waiting.values()}
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    good, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    good, value = False, "the process ended"
                (results if good else failures)[rank] = value
        if failures:
            text = "\n".join(f"--- rank {rank}: {failures[rank]}" for rank in sorted(failures))
            if any(value in ("no answer", "the process ended") for value in failures.values()):
                self.close()
            raise RankFailed(text)
        return [results[rank] for rank in range(size)]

    @property
    def usable(self) -> bool:
        """False once a rank did not answer."""
        return bool(self._pipes)

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
        for process in self._processes:
            process.join(3)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes.clear()
        self._processes.clear()


def same(values: Sequence[Any]) -> bool:
    """Whether all values are equal."""
    return all(value == values[0] for value in values)
