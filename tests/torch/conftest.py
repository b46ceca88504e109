"""What the tests of torch.distributed share: rank processes that start once, and groups of a test's own."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

# Rank processes import the modules of the tests by name.
ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from tests.jobs.pool import SharedPool, shared_pool  # noqa: E402
from tests.jobs.shapes import Shape  # noqa: E402

from . import ranks as here  # noqa: E402

# Of the islands that a test is there for, the ones that a sample of the tests takes.
SAMPLE = ("gloo=1,host=2", "gloo=2,gloo=2", "host=2,host=2")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-islands", action="store_true", help="run torch's tests on all islands, and inductor, instead of a sample"
    )
    parser.addoption("--all-calls", action="store_true", help="look for leaks after ten thousand calls of each kind, not hundreds")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only_in_full: left out of the sample of torch's tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all-islands", default=False):
        return
    dropped = [item for item in items if not _in_sample(item)]
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)


def _in_sample(item: pytest.Item) -> bool:
    if not Path(item.path).is_relative_to(Path(__file__).parent):
        return True
    chosen = getattr(item, "callspec", None)
    islands = chosen.params.get("islands") if chosen is not None else None
    return not list(item.iter_markers("only_in_full")) and (islands is None or islands in SAMPLE)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """Rank processes that all tests share."""
    with shared_pool(tmp_path_factory.mktemp("store")) as pool:
        yield pool


@pytest.fixture(scope="session")
def device_pool(stand_ins: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """The same, whose device libraries are stand-ins: these take tensors of the host for a device's."""
    with shared_pool(tmp_path_factory.mktemp("store"), stand_ins) as pool:
        yield pool


@pytest.fixture
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., list[Any]]:
    """``ranks(function, islands, *arguments)``: a function's results on each rank of a fresh default group, by rank.

    ``options`` are more fields of `polyccl.torch.Options`; ``init`` more arguments of ``init_process_group``.
    """
    numbers = itertools.count()

    def run(function: Callable[..., Any], islands: str, *arguments: Any, deadline: float = 90.0, **how: Any) -> list[Any]:
        shape = Shape(islands)
        if shape.uses("xccl"):
            request.getfixturevalue("oneccl")
        pool = request.getfixturevalue("device_pool" if shape.uses("nccl") or shape.uses("rccl") else "pool")
        store = str(tmp_path / f"store{next(numbers)}")
        what = function.__module__, function.__name__, arguments
        results: list[Any] = pool.each(here.in_group, shape.size, islands, store, what, how, deadline=deadline)
        return results

    return run
