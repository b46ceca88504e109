"""Meshes over PolyCCL's groups: torch's own, and those of communicators that are there already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.marks import where_installed
from tests.jobs.pool import Pool, SharedPool
from tests.jobs.shapes import Shape

from . import meshes


@pytest.mark.parametrize("islands", ["host=4", "host=2,host=2"])
def test_torchs_mesh(ranks: Callable[..., list[Any]], islands: str) -> None:
    ranks(meshes.torchs_own, islands)


def test_mesh_of_a_bridge_over_islands(pool: SharedPool, tmp_path: Path) -> None:
    pool.each(meshes.of_communicators, 4, "host=2,host=2", str(tmp_path / "store"))


@pytest.mark.backend("nccl")
@pytest.mark.parametrize("shape", where_installed("nccl=2"))
def test_batch_on_a_mesh_in_processes_without_other_groups(
    stand_ins: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: Shape
) -> None:
    for name, value in stand_ins.items():
        monkeypatch.setenv(name, value)
    fresh = Pool(shape.size, str(tmp_path / "pool"))
    try:
        fresh.each(meshes.batch_on_a_device, shape.size, str(tmp_path / "store"), deadline=90)
    finally:
        fresh.close()
