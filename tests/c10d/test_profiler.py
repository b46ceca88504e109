"""torch's profiler sees PolyCCL's calls by c10d's names, with the shapes of what goes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import polyccl  # noqa: E402
from polyccl.store import MemoryStore  # noqa: E402
from polyccl.torch import ProcessGroup  # noqa: E402


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    """A group of one rank."""
    comm = polyccl.new_comm("host", "cpu", name="profiled", store=MemoryStore(), rank=0, size=1)
    yield ProcessGroup(comm)
    comm.finalize()


def one() -> Any:
    return torch.ones(3, 4)


def blocking() -> Any:
    options = torch.distributed.BarrierOptions()
    options.asyncOp = False
    return options


@pytest.mark.parametrize(
    ("name", "shapes", "call"),
    [
        ("all_reduce", [[3, 4]], lambda group: group.allreduce([one()])),
        ("all_reduce", [[3, 4], [4]], lambda group: group.allreduce_coalesced([one(), one()[0]])),
        ("broadcast", [[3, 4]], lambda group: group.broadcast(one(), root=0)),
        ("all_gather", [[3, 4]], lambda group: group.allgather([[one()]], [one()])),
        ("all_gather_into_tensor", [[3, 4]], lambda group: group._allgather_base(one(), one())),
        ("reduce_scatter_tensor", [[3, 4]], lambda group: group._reduce_scatter_base(one(), one())),
        ("all_to_all", [[3, 4]], lambda group: group.alltoall_base(one(), one(), [], [])),
        ("barrier", [], lambda group: group.barrier(blocking())),
    ],
)
def test_a_call_is_recorded(
    group: ProcessGroup, name: str, shapes: list[list[int]], call: Callable[[ProcessGroup], polyccl.torch.Work]
) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        call(group).wait()
    (record,) = [event for event in profile.events() if event.name.startswith("polyccl:")]
    assert (record.name, record.input_shapes) == (f"polyccl:{name}", shapes)
    assert record.cpu_time_total > 0
