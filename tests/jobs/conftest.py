"""What the tests of jobs share: rank processes that start once, and pools of a test's own for what breaks processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .pool import Pool, SharedPool, shared_pool

# Rank processes import the modules of the tests by name.
ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--each", action="store_true", help="on devices every operation × dtype × reduction × in place × asynchronous, no sample"
    )
    parser.addoption(
        "--full", action="store_true", help="all cases of the operations instead of a sample: hours instead of minutes"
    )


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """Rank processes that all tests share. Communicators that a test breaks must be its own (``fresh=True``)."""
    with shared_pool(tmp_path_factory.mktemp("store")) as pool:
        yield pool


@pytest.fixture
def own_pool(tmp_path: Path) -> Iterator[Callable[[int], Pool]]:
    """Makes a pool of this test's own, whose processes may be killed, interrupted or forked."""
    pools: list[Pool] = []

    def make(size: int) -> Pool:
        pools.append(Pool(size, str(tmp_path)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether all cases are wanted."""
    return bool(request.config.getoption("--full", default=False))


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """A fresh folder for a FileStore."""
    return str(tmp_path / "store")
