"""The stand-ins for CUDA, HIP, NCCL and RCCL (`tests/doubles`): that they have the vendors' ABI, do what the vendors' libraries do,
and are as strict. `doubles/driver.cc` and `doubles/client.py` are programs that know only the vendors' APIs.

Where they are installed, the real nccl.h (of the package nvidia-nccl-cu12, or below the folder that TEST_NCCL names), NVIDIA's
cuda.h, Debian's HIP headers and the vendors' own Python bindings are compared with. TEST_SANITIZERS=1 adds the driver under
ThreadSanitizer and AddressSanitizer, whose build takes minutes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

DOUBLES = Path(__file__).parents[1] / "doubles"
SCENARIOS = {
    "async": "an all_reduce behind a slow kernel returns at once",
    "cross_stream": "another stream waits by an event",
    "two_streams": "a communicator's calls keep their order over streams",
    "group": "a group exchanges more than any buffer holds, with itself too, in any order of calls",
    "deadlock": "sends outside a group deadlock, and an abort ends them",
    "eager": "eager sends hide the deadlock",
    "mismatch": "unequal sizes are an asynchronous error with a text, and hold the stream until the abort",
    "peer_killed": "a killed peer is noticed within a second",
    "killed_before_joining": "a rank killed before it joins is noticed",
    "abort": "an abort is told to the peers",
    "flags": "streams wait for and write flags in order",
    "host_function": "host functions must not call the runtime",
    "fork": "a forked child has no runtime",
    "shared_device": "two ranks on one device are refused where they would be",
    "non_blocking": "non-blocking calls are in progress until they are polled",
    "abort_init": "an abort ends an initialization",
    "shrink": "survivors shrink the communicator",
    "scalars": "PREMUL_SUM's scalars are read when their residence says",
    "guard": "the host faults on guarded device memory",
    "watchdog": "a watchdog ends what never would",
    "capture": "graph capture is refused with a sentence",
    "capture_modes": "a question about an event ends another thread's capture unless it is relaxed",
    "both": "one process uses both vendors at once",
}
SETTINGS = {
    "eager": {"FAKE_CCL_EAGER": "1"},
    "guard": {"FAKE_GUARD": "1"},
    "shared_device": {"FAKE_CCL_REFUSE_SHARED_GPU": "1"},
    "watchdog": {"FAKE_CCL_WATCHDOG_S": "1"},
}
OLD_LACKS = ("ncclAlltoAll", "ncclGather", "ncclScatter", "ncclCommShrink", "ncclCommWindowRegister", "ncclAllReduceConfig")

pytestmark = pytest.mark.timeout(120, func_only=True)  # not of the build, which may wait for a busy machine


def load_builder() -> Any:
    spec = importlib.util.spec_from_file_location("build_doubles", DOUBLES / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def build(sanitizer: str = "") -> Any:
    builder = load_builder()
    try:
        return builder.build(sanitizer)
    except builder.CannotBuild as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def doubles() -> Any:
    """The stand-ins, built where they are not yet."""
    return build()


def run(command: list[str], seconds: float = 60, **environment: str) -> str:
    """Run a program to its good end; gives what it prints."""
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def drive(doubles: Any, scenario: str, **environment: str) -> None:
    libraries = [doubles.cuda, doubles.nccl, doubles.hip, doubles.rccl]
    command = [str(doubles.folder / "driver"), scenario, *map(str, libraries)]
    run(command, 90, FAKE_DELAY_US="300", **SETTINGS.get(scenario, {}), **environment)


# -- behaviour -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda name: SCENARIOS[name].replace(" ", "_"))
def test_a_program_finds(scenario: str, doubles: Any) -> None:
    drive(doubles, scenario)


@pytest.mark.skipif(os.environ.get("TEST_SANITIZERS") != "1", reason="takes minutes to build: set TEST_SANITIZERS=1")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_a_sanitizer_finds_nothing(sanitizer: str) -> None:
    sanitized = build(sanitizer)
    for scenario in SCENARIOS:
        drive(sanitized, scenario, ASAN_OPTIONS="detect_leaks=1", UBSAN_OPTIONS="halt_on_error=1")


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_rccl_reduces_every_type_as_its_architecture_reads_it(arch: str, doubles: Any) -> None:
    client(doubles, "reductions", "hip", doubles.rccl, FAKE_HIP_ARCH=arch)


def test_nccl_reduces_every_type(doubles: Any) -> None:
    client(doubles, "reductions", "cuda", doubles.nccl)


@pytest.mark.parametrize("library", ["nccl", "nccl_old", "ncclx", "rccl", "rcclx"])
@pytest.mark.parametrize("scenario", ["movement", "splits"])
def test_every_flavour_moves_bytes_and_splits(library: str, scenario: str, doubles: Any) -> None:
    client(doubles, scenario, "hip" if library.startswith("rccl") else "cuda", getattr(doubles, library))


@pytest.mark.parametrize("library", ["nccl", "ncclx"])
def test_a_config_is_read_as_the_library_reads_it(library: str, doubles: Any) -> None:
    client(doubles, "configs", "cuda", getattr(doubles, library))


def client(doubles: Any, scenario: str, vendor: str, library: Path, **environment: str) -> None:
    pytest.importorskip("numpy", reason="the client compares with NumPy")
    runtime = doubles.hip if vendor == "hip" else doubles.cuda
    run([sys.executable, str(DOUBLES / "client.py"), scenario, vendor, str(runtime), str(library)], **environment)


def test_nothing_is_left_behind_by_killed_ranks(doubles: Any) -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    for scenario in ("peer_killed", "killed_before_joining"):
        drive(doubles, scenario)
    names = {name for name in os.listdir("/dev/shm") if name not in before} if before else set()
    assert not [name for name in names if "stand" in name or "ccl" in name.lower()]
    assert not _processes_of(doubles.folder / "driver")


def _processes_of(program: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and (entry / "exe").resolve() == program
                and (entry / "stat").read_text().split(")")[1].split()[0] != "Z"
            ):
                found.append(entry.name)
        except OSError:
            continue
    return found


# -- names ---------------------------------------------------------------------------------------------------------------------


def exports(library: Path) -> set[str]:
    if shutil.which("nm") is None:
        pytest.skip("there is no nm")
    lines = run(["nm", "-D", "--defined-only", str(library)]).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


@pytest.mark.parametrize("library", ["cuda", "cudart", "hip", "nccl", "nccl_old", "ncclx", "rccl", "rcclx"])
def test_a_stand_in_exports_its_vendors_names_alone_and_says_what_it_is(library: str, doubles: Any) -> None:
    names = exports(getattr(doubles, library))
    assert "polyccl_stand_in" in names
    foreign = {name for name in names if not re.match(r"(cu|cuda|hip|nccl)[A-Z]|polyccl_stand_in", name)}
    assert not foreign


def test_each_flavour_has_and_lacks_what_its_version_does(doubles: Any) -> None:
    new, old, fork = exports(doubles.nccl), exports(doubles.nccl_old), exports(doubles.ncclx)
    assert new >= set(OLD_LACKS)
    assert not old & set(OLD_LACKS)
    assert fork - new == {"ncclAllToAllv", "ncclCommGetUniqueHash", "ncclGlobalRegisterWithPtr", "ncclGlobalDeregisterWithPtr"}
    rccl = exports(doubles.rccl)
    assert rccl >= {"ncclAllReduceWithBias", "ncclAlltoAllv", "ncclAllToAllv", "ncclAllToAll"}


# -- the vendors' own words ----------------------------------------------------------------------------------------------------


def real_nccl_header() -> Path:
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    found = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    for folder in [Path(os.environ.get("TEST_NCCL", "/nonexistent")), *found]:
        if (folder / "include/nccl.h").is_file():
            return folder / "include"
    pytest.skip("there is no real nccl.h (350 MB): install nvidia-nccl-cu12, or name its folder in TEST_NCCL")


def real_cuda_header() -> Path:
    for folder in sorted(Path("/usr/local").glob("cuda-13*/include")):
        if (folder / "cuda.h").is_file():
            return folder
    pytest.skip("there is no cuda.h of CUDA 13")


def real_hip_header() -> Path:
    if not Path("/usr/include/hip/hip_runtime_api.h").is_file():
        pytest.skip("there are no HIP headers: apt-get install libamdhip64-dev")
    return Path("/usr/include")


def compile_with(flags: list[str], source: str, *output: str) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    run([compiler, "-std=c++20", *flags, str(DOUBLES / source), *(["-o", *output] if output else ["-fsyntax-only"])])


def assert_same_abi(tmp_path: Path, what: str, ours: list[str], theirs: list[str], sources: list[str]) -> None:
    """The sources compile with the vendor's declarations in place of ours, and numbers and layouts are the same."""
    vendor = [*ours, "-DSTAND_IN_VENDOR_HEADERS", "-Wno-deprecated-declarations", *theirs]
    for source in sources:
        compile_with(vendor, source)
    printed = []
    for name, flags in {"ours": ours, "theirs": vendor}.items():
        program = str(tmp_path / name)
        compile_with([*flags, f"-DABI_{what}"], "abi_layout.cc", program)
        printed.append(run([program]).splitlines())
    assert len(printed[0]) > 10
    assert printed[0] == printed[1]


def test_the_abi_is_that_of_the_real_nccl_header(tmp_path: Path) -> None:
    header = real_nccl_header()
    if not re.search(r"NCCL_VERSION_CODE 23203\b", (header / "nccl.h").read_text()):
        pytest.skip("nccl.h is not that of 2.32.3, which the stand-in stands for")
    # All that nccl.h takes from CUDA.
    (tmp_path / "cuda_runtime.h").write_text(
        "#define CUDART_VERSION 0\ntypedef struct CUstream_st *cudaStream_t;\ntypedef struct CUevent_st *cudaEvent_t;\n"
    )
    (tmp_path / "cuda_fp16.h").write_text("")
    assert_same_abi(
        tmp_path, "NCCL", ["-DSTAND_IN_VERSION=23203"], ["-isystem", str(header), "-isystem", str(tmp_path)], ["ccl.cc"]
    )


def test_the_abi_is_that_of_the_real_cuda_header(tmp_path: Path) -> None:
    assert_same_abi(tmp_path, "CUDA", [], ["-isystem", str(real_cuda_header())], ["cuda_driver.cc"])


def test_the_abi_is_that_of_the_real_hip_header(tmp_path: Path) -> None:
    real_hip_header()
    assert_same_abi(tmp_path, "HIP", [], ["-D__HIP_PLATFORM_AMD__"], ["hip.cc"])


@pytest.mark.parametrize(
    ("vendor", "package", "module"),
    [("nvidia", "nccl4py", "nccl.bindings"), ("amd", "rocm-bindings-systems", "rocm.bindings.rccl")],
)
def test_the_vendors_own_bindings_run_on_it(vendor: str, package: str, module: str, doubles: Any, tmp_path: Path) -> None:
    try:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(module)
    except ModuleNotFoundError:
        pytest.skip(f"there are no bindings: pip install {package}")
    folder = (doubles.cuda if vendor == "nvidia" else doubles.hip).parent
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/librccl.so").symlink_to(doubles.rccl)
    (tmp_path / "lib/libamdhip64.so").symlink_to(doubles.hip)
    environment = {**os.environ, "ROCM_PATH": str(tmp_path), "FAKE_HIP_ARCH": "gfx942"}
    command = [sys.executable, str(DOUBLES / "bindings_client.py"), vendor, str(folder), str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank), "2"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    end = time.monotonic() + 60
    try:
        outputs = [rank.communicate(timeout=max(0.1, end - time.monotonic()))[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
