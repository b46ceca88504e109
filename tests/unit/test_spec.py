"""What is generated from core/spec is as the generator writes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GENERATOR = Path(__file__).parents[2] / "core/spec/generate.py"


@pytest.mark.skipif(not GENERATOR.exists(), reason="there is no source tree")
def test_nothing_that_is_generated_was_edited() -> None:
    done = subprocess.run([sys.executable, str(GENERATOR), "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stdout}run `python core/spec/generate.py`\n{done.stderr}"
