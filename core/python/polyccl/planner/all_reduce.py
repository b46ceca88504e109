"""all_reduce over islands.

For bandwidth: every island reduce-scatters a chunk, so that its n ranks hold one shard each; the islands' partitions are refined
into *segments* which in every island lie with one rank, and the holders of a segment reduce it among themselves; every island
gathers. Two islands swap whole segments and both add, the lower island's operand first: S bytes each way. More islands cut a
segment in K parts, part k is reduced by the holder in island k from all K operands at once, and handed out: 2(K-1)S/K bytes leave
and enter every island. Both are the lower bounds for operands of which only whole-island sums help (Chan, Heimlich, Purkayastha,
van de Geijn, "Collective communication: theory, practice, and experience", 2007, with an island in the place of a node), whatever
the islands' sizes, and need no padding: uneven partitions meet in a + b - gcd(a, b) segments.

Where island sizes have so large a common multiple that no reasonable chunk divides by it, one leader per island takes the place
of all rails: the same bytes, over one pair of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import lcm

from ..spec import Kind
from .plan import Lane, Section, SectionBuilder, Slice
from .task import Task

SCRATCH = 3
"""Bound on the lengths of scratch: the scaled input, a shard of the island's partial, and what other islands send."""


def segments(parts: Sequence[int]) -> list[tuple[Fraction, Fraction]]:
    """The common refinement of the equal partitions of ``[0, 1)`` in ``parts[0]``, ``parts[1]``, ... parts, in order."""
    return list(pairwise(sorted({Fraction(cut, count) for count in parts for cut in range(count + 1)})))


def bandwidth(task: Task) -> tuple[str, Section]:
    """The plan that reaches the bounds, with all ranks as rails where chunks divide, else with one leader per island."""
    spread = 1 if len(task.islands) == 2 else len(task.islands)
    fitted = task.fit(1, lcm(*task.sizes) * spread, SCRATCH)
    if fitted is not None:
        return "rails", _section(task, task.sizes, *fitted)
    leaders = (1,) * len(task.islands)
    fitted = task.fit(1, spread, SCRATCH) or (spread, spread)
    return "leaders", _section(task, leaders, *fitted)


def _section(task: Task, rails: Sequence[int], unit: int, chunk: int) -> Section:
    """The loop's body, where ``rails[i]`` ranks of island i (all of them, or its first) share the link."""
    b = task.builder(unit, chunk)
    count = rails[task.home]
    partial = _reduce_island(b, task, count)
    if partial is not None:
        origin = Fraction(task.position, count)
        for lo, hi in segments(rails):
            holders = [island[int(lo * k)] for island, k in zip(task.islands, rails, strict=True)]
            if holders[task.home] == task.rank:
                held = partial.part(lo - origin, hi - origin)
                exchange = _swap if len(task.islands) == 2 else _own_and_share
                exchange(b, task, holders, held, b.output().part(lo, hi))
    _spread_island(b, task, count)
    return b.build()


def _reduce_island(b: SectionBuilder, task: Task, rails: int) -> Slice | None:
    """Reduce inside the island; returns this rank's shard, None where it is no rail."""
    operand = task.scaled_input(b)
    if task.alone:
        return operand
    if rails > 1:
        shard = b.new_scratch(Fraction(1, rails))
        b.local(Kind.REDUCE_SCATTER, operand, shard)
        return shard
    whole = b.new_scratch(1) if task.position == 0 else None
    b.local(Kind.REDUCE, operand, whole, root=0)
    return whole


def _spread_island(b: SectionBuilder, task: Task, rails: int) -> None:
    """Give every rank of the island the whole of OUTPUT, of which each rail has its shard in place."""
    if task.alone:
        return
    if rails > 1:
        own = b.output().part(Fraction(task.position, rails), Fraction(task.position + 1, rails))
        b.local(Kind.ALL_GATHER, own, b.output(), lane=Lane.POST)
    else:
        b.local(Kind.BROADCAST, b.output() if task.position == 0 else None, b.output(), root=0, lane=Lane.POST)


def _swap(b: SectionBuilder, task: Task, holders: Sequence[int], held: Slice, result: Slice) -> None:
    """Two islands: each sends its operand whole, and both reduce the same operands in the same order."""
    other = 1 - task.home
    incoming = b.new_scratch(held.size)
    b.recv(incoming, holders[other])
    b.send(held, holders[other])
    operands = [held, incoming]
    b.reduce(result, operands if task.home == 0 else operands[::-1], task.last_factor)


def _own_and_share(b: SectionBuilder, task: Task, holders: Sequence[int], held: Slice, result: Slice) -> None:
    """More islands: the holder in island k reduces part k of the segment, and sends the result to the other holders."""
    count = len(task.islands)
    width = held.size / count
    inbox = {k: b.new_scratch(width) for k in task.others}
    own = result.part(width * task.home, width * (task.home + 1))
    for k in task.others:
        b.recv(inbox[k], holders[k])
    for k in task.others:
        b.send(held.part(width * k, width * (k + 1)), holders[k])
    inbox[task.home] = held.part(width * task.home, width * (task.home + 1))
    b.reduce(own, [inbox[k] for k in range(count)], task.last_factor)
    for k in task.others:
        b.recv(result.part(width * k, width * (k + 1)), holders[k])
    for k in task.others:
        b.send(own, holders[k])


def latency(task: Task) -> Section:
    """For few bytes: one local step, one crossing of the whole buffer, and a reduction on every rank.

    Rank r receives the partial of island j from the rank at position ``position(r) % n_j``. As all ranks reduce for themselves,
    each island's all_reduce must give its ranks equal bits; where one does not, leaders exchange and broadcast.
    """
    if any(len(island) > 1 and not same for island, same in zip(task.islands, task.topology.equal_bits, strict=True)):
        return _leaders_latency(task)
    b = task.builder()
    partial = task.scaled_input(b)
    if not task.alone:
        operand, partial = partial, b.new_scratch(1)
        b.local(Kind.ALL_REDUCE, operand, partial)
    operands = {task.home: partial}
    for j in task.others:
        operands[j] = b.new_scratch(1)
        b.recv(operands[j], task.islands[j][task.position % task.sizes[j]])
    for j in task.others:
        for position in range(task.position, task.sizes[j], task.n):
            b.send(partial, task.islands[j][position])
    b.reduce(b.output(), [operands[j] for j in range(len(task.islands))], task.last_factor)
    return b.build()


def _leaders_latency(task: Task) -> Section:
    """As `latency`, but only the first rank of each island exchanges and reduces, and broadcasts what it got."""
    b = task.builder()
    partial = _reduce_island(b, task, 1)
    if partial is not None:
        operands = {j: b.new_scratch(1) for j in task.others} | {task.home: partial}
        for j in task.others:
            b.recv(operands[j], task.islands[j][0])
        for j in task.others:
            b.send(partial, task.islands[j][0])
        b.reduce(b.output(), [operands[j] for j in range(len(task.islands))], task.last_factor)
    _spread_island(b, task, 1)
    return b.build()


__all__ = ["bandwidth", "latency", "segments"]
