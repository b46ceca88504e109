"""How ``polyccl doctor`` shows what it found, in 80 columns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from .layout import entry, log_width

_INTERNAL = ("hello", "nonce", "link")


def show(report: Mapping[str, Any], as_json: bool) -> None:
    """Print a `polyccl.cli.doctor.Report`, given as plain data."""
    if as_json:
        ranks = [{key: value for key, value in told.items() if key not in _INTERNAL} for told in report["ranks"]]
        print(json.dumps({**report, "ranks": ranks, "ok": not report["problems"]}), flush=True)
        return
    columns = log_width()
    console = Console(width=columns)

    def say(label: str, *texts: str, style: str = "bold") -> None:
        entry(console, label, texts, columns, max(8, len(label) + 1), style)

    for told in report["ranks"]:
        say(f"rank {told['rank']}", *_facts(told))
    for island in report["islands"]:
        say(f"island {island['label']}:", f"{island['backend']}, ranks {', '.join(map(str, island['ranks']))}")
    if report["backend"]:
        say("created", f"a communicator over all ranks ({report['backend']}), which passed a barrier")
    if report["rails"]:
        say("rails", f"by messages of {report['rails'][0]['bytes']:,} bytes: round trip, there, back")
        for rail in report["rails"]:
            say(f"  {rail['from']} - {rail['to']}", _timed(rail), style="default")
    for problem in report["problems"]:
        say("wrong:", problem["text"], style="red")
    if not report["problems"]:
        say("all well:", f"{report['size']} rank{'s' if report['size'] > 1 else ''}", style="green")
    if report["size"] == 1:
        say("alone:", "no launcher says that there are other ranks; run it as every rank of a job to examine the job")
    sys.stdout.flush()


def _facts(told: Mapping[str, Any]) -> Iterator[str]:
    place = [f"island {told['island']}" if told.get("island") else "", f"host {told['host']}"]
    yield ", ".join(filter(None, place))
    yield f"PolyCCL {told['polyccl']}, Python {told['python']}, torch {told['torch'] or '-'}, NumPy {told['numpy'] or '-'}"
    if told.get("backend"):
        yield f"backend {told['backend']}: {told.get('library') or ''} {told.get('file') or ''}"
    if told.get("address"):
        yield f"link at {told['address']} port {told['port']}, interface {told.get('interface') or 'unknown'}"


def _timed(rail: Mapping[str, Any]) -> str:
    if "round_trip" in rail:
        return f"{rail['round_trip'] * 1e6:,.0f} us, {_rate(rail['there'])}, {_rate(rail['back'])}"
    return "not measured: no time left" if rail.get("skipped") else "failed"


def _rate(value: float) -> str:
    return f"{value / 1e6:,.0f} MB/s"


__all__ = ["show"]
