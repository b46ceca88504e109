"""How ``polyccl doctor`` shows what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_WIDTH = 160
"""Columns where the output is no terminal: a launcher's log, say."""


def show(report: Mapping[str, Any], as_json: bool) -> None:
    """Print a `polyccl.cli.doctor.Report`, given as plain data."""
    if as_json:
        ranks = [{key: value for key, value in told.items() if key not in _INTERNAL} for told in report["ranks"]]
        print(json.dumps({**report, "ranks": ranks, "ok": not report["problems"]}), flush=True)
        return
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(_ranks(report["ranks"]))
    for island in report["islands"]:
        members = ", ".join(map(str, island["ranks"]))
        console.print(f"island {escape(island['label'])}: {escape(island['backend'])}, ranks {members}", highlight=False)
    if report["backend"]:
        console.print(f"a communicator over all ranks ({report['backend']}) was made and passed a barrier", highlight=False)
    if report["rails"]:
        console.print(_rails(report["rails"]))
    for problem in report["problems"]:
        console.print(f"[red]wrong:[/] {escape(problem['text'])}", highlight=False, soft_wrap=True)
    if not report["problems"]:
        console.print(f"[green]all well[/]: {report['size']} ranks", highlight=False)
    sys.stdout.flush()


_INTERNAL = ("hello", "nonce", "link")


def _ranks(entries: list[dict[str, Any]]) -> Table:
    table = Table("rank", "island", "host", "PolyCCL", "Python", "torch", "NumPy", "backend")
    table.add_column("library", overflow="fold")
    table.add_column("address")
    table.add_column("interface")
    for told in entries:
        library = "\n".join(filter(None, (told.get("library"), told.get("file"))))
        address = f"{told['address']} port {told['port']}" if told.get("address") else ""
        cells = [
            str(told["rank"]),
            told.get("island"),
            told["host"],
            told["polyccl"],
            told["python"],
            told["torch"] or "-",
            told["numpy"] or "-",
            told.get("backend"),
            library,
            address,
            told.get("interface"),
        ]
        table.add_row(*(escape(str(cell or "")) for cell in cells))
    return table


def _rails(entries: list[dict[str, Any]]) -> Table:
    table = Table("rail", title=f"Rails, by messages of {entries[0]['bytes']:,} bytes", title_justify="left")
    for heading in ("round trip", "there", "back"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rail in entries:
        cells = ["not measured: no time left", "", ""]
        if "round_trip" in rail:
            cells = [f"{rail['round_trip'] * 1e6:,.0f} us", _rate(rail["there"]), _rate(rail["back"])]
        elif not rail.get("skipped"):
            cells[0] = "failed"
        table.add_row(f"{rail['from']} - {rail['to']}", *cells)
    return table


def _rate(value: float) -> str:
    return f"{value / 1e6:,.0f} MB/s"


__all__ = ["show"]
