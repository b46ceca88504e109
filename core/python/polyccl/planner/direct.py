"""Operations where every byte has one sender and one receiver: send, recv, gather, scatter, all_to_all; and barrier.

There is nothing to save but messages: a block goes straight to where it belongs, over the island's library where both ranks share
it, else over the link. An island sends n_i (N - n_i) blocks in an all_to_all, and each block of a gather or scatter crosses once.
"""

from __future__ import annotations

from ..spec import BY_KIND, Kind
from .plan import Lane, Section, SectionBuilder, Slice
from .task import Task


def _lane(task: Task, peer: int) -> Lane:
    """How to reach ``peer``: over the island's communicator, in lane pre, or over the link."""
    return Lane.PRE if peer in task.island else Lane.CROSS


def _in_lane_order(task: Task, peers: list[int]) -> list[int]:
    """The peers of this island first, so that their messages form one fused group."""
    return sorted(peers, key=lambda peer: _lane(task, peer))


def _section(task: Task, blocks: int) -> SectionBuilder:
    return task.builder(chunk=task.whole(blocks, 1), ragged=BY_KIND[task.request.kind].ragged)


def send(task: Task) -> tuple[str, Section]:
    """One message to ``request.root``."""
    b = _section(task, 1)
    b.send(b.input(), _peer(task), _lane(task, task.root))
    return "direct", b.build()


def recv(task: Task) -> tuple[str, Section]:
    """One message from ``request.root``."""
    b = _section(task, 1)
    b.recv(b.output(), _peer(task), _lane(task, task.root))
    return "direct", b.build()


def _peer(task: Task) -> int:
    task.topology.island_of(task.root)
    if task.root == task.rank:
        raise ValueError(f"rank {task.rank} cannot exchange messages with itself")
    return task.root


def gather(task: Task) -> tuple[str, Section]:
    """Every rank sends its block to the root, into its place."""
    b = _section(task, task.topology.size)
    if task.rank != task.root:
        b.send(b.input(), task.root, _lane(task, task.root))
        return "direct", b.build()
    b.copy([(b.input(), b.output(task.rank))], task.before)
    for peer in _in_lane_order(task, _after(task)):
        b.recv(b.output(peer), peer, _lane(task, peer))
    return "direct", b.build()


def scatter(task: Task) -> tuple[str, Section]:
    """The root sends every rank its block."""
    b = _section(task, task.topology.size)
    if task.rank != task.root:
        b.recv(b.output(), task.root, _lane(task, task.root))
        return "direct", b.build()
    b.copy([(b.input(task.rank), b.output())], task.before)
    for peer in _in_lane_order(task, _after(task)):
        b.send(b.input(peer), peer, _lane(task, peer))
    return "direct", b.build()


def all_to_all(task: Task) -> tuple[str, Section]:
    """Pairwise exchange. In turn s rank r sends to r + s and receives from r - s, so that no rank is everybody's peer at once."""
    size = task.topology.size
    b = _section(task, size)
    b.copy([(b.input(task.rank), b.output(task.rank))], task.before)
    for lane in (Lane.PRE, Lane.CROSS):
        for turn in range(1, size):
            source, target = (task.rank - turn) % size, (task.rank + turn) % size
            if _lane(task, source) is lane:
                b.recv(b.output(source), source, lane)
            if _lane(task, target) is lane:
                b.send(b.input(target), target, lane)
    return "direct", b.build()


def _after(task: Task) -> list[int]:
    """The other ranks, beginning with the next one."""
    size = task.topology.size
    return [(task.rank + turn) % size for turn in range(1, size)]


def barrier(task: Task) -> tuple[str, Section]:
    """Islands meet inside, their first ranks exchange tokens of one element, and islands meet inside again.

    The local barriers name the tokens as if they wrote and read them. They move nothing, but so the messages wait for the first
    barrier, and the second one for the messages.
    """
    b = task.builder()
    token = b.new_scratch(1)
    if not task.alone:
        b.local(Kind.BARRIER, None, token)
    arrived: Slice = token
    if task.position == 0:
        inbox = b.new_scratch(len(task.islands) - 1)
        for k, j in enumerate(task.others):
            b.recv(inbox.part(k, k + 1), task.islands[j][0])
        for j in task.others:
            b.send(token, task.islands[j][0])
        arrived = inbox
    if not task.alone:
        b.local(Kind.BARRIER, arrived, None, lane=Lane.POST)
    return "leaders", b.build()


__all__ = ["all_to_all", "barrier", "gather", "recv", "scatter", "send"]
