"""Parameters and marks that the tests of jobs share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from polyccl import backends

from .shapes import Shape


def params(shapes: Iterable[Shape]) -> list[Any]:
    """Shapes as parameters of a test; those with gloo are marked as gloo's."""
    return [
        pytest.param(shape, id=str(shape), marks=[pytest.mark.backend("gloo")] if shape.uses("gloo") else []) for shape in shapes
    ]


def named(*islands: str) -> list[Any]:
    """As `params`, from the words for islands; a leading ``~`` interleaves them."""
    return params(Shape(words.removeprefix("~"), words.startswith("~")) for words in islands)


def unless_installed(islands: str) -> list[pytest.MarkDecorator]:
    """What skips a test where one of its islands' backends is not installed."""
    missing = sorted({part.split("=")[0] for part in islands.split(",")} - set(backends.available()))
    return [pytest.mark.skip(reason=f"the installed polyccl has no {' and no '.join(missing)} plugin")] if missing else []


def where_installed(*islands: str) -> list[Any]:
    """Shapes as parameters, with all their backends installed or skipped."""
    return [pytest.param(Shape(words), id=str(Shape(words)), marks=unless_installed(words)) for words in islands]
