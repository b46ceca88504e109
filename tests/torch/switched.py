"""What rank processes do in the tests of torch's own switch: its groups are PolyCCL's, whatever library they name."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import polyccl
from polyccl.compat import torchcomms
from polyccl.torch import ProcessGroup
from tests.jobs.shapes import Shape

from .calls import equal, row


def in_group(rank: int, islands: str, store: str, what: tuple[str, str, tuple[Any, ...]], init: dict[str, Any]) -> Any:
    """Run the function ``what`` as rank ``rank`` of a default group that torch makes by its switch."""
    torch.set_num_threads(1)
    module, name, arguments = what
    shape = Shape(islands)
    local, label = shape.places[rank]
    function = getattr(importlib.import_module(module), name)
    told = {"POLYCCL_LOCAL": local, "POLYCCL_ISLAND": label}
    torchcomms.install()
    try:
        with mock.patch.dict(os.environ, told), mock.patch.object(dist.config, "use_torchcomms", True):
            terms = {"backend": "gloo", "timeout": timedelta(seconds=60), **init}
            dist.init_process_group(store=dist.FileStore(store, shape.size), rank=rank, world_size=shape.size, **terms)
            try:
                return function(*arguments)
            finally:
                dist.destroy_process_group()
    finally:
        torchcomms.uninstall()


def groups() -> None:
    """Groups of groups, in torch's three ways, each with its own timeout and on its members' islands."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    assert isinstance(world, ProcessGroup)
    assert dist.get_backend() == "gloo"
    assert world.get_comm().get_options().timeout == timedelta(seconds=60)
    for _ in range(2):
        pair = dist.new_group([0, 1], timeout=timedelta(seconds=50), group_desc="pair")
        if rank < 2:
            tensor = row(rank)
            dist.all_reduce(tensor, group=pair)
            equal(tensor, row(1))
            assert pair.get_comm().get_options().timeout == timedelta(seconds=50)
            assert pair.group_desc == "pair"
            assert dist.get_process_group_ranks(pair) == [0, 1]
            pair.monitored_barrier(timedelta(seconds=20))
            dist.destroy_process_group(pair)
        else:
            assert pair == dist.GroupMember.NON_GROUP_MEMBER
    parity = [list(range(start, size, 2)) for start in (0, 1)]
    part = dist.split_group(split_ranks=parity)
    assert part.size() == len(parity[rank % 2])
    tensor = row(rank)
    dist.all_reduce(tensor, group=part)
    equal(tensor, row(sum(parity[rank % 2])))
    mine, _ = dist.new_subgroups_by_enumeration([[0], list(range(1, size))])
    tensor = row(1)
    dist.all_reduce(tensor, group=mine)
    equal(tensor, row(1 if rank == 0 else size - 1))
    everyone = dist.new_group()
    dist.all_reduce(tensor, group=everyone)
    equal(tensor, row(1 + (size - 1) ** 2))


def groups_that_overlap() -> None:
    """Ranks of one group may be in different numbers of others, where torch gives the group a name of its own on each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for first in range(size - 1):
        group = dist.new_group([first, first + 1])
        if first <= rank <= first + 1:
            tensor = row(rank)
            dist.all_reduce(tensor, group=group)
            equal(tensor, row(2 * first + 1))
            group.monitored_barrier(timedelta(seconds=20))


def meshes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("outer", "inner"))
    for name, ranks in (("inner", [rank // 2 * 2, rank // 2 * 2 + 1]), ("outer", list(range(rank % 2, size, 2)))):
        group = mesh.get_group(name)
        assert isinstance(group, ProcessGroup)
        assert dist.get_process_group_ranks(group) == ranks
        tensor = row(rank)
        dist.all_reduce(tensor, group=group)
        equal(tensor, row(sum(ranks)))
    tensor = row(1)
    dist.all_reduce(tensor, group=mesh._flatten("flat").get_group())
    equal(tensor, row(size))
    islands = dist.group.WORLD.get_comm().islands
    assert mesh.get_group("outer").get_comm().islands == ([[0], [1]] if len(islands) == 2 else [[0, 1]])


def with_options() -> None:
    """A group of several backends is one communicator, here on the host, with the options that it was given."""
    comm = dist.group.WORLD.get_comm()
    if not torch.accelerator.is_available():
        assert comm.get_device() == torch.device("cpu")
    assert (comm.get_backend(), comm.get_options().hints) == ("host", {"chunk_bytes": "4096"})
    tensor = row(1)
    dist.all_reduce(tensor)
    equal(tensor, row(dist.get_world_size()))
    part = dist.new_group()
    assert part.get_comm().get_options().hints == {"chunk_bytes": "4096"}


def of_polyccl() -> None:
    """Whoever names PolyCCL gets it, switch or not."""
    assert isinstance(dist.group.WORLD, ProcessGroup)
    assert isinstance(dist.group.WORLD.get_comm(), polyccl.Comm)
    tensor = row(1)
    dist.all_reduce(tensor)
    equal(tensor, row(dist.get_world_size()))
