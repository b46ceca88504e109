"""``polyccl info`` and ``polyccl env``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import environment
from ..report import NATIVE, NONE, PLANNED, collect

_MARKS = {NATIVE: "[green]N[/]", PLANNED: "[cyan]p[/]", NONE: "[dim]-[/]"}


def show(as_json: bool) -> None:
    """Print what `polyccl.report.collect` finds."""
    report = collect()
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console()
    torch = f"torch {report['torch']}" if report["torch"] else "no torch"
    console.print(
        f"PolyCCL [bold]{report['version']}[/], plugin ABI {report['abi'] or 'unknown'}, Python {report['python']}, {torch}, "
        f"{escape(report['system'])}",
        highlight=False,
    )
    for problem in report["problems"]:
        console.print(f"[red]{escape(problem)}[/]", highlight=False)
    console.print(_backends(report["backends"]))
    for backend in report["backends"]:
        for memory in sorted({memory for row in backend.get("operations", {}).values() for memory in row}):
            console.print(_operations(backend, memory))
    console.print(
        f"{_MARKS[NATIVE]} the library does it   {_MARKS[PLANNED]} PolyCCL plans it   {_MARKS[NONE]} undefined; "
        "operations that reduce: for SUM, all reductions with --json",
        highlight=False,
    )


def _backends(entries: list[dict[str, Any]]) -> Table:
    table = Table("backend", "state", "library", "devices", "files, or what is wrong", title="Backends", title_justify="left")
    colours = {"built in": "green", "loaded": "green", "failed": "red", "not built": "dim"}
    for entry in entries:
        files = [entry.get("plugin"), entry.get("library"), entry.get("error")]
        if entry["state"] == "not built":
            files = [f"built with -C cmake.define.POLYCCL_BACKEND_{entry['name'].upper()}=ON"]
        table.add_row(
            entry["name"],
            f"[{colours[entry['state']]}]{entry['state']}[/]",
            escape(str(entry.get("library_version", ""))),
            "\n".join([str(entry.get("devices", "")), *_bridges(entry)]),
            escape("\n".join(str(each) for each in files if each)),
        )
    return table


def _bridges(entry: Mapping[str, Any]) -> list[str]:
    """How operations of a bridge end on a backend's devices."""
    words = {True: "bridges are asynchronous", False: "bridges block the host", None: "bridges: unknown"}
    return [words[entry["waits_for_host"]]] if "waits_for_host" in entry else []


def _operations(backend: Mapping[str, Any], memory: str) -> Table:
    rows = backend["operations"]
    dtypes = list(next(iter(rows.values()))[memory])
    names = [dtype.replace("float", "f").replace("complex", "c").replace("uint", "u").replace("int", "i") for dtype in dtypes]
    table = Table(
        "", *names, title=f"{backend['name']}: {memory} memory", title_justify="left", padding=(0, 0), collapse_padding=True
    )
    for name, row in rows.items():
        cells = [cell["sum"] if isinstance(cell, dict) else cell for cell in row[memory].values()]
        table.add_row(name, *(_MARKS[cell] for cell in cells))
    return table


def variables() -> list[dict[str, str | None]]:
    """The table of variables, with the values that are set (of the job's token, only that it is set)."""
    return [
        {
            "name": row.name,
            "form": row.form.value,
            "default": row.default,
            "meaning": row.meaning,
            "used": row.used,
            "value": "(set)" if row.name == "POLYCCL_JOB_TOKEN" and row.name in os.environ else os.environ.get(row.name),
        }
        for row in environment.VARIABLES
    ]


def show_variables() -> None:
    """Print the table of variables."""
    table = Table("variable", "value", "default", "meaning")
    for row in variables():
        name, value, default, meaning = (escape(str(row[key] or "")) for key in ("name", "value", "default", "meaning"))
        table.add_row(f"[bold]{name}[/]", f"[green]{value}[/]" if value else "", default, meaning)
    Console().print(table)


__all__ = ["show", "show_variables", "variables"]
