"""What plans send over the link, counted from the plans; the bounds that they must reach; and a readable listing of a plan.

Payload is a measure without noise: it is exact, needs no machine, and tells a good plan from a bad one. The bounds are those for
whole-island partial results (an island sends a block, or the reduction of its ranks' blocks, never one rank's operand): see
Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience" (2007), with islands in
the place of nodes, and blocks weighted by the islands' sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..spec import BY_KIND, Kind, Reduction, Shape
from .plan import Buffer, Factor, Lane, Plan, Section, Slice, Step, Verb
from .planner import plan
from .task import Options, Request
from .topology import Topology

Counts = int | Sequence[int] | Sequence[Sequence[int]]
"""Elements of a block; of each block, by rank, for ragged kinds; from each rank (row) to each (column) for all_to_all_v."""

Islands = dict[tuple[int, int], int]
"""Bytes over the link by (island that sends, island that receives)."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that leave and that enter an island."""

    leave: Fraction
    enter: Fraction


def payload(topology: Topology, request: Request, counts: Counts, options: Options | None = None) -> Islands:
    """The bytes that the plans of all ranks send over the link for a collective of ``counts`` elements."""
    if not BY_KIND[request.kind].collective:
        raise ValueError(f"{BY_KIND[request.kind].name} is not a collective: its bytes are those of the message")
    totals: Islands = {}
    for rank in range(topology.size):
        written = plan(request, topology, rank, options)
        for section in written.sections():
            for step in section.steps:
                if step.verb is Verb.SEND and step.lane is Lane.CROSS:
                    pair = topology.island_of(rank), topology.island_of(step.peer)
                    elements = _elements(written, section, step.src[0], counts, rank)
                    totals[pair] = totals.get(pair, 0) + elements * request.item
    return totals


def _elements(written: Plan, section: Section, part: Slice, counts: Counts, rank: int) -> int:
    """How many elements of ``part`` all iterations of the section have together."""
    if written.kind is Kind.BARRIER:
        length = 1
    elif section.ragged:
        gathers = written.kind is Kind.ALL_GATHER_V and part.buffer == Buffer.INPUT
        length = block_counts(counts, rank)[rank if gathers else part.block]
    else:
        if not isinstance(counts, int):
            raise ValueError(f"{written.name} takes one count, not {counts!r}")
        remainder = counts % written.main.unit
        length = counts - remainder if section is written.main else remainder
    return int(part.size * length)


def block_counts(counts: Counts, rank: int) -> Sequence[int]:
    """The elements of each block that ``rank`` gives: all ranks have the same list, or each its row of the matrix."""
    if isinstance(counts, int):
        raise ValueError("blocks of unequal lengths need a list of counts")
    rows = [row for row in counts if not isinstance(row, int)]
    return rows[rank] if rows else [row for row in counts if isinstance(row, int)]


def traffic(topology: Topology, pairs: Islands) -> tuple[Traffic, ...]:
    """What leaves and enters each island, from the bytes of each pair."""
    return tuple(
        Traffic(
            Fraction(sum(size for (a, b), size in pairs.items() if a == i != b)),
            Fraction(sum(size for (a, b), size in pairs.items() if b == i != a)),
        )
        for i in range(len(topology.islands))
    )


def bound(topology: Topology, request: Request, counts: Counts) -> tuple[Traffic, ...]:
    """What must leave and enter each island: the table of ``docs/algorithms.md``.

    Raises ValueError for kinds without one: send, recv and barrier.
    """
    sizes = [len(island) for island in topology.islands]
    islands, ranks = len(sizes), topology.size
    kind = request.kind
    if kind is Kind.ALL_REDUCE:
        each = Fraction(2 * (islands - 1), islands) * _one(counts)
        pairs = [(each, each)] * islands
    elif kind in (Kind.BROADCAST, Kind.REDUCE):
        pairs = _chain_bound(topology, request, _one(counts))
    elif kind in (Kind.GATHER, Kind.SCATTER):
        pairs = _rooted_bound(topology, request, _one(counts))
    elif kind in (Kind.ALL_GATHER, Kind.ALL_GATHER_V, Kind.REDUCE_SCATTER, Kind.REDUCE_SCATTER_V):
        blocks = block_counts(counts, 0) if BY_KIND[kind].ragged else [_one(counts)] * ranks
        own = [sum(blocks[rank] for rank in island) for island in topology.islands]
        pairs = [(Fraction((islands - 1) * mine), Fraction(sum(own) - mine)) for mine in own]
        if kind in (Kind.REDUCE_SCATTER, Kind.REDUCE_SCATTER_V):
            pairs = [(enter, leave) for leave, enter in pairs]
    elif kind in (Kind.ALL_TO_ALL, Kind.ALL_TO_ALL_V):
        pairs = _exchange_bound(topology, kind, counts)
    else:
        raise ValueError(f"there is no bound for {BY_KIND[kind].name}")
    return tuple(Traffic(leave * request.item, enter * request.item) for leave, enter in pairs)


def _one(counts: Counts) -> int:
    if not isinstance(counts, int):
        raise ValueError(f"one count is needed, not {counts!r}")
    return counts


def _chain_bound(topology: Topology, request: Request, count: int) -> list[tuple[Fraction, Fraction]]:
    """A chain from the root's island through the others, in their order: the ends send or receive nothing."""
    home = topology.island_of(request.root)
    chain = [home, *(i for i in range(len(topology.islands)) if i != home)]
    ahead = {i: Fraction(count if i != chain[-1] else 0) for i in chain}
    behind = {i: Fraction(count if i != home else 0) for i in chain}
    away = request.kind is Kind.BROADCAST
    return [(ahead[i], behind[i]) if away else (behind[i], ahead[i]) for i in sorted(chain)]


def _rooted_bound(topology: Topology, request: Request, count: int) -> list[tuple[Fraction, Fraction]]:
    """gather and scatter: each block that is not in the root's island crosses once."""
    home = topology.island_of(request.root)
    inward = []
    for i, island in enumerate(topology.islands):
        own = Fraction(count * len(island))
        inward.append((Fraction(0), count * topology.size - own) if i == home else (own, Fraction(0)))
    return inward if request.kind is Kind.GATHER else [(enter, leave) for leave, enter in inward]


def _exchange_bound(topology: Topology, kind: Kind, counts: Counts) -> list[tuple[Fraction, Fraction]]:
    """all_to_all: every block between two islands crosses once."""
    ranks = range(topology.size)
    matrix = [block_counts(counts, rank) if kind is Kind.ALL_TO_ALL_V else [_one(counts)] * len(ranks) for rank in ranks]
    pairs = []
    for island in topology.islands:
        outside = [rank for rank in ranks if rank not in island]
        leave = sum(matrix[a][b] for a in island for b in outside)
        enter = sum(matrix[a][b] for a in outside for b in island)
        pairs.append((Fraction(leave), Fraction(enter)))
    return pairs


def describe(written: Plan) -> str:
    """A listing of a plan for people: sections, and in each a numbered line per step."""
    lines = [f"{written.name} ({Reduction(written.reduction).name})" if written.reduction else written.name]
    for title, section in zip(("main", "tail"), written.sections(), strict=False):
        loop = f"chunks of {section.chunk}" if section.chunk else "one iteration"
        ragged = ", blocks of unequal lengths" if section.ragged else ""
        scratch = " ".join(str(size) for size in section.scratch) or "none"
        lines.append(f"  {title}: {loop}, unit {section.unit}{ragged}; scratch: {scratch}")
        lines += [f"    {number:3} {_describe_step(written.kind, step)}" for number, step in enumerate(section.steps)]
    return "\n".join(lines)


def _describe_step(kind: Kind, step: Step) -> str:
    what = Kind(step.kind).name.lower() if step.verb is Verb.LOCAL else ""
    words = [f"{step.lane.name.lower():5}", f"{step.verb.name.lower():6}", what]
    words.append(", ".join(_describe_slice(kind, part) for part in step.src))
    if step.dst:
        words.append("-> " + ", ".join(_describe_slice(kind, part) for part in step.dst))
    if step.root >= 0:
        words.append(f"root {step.root}")
    if step.peer >= 0:
        words.append(f"{'to' if step.verb is Verb.SEND else 'from'} rank {step.peer}")
    if step.factor is not Factor.ONE:
        words.append(f"times {step.factor.name.lower()}")
    if step.deps:
        words.append(f"after {', '.join(str(position) for position in step.deps)}")
    return " ".join(word for word in words if word)


def _describe_slice(kind: Kind, part: Slice) -> str:
    if part.buffer >= Buffer.SCRATCH:
        name = f"scratch{part.buffer - Buffer.SCRATCH}"
    else:
        side = Buffer(part.buffer)
        shape = BY_KIND[kind].input if side is Buffer.INPUT else BY_KIND[kind].output
        name = side.name.lower() + (f".{part.block}" if shape is Shape.BLOCKS else "")
    return name if part.lo == 0 and part.hi == 1 else f"{name}[{part.lo}:{part.hi}]"


__all__ = ["Counts", "Islands", "Traffic", "block_counts", "bound", "describe", "payload", "traffic"]
