"""HSDP over two islands: shards inside each island, replicas across the bridge.

    polyccl launch --islands gloo=2,host=2 -- python examples/hsdp.py

The inner dimension of the mesh is one island, so that all_gather and reduce_scatter, which move most bytes, stay on its library;
only the all_reduce of gradient shards crosses. Islands of one size are needed, with consecutive ranks, as `polyccl launch` makes
them.
"""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import polyccl


def main() -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("polyccl")
    world: polyccl.Comm = dist.group.WORLD.get_comm()
    inner = len(world.islands[0])
    mesh = init_device_mesh("cpu", (world.get_size() // inner, inner), mesh_dim_names=("bridge", "island"))
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    rows = torch.randn(64, 32)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(rows) - rows.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    if dist.get_rank() == 0:
        for name in mesh.mesh_dim_names:
            comm = mesh.get_group(name).get_comm()
            print(f"dimension '{name}': {comm.get_size()} ranks on {comm.get_backend()}")
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    if not losses[-1] < losses[0]:
        raise SystemExit("the loss does not fall")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
