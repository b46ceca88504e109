"""The gloo plugin, driven alone through its C ABI: every kind with real processes, aborts, deadlines, killed ranks, isolation from
torch. `plugins/ranks.py` is one rank; `plugins/abi.py` is the ABI in ctypes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest

backends = pytest.importorskip("polyccl.backends", reason="polyccl is not installed")
pytest.importorskip("numpy", reason="the ranks compute what is right with NumPy")

PLUGINS = Path(__file__).parent / "plugins"
Cases = list[tuple[str, str | None]]  # a case's name, and its error
KINDS = ["broadcast", "all_reduce", "reduce", "all_gather", "all_gather_v"]

pytestmark = [pytest.mark.backend("gloo"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def plugin() -> str:
    """The plugin's path."""
    return str(backends.find("gloo"))


def spawn(
    commands: list[list[str]], folder: Path, seconds: float, environment: dict[str, str] | None = None
) -> list[tuple[int, str]]:
    """Run one process for each command at once; gives exit codes and outputs. Kills what is left after `seconds`."""
    outputs = [folder / f"output.{i}" for i in range(len(commands))]
    processes = []
    for command, output in zip(commands, outputs, strict=True):
        with output.open("w") as file:
            env = {**os.environ, **(environment or {})}
            processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env))
    end = time.monotonic() + seconds
    try:
        codes = [process.wait(max(0.1, end - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail("a rank did not end:\n" + "\n".join(output.read_text() for output in outputs))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return list(zip(codes, [output.read_text() for output in outputs], strict=True))


def run_ranks(plugin: str, folder: Path, scenario: str, size: int, *, killed: tuple[int, ...] = ()) -> Cases:
    """Run a scenario on `size` ranks; gives each case of each rank with its error. The ranks in `killed` end by SIGKILL."""
    script = str(PLUGINS / "ranks.py")
    commands = [[sys.executable, script, plugin, str(folder), scenario, str(rank), str(size)] for rank in range(size)]
    cases = []
    for rank, (code, output) in enumerate(spawn(commands, folder, 100)):
        assert code == (-9 if rank in killed else 0), f"rank {rank} ended with {code}:\n{output[-3000:]}"
        for line in output.splitlines():
            case = json.loads(line)
            cases.append((case["case"], case["error"] and f"rank {rank}: {case['error']}"))
    return cases


def assert_all_passed(cases: Cases, at_least: int) -> None:
    assert len(cases) >= at_least
    assert not [case for case in cases if case[1] is not None]


@pytest.fixture(scope="module", params=[2, 3], ids=["2-ranks", "3-ranks"])
def collectives(request: pytest.FixtureRequest, plugin: str, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Every case of every kind, run once for all tests."""
    return run_ranks(plugin, tmp_path_factory.mktemp("collectives"), "collectives", request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_size_and_layout_is_right_and_inputs_stay(collectives: Cases, kind: str) -> None:
    assert_all_passed([case for case in collectives if case[0].startswith(f"{kind}-")], at_least=80)


@pytest.mark.parametrize("case", ["equal-bits-exchange", "equal-bits-ring", "barrier"])
def test_all_reduce_of_random_floats_gives_all_ranks_equal_bits(collectives: Cases, case: str) -> None:
    assert_all_passed([found for found in collectives if found[0] == case], at_least=2)


def test_what_cannot_be_done_is_refused_and_the_communicator_stays_usable(plugin: str, tmp_path: Path) -> None:
    assert_all_passed(run_ranks(plugin, tmp_path, "refusals", 2), at_least=16)


def test_ranks_that_differ_are_both_told_and_no_process_ends(plugin: str, tmp_path: Path) -> None:
    assert_all_passed(run_ranks(plugin, tmp_path, "differ", 2), at_least=20)


@pytest.mark.parametrize("size", [2, 3])
def test_abort_wakes_an_operation_whose_peers_never_come(plugin: str, tmp_path: Path, size: int) -> None:
    assert_all_passed(run_ranks(plugin, tmp_path, "abort", size), at_least=6 * size)


@pytest.mark.parametrize("size", [2, 3])
def test_a_deadline_ends_an_operation_whose_peers_never_come(plugin: str, tmp_path: Path, size: int) -> None:
    assert_all_passed(run_ranks(plugin, tmp_path, "deadline", size), at_least=3 * size)


@pytest.mark.parametrize(("scenario", "size"), [("killed_in_broadcast", 2), ("killed_in_all_reduce", 3)])
def test_a_rank_killed_in_the_middle_of_an_operation_is_lost_and_named(
    plugin: str, tmp_path: Path, scenario: str, size: int
) -> None:
    assert_all_passed(run_ranks(plugin, tmp_path, scenario, size, killed=(1,)), at_least=size - 1)


def test_two_communicators_of_the_same_ranks_work_at_once(plugin: str, tmp_path: Path) -> None:
    assert_all_passed(run_ranks(plugin, tmp_path, "concurrent", 2), at_least=2)


def test_creation_refuses_a_rank_out_of_range_and_takes_a_single_one(plugin: str, tmp_path: Path) -> None:
    assert_all_passed(run_ranks(plugin, tmp_path, "creation", 1), at_least=2)


@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
def test_the_plugin_exports_one_symbol(plugin: str) -> None:
    symbols = subprocess.run(["nm", "-D", "--defined-only", plugin], check=True, capture_output=True, text=True, timeout=30).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["polyccl_backend_query"]


TORCH_AND_PLUGIN = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import torch
import torch.distributed as dist
from pathlib import Path
from abi import Comm, DirectoryStore, Plugin

plugin, folder, rank = sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{folder}/torch", rank=rank, world_size=2)
comm = Comm(Plugin(plugin), DirectoryStore(folder), rank, 2)
for count in (10, 500_000):  # torch's own, then the plugin's: small, and through Gloo's ring
    theirs = torch.full((count,), float(rank + 1))
    dist.all_reduce(theirs)
    ours = np.full(count, rank + 1, np.float32)
    comm.run("all_reduce", "float32", input=ours, output=ours, count=count, reduction="SUM")
    assert theirs.eq(3).all() and (ours == 3).all()
comm.run("barrier")
comm.destroy()
dist.destroy_process_group()
"""


def test_beside_torch_each_calls_its_own_gloo(plugin: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "both.py"
    script.write_text(textwrap.dedent(TORCH_AND_PLUGIN))
    commands = [[sys.executable, str(script), str(PLUGINS), plugin, str(tmp_path), str(rank)] for rank in range(2)]
    # The loader's record of which file each symbol was taken from, of this very run.
    trace = {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "bindings"), "GLOO_SOCKET_IFNAME": "lo"}
    for code, output in spawn(commands, tmp_path, 100, trace):
        assert code == 0, output

    def side(file: str) -> str:
        return "ours" if re.search("libpolyccl_gloo|/libgloo", file) else "theirs" if "/libtorch" in file else "other"

    bindings: Counter[str] = Counter()
    for record in tmp_path.glob("bindings.*"):
        with record.open(errors="replace") as lines:
            for line in lines:
                found = re.search(r"binding file (\S+) \[0\] to (\S+) \[0\]: .* symbol `(\w*4gloo\w*)'", line)
                if found is None:
                    continue
                bindings["-".join(side(file) for file in found.group(1, 2))] += 1
    assert bindings["theirs-theirs"] > 0, "the record shows torch's Gloo at work"
    assert set(bindings) <= {"theirs-theirs", "ours-ours"}, bindings
