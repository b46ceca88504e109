"""ThreadSanitizer and AddressSanitizer over the code that ships: the core, the plugins of gloo, nccl and rccl on stand-ins.

`nox -s tsan` and `nox -s asan` run these. Each test is a job: one process of `rank.cc` for each rank of a shape of islands, with
plans that `plans.py` wrote, on devices whose streams dawdle at random. A rank fails where something does not hold, where the
sanitizer finds anything, or where it is not over in time. ``TEST_SANITIZER`` is thread, or address (with undefined behaviour and
leaks).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SANITIZER = os.environ.get("TEST_SANITIZER", "")
BUILD_SECONDS, JOB_SECONDS = 900, 90

PLAIN, TWO_VENDORS, HALF_DEVICE, HOST, THREE = "nccl=2", "nccl=2,rccl=2", "nccl=2,host=2", "gloo=2,host=2", "nccl=2,rccl=1,host=1"
SCENARIOS: dict[str, tuple[str, tuple[str, ...]]] = {
    "arithmetic": ("every kernel takes every bit pattern", ("host=1",)),
    "operations": ("every collective gives the right result in every form", (PLAIN, TWO_VENDORS, HALF_DEVICE, HOST, THREE)),
    "in_flight": ("many operations are on their way at once", (PLAIN, HOST, THREE)),
    "messages": ("messages come, alone, in batches and from anyone", (PLAIN, HOST, THREE)),
    "two_at_once": ("two communicators are used at once", (PLAIN, HALF_DEVICE, HOST)),
    "finalize": ("finalize waits for what is on its way", (PLAIN, HOST, THREE)),
    "drop_on_stream": ("a destroyed communicator does what streams rely on", (PLAIN, TWO_VENDORS)),
    "mismatch": ("calls that differ are refused", (PLAIN, HOST, THREE)),
    "destroy": ("operations go on when their communicator is let go of", (PLAIN, HOST, THREE)),
    "abort": ("an abort ends all operations", (PLAIN, TWO_VENDORS, HOST)),
    "lose_first": ("the loss of the first rank ends all operations", (PLAIN, HOST, THREE)),
    "lose_last": ("the loss of the last rank ends all operations", (TWO_VENDORS, HALF_DEVICE, HOST)),
    "time_out": ("calls without one rank time out", (PLAIN, HALF_DEVICE, HOST)),
    "interrupt": ("an interrupt ends the call", (TWO_VENDORS, HOST)),
    "absent": ("a creation without one rank times out", (PLAIN,)),
}

pytestmark = [
    pytest.mark.skipif(not SANITIZER, reason="`nox -s tsan` and `nox -s asan` run these: they build everything with a sanitizer"),
    pytest.mark.timeout(JOB_SECONDS + 30, func_only=True),
]


@pytest.fixture(scope="module")
def build() -> Path:
    """The folder of a build with the sanitizer, kept below ``.cache`` for the next run."""
    folder = HERE.parents[1] / ".cache" / "native" / SANITIZER
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    settings = [f"-DSANITIZER={SANITIZER}", f"-DPython_EXECUTABLE={sys.executable}"]
    workers = str(min(8, os.cpu_count() or 1))
    for command in (
        ["cmake", *generator, "-S", str(HERE), "-B", str(folder), *settings],
        ["cmake", "--build", str(folder), "--target", "rank", "-j", workers],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return folder


def environment(build: Path, rank: int) -> dict[str, str]:
    """What points the plugins to the stand-ins, and tells the sanitizers how strict to be."""
    return {
        **os.environ,
        "POLYCCL_CUDA_LIBRARY": str(build / "cuda/libcuda.so.1"),
        "POLYCCL_NCCL_LIBRARY": str(build / "cuda/libnccl.so.2"),
        "POLYCCL_HIP_LIBRARY": str(build / "hip/libamdhip64.so.7"),
        "POLYCCL_RCCL_LIBRARY": str(build / "hip/librccl.so.1"),
        "FAKE_DELAY_US": "200",
        "RANK": str(rank),
        "TSAN_OPTIONS": f"suppressions={HERE / 'suppressions.thread'}:second_deadlock_stack=1",
        "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1:strict_init_order=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def run(build: Path, scenario: str, shape: str, folder: Path, **settings: str) -> list[tuple[int, str]]:
    """Run a job; gives each rank's exit status, negative where it did not end by itself, and what it printed."""
    subprocess.run([sys.executable, str(HERE / "plans.py"), shape, str(folder)], timeout=60, check=True)
    size = sum(int(part.split("=")[1]) for part in shape.split(","))
    outputs = [folder / f"output.{rank}" for rank in range(size)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, path in enumerate(outputs):
            command = [str(build / "rank"), scenario, shape, str(rank), str(folder)]
            variables = {**environment(build, rank), **settings}
            with path.open("wb") as output:
                ranks.append(subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT))
        end = time.monotonic() + JOB_SECONDS
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
    finally:
        for process in ranks:
            process.kill()  # does nothing to one that has ended
            process.wait()
    return [(process.returncode, path.read_text(errors="replace")) for process, path in zip(ranks, outputs, strict=True)]


LEAK_CHECK_FELL = "LeakSanitizer has encountered a fatal error"  # gcc 12's own fault, where a thread is just ending


def require_good(build: Path, scenario: str, shape: str, folder: Path, **settings: str) -> None:
    """Every rank of a job ends well. The job is run again where the check for leaks fell over itself."""
    for attempt in range(3):
        place = folder / str(attempt)
        place.mkdir()
        results = run(build, scenario, shape, place, **settings)
        if not any(LEAK_CHECK_FELL in text for _, text in results):
            break
    bad = [f"rank {rank} ended with {code}:\n{text[:6000]}" for rank, (code, text) in enumerate(results) if code != 0]
    assert not bad, "\n".join(bad)


CASES = [
    pytest.param(scenario, shape, id=f"{words.replace(' ', '_')}-{shape}")
    for scenario, (words, shapes) in SCENARIOS.items()
    for shape in shapes
]


@pytest.mark.parametrize(("scenario", "shape"), CASES)
def test_the_sanitizer_finds_nothing_where(scenario: str, shape: str, build: Path, tmp_path: Path) -> None:
    require_good(build, scenario, shape, tmp_path)


def test_the_sanitizer_finds_nothing_where_streams_cannot_wait_for_the_host(build: Path, tmp_path: Path) -> None:
    require_good(build, "in_flight", TWO_VENDORS, tmp_path, FAKE_NO_WAIT_VALUE="1")


def test_the_sanitizer_finds_a_planted_fault(build: Path, tmp_path: Path) -> None:
    ((code, text),) = run(build, "planted_fault", "host=1", tmp_path)
    assert code != 0
    assert "planted_fault" in text
    assert ("data race" if SANITIZER == "thread" else "detected memory leaks") in text
