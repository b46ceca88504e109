"""Run torch's suite on a column, and compare it with c10d's own: ``python -m tests.c10d --column gloo``, from the tree's root."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from . import results

COLUMNS = ("c10d", "gloo", "gloo=1,gloo=rest")
KEPT = Path(__file__).parents[2] / "build" / "c10d"
DEADLINE = 100.0
"""Seconds that a test gets; torch's own limit inside it is a little less, and ends with stack traces."""


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.c10d", description=__doc__)
    parser.add_argument("--column", choices=COLUMNS, default="gloo", help="what carries the groups")
    parser.add_argument("--shard", default="1/1", help="e.g. 2/4: the second quarter of the tests")
    parser.add_argument("--resume", action="store_true", help="run only tests that the file of results has not")
    parser.add_argument("--only", nargs="+", metavar="TEST", help="these tests alone")
    parser.add_argument("--jobs", type=int, default=1, help="tests at once; failed ones are repeated alone whatever this is")
    parser.add_argument("--results", type=Path, default=KEPT, help="folder of the files of results, one for each column")
    parser.add_argument(
        "--logs", type=Path, default=None, help="folder for what failed tests printed; beside the results if not given"
    )
    parser.add_argument("--keep", action="store_true", help="put the finished column of c10d into the tree")
    return parser.parse_args(words)


def _shard(tests: list[str], which: str) -> list[str]:
    part, parts = map(int, which.split("/"))
    if not 1 <= part <= parts:
        raise SystemExit(f"--shard {which}: the part is from 1 to {parts}")
    return tests[part - 1 :: parts]


def _prepare(column: str) -> None:
    """The environment that torch's suite wants, before it is imported; one thread a rank, since there are more ranks than cores."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE="4",  # some tests are only defined for so many; `driver.RANKS`
        INIT_METHOD="file://",  # the suite puts a file of each test's own there
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",  # the columns are those of CPUs, on any machine
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(int(DEADLINE) - 10),
    )
    os.environ.pop("MASTER_PORT", None)


def main(words: list[str]) -> int:
    """Run; gives the exit code: 1 where the column differs from what is known."""
    given = _arguments(words)
    _prepare(given.column)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # not before the tests' processes are ended
    from . import driver, suite

    if given.column != "c10d":
        suite.redirect(given.column)
    path = given.results / f"{given.column}.tsv"
    tests = given.only or _shard(suite.names(), given.shard)
    if unknown := sorted(set(tests) - set(suite.names())):
        raise SystemExit(f"torch's suite has no {', '.join(unknown)}")
    found = results.read(path)
    todo = [name for name in tests if not given.resume or name not in found]
    for name in todo:
        found.pop(name, None)
    logs = given.logs or given.results / f"{given.column}.logs"
    for result in driver.run(todo, given.jobs, DEADLINE, logs):
        found[result.test] = result
        results.write(path, (found[name] for name in suite.names() if name in found))
    chosen = {name: found[name] for name in tests}
    print(f"{given.column}: {results.counts(chosen.values())}")
    for result in chosen.values():
        if result.first and not result.is_bad:
            print(f"  {result.test}: {result.outcome} only when repeated alone; at first {result.first}")
    if given.column == "c10d":
        if given.keep:
            results.write(results.C10D, (found[name] for name in suite.names() if name in found))
        return 0
    faults = results.faults(chosen, results.read(results.C10D), results.known(given.column))
    for fault in faults:
        print(f"  {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
