"""The xccl plugin, driven alone through its C ABI on the real oneCCL; its idea of oneCCL's API against the real header; how it
finds the library, and what it does where there is none. `plugins/xccl_ranks.py` is one rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

backends = pytest.importorskip("polyccl.backends", reason="polyccl is not installed")
pytest.importorskip("numpy", reason="the ranks compute what is right with NumPy")

ROOT = Path(__file__).parents[2]
PLUGINS = Path(__file__).parent / "plugins"
Cases = list[tuple[str, str | None]]  # a case's name, and its error

pytestmark = [pytest.mark.backend("xccl"), pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def plugin() -> str:
    """The plugin's path."""
    return str(backends.find("xccl"))


def run_ranks(plugin: str, folder: Path, scenario: str, size: int, seconds: float = 120) -> Cases:
    """Run a scenario on ``size`` ranks; gives each case of each rank with its error. All must end by themselves, with status 0."""
    script = str(PLUGINS / "xccl_ranks.py")
    processes = []
    for rank in range(size):
        command = [sys.executable, script, plugin, str(folder), scenario, str(rank), str(size)]
        with (folder / f"errors.{rank}").open("w") as errors, (folder / f"output.{rank}").open("w") as output:
            processes.append(subprocess.Popen(command, stdout=output, stderr=errors))
    codes = []
    try:
        for process in processes:
            codes.append(process.wait(seconds))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    cases = []
    for rank, code in enumerate(codes):
        assert code == 0, f"rank {rank} ended with {code}: {(folder / f'errors.{rank}').read_text()[-3000:]}"
        for line in (folder / f"output.{rank}").read_text().splitlines():
            if not line.startswith("{"):
                continue  # oneCCL's own
            case = json.loads(line)
            cases.append((case["case"], case["error"] and f"rank {rank}: {case['error']}"))
    return cases


@pytest.mark.parametrize("size", [2, 3])
def test_every_kind_dtype_and_layout_is_right_on_the_real_library(oneccl: Path, plugin: str, tmp_path: Path, size: int) -> None:
    cases = run_ranks(plugin, tmp_path, "collectives", size)
    assert len(cases) > 300 * size
    assert not [case for case in cases if case[1] is not None]


def test_unequal_sizes_end_oneccls_thread_and_not_the_process(oneccl: Path, plugin: str, tmp_path: Path) -> None:
    cases = run_ranks(plugin, tmp_path, "worker", 2, seconds=60)
    assert cases == [("differ", None)] * 2


# ---- the library -----------------------------------------------------------------------------------------------------

ENVIRONMENT = """
import ctypes, json, sys
from polyccl import _native
print(_native.Backend.load(sys.argv[1]).library_version)
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
names = ["CCL_PLUGIN", "CCL_ATL_TRANSPORT", "CCL_PROCESS_LAUNCHER", "CCL_YIELD", "CCL_LOG_LEVEL", "FI_PROVIDER"]
print(json.dumps({name: (libc.getenv(name.encode()) or b"").decode() for name in names}))
"""


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_environment_has_defaults_and_the_users_own_settings_win(oneccl: Path, plugin: str) -> None:
    done = python(ENVIRONMENT, plugin, CCL_YIELD="pause", FI_PROVIDER="shm")
    version, settings = done.stdout.splitlines()
    assert version.startswith("20")
    assert json.loads(settings) == {
        "CCL_PLUGIN": "ONECCL_LEGACY_CPU",
        "CCL_ATL_TRANSPORT": "ofi",
        "CCL_PROCESS_LAUNCHER": "none",
        "CCL_YIELD": "pause",
        "CCL_LOG_LEVEL": "error",
        "FI_PROVIDER": "shm",
    }


LOAD = "import sys; from polyccl import _native; print(_native.Backend.load(sys.argv[1]).library_version)"


def test_a_library_that_is_not_there_is_named_and_has_no_substitute(plugin: str) -> None:
    done = python(LOAD, plugin, POLYCCL_XCCL_LIBRARY="/nowhere/libccl.so.2")
    assert "BackendUnavailable" in done.stderr
    assert "POLYCCL_XCCL_LIBRARY names '/nowhere/libccl.so.2'" in done.stderr


def test_a_library_that_is_not_oneccl_is_refused(plugin: str) -> None:
    done = python(LOAD, plugin, POLYCCL_XCCL_LIBRARY="libm.so.6")
    assert "BackendUnavailable" in done.stderr
    assert "it has no onecclCommInitRank" in done.stderr


def test_without_a_library_the_error_says_how_to_get_it(plugin: str, tmp_path: Path) -> None:
    done = python(LOAD, plugin, XDG_CACHE_HOME=str(tmp_path), LD_LIBRARY_PATH="")
    if done.returncode == 0:
        pytest.skip("this machine has a oneCCL of its own")
    assert "BackendUnavailable" in done.stderr
    assert "backends/xccl/fetch.py" in done.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
def test_the_plugin_exports_one_symbol(plugin: str) -> None:
    symbols = subprocess.run(["nm", "-D", "--defined-only", plugin], check=True, capture_output=True, text=True, timeout=30).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["polyccl_backend_query"]


def test_device_memory_is_refused_in_a_sentence(oneccl: Path, plugin: str, tmp_path: Path) -> None:
    code = f"""
    import sys; sys.path.insert(0, {str(PLUGINS)!r})
    from pathlib import Path
    from abi import *
    comm = Comm(Plugin(sys.argv[1]), DirectoryStore(Path(sys.argv[2])), 0, 1)
    op = comm.op("broadcast", "float32", input=np.ones(4, np.float32), output=np.ones(4, np.float32), count=4, peer=0)
    op.memory = DEVICE_MEMORY
    comm.issue(op)
    """
    done = python(code, plugin, str(tmp_path))
    assert "serves host memory alone; for XPU tensors build it with a SYCL compiler" in done.stderr


# ---- the API ---------------------------------------------------------------------------------------------------------

COMPARISON = """
#include <oneapi/ccl.h>
#include <type_traits>
#include "oneccl.h"

namespace own = polyccl_xccl::oneccl;

// Passed alike: pointers for pointers, integers and enums of one size, structs of one size by value.
template <typename A, typename B>
constexpr bool alike =
    sizeof(A) == sizeof(B) && alignof(A) == alignof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
    std::is_class_v<A> == std::is_class_v<B> && !std::is_floating_point_v<A> && !std::is_floating_point_v<B>;

template <typename A, typename B>
struct Same : std::false_type {};
template <typename R, typename S, typename... A, typename... B>
  requires(sizeof...(A) == sizeof...(B))
struct Same<R (*)(A...), S (*)(B...)> : std::bool_constant<alike<R, S> && (alike<A, B> && ...)> {};

#define COMPARE(name, result, arguments) \\
  static_assert(Same<decltype(&oneccl##name), result(*) arguments>::value, #name);
using namespace own;
POLYCCL_ONECCL_REQUIRED(COMPARE)
POLYCCL_ONECCL_OPTIONAL(COMPARE)

static_assert(sizeof(onecclUniqueId) == sizeof(own::UniqueId) && std::is_trivially_copyable_v<onecclUniqueId>);
#define VALUE(theirs, ours) static_assert(static_cast<int>(theirs) == static_cast<int>(ours), #theirs);
VALUE(onecclSuccess, own::kSuccess) VALUE(onecclInvalidArgument, own::kInvalidArgument)
VALUE(onecclInvalidUsage, own::kInvalidUsage) VALUE(onecclPluginException, own::kPluginException)
VALUE(onecclNotImplemented, own::kNotImplemented)
VALUE(onecclInt8, own::kInt8) VALUE(onecclUint8, own::kUint8) VALUE(onecclInt32, own::kInt32) VALUE(onecclUint32, own::kUint32)
VALUE(onecclInt64, own::kInt64) VALUE(onecclUint64, own::kUint64) VALUE(onecclFloat16, own::kFloat16)
VALUE(onecclFloat32, own::kFloat32) VALUE(onecclFloat64, own::kFloat64) VALUE(onecclBfloat16, own::kBfloat16)
VALUE(onecclSum, own::kSum) VALUE(onecclProd, own::kProd) VALUE(onecclMax, own::kMax) VALUE(onecclMin, own::kMin)
#ifdef WRONG
VALUE(onecclMin, own::kMax)
#endif
"""


def test_the_plugins_declarations_are_those_of_oneccls_header(oneccl: Path, tmp_path: Path) -> None:
    include = oneccl / "include"
    if not (include / "oneapi/ccl.h").is_file():
        pytest.skip(f"there is no oneapi/ccl.h in {include}; backends/xccl/fetch.py without --sample fetches it")
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    source = tmp_path / "compare.cc"
    source.write_text(COMPARISON)
    command = ["c++", "-std=c++20", "-fsyntax-only", f"-I{include}", f"-I{ROOT / 'backends/xccl'}", str(source)]
    right = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert right.returncode == 0, right.stderr
    wrong = subprocess.run([*command, "-DWRONG"], capture_output=True, text=True, timeout=100, check=False)
    assert wrong.returncode != 0, "a difference must show"
