"""torchcomms' ``hooks``, as far as PolyCCL records: the steps of plans (`polyccl.TraceEvent`), and not calls with their shapes."""

from __future__ import annotations

from typing import Any, NoReturn

from ...comm import Comm
from ...errors import UnsupportedOperation
from ...trace import TraceEvent


class FlightRecorderHook:
    """Records the steps of the communicators that it is registered with; `steps` gives them.

    ``max_entries`` is how many it keeps, the newest ones; 0 records nothing, and registers all the same. ``isolated`` changes
    nothing: every object keeps its own. What a library does by itself, inside an island, is no step.
    """

    def __init__(self, max_entries: int = 2048, isolated: bool = False) -> None:
        self._max_entries = max_entries
        self._comms: list[Comm] = []
        self._steps: dict[str, list[TraceEvent]] = {}

    def register_with_comm(self, comm: Comm) -> None:
        """Record on ``comm`` from now on. It takes the communicator's trace: `take_trace` of others misses what it took."""
        if self._max_entries > 0:
            comm.trace(True)
            self._comms.append(comm)

    def steps(self) -> dict[str, list[TraceEvent]]:
        """What was recorded, by the communicator's name, in the order in which steps ended."""
        for comm in self._comms:
            kept = self._steps.setdefault(comm.get_name(), [])
            kept += comm.take_trace()
            del kept[: -self._max_entries]
        return {name: list(kept) for name, kept in self._steps.items()}

    def is_enabled(self) -> bool:
        """Whether it records anything."""
        return bool(self._comms)

    def size(self) -> int:
        """How many steps it has."""
        return sum(map(len, self.steps().values()))

    __len__ = size

    def reset(self) -> None:
        """Forget what was recorded."""
        self.steps()
        self._steps.clear()

    def dump_json(self, include_completed: bool = True) -> NoReturn:
        """The flight recorder's format cannot be written. Raises UnsupportedOperation."""
        self._refuse("dump_json")

    def dump_file(self, rank: int, include_completed: bool = True) -> NoReturn:
        """The flight recorder's format cannot be written. Raises UnsupportedOperation."""
        self._refuse("dump_file")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedOperation(
            f"FlightRecorderHook.{what}: the flight recorder's format lists calls with their shapes, and PolyCCL records the steps "
            "of plans; steps() gives these. A call that hangs ends by its timeout, with the ranks that it waited for in its error"
        )


class NanCheckHook:
    """Checks of tensors before each operation. They are not there."""

    def __init__(self, check_inputs: bool = True, check_outputs: bool = False) -> None:
        raise UnsupportedOperation(
            "NanCheckHook: hooks are not supported by this version of PolyCCL; check tensors before the call, by isfinite()"
        )


def clog(*arguments: Any, **named: Any) -> NoReturn:
    """A log of every call. It is not there: raises UnsupportedOperation."""
    raise UnsupportedOperation(
        "clog: PolyCCL writes no log of calls; FlightRecorderHook(...).steps() and Comm.trace record what plans do"
    )


__all__ = ["FlightRecorderHook", "NanCheckHook", "clog"]
