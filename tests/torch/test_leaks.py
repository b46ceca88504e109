"""Calls leave nothing behind: a few hundred of each kind in a sample, ten thousand with ``--all-calls`` (``nox -s leaks``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from . import leaks

Ranks = Callable[..., list[Any]]


@pytest.fixture
def in_full(request: pytest.FixtureRequest) -> bool:
    """Whether all calls are wanted."""
    return bool(request.config.getoption("--all-calls", default=False))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("over", ["host=2", pytest.param("gloo=1,host=1", marks=pytest.mark.backend("gloo"))])
def test_calls_leave_nothing_behind(ranks: Ranks, over: str, in_full: bool) -> None:
    calls = 10_000 if in_full else 200
    ranks(leaks.leave_nothing, over, tuple(leaks.KINDS), calls, 1 << 20, deadline=3000 if in_full else 60)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("over", ["host=2", pytest.param("gloo=1,host=1", marks=pytest.mark.backend("gloo"))])
def test_communicators_leave_nothing_behind(ranks: Ranks, over: str, in_full: bool) -> None:
    alive, times = (300, 2000) if in_full else (20, 60)
    ranks(leaks.hold_many, over, alive, times, deadline=3000 if in_full else 60)
