"""The sessions of PolyCCL's development: `nox -l` lists them. Each installs what it needs, system packages included where it may.

CI runs `tests`, `lint` and a sample of `tests_rccl`. The sessions `tests_<backend>` run the tests of one backend: Gloo's and
oneCCL's on the real library, those of NCCL's kind on stand-ins. What is missing is said.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import nox

ROOT = Path(__file__).parent
TORCH = "torch==2.13.0"
RUFF = "ruff==0.17.6"
MYPY = "mypy==2.4.1"
CLANG_FORMAT = "clang-format==14.0.6"  # another version formats otherwise: change it together with the code
FAMILIES = {"ncclx": "nccl", "rcclx": "rccl"}  # backends that share the folder of another
DOUBLES_TESTS = "tests/unit/test_doubles.py"
TEST_FOLDERS = ("tests/unit", "tests/planner", "tests/jobs", "tests/torch", "tests/c10d")
EXPECTTEST = "expecttest"  # what torch's own tests import

nox.options.sessions = ["tests", "lint"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True


def _gloo_is_installed() -> bool:
    prefixes = [*os.environ.get("CMAKE_PREFIX_PATH", "").replace(";", ":").split(":"), "/usr", "/usr/local"]
    return any((Path(prefix) / "include/gloo/config.h").is_file() for prefix in prefixes if prefix)


def _missing_packages(gloo: bool) -> list[str]:
    """Debian's names of what a build needs and this machine lacks."""
    missing = []
    if shutil.which("c++") is None or shutil.which("cc") is None:
        missing.append("g++")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        missing.append("python3-dev")
    if gloo and not _gloo_is_installed():
        missing.append("libgloo-dev")
    return missing


def _system_packages(session: nox.Session, *, gloo: bool) -> None:
    """Install what the build needs and is missing where we may (root, apt-get); else say by which command, and go on without."""
    missing = _missing_packages(gloo)
    if not missing:
        return
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        session.warn(f"Missing: {', '.join(missing)}. On Debian and Ubuntu: sudo {' '.join(install)}")
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    session.log(f"Missing: {', '.join(missing)}. Installing by: {' '.join(install)}")
    try:
        # The list of packages may be old: refresh it, and go on with the old one where that fails.
        subprocess.run(["apt-get", "update", "-qq"], env=environment, timeout=180, check=False)
        subprocess.run([*install, "-qq"], env=environment, timeout=300, check=True, stdout=subprocess.DEVNULL)
    except (subprocess.SubprocessError, OSError) as error:
        session.warn(f"Could not install {', '.join(missing)}: {error}")


def _install(
    session: nox.Session,
    *others: str,
    extras: str = "",
    werror: bool = False,
    env: dict[str, str] | None = None,
    more: Sequence[str] = (),
) -> None:
    """Build and install PolyCCL from this tree, together with other packages; ``more`` are settings of the build."""
    settings = [word for each in (*more, *(["cmake.define.POLYCCL_WERROR=ON"] if werror else [])) for word in ("-C", each)]
    session.install(*others, f".{extras}", *settings, env=env or {})


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small model on two islands of this machine, and compare with one process."""
    _system_packages(session, gloo=True)
    # The xccl plugin needs nothing of Intel's to be built; the demo uses it where oneCCL has been fetched.
    built = ["gloo", "xccl"] if _gloo_is_installed() else ["xccl"]
    _install(session, TORCH, extras="[demo]", env={"POLYCCL_BUILD_BACKENDS": ",".join(built)})
    session.run("python", "examples/train_two_islands.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The tests that need no special hardware; warnings in PolyCCL's own code are errors."""
    _system_packages(session, gloo=True)
    # CMake and Ninja are for the tests that build backends outside the tree, the extra "demo" for the demo's.
    # The xccl plugin needs nothing of Intel's to be built; its tests run where oneCCL has been fetched (`nox -s oneccl`).
    more = ("cmake.define.POLYCCL_BACKEND_XCCL=ON",)
    _install(session, TORCH, EXPECTTEST, "cmake>=3.21", "ninja", extras="[test,demo]", werror=True, more=more)
    folders = [folder for folder in TEST_FOLDERS if (ROOT / folder).is_dir()]
    # What concerns the stand-ins for vendors' libraries runs where these are built anyway: see `_device_session`.
    session.run("pytest", *(session.posargs or [*folders, f"--ignore={DOUBLES_TESTS}"]))


def _c_sources() -> list[str]:
    folders = ("core/native", "core/abi", "backends", "tests")
    found = (path for folder in folders for suffix in ("*.c", "*.cc", "*.h") for path in (ROOT / folder).rglob(suffix))
    return sorted(str(path.relative_to(ROOT)) for path in found)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and types: ruff, mypy --strict, clang-format. Changes nothing; runs all of them, then fails if one did."""
    session.install(RUFF, MYPY, CLANG_FORMAT)
    # What the sources import, for its types; torch is left out on purpose, see pyproject.toml.
    session.install("numpy", "typer>=0.12", "rich>=13")
    failed = []
    for name, command in {
        "ruff check": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "mypy": ["mypy", "--strict"],
        "clang-format": ["clang-format", "--dry-run", "-Werror", "--ferror-limit=1", *_c_sources()],
    }.items():
        try:
            session.run(*command)
        except nox.command.CommandFailed:
            failed.append(name)
    if failed:
        session.error(f"{', '.join(failed)} found faults; `nox -s format` mends layout")


@nox.session(name="format")
def format_sources(session: nox.Session) -> None:
    """Lay out all sources as lint wants them."""
    session.install(RUFF, CLANG_FORMAT)
    session.run("ruff", "format", ".")
    session.run("clang-format", "-i", *_c_sources())


@nox.session
def wheel(session: nox.Session) -> None:
    """Build a wheel into dist/ and list what it holds. `nox -s wheel -- gloo nccl` names the backends; else the defaults hold."""
    _system_packages(session, gloo=not session.posargs or "gloo" in session.posargs)
    env = {"POLYCCL_BUILD_BACKENDS": ",".join(session.posargs)} if session.posargs else {}
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    scratch = Path(session.create_tmp())
    for old in scratch.glob("*.whl"):
        old.unlink()
    session.run("python", "-m", "pip", "wheel", ".", "--no-deps", "-w", str(scratch), env=env)
    (built,) = scratch.glob("*.whl")
    target = dist / built.name
    shutil.copy2(built, target)
    session.log(f"{target.relative_to(ROOT)} holds:")
    with zipfile.ZipFile(target) as archive:
        for item in archive.infolist():
            print(f"{item.file_size:>10}  {item.filename}")


FLAG_SETS = (
    ("gloo",),
    ("gloo", "nccl"),
    ("rccl", "rcclx"),
    ("xccl",),
    ("gloo", "nccl", "ncclx", "rccl", "rcclx", "xccl"),
    (),
)
REPORT = """
import json, subprocess, sys
report = json.loads(subprocess.run([sys.executable, "-m", "polyccl", "info", "--json"], capture_output=True, check=True).stdout)
here = sorted(b["name"] for b in report["backends"] if b["state"] not in ("built in", "not built"))
sys.exit(0 if here == sorted(sys.argv[1:]) else f"the wheel with {sys.argv[1:]} reports {here}")
"""
VENDORLESS_BYTES = 3_000_000


@nox.session
def wheels(session: nox.Session) -> None:
    """Six wheels from six sets of flags, each in an environment of its own: it reports exactly its backends. The one without any is
    small, and passes all tests that need no plugin."""
    _system_packages(session, gloo=True)
    for flags in FLAG_SETS:
        scratch = Path(session.create_tmp()).resolve() / ("-".join(flags) or "none")
        shutil.rmtree(scratch, ignore_errors=True)
        env = {"POLYCCL_BUILD_BACKENDS": ",".join(flags)}
        session.run("python", "-m", "pip", "wheel", "-q", ".", "--no-deps", "-w", str(scratch), env=env)
        (built,) = scratch.glob("*.whl")
        session.run("python", "-m", "venv", str(scratch / "venv"))
        python = str(scratch / "venv/bin/python")
        session.run(python, "-m", "pip", "install", "-q", str(built), external=True)
        session.run(python, "-c", REPORT, *flags, external=True)
        session.log(f"{built.name}: {built.stat().st_size:,} bytes, {', '.join(flags) or 'no backend but the built-in one'}")
    if built.stat().st_size >= VENDORLESS_BYTES:
        session.error(f"a wheel without plugins takes {built.stat().st_size:,} bytes")
    session.run(python, "-m", "pip", "install", "-q", f"{built}[test]", TORCH, EXPECTTEST, external=True)
    session.run(python, "-m", "pytest", *(session.posargs or TEST_FOLDERS), external=True)


@nox.session
@nox.parametrize("torch", ["2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.14.1"])
def torch_matrix(session: nox.Session, torch: str) -> None:
    """One build, other torch versions: tensors of theirs are taken, or refused with the reason."""
    _system_packages(session, gloo=True)
    try:
        session.install(f"torch=={torch}")
    except nox.command.CommandFailed:
        session.skip(f"no wheel of torch {torch} can be had for this Python")
    _install(session, f"torch=={torch}", extras="[test]")
    session.run("pytest", *(session.posargs or ["tests/unit/test_tensor_intake.py"]))


def _opens(*libraries: str) -> bool:
    for library in libraries:
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return True
    return False


def _no_hardware(backend: str) -> str:
    """Why this machine cannot run a backend; empty where it can, as far as can be seen from outside."""
    device, drivers, words = {
        "nccl": ("/dev/nvidiactl", ["libcuda.so.1"], "no NVIDIA GPU with its driver"),
        "rccl": ("/dev/kfd", ["libamdhip64.so", "libamdhip64.so.6", "libamdhip64.so.7"], "no AMD GPU with ROCm"),
    }.get(FAMILIES.get(backend, backend), ("/", [], ""))
    return "" if Path(device).exists() and (not drivers or _opens(*drivers)) else words


def _backend_session(session: nox.Session, backend: str) -> None:
    """Build one backend alone and run its tests, on the real library."""
    family = FAMILIES.get(backend, backend)
    if backend != "host" and not (ROOT / "backends" / family / "CMakeLists.txt").is_file():
        session.skip(f"this version of PolyCCL has no {backend} backend (no backends/{family})")
    if reason := _no_hardware(backend):
        session.skip(reason)
    _system_packages(session, gloo=backend == "gloo")
    if backend == "gloo" and not _gloo_is_installed():
        session.skip("Gloo is not installed")
    _install(session, TORCH, extras="[test]", env={"POLYCCL_BUILD_BACKENDS": "" if backend == "host" else backend})
    # In a build without plugins all tests that are left are the host backend's.
    chosen = [] if backend == "host" else ["--backend", backend]
    session.run("pytest", *chosen, *(session.posargs or TEST_FOLDERS))


@nox.session
def tests_host(session: nox.Session) -> None:
    """The built-in host backend, in a build with no other."""
    _backend_session(session, "host")


@nox.session
def tests_torch(session: nox.Session) -> None:
    """All tests of PolyCCL under torch.distributed, on all islands, oneCCL and stand-ins included; `nox -s tests` runs a sample."""
    _system_packages(session, gloo=True)
    if problem := _fetch_oneccl(session, sample=True):
        session.log(f"Without oneCCL: {problem}")
    _install(session, TORCH, "cmake>=3.21", "ninja", extras="[test]", env={"POLYCCL_BUILD_BACKENDS": "gloo,nccl,rccl,xccl"})
    session.run("pytest", "tests/torch", "--all-islands", *session.posargs)


@nox.session
def tests_c10d(session: nox.Session) -> None:
    """torch's own suite of torch.distributed on PolyCCL, minutes a column: tests/c10d/README.md has what may follow `--`."""
    _system_packages(session, gloo=True)
    if not _gloo_is_installed():
        session.skip("Gloo is not installed")
    _install(session, TORCH, EXPECTTEST, extras="[test]", env={"POLYCCL_BUILD_BACKENDS": "gloo"})
    chosen = [[]] if "--column" in session.posargs else [["--column", column] for column in ("gloo", "gloo=1,gloo=rest")]
    failed = []
    for column in chosen:  # all of them, then the verdict
        try:
            session.run("python", "-m", "tests.c10d", *column, *session.posargs)
        except nox.command.CommandFailed:
            failed.append(column)
    if failed:
        session.error("a column differs from c10d's own in what is said above")


@nox.session
def tests_gloo(session: nox.Session) -> None:
    """The real Gloo."""
    _backend_session(session, "gloo")


def _device_session(session: nox.Session, backend: str, *others: str) -> None:
    """Build the backends of NCCL's kind and run the tests of one, on stand-ins, and on what is real here.

    With the argument ``sample`` operations are sampled, as CI has them. Else each is run in every way, and oneCCL is fetched for
    the bridge over four libraries.
    """
    sample = session.posargs == ["sample"]
    chosen = [] if sample else session.posargs
    _system_packages(session, gloo=True)
    if reason := _no_hardware(backend):
        session.log(f"Without real hardware ({reason}): on stand-ins")
    if not sample and (problem := _fetch_oneccl(session, sample=True)):
        session.log(f"Without the bridge over four libraries: {problem}")
    # All of them: some tests hold two vendors in one process, bridges join them with others.
    built = ",".join([*(["gloo"] if _gloo_is_installed() else []), "nccl", "ncclx", "rccl", "rcclx", "xccl"])
    _install(session, TORCH, "cmake>=3.21", "ninja", *others, extras="[test]", werror=True, env={"POLYCCL_BUILD_BACKENDS": built})
    session.run("pytest", "--backend", backend, *(chosen or [*TEST_FOLDERS, *([] if sample else ["--each"])]))
    if not chosen:
        session.run("pytest", "tests/unit/test_nccl_family_source.py", DOUBLES_TESTS)


@nox.session
def tests_nccl(session: nox.Session) -> None:
    """NCCL on stand-ins, and the real libnccl and its nccl.h, which this fetches (350 MB)."""
    _device_session(session, "nccl", "nvidia-nccl-cu12")


@nox.session
def tests_ncclx(session: nox.Session) -> None:
    """NCCLX on stand-ins."""
    _device_session(session, "ncclx")


@nox.session
def tests_rccl(session: nox.Session) -> None:
    """RCCL on stand-ins."""
    _device_session(session, "rccl")


@nox.session
def tests_rcclx(session: nox.Session) -> None:
    """RCCLX on stand-ins."""
    _device_session(session, "rcclx")


@nox.session
def gpu(session: nox.Session) -> None:
    """Jobs on real NVIDIA GPUs, with a torch for CUDA (gigabytes): tests/gpu/run.sh. It has not been run on one."""
    if reason := _no_hardware("nccl"):
        session.skip(reason)
    _system_packages(session, gloo=True)
    built = "gloo,nccl" if _gloo_is_installed() else "nccl"
    _install(session, "torch>=2.9", "numpy", env={"POLYCCL_BUILD_BACKENDS": built})
    session.run("bash", "tests/gpu/run.sh", *session.posargs, env={"POLYCCL_GPU_INSTALLED": "1"}, external=True)


def _fetch_oneccl(session: nox.Session, sample: bool) -> str:
    """Fetch oneCCL for the CPU into its cache, and for a sample the system's libfabric. Gives why that is not there, or ""."""
    if sample and not _opens("libfabric.so.1"):
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "libfabric1"]
        if shutil.which("apt-get") is None or os.geteuid() != 0:
            return f"there is no libfabric.so.1; on Debian and Ubuntu: sudo {' '.join(install)}"
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            subprocess.run(["apt-get", "update", "-qq"], timeout=60, check=False)
            subprocess.run(install, timeout=60, check=True, stdout=subprocess.DEVNULL)
        if not _opens("libfabric.so.1"):
            return "libfabric1 could not be installed"
    python = sys.executable if sample else str(Path(session.bin) / "python")
    command = [python, str(ROOT / "backends/xccl/fetch.py"), *(["--sample"] if sample else [])]
    try:
        done = subprocess.run(command, timeout=90 if sample else 600, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        return "oneCCL could not be fetched in time"
    session.log(done.stdout.strip())
    return "" if done.returncode == 0 else done.stderr.strip()


@nox.session(venv_backend="none")
def oneccl(session: nox.Session) -> None:
    """Fetch what `nox -s tests` needs to run on oneCCL too (99 MB, proprietary, and the system's libfabric); CI does."""
    if problem := _fetch_oneccl(session, sample=True):
        session.skip(problem)


@nox.session
def tests_xccl(session: nox.Session) -> None:
    """The real oneCCL, on the CPU, ranks that are lost included: fetches it (260 MB, proprietary)."""
    if problem := _fetch_oneccl(session, sample=False):
        session.error(problem)
    _system_packages(session, gloo=True)
    env = {"POLYCCL_BUILD_BACKENDS": "gloo,xccl" if _gloo_is_installed() else "xccl"}
    _install(session, TORCH, extras="[test]", werror=True, env=env)
    session.run("pytest", "--backend", "xccl", *(session.posargs or TEST_FOLDERS))


def _sanitizer_session(session: nox.Session, sanitizer: str) -> None:
    """Build the core, plugins and stand-ins with a sanitizer, kept in .cache, and run jobs of C++ alone on them. No torch."""
    _system_packages(session, gloo=True)
    session.install("pytest>=8", "pytest-timeout>=2.3", "cmake>=3.21", "ninja")
    session.run("pytest", "tests/native", *session.posargs, env={"TEST_SANITIZER": sanitizer})


@nox.session
def leaks(session: nox.Session) -> None:
    """Ten thousand calls of each kind, and two thousand communicators, leave no memory, descriptor or thread. Minutes."""
    _system_packages(session, gloo=True)
    _install(session, TORCH, extras="[test]", env={"POLYCCL_BUILD_BACKENDS": "gloo" if _gloo_is_installed() else ""})
    session.run("pytest", "--all-calls", "tests/torch/test_leaks.py", *session.posargs)


@nox.session
def tsan(session: nox.Session) -> None:
    """ThreadSanitizer finds nothing: every operation and every way to end, in jobs of C++ alone. Minutes."""
    _sanitizer_session(session, "thread")


@nox.session
def asan(session: nox.Session) -> None:
    """AddressSanitizer finds nothing, nor any leak or undefined behaviour, in the same jobs. Minutes."""
    _sanitizer_session(session, "address")
