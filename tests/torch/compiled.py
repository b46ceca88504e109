"""What each rank does in the tests of torch.compile: the same compiled code on c10d's Gloo, PolyCCL's `gloo` and a bridge."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed._functional_collectives as fc
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import polyccl
import polyccl.torch

# ---- calls of torch.distributed, each for two ranks --------------------------------------------------------------------------


def barrier(group: Any, x: Tensor) -> Any:
    dist.barrier(group)
    return x + 1


def broadcast(group: Any, x: Tensor) -> Any:
    dist.broadcast(x, 1, group)
    return x + 1


def reduce(group: Any, x: Tensor) -> Any:
    dist.reduce(x, 0, group=group)
    return x + 1 if dist.get_rank(group) == 0 else None


def all_reduce(group: Any, x: Tensor) -> Any:
    dist.all_reduce(x, dist.ReduceOp.MAX, group)
    return x + 1


def all_reduce_later(group: Any, x: Tensor) -> Any:
    work = dist.all_reduce(x, group=group, async_op=True)
    y = torch.ones(3) * 2
    work.wait()
    return x + y


def broadcast_later(group: Any, x: Tensor) -> Any:
    work = dist.broadcast(x, 0, group, async_op=True)
    if work is not None:
        work.wait()
    return x + 1, work.is_completed(), work.is_success()


def future(group: Any, x: Tensor) -> Any:
    (total,) = dist.all_reduce(x, group=group, async_op=True).get_future().wait()
    return total + 1


def all_gather(group: Any, x: Tensor) -> Any:
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group)
    return torch.stack(parts) + 1


def all_gather_later(group: Any, x: Tensor) -> Any:
    parts = [torch.zeros_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group, async_op=True).wait()
    return torch.stack(parts) + 1


def all_gather_into_tensor(group: Any, x: Tensor) -> Any:
    whole = x.new_zeros(x.numel() * group.size())
    dist.all_gather_into_tensor(whole, x, group)
    return whole + 1


def all_gather_into_tensor_later(group: Any, x: Tensor) -> Any:
    whole = x.new_zeros(x.numel() * group.size())
    dist.all_gather_into_tensor(whole, x, group, async_op=True).wait()
    return whole + 1


def gather(group: Any, x: Tensor) -> Any:
    parts = [torch.zeros_like(x) for _ in range(group.size())] if dist.get_rank(group) == 0 else None
    dist.gather(x, parts, 0, group)
    return torch.stack(parts) + 1 if parts else x


def scatter(group: Any, x: Tensor) -> Any:
    part = torch.zeros_like(x)
    dist.scatter(part, [x, x + 5] if dist.get_rank(group) == 0 else None, 0, group)
    return part + 1


def reduce_scatter(group: Any, x: Tensor) -> Any:
    part = torch.zeros_like(x)
    dist.reduce_scatter(part, [x, x + 5], group=group)
    return part + 1


def reduce_scatter_tensor(group: Any, x: Tensor) -> Any:
    part = torch.zeros_like(x)
    dist.reduce_scatter_tensor(part, torch.cat([x, x + 5]), group=group)
    return part + 1


def reduce_scatter_tensor_later(group: Any, x: Tensor) -> Any:
    part = torch.zeros_like(x)
    dist.reduce_scatter_tensor(part, torch.cat([x, x + 5]), group=group, async_op=True).wait()
    return part + 1


def all_to_all(group: Any, x: Tensor) -> Any:
    parts = [torch.zeros_like(x), torch.zeros_like(x)]
    dist.all_to_all(parts, [x, x + 5], group)
    return torch.stack(parts) + 1


def all_to_all_single(group: Any, x: Tensor) -> Any:
    rows = dist.get_rank(group) + 1
    whole = x.new_zeros(2 * rows)
    dist.all_to_all_single(whole, x, [rows, rows], [1, 2], group)
    return whole + 1


def all_to_all_single_later(group: Any, x: Tensor) -> Any:
    whole = x.new_zeros(2 * x.numel())
    dist.all_to_all_single(whole, torch.cat([x, x + 5]), group=group, async_op=True).wait()
    return whole + 1


def send_and_recv(group: Any, x: Tensor) -> Any:
    if dist.get_rank(group) == 0:
        dist.send(x, 1, group)
    else:
        dist.recv(x, None, group)
    return x + 1


def isend_and_irecv(group: Any, x: Tensor) -> Any:
    other, y = 1 - dist.get_rank(group), torch.zeros_like(x)
    works = [dist.isend(x, other, group), dist.irecv(y, other, group)]
    for work in works:
        work.wait()
    return y + 1


def batch_isend_irecv(group: Any, x: Tensor) -> Any:
    other, y = 1 - dist.get_rank(group), torch.zeros_like(x)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other, group), dist.P2POp(dist.irecv, y, other, group)]):
        work.wait()
    return y + 1


def coalesced(group: Any, x: Tensor) -> Any:
    y = x * 2
    with dist._coalescing_manager(group):
        dist.all_reduce(x, group=group)
        dist.all_reduce(y, group=group)
    return x + y


def objects(group: Any, x: Tensor) -> Any:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": dist.get_rank(group)}, group)
    return x + 1, found


def new_group(group: Any, x: Tensor) -> Any:
    made = dist.new_group([0, 1], backend=dist.get_backend(group))
    dist.broadcast(x, 0, made)
    dist.destroy_process_group(made)
    return x + 1


def constants(group: Any, x: Tensor) -> Any:
    ranks = dist.get_process_group_ranks(group)
    return x * dist.get_world_size(group) + dist.get_rank(group) + group.size() + group.rank() + len(ranks)


def functional(group: Any, x: Tensor) -> Any:
    total = fc.all_reduce(x * 2, "sum", group)
    whole = fc.all_gather_single(total + 1, 0, group)
    part = fc.reduce_scatter_single(whole, "sum", 0, group)
    return fc.broadcast(part, 0, group), fc.all_to_all_single(whole, None, None, group)


def functional_coalesced(group: Any, x: Tensor) -> Any:
    return fc.all_gather_into_tensor_coalesced(fc.all_reduce_coalesced([x, x + 1], "sum", group), group)


def method(group: Any, x: Tensor) -> Any:
    group.allreduce([x]).wait()
    return x + 1


class Holder(nn.Module):
    """A module that holds its group."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        dist.broadcast(x, 0, self.group)
        return x + dist.get_world_size(self.group)


def module(group: Any, x: Tensor) -> Any:
    return Holder(group)(x)


def dtensor(group: Any, x: Tensor) -> Any:
    sharded = DTensor.from_local(x, meshes[group], [Shard(0)], run_check=False)
    return sharded.redistribute(placements=[Replicate()]).to_local() * 2, sharded.sum().full_tensor()


CALLS: list[Callable[[Any, Tensor], Any]] = [
    barrier,
    broadcast,
    reduce,
    all_reduce,
    all_reduce_later,
    broadcast_later,
    future,
    all_gather,
    all_gather_later,
    all_gather_into_tensor,
    all_gather_into_tensor_later,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_tensor,
    reduce_scatter_tensor_later,
    all_to_all,
    all_to_all_single,
    all_to_all_single_later,
    send_and_recv,
    isend_and_irecv,
    batch_isend_irecv,
    coalesced,
    objects,
    new_group,
    constants,
    functional,
    functional_coalesced,
    method,
    module,
    dtensor,
]

REFUSED = [objects, method]
"""Calls that torch 2.13 itself refuses to compile, on every group."""

# ---- how they are compared ---------------------------------------------------------------------------------------------------

meshes: dict[Any, DeviceMesh] = {}
"""The mesh over each group of the test under way."""


@dataclass
class Outcome:
    """What a compiled call gave, or how its error begins; the graphs after each of three turns, their nodes, and graph breaks."""

    result: Any
    error: str
    graphs: list[int]
    nodes: int
    breaks: int


def breaks() -> int:
    """The graph breaks since `fresh_compiler`."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


@contextmanager
def fresh_compiler(backend: str) -> Iterator[Any]:
    """A compiler backend that counts graphs; Dynamo has forgotten all that it compiled, and is silent."""
    from torch._dynamo.testing import CompileCounterWithBackend  # here, so that pytest need not import the compiler to collect

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield CompileCounterWithBackend(backend)
    finally:
        logging.disable(logging.NOTSET)


def groups() -> list[Any]:
    """c10d's Gloo, PolyCCL's `gloo`, and the default group."""
    options = polyccl.torch.Options(backend="gloo")
    return [dist.new_group(backend="gloo"), dist.new_group(backend="polyccl", pg_options=options), dist.group.WORLD]


def outcome(call: Callable[[Any, Tensor], Any], group: Any, backend: str) -> Outcome:
    """Compile the call and do it three times; where it ends well, it gives what it gives uncompiled."""
    x = torch.arange(3.0) + dist.get_rank()
    with fresh_compiler(backend) as compiler:
        graphs: list[int] = []
        result: Any = None
        try:
            compiled = torch.compile(call, backend=compiler)
            for _ in range(3):
                result = compiled(group, x.clone())
                graphs.append(compiler.frame_count)
        except Exception as error:
            return Outcome(None, f"{type(error).__name__}: {str(error).splitlines()[0]}", graphs, compiler.op_count, 0)
        same(result, call(group, x.clone()))
        return Outcome(result, "", graphs, compiler.op_count, breaks())


def same(one: Any, other: Any) -> None:
    """Fail unless the two are equal, tensors bit by bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    elif isinstance(one, (list, tuple)):
        for each, its in zip(one, other, strict=True):
            same(each, its)
    else:
        assert one == other


def as_on_c10d(name: str, backend: str) -> None:
    """The call has the same outcome on all groups."""
    call: Callable[[Any, Tensor], Any] = globals()[name]
    meshes.clear()
    meshes.update({group: DeviceMesh.from_group(group, "cpu") for group in groups()})
    wanted, *others = [outcome(call, group, backend) for group in meshes]
    assert call in REFUSED or not wanted.error, wanted
    for got in others:
        same(got.result, wanted.result)
        assert replace(got, result=None) == replace(wanted, result=None)


def works_as_arguments() -> None:
    """A compiled function takes works, and is not compiled again for each."""
    with fresh_compiler("eager") as compiler:

        def work_and_tensor(work: Any, x: Tensor) -> Tensor:
            work.wait()
            return x + 1

        compiled = torch.compile(work_and_tensor, backend=compiler)
        for _ in range(12):  # torch gives up compiling after eight times
            x = torch.ones(3)
            same(compiled(dist.all_reduce(x, async_op=True), x), torch.full((3,), dist.get_world_size() + 1.0))
        assert compiler.frame_count == 1


def errors() -> None:
    """The error of a compiled call is the call's own."""
    with fresh_compiler("eager") as compiler:

        def to_nobody(x: Tensor) -> Tensor:
            dist.broadcast(x, 7)
            return x

        try:
            torch.compile(to_nobody, backend=compiler)(torch.ones(3))
            text = "it was taken"
        except polyccl.InvalidArgument as error:
            text = str(error)
    assert "root must be a rank from 0 to 1, and is 7" in text


def communicators() -> None:
    """A call of a communicator breaks the graph; its rank and size are constants."""
    comm = dist.group.WORLD.get_comm()
    with fresh_compiler("eager") as compiler:

        def summed(x: Tensor) -> Tensor:
            comm.all_reduce(x, polyccl.ReduceOp.SUM)
            return x + 1

        same(torch.compile(summed, backend=compiler)(torch.ones(3)), torch.full((3,), comm.get_size() + 1.0))
        assert breaks() == 1

        def placed(x: Tensor) -> Tensor:
            return x * comm.get_size() + comm.get_rank()

        compiled = torch.compile(placed, backend=compiler, fullgraph=True)
        same(compiled(torch.ones(3)), placed(torch.ones(3)))


# ---- training ----------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers, alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def ddp(group: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(Net(), process_group=group)


def fsdp2(group: Any) -> nn.Module:
    model, mesh = Net(), DeviceMesh.from_group(group, "cpu")
    for part in (model.first, model.last, model):
        fully_shard(part, mesh=mesh)
    return model


def trained(make: Callable[[Any], nn.Module], group: Any) -> tuple[list[int], list[Tensor]]:
    """Graphs after each of three steps of a compiled model, and its parameters in the end."""
    with fresh_compiler("aot_eager") as compiler:
        model = make(group)
        compiled = torch.compile(model, backend=compiler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows, graphs = torch.arange(20.0).view(5, 4) / 10 + dist.get_rank(), []
        for _ in range(3):
            optimizer.zero_grad()
            compiled(rows).square().mean().backward()
            optimizer.step()
            graphs.append(compiler.frame_count)
        values = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
        return graphs, [each.detach() for each in values]


def trained_as_on_c10d(name: str) -> None:
    """The compiled model learns the same on all groups."""
    (graphs, wanted), *others = [trained(globals()[name], group) for group in groups()]
    for each, values in others:
        assert each == graphs
        torch.testing.assert_close(values, wanted)


def balanced() -> None:
    """A compiled step of uneven batches gives the gradients of an uncompiled one."""

    def gradients(compiled: bool) -> list[Tensor]:
        model = ddp(None)
        balance = polyccl.torch.balance(model, 2 + dist.get_rank())
        rows = torch.ones(2 + dist.get_rank(), 4)

        def step(rows: Tensor) -> None:
            with balance.step():
                model(rows).square().mean().backward()

        with fresh_compiler("eager") as compiler:
            (torch.compile(step, backend=compiler) if compiled else step)(rows)
        return [each.grad for each in model.parameters() if each.grad is not None]

    torch.testing.assert_close(gradients(True), gradients(False))
