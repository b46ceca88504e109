"""The plugins nccl, ncclx, rccl and rcclx, driven alone through their C ABI: on stand-in libraries with real processes, and on the
real libnccl as far as it goes without a GPU. `plugins/device_ranks.py` is one rank; `plugins/device_abi.py` is the ABI in ctypes.

The stand-ins are those of `tests/doubles`. The real libnccl is that of the package nvidia-nccl-cu12, or of the folder `nvidia/nccl`
that TEST_NCCL names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

backends = pytest.importorskip("polyccl.backends", reason="polyccl is not installed")
errors = pytest.importorskip("polyccl.errors")
pytest.importorskip("numpy", reason="the ranks compute what is right with NumPy")

PLUGINS = Path(__file__).parent / "plugins"
FAMILY = ("nccl", "ncclx", "rccl", "rcclx")
Cases = list[tuple[str, str | None]]  # a case's name, and its error

# Building the stand-ins takes minutes, once: it is no part of a test's time.
pytestmark = [pytest.mark.backend(*FAMILY), pytest.mark.timeout(120, func_only=True)]


def plugin_of(backend: str) -> str:
    """The plugin's path."""
    try:
        return str(backends.find(backend))
    except errors.BackendUnavailable:
        pytest.skip(f"the installed polyccl has no {backend} plugin")


def real_libnccl() -> Path:
    """The real libnccl.so.2."""
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    found = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    for folder in [Path(os.environ.get("TEST_NCCL", "/nonexistent")), *found]:
        if (folder / "lib/libnccl.so.2").is_file():
            return folder / "lib/libnccl.so.2"
    pytest.skip("there is no real libnccl (350 MB): install nvidia-nccl-cu12, or name its folder in TEST_NCCL")


class StandIns:
    """Where the stand-ins are: `doubles` has a path for each."""

    def __init__(self, doubles: Any) -> None:
        self.doubles = doubles

    def environment(self, *names: str) -> dict[str, str]:
        """The variables that make these backends use their stand-ins."""
        runtime = {"nccl": "cuda", "rccl": "hip"}
        found = {}
        for backend in names:
            driver = runtime[backend.removesuffix("x")]
            found[f"POLYCCL_{driver.upper()}_LIBRARY"] = str(getattr(self.doubles, driver))
            found[f"POLYCCL_{backend.upper()}_LIBRARY"] = str(getattr(self.doubles, backend))
        return found


@pytest.fixture(scope="session")
def stand_ins() -> StandIns:
    """The stand-ins of `tests/doubles`, built where they are not yet."""
    spec = importlib.util.spec_from_file_location("build_doubles", PLUGINS.parents[1] / "doubles/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    try:
        return StandIns(module.build())
    except module.CannotBuild as error:
        pytest.skip(str(error))


def clean(environment: dict[str, str]) -> dict[str, str]:
    """This process's environment without libraries that it names, and with the given variables."""
    kept = {name: value for name, value in os.environ.items() if not re.fullmatch(r"POLYCCL_\w+_LIBRARY", name)}
    return {**kept, "FAKE_DEVICE_COUNT": "8", **environment}


def run_ranks(
    plugin: str, environment: dict[str, str], folder: Path, scenario: str, size: int, *, killed: tuple[int, ...] = ()
) -> Cases:
    """Run a scenario on `size` ranks; gives each case of each rank with its error. The ranks in `killed` end by SIGKILL."""
    script = str(PLUGINS / "device_ranks.py")
    outputs = [folder / f"output.{scenario}.{rank}" for rank in range(size)]
    processes = []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            command = [sys.executable, script, plugin, str(folder), scenario, str(rank), str(size)]
            env = {**clean(environment), "RANK": str(rank)}
            processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env))
    end = time.monotonic() + 100
    try:
        codes = [process.wait(max(0.1, end - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail("a rank did not end:\n" + "\n".join(output.read_text()[-3000:] for output in outputs))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    cases: Cases = []
    for rank, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        text = output.read_text()
        assert code == (-9 if rank in killed else 0), f"rank {rank} ended with {code}:\n{text[-3000:]}"
        for line in text.splitlines():
            if line.startswith("{"):
                case = json.loads(line)
                cases.append((case["case"], case["error"] and f"rank {rank}: {case['error']}"))
    return cases


def assert_all_passed(cases: Cases, at_least: int) -> None:
    assert not [case for case in cases if case[1] is not None]
    assert len(cases) >= at_least


def run_python(code: str, environment: dict[str, str], *arguments: str) -> str:
    """Run a script in a process of its own, where `abi` can be imported; gives what it prints."""
    command = [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(PLUGINS)!r})\n{textwrap.dedent(code)}", *arguments]
    run = subprocess.run(command, env=clean(environment), capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


# -- on the stand-ins ----------------------------------------------------------------------------------------------------------

on_each = pytest.mark.parametrize("backend", FAMILY)
on_both_vendors = pytest.mark.parametrize("backend", ["nccl", "rccl"])


@pytest.fixture
def environment(backend: str, stand_ins: StandIns) -> dict[str, str]:
    return stand_ins.environment(backend)


@on_each
@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_moves_by_every_kind(backend: str, size: int, environment: dict[str, str], tmp_path: Path) -> None:
    assert_all_passed(run_ranks(plugin_of(backend), environment, tmp_path, "movement", size), at_least=300 * size)


@on_each
@pytest.mark.parametrize("size", [2, 4])
def test_every_reduction_of_every_dtype_is_right(backend: str, size: int, environment: dict[str, str], tmp_path: Path) -> None:
    assert_all_passed(run_ranks(plugin_of(backend), environment, tmp_path, "reduction", size), at_least=300 * size)


def test_an_old_library_does_what_it_has_no_calls_for(stand_ins: StandIns, tmp_path: Path) -> None:
    """NCCL 2.19 has no AlltoAll, Gather and Scatter, and knows less of the config."""
    old = {**stand_ins.environment("nccl"), "POLYCCL_NCCL_LIBRARY": str(stand_ins.doubles.nccl_old)}
    assert_all_passed(run_ranks(plugin_of("nccl"), old, tmp_path, "movement", 3), at_least=900)
    assert_all_passed(run_ranks(plugin_of("nccl"), old, tmp_path, "creation", 1), at_least=7)


@on_both_vendors
def test_random_delays_of_the_streams_change_no_result(backend: str, environment: dict[str, str], tmp_path: Path) -> None:
    slow = {**environment, "FAKE_DELAY_US": "300"}
    assert_all_passed(run_ranks(plugin_of(backend), slow, tmp_path, "movement", 2), at_least=600)


@on_both_vendors
def test_nothing_on_the_host_touches_device_memory(backend: str, environment: dict[str, str], tmp_path: Path) -> None:
    guarded = {**environment, "FAKE_GUARD": "1"}
    assert_all_passed(run_ranks(plugin_of(backend), guarded, tmp_path, "reduction", 2), at_least=600)


@on_both_vendors
def test_operations_keep_the_order_of_their_streams(backend: str, environment: dict[str, str], tmp_path: Path) -> None:
    assert_all_passed(run_ranks(plugin_of(backend), environment, tmp_path, "streams", 2), at_least=8)


@on_both_vendors
def test_what_cannot_be_done_is_refused_and_the_communicator_stays_usable(
    backend: str, environment: dict[str, str], tmp_path: Path
) -> None:
    assert_all_passed(run_ranks(plugin_of(backend), environment, tmp_path, "refusals", 2), at_least=20)


@on_both_vendors
@pytest.mark.parametrize("size", [2, 3])
def test_abort_ends_what_waits_for_ranks_that_never_come(
    backend: str, size: int, environment: dict[str, str], tmp_path: Path
) -> None:
    assert_all_passed(run_ranks(plugin_of(backend), environment, tmp_path, "abort", size), at_least=4 * size)


@on_both_vendors
def test_a_killed_rank_is_lost_to_the_others(backend: str, environment: dict[str, str], tmp_path: Path) -> None:
    assert_all_passed(run_ranks(plugin_of(backend), environment, tmp_path, "killed", 3, killed=(1,)), at_least=2)


@on_both_vendors
def test_creation_ends_by_its_deadline_and_says_what_is_wrong(backend: str, environment: dict[str, str], tmp_path: Path) -> None:
    assert_all_passed(run_ranks(plugin_of(backend), environment, tmp_path, "creation", 1), at_least=7)


@pytest.mark.parametrize("order", [("nccl", "rccl"), ("rccl", "nccl")], ids="-".join)
def test_one_process_holds_communicators_of_two_vendors(order: tuple[str, str], stand_ins: StandIns, tmp_path: Path) -> None:
    plugins = ",".join(plugin_of(backend) for backend in order)
    assert_all_passed(run_ranks(plugins, stand_ins.environment(*order), tmp_path, "both", 2), at_least=12)


CAPTURE = """
import ctypes as c, os
import numpy as np
from pathlib import Path
from abi import UNSUPPORTED, DirectoryStore, Plugin, PluginError
from device_abi import Buffer, Device, DeviceComm

plugin, folder, begin, end = sys.argv[1:5]
runtime = c.CDLL(os.environ[sys.argv[5]])
device = Device(Plugin(plugin))
if hasattr(runtime, "cuInit"):  # the driver's calls want a context, which torch would have made
    context = c.c_void_p()
    assert runtime.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0
    assert runtime.cuCtxPushCurrent_v2(context) == 0
comm = DeviceComm(device, DirectoryStore(Path(folder)), 0, 1)
x = Buffer(device, np.ones(4, np.float32))
device.synchronize()
stream = device.new_stream()
assert getattr(runtime, begin)(c.c_void_p(stream), 2) == 0
try:
    device.copy(x.address, x.host, 16, stream)
except PluginError as error:
    assert error.result == UNSUPPORTED
    assert "captured into a graph" in error.text
    print("refused")
graph = c.c_void_p()
getattr(runtime, end)(c.c_void_p(stream), c.byref(graph))
"""


@pytest.mark.parametrize(
    ("backend", "begin", "end", "variable"),
    [
        ("nccl", "cuStreamBeginCapture_v2", "cuStreamEndCapture", "POLYCCL_CUDA_LIBRARY"),
        ("rccl", "hipStreamBeginCapture", "hipStreamEndCapture", "POLYCCL_HIP_LIBRARY"),
    ],
)
def test_a_planned_operations_copies_are_refused_while_a_graph_is_captured(
    backend: str, begin: str, end: str, variable: str, environment: dict[str, str], tmp_path: Path
) -> None:
    output = run_python(CAPTURE, environment, plugin_of(backend), str(tmp_path), begin, end, variable)
    assert output == "refused\n"


# -- which library ---------------------------------------------------------------------------------------------------------------

LIBRARIES = """
import json
from abi import OK, Plugin
import ctypes as c

found = {}
for path in sys.argv[1:]:
    plugin = Plugin(path)
    version, file, count, key = c.create_string_buffer(256), c.create_string_buffer(4096), c.c_int32(), c.create_string_buffer(256)
    one = {"result": plugin.table.library(version, 256, file, 4096), "flags": plugin.table.flags}
    one["error"] = plugin.text() if one["result"] else ""
    plugin.table.compatibility(0, key, 256)
    one |= {"version": version.value.decode(), "file": file.value.decode(), "key": key.value.decode()}
    one["devices"] = plugin.table.device_count(c.byref(count))
    one["why"] = plugin.text() if one["devices"] else ""
    found[plugin.table.name.decode()] = one
print(json.dumps(found))
"""


@pytest.mark.parametrize("backend", FAMILY)
def test_the_plugin_exports_one_symbol(backend: str) -> None:
    if shutil.which("nm") is None:
        pytest.skip("there is no nm")
    command = ["nm", "-D", "--defined-only", plugin_of(backend)]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["polyccl_backend_query"]


@on_each
def test_a_stand_in_is_known_as_one(backend: str, environment: dict[str, str]) -> None:
    found = json.loads(run_python(LIBRARIES, environment, plugin_of(backend)))[backend]
    assert found["result"] == 0
    assert found["version"].endswith(" (stand-in)")
    assert found["flags"] & 16, "its device memory is host memory"
    assert found["key"] == f"{backend} {found['version'].removesuffix(' (stand-in)')}"


@pytest.mark.parametrize(("backend", "other"), [("nccl", "ncclx"), ("ncclx", "nccl"), ("nccl", "rccl"), ("rccl", "nccl")])
def test_a_library_of_another_flavour_is_refused_by_name(backend: str, other: str, stand_ins: StandIns) -> None:
    file = stand_ins.environment(other)[f"POLYCCL_{other.upper()}_LIBRARY"]
    variable = f"POLYCCL_{backend.upper()}_LIBRARY"
    found = json.loads(run_python(LIBRARIES, {variable: file}, plugin_of(backend)))[backend]
    assert found["result"] == 6
    assert variable in found["error"]
    assert f"is {other.upper()}, not {backend.upper()}" in found["error"]


@pytest.mark.parametrize("backend", FAMILY)
def test_a_file_that_the_user_names_has_no_substitute(backend: str, tmp_path: Path) -> None:
    variable = f"POLYCCL_{backend.upper()}_LIBRARY"
    found = json.loads(run_python(LIBRARIES, {variable: str(tmp_path / "libmissing.so")}, plugin_of(backend)))[backend]
    assert found["result"] == 6
    assert variable in found["error"]
    assert "libmissing.so" in found["error"]


def test_the_copy_that_the_process_has_mapped_is_preferred(stand_ins: StandIns, tmp_path: Path) -> None:
    environment = stand_ins.environment("nccl")
    mapped = tmp_path / "libnccl.so.2"
    shutil.copy(environment["POLYCCL_NCCL_LIBRARY"], mapped)
    # Beside the copy lies what it may link.
    del environment["POLYCCL_NCCL_LIBRARY"]
    environment["LD_LIBRARY_PATH"] = str(Path(environment["POLYCCL_CUDA_LIBRARY"]).parent)
    code = f"import ctypes\nctypes.CDLL({str(mapped)!r})\n" + LIBRARIES
    found = json.loads(run_python(code, environment, plugin_of("nccl")))["nccl"]
    assert found["file"] == str(mapped)


def test_the_python_package_beside_the_plugin_is_found(stand_ins: StandIns, tmp_path: Path) -> None:
    if importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None:
        pytest.skip("nvidia-nccl-cu12 is installed, and the packages that this Python uses come first")
    environment = stand_ins.environment("nccl")
    packages = tmp_path / "lib/site-packages"
    plugin, library = packages / "polyccl/backends/libpolyccl_nccl.so", packages / "nvidia/nccl/lib/libnccl.so.2"
    for file, source in ((plugin, plugin_of("nccl")), (library, environment.pop("POLYCCL_NCCL_LIBRARY"))):
        file.parent.mkdir(parents=True)
        shutil.copy(source, file)
    environment["LD_LIBRARY_PATH"] = str(Path(environment["POLYCCL_CUDA_LIBRARY"]).parent)
    environment.pop("POLYCCL_CUDA_LIBRARY")
    found = json.loads(run_python(LIBRARIES, environment, str(plugin)))["nccl"]
    assert found["file"] == str(library)


# -- the real libnccl, without a GPU ---------------------------------------------------------------------------------------------


def has_nvidia_driver() -> bool:
    return Path("/dev/nvidiactl").exists()


@pytest.mark.parametrize("order", [("rccl", "nccl"), ("nccl", "rccl")], ids="-".join)
def test_a_stand_in_of_rccl_and_the_real_libnccl_do_not_mix(order: tuple[str, str], stand_ins: StandIns) -> None:
    real = real_libnccl()
    environment = {**stand_ins.environment("rccl"), "POLYCCL_NCCL_LIBRARY": str(real)}
    found = json.loads(run_python(LIBRARIES, environment, *[plugin_of(backend) for backend in order]))
    assert list(found) == list(order)
    assert found["nccl"]["file"] == str(real)
    assert not found["nccl"]["version"].endswith("(stand-in)")
    assert found["rccl"]["file"] == environment["POLYCCL_RCCL_LIBRARY"]
    assert found["rccl"]["version"].endswith("(stand-in)")
    assert found["rccl"]["devices"] == 0
    if not has_nvidia_driver():
        assert "CUDA driver version is insufficient" in found["nccl"]["why"], "these are the real library's own words"


TRACED = """
import numpy as np
from pathlib import Path
from abi import DirectoryStore, Plugin, PluginError
from device_abi import Buffer, Device, DeviceComm

def use_rccl(path, folder):
    device = Device(Plugin(path))
    comm = DeviceComm(device, DirectoryStore(Path(folder)), 0, 1)
    x = Buffer(device, np.ones(4, np.float32))
    comm.run("all_reduce", "float32", input=x.address, output=x.address, count=4, reduction="SUM")
    assert (x.get() == 1).all()
    comm.destroy()

def use_nccl(path, folder):
    plugin = Plugin(path)
    plugin.library_file()
    try:
        DeviceComm(type("D", (), {"plugin": plugin, "index": 0})(), DirectoryStore(Path(folder)), 0, 1)
    except PluginError as error:
        print(error.text)

uses = {"nccl": use_nccl, "rccl": use_rccl}
for argument in sys.argv[2:]:
    backend, path = argument.split("=")
    uses[backend](path, sys.argv[1])
"""


@pytest.mark.parametrize("order", [("rccl", "nccl"), ("nccl", "rccl")], ids="-".join)
def test_the_loader_binds_no_name_of_one_vendor_to_the_other(order: tuple[str, str], stand_ins: StandIns, tmp_path: Path) -> None:
    real = real_libnccl()
    environment = {**stand_ins.environment("rccl"), "POLYCCL_NCCL_LIBRARY": str(real)}
    trace = {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "bindings"), "LD_BIND_NOW": "1"}
    run_python(TRACED, {**environment, **trace}, str(tmp_path), *[f"{backend}={plugin_of(backend)}" for backend in order])

    def side(file: str) -> str:
        return "rccl" if "librccl" in file else "nccl" if "libnccl" in file else "other"

    bindings = {"rccl-rccl": 0, "nccl-nccl": 0}
    for record in tmp_path.glob("bindings.*"):
        with record.open(errors="replace") as lines:
            for line in lines:
                found = re.search(r"binding file (\S+) \[0\] to (\S+) \[0\]: .* symbol `p?nccl\w+'", line)
                if found is not None:
                    key = "-".join(side(file) for file in found.group(1, 2))
                    bindings[key] = bindings.get(key, 0) + 1
    assert bindings["nccl-nccl"] > 0, "the record shows the real library at work"
    assert set(bindings) <= {"rccl-rccl", "nccl-nccl"}, bindings


def test_the_real_libnccl_tells_its_version_and_file() -> None:
    real = real_libnccl()
    found = json.loads(run_python(LIBRARIES, {"POLYCCL_NCCL_LIBRARY": str(real)}, plugin_of("nccl")))["nccl"]
    assert found["file"] == str(real)
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["version"])
    assert found["key"] == f"nccl {found['version']}"
    assert found["flags"] & 16 == 0


@pytest.mark.skipif(has_nvidia_driver(), reason="there is an NVIDIA driver")
def test_without_a_gpu_the_vendors_words_and_what_to_do_are_told() -> None:
    real = real_libnccl()
    found = json.loads(run_python(LIBRARIES, {"POLYCCL_NCCL_LIBRARY": str(real)}, plugin_of("nccl")))["nccl"]
    assert found["devices"] == 6
    for words in (
        "libcuda.so.1",
        "CUDA driver version is insufficient for CUDA runtime version",
        "POLYCCL_CUDA_LIBRARY",
        "nvidia-smi",
    ):
        assert words in found["why"]


REFUSED = """
from pathlib import Path
from abi import DirectoryStore, Plugin, PluginError, UNAVAILABLE
from device_abi import DeviceComm

plugin = Plugin(sys.argv[1])
device = type("D", (), {"plugin": plugin, "index": 0})()
try:
    DeviceComm(device, DirectoryStore(Path(sys.argv[2])), 0, 1)
except PluginError as error:
    assert error.result == UNAVAILABLE, error
    print(error.text)
"""


def test_the_real_libnccls_own_refusal_of_a_communicator_is_passed_on(stand_ins: StandIns, tmp_path: Path) -> None:
    """The driver is a stand-in, so that the plugin gets as far as ncclCommInitRankConfig()."""
    environment = {**stand_ins.environment("nccl"), "POLYCCL_NCCL_LIBRARY": str(real_libnccl()), "NCCL_SOCKET_IFNAME": "lo"}
    text = run_python(REFUSED, environment, plugin_of("nccl"), str(tmp_path))
    assert "NCCL did not create the communicator: unhandled cuda error" in text
    assert "nvidia-smi" in text


def test_the_real_libnccls_trouble_with_the_network_reaches_the_other_ranks(stand_ins: StandIns, tmp_path: Path) -> None:
    environment = {**stand_ins.environment("nccl"), "POLYCCL_NCCL_LIBRARY": str(real_libnccl()), "NCCL_SOCKET_IFNAME": "nosuch0"}
    text = run_python(REFUSED, environment, plugin_of("nccl"), str(tmp_path))
    assert "no unique id" in text
    assert "no socket interface found" in text
