"""The one table of operations: what each takes, gives, and what ranks must agree on.

Everything that knows operations reads this table: the planner, the argument checks and the agreement between ranks (through a
header that the build generates from it), the command line and the documentation. The numbers are those of
``polyccl/backend.h`` and are never reused.

This module imports only the standard library, so that the build can run it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """What an operation does; the value is ``POLYCCL_KIND_*`` of the ABI."""

    SEND = 1
    RECV = 2
    BROADCAST = 3
    ALL_REDUCE = 4
    REDUCE = 5
    ALL_GATHER = 6
    ALL_GATHER_V = 7
    REDUCE_SCATTER = 8
    REDUCE_SCATTER_V = 9
    ALL_TO_ALL = 10
    ALL_TO_ALL_V = 11
    SCATTER = 12
    GATHER = 13
    BARRIER = 14


class Reduction(IntEnum):
    """How operands are combined; the value is ``POLYCCL_REDUCTION_*`` of the ABI. NONE is for operations that only move data."""

    NONE = 0
    SUM = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    AVG = 8
    PREMUL_SUM = 9


class Shape(IntEnum):
    """How one side of an operation (its input or its output) is laid out on one rank."""

    NONE = 0
    """No data."""
    ONE = 1
    """One block."""
    BLOCKS = 2
    """One block for each rank, in rank order: slices of one tensor, or a list of tensors."""


class Who(IntEnum):
    """Which ranks give, or get, that side of an operation."""

    NOBODY = 0
    ALL = 1
    ROOT = 2


@dataclass(frozen=True)
class Operation:
    """One row of the table.

    ``ragged`` operations have blocks of unequal lengths. ``agree`` names the fields that must be equal on all ranks. In-place
    calls alias the input with output block ``me`` (``in_place == "output_block"``), the output with input block ``me``
    (``"input_block"``), or the whole input with the whole output (``"same"``).
    """

    kind: Kind
    input: Shape
    output: Shape
    input_at: Who = Who.ALL
    output_at: Who = Who.ALL
    rooted: bool = False
    reduces: bool = False
    ragged: bool = False
    agree: tuple[str, ...] = ()
    in_place: str = ""

    @property
    def name(self) -> str:
        """The name of the method, e.g. ``all_reduce``."""
        return self.kind.name.lower()

    @property
    def collective(self) -> bool:
        """True where every rank of the communicator takes part."""
        return self.kind not in (Kind.SEND, Kind.RECV)


OPERATIONS: tuple[Operation, ...] = (
    Operation(Kind.SEND, Shape.ONE, Shape.NONE, output_at=Who.NOBODY),
    Operation(Kind.RECV, Shape.NONE, Shape.ONE, input_at=Who.NOBODY),
    Operation(
        Kind.BROADCAST,
        Shape.ONE,
        Shape.ONE,
        input_at=Who.ROOT,
        rooted=True,
        agree=("count", "dtype", "root"),
        in_place="same",
    ),
    Operation(
        Kind.ALL_REDUCE,
        Shape.ONE,
        Shape.ONE,
        reduces=True,
        agree=("count", "dtype", "reduction"),
        in_place="same",
    ),
    Operation(
        Kind.REDUCE,
        Shape.ONE,
        Shape.ONE,
        output_at=Who.ROOT,
        rooted=True,
        reduces=True,
        agree=("count", "dtype", "reduction", "root"),
        in_place="same",
    ),
    Operation(Kind.ALL_GATHER, Shape.ONE, Shape.BLOCKS, agree=("count", "dtype"), in_place="output_block"),
    Operation(
        Kind.ALL_GATHER_V,
        Shape.ONE,
        Shape.BLOCKS,
        ragged=True,
        agree=("counts", "dtype"),
        in_place="output_block",
    ),
    Operation(
        Kind.REDUCE_SCATTER,
        Shape.BLOCKS,
        Shape.ONE,
        reduces=True,
        agree=("count", "dtype", "reduction"),
        in_place="input_block",
    ),
    Operation(
        Kind.REDUCE_SCATTER_V,
        Shape.BLOCKS,
        Shape.ONE,
        reduces=True,
        ragged=True,
        agree=("counts", "dtype", "reduction"),
        in_place="input_block",
    ),
    Operation(Kind.ALL_TO_ALL, Shape.BLOCKS, Shape.BLOCKS, agree=("count", "dtype")),
    Operation(Kind.ALL_TO_ALL_V, Shape.BLOCKS, Shape.BLOCKS, ragged=True, agree=("dtype",)),
    Operation(
        Kind.SCATTER,
        Shape.BLOCKS,
        Shape.ONE,
        input_at=Who.ROOT,
        rooted=True,
        agree=("count", "dtype", "root"),
        in_place="input_block",
    ),
    Operation(
        Kind.GATHER,
        Shape.ONE,
        Shape.BLOCKS,
        output_at=Who.ROOT,
        rooted=True,
        agree=("count", "dtype", "root"),
        in_place="output_block",
    ),
    Operation(Kind.BARRIER, Shape.NONE, Shape.NONE, input_at=Who.NOBODY, output_at=Who.NOBODY),
)

BY_KIND: dict[Kind, Operation] = {row.kind: row for row in OPERATIONS}


def header() -> str:
    """The table as C++ rows ``POLYCCL_OPERATION(kind, name, input, output, input_at, output_at, rooted, reduces, ragged)``."""
    lines = ["// Generated from core/python/polyccl/operations.py. Do not edit."]
    for row in OPERATIONS:
        fields = (
            str(int(row.kind)),
            f'"{row.name}"',
            *(str(int(value)) for value in (row.input, row.output, row.input_at, row.output_at)),
            *(str(flag).lower() for flag in (row.rooted, row.reduces, row.ragged)),
        )
        lines.append(f"POLYCCL_OPERATION({', '.join(fields)})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(header(), end="")
