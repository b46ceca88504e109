"""What is built on process groups trains as one process does: after twenty steps the parameters are equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs.marks import unless_installed

from . import training

pytestmark = pytest.mark.backend("gloo")

Ranks = Callable[..., list[Any]]
ISLANDS = ("gloo=2", "gloo=2,gloo=2", "gloo=3,gloo=1")
VENDORS = ("gloo=4", "gloo=2,xccl=2", "nccl=2,rccl=2", "nccl=2,gloo=2")
EXACT = [
    training.ddp,
    training.ddp_static,
    training.ddp_hook,
    training.ddp_mixed,
    training.zero,
    training.fsdp2,
    training.hsdp,
    training.tensor_parallel,
    training.balanced,
]


def same(found: list[Any], wanted: list[torch.Tensor], **tolerance: float) -> None:
    for parameters in found:
        for ours, theirs in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("islands", [pytest.param(each, marks=unless_installed(each)) for each in (*ISLANDS, *VENDORS)])
@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.__name__)
def test_parameters_are_those_of_one_process(ranks: Ranks, islands: str, kind: Callable[[], Any]) -> None:
    same(ranks(kind, islands), training.alone(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("islands", ISLANDS)
def test_unused_parameters(ranks: Ranks, islands: str) -> None:
    same(ranks(training.ddp_unused, islands), training.alone(branch=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("islands", ISLANDS)
def test_gradients_in_float16_come_close(ranks: Ranks, islands: str) -> None:
    same(ranks(training.ddp_half_hook, islands), training.alone(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("islands", ISLANDS)
def test_ranks_with_fewer_batches_join(ranks: Ranks, islands: str) -> None:
    steps = ranks(training.ddp_join, islands)
    assert steps == [rank + 2 for rank in range(len(steps))]


@pytest.mark.parametrize("islands", ISLANDS)
def test_pipeline_of_two_stages(ranks: Ranks, islands: str) -> None:
    first, last = ranks(training.pipeline, islands)[:2]
    same([first + last], training.alone(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("islands", ISLANDS)
def test_checkpoint_of_a_sharded_model(ranks: Ranks, islands: str, tmp_path: Path) -> None:
    ranks(training.checkpoint, islands, str(tmp_path / "checkpoint"))


@pytest.mark.parametrize("islands", ISLANDS)
def test_compiled_collectives(ranks: Ranks, islands: str) -> None:
    ranks(training.compiled, islands, "aot_eager")


@pytest.mark.only_in_full
@pytest.mark.timeout(300)
def test_compiled_collectives_by_inductor(ranks: Ranks) -> None:
    ranks(training.compiled, "gloo=1,gloo=1", "inductor", deadline=250)
