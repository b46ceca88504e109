"""Islands on the real oneCCL: every operation, lost and stopped ranks, a process that uses torch's Gloo too.

Ranks that break are processes of a test's own, which must end by themselves.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

from polyccl import Comm

from .cases import all_cases, each_once, run_cases
from .marks import where_installed
from .pool import SharedPool
from .ranks import Raised, caught
from .shapes import Shape

pytestmark = [pytest.mark.backend("xccl"), pytest.mark.usefixtures("oneccl"), pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
ISLANDS = ("xccl=2", "xccl=3", "xccl=2,gloo=2", "xccl=1,host=3", "gloo=2,xccl=2,host=1", "host=2,xccl=2", "xccl=2,xccl=2")


# ---- operations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", where_installed(*ISLANDS))
def test_every_operation_dtype_and_reduction_is_right(jobs: SharedPool, shape: Shape, full: bool) -> None:
    if not full:
        cases_once = each_once(shape.size)
        assert len(cases_once) > 800
        jobs.run(run_cases, shape, cases_once, deadline=150)
        return
    cases = all_cases(shape.size)
    while chunk := list(itertools.islice(cases, 500)):
        jobs.run(run_cases, shape, chunk, deadline=600)


def test_a_launched_job_joins_two_vendors_libraries() -> None:
    if "gloo" not in __import__("polyccl.backends").backends.available():
        pytest.skip("the installed polyccl has no gloo plugin")
    words = [sys.executable, "-m", "polyccl", "launch", "--islands", "gloo=2,xccl=2", "--check", "--", sys.executable]
    done = subprocess.run(
        [*words, "-m", "tests.jobs", "--sample", "33"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "cases on 4 ranks, islands [[0, 1], [2, 3]]" in done.stdout


# ---- ranks that differ -------------------------------------------------------------------------------------------------


def unequal(comm: Comm) -> tuple[Raised, Raised]:
    """Rank 1's count differs from that of its own island."""
    return caught(lambda: comm.all_reduce(np.ones(5 if comm.get_rank() == 1 else 4, np.float32))), caught(comm.barrier)


def test_a_difference_inside_an_island_is_told_to_the_others_with_the_check_off(jobs: SharedPool) -> None:
    for raised, after in jobs.run(unequal, Shape("xccl=2,host=1"), fresh=True, check=False):
        assert raised.name == after.name == "Mismatch", (raised, after)
        assert raised.seconds < 5


# ---- ranks that are lost ---------------------------------------------------------------------------------------------

RANK = """
import gc, json, os, signal, sys, threading, time, weakref
import numpy as np
import polyccl
from polyccl.store import FileStore

directory, rank, size, local, label, victim, how, limit, after = sys.argv[1:]
rank, size, victim, limit = int(rank), int(size), int(victim), float(limit)
backend = "bridge" if label else local
comm = polyccl.new_comm(backend, "cpu", "doomed", store=FileStore(directory), rank=rank, size=size, timeout=limit,
                        hints={"local": local, "island": label} if label else {})
data = np.ones(1 << 22, np.float32)
comm.all_reduce(data)
print(json.dumps({"ready": os.getpid()}), flush=True)
if rank == victim:
    threading.Timer(0.2, lambda: os.kill(os.getpid(), getattr(signal, how))).start()
began = time.monotonic()
try:
    while True:
        began = time.monotonic()
        comm.all_reduce(data)
except polyccl.CommError as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}), flush=True)
if rank == victim:
    sys.exit(0)  # a stopped one, gone on
memory = weakref.ref(data)
comm = data = None
gc.collect()
print(json.dumps({"kept": memory() is not None}), flush=True)
again = polyccl.new_comm(after, "cpu", "again", store=FileStore(directory), rank=rank - (rank > victim), size=size - 1, timeout=30)
total = np.array([1.0])
again.all_reduce(total)
again.finalize()
print(json.dumps({"again": total[0]}), flush=True)
"""


@dataclass
class Outcome:
    """What one rank said, and how it ended."""

    status: int
    error: str
    text: str
    seconds: float
    again: float


class Ranks:
    """Processes of one job, killed in the end where they have not ended."""

    def __init__(self, shape: Shape, folder: Path, victim: int, how: str, limit: float, after: str) -> None:
        self.outputs = [folder / f"rank{rank}" for rank in range(shape.size)]
        self.processes = []
        for rank, (local, label) in enumerate(shape.places):
            label = label if "," in shape.islands else ""
            words = [str(folder / "store"), rank, shape.size, local, label, victim, how, limit, after]
            with self.outputs[rank].open("w") as file:
                command = [sys.executable, "-c", RANK, *map(str, words)]
                self.processes.append(
                    subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"POLYCCL_CHECK": "0"})
                )

    def facts(self, rank: int) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for line in self.outputs[rank].read_text().splitlines():
            if line.startswith("{") and line.endswith("}"):
                facts |= json.loads(line)
        return facts

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        end = monotonic() + seconds
        while not condition():
            texts = "\n".join(f"--- rank {rank}: {output.read_text()[-2000:]}" for rank, output in enumerate(self.outputs))
            assert monotonic() < end, f"{what}\n{texts}"
            sleep(0.02)

    def outcome(self, rank: int) -> Outcome:
        facts = self.facts(rank)
        status = self.processes[rank].poll()
        assert status is not None
        return Outcome(status, facts.get("error", ""), facts.get("text", ""), facts.get("seconds", 0), facts.get("again", 0))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def whole(request: pytest.FixtureRequest, full: bool) -> None:
    """Skips what takes too long for every run."""
    if request.config.getoption("--backend") != "xccl" and not full:
        pytest.skip("lost ranks of xccl are for `nox -s tests_xccl`")


BROKEN = where_installed("xccl=2", "xccl=3", "xccl=2,gloo=2", "host=1,xccl=2")
ROUNDS = 2  # where in a transfer the loss strikes is chance


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("turn", range(ROUNDS))
@pytest.mark.parametrize("shape", BROKEN)
def test_a_killed_rank_is_lost_to_all_others_which_then_go_on(tmp_path: Path, shape: Shape, turn: int) -> None:
    victim = max(rank for rank, (local, _) in enumerate(shape.places) if local == "xccl")
    others = [rank for rank in range(shape.size) if rank != victim]
    ranks = Ranks(shape, tmp_path, victim, "SIGKILL", 30, "host")
    try:
        ranks.until(lambda: all(process.poll() is not None for process in ranks.processes), 90, "a rank did not end")
        assert ranks.processes[victim].returncode == -signal.SIGKILL
        for outcome in map(ranks.outcome, others):
            assert outcome.error == "PeerLost", outcome
            assert f"rank {victim} (" in outcome.text
            assert outcome.seconds < 10
            assert outcome.again == shape.size - 1
            assert outcome.status == 0, "it ended by itself, in good order"
    finally:
        ranks.close()


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("shape", BROKEN)
def test_a_stopped_rank_ends_the_others_calls_by_their_deadline(tmp_path: Path, shape: Shape) -> None:
    victim = max(rank for rank, (local, _) in enumerate(shape.places) if local == "xccl")
    others = [rank for rank in range(shape.size) if rank != victim]
    ranks = Ranks(shape, tmp_path, victim, "SIGSTOP", 6, "xccl" if shape.islands.startswith("xccl=3") else "host")
    try:
        ranks.until(lambda: all(ranks.processes[rank].poll() is not None for rank in others), 90, "a rank did not end")
        for rank, outcome in zip(others, map(ranks.outcome, others), strict=True):
            assert outcome.error in ("CommTimeout", "PeerLost", "Aborted"), outcome
            assert outcome.seconds < 6 + 5
            if shape.islands.startswith("xccl=2") and "," not in shape.islands and "did not return" in outcome.text:
                assert ranks.facts(rank)["kept"], "the call that was given up may still write to its tensor"
            assert outcome.again == shape.size - 1
            assert outcome.status == 0
        assert ranks.processes[victim].poll() is None, "the stopped rank is still there"
        ranks.processes[victim].send_signal(signal.SIGCONT)
        ranks.until(lambda: ranks.processes[victim].poll() is not None, 60, "the stopped rank did not end once it went on")
        assert ranks.facts(victim)["error"] in ("CommTimeout", "PeerLost", "Aborted")
    finally:
        ranks.close()


# ---- beside torch ----------------------------------------------------------------------------------------------------

BESIDE_TORCH = """
import sys
import numpy as np
import torch
import torch.distributed as dist
import polyccl
from polyccl.store import FileStore

def openmp():
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if "/" in line}
    return sorted(file for file in files if any(name in file.rsplit("/", 1)[-1] for name in ("libgomp", "libiomp", "libomp")))

directory, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{directory}/torch", rank=rank, world_size=2)
before = openmp()
comm = polyccl.new_comm("xccl", "cpu", store=FileStore(directory + "/store"), rank=rank, size=2, timeout=30)
for count in (10, 500_000):
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        theirs, ours = torch.full((count,), rank + 1, dtype=dtype), torch.full((count,), rank + 1, dtype=dtype)
        work = dist.all_reduce(theirs, async_op=True)
        comm.all_reduce(ours)
        work.wait()
        assert theirs.eq(3).all() and ours.eq(3).all(), (count, dtype)
assert torch.mm(torch.ones(200, 200), torch.ones(200, 200)).eq(200).all()
after = openmp()
assert len(before) == 1 and after == before, (before, after)
comm.finalize()
dist.destroy_process_group()
"""


def test_beside_torchs_gloo_both_are_right_and_openmp_is_there_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ranks = [
        subprocess.Popen([sys.executable, "-c", BESIDE_TORCH, str(tmp_path), str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
