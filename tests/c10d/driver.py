"""Runs tests of torch's suite, each in processes of its own: forks of this one, which has imported torch once.

A test is a process with a session of its own (it plays torch's parent, and forks the ranks), so that all it leaves behind ends with
its process group. It tells by files in a folder of its own, which is its folder for temporary files too.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from . import suite
from .results import FAILED, PASSED, SKIPPED, TIMED_OUT, Result

RANKS, MANY_RANKS = 4, 8
"""Of a test; and of one that torch skips with fewer than eight."""
POLL = 0.02
"""Seconds between looks at the tests that run."""


@dataclass(frozen=True)
class Plan:
    """How tests are run: how many at once, with how many seconds for each, and where logs go."""

    jobs: int
    deadline: float
    logs: Path


@dataclass
class Running:
    """A test under way: its process, its folder, and the time when it has to end."""

    test: str
    ranks: int
    pid: int
    folder: Path
    began: float
    end: float


def run(tests: list[str], jobs: int, deadline: float, logs: Path) -> Iterator[Result]:
    """Run tests, ``jobs`` at once, and give their results as they come. Those that fail are repeated at the end, one by one.

    ``deadline`` is in seconds, for each test. What failed tests print goes to ``logs``.
    """
    plan = Plan(jobs, deadline, logs)
    bad, wide = list[Result](), list[str]()
    for result in chain(_run(tests, RANKS, plan), _run(wide, MANY_RANKS, plan)):
        if result.outcome == SKIPPED and result.reason == suite.TOO_FEW_RANKS and result.ranks < MANY_RANKS:
            wide.append(result.test)
            continue
        if result.is_bad:
            bad.append(result)
        _tell(result)
        yield result
    for first in bad:
        for result in _run([first.test], first.ranks, replace(plan, jobs=1)):
            again = replace(result, first=f"{first.outcome}: {first.reason}")
            _tell(again)
            yield again


def _tell(result: Result) -> None:
    again = " (repeated)" if result.first else ""
    print(f"{result.test}: {result.outcome}{again}, {result.seconds} s {result.reason}", flush=True)


def _run(tests: list[str], ranks: int, plan: Plan) -> Iterator[Result]:
    waiting, running = list(tests), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < plan.jobs:
                running.append(_start(waiting.pop(0), ranks, plan.deadline))
            for each in [one for one in running if _is_over(one)]:
                running.remove(each)
                yield _result(each, plan.logs)
            time.sleep(POLL)
    finally:
        for each in running:
            _end(each)


def _start(test: str, ranks: int, deadline: float) -> Running:
    folder = Path(tempfile.mkdtemp(prefix="c10d-"))
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_the_test(test, ranks, folder)
    now = time.monotonic()
    return Running(test, ranks, pid, folder, now, now + deadline)


def _be_the_test(test: str, ranks: int, folder: Path) -> None:
    """What the fork does: run one test, write how it ended, and end without the clean-up of the process that it was forked from."""
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which torch ends ranks
        log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        tempfile.tempdir = str(folder)
        os.environ["WORLD_SIZE"] = str(ranks)
        suite.watch(folder / "created", folder / "reason")
        result = unittest.TestResult()
        suite.Suite(test).run(result)
        outcome, words = _verdict(result)
        half = folder / "half"
        half.write_text(f"{outcome}\n{words}")
        half.rename(folder / "verdict")
        sys.stdout.flush()
    finally:
        os._exit(0)


def _verdict(result: unittest.TestResult) -> tuple[str, str]:
    for _, trace in [*result.errors, *result.failures]:
        return FAILED, trace
    for _, reason in result.skipped:
        return SKIPPED, reason
    return PASSED, ""


def _is_over(each: Running) -> bool:
    pid, _ = os.waitpid(each.pid, os.WNOHANG)
    if pid == 0 and time.monotonic() < each.end:
        return False
    if pid == 0:
        os.killpg(each.pid, signal.SIGKILL)
        os.waitpid(each.pid, 0)
    _end_group(each.pid)
    return True


def _end_group(leader: int) -> None:
    """End the ranks that a test left behind."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _end(each: Running) -> None:
    _end_group(each.pid)
    with suppress(ChildProcessError):
        os.waitpid(each.pid, 0)
    shutil.rmtree(each.folder, ignore_errors=True)


def _result(each: Running, logs: Path) -> Result:
    """What a test that is over has written; its log is kept where it failed."""
    folder, verdict = each.folder, each.folder / "verdict"
    outcome, words = verdict.read_text().split("\n", 1) if verdict.exists() else (TIMED_OUT, f"after {each.end - each.began:.0f} s")
    if outcome == SKIPPED and (folder / "reason").exists():
        words = (folder / "reason").read_text()
    result = Result(
        each.test,
        outcome,
        _essence(words) if outcome == FAILED else words,
        ranks=each.ranks,
        seconds=time.monotonic() - each.began,
        gloo=suite.created(folder / "created", suite.GLOO),
        polyccl=suite.created(folder / "created", suite.POLYCCL),
    )
    if result.is_bad:
        logs.mkdir(parents=True, exist_ok=True)
        printed = (folder / "log").read_text(errors="replace") if (folder / "log").exists() else ""
        (logs / f"{each.test}.log").write_text(f"{words}\n{printed}")
    shutil.rmtree(folder, ignore_errors=True)
    return result


def _essence(trace: str) -> str:
    """The line of the first exception in a trace."""
    raised = re.search(r"^(?!RuntimeError: Process \d+ exited)[A-Za-z_][\w.]*: .*", trace, re.MULTILINE)
    return raised.group() if raised else trace.strip().rsplit("\n", 1)[-1]
