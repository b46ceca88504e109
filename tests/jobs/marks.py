"""Parameters and marks that the tests of jobs share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from .shapes import Shape


def params(shapes: Iterable[Shape]) -> list[Any]:
    """Shapes as parameters of a test; those with gloo are marked as gloo's."""
    return [
        pytest.param(shape, id=str(shape), marks=[pytest.mark.backend("gloo")] if shape.uses("gloo") else []) for shape in shapes
    ]


def named(*islands: str) -> list[Any]:
    """As `params`, from the words for islands; a leading ``~`` interleaves them."""
    return params(Shape(words.removeprefix("~"), words.startswith("~")) for words in islands)
