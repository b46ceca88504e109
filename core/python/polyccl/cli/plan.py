"""``polyccl plan``: a collective's plan, and its payload between islands against the bound."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import environment
from ..planner import payload as accounts
from ..planner.planner import plan, small
from ..planner.task import Options, Request
from ..planner.topology import Topology
from ..spec import BY_KIND, DTYPE_BYTES, Kind, Operation, Reduction, Shape
from .launch import parse_islands


@dataclass(frozen=True)
class _Case:
    """What is asked: the request, with the number of elements that a call would give."""

    row: Operation
    request: Request
    topology: Topology
    options: Options
    counts: accounts.Counts
    total: int
    """Bytes of the full buffer, after rounding down to whole elements of every block."""


def show(op: str, size: str, islands: str, rank: int, dtype: str, reduction: str, root: int, as_json: bool) -> None:
    """Print it. Raises ValueError, with what is wrong, for arguments that have no plan."""
    case = _case(op, size, islands, dtype, reduction, root)
    report = describe(case, rank)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console()
    console.print(
        f"[bold]{report['op']}[/] of {case.total:,} bytes ({dtype}) over islands of "
        f"{', '.join(str(len(island)) for island in case.topology.islands)} ranks: plan [bold]{report['plan']}[/]",
        highlight=False,
    )
    console.print(_islands(report))
    console.print(_links(report))
    if report["latency_plan_up_to"]:
        console.print(
            f"Plans for few bytes end at {report['latency_plan_up_to']:,} bytes: they send whole buffers, once.", highlight=False
        )
    if case.request.small:
        console.print("This is one of them, so the bound, which counts bytes and not messages, is not its aim.")
    elif excess := _excess(report):
        console.print(
            f"Up to {excess:,.0f} bytes above the least: the elements that the plan's unit does not divide go by the plan for few "
            "bytes.",
            highlight=False,
        )
    console.print(f"\nThe plan of rank {rank}:", highlight=False)
    console.print(escape(report["steps"]), highlight=False, soft_wrap=True)


def _excess(report: dict[str, Any]) -> float:
    """The most bytes that an island sends or receives above the least; 0 where there is no bound."""
    ways = [(island[way], island[f"{way}_bound"]) for island in report["islands"] for way in ("leave", "enter")]
    return max((moved - bound for moved, bound in ways if bound is not None), default=0)


def describe(case: _Case, rank: int) -> dict[str, Any]:
    """Everything that is shown, ready for JSON; payloads in bytes."""
    written = plan(case.request, case.topology, rank, case.options)
    pairs = accounts.payload(case.topology, case.request, case.counts, case.options)
    traffic = accounts.traffic(case.topology, pairs)
    bounds = None if case.request.kind is Kind.BARRIER else accounts.bound(case.topology, case.request, case.counts)
    has_latency_plan = small(case.request.kind, 0, case.options)
    return {
        "op": case.row.name,
        "plan": written.name,
        "bytes": case.total,
        "rank": rank,
        "latency_plan_up_to": case.options.latency_bytes if has_latency_plan else 0,
        "islands": [
            {
                "ranks": list(ranks),
                "leave": int(traffic[i].leave),
                "enter": int(traffic[i].enter),
                "leave_bound": float(bounds[i].leave) if bounds else None,
                "enter_bound": float(bounds[i].enter) if bounds else None,
            }
            for i, ranks in enumerate(case.topology.islands)
        ],
        "links": [{"from": a, "to": b, "bytes": sent} for (a, b), sent in sorted(pairs.items()) if a != b],
        "steps": accounts.describe(written),
    }


def _case(op: str, size: str, islands: str, dtype: str, reduction: str, root: int) -> _Case:
    rows = {row.name: row for row in BY_KIND.values() if row.collective}
    if op not in rows:
        raise ValueError(f"there is no collective {op!r}; there are {', '.join(sorted(rows))}")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"there is no dtype {dtype!r}; there are {', '.join(DTYPE_BYTES)}")
    row, topology = rows[op], parse_topology(islands)
    chunk = environment.size("POLYCCL_CHUNK_BYTES")
    options = Options() if chunk is None else Options(chunk_bytes=chunk)
    blocks = topology.size if Shape.BLOCKS in (row.input, row.output) else 1
    count = environment.parse_bytes(size) // (DTYPE_BYTES[dtype] * blocks)
    total = count * DTYPE_BYTES[dtype] * blocks if row.kind is not Kind.BARRIER else 0
    request = Request(
        row.kind,
        dtype,
        _reduction(reduction) if row.reduces else Reduction.NONE,
        root if row.rooted else -1,
        small(row.kind, total, options),
    )
    counts: accounts.Counts = count
    if row.ragged:
        counts = [[count] * blocks] * blocks if row.kind is Kind.ALL_TO_ALL_V else [count] * blocks
    return _Case(row, request, topology, options, counts, total)


def parse_topology(text: str) -> Topology:
    """Return the topology that ``8,8,4``, ``gloo=8,host=4`` (ranks of each island) or ``ABAB`` (island of each rank) names.

    Raises ValueError for anything else.
    """
    if re.fullmatch(r"[A-Za-z]+", text):
        return Topology.of_labels(text)
    try:
        islands = parse_islands(text)
    except ValueError:
        raise ValueError(
            f"{text!r} are no islands; write e.g. 8,8,4 or gloo=8,host=4 for their sizes, or ABAB for the island of each rank"
        ) from None
    return Topology.of_labels(index for index, island in enumerate(islands) for _ in range(island.size))


def _reduction(name: str) -> Reduction:
    names = [each.name.lower() for each in Reduction if each is not Reduction.NONE]
    if name.lower() not in names:
        raise ValueError(f"there is no reduction {name!r}; there are {', '.join(names)}")
    return Reduction[name.upper()]


def _islands(report: dict[str, Any]) -> Table:
    table = Table("island", "ranks", title="Bytes out of and into each island", title_justify="left")
    for heading in ("leave", "least", "enter", "least"):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, island in enumerate(report["islands"]):
        numbers = [_number(island[key]) for key in ("leave", "leave_bound", "enter", "enter_bound")]
        table.add_row(str(index), ranks_in_short(island["ranks"]), *numbers)
    return table


def ranks_in_short(ranks: list[int]) -> str:
    """``0-7`` for a run; a few of the ranks, and how many there are, where they are interleaved."""
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{', '.join(map(str, ranks[:6]))}, ... ({len(ranks)})"


def _links(report: dict[str, Any]) -> Table:
    table = Table("from island", "to island", title="Bytes between islands", title_justify="left")
    table.add_column("bytes", justify="right", no_wrap=True)
    for link in report["links"]:
        table.add_row(str(link["from"]), str(link["to"]), _number(link["bytes"]))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


__all__ = ["describe", "parse_topology", "ranks_in_short", "show"]
