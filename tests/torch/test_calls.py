"""Every call of torch.distributed gives what it must, over a plain library and over a bridge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.jobs.marks import unless_installed

from . import calls

ISLANDS = [
    pytest.param("gloo=2", marks=pytest.mark.backend("gloo")),
    pytest.param("gloo=1,host=2", marks=pytest.mark.backend("gloo")),
]
DEVICES = [pytest.param(each, marks=[*unless_installed(each), pytest.mark.backend("nccl")]) for each in ("nccl=2", "nccl=2,rccl=1")]
Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize("islands", [*ISLANDS, "host=2,host=1"])
@pytest.mark.parametrize(
    "call",
    [
        calls.reductions,
        calls.collectives,
        calls.single_tensors,
        calls.coalesced,
        calls.layouts,
        calls.sparse,
        calls.messages,
        calls.batches,
        calls.from_anyone,
        calls.objects,
        calls.works,
        calls.functional,
        calls.groups,
        calls.refusals,
        calls.missing_rank,
    ],
    ids=lambda call: call.__name__,
)
def test_calls(ranks: Ranks, islands: str, call: Callable[[], None]) -> None:
    ranks(call, islands)


@pytest.mark.parametrize("islands", DEVICES)
@pytest.mark.parametrize(
    "call",
    [
        calls.reductions,
        calls.collectives,
        calls.single_tensors,
        calls.coalesced,
        calls.messages,
        calls.batches,
        calls.functional,
        calls.groups,
        calls.missing_rank,
    ],
    ids=lambda call: call.__name__,
)
def test_calls_on_devices(ranks: Ranks, islands: str, call: Callable[[], None]) -> None:
    ranks(call, islands)


def test_one_backend_name_for_all_devices(ranks: Ranks) -> None:
    ranks(calls.reductions, "host=2", init={"backend": "cpu:polyccl,cuda:polyccl"})


def test_abort_ends_the_other_ranks_calls(ranks: Ranks) -> None:
    assert ranks(calls.aborted, "host=2,host=1") == ["Aborted"] * 3
