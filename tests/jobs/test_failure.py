"""What happens when something goes wrong: abort, ranks that die or stop, operations that take too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

import polyccl
from polyccl import Comm

from .marks import named
from .pool import Pool, SharedPool
from .ranks import Raised, caught, join, takes_at_most, usable
from .shapes import Shape

AT_ONCE = 0.5
SHAPES = named("host=3", "gloo=3", "host=2,host=1", "gloo=2,gloo=1", "gloo=2,host=2")


def ones(count: int = 4) -> Any:
    return np.ones(count, np.float32)


def later(seconds: float, action: Callable[[], Any]) -> None:
    """Do it from another thread, when this one is blocked."""
    threading.Timer(seconds, action).start()


def until(condition: Callable[[], bool], limit: float = 5.0) -> None:
    """Wait for a condition; AssertionError at the limit."""
    end = monotonic() + limit
    while not condition():
        assert monotonic() < end, "it did not come true"
        sleep(0.005)


def broken_at_once(comm: Comm) -> Raised:
    """What every further call says, at once."""
    assert comm.is_aborted()
    for call in (comm.barrier, lambda: comm.all_reduce(ones()), lambda: comm.send(ones(), (comm.get_rank() + 1) % comm.get_size())):
        raised = caught(call)
        assert raised.seconds < AT_ONCE
        assert "broken" in raised.text
    return raised


# ---- abort -----------------------------------------------------------------------------------------------------------


def abort_while_waiting(comm: Comm, absent: bool) -> tuple[Raised, Raised]:
    last = comm.get_rank() == comm.get_size() - 1
    if comm.get_rank() == 0:
        later(0.3, comm.abort)
    if last and absent:
        until(comm.is_aborted)
        raised = caught(comm.barrier)
    else:
        raised = caught(lambda: [comm.all_reduce(np.ones(1 << 20, np.float32)) for _ in range(10000)])
    return raised, broken_at_once(comm)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("absent", [True, False], ids=["a rank never comes", "in full swing"])
@pytest.mark.parametrize("shape", SHAPES)
def test_abort_ends_what_blocks_on_all_ranks_and_names_who_aborted(
    jobs: SharedPool, shape: Shape, absent: bool, check: bool
) -> None:
    for raised, after in jobs.run(abort_while_waiting, shape, absent, fresh=True, check=check):
        assert raised.name == after.name == "Aborted", (raised, after)
        assert "rank 0" in raised.text
        assert "aborted" in raised.text
        assert raised.seconds < 2.3


def abort_twice(comm: Comm) -> None:
    work = comm.recv(ones(), (comm.get_rank() + 1) % comm.get_size(), async_op=True)
    with suppress(polyccl.Aborted):
        comm.barrier()  # all ranks are there
    for _ in range(3):
        with takes_at_most(1.0):
            comm.abort()
    with pytest.raises(polyccl.Aborted):
        work.wait(5)
    assert isinstance(work.exception(), polyccl.Aborted)
    assert work.is_completed()


@pytest.mark.parametrize("shape", SHAPES)
def test_abort_may_come_again_and_ends_works(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(abort_twice, shape, fresh=True)


def abort_a_stopped_peer(comm: Comm) -> Raised:
    rank, last = comm.get_rank(), comm.get_size() - 1
    processes = np.zeros(comm.get_size(), np.int64)
    comm.all_gather_single(processes, np.array([os.getpid()]))
    victim = int(processes[last])
    if rank == last:
        later(0.2, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    if rank == 0:
        later(1.0, comm.abort)
    raised = caught(lambda: [comm.all_reduce(np.ones(1 << 20, np.float32)) for _ in range(10000)])
    if rank == 0:
        os.kill(victim, signal.SIGCONT)
    return raised


@pytest.mark.parametrize("shape", named("gloo=2", "gloo=2,gloo=2", "host=2"))
def test_abort_returns_although_a_peer_has_stopped(own_pool: Callable[[int], Pool], shape: Shape) -> None:
    raised = own_pool(shape.size).run(abort_a_stopped_peer, shape, fresh=True, check=False)
    assert raised[0].name == "Aborted"
    assert raised[0].seconds < 1.0 + 2.0


# ---- loss ------------------------------------------------------------------------------------------------------------


def one_dies(comm: Comm, directory: str, survivors: Shape) -> tuple[Raised, Raised]:
    rank, last = comm.get_rank(), comm.get_size() - 1
    usable(comm)
    if rank == last:
        later(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL))
        until(lambda: False, 30)
    raised = caught(lambda: comm.all_reduce(np.ones(1 << 18, np.float32)))
    after = broken_at_once(comm)
    again = join(directory, rank, survivors, "survivors")
    usable(again)
    again.finalize()
    return raised, after


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize(
    ("shape", "survivors"),
    [
        pytest.param(Shape(before), Shape(after), id=before, marks=[pytest.mark.backend("gloo")] if "gloo" in before else [])
        for before, after in (
            ("host=3", "host=2"),
            ("gloo=3", "gloo=2"),
            ("host=2,host=1", "host=2"),
            ("gloo=2,gloo=2", "gloo=2,gloo=1"),
        )
    ],
)
def test_a_rank_that_dies_is_named_by_all_others_which_then_go_on_without_it(
    own_pool: Callable[[int], Pool], directory: str, shape: Shape, survivors: Shape, check: bool
) -> None:
    last = shape.size - 1
    results = own_pool(shape.size).run(one_dies, shape, directory, survivors, fresh=True, check=check, lost=(last,))
    for raised, after in results[:last]:
        assert raised.name == after.name == "PeerLost", (raised, after)
        assert f"rank {last} (" in raised.text
        assert raised.seconds < 3


# ---- time ------------------------------------------------------------------------------------------------------------


def alone(comm: Comm, how: str) -> tuple[Raised, Raised]:
    """Rank 0 makes a call that no one answers, with 0.4 s for it."""
    if comm.get_rank() != 0:
        until(comm.is_aborted)
        return broken_at_once(comm), broken_at_once(comm)
    if how == "set_timeout":
        comm.set_timeout(0.4)
    calls: dict[str, Callable[[], Any]] = {
        "call": lambda: comm.all_reduce(ones(), timeout=0.4),
        "large": lambda: comm.all_reduce(ones(1 << 20), timeout=0.4),
        "asynchronous": lambda: comm.all_reduce(ones(), timeout=0.4, async_op=True).wait(),
        "set_timeout": lambda: comm.all_reduce(ones()),
        "recv": lambda: comm.recv(ones(), 1, timeout=0.4),
        "send": lambda: comm.send(ones(1 << 20), 1, timeout=0.4),
        "asynchronous recv": lambda: comm.recv(ones(), 1, timeout=0.4, async_op=True).wait(),
        "barrier": lambda: comm.barrier(timeout=0.4),
    }
    return caught(calls[how]), broken_at_once(comm)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("how", ["call", "large", "asynchronous", "set_timeout", "recv", "send", "asynchronous recv", "barrier"])
@pytest.mark.parametrize("shape", named("host=2", "gloo=2", "host=1,host=1", "gloo=2,gloo=1"))
def test_a_call_that_no_one_answers_ends_at_its_deadline_and_breaks_the_communicator(
    jobs: SharedPool, shape: Shape, how: str, check: bool
) -> None:
    raised, after = jobs.run(alone, shape, how, fresh=True, check=check)[0]
    assert raised.name == after.name == "CommTimeout", (raised, after)
    assert 0.35 < raised.seconds < 1.4, raised
    assert any(f"rank {absent} (" in raised.text for absent in range(1, shape.size)), raised
    word = how.split()[-1] if "recv" in how or how in ("send", "barrier") else "all_reduce"
    assert word in raised.text


def default_timeout(rank: int, directory: str) -> float:
    comm = join(directory, rank, Shape("host=2"), timeout=0.7)
    comm.barrier(timeout=10)
    if rank:
        until(comm.is_aborted)
        return 0.7
    comm.set_timeout(30)
    comm.set_timeout(None)  # back to that of creation
    return caught(comm.barrier).seconds


def test_the_default_timeout_is_that_of_creation(jobs: SharedPool, directory: str) -> None:
    assert all(0.65 < took < 1.7 for took in jobs.each(default_timeout, 2, directory))


# ---- a process that is to end with its communicator --------------------------------------------------------------------

SCRIPT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it is to end by SIGABRT
import numpy as np
import polyccl
from polyccl.store import FileStore
rank = int(sys.argv[2])
comm = polyccl.new_comm("host", "cpu", "doomed", store=FileStore(sys.argv[1]), rank=rank, size=2, timeout=20,
                        abort_process_on_timeout_or_error=rank == 0)
comm.barrier()
if rank:
    sys.stdin.read()
elif sys.argv[3] == "batch":
    batch = comm.batch_op_create()
    batch.recv(np.ones(3), 1)
    batch.issue(timeout=0.3)
elif sys.argv[3] == "asynchronous":
    comm.all_reduce(np.ones(3), async_op=True, timeout=0.3)
    sys.stdin.read()
elif sys.argv[3] == "aborted":
    work = comm.recv(np.ones(3), 1, async_op=True)
    comm.abort()
    try:
        work.wait()
    except polyccl.Aborted:
        sys.exit(7)
elif sys.argv[3] == "refused":
    try:
        comm.all_reduce("nothing")
    except polyccl.InvalidArgument:
        sys.exit(7)
else:
    comm.all_reduce(np.ones(3), timeout=0.3)
"""


@pytest.mark.parametrize("how", ["synchronous", "asynchronous", "batch"])
def test_a_failed_operation_ends_the_process_where_that_is_wanted(directory: str, how: str) -> None:
    status, text = doomed(directory, how)
    assert status == -signal.SIGABRT
    assert "ending the process" in text
    assert "timed out" in text


@pytest.mark.parametrize("how", ["refused", "aborted"])
def test_neither_a_refused_call_nor_its_own_abort_ends_the_process(directory: str, how: str) -> None:
    assert doomed(directory, how)[0] == 7


def doomed(directory: str, how: str) -> tuple[int, str]:
    """Exit status and errors of rank 0; rank 1 makes no call."""
    environ = os.environ | {"POLYCCL_CHECK": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, directory, str(rank), how],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for rank in range(2)
    ]
    try:
        until(lambda: ranks[0].poll() is not None, 20)
        assert ranks[0].stderr is not None
        return ranks[0].returncode, ranks[0].stderr.read()
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
