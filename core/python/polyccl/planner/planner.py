"""The one entry to the planner: from what a call looks like to the plan of one rank.

All is pure and reads only its arguments. The plan of a rank is written without those of the others, and all ranks come to the
same choices, since these depend on request, topology and options alone.
"""

from __future__ import annotations

from collections.abc import Callable

from ..spec import BY_KIND, Kind, Shape, Who
from . import all_reduce, direct, gathering, rooted
from .plan import Factor, Plan, Section
from .staging import Memory, stage
from .task import Options, Request, Task
from .topology import Topology

Bandwidth = Callable[[Task], tuple[str, Section]]
"""Writes the main section for any number of bytes; returns the variant's name too."""

Latency = Callable[[Task], Section]
"""Writes the section for few bytes, with one iteration and no cuts, which also does the remainder of a cut buffer."""

ALGORITHMS: dict[Kind, tuple[Bandwidth, Latency | None]] = {
    Kind.SEND: (direct.send, None),
    Kind.RECV: (direct.recv, None),
    Kind.BROADCAST: (rooted.broadcast, rooted.broadcast_latency),
    Kind.ALL_REDUCE: (all_reduce.bandwidth, all_reduce.latency),
    Kind.REDUCE: (rooted.reduce, rooted.reduce_latency),
    Kind.ALL_GATHER: (gathering.all_gather, gathering.all_gather_latency),
    Kind.ALL_GATHER_V: (gathering.all_gather_v, None),
    Kind.REDUCE_SCATTER: (gathering.reduce_scatter, gathering.reduce_scatter_latency),
    Kind.REDUCE_SCATTER_V: (gathering.reduce_scatter_v, None),
    Kind.ALL_TO_ALL: (direct.all_to_all, None),
    Kind.ALL_TO_ALL_V: (direct.all_to_all, None),
    Kind.SCATTER: (direct.scatter, None),
    Kind.GATHER: (direct.gather, None),
    Kind.BARRIER: (direct.barrier, None),
}
"""Which functions write the plans of each kind."""


def small(kind: Kind, total_bytes: int, options: Options) -> bool:
    """Whether a full buffer of ``total_bytes`` is done by the plan for few bytes, where the kind has one."""
    return ALGORITHMS[kind][1] is not None and total_bytes <= options.latency_bytes


def plan(request: Request, topology: Topology, rank: int, options: Options | None = None, memory: Memory = Memory.HOST) -> Plan:
    """The plan of ``rank``, whose input and output lie in ``memory``; that of the others is none of its concern.

    Raises ValueError for what no plan exists: a rank or root that is not in the topology, an unknown dtype, and one island of
    several ranks, which needs no bridge.
    """
    options = options or Options()
    row = BY_KIND[request.kind]
    if len(topology.islands) == 1 and topology.size > 1:
        raise ValueError("one island of several ranks needs no bridge: its own communicator does the operation")
    if row.rooted:
        topology.island_of(request.root)
    if options.deterministic and row.reduces:
        topology = topology.flattened()
    task = Task(request, topology, rank, options)
    topology.island_of(rank)
    bandwidth, latency = ALGORITHMS[request.kind]
    tail = None
    if topology.size == 1:
        variant, main = "alone", _alone(task)
    elif request.small and latency is not None:
        variant, main = "latency", latency(task)
    else:
        variant, main = bandwidth(task)
        if main.unit > 1 and latency is not None:
            tail = latency(task)
    main = stage(main, request.kind, rank, memory)
    tail = tail and stage(tail, request.kind, rank, memory)
    strict = ".strict" if options.deterministic and row.reduces else ""
    return Plan(f"{row.name}.{variant}{strict}", request.kind, task.reduction, main, tail)


def _alone(task: Task) -> Section:
    """A world of one rank: what goes in comes out, multiplied where the call brings a factor. The average of one is itself."""
    row = BY_KIND[task.request.kind]
    if Who.NOBODY in (row.input_at, row.output_at) and task.request.kind is not Kind.BARRIER:
        raise ValueError(f"{row.name} needs a second rank")
    b = task.builder(chunk=task.whole(1, 1), ragged=row.ragged)
    if row.output is not Shape.NONE:
        if task.first_factor is Factor.CALL:
            b.scale(b.output(), b.input(), Factor.CALL, task.before)
        else:
            b.copy([(b.input(), b.output())], task.before)
    return b.build()


__all__ = ["ALGORITHMS", "Memory", "Options", "Request", "Topology", "plan", "small"]
