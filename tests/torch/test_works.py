"""Works and futures: callbacks may block, errors stay, and torch keeps nothing by halves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyccl.torch import Work
from polyccl.torch.overlap import first_overlapping, overlaps_itself

from . import works

Ranks = Callable[..., list[Any]]
BRIDGE = pytest.mark.backend("gloo")


@BRIDGE
@pytest.mark.parametrize(
    "case",
    [
        works.nested,
        works.crosswise,
        works.in_order,
        works.blocking_calls,
        works.kept_by_torch,
        works.unwritable,
        works.of_inference_mode,
        works.shared_outputs,
        works.waits_while_brought_home,
    ],
    ids=lambda case: case.__name__,
)
def test_works(ranks: Ranks, case: Callable[[], None]) -> None:
    ranks(case, "gloo=1,host=2")


def test_messages_that_were_never_issued(ranks: Ranks) -> None:
    ranks(works.dropped, "host=2")


def test_a_store_in_python_outlives_its_name(ranks: Ranks, tmp_path: Path) -> None:
    ranks(works.store_in_python, "host=2", str(tmp_path / "notes"))


@BRIDGE
@pytest.mark.parametrize("case", [works.failed, works.failed_in_backward], ids=lambda case: case.__name__)
def test_whoever_asks_learns_which_rank_is_lost(ranks: Ranks, case: Callable[[], str]) -> None:
    first, _, last = ranks(case, "gloo=1,host=2")
    for text in (first, last):
        assert "rank 1" in text


def test_a_result_that_cannot_come_home_fails_for_ever() -> None:
    def fail() -> None:
        raise ValueError("no way home")

    work = Work((), [torch.ones(1)], fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="no way home"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), ValueError)
        with pytest.raises(RuntimeError, match="no way home"):
            work.get_future().wait()


@pytest.mark.parametrize(
    ("tensor", "overlaps"),
    [
        (torch.ones(4), False),
        (torch.ones(1).expand(4), True),
        (torch.ones(3, 1).expand(3, 2), True),
        (torch.ones(0).expand(2, 0), False),
        (torch.ones(3, 4).t(), False),
        (torch.ones(3, 4)[:, ::2], False),
        (torch.arange(8.0).as_strided((2, 3), (3, 2)), False),  # strides that do not nest, and no element twice
        (torch.arange(6.0).as_strided((3, 3), (1, 1)), True),
        (torch.ones(5).unfold(0, 3, 1), True),
        (torch.ones(6).unfold(0, 3, 3), False),
    ],
)
def test_elements_that_share_memory(tensor: torch.Tensor, overlaps: bool) -> None:
    assert overlaps_itself(tensor) is overlaps


def test_tensors_that_share_memory() -> None:
    memory = torch.zeros(4, 6)
    assert first_overlapping(memory.unbind(1)) is None
    assert first_overlapping([memory[:2], memory[2:]]) is None
    assert first_overlapping([memory[:, 0], memory[:, 1], memory[:, 0]]) == 2
    assert first_overlapping([memory[0], memory.view(torch.int16)[0, 3:5]]) == 1
    assert first_overlapping([memory[:, 0], memory.view(torch.int16)[:, 2:3]]) is None
