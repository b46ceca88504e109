"""Runs the plans of all ranks on NumPy arrays, without processes: the proof that a set of plans is right.

The simulator keeps the executor's rules and none of its luck. Lanes pre and post run strictly in order; the cross lane starts what
is ready, within a window of iterations. A send has no buffering: it completes when the peer's receive is there. A collective of
an island completes when all its ranks have arrived at it, and pre and post have a communicator each. Among all that could happen
next, a seeded generator chooses. Scratch is filled with garbage before each iteration, and an island's reductions take their
operands in random order, so that a plan that reads too early, or relies on an order that no one promised, gives wrong results.

`simulate` takes any plans: ``Call.plan`` is a function of the rank, so algorithms from elsewhere are checked the same way.
``verify.py`` makes calls with random data and knows their results.

What it raises: `Deadlock` when nothing can happen though something remains, `Mismatch` when ranks disagree about a message or a
local step, and `SimulationError` for a plan that makes no sense by itself.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec import Kind, Reduction
from .plan import Buffer, Factor, Lane, Plan, Section, Slice, Step, Verb
from .topology import Topology

Array = NDArray[Any]


class SimulationError(RuntimeError):
    """A set of plans is wrong."""


class Deadlock(SimulationError):
    """Nothing can happen, though some ranks are not done."""


class Mismatch(SimulationError):
    """Ranks disagree: the two ends of a message about its size, or the ranks of an island about a local step."""


@dataclass
class Call:
    """One operation on all ranks.

    ``plan(rank)`` is the rank's plan, None where it takes no part. ``inputs[rank]`` and ``outputs[rank]`` are the blocks of each
    side, empty where the rank has none; in-place calls pass views of the same memory. ``factors[rank]`` is the rank's PREMUL_SUM
    factor.
    """

    plan: Callable[[int], Plan | None]
    inputs: Sequence[Sequence[Array]]
    outputs: Sequence[Sequence[Array]]
    dtype: Any
    factors: Sequence[float] = ()


@dataclass
class Report:
    """What happened: bytes over the link by pair of islands, messages over the link, and the largest scratch of an iteration."""

    payload: dict[tuple[int, int], int] = field(default_factory=dict)
    messages: int = 0
    scratch_bytes: int = 0


def simulate(calls: Sequence[Call], topology: Topology, *, window: int = 4, seed: int = 0) -> Report:
    """Run all calls, issued on all ranks in this order without waiting. Results are in the calls' outputs."""
    machine = _Machine(calls, topology, window, random.Random(seed))
    machine.run()
    return machine.report


# --- what a rank runs -----------------------------------------------------------------------------------------------------------


@dataclass
class _Shape:
    """What is the same in all iterations of a section: who waits for whom, and the order of each strict lane."""

    waiting: list[int]
    dependents: list[list[int]]
    strict: dict[Lane, list[list[int]]]
    crossing: list[int]


def _shape(section: Section) -> _Shape:
    waiting = [len(step.deps) for step in section.steps]
    dependents: list[list[int]] = [[] for _ in section.steps]
    for position, step in enumerate(section.steps):
        for dep in step.deps:
            if dep >= position or section.steps[dep].lane > step.lane:
                raise SimulationError(f"step {position} waits for step {dep}, which is later or in a later lane")
            dependents[dep].append(position)
    strict: dict[Lane, list[list[int]]] = {Lane.PRE: [], Lane.POST: []}
    for lane, groups in strict.items():
        for position, step in enumerate(section.steps):
            if step.lane is lane:
                if groups and _is_message(step) and _is_message(section.steps[groups[-1][-1]]):
                    groups[-1].append(position)
                else:
                    groups.append([position])
    crossing = [position for position, step in enumerate(section.steps) if step.lane is Lane.CROSS]
    return _Shape(waiting, dependents, strict, crossing)


def _is_message(step: Step) -> bool:
    return step.verb in (Verb.SEND, Verb.RECV)


@dataclass
class _Iteration:
    """One iteration of a section on one rank. ``key`` says which one, alike on all ranks: (operation, section, iteration)."""

    rank: int
    call: Call
    section: Section
    shape: _Shape
    key: tuple[int, int, int]
    first: int
    length: int
    reduction: Reduction
    kind: Kind
    waiting: list[int] = field(default_factory=list)
    left: int = 0
    scratch: list[Array] = field(default_factory=list)

    def start(self, garbage: Callable[[int, Any], Array]) -> int:
        """Take scratch, full of garbage; returns its bytes."""
        self.waiting = list(self.shape.waiting)
        self.left = len(self.section.steps)
        length = self.section.chunk if self.section.ragged else self.length
        self.scratch = [garbage(ceil(size * length), self.call.dtype) for size in self.section.scratch]
        return sum(array.nbytes for array in self.scratch)

    def view(self, part: Slice) -> Array:
        """The memory that a slice names."""
        in_scratch = part.buffer >= Buffer.SCRATCH
        if in_scratch:
            memory, first = self.scratch[part.buffer - Buffer.SCRATCH], 0
        else:
            memory, first = self._block(part), self.first
        if self.section.ragged:
            if part.size != 1 or part.lo.denominator != 1:
                raise SimulationError(f"{part} is not one whole block, as it must be in a ragged section")
            length = max(0, min(self.section.chunk, len(self._block(part)) - self.first))
            begin = int(part.lo) * self.section.chunk if in_scratch else min(first, len(memory))
            end = begin + length
        else:
            begin, end = first + _elements(part.lo * self.length), first + _elements(part.hi * self.length)
        if end > len(memory):
            raise SimulationError(f"{part} ends at element {end} of {len(memory)}")
        return memory[begin:end]

    def _block(self, part: Slice) -> Array:
        """The block of a side that a slice names; for scratch, the block whose length it has, on the side that has blocks."""
        sides = self.call.inputs[self.rank], self.call.outputs[self.rank]
        if part.block < 0:
            return sides[Buffer.OUTPUT][~part.block]
        blocks = sides[part.buffer] if part.buffer < Buffer.SCRATCH else max(sides, key=len)
        if part.block >= len(blocks):
            raise SimulationError(f"rank {self.rank} has no block {part.block} for {part}")
        return blocks[part.block]

    def name(self, position: int) -> str:
        """How reports call a step."""
        step = self.section.steps[position]
        what = Kind(step.kind).name if step.verb is Verb.LOCAL else step.verb.name
        peer = f" peer {step.peer}" if step.peer >= 0 else ""
        operation, section, iteration = self.key
        return (
            f"rank {self.rank}: operation {operation} ({self.kind.name.lower()}), {('main', 'tail')[section]}, "
            f"iteration {iteration}, step {position}: {what}{peer} in lane {step.lane.name.lower()}"
        )


def _elements(value: Fraction) -> int:
    """A number of elements, which must be whole."""
    if value.denominator != 1:
        raise SimulationError(f"{value} is not a whole number of elements")
    return int(value)


def _iterations(call: Call, operation: int, rank: int) -> list[_Iteration]:
    """All iterations of one call on one rank, in order."""
    plan = call.plan(rank)
    if plan is None:
        return []
    lengths = [len(block) for side in (call.inputs[rank], call.outputs[rank]) for block in side]
    total = 1 if plan.kind is Kind.BARRIER else max(lengths, default=0)
    whole = total if plan.main.ragged else total - total % plan.main.unit
    made = []
    for number, (section, begin, end) in enumerate(zip(plan.sections(), (0, whole), (whole, total), strict=False)):
        stride = section.chunk or max(1, end - begin)
        shape = _shape(section)
        for index, first in enumerate(range(begin, end, stride)):
            length = min(stride, end - first)
            key = (operation, number, index)
            made.append(_Iteration(rank, call, section, shape, key, first, length, plan.reduction, plan.kind))
    if whole < total and plan.tail is None:
        raise SimulationError(f"{plan.name} has no tail for {total - whole} of {total} elements")
    return made


# --- the machine ----------------------------------------------------------------------------------------------------------------


@dataclass
class _Strict:
    """A strict lane of a rank: what it has yet to run, in order, and how many steps of the group at its head are unfinished."""

    groups: deque[tuple[int, list[int]]]
    running: int = 0


@dataclass
class _Arrival:
    """The ranks of an island that have arrived at its next local step in a lane."""

    ranks: dict[int, tuple[_Iteration, int]] = field(default_factory=dict)


class _Machine:
    """The state of all ranks. ``ready`` holds what could happen next; `run` draws from it until nothing is left."""

    def __init__(self, calls: Sequence[Call], topology: Topology, window: int, chance: random.Random) -> None:
        self.topology = topology
        self.window = window
        self.chance = chance
        self.noise = np.random.default_rng(chance.getrandbits(32))
        self.report = Report()
        self.ready: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.work: list[list[_Iteration]] = [
            [made for operation, call in enumerate(calls) for made in _iterations(call, operation, rank)]
            for rank in range(topology.size)
        ]
        self.started = [0] * topology.size
        self.finished = [0] * topology.size
        self.lanes = [
            {
                lane: _Strict(deque((index, group) for index, it in enumerate(work) for group in it.shape.strict[lane]))
                for lane in (Lane.PRE, Lane.POST)
            }
            for work in self.work
        ]
        self.posted: dict[tuple[Any, ...], deque[tuple[_Iteration, int]]] = {}
        self.arrivals: dict[tuple[int, Lane], _Arrival] = {}

    def run(self) -> None:
        """Let everything happen, in random order."""
        for rank in range(self.topology.size):
            self._open(rank)
        while self.ready:
            chosen = self.chance.randrange(len(self.ready))
            self.ready[chosen], self.ready[-1] = self.ready[-1], self.ready[chosen]
            action, arguments = self.ready.pop()
            action(*arguments)
        if any(done < len(work) for done, work in zip(self.finished, self.work, strict=True)):
            raise Deadlock(self._stuck())

    # Starting and finishing.

    def _open(self, rank: int) -> None:
        """Start the iterations that the window allows."""
        while self.started[rank] < min(len(self.work[rank]), self.finished[rank] + self.window):
            iteration = self.work[rank][self.started[rank]]
            self.started[rank] += 1
            self.report.scratch_bytes = max(self.report.scratch_bytes, iteration.start(self._garbage))
            for position in iteration.shape.crossing:
                if not iteration.waiting[position]:
                    self._push(self._begin, iteration, position)
            if not iteration.left:
                self._close(rank)
        for lane in (Lane.PRE, Lane.POST):
            self._advance(rank, lane)

    def _close(self, rank: int) -> None:
        """Count finished iterations; the window moves past the earliest ones only."""
        work = self.work[rank]
        while self.finished[rank] < self.started[rank] and not work[self.finished[rank]].left:
            work[self.finished[rank]].scratch = []
            self.finished[rank] += 1

    def _advance(self, rank: int, lane: Lane) -> None:
        """Begin what is at the head of a strict lane, if it may."""
        state = self.lanes[rank][lane]
        if state.running or not state.groups:
            return
        index, group = state.groups[0]
        if index >= self.started[rank]:
            return
        iteration = self.work[rank][index]
        if any(iteration.waiting[position] for position in group):
            return
        state.running = len(group)
        for position in group:
            self._push(self._begin, iteration, position)

    def _done(self, iteration: _Iteration, position: int) -> None:
        """A step is complete: wake what waited for it."""
        rank = iteration.rank
        lane = iteration.section.steps[position].lane
        if lane is not Lane.CROSS:
            state = self.lanes[rank][lane]
            state.running -= 1
            if not state.running:
                state.groups.popleft()
        for dependent in iteration.shape.dependents[position]:
            iteration.waiting[dependent] -= 1
            if not iteration.waiting[dependent] and iteration.section.steps[dependent].lane is Lane.CROSS:
                self._push(self._begin, iteration, dependent)
        iteration.left -= 1
        if not iteration.left:
            self._close(rank)
        self._open(rank)

    def _push(self, action: Callable[..., None], *arguments: Any) -> None:
        self.ready.append((action, arguments))

    # Steps.

    def _begin(self, iteration: _Iteration, position: int) -> None:
        step = iteration.section.steps[position]
        if step.verb is Verb.LOCAL:
            self._arrive(iteration, position)
        elif _is_message(step):
            self._post(iteration, position)
        else:
            sources = [iteration.view(part) for part in step.src]
            targets = [iteration.view(part) for part in step.dst]
            if step.verb is Verb.COPY:
                for source, target in zip(sources, targets, strict=True):
                    target[...] = source
            elif step.verb is Verb.REDUCE:
                targets[0][...] = self._multiply(iteration, combine(iteration.reduction, sources), step.factor)
            else:
                targets[0][...] = self._multiply(iteration, sources[0], step.factor)
            self._done(iteration, position)

    def _multiply(self, iteration: _Iteration, value: Array, factor: Factor) -> Array:
        if factor is Factor.CALL:
            return scaled(value, iteration.call.factors[iteration.rank])
        return averaged(value, self.topology.size) if factor is Factor.AVERAGE else value

    def _post(self, iteration: _Iteration, position: int) -> None:
        """Post one end of a message. With both there, it can travel at any later time. Empty messages of ragged blocks vanish."""
        step = iteration.section.steps[position]
        sends = step.verb is Verb.SEND
        if iteration.section.ragged and not len(iteration.view((step.src if sends else step.dst)[0])):
            self._push(self._done, iteration, position)
            return
        pair = (iteration.rank, step.peer) if sends else (step.peer, iteration.rank)
        place: tuple[Any, ...] = (step.lane,) if step.lane is not Lane.CROSS else (iteration.key, step.ordinal)
        if pair[0] == pair[1]:
            raise Mismatch(f"{iteration.name(position)} is a message to itself")
        if step.lane is not Lane.CROSS and self.topology.island_of(pair[0]) != self.topology.island_of(pair[1]):
            raise Mismatch(f"{iteration.name(position)} is outside the island")
        waiting = self.posted.setdefault((pair, place, not sends), deque())
        if waiting:
            other = waiting.popleft()
            mine = (iteration, position)
            self._push(self._transfer, *(mine + other if sends else other + mine))
        else:
            self.posted.setdefault((pair, place, sends), deque()).append((iteration, position))

    def _transfer(self, sender: _Iteration, sent: int, receiver: _Iteration, received: int) -> None:
        step = sender.section.steps[sent]
        source = sender.view(step.src[0])
        target = receiver.view(receiver.section.steps[received].dst[0])
        if len(source) != len(target):
            raise Mismatch(
                f"{sender.name(sent)} sends {len(source)} elements; {receiver.name(received)} receives {len(target)} elements"
            )
        target[...] = source
        if step.lane is Lane.CROSS:
            pair = self.topology.island_of(sender.rank), self.topology.island_of(receiver.rank)
            self.report.payload[pair] = self.report.payload.get(pair, 0) + source.nbytes
            self.report.messages += 1
        self._done(sender, sent)
        self._done(receiver, received)

    # Local steps.

    def _arrive(self, iteration: _Iteration, position: int) -> None:
        """A rank arrives at a collective of its island; the last one to arrive lets it happen."""
        step = iteration.section.steps[position]
        island = self.topology.island_of(iteration.rank)
        if len(self.topology.islands[island]) == 1:
            raise Mismatch(f"{iteration.name(position)} is a local step in an island of one rank")
        arrival = self.arrivals.setdefault((island, step.lane), _Arrival())
        arrival.ranks[iteration.rank] = (iteration, position)
        if len(arrival.ranks) == len(self.topology.islands[island]):
            del self.arrivals[island, step.lane]
            self._push(self._collective, [arrival.ranks[rank] for rank in self.topology.islands[island]])

    def _collective(self, ranks: list[tuple[_Iteration, int]]) -> None:
        steps = [iteration.section.steps[position] for iteration, position in ranks]
        names = {(it.key, step.kind, step.root) for (it, _), step in zip(ranks, steps, strict=True)}
        if len(names) > 1:
            raise Mismatch("the ranks of an island are at different local steps: " + "; ".join(it.name(p) for it, p in ranks))
        label = ranks[0][0].name(ranks[0][1])
        if steps[0].kind != Kind.BARRIER:
            pairs = list(zip(ranks, steps, strict=True))
            sources = [[it.view(part).copy() for part in step.src] for (it, _), step in pairs]
            targets = [[it.view(part) for part in step.dst] for (it, _), step in pairs]
            results = self._results(*ranks[0], [source[0] if source else None for source in sources])
            for rank, (result, target) in enumerate(zip(results, targets, strict=True)):
                if (result is None) != (not target):
                    raise Mismatch(f"{label}: position {rank} {'lacks' if result is not None else 'has no use for'} a destination")
                if result is not None:
                    if len(result) != len(target[0]):
                        raise Mismatch(f"{label}: position {rank} gets {len(result)} elements for a place of {len(target[0])}")
                    target[0][...] = result
        for iteration, position in ranks:
            self._done(iteration, position)

    def _results(self, first: _Iteration, position: int, sources: list[Array | None]) -> list[Array | None]:
        """What a collective of the island gives to each of its positions."""
        step, reduction, label = first.section.steps[position], first.reduction, first.name(position)
        kind, root, count = Kind(step.kind), step.root, len(sources)
        equal_bits = self.topology.equal_bits[self.topology.island_of(first.rank)]
        given = range(root, root + 1) if kind in (Kind.BROADCAST, Kind.SCATTER) else range(count)
        operands: list[Array] = []
        for rank, source in enumerate(sources):
            if (source is None) == (rank in given):
                raise Mismatch(f"{label}: position {rank} {'lacks' if source is None else 'has no use for'} a source")
            if source is not None:
                operands.append(source)
        if len({len(operand) for operand in operands}) > 1:
            raise Mismatch(f"{label}: the ranks give {[len(operand) for operand in operands]} elements")
        if kind is Kind.BROADCAST:
            return [operands[0]] * count
        if kind is Kind.SCATTER:
            return list(np.split(operands[0], count))
        if kind in (Kind.ALL_GATHER, Kind.GATHER):
            joined = np.concatenate(operands)
            return [joined if kind is Kind.ALL_GATHER or rank == root else None for rank in range(count)]
        if kind is Kind.REDUCE_SCATTER:
            return list(np.split(self._shuffled(reduction, operands), count))
        if kind is Kind.REDUCE:
            return [self._shuffled(reduction, operands) if rank == root else None for rank in range(count)]
        if kind is Kind.ALL_REDUCE:
            same = self._shuffled(reduction, operands)
            return [same if equal_bits else self._shuffled(reduction, operands) for _ in range(count)]
        raise SimulationError(f"{label}: the simulator has no local {kind.name.lower()}")

    def _shuffled(self, reduction: Reduction, operands: list[Array]) -> Array:
        """A reduction in an order that no one promised."""
        order = list(range(len(operands)))
        self.chance.shuffle(order)
        return combine(reduction, [operands[rank] for rank in order])

    def _garbage(self, count: int, dtype: Any) -> Array:
        if np.issubdtype(dtype, np.inexact):
            return np.full(count, np.nan, dtype)
        noise: Array = self.noise.integers(0, 256, count * np.dtype(dtype).itemsize, dtype=np.uint8)
        return noise.astype(np.bool_) if dtype == np.bool_ else noise.view(dtype)

    def _stuck(self) -> str:
        """Who waits for what, when nothing can happen any more."""
        lines = ["deadlock: no step can be taken, and these are not complete:"]
        for (pair, _, sends), ends in self.posted.items():
            for iteration, position in ends:
                lines.append(f"  {iteration.name(position)} waits for rank {pair[1] if sends else pair[0]} to post its end")
        for (island, _), arrival in self.arrivals.items():
            missing = [rank for rank in self.topology.islands[island] if rank not in arrival.ranks]
            lines += [f"  {it.name(position)} waits for ranks {missing}" for it, position in arrival.ranks.values()]
        left = Counter({rank: sum(it.left for it in work) for rank, work in enumerate(self.work)})
        lines.append("  unfinished steps by rank, in started iterations: " + ", ".join(f"{r}: {n}" for r, n in left.items() if n))
        return "\n".join(lines)


# --- arithmetic -----------------------------------------------------------------------------------------------------------------


def combine(reduction: Reduction, operands: Sequence[Array]) -> Array:
    """``operands[0] op operands[1] op ...``, in this order."""
    logical = operands[0].dtype == np.bool_
    functions: dict[Reduction, Callable[[Array, Array], Array]] = {
        Reduction.SUM: np.logical_or if logical else np.add,
        Reduction.PRODUCT: np.logical_and if logical else np.multiply,
        Reduction.MIN: np.minimum,
        Reduction.MAX: np.maximum,
        Reduction.BAND: np.bitwise_and,
        Reduction.BOR: np.bitwise_or,
        Reduction.BXOR: np.bitwise_xor,
    }
    total: Array = operands[0].copy()
    for operand in operands[1:]:
        total = functions[reduction](total, operand)
    return total


def averaged(value: Array, size: int) -> Array:
    """Multiplied by 1 / size; integers are divided, with truncation."""
    if np.issubdtype(value.dtype, np.inexact):
        product: Array = value * value.dtype.type(1 / size)
        return product
    truncated: Array = np.sign(value) * (np.abs(value) // value.dtype.type(size))
    return truncated.astype(value.dtype)


def scaled(value: Array, factor: float) -> Array:
    """Multiplied by the factor of a PREMUL_SUM."""
    product: Array = value * value.dtype.type(factor)
    return product


__all__ = [
    "Call",
    "Deadlock",
    "Mismatch",
    "Report",
    "SimulationError",
    "averaged",
    "combine",
    "scaled",
    "simulate",
]
