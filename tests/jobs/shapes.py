"""Shapes of islands that the jobs run on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Islands as ``polyccl launch --islands`` writes them; with ``interleave`` ranks are dealt round them."""

    islands: str
    interleave: bool = False

    @property
    def places(self) -> list[tuple[str, str]]:
        """(backend, label of the island) of each rank."""
        counts = []
        for index, part in enumerate(self.islands.split(",")):
            backend, number = part.split("=")
            counts.append([(backend, f"{index}:{backend}")] * int(number))
        if not self.interleave:
            return [place for island in counts for place in island]
        rounds = range(max(map(len, counts)))
        return [island[turn] for turn in rounds for island in counts if turn < len(island)]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.places)

    def uses(self, backend: str) -> bool:
        """Whether an island has this backend."""
        return any(place[0] == backend for place in self.places)

    def __str__(self) -> str:
        return self.islands.replace("=", "").replace(",", "+") + ("-interleaved" if self.interleave else "")


BRIDGES = tuple(
    Shape(*each)
    for each in (
        ("host=2,host=2",),
        ("host=3,host=1",),
        ("host=1,host=1",),
        ("host=2,host=1,host=1",),
        ("host=2,host=2", True),
        ("gloo=2,gloo=2",),
        ("gloo=3,gloo=1",),
        ("gloo=2,host=1,host=1",),
        ("gloo=2,host=2", True),
        ("gloo=2,host=2",),
    )
)
PLAIN = tuple(Shape(each) for each in ("host=1", "host=2", "host=3", "gloo=2", "gloo=3"))
