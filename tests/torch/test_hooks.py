"""What torch builds on futures runs as on c10d's Gloo: communication hooks, autograd's collectives, joins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from . import hooks

pytestmark = [pytest.mark.backend("gloo"), pytest.mark.timeout(180)]

Ranks = Callable[..., list[Any]]
GLOO = {"backend": "gloo", "pg_options": None}
BEYOND = {
    hooks.hooks: {"quantization_pertensor", "quantization_perchannel", "zero step", "zero step, interleaved"},
    hooks.autograd: set(),
    hooks.joins: set(),
}
"""What torch lets run on NCCL, but not on c10d's Gloo."""


@pytest.mark.parametrize("family", BEYOND, ids=lambda family: family.__name__)
def test_what_runs_on_c10ds_gloo_gives_the_same(ranks: Ranks, family: Callable[[], Any]) -> None:
    wanted = ranks(family, "gloo=2", init=GLOO)
    for islands in ("gloo=2", "gloo=1,host=1"):
        for theirs, ours in zip(wanted, ranks(family, islands), strict=True):
            runs = {name for name, result in theirs.items() if not isinstance(result, str)}
            refused = {name: ours[name] for name in runs | BEYOND[family] if isinstance(ours[name], str)}
            assert not refused, f"on {islands}: {refused}"
            for name in runs:
                torch.testing.assert_close(ours[name], theirs[name])
