"""What each rank does in the tests of meshes."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.distributed import batch_isend_irecv
from torch.distributed.device_mesh import init_device_mesh

import polyccl
from polyccl.store import FileStore
from tests.jobs.shapes import Shape


def torchs_own() -> None:
    """A mesh that torch makes: slices, flattening, and collectives along each dimension."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("outer", "inner"))
    for name, ranks in (("inner", [rank // 2 * 2, rank // 2 * 2 + 1]), ("outer", list(range(rank % 2, size, 2)))):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mesh[name].get_group())
        assert tensor.item() == sum(ranks)
        assert dist.get_process_group_ranks(mesh.get_group(name)) == ranks
    flat = mesh._flatten("flat")
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=flat.get_group())
    assert tensor.item() == size
    assert dist.get_backend(mesh.get_group("inner")) == "polyccl"


def of_communicators(rank: int, islands: str, folder: str) -> None:
    """A mesh of communicators: a bridge outside, islands inside."""
    shape = Shape(islands)
    local, label = shape.places[rank]
    world = polyccl.new_comm(
        "bridge",
        "cpu",
        "world",
        None,
        30,
        store=FileStore(folder),
        hints={"local": local, "island": label},
        rank=rank,
        size=shape.size,
    )
    inner = world.split([rank // 2 * 2, rank // 2 * 2 + 1], "inner")
    outer = world.split([rank % 2, rank % 2 + 2], "outer")
    assert inner is not None
    assert outer is not None
    mesh = polyccl.init_device_mesh((outer, inner), ("outer", "inner"), world)
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert mesh.get_group("outer").get_comm() is outer
    assert (len(outer.islands), len(inner.islands)) == (2, 1)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mesh["inner"].get_group())
    assert tensor.item() == (1 if rank < 2 else 5)
    dist.all_reduce(tensor)
    assert tensor.item() == 12
    third = dist.new_group([0, 3])
    if rank in (0, 3):
        dist.all_reduce(tensor, group=third)
        assert tensor.item() == 24
    try:
        polyccl.init_device_mesh((outer, inner), ("same", "same"), world)
    except polyccl.InvalidArgument as error:
        assert "distinct" in str(error)  # noqa: PT017
    else:
        raise AssertionError("two dimensions of one name were taken")
    dist.destroy_process_group()


def batch_on_a_device(rank: int, folder: str) -> None:
    """Both ranks send first, in a batch, in the group of a communicator on a device, the first group of these processes.

    They have imported torch's function by its name before there was a group.
    """
    comm = polyccl.new_comm("nccl", "cpu", "world", None, 30, store=FileStore(folder), rank=rank, size=2)
    group = polyccl.init_device_mesh((comm,), ("all",)).get_group()
    given, taken = torch.full((300_000,), float(rank)), torch.empty(300_000)
    operations = [dist.P2POp(dist.isend, given, 1 - rank, group), dist.P2POp(dist.irecv, taken, 1 - rank, group)]
    for work in batch_isend_irecv(operations):
        work.wait()
    assert (taken == 1 - rank).all()
    dist.destroy_process_group()
