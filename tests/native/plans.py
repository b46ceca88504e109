"""Write the plans of every rank of a shape into files, for the ranks of C++ (``plans.h`` reads them)::

    python tests/native/plans.py nccl=2,host=2 <folder>

The planner is pure Python and needs nothing that is built: its package is imported here without PolyCCL's native module.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

BARE = ModuleType("polyccl")
BARE.__path__ = [str(Path(__file__).parents[2] / "core" / "python" / "polyccl")]
sys.modules["polyccl"] = BARE

from polyccl.planner.planner import Memory, Options, Request, Topology, plan  # noqa: E402
from polyccl.spec import BY_KIND, Kind, Reduction  # noqa: E402

OPTIONS = Options(chunk_bytes=32 << 10, latency_bytes=4 << 10)
"""Small chunks, so that data of a test's size already passes the staging ring in many pieces."""

DTYPES = {"uint8": 3, "float32": 12}
"""Of a barrier, and of everything else; with the ABI's numbers."""

REDUCTIONS = (Reduction.SUM, Reduction.MAX, Reduction.AVG, Reduction.PREMUL_SUM)
ON_DEVICE = ("nccl", "rccl")
UNEQUAL_BITS = ("gloo", "rccl")
"""Libraries whose all_reduce does not promise all ranks the same bits."""

WHOLE, ISLAND = 0, 1
"""Scopes, as in ``plans.h``."""


def write(shape: str, folder: Path) -> None:
    """Write ``plans.<rank>`` for each rank of a shape such as ``"nccl=2,host=2"``."""
    islands, backends = _islands(shape)
    bits = tuple(backends[island[0]] not in UNEQUAL_BITS for island in islands)
    for rank, backend in enumerate(backends):
        device = backend in ON_DEVICE
        mine = next(island for island in islands if rank in island)
        inside = (Topology.singletons(len(mine)), mine.index(rank), Memory.DEVICE_MESSAGES if device else Memory.HOST)
        records = [array("q", [OPTIONS.latency_bytes]).tobytes()]
        if len(islands) > 1:
            whole = Topology(islands, bits)
            records += _plans(WHOLE, whole, rank, Memory.DEVICE if device else Memory.HOST)
            records += _plans(ISLAND, *inside)
        else:
            records += _plans(WHOLE, *inside)
        (folder / f"plans.{rank}").write_bytes(b"".join(records))


def _islands(shape: str) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
    islands: list[tuple[int, ...]] = []
    backends: list[str] = []
    for part in shape.split(","):
        backend, number = part.split("=")
        islands.append(tuple(range(len(backends), len(backends) + int(number))))
        backends += [backend] * int(number)
    return tuple(islands), backends


def _plans(scope: int, topology: Topology, rank: int, memory: Memory) -> Iterator[bytes]:
    """Every plan that a rank may ask for, each after a head of eight 64-bit integers."""
    if topology.size == 1:
        return
    for kind, row in BY_KIND.items():
        if not row.collective:
            continue
        dtype = "uint8" if kind is Kind.BARRIER else "float32"
        for reduction in REDUCTIONS if row.reduces else (Reduction.NONE,):
            for root in range(topology.size) if row.rooted else (-1,):
                for small in (False, True):
                    for strict in (False, True):
                        options = Options(OPTIONS.chunk_bytes, OPTIONS.latency_bytes, OPTIONS.scratch_bytes, strict)
                        request = Request(kind, dtype, reduction, root, small)
                        encoded = plan(request, topology, rank, options, memory).encode()
                        yield array("q", [scope, kind, DTYPES[dtype], reduction, root, small, strict, len(encoded)]).tobytes()
                        yield encoded


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
