"""The plan: what one rank does for one collective, as data.

A plan is written once for a *signature* (kind, dtype, reduction, root, size class, topology) and holds for every count. It has
two sections. ``main`` is the body of a loop over chunks: iteration *c* handles elements ``[c * chunk, c * chunk + length)`` of
every block, where ``length`` is ``chunk``, or less in the last iteration, and always a multiple of ``unit``. ``tail`` runs once,
over the fewer than ``unit`` elements that remain. A section with ``chunk == 0`` is a single iteration over everything.

Steps name *slices*: ``lo`` and ``hi`` are fractions, measured in lengths of the current iteration, so that no number in a plan
depends on the count. A builder (`SectionBuilder`) derives from the slices which step must wait for which.

Order and lanes
    Every step belongs to a lane: *pre* (before the link), *cross* (the link), *post* (after it). A step depends only on earlier
    steps, of its own lane or of one further upstream, which excludes cycles. Pre and post run their steps strictly in order
    (operation, iteration, position), so that all ranks of an island call its library alike; the cross lane starts a step as
    soon as its dependencies are met. Between two ranks, the messages of one iteration are matched by their order in the plans.

Verbs
    LOCAL
        One collective of kind ``kind`` on the island's communicator, from ``src[0]`` to ``dst[0]``; ``root`` is a rank *of the
        island*. Lane pre or post. Slices whose side is absent on this rank (the input of a broadcast elsewhere than at the
        root) are left out. The blocks of a gathering or scattering kind are adjacent, in the island's rank order.
    SEND, RECV
        One message to or from ``peer`` (a rank of this communicator). In lane cross it travels over the link; in pre and post
        on the island's communicator, where consecutive ones form one fused group.
    COPY
        ``dst[i] = src[i]`` for every i.
    REDUCE
        ``dst[0] = src[0] op src[1] op ...``, in this order, then scaled by ``factor``. ``dst[0]`` may be one of the sources.
    SCALE
        ``dst[0] = src[0] * factor``.

Factors
    AVERAGE is 1 / size of the communicator: floats are multiplied, integers divided with truncation. CALL is the factor of this
    rank's PREMUL_SUM call.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from fractions import Fraction
from itertools import pairwise
from math import lcm

from ..spec import BY_KIND, Factor, Kind, Lane, Reduction, Verb

FORMAT_VERSION = 2
"""First word of an encoded plan. The executor refuses another."""

Number = int | Fraction


class Buffer(IntEnum):
    """What a slice lies in: the call's input, its output, or scratch number ``buffer - SCRATCH``."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2


@dataclass(frozen=True)
class Slice:
    """Part ``[lo, hi)`` of the current iteration of one block of a buffer, measured in lengths of the iteration.

    In INPUT and OUTPUT, ``block`` counts the blocks of that side (0 where it has one). A scratch buffer is one stretch of
    ``size`` lengths, of which ``[lo, hi)`` is a part. In a ragged section ``lo`` and ``hi`` are whole, the length is that of
    block ``block``, and scratch position ``lo`` lies at ``lo * chunk`` elements. For scratch, ``block`` counts the blocks of the
    side that has any; where both have, of the input, and ``~block`` of the output.
    """

    buffer: int
    block: int
    lo: Fraction
    hi: Fraction

    def part(self, lo: Number, hi: Number) -> Slice:
        """The part ``[lo, hi)``, measured from this slice's begin in lengths of the iteration."""
        piece = Slice(self.buffer, self.block, self.lo + lo, self.lo + hi)
        if not (self.lo <= piece.lo <= piece.hi <= self.hi):
            raise ValueError(f"[{lo}, {hi}) is not inside {self}")
        return piece

    @property
    def size(self) -> Fraction:
        """How many lengths of the iteration the slice has."""
        return self.hi - self.lo


@dataclass(frozen=True)
class Step:
    """One step. ``deps`` are the positions, in the section, of the steps that must be complete before this one starts.

    ``ordinal`` numbers, for SEND and RECV, the messages of an iteration to (from) that peer over the link.
    """

    verb: Verb
    lane: Lane
    src: tuple[Slice, ...] = ()
    dst: tuple[Slice, ...] = ()
    kind: int = 0
    root: int = -1
    peer: int = -1
    factor: Factor = Factor.ONE
    ordinal: int = 0
    deps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Section:
    """Steps of one iteration. ``scratch[k]`` is the size of scratch k in lengths of an iteration.

    ``on_device`` holds the numbers of the scratch buffers that lie in device memory, as input and output then do; the others
    are host memory, pinned where the device can pin it (see `polyccl.planner.staging`).
    """

    steps: tuple[Step, ...]
    scratch: tuple[Fraction, ...]
    unit: int
    chunk: int
    ragged: bool = False
    on_device: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Plan:
    """A whole plan. ``reduction`` is what LOCAL and REDUCE steps apply (AVG and PREMUL_SUM have become SUM and scalings)."""

    name: str
    kind: Kind
    reduction: Reduction
    main: Section
    tail: Section | None = None

    def sections(self) -> tuple[Section, ...]:
        """``main``, and ``tail`` where there is one."""
        return (self.main,) if self.tail is None else (self.main, self.tail)

    def encode(self) -> bytes:
        """The plan as 64-bit little-endian integers, the form that the executor reads (``core/native/plan.cc``)."""
        words: list[int] = [FORMAT_VERSION, int(self.kind), int(self.reduction), len(self.sections())]
        for section in self.sections():
            words += [section.unit, section.chunk, int(section.ragged), len(section.scratch)]
            for number, size in enumerate(section.scratch):
                words += [size.numerator, size.denominator, int(number in section.on_device)]
            words.append(len(section.steps))
            for step in section.steps:
                words += [int(step.verb), int(step.lane), step.kind, step.root, step.peer, int(step.factor), step.ordinal]
                for slices in (step.src, step.dst):
                    words.append(len(slices))
                    for s in slices:
                        words += [
                            s.buffer,
                            s.block,
                            s.lo.numerator,
                            s.lo.denominator,
                            s.hi.numerator,
                            s.hi.denominator,
                        ]
                words.append(len(step.deps))
                words += step.deps
        return array("q", words).tobytes()


@dataclass
class SectionBuilder:
    """Collects the steps of a section and derives dependencies from the memory that they touch.

    A step waits for every earlier step that wrote what it reads or writes, and for every earlier reader of what it writes.
    Input and output count as the same memory where the kind's in-place layout makes them so; ``rank`` is this rank, for that.
    """

    kind: Kind
    rank: int
    unit: int = 1
    chunk: int = 0
    ragged: bool = False
    steps: list[Step] = field(default_factory=list)
    scratch: list[Fraction] = field(default_factory=list)
    on_device: set[int] = field(default_factory=set)
    _sent: dict[int, int] = field(default_factory=dict)
    _received: dict[int, int] = field(default_factory=dict)

    def input(self, block: int = 0) -> Slice:
        """This iteration of a whole input block."""
        return Slice(Buffer.INPUT, block, Fraction(0), Fraction(1))

    def output(self, block: int = 0) -> Slice:
        """This iteration of a whole output block."""
        return Slice(Buffer.OUTPUT, block, Fraction(0), Fraction(1))

    def new_scratch(self, size: Number, block: int = 0) -> Slice:
        """A new scratch buffer of ``size`` lengths. ``block`` matters in ragged sections only: it says whose length it has."""
        self.scratch.append(Fraction(size))
        return Slice(Buffer.SCRATCH + len(self.scratch) - 1, block, Fraction(0), Fraction(size))

    def local(
        self,
        kind: Kind,
        src: Slice | None,
        dst: Slice | None,
        root: int = -1,
        lane: Lane = Lane.PRE,
    ) -> None:
        """Append a collective of the island."""
        self.add(
            Step(
                Verb.LOCAL,
                lane,
                () if src is None else (src,),
                () if dst is None else (dst,),
                kind=int(kind),
                root=root,
            )
        )

    def send(self, src: Slice, peer: int, lane: Lane = Lane.CROSS) -> None:
        """Append a message to ``peer``; an empty slice sends nothing."""
        if src.size:
            ordinal = self._next(self._sent, peer, lane)
            self.add(Step(Verb.SEND, lane, src=(src,), peer=peer, ordinal=ordinal))

    def recv(self, dst: Slice, peer: int, lane: Lane = Lane.CROSS) -> None:
        """Append a message from ``peer``; an empty slice receives nothing."""
        if dst.size:
            ordinal = self._next(self._received, peer, lane)
            self.add(Step(Verb.RECV, lane, dst=(dst,), peer=peer, ordinal=ordinal))

    def copy(self, pairs: Iterable[tuple[Slice, Slice]], lane: Lane) -> None:
        """Append one step that copies every ``(source, destination)``; pairs of the same place and empty ones vanish."""
        moves = [(a, b) for a, b in pairs if a.size and a != b]
        if moves:
            self.add(Step(Verb.COPY, lane, tuple(a for a, _ in moves), tuple(b for _, b in moves)))

    def reduce(
        self,
        dst: Slice,
        operands: Sequence[Slice],
        factor: Factor = Factor.ONE,
        lane: Lane = Lane.CROSS,
    ) -> None:
        """Append the reduction of ``operands``, in their order, into ``dst``."""
        if dst.size:
            self.add(Step(Verb.REDUCE, lane, tuple(operands), (dst,), factor=factor))

    def scale(self, dst: Slice, src: Slice, factor: Factor, lane: Lane = Lane.PRE) -> None:
        """Append ``dst = src * factor``."""
        if dst.size:
            self.add(Step(Verb.SCALE, lane, (src,), (dst,), factor=factor))

    def build(self) -> Section:
        """The finished section. Raises ValueError where a slice is not a whole number of elements for every length."""
        need = lcm(1, *(x.denominator for s in self.steps for c in s.src + s.dst for x in (c.lo, c.hi)))
        if self.unit % need:
            raise ValueError(f"the unit {self.unit} is not a multiple of {need}, which the slices need")
        return Section(tuple(self.steps), tuple(self.scratch), self.unit, self.chunk, self.ragged, frozenset(self.on_device))

    def _next(self, counters: dict[int, int], peer: int, lane: Lane) -> int:
        if lane is not Lane.CROSS:
            return 0
        counters[peer] = counters.get(peer, 0) + 1
        return counters[peer] - 1

    def add(self, step: Step) -> None:
        """Append a step as it is, but for its dependencies, which are derived here."""
        position = len(self.steps)
        deps = {i for i in range(position) if self._conflict(self.steps[i], step)}
        for i in sorted(deps):
            if self.steps[i].lane > step.lane:
                raise ValueError(f"step {position} in lane {step.lane.name} would wait for lane {self.steps[i].lane.name}")
        implied = {d for i in deps for d in self.steps[i].deps}
        self.steps.append(
            Step(
                step.verb,
                step.lane,
                step.src,
                step.dst,
                step.kind,
                step.root,
                step.peer,
                step.factor,
                step.ordinal,
                tuple(sorted(deps - implied)),
            )
        )

    def _conflict(self, earlier: Step, later: Step) -> bool:
        return any(self.overlap(a, b) for a in earlier.dst for b in later.src + later.dst) or any(
            self.overlap(a, b) for a in earlier.src for b in later.dst
        )

    def overlap(self, a: Slice, b: Slice) -> bool:
        """Whether two slices share memory, in an in-place call too."""
        return self._place(a) == self._place(b) and a.lo < b.hi and b.lo < a.hi

    def _place(self, s: Slice) -> tuple[int, int]:
        """Buffer and block, with input and output made one where an in-place call makes them one."""
        layout = BY_KIND[self.kind].in_place
        if s.buffer >= Buffer.SCRATCH:
            return s.buffer, 0
        if layout == "same":
            return Buffer.OUTPUT, 0
        if layout == "output_block" and s.buffer == Buffer.INPUT:
            return Buffer.OUTPUT, self.rank
        if layout == "input_block" and s.buffer == Buffer.OUTPUT:
            return Buffer.INPUT, self.rank
        return s.buffer, s.block


def overlaps(a: int, b: int, whole: Number = 1) -> list[tuple[int, int, Fraction, Fraction]]:
    """How two equal partitions of ``[0, whole)``, in ``a`` and in ``b`` parts, meet.

    Returns ``(i, j, lo, hi)`` for every non-empty overlap of part i of the first with part j of the second, in order:
    ``a + b - gcd(a, b)`` of them. This is how the rails between two islands of unlike sizes share the work.
    """
    cuts = sorted({Fraction(whole) * i / a for i in range(a + 1)} | {Fraction(whole) * j / b for j in range(b + 1)})
    return [(int(lo * a / whole), int(lo * b / whole), lo, hi) for lo, hi in pairwise(cuts)]


__all__ = [
    "FORMAT_VERSION",
    "Buffer",
    "Factor",
    "Lane",
    "Plan",
    "Section",
    "SectionBuilder",
    "Slice",
    "Step",
    "Verb",
    "overlaps",
]
