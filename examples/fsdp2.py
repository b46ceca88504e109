"""FSDP2 over two islands: parameters, gradients and optimizer state are shared out over all ranks, across the bridge.

    polyccl launch --islands gloo=2,host=2 -- python examples/fsdp2.py

A script for plain torch but for the backend's name, which torch knows where PolyCCL is installed; run with ``gloo`` in its place it
does the same on one library::

    torchrun --nproc-per-node 4 examples/fsdp2.py gloo
"""

from __future__ import annotations

import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(backend: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    sequences = torch.randn(8, 10, 32)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(sequences) - sequences.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        losses.append(mean.item() / dist.get_world_size())
    own = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(f"{backend}: loss {losses[0]:.4f} to {losses[-1]:.4f}; rank 0 holds {own} of {whole} parameters")
    if not losses[-1] < losses[0]:
        raise SystemExit("the loss does not fall")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "polyccl")
