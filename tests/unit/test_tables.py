"""Tables that stand in two languages say the same."""

from __future__ import annotations

import re
from pathlib import Path

import polyccl
from polyccl import _native
from polyccl.spec import DTYPE_BYTES, OPERATIONS, Kind, Reduction

HEADER = (Path(polyccl.__file__).parent / "include/polyccl/backend.h", Path(__file__).parents[2] / "core/abi/polyccl/backend.h")


def header_constants(prefix: str) -> dict[str, int]:
    text = next(path for path in HEADER if path.exists()).read_text()
    return {name: int(value, 0) for name, value in re.findall(rf"\bPOLYCCL_{prefix}_(\w+) = (\w+)", text)}


def test_kinds_and_reductions_have_the_numbers_of_the_abi() -> None:
    kinds = header_constants("KIND")
    assert kinds.pop("VENDOR") == 0x8000
    assert kinds == {kind.name: int(kind) for kind in Kind}
    assert header_constants("REDUCTION") == {reduction.name: int(reduction) for reduction in Reduction}


def test_the_core_has_the_rows_of_the_table_of_operations() -> None:
    flags = [(row.rooted, row.reduces, row.ragged) for row in OPERATIONS]
    sides = [tuple(map(int, (row.input, row.output, row.input_at, row.output_at))) for row in OPERATIONS]
    names = [(int(row.kind), row.name) for row in OPERATIONS]
    assert _native.operations() == [name + side + flag for name, side, flag in zip(names, sides, flags, strict=True)]


def test_dtypes_have_the_numbers_of_the_abi_and_the_sizes_of_the_planner() -> None:
    assert {name.upper(): number for number, name, _ in _native.dtypes()} == header_constants("DTYPE")
    assert {name: size for _, name, size in _native.dtypes()} == DTYPE_BYTES
