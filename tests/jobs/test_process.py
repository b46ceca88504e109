"""A rank as a process: works, memory, many operations at once, fork, Ctrl-C, and what an import loads."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

import polyccl
from polyccl import Comm, ReduceOp

from .marks import named
from .pool import Pool, SharedPool
from .ranks import caught, join, usable
from .shapes import Shape

ROOT = Path(__file__).parents[2]
SHAPES = named("host=2", "gloo=2", "host=1,host=1", "gloo=2,host=1")


def until(condition: Callable[[], bool], limit: float = 5.0) -> None:
    """Wait for a condition; AssertionError at the limit."""
    end = monotonic() + limit
    while not condition():
        assert monotonic() < end, "it did not come true"
        sleep(0.002)


# ---- works -----------------------------------------------------------------------------------------------------------


def use_a_work(comm: Comm) -> None:
    if comm.get_rank() == 0:
        work = comm.all_reduce(total := np.array([1.0]), async_op=True)
        calls: list[str] = []
        work.add_done_callback(lambda: calls.append("early"))
        assert not work.is_completed()
        assert work.exception() is None
        for limit in (0.05, timedelta(milliseconds=50)):
            with pytest.raises(polyccl.CommTimeout, match="it goes on"):
                work.wait(limit)
        assert "on its way" in repr(work)
        comm.send(np.zeros(1), 1)
        work.wait()
        assert total[0] == comm.get_size()
        assert work.is_completed()
        until(lambda: calls == ["early"])
        work.add_done_callback(lambda: calls.append("late"))
        assert calls == ["early", "late"]
        assert work.exception() is None
        work.wait_blocking()
        work.wait(0)
        assert "done" in repr(work)
    else:
        if comm.get_rank() == 1:
            comm.recv(np.zeros(1), 0)
        comm.all_reduce(np.array([1.0]))
    assert comm.all_reduce(np.array([1.0])).is_completed()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_work_tells_when_it_is_done_waits_and_calls_back(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(use_a_work, shape)


def fail_a_work(comm: Comm) -> None:
    if comm.get_rank() == 0:
        work = comm.recv(np.zeros(1), 1, async_op=True, timeout=0.2)
        done = threading.Event()
        work.add_done_callback(done.set)
        assert done.wait(5)
        assert isinstance(work.exception(), polyccl.CommTimeout)
        assert "failed" in repr(work)
        for wait in (work.wait, work.wait_blocking):
            with pytest.raises(polyccl.CommTimeout, match="recv"):
                wait()
    else:
        until(comm.is_aborted)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_failed_work_gives_its_own_error_every_time(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(fail_a_work, shape, fresh=True)


def hold_tensors(comm: Comm) -> None:
    rank = comm.get_rank()
    if rank == 0:
        tensors = [np.zeros(1000, np.float32), np.zeros(1, np.float32)]
        alive = [weakref.ref(tensor) for tensor in tensors]
        works = [comm.recv(tensors[0], 1, async_op=True), comm.all_reduce(tensors[1], async_op=True)]
        del tensors
        gc.collect()
        assert all(ref() is not None for ref in alive)
        comm.send(np.zeros(1), 1)
        for work in works:
            work.wait()
        until(lambda: all(ref() is None for ref in alive))  # though the works live on
    else:
        if rank == 1:
            comm.recv(np.zeros(1), 0)
            comm.send(np.ones(1000, np.float32), 0)
        comm.all_reduce(np.zeros(1, np.float32))


@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_live_until_their_operation_is_done_and_no_longer(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(hold_tensors, shape)


def leak(comm: Comm) -> None:
    tensor = np.ones(16, np.float32)
    before = sys.getrefcount(tensor)
    for _ in range(50):
        comm.all_reduce(tensor)
        comm.all_reduce(tensor, async_op=True).wait()
        with pytest.raises(polyccl.InvalidArgument):
            comm.broadcast(tensor, 99)
    until(lambda: sys.getrefcount(tensor) == before)


@pytest.mark.parametrize("shape", named("host=2", "gloo=2"))
def test_calls_leave_no_references_behind(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(leak, shape)


# ---- much at once ----------------------------------------------------------------------------------------------------


def mixed(comm: Comm, number: int, works: list[Any], checks: list[Callable[[], bool]]) -> None:
    """One of several kinds of asynchronous operation, and how to see that its result is right."""
    rank, size = comm.get_rank(), comm.get_size()
    length = (1, 1000, 30000)[number % 3]
    match number % 5:
        case 0:
            data = np.full(length, rank + number, np.int64)
            works.append(comm.all_reduce(data, async_op=True))
            checks.append(lambda: bool((data == sum(range(size)) + size * number).all()))
        case 1:
            gathered = np.zeros(size * length, np.int64)
            works.append(comm.all_gather_single(gathered, np.full(length, rank * 1000 + number), async_op=True))
            checks.append(lambda: bool((gathered == np.repeat(np.arange(size) * 1000 + number, length)).all()))
        case 2:
            root = number % size
            word = np.full(length, number if rank == root else -1)
            works.append(comm.broadcast(word, root, async_op=True))
            checks.append(lambda: bool((word == number).all()))
        case 3:
            got = np.zeros(length, np.int64)
            works.append(comm.recv(got, (rank - 1) % size, async_op=True))
            works.append(comm.send(np.full(length, rank * 1000 + number), (rank + 1) % size, async_op=True))
            checks.append(lambda: bool((got == (rank - 1) % size * 1000 + number).all()))
        case _:
            high = np.full(length, rank + number, np.float32)
            works.append(comm.all_reduce(high, ReduceOp.MAX, async_op=True))
            checks.append(lambda: bool((high == size - 1 + number).all()))


def much_at_once(comm: Comm) -> None:
    everyone = list(range(comm.get_size()))
    comms = [comm, comm.split(everyone, "second"), comm.split(everyone, "third")]
    works: list[Any] = []
    checks: list[Callable[[], bool]] = []
    for number in range(200):
        each = comms[number % 3]
        assert each is not None
        mixed(each, number, works, checks)
    for work in works:
        work.wait(30)
    assert all(check() for check in checks)


@pytest.mark.parametrize("shape", named("host=3", "gloo=3", "host=2,host=2", "gloo=2,host=1"))
def test_two_hundred_operations_of_all_kinds_are_in_flight_on_three_communicators(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(much_at_once, shape)


def opposite_orders(comm: Comm) -> None:
    """What one thread would deadlock on is no matter for asynchronous calls: each communicator has its own order."""
    everyone = list(range(comm.get_size()))
    pair = [comm.split(everyone, "one"), comm.split(everyone, "other")]
    order = pair if comm.get_rank() % 2 == 0 else pair[::-1]
    for _ in range(10):
        data = [np.ones(100000, np.float32) for _ in pair]
        works = [each.all_reduce(array, async_op=True) for each, array in zip(order, data, strict=True) if each is not None]
        for work in works:
            work.wait(20)
        assert all((array == comm.get_size()).all() for array in data)


@pytest.mark.parametrize("shape", named("host=2", "gloo=2", "host=2,host=1", "gloo=2,gloo=2"))
def test_two_communicators_may_be_used_in_opposite_order(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(opposite_orders, shape)


def threads(comm: Comm) -> None:
    """Several threads of a rank, each with a communicator of its own, and all with one."""
    everyone = list(range(comm.get_size()))
    own = [comm.split(everyone, f"thread{n}") for n in range(3)]
    failures: list[BaseException] = []

    def body(mine: Comm | None) -> None:
        try:
            assert mine is not None
            for _ in range(30):
                usable(mine)
                comm.all_reduce(np.ones(10, np.float32))
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=body, args=(each,)) for each in own]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("shape", named("host=2", "gloo=2", "host=2,host=1"))
def test_threads_may_share_a_process_and_a_communicator(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(threads, shape)


# ---- fork ------------------------------------------------------------------------------------------------------------

FORK = """
import os, sys
import numpy as np
import polyccl
comm = polyccl.new_comm("bridge", "cpu", timeout=20)
work = comm.all_reduce(np.ones(1 << 16, np.float32), async_op=True)
child = os.fork()
if child == 0:
    calls = (lambda: comm.all_reduce(np.ones(1)), lambda: comm.send(np.ones(1), 1 - comm.get_rank() % 2), comm.barrier,
             lambda: comm.recv(np.ones(1), 1 - comm.get_rank() % 2, async_op=True).wait(),
             lambda: comm.split([comm.get_rank()], "part"), lambda: polyccl.new_comm("host", "cpu", rank=0, size=1))
    for number, call in enumerate(calls):
        try:
            call()
        except polyccl.CommError as error:
            if "fork" not in str(error):
                print(f"call {number}: {error}", file=sys.stderr)
                os._exit(3)
        else:
            print(f"call {number} went through", file=sys.stderr)
            os._exit(4)
    sys.exit(5)  # an orderly end: destructors, exit handlers
work.wait()
for _ in range(3):
    comm.all_reduce(np.ones(1 << 16, np.float32))
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 5, os.waitstatus_to_exitcode(status)
for _ in range(3):
    comm.all_reduce(np.ones(1 << 16, np.float32))
comm.finalize()
print("unharmed")
"""


@pytest.mark.parametrize("shape", named("host=2", "host=1,host=1", "gloo=2", "gloo=2,gloo=1"))
def test_a_forked_child_gets_a_sentence_and_its_end_disturbs_no_one(shape: Shape) -> None:
    words = [sys.executable, "-m", "polyccl", "launch", "--islands", shape.islands, "--", sys.executable, "-c", FORK]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("unharmed") == shape.size


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def press_ctrl_c_during(call: Callable[[], Any]) -> float:
    """Seconds from Ctrl-C to the KeyboardInterrupt of a call that would block."""
    pressed: list[float] = []

    def press() -> None:
        pressed.append(monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.3, press).start()
    try:
        call()
    except KeyboardInterrupt:
        return monotonic() - pressed[0]
    raise AssertionError("no KeyboardInterrupt came")


def interrupted(comm: Comm, what: str) -> None:
    if comm.get_rank() == 0:
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: comm.all_reduce(np.ones(4)),
            "large all_reduce": lambda: comm.all_reduce(np.ones(1 << 20)),
            "recv": lambda: comm.recv(np.ones(4), 1),
            "send": lambda: comm.send(np.ones(1 << 20), 1),
            "wait": comm.all_reduce(np.ones(4), async_op=True).wait if what == "wait" else comm.barrier,
            "barrier": comm.barrier,
            "split": lambda: comm.split([0, 1], "never"),
        }
        assert press_ctrl_c_during(calls[what]) < 1.0
        if what in ("wait", "split"):  # the work goes on; the parent of a split that failed is as it was
            assert not comm.is_aborted()
            comm.abort()
    until(comm.is_aborted)
    raised = caught(comm.barrier)
    assert raised.name == "Aborted"
    assert "rank 0 (" in raised.text


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("what", ["all_reduce", "large all_reduce", "recv", "send", "wait", "barrier", "split"])
@pytest.mark.parametrize("shape", named("host=2", "gloo=2", "gloo=2,host=1"))
def test_ctrl_c_ends_a_wait_within_a_second(jobs: SharedPool, shape: Shape, what: str, check: bool) -> None:
    jobs.run(interrupted, shape, what, fresh=True, check=check)


def interrupted_creation(rank: int, directory: str, shape: Shape) -> float:
    return press_ctrl_c_during(lambda: join(directory, rank, shape))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("shape", named("host=2", "gloo=2"))
def test_ctrl_c_ends_a_creation_that_waits_for_others(
    own_pool: Callable[[int], Pool], directory: str, shape: Shape, rank: int
) -> None:
    (took,) = own_pool(2).each(interrupted_creation, [rank], directory, shape)
    assert took < 1.0


def interrupted_inside(comm: Comm) -> float:
    """Rank 1 stops inside the library's collective; rank 0 presses Ctrl-C."""
    processes = np.zeros(2, np.int64)
    comm.all_gather_single(processes, np.array([os.getpid()]))
    if comm.get_rank() == 1:
        threading.Timer(0.15, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
        caught(lambda: [comm.all_reduce(np.ones(1 << 20, np.float32)) for _ in range(10000)])
        return 0.0
    took = press_ctrl_c_during(lambda: [comm.all_reduce(np.ones(1 << 20, np.float32)) for _ in range(10000)])
    os.kill(int(processes[1]), signal.SIGCONT)
    return took


@pytest.mark.parametrize("shape", named("host=2", "gloo=2"))
def test_ctrl_c_ends_a_call_whose_peer_has_stopped(own_pool: Callable[[int], Pool], shape: Shape) -> None:
    assert own_pool(2).run(interrupted_inside, shape, fresh=True, check=False)[0] < 1.0


# ---- import ----------------------------------------------------------------------------------------------------------


def test_an_import_loads_neither_torch_nor_numpy() -> None:
    script = "import polyccl, sys; print([name for name in ('torch', 'numpy', 'typer', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
