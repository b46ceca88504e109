"""What holds for all tests: agreement checks are on, and tests may be marked as those of a backend.

``@pytest.mark.backend("gloo")`` marks a test that needs that backend (several names: any one of them is its subject). It is skipped
where the installed package has no such plugin. ``pytest --backend gloo`` runs only the tests so marked, and refuses to start where
the plugin is missing, so that a session for a backend never passes by skipping. Every test ends by its deadline (``timeout`` in
pyproject.toml, or ``@pytest.mark.timeout(seconds)``).
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

# Ranks compare what must agree before they act on it. Spawned ranks inherit this.
os.environ.setdefault("POLYCCL_CHECK", "1")

BUILT_IN = "host"
OPEN_ONECCL = "from polyccl import _native, backends; print(_native.Backend.load(str(backends.find('xccl'))).library_file)"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", default=None, metavar="NAME", help="run only the tests of this backend, which must be installed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "backend(name, ...): a test of these backends; skipped where none of them is installed")
    wanted = config.getoption("--backend")
    if wanted is not None and not _is_installed(wanted):
        raise pytest.UsageError(f"--backend {wanted}: the installed polyccl has no such plugin; it has {_installed() or 'none'}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--backend")
    if wanted is not None:
        dropped = [item for item in items if wanted not in _names(item)]
        items[:] = [item for item in items if wanted in _names(item)]
        config.hook.pytest_deselected(items=dropped)
        return
    for item in items:
        names = _names(item)
        if names and not any(_is_installed(name) for name in names):
            item.add_marker(pytest.mark.skip(reason=f"the installed polyccl has no {' or '.join(names)} plugin"))


def _names(item: pytest.Item) -> list[str]:
    return [str(name) for marker in item.iter_markers("backend") for name in marker.args]


def _installed() -> list[str]:
    """Names of the plugins beside the native module."""
    try:
        spec = importlib.util.find_spec("polyccl._native")
    except ImportError:
        return []
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent / "backends"
    return sorted(path.stem.removeprefix("libpolyccl_") for path in folder.glob("libpolyccl_*.so"))


def _is_installed(name: str) -> bool:
    return name == BUILT_IN or name in _installed()


def _may_listen(port: int) -> bool:
    """Whether a server may listen on all interfaces. Where ports run short, the system gives those of old connections."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen()
        except OSError:
            return False
    return True


@pytest.fixture
def reserve_port() -> Iterator[Callable[[], int]]:
    """Gives ports for servers to come, bound here until the test's end: nobody else gets them, and one server may listen."""
    with ExitStack() as reserved:

        def reserve() -> int:
            while True:
                holder = reserved.enter_context(socket.socket())
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind(("127.0.0.1", 0))
                port = int(holder.getsockname()[1])
                if _may_listen(port):
                    return port

        yield reserve


@pytest.fixture(scope="session")
def oneccl(request: pytest.FixtureRequest) -> Path:
    """oneCCL opens: the folder above that of its file. Where it does not, tests are skipped, and fail under ``--backend xccl``."""
    done = subprocess.run([sys.executable, "-c", OPEN_ONECCL], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0:
        return Path(done.stdout.strip()).parent.parent
    reason = f"oneCCL is not here: {done.stderr.strip().splitlines()[-1]}"
    if request.config.getoption("--backend") == "xccl":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def stand_ins() -> dict[str, str]:
    """The environment that points the plugins for devices to stand-ins for the vendors' libraries."""
    spec = importlib.util.spec_from_file_location("doubles_build", Path(__file__).parent / "doubles" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    doubles = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # named: its dataclass looks there
    spec.loader.exec_module(doubles)
    try:
        built = doubles.build()
    except doubles.CannotBuild as error:
        pytest.skip(str(error))
    files = {"CUDA": built.cuda, "NCCL": built.nccl, "HIP": built.hip, "RCCL": built.rccl}
    return {f"POLYCCL_{name}_LIBRARY": str(file) for name, file in files.items()}
