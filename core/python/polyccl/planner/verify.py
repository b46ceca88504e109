"""Calls with random data, and what their results must be: the oracle for simulated plans. Needs NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..spec import BY_KIND, Kind, Operation, Reduction, Shape, Who
from .payload import Counts, block_counts
from .plan import Plan
from .planner import plan
from .simulate import Array, Call, Report, SimulationError, averaged, combine, scaled, simulate
from .task import Options, Request
from .topology import Topology

TOLERANCE = {"float16": 2e-2, "float32": 1e-4, "float64": 1e-9}
"""By how much a float result may differ, relative and absolute, from the sum in the order of ranks."""


class WrongResult(SimulationError):
    """An output is not what the operation promises, or an input has been written."""


@dataclass
class Case:
    """A call, the outputs that it must give (by rank and block), and its inputs as they were."""

    request: Request
    call: Call
    expected: list[list[Array]]
    originals: list[list[Array]]
    in_place: bool

    def verify(self) -> None:
        """Raise WrongResult unless all outputs are right, and inputs unchanged."""
        name = BY_KIND[self.request.kind].name
        for rank, blocks in enumerate(self.expected):
            for index, right in enumerate(blocks):
                found = self.call.outputs[rank][index]
                if not _equal(self.request, found, right):
                    raise WrongResult(f"{name}: block {index} on rank {rank} is {found}, and should be {right}")
        for rank, kept in enumerate(self.originals):
            for index, original in enumerate(kept):
                given = self.call.inputs[rank][index]
                written = any(np.shares_memory(given, output) for output in self.call.outputs[rank])
                if not (self.in_place and written) and not np.array_equal(given, original):
                    raise WrongResult(f"{name}: input block {index} of rank {rank} has been written")


def _equal(request: Request, found: Array, right: Array) -> bool:
    moves_only = not BY_KIND[request.kind].reduces or request.reduction in (Reduction.MIN, Reduction.MAX)
    if moves_only or request.dtype not in TOLERANCE:
        return bool(np.array_equal(found, right))
    tolerance = TOLERANCE[request.dtype]
    return bool(np.allclose(found, right, rtol=tolerance, atol=tolerance * 10))


def make_case(
    request: Request,
    topology: Topology,
    counts: Counts,
    options: Options | None = None,
    *,
    seed: int = 0,
    in_place: bool = False,
    planner: Callable[[int], Plan | None] | None = None,
) -> Case:
    """A collective of ``counts`` elements with random data. ``planner(rank)`` gives the plans, this package's if left out.

    For send, ``request.root`` is the receiver; the sender is the next rank.
    """
    size = topology.size
    noise = np.random.default_rng(seed)
    factors = [float(1 + rank % 3) for rank in range(size)]
    inputs = [[_values(noise, request, n) for n in _lengths(request, counts, rank, size, 0)] for rank in range(size)]
    expected = _results(request, inputs, factors, size)
    originals = [[block.copy() for block in blocks] for blocks in inputs]
    outputs = [[_unset(request, n) for n in _lengths(request, counts, rank, size, 1)] for rank in range(size)]
    if in_place:
        _alias(BY_KIND[request.kind], inputs, outputs)
    call = Call(planner or _own_plans(request, topology, options), inputs, outputs, np.dtype(request.dtype), factors)
    return Case(request, call, expected, originals, in_place)


def check(case: Case, topology: Topology, *, window: int = 4, seed: int = 0) -> Report:
    """Run one case, and verify it."""
    report = simulate([case.call], topology, window=window, seed=seed)
    case.verify()
    return report


def _own_plans(request: Request, topology: Topology, options: Options | None) -> Callable[[int], Plan | None]:
    def planned(rank: int) -> Plan | None:
        if request.kind is not Kind.SEND:
            return plan(request, topology, rank, options)
        sender = (request.root + 1) % topology.size
        if rank == sender:
            return plan(request, topology, rank, options)
        there = Request(Kind.RECV, request.dtype, root=sender, small=request.small)
        return plan(there, topology, rank, options) if rank == request.root else None

    return planned


def _lengths(request: Request, counts: Counts, rank: int, size: int, side: int) -> list[int]:
    """The elements of each block of a side (0: input, 1: output) on a rank."""
    row = BY_KIND[request.kind]
    if request.kind is Kind.SEND:
        taker = request.root if side else (request.root + 1) % size
        return [int(counts)] if rank == taker and isinstance(counts, int) else []
    shape, who = (row.output, row.output_at) if side else (row.input, row.input_at)
    if shape is Shape.NONE or (who is Who.ROOT and rank != request.root):
        return []
    if isinstance(counts, int):
        return [counts] * (size if shape is Shape.BLOCKS else 1)
    if request.kind is Kind.ALL_TO_ALL_V and side:
        return [block_counts(counts, other)[rank] for other in range(size)]
    blocks = block_counts(counts, rank)
    return list(blocks) if shape is Shape.BLOCKS else [blocks[rank]]


def _values(noise: np.random.Generator, request: Request, count: int) -> Array:
    dtype = np.dtype(request.dtype)
    if dtype == np.bool_:
        return noise.integers(0, 2, count).astype(dtype)
    if not np.issubdtype(dtype, np.floating):
        return noise.integers(0 if np.issubdtype(dtype, np.unsignedinteger) else -100, 100, count).astype(dtype)
    if request.reduction is Reduction.PRODUCT:
        return noise.uniform(0.7, 1.4, count).astype(dtype)
    return noise.normal(0, 1, count).astype(dtype)


def _unset(request: Request, count: int) -> Array:
    dtype = np.dtype(request.dtype)
    return np.full(count, np.nan if np.issubdtype(dtype, np.inexact) else 77, dtype)


def _alias(row: Operation, inputs: list[list[Array]], outputs: list[list[Array]]) -> None:
    """Make the call one in place, in the layout of its kind, on the ranks that have both sides."""
    for rank, (given, gotten) in enumerate(zip(inputs, outputs, strict=True)):
        if given and gotten and row.in_place == "same":
            gotten[0] = given[0]
        elif given and gotten and row.in_place == "output_block":
            gotten[rank][...] = given[0]
            given[0] = gotten[rank]
        elif given and gotten and row.in_place == "input_block":
            gotten[0] = given[rank]


def _results(request: Request, inputs: list[list[Array]], factors: Sequence[float], size: int) -> list[list[Array]]:
    """The outputs that the operation promises, by rank and block."""
    kind, root, everyone = request.kind, request.root, range(size)
    if kind is Kind.BROADCAST:
        return [[inputs[root][0].copy()] for _ in everyone]
    if kind is Kind.SEND:
        return [[inputs[(root + 1) % size][0].copy()] if rank == root else [] for rank in everyone]
    if kind is Kind.SCATTER:
        return [[inputs[root][rank].copy()] for rank in everyone]
    if kind in (Kind.ALL_GATHER, Kind.ALL_GATHER_V, Kind.GATHER):
        return [[blocks[0].copy() for blocks in inputs] if kind is not Kind.GATHER or rank == root else [] for rank in everyone]
    if kind in (Kind.ALL_TO_ALL, Kind.ALL_TO_ALL_V):
        return [[inputs[other][rank].copy() for other in everyone] for rank in everyone]
    if kind is Kind.BARRIER:
        return [[] for _ in everyone]
    totals = [_total(request, [blocks[index] for blocks in inputs], factors) for index in range(len(inputs[0]))]
    if kind is Kind.ALL_REDUCE:
        return [[totals[0]] for _ in everyone]
    if kind is Kind.REDUCE:
        return [[totals[0]] if rank == root else [] for rank in everyone]
    return [[totals[rank]] for rank in everyone]


def _total(request: Request, operands: list[Array], factors: Sequence[float]) -> Array:
    """The reduction in the order of ranks; floats in the widest type that there is."""
    wide: Any = np.float64 if request.dtype in TOLERANCE else operands[0].dtype
    values = [operand.astype(wide) for operand in operands]
    if request.reduction is Reduction.PREMUL_SUM:
        values = [scaled(value, factor) for value, factor in zip(values, factors, strict=True)]
    plain = Reduction.SUM if request.reduction in (Reduction.AVG, Reduction.PREMUL_SUM) else request.reduction
    total = combine(plain, values)
    return averaged(total, len(operands)) if request.reduction is Reduction.AVG else total


__all__ = ["Case", "WrongResult", "check", "make_case"]
