"""What the planner's tests draw from: topologies, requests, counts and options."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from polyccl.planner import Options, Request, Topology
from polyccl.planner.payload import Counts
from polyccl.spec import BY_KIND, Kind, Reduction

COLLECTIVES = [kind for kind in Kind if BY_KIND[kind].collective]
REDUCING = [kind for kind in COLLECTIVES if BY_KIND[kind].reduces]
BOUNDED = [kind for kind in COLLECTIVES if kind is not Kind.BARRIER]
LAYOUTS = ["AABB", "AAAB", "AAAAAABB", "ABAB", "AABC", "ABAAB", "ABCDE", "AB", "AAAABCCDDE"]
"""Islands by label of each rank: even, uneven, interleaved, lone ranks, three and more islands."""

EXACT = [Reduction.SUM, Reduction.PRODUCT, Reduction.MIN, Reduction.MAX, Reduction.AVG, Reduction.PREMUL_SUM]
BITS = [Reduction.BAND, Reduction.BOR, Reduction.BXOR]


@st.composite
def topologies(draw: st.DrawFn, islands: int = 5, ranks: int = 6, most: int = 12) -> Topology:
    """Up to ``islands`` islands of up to ``ranks`` ranks, ``most`` in all, that lie in any order; one island of one rank too."""
    sizes = draw(st.lists(st.integers(1, ranks), min_size=1, max_size=islands))
    while sum(sizes) > most:
        sizes[sizes.index(max(sizes))] -= 1
    if len(sizes) == 1:
        sizes = [1] if draw(st.booleans()) else [1, *sizes]
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    topology = Topology.of_labels(draw(st.permutations(labels)))
    equal_bits = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    return Topology(topology.islands, tuple(equal_bits))


@st.composite
def requests(draw: st.DrawFn, size: int, kinds: list[Kind]) -> Request:
    """A request of one of ``kinds``, with any reduction that its dtype allows."""
    kind = draw(st.sampled_from(kinds))
    row = BY_KIND[kind]
    dtype, reduction = draw(st.sampled_from(["int32", "float32", "uint8", "bool", "float16"])), Reduction.NONE
    if row.reduces:
        dtype = draw(st.sampled_from(["int32", "int64", "float32", "float64", "float16", "bool"]))
        allowed = EXACT + ([] if dtype.startswith("float") else BITS)
        reduction = draw(st.sampled_from(allowed if dtype != "bool" else [Reduction.SUM, Reduction.MAX, Reduction.BAND]))
    root = draw(st.integers(0, size - 1)) if row.rooted else -1
    return Request(kind, dtype, reduction, root, draw(st.booleans()))


def element_counts(most: int = 200) -> st.SearchStrategy[int]:
    """Counts of elements: none, one, odd, and many chunks."""
    return st.one_of(st.sampled_from([0, 1, 2, 7, 64, 97]), st.integers(0, most))


@st.composite
def counts_for(draw: st.DrawFn, kind: Kind, size: int) -> Counts:
    """One count, a count for each block, or a matrix of counts, as the kind needs."""
    if kind is Kind.ALL_TO_ALL_V:
        return [[draw(st.integers(0, 9)) for _ in range(size)] for _ in range(size)]
    if BY_KIND[kind].ragged:
        return [draw(st.integers(0, 20)) for _ in range(size)]
    return draw(element_counts())


def options(size: int, deterministic: bool | None = None) -> st.SearchStrategy[Options]:
    """Chunks from so small that nothing divides to so long that one is enough."""
    return st.builds(
        Options,
        chunk_bytes=st.sampled_from([1, 64, 64 * size, 512 * size, 1 << 19]),
        scratch_bytes=st.sampled_from([256, 8 << 20]),
        deterministic=st.booleans() if deterministic is None else st.just(deterministic),
    )


@dataclass(frozen=True)
class Scene:
    """All that one operation of a property test is drawn from."""

    request: Request
    counts: Counts
    options: Options
    in_place: bool


@st.composite
def scenes(draw: st.DrawFn, topology: Topology, kinds: list[Kind]) -> Scene:
    """An operation on ``topology``."""
    request = draw(requests(topology.size, kinds))
    in_place = bool(BY_KIND[request.kind].in_place) and draw(st.booleans())
    return Scene(request, draw(counts_for(request.kind, topology.size)), draw(options(topology.size)), in_place)
