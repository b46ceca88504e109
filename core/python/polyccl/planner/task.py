"""What one rank is asked to plan, and the numbers that all families of algorithms need for it.

`Options` and `Request` are what a plan depends on, beside the topology and the rank. `Task` puts the four together and answers
the questions that come up in every algorithm: which island is mine, who are the others, where is the scaling done, how long is a
chunk. Whatever must be equal on all ranks (unit, chunk, choice of algorithm) is computed here from facts that all ranks share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm

from ..spec import DTYPE_BYTES, Kind, Reduction
from .plan import Factor, Lane, SectionBuilder, Slice
from .topology import Topology

ALIGNMENT = 16
"""Slices begin at multiples of this many elements where chunks are long enough for it: vector loads, and whole cache lines."""

STRETCH = 4
"""A chunk may grow to this many times ``Options.chunk_bytes`` to be divisible; past that, a scheme with fewer cuts is taken."""


@dataclass(frozen=True)
class Options:
    """What a user may set. All ranks of a communicator must use the same.

    ``chunk_bytes`` is the size of one iteration, counted over the full buffer (all blocks of it). A full buffer of up to
    ``latency_bytes`` is done by the plan for small messages. ``scratch_bytes`` bounds the scratch that one iteration takes on
    any rank. ``deterministic`` makes the value of a reduction independent of its size and of the islands' shape.
    """

    chunk_bytes: int = 512 << 10
    latency_bytes: int = 16 << 10
    scratch_bytes: int = 8 << 20
    deterministic: bool = False


@dataclass(frozen=True)
class Request:
    """The part of a call that its plan depends on. ``root`` is a rank of the communicator; for send and recv it is the peer."""

    kind: Kind
    dtype: str = "uint8"
    reduction: Reduction = Reduction.NONE
    root: int = -1
    small: bool = False

    @property
    def item(self) -> int:
        """Bytes of one element."""
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Task:
    """One rank's view of a request."""

    request: Request
    topology: Topology
    rank: int
    options: Options

    @cached_property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """All islands, in their order."""
        return self.topology.islands

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of ranks of each island."""
        return tuple(len(island) for island in self.islands)

    @cached_property
    def home(self) -> int:
        """The index of this rank's island."""
        return self.topology.island_of(self.rank)

    @cached_property
    def position(self) -> int:
        """The index of this rank in its island."""
        return self.topology.position(self.rank)

    @property
    def island(self) -> tuple[int, ...]:
        """The ranks of this rank's island."""
        return self.islands[self.home]

    @property
    def n(self) -> int:
        """The number of ranks of this rank's island."""
        return len(self.island)

    @property
    def alone(self) -> bool:
        """True where this rank is an island of its own: there are no local steps then."""
        return self.n == 1

    @cached_property
    def others(self) -> tuple[int, ...]:
        """The other islands, beginning with the one after this rank's, so that not all start with the same one."""
        count = len(self.islands)
        return tuple((self.home + step) % count for step in range(1, count))

    @property
    def root(self) -> int:
        """The root rank."""
        return self.request.root

    @property
    def root_home(self) -> int:
        """The index of the root's island."""
        return self.topology.island_of(self.root)

    @property
    def before(self) -> Lane:
        """Where copies and scalings ahead of everything run. A lone rank has no local leg, so they need no lane of their own."""
        return Lane.CROSS if self.alone else Lane.PRE

    @property
    def reduction(self) -> Reduction:
        """What the steps apply: AVG and PREMUL_SUM are a SUM and a scaling."""
        scaled = self.request.reduction in (Reduction.AVG, Reduction.PREMUL_SUM)
        return Reduction.SUM if scaled else self.request.reduction

    @property
    def first_factor(self) -> Factor:
        """What each operand is multiplied by before anything else.

        An average of float16 is scaled at the start, since its sum may overflow where the average does not.
        """
        if self.request.reduction is Reduction.PREMUL_SUM:
            return Factor.CALL
        if self.request.reduction is Reduction.AVG and self.request.dtype == "float16":
            return Factor.AVERAGE
        return Factor.ONE

    @property
    def last_factor(self) -> Factor:
        """What the final REDUCE multiplies by."""
        late = self.request.reduction is Reduction.AVG and self.first_factor is Factor.ONE
        return Factor.AVERAGE if late else Factor.ONE

    def builder(self, unit: int = 1, chunk: int = 0, ragged: bool = False) -> SectionBuilder:
        """An empty section of this task."""
        return SectionBuilder(self.request.kind, self.rank, unit, chunk, ragged)

    def scaled_input(self, b: SectionBuilder, block: int = 0) -> Slice:
        """An operand of the reduction: an input block, or a scratch copy of it that has been scaled."""
        if self.first_factor is Factor.ONE:
            return b.input(block)
        scratch = b.new_scratch(1, block if b.ragged else 0)
        b.scale(scratch, b.input(block), self.first_factor, self.before)
        return scratch

    def fit(self, blocks: int, cuts: int, scratch: int) -> tuple[int, int] | None:
        """The unit and the chunk, in elements of a block; None where chunks would have to be too long.

        An iteration covers ``blocks`` blocks, cuts a block in places whose denominators divide ``cuts``, and needs at most
        ``scratch`` times its length of scratch on any rank. What is never cut has unit 1, and so no tail.
        """
        limit = min(self.options.chunk_bytes // max(1, blocks), self.options.scratch_bytes // max(1, scratch))
        limit //= self.request.item
        if cuts > STRETCH * max(1, limit):
            return None
        aligned = cuts
        while aligned < cuts * ALIGNMENT and 2 * aligned <= limit:
            aligned *= 2
        return 1 if cuts == 1 else aligned, max(1, limit // aligned) * aligned

    def whole(self, blocks: int, scratch: int) -> int:
        """The chunk, in elements of a block, of an algorithm that cuts no block."""
        fitted = self.fit(blocks, 1, scratch)
        if fitted is None:
            raise AssertionError("one element always fits")
        return fitted[1]


def common_cuts(parts: Iterable[Fraction]) -> int:
    """The least number by which lengths must be divisible for all of ``parts`` to be whole numbers of elements."""
    return lcm(1, *(part.denominator for part in parts))


__all__ = ["ALIGNMENT", "Options", "Request", "Task", "common_cuts"]
