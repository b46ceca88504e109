"""Which ranks share a vendor library: the islands of a communicator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The islands of a communicator.

    ``islands[i]`` holds the ranks (of the communicator) of island i, ascending; islands are ordered by their lowest rank. Every
    rank in ``range(size)`` is in exactly one. ``equal_bits[i]`` says that island i's all_reduce gives the same bits on all of
    its ranks; left out, it is true of every island.
    """

    islands: tuple[tuple[int, ...], ...]
    equal_bits: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        ranks = [rank for island in self.islands for rank in island]
        if not ranks or sorted(ranks) != list(range(len(ranks))):
            raise ValueError(f"the islands {self.islands} do not hold each of the ranks 0, 1, ... once")
        if not all(self.islands) or any(list(island) != sorted(island) for island in self.islands):
            raise ValueError(f"the islands {self.islands} must have ranks, in ascending order")
        if [island[0] for island in self.islands] != sorted(island[0] for island in self.islands):
            raise ValueError(f"the islands {self.islands} must be ordered by their lowest rank")
        if not self.equal_bits:
            object.__setattr__(self, "equal_bits", (True,) * len(self.islands))
        if len(self.equal_bits) != len(self.islands):
            raise ValueError(f"{len(self.equal_bits)} values of equal_bits for {len(self.islands)} islands")
        places = {rank: (i, p) for i, island in enumerate(self.islands) for p, rank in enumerate(island)}
        object.__setattr__(self, "_places", places)

    @classmethod
    def singletons(cls, size: int) -> Topology:
        """``size`` islands of one rank each: a communicator where every message takes the link."""
        return cls(tuple((rank,) for rank in range(size)))

    @classmethod
    def of_labels(cls, labels: Iterable[object]) -> Topology:
        """The topology in which rank r is in the island named by the r-th label, e.g. ``of_labels("ABAB")``."""
        members: dict[object, list[int]] = {}
        for rank, label in enumerate(labels):
            members.setdefault(label, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in members.values()))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(len(island) for island in self.islands)

    def island_of(self, rank: int) -> int:
        """The index of the island that holds ``rank``."""
        return self._place(rank)[0]

    def position(self, rank: int) -> int:
        """The index of ``rank`` inside its island."""
        return self._place(rank)[1]

    def flattened(self) -> Topology:
        """The same ranks, each an island of its own."""
        return Topology.singletons(self.size)

    def _place(self, rank: int) -> tuple[int, int]:
        places: dict[int, tuple[int, int]] = self._places  # type: ignore[attr-defined]
        if rank not in places:
            raise ValueError(f"there is no rank {rank} among {self.size}")
        return places[rank]


__all__ = ["Topology"]
