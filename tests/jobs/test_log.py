"""What a job writes to standard error, by POLYCCL_LOG."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE = 120

SCRIPT = """
import numpy
import polyccl

comm = polyccl.new_comm("bridge", "cpu", "logged", timeout=30)
try:
    comm.all_reduce(numpy.ones(100_000, numpy.float32))
    comm.barrier()
    if comm.get_rank() == 0:
        comm.abort()
    comm.barrier()
except polyccl.Aborted:
    pass
"""


def written(folder: Path, level: str | None, status: int = 0) -> list[str]:
    """What the ranks of a job of two islands write to standard error, by line."""
    script = folder / "rank.py"
    script.write_text(SCRIPT)
    words = [sys.executable, "-m", "polyccl", "launch", "--islands", "host=2,host=1", "--", sys.executable, str(script)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("POLYCCL_", "MASTER_"))}
    if level is not None:
        kept["POLYCCL_LOG"] = level
    done = subprocess.run(words, env=kept, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode != 0) == (status != 0), done.stderr
    return (done.stdout + done.stderr).splitlines()


def count(lines: list[str], *words: str) -> int:
    return sum(all(word in line for word in words) for line in lines)


def test_a_job_is_silent_unless_it_is_asked(tmp_path: Path) -> None:
    for level in (None, "warning", "error"):
        assert count(written(tmp_path, level), "polyccl: ") == 0


def test_info_tells_of_creation_with_the_islands_and_of_failure(tmp_path: Path) -> None:
    lines = written(tmp_path, "info")
    assert count(lines, "polyccl: info: communicator 'logged': rank", "of 3 on bridge, islands 0:host [0, 1], 1:host [2]") == 3
    assert count(lines, "polyccl: info: failure on communicator 'logged' (", "rank 0", "aborted the communicator") >= 3
    assert count(lines, "debug") == 0


def test_debug_tells_of_libraries_and_plans_too(tmp_path: Path) -> None:
    lines = written(tmp_path, "debug")
    for rank in range(3):
        assert count(lines, f"polyccl: debug: communicator 'logged': rank {rank} of 3 brings host") == 1
        assert count(lines, f"polyccl: debug: communicator 'logged': rank {rank} plans all_reduce of float32 as all_reduce.") == 1
    assert count(lines, "polyccl: info: communicator 'logged'") == 3


def test_a_level_that_there_is_not_is_refused(tmp_path: Path) -> None:
    lines = written(tmp_path, "loud", status=1)
    assert count(lines, "environment variable POLYCCL_LOG is 'loud'; it must be error, warning, info or debug") >= 1


TORCH = """
from torch import distributed as dist

dist.init_process_group("polyccl")
print("checked:", dist.group.WORLD.get_comm().get_options().check)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("variables", "checked"),
    [
        ({}, False),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, True),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, False),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "POLYCCL_CHECK": "0"}, False),
        ({"POLYCCL_CHECK": "1"}, True),
    ],
)
def test_torchs_detailed_debugging_turns_the_check_on(tmp_path: Path, variables: dict[str, str], checked: bool) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "rank.py"
    script.write_text(TORCH)
    words = [sys.executable, "-m", "polyccl", "launch", "--islands", "host=2", "--", sys.executable, str(script)]
    told = ("POLYCCL_", "MASTER_", "TORCH_DISTRIBUTED_DEBUG")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    done = subprocess.run(words, env=kept | variables, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"checked: {checked}") == 2
