"""Jobs on devices: the nccl and rccl plugins, unmodified, on stand-ins for the vendors' libraries, with streams that dawdle.

Everything that the operations promise on host memory holds on a device: alone, and in bridges over two vendors and the host.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

import polyccl
import polyccl.backends

from .cases import Case, each_once, run_case, run_cases, sample
from .marks import where_installed
from .pool import Pool, SharedPool, shared_pool
from .shapes import Shape

pytestmark = [
    pytest.mark.backend("nccl", "rccl"),
    pytest.mark.skipif(
        not {"nccl", "rccl"} <= set(polyccl.backends.available()), reason="the installed polyccl lacks the nccl or the rccl plugin"
    ),
]

PLAIN = ("nccl=2", "nccl=3", "rccl=2")
BRIDGES = ("nccl=2,rccl=2", "nccl=2,host=2", "nccl=2,gloo=2", "nccl=3,rccl=1", "nccl=2,rccl=1,host=1")
FOUR_VENDORS = "nccl=2,rccl=1,xccl=1,host=2"
CASES = 60
DELAY_US = 200  # that streams dawdle at most, before each thing they do


@pytest.fixture(scope="module")
def variables(stand_ins: dict[str, str]) -> dict[str, str]:
    """The environment of ranks on stand-ins, whose streams dawdle."""
    return stand_ins | {"FAKE_DELAY_US": str(DELAY_US)}


@pytest.fixture(scope="module")
def devices(variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """Ranks whose devices are stand-ins."""
    with shared_pool(tmp_path_factory.mktemp("store"), variables) as pool:
        yield pool


@pytest.fixture
def each(request: pytest.FixtureRequest, full: bool) -> bool:
    """Whether every operation × dtype × reduction × in place × asynchronous is wanted, instead of a sample."""
    return full or bool(request.config.getoption("--each"))


def run_operations(devices: SharedPool, shape: Shape, each: bool) -> None:
    cases = each_once(shape.size) if each else sample(shape.size, CASES, seed=1)
    for first in range(0, len(cases), 200):
        some = cases[first : first + 200]
        assert devices.run(run_cases, shape, some, deadline=100) == [len(some)] * shape.size


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", where_installed(*PLAIN, *BRIDGES))
def test_operations_on_devices(devices: SharedPool, shape: Shape, each: bool) -> None:
    run_operations(devices, shape, each)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("oneccl")
@pytest.mark.parametrize("shape", where_installed(FOUR_VENDORS))
def test_operations_over_four_libraries(devices: SharedPool, shape: Shape, each: bool) -> None:
    run_operations(devices, shape, each)


def hold_two_vendors(comm: polyccl.Comm, directory: str) -> None:
    """This process has an nccl and an rccl communicator at once."""
    from polyccl.store import FileStore

    rank, size = comm.get_rank(), comm.get_size()
    both = [
        polyccl.new_comm(backend, "cpu", f"both-{backend}", store=FileStore(directory), rank=rank, size=size, timeout=30)
        for backend in ("nccl", "rccl")
    ]
    for turn in range(3):
        for number, each in enumerate(both):
            data = np.full(1000, float(rank + turn + number), np.float32)
            each.all_reduce(data)
            assert (data == sum(r + turn + number for r in range(size))).all()


def test_one_process_holds_both_vendors(devices: SharedPool, tmp_path: Path) -> None:
    devices.run(hold_two_vendors, Shape("host=2"), str(tmp_path))


def operate_until_lost(comm: polyccl.Comm, victim: int, after: float) -> str:
    """Call one operation after another until rank ``victim`` has killed itself, ``after`` seconds from the first; the class of the
    error that then comes."""
    size = comm.get_size()
    whole, part = np.ones(size * 70_000, np.float32), np.ones(70_000, np.float32)
    operations = [
        lambda: comm.all_reduce(whole, async_op=True),
        lambda: comm.all_gather_single(whole, part, async_op=True),
        lambda: comm.reduce_scatter_single(part, whole, async_op=True),
        lambda: comm.broadcast(whole, 1, async_op=True),
        lambda: comm.all_to_all_single(np.empty_like(whole), whole, async_op=True),
    ]
    comm.barrier()
    if comm.get_rank() == victim:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = monotonic()
    try:
        while monotonic() < began + 20:
            for work in [operation() for operation in operations]:
                work.wait_blocking()
    except polyccl.CommError as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("victim", range(4))
def test_a_rank_killed_at_some_step_ends_the_operation_of_all(
    variables: dict[str, str], victim: int, turn: int, each: bool, tmp_path: Path
) -> None:
    """Where in the operation the loss strikes is chance: an operation takes a few milliseconds."""
    if turn and not each:
        pytest.skip("more of them are for --each")
    shape = Shape("nccl=2,rccl=2")
    after = random.Random(f"{victim} {turn}").uniform(0.0, 0.1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        pool = Pool(shape.size, str(tmp_path))
        try:
            outcomes = pool.run(operate_until_lost, shape, victim, after, deadline=60, lost=[victim])
            assert [each for rank, each in enumerate(outcomes) if rank != victim] == ["PeerLost"] * (shape.size - 1)
        finally:
            pool.close()


def test_refusals_leave_a_device_usable(devices: SharedPool) -> None:
    devices.run(refuse_then_reduce, Shape("nccl=2"))


def refuse_then_reduce(comm: polyccl.Comm) -> None:
    with pytest.raises(polyccl.UnsupportedOperation):
        comm.all_reduce(np.ones(4, np.bool_), polyccl.ReduceOp.AVG)
    run_case(comm, Case(polyccl.Kind.ALL_REDUCE, "float32", 100, polyccl.Reduction.SUM))
