"""Jobs on devices: the nccl and rccl plugins, unmodified, on stand-ins for the vendors' libraries, with streams that dawdle.

Everything that the operations promise on host memory holds on a device: alone, and in bridges over two vendors and the host.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import polyccl
import polyccl.backends

from .cases import Case, run_case, run_cases, sample
from .pool import Pool, SharedPool
from .shapes import Shape

pytestmark = [
    pytest.mark.backend("nccl", "rccl"),
    pytest.mark.skipif(
        not {"nccl", "rccl"} <= set(polyccl.backends.available()), reason="the installed polyccl lacks the nccl or the rccl plugin"
    ),
]

PLAIN = ("nccl=2", "nccl=3", "rccl=2")
BRIDGES = ("nccl=2,rccl=2", "nccl=2,host=2", "nccl=2,gloo=2", "nccl=3,rccl=1", "nccl=2,rccl=1,host=1")
CASES = 60


def _doubles() -> ModuleType:
    path = Path(__file__).parents[1] / "doubles" / "build.py"
    spec = importlib.util.spec_from_file_location("doubles_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # for its dataclass
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def variables() -> dict[str, str]:
    """What points the plugins to the stand-ins."""
    doubles = _doubles()
    try:
        built = doubles.build()
    except doubles.CannotBuild as error:
        pytest.skip(str(error))
    return {
        "POLYCCL_CUDA_LIBRARY": str(built.cuda),
        "POLYCCL_NCCL_LIBRARY": str(built.nccl),
        "POLYCCL_HIP_LIBRARY": str(built.hip),
        "POLYCCL_RCCL_LIBRARY": str(built.rccl),
        "FAKE_DELAY_US": "200",
    }


@pytest.fixture(scope="module")
def devices(variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """Ranks whose devices are stand-ins."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        pool = SharedPool(str(tmp_path_factory.mktemp("store")))
        yield pool
        pool.close()


def shapes(*names: str) -> list[Any]:
    """Parameters; a shape is skipped where one of its backends is not installed."""
    installed = set(polyccl.backends.available())
    marked = []
    for name in names:
        missing = {part.split("=")[0] for part in name.split(",")} - installed
        skip = pytest.mark.skipif(bool(missing), reason=f"the installed polyccl has no {' and no '.join(sorted(missing))} plugin")
        marked.append(pytest.param(Shape(name), id=str(Shape(name)), marks=[skip]))
    return marked


@pytest.mark.parametrize("shape", shapes(*PLAIN, *BRIDGES))
def test_operations_on_devices(devices: SharedPool, shape: Shape, full: bool) -> None:
    cases = sample(shape.size, 2000 if full else CASES, seed=1)
    assert devices.run(run_cases, shape, cases, deadline=600 if full else 100) == [len(cases)] * shape.size


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


def bridge_until_lost(comm: polyccl.Comm, victim: int, after: int) -> str:
    """Reduce until rank ``victim`` has killed itself, in its call number ``after``; the class of the error that then comes."""
    data = np.ones(300_000, np.float32)
    try:
        for turn in range(1000):
            if comm.get_rank() == victim and turn == after:
                work = comm.all_reduce(data, async_op=True)
                os.kill(os.getpid(), signal.SIGKILL)
                work.wait()
            comm.all_reduce(data)
    except polyccl.CommError as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("victim", range(4))
def test_a_killed_rank_ends_the_operation_of_all(variables: dict[str, str], victim: int, tmp_path: Path) -> None:
    shape = Shape("nccl=2,rccl=2")
    before = set(os.listdir("/dev/shm"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        pool = Pool(shape.size, str(tmp_path))
        try:
            with pytest.raises(AssertionError) as failure:
                pool.run(bridge_until_lost, shape, victim, 3, deadline=60)
            assert f"rank {victim}" in str(failure.value)
            assert "no answer" not in str(failure.value)
        finally:
            pool.close()
    assert set(os.listdir("/dev/shm")) <= before


def test_refusals_leave_a_device_usable(devices: SharedPool) -> None:
    devices.run(refuse_then_reduce, Shape("nccl=2"))


def refuse_then_reduce(comm: polyccl.Comm) -> None:
    with pytest.raises(polyccl.UnsupportedOperation):
        comm.all_reduce(np.ones(4, np.bool_), polyccl.ReduceOp.AVG)
    run_case(comm, Case(polyccl.Kind.ALL_REDUCE, "float32", 100, polyccl.Reduction.SUM))
