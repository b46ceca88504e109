"""Small trainings, as rank functions: each runs twenty steps and returns its parameters, which one process must get too.

The whole batch of a step is the same for any number of ranks; each rank takes its share of the rows, and gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

STEPS = 20
ROWS = 12
"""Of a step's batch: divided evenly by 1, 2, 3 and 4 ranks."""


class Net(nn.Module):
    """Two layers and a branch that every other step leaves out."""

    def __init__(self, branch: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.extra = nn.Linear(16, 16) if branch else None

    def forward(self, rows: Tensor, use: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(rows))
        if self.extra is not None and use:
            hidden = hidden + self.extra(hidden)
        out: Tensor = self.last(hidden)
        return out


def batches(steps: int = STEPS) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(step, rows, targets): the whole batches."""
    random = torch.Generator().manual_seed(1)
    for step in range(steps):
        yield step, torch.randn(ROWS, 8, generator=random), torch.randn(ROWS, 4, generator=random)


def mine(tensor: Tensor, rank: int | None = None, size: int | None = None) -> Tensor:
    """This rank's rows."""
    rank, size = dist.get_rank() if rank is None else rank, size or dist.get_world_size()
    return tensor.chunk(size)[rank]


def mean_square(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, share: Callable[[Tensor], Tensor], **forward: Any) -> None:
    for _, rows, targets in batches():
        optimizer.zero_grad()
        mean_square(model(share(rows), **forward), share(targets)).backward()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    """The parameters, whole."""
    from torch.distributed.tensor import DTensor

    found = [parameter.detach() for parameter in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in found]


def alone(branch: bool = False) -> list[Tensor]:
    """What one process gets."""
    model = Net(branch)
    optimizer = optimizer_of(model)
    for step, rows, targets in batches():
        optimizer.zero_grad()
        mean_square(model(rows, **({"use": step % 2 == 0} if branch else {})), targets).backward()
        optimizer.step()
    return values(model)


# ---- replicas -----------------------------------------------------------------------------------------------------------------


def ddp(**options: Any) -> list[Tensor]:
    model = nn.parallel.DistributedDataParallel(Net(), **options)
    train(model, optimizer_of(model), mine)
    return values(model)


def ddp_static() -> list[Tensor]:
    return ddp(static_graph=True)


def ddp_unused() -> list[Tensor]:
    """A branch that all ranks use in even steps only."""
    model = nn.parallel.DistributedDataParallel(Net(branch=True), find_unused_parameters=True)
    optimizer = optimizer_of(model)
    for step, rows, targets in batches():
        optimizer.zero_grad()
        mean_square(model(mine(rows), use=step % 2 == 0), mine(targets)).backward()
        optimizer.step()
    return values(model)


def ddp_hook() -> list[Tensor]:
    """A hook of the user's own, in Python, on futures."""
    model = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.0001)

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and not as text
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    train(model, optimizer_of(model), mine)
    return values(model)


def ddp_half_hook() -> list[Tensor]:
    """torch's hook that sends float16 (that for bfloat16 wants NCCL)."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.parallel.DistributedDataParallel(Net())
    model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    train(model, optimizer_of(model), mine)
    return values(model)


def ddp_mixed() -> list[Tensor]:
    """Parameters and gradients that travel as float64, which the optimizer never sees."""
    model = nn.parallel.DistributedDataParallel(Net().double())
    optimizer = optimizer_of(model)
    for _, rows, targets in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            mean_square(model(mine(rows).double()), mine(targets).double()).backward()
        optimizer.step()
    return [each.float() for each in values(model)]


def ddp_join() -> int:
    """Rank r has r + 2 batches; `join` lets the others go on. The number of steps that this rank took."""
    from torch.distributed.algorithms.join import Join

    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = optimizer_of(model)
    steps = 0
    with Join([model]):
        for _, rows, targets in batches(dist.get_rank() + 2):
            optimizer.zero_grad()
            mean_square(model(mine(rows)), mine(targets)).backward()
            optimizer.step()
            steps += 1
    parameters = torch.cat([each.flatten() for each in values(model)])
    everyones = [torch.empty_like(parameters) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, parameters)
    torch.testing.assert_close(everyones[-1], parameters)
    return steps


def zero() -> list[Tensor]:
    """Optimizer states shared out over the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    train(model, optimizer, mine)
    return values(model)


# ---- shards -------------------------------------------------------------------------------------------------------------------


def fsdp2(own_group: bool = True) -> list[Tensor]:
    """fully_shard, with a group of its own for reduce_scatter where torch has that and it is wanted."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in (model.first, model.last, model):
        fully_shard(layer, mesh=mesh)
    if own_group and hasattr(model, "set_separate_reduce_scatter_group"):
        model.set_separate_reduce_scatter_group(True)
    train(model, optimizer_of(model), mine)
    return values(model)


def hsdp() -> list[Tensor]:
    """Replicas over the outer dimension, shards over the inner one: of two ranks, or of one where the number is odd."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    inner = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (size // inner, inner), mesh_dim_names=("replicate", "shard"))
    model = Net()
    for layer in (model.first, model.last, model):
        fully_shard(layer, mesh=mesh)
    train(model, optimizer_of(model), mine)
    assert mesh["shard"].size() == inner
    assert mesh["replicate", "shard"]._flatten("all").size() == size
    return values(model)


def tensor_parallel() -> list[Tensor]:
    """The first layer by columns, the second by rows; every rank sees the whole batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(Net(), mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()})
    train(model, optimizer_of(model), lambda rows: rows)
    return values(model)


# ---- the rest -----------------------------------------------------------------------------------------------------------------


def pipeline() -> list[Tensor] | None:
    """Rank 0 has the first layer and rank 1 the last; activations and their gradients go to and fro."""
    rank, model = dist.get_rank(), Net()
    if rank > 1:
        return None
    layer: nn.Module = model.first if rank == 0 else model.last
    optimizer = optimizer_of(layer)
    for _, rows, targets in batches():
        optimizer.zero_grad()
        if rank == 0:
            hidden = torch.tanh(layer(rows))
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            hidden = torch.empty(ROWS, 16)
            dist.recv(hidden, 0)
            mean_square(layer(hidden.requires_grad_()), targets).backward()
            assert hidden.grad is not None
            dist.send(hidden.grad, 0)
        optimizer.step()
    return values(layer)


def checkpoint(folder: str) -> None:
    """A sharded model is saved by all ranks and loaded into another."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model, other = Net(), Net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    for each in (model, other):
        fully_shard(each)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    for saved, loaded in zip(values(model), values(other), strict=True):
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


def compiled(backend: str) -> None:
    """A compiled function with collectives in its graph."""
    import torch.distributed._functional_collectives as fc

    group = dist.group.WORLD

    def work(rows: Tensor) -> Tensor:
        total = fc.all_reduce(rows * 2, "sum", group)
        whole = fc.all_gather_single(total + 1, 0, group)
        part: Tensor = fc.reduce_scatter_single(whole, "avg", 0, group)
        return part * 3

    torch._dynamo.reset()  # graphs know the size of a group by its name, which a group of an earlier test had
    rows = torch.arange(4.0) + dist.get_rank()
    torch.testing.assert_close(torch.compile(work, backend=backend, fullgraph=True)(rows), work(rows))


def balanced() -> list[Tensor]:
    """Rank r's batch has r + 1 shares of the rows: uneven, and exact nevertheless."""
    import polyccl.torch

    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = [ROWS * (r + 1) // (size * (size + 1) // 2) for r in range(size - 1)]
    sizes.append(ROWS - sum(sizes))

    def share(tensor: Tensor) -> Tensor:
        return tensor.split(sizes)[rank]

    model = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
    balance = polyccl.torch.balance(model, sizes[rank])
    optimizer = optimizer_of(model)
    for _, rows, targets in batches():
        optimizer.zero_grad()
        with balance.step(sizes[rank]):
            mean_square(model(share(rows)), share(targets)).backward()
        optimizer.step()
    suggested = balance.suggest()
    everyones: list[Any] = [None] * size
    dist.all_gather_object(everyones, suggested)
    assert all(each == suggested for each in everyones)
    assert sum(suggested) == ROWS
    assert min(suggested) >= 1
    return values(model)
