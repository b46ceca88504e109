"""Queues of user code: jobs in order, one at a time, and never behind one that blocks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from polyccl import completion
from polyccl.completion import Queue, queue_here

DEADLINE = 30.0


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[completion._Threads]:
    """Threads of the test's own, all of which end with it."""
    own = completion._Threads()
    monkeypatch.setattr(completion, "_threads", own)
    yield own
    assert completion.settle(DEADLINE), "threads are left"


def put(queue: Queue, job: Callable[[], object]) -> threading.Event:
    """Put a job that says when it is over."""
    over = threading.Event()

    def run() -> None:
        try:
            job()
        finally:
            over.set()

    queue.expect()
    queue.put(run)
    return over


def test_jobs_run_in_order_and_one_at_a_time() -> None:
    queue, seen, running = Queue(), list[int](), threading.Lock()

    def job(i: int) -> None:
        assert running.acquire(blocking=False)
        seen.append(i)
        running.release()

    last = [put(queue, lambda i=i: job(i)) for i in range(200)][-1]  # type: ignore[misc]
    assert last.wait(DEADLINE)
    assert seen == list(range(200))


def test_a_job_may_wait_for_the_next_one() -> None:
    queue, released = Queue(), threading.Event()
    first = put(queue, lambda: released.wait(DEADLINE))
    second = put(queue, released.set)
    assert second.wait(DEADLINE)
    assert first.wait(DEADLINE)
    assert released.is_set()


def test_many_jobs_may_wait_for_the_last_one() -> None:
    queue, released = Queue(), threading.Event()
    waiting = [put(queue, lambda: released.wait(DEADLINE)) for _ in range(10)]
    assert put(queue, released.set).wait(DEADLINE)
    assert all(each.wait(DEADLINE) for each in waiting)


def test_a_job_may_wait_for_what_it_has_started_at_once() -> None:
    usual, seen = Queue(), list[str]()

    def outer() -> None:
        inner = queue_here(usual)
        assert inner is not usual
        assert inner is queue_here(usual)
        assert put(inner, lambda: seen.append("inner")).wait(DEADLINE)
        seen.append("outer")

    assert put(usual, outer).wait(DEADLINE)
    assert seen == ["inner", "outer"]
    assert queue_here(usual) is usual


def test_a_job_that_is_busy_for_long_is_not_overtaken() -> None:
    queue, seen = Queue(), list[str]()

    def busy() -> None:
        end = time.thread_time() + 10 * completion.PATIENCE
        while time.thread_time() < end:
            sum(range(1000))
        seen.append("busy")

    put(queue, busy)
    assert put(queue, lambda: seen.append("next")).wait(DEADLINE)
    assert seen == ["busy", "next"]


def test_queues_do_not_wait_for_each_other() -> None:
    released = threading.Event()
    first = put(Queue(), lambda: released.wait(DEADLINE))
    assert put(Queue(), released.set).wait(DEADLINE)
    assert first.wait(DEADLINE)


def test_an_announced_job_runs_where_no_more_threads_are_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    queue, ran = Queue(), threading.Event()
    queue.expect()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    queue.put(ran.set)
    assert ran.wait(DEADLINE)


def test_no_job_is_announced_without_a_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        Queue().expect()


def test_idle_threads_end(threads: completion._Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_linger", 0.05)
    assert put(Queue(), lambda: None).wait(DEADLINE)
    with threads.changed:
        assert threads.changed.wait_for(lambda: threads._all == 0, DEADLINE)


def test_a_forked_child_has_threads_of_its_own() -> None:
    script = """
import os, threading
from polyccl.completion import Queue

def runs() -> bool:
    queue, ran = Queue(), threading.Event()
    queue.expect()
    queue.put(ran.set)
    return ran.wait(30)

assert runs()
child = os.fork()
if child == 0:
    os._exit(0 if runs() else 1)
assert os.waitpid(child, 0)[1] == 0
assert runs()
"""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=DEADLINE, check=False)
    assert ended.returncode == 0


def test_the_interpreter_ends_while_a_job_blocks() -> None:
    script = """
import threading
from polyccl import completion
started = threading.Event()
queue = completion.Queue()
queue.expect()
queue.put(lambda: (started.set(), threading.Event().wait()))
assert started.wait(30)
assert not completion.settle(0.1)
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=DEADLINE, check=False, env=dict(os.environ))
    assert ended.returncode == 0
