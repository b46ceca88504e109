"""`polyccl doctor`: a sound job is measured and ends with 0; a fault of one rank ends it with 1 and a sentence that names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DEADLINE = 60.0
SCRIPT = """
import os, socket, sys, time
from polyccl.cli import doctor, main

if os.environ["RANK"] == "2":
    {fault}
sys.argv = ["polyccl", "doctor", *sys.argv[1:]]
main()
"""

# A connection in either direction is enough: both must be shut.
NOWHERE = """
    true_address = doctor.wire.address
    held = socket.create_server(("127.0.0.1", 0))
    port = held.getsockname()[1]
    held.close()  # nobody listens there any more
    doctor.wire.address = lambda: (*true_address()[:2], "127.0.0.1", port)
    doctor._member = lambda value: (*value[:2], "127.0.0.1", port)
"""


def examine(folder: Path, *arguments: str, fault: str = "pass", islands: str = "host=2,host=1") -> tuple[int, str]:
    """Run it as every rank, rank 2 with a ``fault``: the exit status, and what rank 0 printed."""
    script = folder / "rank.py"
    script.write_text(SCRIPT.format(fault=fault.strip()))
    words = [sys.executable, "-m", "polyccl", "launch", "--islands", islands, "--", sys.executable, str(script), *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("POLYCCL_", "MASTER_", "TORCHELASTIC_"))}
    done = subprocess.run(words, env=kept, capture_output=True, text=True, timeout=DEADLINE, check=False)
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith("[0 ")]
    assert lines, done.stderr
    return done.returncode, "\n".join(lines)


def read(printed: str) -> dict[str, Any]:
    report = json.loads(printed)
    assert isinstance(report, dict)
    return report


def test_a_sound_job_is_described_and_its_rails_are_timed(tmp_path: Path) -> None:
    status, printed = examine(tmp_path, "--json", "--bytes", "256KiB")
    report = read(printed)
    assert (status, report["ok"], report["problems"]) == (0, True, [])
    assert [island["ranks"] for island in report["islands"]] == [[0, 1], [2]]
    assert report["backend"] == "bridge"
    assert [(rail["from"], rail["to"], rail["bytes"]) for rail in report["rails"]] == [(0, 2, 262144), (1, 2, 262144)]
    assert all(rail["round_trip"] > 0 and rail["there"] > 0 and rail["back"] > 0 for rail in report["rails"])
    for rank, told in enumerate(report["ranks"]):
        assert (told["rank"], told["backend"], told["error"]) == (rank, "host", None)
        assert told["address"]
        assert told["interface"]
        assert told["python"].startswith("3.")
        assert "hello" not in told


def test_the_table_for_people_has_every_rank_and_rail(tmp_path: Path) -> None:
    status, printed = examine(tmp_path, "--bytes", "64KiB")
    assert status == 0
    for words in ("0:host", "1:host", "0 - 2", "1 - 2", "MB/s", "all well: 3 ranks"):
        assert words in printed
    prefix = len("[0 0:host] ")
    assert [line for line in printed.splitlines() if len(line) + prefix > 80] == []
    assert "…" not in printed


def test_without_a_launcher_it_examines_one_rank(tmp_path: Path) -> None:
    told = ("POLYCCL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    words = [sys.executable, "-m", "polyccl", "doctor"]
    done = subprocess.run(words, env=kept, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    assert "all well: 1 rank\n" in done.stdout
    assert "no launcher says that there are other ranks" in done.stdout


def test_one_island_has_no_rails_and_is_well(tmp_path: Path) -> None:
    status, printed = examine(tmp_path, "--json", islands="host=3")
    assert (status, read(printed)["rails"], read(printed)["backend"]) == (0, [], "host")


@pytest.mark.parametrize(
    ("fault", "culprits", "words"),
    [
        ('os.environ["POLYCCL_SOCKET_IFNAME"] = "nosuch"', [2], ["rank 2", "nosuch"]),
        ('os.environ["POLYCCL_LOCAL"] = "nosuch"', [2], ["rank 2", "there is no backend 'nosuch'"]),
        ('os.environ["POLYCCL_CHUNK_BYTES"] = "64KiB"', [], ["rank 2", "chunk_bytes", "Mismatch"]),
        ('doctor.__version__ = "9.9"', [2], ["rank 2", "PolyCCL 9.9"]),
        ("sys.exit()", [2], ["rank 2 did not come within 3 s"]),
        (NOWHERE, [2], ["rank 2", "cannot be reached by any other rank", "127.0.0.1 port"]),
    ],
    ids=["interface", "backend", "option", "version", "missing", "unreachable"],
)
def test_a_fault_of_one_rank_is_named(tmp_path: Path, fault: str, culprits: list[int], words: list[str]) -> None:
    status, printed = examine(tmp_path, "--json", "--timeout", "3", fault=fault)
    problems = read(printed)["problems"]
    assert status == 1
    assert [problem["ranks"] for problem in problems] == [culprits]
    assert [word for word in words if word not in problems[0]["text"]] == []
