"""The same operations as a script under ``polyccl launch``: one program, every rank a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .marks import named
from .shapes import Shape

ROOT = Path(__file__).parents[2]
DEADLINE = 60.0


def launch(shape: Shape, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "polyccl", "launch", "--islands", shape.islands, "--check"]
    words += ["--interleave"] if shape.interleave else []
    words += ["--", sys.executable, "-m", "tests.jobs", *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("POLYCCL_", "MASTER_", "TORCHELASTIC_"))}
    return subprocess.run(words, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=DEADLINE, check=False)


@pytest.mark.parametrize(
    "shape",
    named("host=2,host=2", "gloo=3,gloo=1", "host=1,gloo=1", "host=2,gloo=1,host=1", "~gloo=2,host=2"),
)
def test_a_launched_job_gets_every_result_right(shape: Shape) -> None:
    done = launch(shape, "--sample", "33", "--seed", "5")
    assert done.returncode == 0, done.stderr
    by_island: dict[str, list[int]] = {}
    for rank, (_, label) in enumerate(shape.places):
        by_island.setdefault(label, []).append(rank)
    assert f"cases on {shape.size} ranks, islands {list(by_island.values())}" in done.stdout


def test_a_launched_job_with_a_wrong_result_fails() -> None:
    done = launch(Shape("host=1,host=1"), "--sample", "1", "--fault", "1")
    assert done.returncode == 1
    assert "the sum of the ranks is 101 and not 1" in done.stderr


def test_backend_auto_is_the_plain_library_where_all_ranks_are_one_island() -> None:
    done = launch(Shape("host=2"), "--sample", "11", "--backend", "auto")
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks, islands [[0, 1]]" in done.stdout
