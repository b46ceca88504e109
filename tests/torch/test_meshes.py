"""Meshes over PolyCCL's groups: torch's own, and those of communicators that are there already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.pool import SharedPool

from . import meshes


@pytest.mark.parametrize("islands", ["host=4", "host=2,host=2"])
def test_torchs_mesh(ranks: Callable[..., list[Any]], islands: str) -> None:
    ranks(meshes.torchs_own, islands)


def test_mesh_of_a_bridge_over_islands(pool: SharedPool, tmp_path: Path) -> None:
    pool.each(meshes.of_communicators, 4, "host=2,host=2", str(tmp_path / "store"))
