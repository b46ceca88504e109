"""What the jobs do: calls with inputs that every rank can work out, so that each knows the right result of all.

`run_case` is collective: every rank of a communicator calls it with the same case.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from polyccl import Comm, Kind, ReduceOp, Reduction

Array = npt.NDArray[Any]

INTEGERS = ("int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64")
OTHERS = ("bool", "complex64", "complex128")
DTYPES = INTEGERS + FLOATS + OTHERS

REDUCING = (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE_SCATTER_V)
ROOTED = (Kind.BROADCAST, Kind.REDUCE, Kind.SCATTER, Kind.GATHER)
LISTS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)
"""Kinds that come with a list of tensors or with one tensor."""
IN_PLACE = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)

FACTORS = (0.5, 2.0, -1.5, 0.25, 3.0, 1.0, -0.5, 4.0)
"""PREMUL_SUM's, by rank."""


@dataclass(frozen=True)
class Case:
    """One collective call."""

    kind: Kind
    dtype: str
    count: int
    reduction: Reduction = Reduction.NONE
    root: int = -1
    lists: bool = False
    in_place: bool = False
    async_op: bool = False
    strict: bool = False

    def __str__(self) -> str:
        words = [self.kind.name.lower(), self.dtype, str(self.count)]
        words += [self.reduction.name.lower()] if self.reduction else []
        words += [f"root{self.root}"] if self.root >= 0 else []
        words += [name for name in ("lists", "in_place", "async_op", "strict") if getattr(self, name)]
        return "-".join(words)


def reductions(dtype: str) -> tuple[Reduction, ...]:
    """Those that are defined on a dtype."""
    basic = (Reduction.SUM, Reduction.PRODUCT, Reduction.MIN, Reduction.MAX)
    bits = (Reduction.BAND, Reduction.BOR, Reduction.BXOR)
    if dtype == "bool":
        return basic + bits
    if dtype in INTEGERS:
        return (*basic, *bits, Reduction.AVG)
    if dtype in FLOATS:
        return (*basic, Reduction.AVG, Reduction.PREMUL_SUM)
    return (Reduction.SUM, Reduction.PRODUCT, Reduction.AVG)


def all_cases(size: int, counts: Sequence[int] = (0, 1, 7, 1000, 70001)) -> Iterator[Case]:
    """Operation × dtype × reduction × count × root × form × in place × asynchronous, for communicators of ``size`` ranks."""
    collectives = [kind for kind in Kind if kind not in (Kind.SEND, Kind.RECV, Kind.BARRIER)]
    for kind, dtype, count in itertools.product(collectives, DTYPES, counts):
        for reduction in reductions(dtype) if kind in REDUCING else (Reduction.NONE,):
            for root in range(size) if kind in ROOTED else (-1,):
                for lists, in_place, async_op in itertools.product(
                    (False, True) if kind in LISTS else (False,),
                    (False, True) if kind in IN_PLACE else (False,),
                    (False, True),
                ):
                    yield Case(kind, dtype, count, reduction, root, lists, in_place and not lists, async_op)


def sample(size: int, number: int, seed: int) -> list[Case]:
    """``number`` cases: each kind about equally often, the rest at random; every kind × dtype stands a chance."""
    chance = random.Random(f"{size}-{seed}")
    by_kind: dict[Kind, list[Case]] = {}
    for case in all_cases(size):
        by_kind.setdefault(case.kind, []).append(case)
    cases = [chance.choice(kind_cases) for kind_cases in itertools.islice(itertools.cycle(by_kind.values()), number)]
    strict = [case for case in cases if case.kind is Kind.ALL_REDUCE and case.count][::4]
    return cases + [Case(c.kind, c.dtype, c.count, c.reduction, strict=True) for c in strict]


def each_once(size: int) -> list[Case]:
    """Every operation × dtype × reduction × in place × asynchronous once; the rest (count, root, list or tensor) by chance."""
    chance = random.Random(size)
    found: dict[tuple[Any, ...], list[Case]] = {}
    for case in all_cases(size, counts=(1, 7, 1000, 70001)):
        found.setdefault((case.kind, case.dtype, case.reduction, case.in_place, case.async_op), []).append(case)
    return [chance.choice(cases) for cases in found.values()]


def lengths(case: Case, size: int) -> list[int]:
    """Elements of each rank's block: equal, but for ragged kinds."""
    if case.kind in (Kind.ALL_GATHER_V, Kind.REDUCE_SCATTER_V):
        return [(case.count * (rank + 1)) // size if rank % 3 != 2 else 0 for rank in range(size)]
    return [case.count] * size


def pair_length(case: Case, sender: int, receiver: int) -> int:
    """Elements that one rank sends another in all_to_all_v."""
    return (case.count * ((sender * 3 + receiver * 5) % 4)) // 4


def values(case: Case, rank: int, block: int, count: int) -> Array:
    """What rank ``rank`` gives in block ``block``: small, so that sums and products are exact in every type."""
    seed = zlib.crc32(f"{case}-{rank}-{block}".encode())
    chance = np.random.default_rng(seed)
    dtype = np.dtype(case.dtype)
    if dtype == np.bool_:
        return chance.integers(0, 2, count).astype(dtype)
    low = 0 if dtype.kind == "u" else -3
    drawn = chance.integers(low, 4, count).astype(dtype)
    if dtype.kind == "c":
        drawn = (drawn + 1j * chance.integers(-2, 3, count)).astype(dtype)
    return drawn


def reduced(case: Case, operands: Sequence[Array]) -> Array:
    """The right result of a reduction, by rank order."""
    dtype = np.dtype(case.dtype)
    functions: dict[Reduction, Any] = {
        Reduction.SUM: np.logical_or if dtype == np.bool_ else np.add,
        Reduction.PRODUCT: np.logical_and if dtype == np.bool_ else np.multiply,
        Reduction.MIN: np.logical_and if dtype == np.bool_ else np.minimum,
        Reduction.MAX: np.logical_or if dtype == np.bool_ else np.maximum,
        Reduction.BAND: np.bitwise_and,
        Reduction.BOR: np.bitwise_or,
        Reduction.BXOR: np.bitwise_xor,
    }
    if case.reduction is Reduction.PREMUL_SUM:
        operands = [operand * dtype.type(FACTORS[rank]) for rank, operand in enumerate(operands)]
    function = functions.get(case.reduction, np.add)
    with np.errstate(all="ignore"):
        total = operands[0]
        for operand in operands[1:]:
            total = function(total, operand)
        if case.reduction is Reduction.AVG:
            n = len(operands)
            total = np.trunc(total / n).astype(dtype) if dtype.kind in "iu" else (total / n).astype(dtype)
    return total.astype(dtype)


def operator(case: Case, rank: int) -> ReduceOp:
    """The call's ReduceOp on this rank."""
    return ReduceOp.PREMUL_SUM(FACTORS[rank]) if case.reduction is Reduction.PREMUL_SUM else ReduceOp(case.reduction)


def expect(actual: Array, wanted: Array, case: Case, what: str) -> None:
    """Equal; floats within rounding, since the order of operands is the library's."""
    dtype = np.dtype(case.dtype)
    if case.reduction and dtype.kind in "fc":
        tolerance = {"float16": 2e-3, "float32": 1e-5, "complex64": 1e-5}.get(case.dtype, 1e-12)
        good = np.allclose(actual, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        good = bool(np.array_equal(actual, wanted))
    assert good, f"{case}: {what} is wrong: {actual[:8]} and not {wanted[:8]}"


def run_case(comm: Comm, case: Case) -> None:
    """Make the call, and check the result, that the inputs are as they were, and that ranks hold the same bits where they must."""
    rank, size = comm.get_rank(), comm.get_size()
    inputs, outputs, given = _memory(case, rank, size)
    hints = {"deterministic": "strict"} if case.strict else None
    work = _call(comm, case, inputs, outputs, {"async_op": case.async_op, "hints": hints})
    work.wait()
    wanted = _wanted(case, rank, size)
    for index, (actual, right) in enumerate(zip(outputs, wanted, strict=True)):
        expect(actual, right, case, f"output {index} of rank {rank}")
    if not _writes_input(case, rank):
        for before, after in zip(given, inputs, strict=True):
            assert before.tobytes() == after.tobytes(), f"{case}: an input of rank {rank} was written"
    if case.kind is Kind.ALL_REDUCE:
        sums = np.zeros(size, np.int64)
        comm.all_gather_single(sums, np.array([zlib.crc32(outputs[0].tobytes())], np.int64))
        assert len(set(sums.tolist())) == 1, f"{case}: ranks hold unlike bits"


def run_cases(comm: Comm, cases: Sequence[Case]) -> int:
    """All of them, one after another; how many."""
    for case in cases:
        try:
            run_case(comm, case)
        except Exception as error:
            raise AssertionError(
                f"{case} on rank {comm.get_rank()} of {comm.get_size()}: {type(error).__name__}: {error}"
            ) from error
    return len(cases)


def _writes_input(case: Case, rank: int) -> bool:
    if case.kind is Kind.REDUCE:
        return rank == case.root
    return case.in_place or case.kind in (Kind.ALL_REDUCE, Kind.BROADCAST)


def _memory(case: Case, rank: int, size: int) -> tuple[list[Array], list[Array], list[Array]]:
    """This rank's input and output arrays, one for each block, and copies of the inputs."""
    dtype = np.dtype(case.dtype)
    sizes = lengths(case, size)

    def fresh(count: int) -> Array:
        return np.full(count, 1, dtype)

    match case.kind:
        case Kind.ALL_REDUCE | Kind.REDUCE | Kind.BROADCAST:
            data = values(case, rank, 0, case.count)
            inputs, outputs = [data], [data] if case.kind is not Kind.REDUCE or rank == case.root else []
        case Kind.ALL_GATHER | Kind.ALL_GATHER_V:
            inputs, outputs = [values(case, rank, 0, sizes[rank])], _blocks(sizes, dtype)
            if case.in_place:
                outputs[rank][:] = inputs[0]
                inputs = [outputs[rank]]
        case Kind.REDUCE_SCATTER | Kind.REDUCE_SCATTER_V:
            inputs = _blocks(sizes, dtype)
            for block, array in enumerate(inputs):
                array[:] = values(case, rank, block, sizes[block])
            outputs = [inputs[rank] if case.in_place else fresh(sizes[rank])]
        case Kind.ALL_TO_ALL:
            inputs, outputs = _blocks(sizes, dtype), _blocks(sizes, dtype)
            for block, array in enumerate(inputs):
                array[:] = values(case, rank, block, case.count)
        case Kind.ALL_TO_ALL_V:
            inputs = _blocks([pair_length(case, rank, peer) for peer in range(size)], dtype)
            outputs = _blocks([pair_length(case, peer, rank) for peer in range(size)], dtype)
            for block, array in enumerate(inputs):
                array[:] = values(case, rank, block, len(array))
        case Kind.SCATTER:
            inputs = [values(case, rank, block, case.count) for block in range(size)] if rank == case.root else []
            outputs = [fresh(case.count)]
        case _:
            inputs = [values(case, rank, 0, case.count)]
            outputs = [fresh(case.count) for _ in range(size)] if rank == case.root else []
    return inputs, outputs, [array.copy() for array in inputs]


def _blocks(sizes: Sequence[int], dtype: np.dtype[Any]) -> list[Array]:
    """Adjacent arrays: views of one, as the calls with a single tensor want them."""
    whole = np.zeros(sum(sizes), dtype)
    ends = np.cumsum(sizes)
    return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _whole(blocks: Sequence[Array]) -> Array:
    base = blocks[0].base
    assert isinstance(base, np.ndarray)
    return base


def _call(comm: Comm, case: Case, inputs: list[Array], outputs: list[Array], extra: dict[str, Any]) -> Any:
    op = operator(case, comm.get_rank()) if case.reduction else ReduceOp.SUM
    rank = comm.get_rank()
    match case.kind:
        case Kind.ALL_REDUCE:
            return comm.all_reduce(inputs[0], op, **extra)
        case Kind.REDUCE:
            return comm.reduce(inputs[0], case.root, op, **extra)
        case Kind.BROADCAST:
            return comm.broadcast(inputs[0], case.root, **extra)
        case Kind.ALL_GATHER if case.lists:
            return comm.all_gather(outputs, inputs[0], **extra)
        case Kind.ALL_GATHER:
            return comm.all_gather_single(_whole(outputs), inputs[0], **extra)
        case Kind.ALL_GATHER_V:
            return comm.all_gather_v(outputs, inputs[0], **extra)
        case Kind.REDUCE_SCATTER if case.lists:
            return comm.reduce_scatter(outputs[0], inputs, op, **extra)
        case Kind.REDUCE_SCATTER:
            return comm.reduce_scatter_single(outputs[0], _whole(inputs), op, **extra)
        case Kind.REDUCE_SCATTER_V:
            return comm.reduce_scatter_v(outputs[0], inputs, op, **extra)
        case Kind.ALL_TO_ALL if case.lists:
            return comm.all_to_all(outputs, inputs, **extra)
        case Kind.ALL_TO_ALL:
            return comm.all_to_all_single(_whole(outputs), _whole(inputs), **extra)
        case Kind.ALL_TO_ALL_V:
            given = [len(block) for block in inputs], [len(block) for block in outputs]
            return comm.all_to_all_v_single(_whole(outputs), _whole(inputs), given[1], given[0], **extra)
        case Kind.SCATTER:
            return comm.scatter(outputs[0], inputs, case.root, **extra)
        case Kind.GATHER:
            return comm.gather(outputs if rank == case.root else [], inputs[0], case.root, **extra)
    raise AssertionError(case.kind)


def _wanted(case: Case, rank: int, size: int) -> list[Array]:
    sizes = lengths(case, size)
    match case.kind:
        case Kind.ALL_REDUCE:
            return [reduced(case, [values(case, r, 0, case.count) for r in range(size)])]
        case Kind.REDUCE:
            return [reduced(case, [values(case, r, 0, case.count) for r in range(size)])] if rank == case.root else []
        case Kind.BROADCAST:
            return [values(case, case.root, 0, case.count)]
        case Kind.ALL_GATHER | Kind.ALL_GATHER_V:
            return [values(case, r, 0, sizes[r]) for r in range(size)]
        case Kind.REDUCE_SCATTER | Kind.REDUCE_SCATTER_V:
            return [reduced(case, [values(case, r, rank, sizes[rank]) for r in range(size)])]
        case Kind.ALL_TO_ALL:
            return [values(case, r, rank, case.count) for r in range(size)]
        case Kind.ALL_TO_ALL_V:
            return [values(case, r, rank, pair_length(case, r, rank)) for r in range(size)]
        case Kind.SCATTER:
            return [values(case, case.root, rank, case.count)]
        case _:
            return [values(case, r, 0, case.count) for r in range(size)] if rank == case.root else []
