"""The facts that several languages share, each stated once: data types, reductions, kinds of operations, steps of plans.

`generate.py` writes them into the ABI's header, the core's tables and the Python package. To add or change one, edit this file and
run the generator. Numbers are those of the ABI and of encoded plans, and are never reused.

This module imports only the standard library, so that a build can run it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """A data type: exactly one format. ``name`` is that of torch and NumPy; ``size`` counts bytes.

    ``family`` says which reductions PolyCCL's host kernels have for it; types of the family "bits" only move.
    """

    number: int
    name: str
    size: int
    family: str
    comment: str = ""


FAMILIES = ("bool", "integer", "float", "complex", "bits")

DTYPES = (
    Dtype(1, "bool", 1, "bool"),
    Dtype(2, "int8", 1, "integer"),
    Dtype(3, "uint8", 1, "integer"),
    Dtype(4, "int16", 2, "integer"),
    Dtype(5, "uint16", 2, "integer"),
    Dtype(6, "int32", 4, "integer"),
    Dtype(7, "uint32", 4, "integer"),
    Dtype(8, "int64", 8, "integer"),
    Dtype(9, "uint64", 8, "integer"),
    Dtype(10, "float16", 2, "float"),
    Dtype(11, "bfloat16", 2, "float"),
    Dtype(12, "float32", 4, "float"),
    Dtype(13, "float64", 8, "float"),
    Dtype(14, "complex64", 8, "complex", "two float32"),
    Dtype(15, "complex128", 16, "complex", "two float64"),
    Dtype(16, "float8_e4m3fn", 1, "bits"),
    Dtype(17, "float8_e4m3fnuz", 1, "bits"),
    Dtype(18, "float8_e5m2", 1, "bits"),
    Dtype(19, "float8_e5m2fnuz", 1, "bits"),
    Dtype(20, "float8_e8m0fnu", 1, "bits"),
)


@dataclass(frozen=True)
class Reduction:
    """How operands are combined. ``families`` are those of the dtypes that PolyCCL's host kernels combine so."""

    number: int
    name: str
    families: tuple[str, ...] = ()
    comment: str = ""


REDUCTIONS = (
    Reduction(0, "NONE", comment="of operations that only move data"),
    Reduction(1, "SUM", ("bool", "integer", "float", "complex"), "on bool: or"),
    Reduction(2, "PRODUCT", ("bool", "integer", "float", "complex"), "on bool: and"),
    Reduction(3, "MIN", ("bool", "integer", "float"), "NaN wins; on bool: and"),
    Reduction(4, "MAX", ("bool", "integer", "float"), "NaN wins; on bool: or"),
    Reduction(5, "BAND", ("bool", "integer")),
    Reduction(6, "BOR", ("bool", "integer")),
    Reduction(7, "BXOR", ("bool", "integer")),
    Reduction(8, "AVG", ("integer", "float", "complex"), "the sum divided by the number of ranks; integers truncate"),
    Reduction(9, "PREMUL_SUM", ("float",), "the sum of each operand times its rank's factor"),
)

SHAPES = {
    "NONE": (0, "No data."),
    "ONE": (1, "One block."),
    "BLOCKS": (2, "One block for each rank, in rank order: slices of one tensor, or a list of tensors."),
}
"""How one side of an operation (its input or its output) is laid out on one rank."""

WHO = {"NOBODY": 0, "ALL": 1, "ROOT": 2}
"""Which ranks give, or get, that side of an operation."""

AGREED = ("count", "counts", "dtype", "reduction", "root")
"""The fields of a call that may have to be equal on all ranks."""


@dataclass(frozen=True)
class Kind:
    """A kind of operation.

    ``input`` and ``output`` are shapes, ``input_at`` and ``output_at`` say which ranks have that side. A ``ragged`` operation has
    blocks of unequal lengths. ``agree`` names the fields that must be equal on all ranks. ``in_place`` says how an in-place call
    aliases: the input with output block ``rank`` ("output_block"), the output with input block ``rank`` ("input_block"), or the
    whole input with the whole output ("same"); empty if there is no such call.
    """

    number: int
    name: str
    comment: str
    input: str = "ONE"
    output: str = "ONE"
    input_at: str = "ALL"
    output_at: str = "ALL"
    rooted: bool = False
    reduces: bool = False
    ragged: bool = False
    collective: bool = True
    agree: tuple[str, ...] = ()
    in_place: str = ""


KINDS = (
    Kind(1, "SEND", "input -> peer", output="NONE", output_at="NOBODY", collective=False),
    Kind(2, "RECV", "output <- peer", input="NONE", input_at="NOBODY", collective=False),
    Kind(
        3,
        "BROADCAST",
        "input (root) -> output (all)",
        input_at="ROOT",
        rooted=True,
        agree=("count", "dtype", "root"),
        in_place="same",
    ),
    Kind(4, "ALL_REDUCE", "input -> output", reduces=True, agree=("count", "dtype", "reduction"), in_place="same"),
    Kind(
        5,
        "REDUCE",
        "input -> output (root; elsewhere output is NULL)",
        output_at="ROOT",
        rooted=True,
        reduces=True,
        agree=("count", "dtype", "reduction", "root"),
        in_place="same",
    ),
    Kind(6, "ALL_GATHER", "input -> size blocks of output", output="BLOCKS", agree=("count", "dtype"), in_place="output_block"),
    Kind(
        7,
        "ALL_GATHER_V",
        "the same; counts[r] elements in block r",
        output="BLOCKS",
        ragged=True,
        agree=("counts", "dtype"),
        in_place="output_block",
    ),
    Kind(
        8,
        "REDUCE_SCATTER",
        "size blocks of input -> output",
        input="BLOCKS",
        reduces=True,
        agree=("count", "dtype", "reduction"),
        in_place="input_block",
    ),
    Kind(
        9,
        "REDUCE_SCATTER_V",
        "the same; counts[r] elements in block r",
        input="BLOCKS",
        reduces=True,
        ragged=True,
        agree=("counts", "dtype", "reduction"),
        in_place="input_block",
    ),
    Kind(10, "ALL_TO_ALL", "size blocks -> size blocks", input="BLOCKS", output="BLOCKS", agree=("count", "dtype")),
    Kind(
        11,
        "ALL_TO_ALL_V",
        "the same; counts[r] to, output_counts[r] from rank r",
        input="BLOCKS",
        output="BLOCKS",
        ragged=True,
        agree=("dtype",),
    ),
    Kind(
        12,
        "SCATTER",
        "size blocks of input (root) -> output",
        input="BLOCKS",
        input_at="ROOT",
        rooted=True,
        agree=("count", "dtype", "root"),
        in_place="input_block",
    ),
    Kind(
        13,
        "GATHER",
        "input -> size blocks of output (root)",
        output="BLOCKS",
        output_at="ROOT",
        rooted=True,
        agree=("count", "dtype", "root"),
        in_place="output_block",
    ),
    Kind(14, "BARRIER", "no data", input="NONE", output="NONE", input_at="NOBODY", output_at="NOBODY"),
)

VENDOR_KINDS = 0x8000
"""This number and above are a vendor's own kinds."""

LANES = {"PRE": 0, "CROSS": 1, "POST": 2}
"""Where a step of a plan runs: local legs before the link, the link, local legs after it."""

VERBS = {"LOCAL": 0, "SEND": 1, "RECV": 2, "COPY": 3, "REDUCE": 4, "SCALE": 5}
"""What a step of a plan does."""

FACTORS = {"ONE": 0, "AVERAGE": 1, "CALL": 2}
"""What REDUCE and SCALE multiply by."""
