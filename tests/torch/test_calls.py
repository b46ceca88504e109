"""Every call of torch.distributed gives what it must, over a plain library and over a bridge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from . import calls

ISLANDS = [
    pytest.param("gloo=2", marks=pytest.mark.backend("gloo")),
    pytest.param("gloo=1,host=2", marks=pytest.mark.backend("gloo")),
]
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


def test_one_backend_name_for_all_devices(ranks: Ranks) -> None:
    ranks(calls.reductions, "host=2", init={"backend": "cpu:polyccl,cuda:polyccl"})


def test_abort_ends_the_other_ranks_calls(ranks: Ranks) -> None:
    assert ranks(calls.aborted, "host=2,host=1") == ["Aborted"] * 3
