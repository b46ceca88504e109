"""Strangers who connect to every port of a job, and talk nonsense or nothing, end no process and change no result."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .marks import named
from .shapes import Shape
from .strangers import NO_NAMESPACE

ROOT = Path(__file__).parents[2]
CREATIONS = 20


@pytest.mark.parametrize("shape", named("gloo=2", "gloo=1,host=1"))
def test_a_job_among_strangers_creates_all_its_communicators(shape: Shape) -> None:
    words = [sys.executable, "-m", "tests.jobs.strangers", shape.islands, str(CREATIONS)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    if done.returncode == NO_NAMESPACE:
        pytest.skip("this user may not make a network namespace")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"made {CREATIONS} raised {{}}") == shape.size, done.stdout + done.stderr
    came = re.search(r"strangers came (\d+) times", done.stdout)
    assert came is not None
    assert int(came[1]) > CREATIONS, "there were hardly any strangers"
