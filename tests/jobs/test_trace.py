"""The timeline: it has every lane of a bridge, its bytes are those of the payload count, and it is silent unless asked for."""

from __future__ import annotations

import numpy as np
import pytest

import polyccl
from polyccl.planner.plan import Lane, Verb

from .pool import SharedPool
from .shapes import Shape

COUNT = 1 << 19
"""Elements of float32: several chunks."""


def trace_all_reduce(comm: polyccl.Comm) -> None:
    values = np.ones(COUNT, np.float32)
    comm.all_reduce(values)
    assert comm.take_trace() == []

    before = sum(comm.payload_sent())
    comm.trace(True)
    comm.all_reduce(values)
    comm.trace(False)
    comm.all_reduce(values)
    sent = (sum(comm.payload_sent()) - before) // 2  # of two calls, one was recorded

    events = comm.take_trace()
    assert {event.lane for event in events} == set(Lane)
    assert len({event.chunk for event in events}) > 1
    assert len({event.sequence for event in events}) == 1
    assert all(0 < event.begin_ns <= event.end_ns for event in events)
    assert all((event.kind is not None) == (event.verb == Verb.LOCAL) for event in events)
    assert all((event.peer >= 0) == (event.verb in (Verb.SEND, Verb.RECV)) for event in events)
    assert sum(event.bytes for event in events if event.verb == Verb.SEND) == sent
    assert comm.take_trace() == []


@pytest.mark.parametrize("shape", [Shape("host=2,host=2")], ids=str)
def test_trace_shows_all_lanes_and_the_payload(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(trace_all_reduce, shape)
