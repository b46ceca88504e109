"""all_gather and reduce_scatter over islands: blocks cross the link once per island that lacks them, or as one partial.

The two are mirror images. Take two islands, i with the blocks and D without, and lay i's n_i blocks in a row, the *domain* of i.
It is cut in n_i by the ranks whose blocks they are, and in n_D by the rails of D that carry it. Each overlap of the two
partitions is one message, n_i + n_D - gcd(n_i, n_D) in all: in all_gather from the block's rank to the rail, which then
all-gathers inside D; in reduce_scatter from the rail, which holds that part of D's partial after one local reduce_scatter, to
the block's rank, which reduces the K partials in island order.

Bytes (S in the full buffer, N ranks, K islands): all_gather E_i = (K-1) n_i S/N, I_i = S (1 - n_i/N); reduce_scatter the reverse,
which are the lower bounds of direct schemes (every island needs each foreign block once).

The by-block schemes cut no block: block b is carried by one rail of each other island. They serve blocks of unequal lengths, and
island sizes with so large a common multiple that no reasonable chunk divides by it. They move the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

from ..spec import BY_KIND, Kind
from .plan import Lane, Section, SectionBuilder, Slice, overlaps
from .task import Task, common_cuts

PartOf = Callable[[int, int, Fraction, Fraction], Slice]
"""``part(j, owner, lo, hi)``: where a rank holds ``[lo, hi)`` of the domain of island j, within the block at ``owner``."""


def _cuts(task: Task) -> int:
    """What blocks must be divisible by, for the domain of every island to be cut by the rails of every other."""
    return common_cuts(Fraction(a, b) for a in task.sizes for b in task.sizes)


def _rail_pieces(task: Task, domain: int, rails: int, rail: int) -> Iterator[tuple[int, Fraction, Fraction]]:
    """What ``rail`` of ``rails`` carries of the domain of an island: ``(position of the block's rank, lo, hi)``, in order.

    ``lo`` and ``hi`` count from the begin of the domain, in blocks.
    """
    size = task.sizes[domain]
    for owner, carrier, lo, hi in overlaps(size, rails, whole=size):
        if carrier == rail:
            yield owner, lo, hi


def _block_pieces(task: Task, rails: int) -> Iterator[tuple[int, Fraction, Fraction]]:
    """How the rails of another island share this rank's block: ``(rail, lo, hi)``, counted from the begin of the block."""
    p = task.position
    for owner, carrier, lo, hi in overlaps(task.n, rails, whole=task.n):
        if owner == p:
            yield carrier, lo - p, hi - p


def _offsets(task: Task, rails: int) -> dict[int, Fraction]:
    """Where a rail of this island, of ``rails``, keeps its share of each other island's domain: shares lie one after another."""
    offsets: dict[int, Fraction] = {}
    at = Fraction(0)
    for j in range(len(task.islands)):
        if j != task.home:
            offsets[j] = at
            at += Fraction(task.sizes[j], rails)
    return offsets


# --- all_gather -----------------------------------------------------------------------------------------------------------------


def all_gather(task: Task) -> tuple[str, Section]:
    """The plan for bandwidth: rails that share blocks where chunks divide, else by block."""
    size = task.topology.size
    fitted = task.fit(size, _cuts(task), size)
    if fitted is None:
        return "by_block", _all_gather_by_block(task, task.whole(size, 1))
    b = task.builder(*fitted)
    _gather_own_island(b, task)
    pool, own = _receive_shares(b, task)
    for j in task.others:
        for rail, lo, hi in _block_pieces(task, task.sizes[j]):
            b.send(b.input().part(lo, hi), task.islands[j][rail])
    if pool is not None and own is not None:
        b.local(Kind.ALL_GATHER, own, pool, lane=Lane.POST)
        b.copy(_unpack(b, task, pool), Lane.POST)
    return "rails", b.build()


def _gather_own_island(b: SectionBuilder, task: Task) -> Slice:
    """Gather the island's blocks and copy them to their places; returns the gathered blocks, one after another.

    This rank's own block is copied first, so that messages with it need not wait for the island.
    """
    b.copy([(b.input(), b.output(task.rank))], task.before)
    if task.alone:
        return b.input()
    gathered = b.new_scratch(task.n)
    b.local(Kind.ALL_GATHER, b.input(), gathered)
    rest = [(gathered.part(p, p + 1), b.output(rank)) for p, rank in enumerate(task.island) if rank != task.rank]
    b.copy(rest, Lane.PRE)
    return gathered


def _receive_shares(b: SectionBuilder, task: Task) -> tuple[Slice | None, Slice | None]:
    """Receive this rail's share of every foreign domain; returns the scratch of all rails' shares, and this rail's part of it.

    A lone rank carries whole domains, and receives them where they belong.
    """
    offsets = _offsets(task, task.n)
    share = Fraction(task.topology.size - task.n, task.n)
    pool = None if task.alone else b.new_scratch(share * task.n)
    own = None if pool is None else pool.part(share * task.position, share * (task.position + 1))
    for j in task.others:
        begin = Fraction(task.sizes[j] * task.position, task.n)
        for owner, lo, hi in _rail_pieces(task, j, task.n, task.position):
            sender = task.islands[j][owner]
            if own is None:
                b.recv(b.output(sender), sender)
            else:
                b.recv(own.part(offsets[j] + lo - begin, offsets[j] + hi - begin), sender)
    return pool, own


def _unpack(b: SectionBuilder, task: Task, pool: Slice) -> list[tuple[Slice, Slice]]:
    """The copies from the gathered shares of all rails to the blocks of OUTPUT."""
    offsets = _offsets(task, task.n)
    share = Fraction(task.topology.size - task.n, task.n)
    moves = []
    for j, offset in offsets.items():
        for rail in range(task.n):
            begin = share * rail + offset - Fraction(task.sizes[j] * rail, task.n)
            for owner, lo, hi in _rail_pieces(task, j, task.n, rail):
                target = b.output(task.islands[j][owner]).part(lo - owner, hi - owner)
                moves.append((pool.part(begin + lo, begin + hi), target))
    return moves


def all_gather_v(task: Task) -> tuple[str, Section]:
    """all_gather of blocks of unequal lengths, by block."""
    return "by_block", _all_gather_by_block(task, task.whole(task.topology.size, 1))


def _all_gather_by_block(task: Task, chunk: int) -> Section:
    """Each block goes to one rail of every other island, chosen by its rank's position, and is broadcast inside each island."""
    b = task.builder(chunk=chunk, ragged=BY_KIND[task.request.kind].ragged)
    own = b.input()
    b.copy([(own, b.output(task.rank))], task.before)
    if not task.alone:
        for position, rank in enumerate(task.island):
            _broadcast_block(b, task, rank, position, Lane.PRE)
    for j in task.others:
        for position in range(task.position, task.sizes[j], task.n):
            b.recv(b.output(task.islands[j][position]), task.islands[j][position])
    for j in task.others:
        b.send(own, task.islands[j][task.position % task.sizes[j]])
    if not task.alone:
        for j in range(len(task.islands)):
            if j != task.home:
                for position, rank in enumerate(task.islands[j]):
                    _broadcast_block(b, task, rank, position % task.n, Lane.POST)
    return b.build()


def _broadcast_block(b: SectionBuilder, task: Task, block: int, root: int, lane: Lane) -> None:
    """Broadcast block ``block`` of OUTPUT inside the island, in place."""
    held = b.output(block) if task.position == root else None
    b.local(Kind.BROADCAST, held, b.output(block), root=root, lane=lane)


def all_gather_latency(task: Task) -> Section:
    """For few bytes: one local all_gather, and one crossing of an island's gathered blocks to every foreign rank."""
    b = task.builder()
    gathered = _gather_own_island(b, task)
    landed: list[tuple[Slice, Slice]] = []
    for j in task.others:
        sender = task.islands[j][task.position % task.sizes[j]]
        if task.sizes[j] == 1:
            b.recv(b.output(sender), sender)
            continue
        inbox = b.new_scratch(task.sizes[j])
        b.recv(inbox, sender)
        landed += [(inbox.part(p, p + 1), b.output(rank)) for p, rank in enumerate(task.islands[j])]
    for j in task.others:
        for position in range(task.position, task.sizes[j], task.n):
            b.send(gathered, task.islands[j][position])
    b.copy(landed, Lane.CROSS)
    return b.build()


# --- reduce_scatter -------------------------------------------------------------------------------------------------------------


def reduce_scatter(task: Task) -> tuple[str, Section]:
    """The plan for bandwidth: rails that share blocks where chunks divide, else by block."""
    size = task.topology.size
    fitted = task.fit(size, _cuts(task), 2 * size + len(task.islands))
    if fitted is None:
        return "by_block", _reduce_scatter_by_block(task, _by_block_chunk(task))
    b = task.builder(*fitted)
    mine = _reduce_packed(b, task)
    if mine is None:
        own, foreign = task.rank, {q: task.scaled_input(b, q) for q in range(size)}
        partials = _exchange_partials(b, task, foreign[own], lambda j, owner, lo, hi: foreign[task.islands[j][owner]])
    else:
        offsets = _offsets(task, task.n)
        shares = mine.part(1, mine.size)

        def part(j: int, owner: int, lo: Fraction, hi: Fraction) -> Slice:
            begin = offsets[j] - Fraction(task.sizes[j] * task.position, task.n)
            return shares.part(begin + lo, begin + hi)

        partials = _exchange_partials(b, task, mine.part(0, 1), part)
    b.reduce(b.output(), partials, task.last_factor)
    return "rails", b.build()


def _reduce_packed(b: SectionBuilder, task: Task) -> Slice | None:
    """One local reduce_scatter that leaves each rank with its own block's partial and its share of every foreign domain.

    The blocks are packed for it: for each rank of the island its own block, then its shares of the other islands' domains. None
    for a lone rank, whose blocks are their own partials.
    """
    if task.alone:
        return None
    pack = b.new_scratch(task.topology.size)
    width = Fraction(task.topology.size, task.n)
    offsets = _offsets(task, task.n)
    moves = []
    for p, rank in enumerate(task.island):
        moves.append((b.input(rank), pack.part(width * p, width * p + 1)))
        for j, offset in offsets.items():
            begin = width * p + 1 + offset - Fraction(task.sizes[j] * p, task.n)
            for owner, lo, hi in _rail_pieces(task, j, task.n, p):
                source = b.input(task.islands[j][owner]).part(lo - owner, hi - owner)
                moves.append((source, pack.part(begin + lo, begin + hi)))
    b.copy(moves, Lane.PRE)
    _scale_in_place(b, task, pack)
    mine = b.new_scratch(width)
    b.local(Kind.REDUCE_SCATTER, pack, mine)
    return mine


def _scale_in_place(b: SectionBuilder, task: Task, pack: Slice) -> None:
    """Multiply what has been packed, where operands are scaled first."""
    if task.first_factor:
        b.scale(pack, pack, task.first_factor)


def _exchange_partials(b: SectionBuilder, task: Task, own: Slice, part: PartOf) -> list[Slice]:
    """Send what this rank holds of the partials of foreign blocks; returns the K partials of its own block, in island order."""
    partials = {task.home: own}
    for j in task.others:
        partials[j] = b.new_scratch(1)
        for rail, lo, hi in _block_pieces(task, task.sizes[j]):
            b.recv(partials[j].part(lo, hi), task.islands[j][rail])
    for j in task.others:
        for owner, lo, hi in _rail_pieces(task, j, task.n, task.position):
            b.send(part(j, owner, lo, hi), task.islands[j][owner])
    return [partials[j] for j in range(len(task.islands))]


def reduce_scatter_v(task: Task) -> tuple[str, Section]:
    """reduce_scatter of blocks of unequal lengths, by block."""
    return "by_block", _reduce_scatter_by_block(task, _by_block_chunk(task))


def _by_block_chunk(task: Task) -> int:
    size = task.topology.size
    return task.whole(size, 2 * size + len(task.islands))


def _reduce_scatter_by_block(task: Task, chunk: int) -> Section:
    """Each block is reduced inside each island to one rail, chosen by its owner's position; the rails send to the owner."""
    b = task.builder(chunk=chunk, ragged=BY_KIND[task.request.kind].ragged)
    held: dict[int, Slice] = {}
    for j, island in enumerate(task.islands):
        for position, block in enumerate(island):
            operand = task.scaled_input(b, block)
            if task.alone:
                held[block] = operand
                continue
            rail = position if j == task.home else position % task.n
            if rail == task.position:
                held[block] = b.new_scratch(1, block if b.ragged else 0)
            b.local(Kind.REDUCE, operand, held.get(block), root=rail)
    partials = {task.home: held[task.rank]}
    for j in task.others:
        partials[j] = b.new_scratch(1, task.rank if b.ragged else 0)
        b.recv(partials[j], task.islands[j][task.position % task.sizes[j]])
    for j in task.others:
        for owner in task.islands[j]:
            if owner in held:
                b.send(held[owner], owner)
    b.reduce(b.output(), [partials[j] for j in range(len(task.islands))], task.last_factor)
    return b.build()


def reduce_scatter_latency(task: Task) -> Section:
    """For few bytes: one local all_reduce of all blocks, and one crossing of a partial to each block's rank."""
    b = task.builder()
    size = task.topology.size
    if task.alone:
        blocks = [task.scaled_input(b, q) for q in range(size)]
    else:
        pack, total = b.new_scratch(size), b.new_scratch(size)
        b.copy([(b.input(q), pack.part(q, q + 1)) for q in range(size)], Lane.PRE)
        _scale_in_place(b, task, pack)
        b.local(Kind.ALL_REDUCE, pack, total)
        blocks = [total.part(q, q + 1) for q in range(size)]
    partials = {task.home: blocks[task.rank]}
    for j in task.others:
        partials[j] = b.new_scratch(1)
        b.recv(partials[j], task.islands[j][task.position % task.sizes[j]])
    for j in task.others:
        for position in range(task.position, task.sizes[j], task.n):
            owner = task.islands[j][position]
            b.send(blocks[owner], owner)
    b.reduce(b.output(), [partials[j] for j in range(len(task.islands))], task.last_factor)
    return b.build()


__all__ = [
    "all_gather",
    "all_gather_latency",
    "all_gather_v",
    "reduce_scatter",
    "reduce_scatter_latency",
    "reduce_scatter_v",
]
