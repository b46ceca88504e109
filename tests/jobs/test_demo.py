"""The demo runs, checks itself, and leaves a picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

for _package in ("torch", "sklearn", "matplotlib"):
    pytest.importorskip(_package)

DEMO = Path(__file__).parents[2] / "examples" / "train_two_islands.py"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEMO), "--out", str(folder / "demo.png"), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.timeout(180)
def test_demo_trains_on_two_islands_and_all_its_checks_hold(tmp_path: Path) -> None:
    done = run(tmp_path, "--islands", "host=1,host=1", "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 3, done.stdout
    assert "FAILED" not in done.stdout
    assert "0:host -> 1:host" in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_demo_refuses_islands_that_are_none(tmp_path: Path) -> None:
    for islands, words in (("host=2", "two islands or more"), ("host=two,host=2", "is not <backend>")):
        done = run(tmp_path, "--islands", islands)
        assert done.returncode == 2
        assert words in done.stderr
