"""The examples run over two islands, and say that they went well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.backend("gloo")
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "hsdp"])
def test_example(name: str) -> None:
    command = [
        sys.executable,
        "-m",
        "polyccl",
        "launch",
        "--islands",
        "gloo=2,host=2",
        "--",
        sys.executable,
        EXAMPLES / f"{name}.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"ddp": "the same parameters", "fsdp2": "loss", "hsdp": "dimension 'bridge': 2 ranks on bridge"}[name] in done.stdout
