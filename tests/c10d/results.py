"""Results of torch's suite, test by test: kept in a file of tab-separated values, and compared with c10d's own."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
C10D = FOLDER / "c10d.tsv"
DIFFERENCES = FOLDER / "differences.tsv"
PASSED, FAILED, SKIPPED, TIMED_OUT = "passed", "failed", "skipped", "timed out"
LONGEST_REASON = 300


@dataclass
class Result:
    """How a test ended. ``first`` is how it ended before it was repeated alone; empty where it was not."""

    test: str
    outcome: str
    reason: str = ""
    first: str = ""
    ranks: int = 0
    seconds: float = 0.0
    gloo: int = 0
    polyccl: int = 0

    def __post_init__(self) -> None:
        self.reason = " ".join(self.reason.split())[:LONGEST_REASON]
        self.ranks, self.seconds = int(self.ranks), round(float(self.seconds), 1)
        self.gloo, self.polyccl = int(self.gloo), int(self.polyccl)

    @property
    def is_bad(self) -> bool:
        """Whether it neither passed nor was skipped."""
        return self.outcome in (FAILED, TIMED_OUT)


@dataclass(frozen=True)
class Difference:
    """A test that ends otherwise than on c10d's Gloo, and why; ``column`` is one column, or ``all`` of PolyCCL's."""

    test: str
    column: str
    outcome: str
    reason: str


def read(path: Path) -> dict[str, Result]:
    """The results in a file, by test; none where there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows: Iterable[dict[str, Any]] = csv.DictReader(file, delimiter="\t")
        return {row["test"]: Result(**row) for row in rows}


def write(path: Path, results: Iterable[Result]) -> None:
    """Put results into a file, replacing it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    with half.open("w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Result)], delimiter="\t", lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(result) for result in results)
    half.replace(path)


def known(column: str) -> list[Difference]:
    """The differences that are known of a column."""
    with DIFFERENCES.open(newline="") as file:
        rows = [Difference(**row) for row in csv.DictReader(file, delimiter="\t")]
    return [row for row in rows if row.column in (column, "all")]


def counts(results: Iterable[Result]) -> str:
    """Numbers of outcomes, in words."""
    found = Counter(result.outcome for result in results)
    return ", ".join(f"{found[each]} {each}" for each in (PASSED, SKIPPED, FAILED, TIMED_OUT) if found[each] or each == PASSED)


def faults(results: Mapping[str, Result], own: Mapping[str, Result], known: Iterable[Difference]) -> list[str]:
    """What speaks against a column of PolyCCL's, in words; ``own`` is c10d's.

    Tests that end otherwise than c10d's and are not ``known`` to, known ones that end as c10d's, and those that used another Gloo.
    """
    expected = {each.test: each.outcome for each in known}
    return [f"{name}: {words}" for name, result in results.items() for words in _faults(result, own.get(name), expected.get(name))]


def _faults(result: Result, own: Result | None, expected: str | None) -> Iterator[str]:
    if result.gloo:
        yield f"c10d's own Gloo was created {result.gloo} times"
    if own is None:
        yield "c10d's column does not have it; run that column with --keep"
        return
    if result.outcome == PASSED and own.gloo and not result.polyccl:
        yield "passed, yet made no group of PolyCCL's"
    if expected is None and result.outcome != own.outcome:
        yield f"{result.outcome}, and {own.outcome} on c10d's Gloo: {result.reason}"
    if expected is not None and result.outcome == own.outcome:
        yield f"{result.outcome} as on c10d's Gloo; take it from {DIFFERENCES.name}"
    elif expected is not None and result.outcome != expected:
        yield f"{result.outcome}, not {expected} as known: {result.reason}"
