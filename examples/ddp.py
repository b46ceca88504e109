"""DistributedDataParallel over two islands, with batches as uneven as the ranks are fast.

    polyccl launch --islands gloo=2,host=2 -- python examples/ddp.py

The backend's name is all that differs from a script for one library. Rank r works on r + 1 parts of each batch; `balance` weighs
the gradients by what each rank did, so that the result is that of one process, which the script checks at its end.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import polyccl.torch

STEPS, ROWS = 50, 64


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step: rows of two numbers, and whether the first is the larger."""
    rows = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(step))
    return rows, (rows[:, :1] > rows[:, 1:]).float()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, the same everywhere, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def main() -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("polyccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    # The first ranks are the slow ones, say: they get less, and the last one what is left.
    sizes = [ROWS * (r + 1) // (size * (size + 1) // 2) for r in range(size - 1)]
    sizes.append(ROWS - sum(sizes))

    model, optimizer = make()
    ddp = DistributedDataParallel(model)
    balance = polyccl.torch.balance(ddp, sizes[rank])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    for step in range(STEPS):
        rows, wanted = (whole.split(sizes)[rank] for whole in batch(step))
        optimizer.zero_grad()
        with balance.step(len(rows)):
            nn.functional.binary_cross_entropy_with_logits(ddp(rows), wanted).backward()
        optimizer.step()
    suggested = balance.suggest()

    alone, optimizer = make()
    for step in range(STEPS):
        rows, wanted = batch(step)
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(alone(rows), wanted).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    if rank == 0:
        comm = dist.group.WORLD.get_comm()
        print(f"{size} ranks, islands {comm.islands}: batches of {sizes}, the same parameters as one process")
        print(f"batch sizes by the times measured: {suggested}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("start it with: polyccl launch --islands gloo=2,host=2 -- python examples/ddp.py")
    main()
