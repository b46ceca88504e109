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

from tests.jobs.pool import SharedPool  # noqa: E402
from tests.jobs.shapes import Shape  # noqa: E402

from . import ranks as here  # noqa: E402


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """Rank processes that all tests share."""
    pool = SharedPool(str(tmp_path_factory.mktemp("store")))
    yield pool
    pool.close()


@pytest.fixture
def ranks(pool: SharedPool, tmp_path: Path) -> Callable[..., list[Any]]:
    """``ranks(function, islands, *arguments)``: a function's results on each rank of a fresh default group, by rank.

    ``options`` are more fields of `polyccl.torch.Options`; ``init`` more arguments of ``init_process_group``.
    """
    numbers = itertools.count()

    def run(function: Callable[..., Any], islands: str, *arguments: Any, deadline: float = 90.0, **how: Any) -> list[Any]:
        store = str(tmp_path / f"store{next(numbers)}")
        what = function.__module__, function.__name__, arguments
        return pool.each(here.in_group, Shape(islands).size, islands, store, what, how, deadline=deadline)

    return run
