"""The timeline of a communicator: what each lane did, and when. Recorded between `Comm.trace` and `Comm.take_trace`."""

from __future__ import annotations

from typing import NamedTuple

from .planner.plan import Lane, Verb
from .spec import Kind


class TraceEvent(NamedTuple):
    """One step that a plan's lane ran.

    ``sequence`` numbers the communicator's operations and ``chunk`` the iterations of one. ``kind`` is the local collective of a
    LOCAL step, else None; ``peer`` the rank of a SEND or RECV, else -1. ``bytes`` is what the step handled on this rank (of a
    local collective one block). ``begin_ns`` and ``end_ns`` are CLOCK_MONOTONIC, so that the ranks of one machine compare; for a
    message they are when it was posted and when it was done.
    """

    sequence: int
    chunk: int
    lane: Lane
    verb: Verb
    kind: Kind | None
    peer: int
    bytes: int
    begin_ns: int
    end_ns: int


def read_event(event: tuple[int, ...]) -> TraceEvent:
    """The event that the native module recorded."""
    sequence, chunk, lane, verb, kind, *rest = event
    named = Kind(kind) if verb == Verb.LOCAL else None
    return TraceEvent(sequence, chunk, Lane(lane), Verb(verb), named, *rest)


__all__ = ["TraceEvent", "read_event"]
