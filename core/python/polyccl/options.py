"""What a communicator is created with: options, and the hints that they come from."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import arguments, environment
from .arguments import Timeout
from .errors import InvalidArgument
from .planner.task import Options as PlannerOptions

HINTS: dict[str, str] = {
    "local": "the backend of this rank's island in a bridge (else POLYCCL_LOCAL, else what the device brings)",
    "island": "the label of this rank's island (else POLYCCL_ISLAND)",
    "cross": "the transport between islands: 'link'",
    "deterministic": "'strict': sum by rank, so that a value depends on neither the message's size nor the islands' shape",
    "chunk_bytes": "how many bytes of a buffer one iteration of a plan moves (else POLYCCL_CHUNK_BYTES, else the planner's choice)",
    "latency_bytes": "up to how many bytes the plans for small messages are used",
}
"""Every hint, with its meaning. Values are strings. Unknown hints warn and change nothing."""

CALL_HINTS = ("deterministic",)
"""The hints that single operations take too."""


@dataclass(frozen=True)
class CommOptions:
    """The options of a communicator. `split` hands them on.

    ``timeout`` (seconds) is the default deadline of operations; with ``abort_process_on_timeout_or_error`` a failed operation
    ends the process, by default it raises. ``check`` compares every call between ranks before it starts (POLYCCL_CHECK).
    """

    timeout: float
    abort_process_on_timeout_or_error: bool
    check: bool
    hints: Mapping[str, str]
    enable_reconfigure: bool = False
    is_high_priority_stream: bool = False

    @property
    def strict(self) -> bool:
        """Whether reductions sum by rank."""
        return is_strict(self.hints)

    def planner_options(self, strict: bool = False) -> PlannerOptions:
        """What the planner reads of the options, the same on all ranks."""
        options = PlannerOptions(deterministic=strict)
        chunk = _bytes(self.hints, "chunk_bytes") or environment.size("POLYCCL_CHUNK_BYTES")
        if chunk is not None:
            options = replace(options, chunk_bytes=chunk)
        latency = _bytes(self.hints, "latency_bytes")
        if latency is not None:
            options = replace(options, latency_bytes=latency)
        staging = environment.size("POLYCCL_STAGING_BYTES")
        if staging is not None:
            options = replace(options, scratch_bytes=max(1, staging // WINDOW))
        return options


WINDOW = 4
"""How many iterations of plans are in flight at once; each has a quarter of the staging ring."""


def make_options(
    abort_process_on_timeout_or_error: bool | None,
    timeout: Timeout,
    is_high_priority_stream: bool | None,
    enable_reconfigure: bool,
    hints: Mapping[str, str] | None,
    check: bool | None = None,
) -> CommOptions:
    """Options from arguments, else from the environment. Raises InvalidArgument for values that are none."""
    abort = arguments.optional_flag("abort_process_on_timeout_or_error", abort_process_on_timeout_or_error)
    return CommOptions(
        timeout=environment.seconds("POLYCCL_TIMEOUT") if timeout is None else lasting(timeout),
        abort_process_on_timeout_or_error=environment.flag("POLYCCL_ABORT_ON_ERROR") if abort is None else abort,
        check=environment.flag("POLYCCL_CHECK") if check is None else arguments.flag("check", check),
        hints=check_hints(hints, HINTS),
        enable_reconfigure=arguments.flag("enable_reconfigure", enable_reconfigure),
        is_high_priority_stream=bool(arguments.optional_flag("is_high_priority_stream", is_high_priority_stream)),
    )


def lasting(timeout: Timeout) -> float:
    """Return a communicator's timeout in seconds. Raises InvalidArgument if it leaves its operations no time at all."""
    value = arguments.seconds(timeout)
    if value == 0:
        arguments.refuse("timeout", timeout, "more than 0 (float('inf') waits without limit)")
    return value


def check_hints(hints: Mapping[str, str] | None, known: Any) -> dict[str, str]:
    """The hints as a dict; warns of unknown ones, raises InvalidArgument for values that a hint does not have."""
    given = arguments.string_mapping("hints", hints)
    for key in sorted(set(given) - set(known)):
        warnings.warn(f"hint '{key}' is unknown and changes nothing; there are: {', '.join(known)}", stacklevel=3)
    is_strict(given)
    if given.get("cross", "link") != "link":
        arguments.refuse("hints['cross']", given["cross"], "'link', the only transport between islands so far")
    for key in {"chunk_bytes", "latency_bytes"} & set(given):
        _bytes(given, key)
    return given


def is_strict(hints: Mapping[str, str]) -> bool:
    """Whether the hints ask for sums by rank."""
    value = hints.get("deterministic", "")
    if value not in ("", "strict"):
        arguments.refuse("hints['deterministic']", value, "'strict' or ''")
    return value == "strict"


def _bytes(hints: Mapping[str, str], name: str) -> int | None:
    if name not in hints:
        return None
    try:
        return environment.parse_bytes(hints[name])
    except ValueError as error:
        raise InvalidArgument(f"hints['{name}']: {error}") from None


__all__ = [
    "CALL_HINTS",
    "HINTS",
    "WINDOW",
    "CommOptions",
    "Timeout",
    "check_hints",
    "is_strict",
    "lasting",
    "make_options",
]
