"""broadcast and reduce over islands: a chain of islands, so that none sends or receives the buffer more than once.

The chain begins with the root's island; the others follow in their order. For broadcast the root's island broadcasts a chunk
inside; its ranks send overlapping shards to the ranks of the next island, which forward them as they arrive, and gather them
inside. For reduce the chain runs towards the root: each island reduce-scatters inside, adds what came from the island before, and
passes its shards on; the root gathers them. S bytes enter (leave) every island but the root's once, and no island sends or
receives more than S, which is the lower bound on both counts; chunks pipeline along the chain.

With few bytes the root exchanges with one rank of each island directly: one crossing instead of K-1.
"""

from __future__ import annotations

from fractions import Fraction
from math import lcm

from ..spec import Kind
from .plan import Factor, Lane, Section, SectionBuilder, Slice, overlaps
from .task import Task

SCRATCH = 3
"""Bound on the lengths of scratch in a chain: the scaled input, an island's shard, and what the island before sends."""


def _chain(task: Task) -> list[int]:
    """The islands in the order of the chain, the root's first."""
    return [task.root_home, *(i for i in range(len(task.islands)) if i != task.root_home)]


def _lead(task: Task, island: int) -> int:
    """The rank that stands for an island: the root, or the first one."""
    return task.root if island == task.root_home else task.islands[island][0]


def _rails(task: Task, shared: bool) -> list[tuple[int, ...]]:
    """The ranks of each island that use the link: all of them where work is ``shared``, else its lead."""
    return [ranks if shared else (_lead(task, i),) for i, ranks in enumerate(task.islands)]


def _choose(task: Task) -> tuple[bool, int, int]:
    """Whether all ranks share the link; the unit; the chunk."""
    fitted = task.fit(1, lcm(*task.sizes), SCRATCH)
    if fitted is not None:
        return True, *fitted
    return False, 1, task.whole(1, SCRATCH)


def broadcast(task: Task) -> tuple[str, Section]:
    """The chain away from the root."""
    shared, unit, chunk = _choose(task)
    rails, chain = _rails(task, shared), _chain(task)
    place = chain.index(task.home)
    mine = rails[task.home]
    b = task.builder(unit, chunk)
    if place == 0:
        _broadcast_root_island(b, task)
    if task.rank in mine:
        rail = mine.index(task.rank)
        if place > 0:
            before = rails[chain[place - 1]]
            for sender, receiver, lo, hi in overlaps(len(before), len(mine)):
                if receiver == rail:
                    b.recv(b.output().part(lo, hi), before[sender])
        if place + 1 < len(chain):
            after = rails[chain[place + 1]]
            for sender, receiver, lo, hi in overlaps(len(mine), len(after)):
                if sender == rail:
                    b.send(b.output().part(lo, hi), after[receiver])
    if place > 0:
        _complete_island(b, task, mine)
    return "chain" if shared else "leader_chain", b.build()


def _broadcast_root_island(b: SectionBuilder, task: Task) -> None:
    """Give the ranks of the root's island their OUTPUT."""
    if task.alone:
        b.copy([(b.input(), b.output())], task.before)
    else:
        source = b.input() if task.rank == task.root else None
        b.local(Kind.BROADCAST, source, b.output(), root=task.topology.position(task.root))


def _complete_island(b: SectionBuilder, task: Task, rails: tuple[int, ...]) -> None:
    """Give all ranks of the island what its rails have received in place in OUTPUT."""
    if task.alone:
        return
    if len(rails) > 1:
        own = b.output().part(Fraction(task.position, task.n), Fraction(task.position + 1, task.n))
        b.local(Kind.ALL_GATHER, own, b.output(), lane=Lane.POST)
    else:
        b.local(Kind.BROADCAST, b.output() if task.position == 0 else None, b.output(), root=0, lane=Lane.POST)


def broadcast_latency(task: Task) -> Section:
    """For few bytes: the root sends to the first rank of every other island, which broadcasts inside."""
    b = task.builder()
    lead = _lead(task, task.home)
    if task.home == task.root_home:
        _broadcast_root_island(b, task)
        if task.rank == task.root:
            for j in task.others:
                b.send(b.output(), _lead(task, j))
        return b.build()
    if task.rank == lead:
        b.recv(b.output(), task.root)
    _complete_island(b, task, (lead,))
    return b.build()


def reduce(task: Task) -> tuple[str, Section]:
    """The chain towards the root; strictly in rank order, and at once at the root, where values must not depend on the shape."""
    if task.options.deterministic:
        return "star", _star(task, task.builder(chunk=task.whole(1, task.topology.size + 1)))
    shared, unit, chunk = _choose(task)
    rails, chain = _rails(task, shared), _chain(task)
    place = chain.index(task.home)
    b = task.builder(unit, chunk)
    partial = _reduce_island(b, task, shared)
    if partial is not None:
        before = rails[chain[place + 1]] if place + 1 < len(chain) else ()
        result = _accumulate(b, task, partial, before, rails[task.home])
        if place > 0:
            _pass_on(b, task, result, rails[task.home], rails[chain[place - 1]])
        elif len(rails[task.home]) > 1:
            target = b.output() if task.rank == task.root else None
            b.local(Kind.GATHER, result, target, root=task.topology.position(task.root), lane=Lane.POST)
    return "chain" if shared else "leader_chain", b.build()


def _reduce_island(b: SectionBuilder, task: Task, shared: bool) -> Slice | None:
    """Reduce inside the island; returns this rank's shard (the whole at a lead), None where it is no rail."""
    operand = task.scaled_input(b)
    if task.alone:
        return operand
    if shared:
        shard = b.new_scratch(Fraction(1, task.n))
        b.local(Kind.REDUCE_SCATTER, operand, shard)
        return shard
    lead = _lead(task, task.home)
    whole = b.new_scratch(1) if task.rank == lead else None
    b.local(Kind.REDUCE, operand, whole, root=task.topology.position(lead))
    return whole


def _accumulate(b: SectionBuilder, task: Task, partial: Slice, before: tuple[int, ...], mine: tuple[int, ...]) -> Slice:
    """Add what the island ``before`` sends to this rank's partial, piece by piece; returns where the sum is.

    A single rail of the root's island writes OUTPUT; the others add into what they received, since INPUT is not theirs to write.
    """
    if not before:
        return partial
    rail = mine.index(task.rank)
    origin = Fraction(rail, len(mine))
    inbox = b.new_scratch(Fraction(1, len(mine)))
    final = task.home == task.root_home
    result = b.output() if final and len(mine) == 1 else inbox
    factor = task.last_factor if final else Factor.ONE
    pieces = [(s, lo - origin, hi - origin) for s, r, lo, hi in overlaps(len(before), len(mine)) if r == rail]
    for sender, lo, hi in pieces:
        b.recv(inbox.part(lo, hi), before[sender])
    for _, lo, hi in pieces:
        b.reduce(result.part(lo, hi), [partial.part(lo, hi), inbox.part(lo, hi)], factor)
    return result


def _pass_on(b: SectionBuilder, task: Task, result: Slice, mine: tuple[int, ...], after: tuple[int, ...]) -> None:
    """Send this rank's shard to the rails of the next island."""
    rail = mine.index(task.rank)
    origin = Fraction(rail, len(mine))
    for sender, receiver, lo, hi in overlaps(len(mine), len(after)):
        if sender == rail:
            b.send(result.part(lo - origin, hi - origin), after[receiver])


def reduce_latency(task: Task) -> Section:
    """For few bytes: every island reduces to its lead, and the leads send to the root, which reduces once, in island order."""
    return _star(task, task.builder())


def _star(task: Task, b: SectionBuilder) -> Section:
    partial = _reduce_island(b, task, shared=False)
    if partial is None:
        return b.build()
    if task.rank != task.root:
        b.send(partial, task.root)
        return b.build()
    operands = {j: b.new_scratch(1) for j in task.others} | {task.home: partial}
    for j in task.others:
        b.recv(operands[j], _lead(task, j))
    b.reduce(b.output(), [operands[j] for j in range(len(task.islands))], task.last_factor)
    return b.build()


__all__ = ["broadcast", "broadcast_latency", "reduce", "reduce_latency"]
