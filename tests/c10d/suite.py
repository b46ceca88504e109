"""torch's suite, and the redirection of its groups to PolyCCL: what every rank process of a test holds.

The suite reads the backend's name in hundreds of lines, so that it is told ``gloo``. In PolyCCL's columns the name under which
torch.distributed makes its Gloo groups stands for another class, which makes PolyCCL's instead. Import this module only after
``BACKEND`` and ``WORLD_SIZE`` are set.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from torch.distributed import distributed_c10d
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import distributed_test

TOO_FEW_RANKS: str = common_distributed.TEST_SKIPS["small_worldsize"].message
GLOO, POLYCCL = "gloo", "polyccl"
"""What `_note_creation` tells apart."""

_notes: Path | None = None


def _note_creation(kind: str) -> None:
    """Note, for the driver, that this process makes a group of this kind; appended whole, also by many processes at once."""
    if _notes is not None:
        with _notes.open("a") as file:
            file.write(f"{kind}\n")


def created(notes: Path, kind: str) -> int:
    """How many groups of this kind all processes of a test made."""
    return notes.read_text().split().count(kind) if notes.exists() else 0


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    """Every test of torch's suite; its ranks are forks of a process that has imported torch already."""

    words: ClassVar[Mapping[str, str]] = {}

    def assertRaisesRegex(self, kind: Any, pattern: str, *arguments: Any, **named: Any) -> Any:
        """As unittest's, in PolyCCL's words where the suite asks for Gloo's."""
        for gloos, ours in self.words.items():
            pattern = pattern.replace(gloos, ours)
        return super().assertRaisesRegex(kind, pattern, *arguments, **named)  # noqa: PT027

    def setUp(self) -> None:
        """Start the ranks."""
        super().setUp()
        distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]  # a spawned rank would read it when it imports the suite
        self._start_processes(multiprocessing.get_context("fork").Process)


def names() -> list[str]:
    """The tests, in the order of torch's file."""
    return [name for name in vars(distributed_test.DistributedTest._DistTestBase) if name.startswith("test_")]


class _Reasons(logging.Handler):
    """Writes down why a rank skips its test: torch keeps that to the rank's own log."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        if isinstance(record.msg, str) and "skipping test" in record.msg and isinstance(record.args, tuple):
            self._path.write_text(str(record.args[-1]))


def watch(notes: Path, reasons: Path) -> None:
    """From now on, in this process and its forks, note what groups are made and why tests are skipped."""
    global _notes
    _notes = notes
    common_distributed.logger.setLevel(logging.INFO)
    common_distributed.logger.addHandler(_Reasons(reasons))


# ---- c10d's own Gloo, counted ---------------------------------------------------------------------------------------------------

Gloo = distributed_c10d.ProcessGroupGloo
_make_gloo: Callable[..., None] = Gloo.__init__


def _make_and_count(self: Any, *arguments: Any, **named: Any) -> None:
    _note_creation(GLOO)
    _make_gloo(self, *arguments, **named)


Gloo.__init__ = _make_and_count


# ---- PolyCCL in its place -------------------------------------------------------------------------------------------------------


def redirect(column: str) -> None:
    """Let torch.distributed make PolyCCL's groups where it would make its own Gloo's, as ``column`` says."""
    from polyccl.torch import Options, ProcessGroup
    from polyccl.torch.create import make_group

    def options_of(rank: int) -> Options:
        if "," not in column:
            return Options(backend=column)
        return Options(backend="bridge", hints={"local": "gloo", "island": "first" if rank == 0 else "rest"})

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (Gloo, ProcessGroup))

        def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
            _note_creation(POLYCCL)
            number = distributed_c10d.get_rank() if distributed_c10d.is_initialized() else rank
            group = make_group(store, rank, size, timeout, "of torch's suite", options_of(number), ["cpu"])
            group.options = SimpleNamespace()  # torch writes there what Gloo logs
            group.name = lambda: GLOO  # type: ignore[method-assign]  # the profiler's records bear it
            return group

    class StandIn(metaclass=Kind):
        """What torch.distributed finds under the name ProcessGroupGloo."""

    distributed_c10d.ProcessGroupGloo = StandIn
    distributed_test.get_profiling_event = _records
    Suite.words = WORDS


WORDS = {
    " (Timed out|closed|timeout) ": " timed out.* rank 1 .*barrier",
    ", but received errors while waiting for send/recv from rank 0": " of group '.*', but rank 0 says: Rank . failed",
}
"""Gloo's words in errors that the suite asks for, and PolyCCL's for the same."""

_find_records: Callable[..., list[Any]] = distributed_test.get_profiling_event


def _records(*arguments: Any, **named: Any) -> list[Any]:
    """The profiler's records of a call; the suite wants them marked as asynchronous, which torch lets only C++ do."""
    found = _find_records(*arguments, **named)
    for record in found:
        record.is_async = True
    return found
