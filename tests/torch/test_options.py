"""What a group is made with: options, and what follows from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyccl
from polyccl.torch import Options
from polyccl.torch.balance import shares
from polyccl.torch.calls import reduction
from polyccl.torch.options import backend_of, device_of, read


def test_options_come_in_several_forms() -> None:
    assert read(None) == Options()
    assert read("gloo") == Options(backend="gloo")
    assert read({"backend": "bridge", "hints": {"island": "a"}}) == Options("bridge", hints={"island": "a"})
    inherited = Options(hints={"island": "b"})
    assert read(None, inherited) is inherited


@pytest.mark.parametrize("given", [object(), 3, {"bakend": "gloo"}], ids=["object", "number", "misspelt"])
def test_options_that_mean_nothing_here_are_refused(given: Any) -> None:
    with pytest.raises(polyccl.InvalidArgument, match="pg_options"):
        read(given)


def test_the_environment_names_the_backend_where_options_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYCCL_TORCH_BACKEND", raising=False)
    assert backend_of(Options()) == "auto"
    monkeypatch.setenv("POLYCCL_TORCH_BACKEND", "host")
    assert backend_of(Options()) == "host"
    assert backend_of(Options(backend="bridge")) == "bridge"


def test_the_device_is_the_options_then_the_groups_then_the_hosts() -> None:
    bound = torch.device("cuda", 3)
    assert device_of(Options(device="xpu:1"), ["cpu", "cuda"], bound) == "xpu:1"
    assert device_of(Options(), ["cpu", "cuda"], bound) == "cuda:3"
    if not torch.accelerator.is_available():
        assert device_of(Options(), ["cpu", "cuda"], None) == "cpu"


def test_reductions_are_those_of_c10d() -> None:
    from torch import distributed as dist

    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        assert reduction(getattr(dist.ReduceOp, name)) == getattr(polyccl.ReduceOp, name)
    assert reduction(dist._make_nccl_premul_sum(2.5)).factor == 2.5
    with pytest.raises(polyccl.InvalidArgument):
        reduction("sum")


@pytest.mark.parametrize(
    ("speeds", "total", "smallest", "wanted"),
    [
        ([1.0, 1.0], 8, 1, [4, 4]),
        ([3.0, 1.0], 8, 1, [6, 2]),
        ([0.0, 2.0, 4.0], 9, 1, [3, 2, 4]),
        ([100.0, 1.0], 10, 1, [9, 1]),
        ([1.0, 1.0, 1.0], 10, 0, [4, 3, 3]),
        ([0.0, 0.0], 5, 1, [3, 2]),
    ],
)
def test_shares_follow_speeds_and_add_up(speeds: list[float], total: int, smallest: int, wanted: list[int]) -> None:
    assert shares(speeds, total, smallest) == wanted


def test_shares_that_cannot_be_are_refused() -> None:
    with pytest.raises(polyccl.InvalidArgument, match="too few"):
        shares([1.0, 1.0, 1.0], 2)
