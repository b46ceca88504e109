"""Lengths of time and deadlines: any length that a user may give, infinity included, made safe for every clock and wait.

A deadline is a time of ``time.monotonic()``. Python's waits, sockets and selectors each overflow at a length of their own (24
days, 292 years), so all lengths are cut here to `LONGEST`, and single waits to what `slice_of` gives.
"""

from __future__ import annotations

import time

LONGEST = 1e9
"""Seconds, about 32 years: longer timeouts, and infinity, count as this."""
_SLICE = 86400.0


def bounded(length: float) -> float:
    """Return the length in seconds, at least 0 and at most `LONGEST`."""
    return min(max(0.0, length), LONGEST)


def after(length: float) -> float:
    """Return the deadline that lies ``length`` seconds ahead."""
    return time.monotonic() + bounded(length)


def left(deadline: float) -> float:
    """Return the seconds until the deadline, at least 0."""
    return max(0.0, deadline - time.monotonic())


def slice_of(length: float) -> float:
    """Return how long one wait on a socket or selector may be, of ``length`` seconds in all; wait again until the deadline."""
    return min(length, _SLICE)


__all__ = ["LONGEST", "after", "bounded", "left", "slice_of"]
