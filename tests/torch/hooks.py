"""What torch builds on futures, as rank functions: DDP's communication hooks, autograd's collectives, and joins.

Each gives for every case how it ended: a list of tensors, or the error in words.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from .training import Net, batches, mean_square, mine, optimizer_of, values

DDP = nn.parallel.DistributedDataParallel
Outcome = list[Tensor] | str


def outcome(case: Callable[[], list[Tensor]]) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [each.detach().clone() for each in case()]
        except Exception as error:
            return f"{type(error).__name__}: {error}"


# ---- communication hooks ------------------------------------------------------------------------------------------------------


def trained(register: Callable[[Any], Any], steps: int = 5) -> list[Tensor]:
    net = Net()
    if register is in_backward:
        in_backward(net)
    model = DDP(net)
    optimizer = (register is not in_backward and register(model)) or optimizer_of(model)
    for _, rows, targets in batches(steps):
        optimizer.zero_grad()
        mean_square(model(mine(rows)), mine(targets)).backward()
        optimizer.step()
    return values(model)


def power(**options: Any) -> Any:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **options)


def local_sgd(model: Any) -> None:
    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_group(list(range(dist.get_world_size()))), 2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def overlapped(model: Any) -> Any:
    state = optimizer_overlap_hooks._OptimizerHookState(
        torch.distributed.optim._FunctionalSGD([], lr=0.1, momentum=0.9, _allow_empty_param_list=True)
    )
    model.register_comm_hook(None, optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state))
    return torch.optim.SGD(model.parameters(), lr=0.0)


def in_backward(net: nn.Module) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})


def zero_step(interleaved: bool) -> Callable[[Any], Any]:
    def register(model: Any) -> Any:
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        make = ddp_zero_hook.hook_with_zero_step_interleaved if interleaved else ddp_zero_hook.hook_with_zero_step
        model.register_comm_hook(None, make(default_hooks.allreduce_hook, model, zero))
        return zero

    return register


def hook(function: Any, state: Callable[[], Any] = lambda: None) -> Callable[[Any], None]:
    return lambda model: model.register_comm_hook(state(), function)


def builtin(kind: str) -> Callable[[Any], None]:
    return lambda model: model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))


HOOKS: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: None,
    "allreduce": hook(default_hooks.allreduce_hook),
    "fp16_compress": hook(default_hooks.fp16_compress_hook),
    "bf16_compress": hook(default_hooks.bf16_compress_hook),
    "fp16_compress_wrapper": hook(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16_compress_wrapper": hook(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "powerSGD": hook(powerSGD_hook.powerSGD_hook, power),
    "powerSGD, rank 2": hook(powerSGD_hook.powerSGD_hook, lambda: power(matrix_approximation_rank=2, warm_start=False)),
    "fp16_compress_wrapper of powerSGD": hook(default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), power),
    "batched_powerSGD": hook(powerSGD_hook.batched_powerSGD_hook, power),
    "quantization_pertensor": hook(quantization_hooks.quantization_pertensor_hook),
    "quantization_perchannel": hook(quantization_hooks.quantization_perchannel_hook),
    "post_localSGD": local_sgd,
    "hook_then_optimizer": overlapped,
    "optimizer in backward": in_backward,
    "noop": hook(debugging_hooks.noop_hook),
    "built in: allreduce": builtin("ALLREDUCE"),
    "built in: fp16_compress": builtin("FP16_COMPRESS"),
    "zero step": zero_step(False),
    "zero step, interleaved": zero_step(True),
}


def hooks() -> dict[str, Outcome]:
    return {name: outcome(lambda register=register: trained(register)) for name, register in HOOKS.items()}


# ---- torch.distributed.nn ---------------------------------------------------------------------------------------------------


def differentiated(call: Callable[[list[Tensor]], Any]) -> list[Tensor]:
    """What a collective gives, and the gradients of its inputs where every result counts differently."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [(torch.arange(4.0) + 10 * rank + i).requires_grad_() for i in range(size)]
    found = call(inputs)
    results = [found] if isinstance(found, Tensor) else list(found)
    weights = [(i + 1) * torch.arange(1.0, each.numel() + 1).view_as(each) for i, each in enumerate(results)]
    torch.stack([(each * weight).sum() for each, weight in zip(results, weights, strict=True)]).sum().backward()
    return results + [each.grad for each in inputs if each.grad is not None]


def autograd() -> dict[str, Outcome]:
    from torch.distributed.nn import functional as dnn

    size, world = dist.get_world_size(), dist.group.WORLD
    cases: dict[str, Callable[[list[Tensor]], Any]] = {
        "broadcast": lambda x: dnn.broadcast(x[0].clone(), 1, world),
        "gather": lambda x: dnn.gather(x[0], 1, world),
        "scatter": lambda x: dnn.scatter(x, 1, world),
        # What is at other ranks than the root is c10d's scratch.
        "reduce": lambda x: dnn.reduce(x[0].clone(), 1, group=world) * float(dist.get_rank() == 1),
        "reduce_scatter": lambda x: dnn.reduce_scatter(torch.zeros(4), x, group=world),
        "all_gather": lambda x: dnn.all_gather(x[0], world),
        "_all_gather_base": lambda x: dnn._all_gather_base(torch.zeros(4 * size), x[0], world),
        "all_to_all": lambda x: dnn.all_to_all([torch.zeros(4) for _ in range(size)], x, world),
        "all_to_all_single": lambda x: dnn.all_to_all_single(torch.zeros(4), x[0], group=world),
        "all_reduce": lambda x: dnn.all_reduce(x[0].clone(), group=world),
        "all_reduce, MAX": lambda x: dnn.all_reduce(x[0].clone(), dist.ReduceOp.MAX, world),
        "all_reduce, transposed": lambda x: dnn.all_reduce(x[0].view(2, 2).t(), group=world),
    }
    return {name: outcome(lambda call=call: differentiated(call)) for name, call in cases.items()}


# ---- joins --------------------------------------------------------------------------------------------------------------------


def joined(join: Callable[[Any, Any], AbstractContextManager[Any]], sharded: bool = False, **options: Any) -> list[Tensor]:
    """Rank r has r + 2 batches. The parameters, and the number of steps that this rank took."""
    model = DDP(Net(), **options)
    optimizer: Any = optimizer_of(model)
    if sharded:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    steps = 0
    with join(model, optimizer):
        for _, rows, targets in batches(dist.get_rank() + 2):
            optimizer.zero_grad()
            mean_square(model(mine(rows)), mine(targets)).backward()
            optimizer.step()
            steps += 1
    return [*values(model), torch.tensor(steps)]


def accumulated() -> list[Tensor]:
    """A step without synchronisation before each with it, within a join."""
    model = DDP(Net())
    optimizer = optimizer_of(model)
    with model.join(divide_by_initial_world_size=False):
        for _, rows, targets in batches(dist.get_rank() + 2):
            with model.no_sync():
                mean_square(model(mine(rows)), mine(targets)).backward()
            mean_square(model(mine(rows)), mine(targets)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def stops_early() -> list[Tensor]:
    """All ranks raise torch's own error when the first has no more batches."""
    with pytest.raises(RuntimeError, match="exhausted"):
        joined(lambda model, optimizer: model.join(throw_on_early_termination=True))
    return []


def joins() -> dict[str, Outcome]:
    cases: dict[str, Callable[[], list[Tensor]]] = {
        "DDP.join": lambda: joined(lambda model, optimizer: model.join()),
        "DDP.join, of the ranks left": lambda: joined(lambda model, optimizer: model.join(divide_by_initial_world_size=False)),
        "DDP.join, unused parameters": lambda: joined(
            lambda model, optimizer: model.join(divide_by_initial_world_size=False), find_unused_parameters=True
        ),
        "DDP.join, no_sync": accumulated,
        "DDP.join, throw_on_early_termination": stops_early,
        "Join": lambda: joined(lambda model, optimizer: Join([model])),
        "Join, of the ranks left": lambda: joined(
            lambda model, optimizer: Join([model], divide_by_initial_world_size=False), bucket_cap_mb=0.0001
        ),
        "Join of DDP and ZeRO": lambda: joined(lambda model, optimizer: Join([model, optimizer]), sharded=True),
        "Join of DDP and ZeRO, of the ranks left": lambda: joined(
            lambda model, optimizer: Join([model, optimizer], divide_by_initial_world_size=False), sharded=True
        ),
    }
    return {name: outcome(case) for name, case in cases.items()}
