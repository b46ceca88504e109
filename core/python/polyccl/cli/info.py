"""``polyccl info`` and ``polyccl env``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from .. import environment
from ..errors import InvalidArgument
from ..report import NATIVE, NONE, PLANNED, collect
from .layout import entry, fold, width

_STYLES = {"built in": "green", "loaded": "green", "failed": "red", "not built": "dim"}
_ANSWERS = {NATIVE: "library", PLANNED: "planned", NONE: "undefined"}
_INDENT = 18


def show(as_json: bool, name: str | None = None, operations: bool = False) -> None:
    """Print what `polyccl.report.collect` finds: of all backends, or of backend ``name`` alone, then with its operations.

    Raises InvalidArgument for a name that no backend has.
    """
    report = collect()
    if name is not None:
        names = [each["name"] for each in report["backends"]]
        if name not in names:
            raise InvalidArgument(f"there is no backend '{name}'; there are: {', '.join(names)}")
        report["backends"] = [each for each in report["backends"] if each["name"] == name]
    if as_json:
        print(json.dumps(report, indent=2))
        return
    columns = width()
    console = Console(width=columns)
    torch = f"torch {report['torch']}" if report["torch"] else "no torch"
    entry(
        console,
        "PolyCCL",
        [f"{report['version']}, plugin ABI {report['abi'] or 'unknown'}, Python {report['python']}, {torch}", report["system"]],
        columns,
        len("PolyCCL "),
    )
    for problem in report["problems"]:
        entry(console, "wrong", [problem], columns, len("PolyCCL "), "red")
    for backend in report["backends"]:
        console.print()
        entry(console, backend["name"], _summary(backend), columns, len("PolyCCL "), _STYLES[backend["state"]])
        if operations or name is not None:
            _show_operations(console, backend, columns)
    if name is None and not operations:
        console.print()
        for line in fold("`polyccl info NAME` lists the operations of a backend by type, `--operations` those of all.", columns):
            console.print(line, highlight=False)


def _summary(backend: Mapping[str, Any]) -> Iterator[str]:
    """What there is to say of a backend, a paragraph each."""
    if backend["state"] == "not built":
        yield f"not built; pip install . -C cmake.define.POLYCCL_BACKEND_{backend['name'].upper()}=ON"
        return
    version, devices = backend.get("library_version"), backend.get("devices")
    words = [backend["state"], f"version {version}" if version else "", f"{devices} devices" if devices else "", *_bridges(backend)]
    yield ", ".join(filter(None, words))
    if "error" in backend:
        yield backend["error"]
    if "operations" in backend:
        rows = backend["operations"]
        own = [operation for operation, row in rows.items() if any(_types(cells)[NATIVE] for cells in row.values())]
        missing = "" if len(own) == len(rows) else "; PolyCCL plans the others"
        yield f"the library does {len(own)} of {len(rows)} operations, for some or all types{missing}"
    for key in ("plugin", "library"):
        if backend.get(key):
            yield f"{key} {backend[key]}"


def _bridges(backend: Mapping[str, Any]) -> list[str]:
    """How operations of a bridge end on a backend's devices."""
    words = {True: "bridges are asynchronous", False: "bridges block the host", None: "bridges: unknown"}
    return [words[backend["waits_for_host"]]] if "waits_for_host" in backend else []


def _types(cells: Mapping[str, Any]) -> dict[str, list[str]]:
    """The types of each answer; of an operation that reduces, for SUM."""
    found: dict[str, list[str]] = {answer: [] for answer in _ANSWERS}
    for dtype, cell in cells.items():
        found[cell["sum"] if isinstance(cell, dict) else cell].append(dtype)
    return found


def _show_operations(console: Console, backend: Mapping[str, Any], columns: int) -> None:
    rows = backend.get("operations", {})
    for memory in sorted({memory for row in rows.values() for memory in row}):
        console.print()
        entry(console, f"{memory} memory", ["(operations that reduce: for SUM; all reductions with --json)"], columns, _INDENT)
        for operation, row in rows.items():
            answers = _types(row[memory])
            texts = [f"{_ANSWERS[each]}: {_listed(answers[each], row[memory])}" for each in _ANSWERS if answers[each]]
            entry(console, operation, texts, columns, _INDENT, "default")


def _listed(types: list[str], every: Mapping[str, Any]) -> str:
    """Name the types, or those that are missing if these are fewer."""
    others = [dtype for dtype in every if dtype not in types]
    if not others:
        return "all types"
    return f"all but {', '.join(others)}" if len(others) < len(types) else ", ".join(types)


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
    columns = width()
    console = Console(width=columns)
    for row in variables():
        default = f" (default: {row['default']})" if row["default"] else ""
        value = [f"= {row['value']}"] if row["value"] else []
        console.print(f"[bold]{row['name']}[/]", highlight=False, soft_wrap=True)
        entry(console, "", [*value, f"{row['meaning']}{default}"], columns, 4)


__all__ = ["show", "show_variables", "variables"]
