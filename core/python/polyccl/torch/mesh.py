"""A DeviceMesh of communicators that are there already: `init_device_mesh`, with torchcomms' arguments.

Where torch.distributed is initialized, torch's own ``init_device_mesh`` makes a mesh and its groups, PolyCCL's as well. Here the
communicators come first, each dimension's with options of its own: an outer one that is a bridge, inner ones that are islands.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from .. import arguments
from .. import store as stores
from ..comm import Comm
from ..errors import CommTimeout, InvalidArgument, UnsupportedOperation
from ..graphs import untraced
from ..torch_hook import NAME
from .process_group import ProcessGroup

_numbers = itertools.count()


@untraced
def init_device_mesh(mesh_dim_comms: Sequence[Comm], mesh_dim_names: Sequence[str], _global_comm: Comm | None = None) -> DeviceMesh:
    """A mesh whose dimension i is ``mesh_dim_comms[i]``, called ``mesh_dim_names[i]``. Collective over all ranks; blocks.

    ``_global_comm`` spans all ranks of the mesh; one dimension needs none. It becomes torch's default group where there is none
    yet; else the default group must have as many ranks, in the same order. Slices and flattening work as in every mesh.

    Raises InvalidArgument where names and communicators do not fit, or the communicators form no grid.
    """
    comms, names = arguments.sequence("mesh_dim_comms", mesh_dim_comms), tuple(arguments.sequence("mesh_dim_names", mesh_dim_names))
    for place, name in enumerate(names):
        arguments.text(f"mesh_dim_names[{place}]", name)
    for place, comm in enumerate(comms):
        arguments.instance(f"mesh_dim_comms[{place}]", comm, Comm, "a communicator")
    if _global_comm is not None:
        arguments.instance("_global_comm", _global_comm, Comm, "a communicator, or None")
    world = _global_comm if _global_comm is not None else comms[0] if len(comms) == 1 else None
    if not comms or len(names) != len(comms) or len(set(names)) != len(names):
        raise InvalidArgument(f"init_device_mesh: {len(comms)} communicators need as many distinct names, and have {names}")
    if world is None:
        raise InvalidArgument("init_device_mesh: a mesh of several dimensions needs _global_comm, a communicator of all its ranks")
    groups: dict[int, ProcessGroup] = {}
    if not dist.is_initialized():
        groups[id(world)] = _register(world, list(range(world.get_size())), default=True)
    elif (dist.get_rank(), dist.get_world_size()) != (world.get_rank(), world.get_size()):
        raise InvalidArgument(
            f"init_device_mesh: this is rank {dist.get_rank()} of {dist.get_world_size()} in torch's default group, and rank "
            f"{world.get_rank()} of {world.get_size()} in {world!r}; give a communicator like the default group"
        )
    mesh = _grid(world, comms)
    for comm in comms:
        if id(comm) not in groups:
            groups[id(comm)] = _register(comm, _gathered(comm, [world.get_rank()]).flatten().tolist())
    kind = torch.device(world._group.device.replace("hip", "cuda")).type
    ordered = [groups[id(comm)] for comm in comms]
    return DeviceMesh.from_group(ordered[0] if len(ordered) == 1 else ordered, kind, mesh, mesh_dim_names=names)


def _gathered(comm: Comm, row: Sequence[int]) -> torch.Tensor:
    """Every rank's row of whole numbers, shape (ranks, numbers)."""
    device = comm._group.device.replace("hip", "cuda")
    own = torch.tensor(row, dtype=torch.int64, device=device)
    table = torch.empty(comm.get_size(), len(row), dtype=torch.int64, device=device)
    comm.all_gather_single(table, own).wait()
    return table.cpu()


def _grid(world: Comm, comms: Sequence[Comm]) -> torch.Tensor:
    """Global ranks by their place in each dimension."""
    shape = [comm.get_size() for comm in comms]
    places = _gathered(world, [*shape, *(comm.get_rank() for comm in comms)]).tolist()
    grid = torch.full(shape, -1, dtype=torch.int)
    for rank, row in enumerate(places):
        if row[: len(shape)] == shape:
            grid[tuple(row[len(shape) :])] = rank
    if grid.numel() != world.get_size() or int(grid.min()) < 0:
        raise InvalidArgument(
            f"init_device_mesh: communicators of {' x '.join(map(str, shape))} ranks form no grid of the {world.get_size()} ranks"
        )
    return grid


def _register(comm: Comm, ranks: Sequence[int], default: bool = False) -> ProcessGroup:
    """Make the communicator a group that torch knows. ``ranks`` are the global ones."""
    kind = torch.device(comm._group.device.replace("hip", "cuda")).type
    group = ProcessGroup(comm, TorchsStore(comm._group.store), device_types=sorted({"cpu", kind}))
    name = c10d.GroupName(f"{comm.get_name()}:{next(_numbers)}")
    group._set_group_name(name)
    group._set_group_desc(comm.get_name())
    c10d._register_pg_in_world(
        group,
        backend_name=NAME,
        store=group.get_group_store(),
        group_name=name,
        backend_config=",".join(f"{device.type}:{NAME}" for device in group._device_types),
        rank_mapping={rank: position for position, rank in enumerate(ranks)},
        add_to_default_tag=True,
    )
    if default:
        c10d._update_default_pg(group)
    return group


@untraced
class TorchsStore(dist.Store):  # type: ignore[misc]
    """A store of PolyCCL as one of torch, as far as groups need one: set, get, wait, check, delete."""

    def __init__(self, store: stores.Store) -> None:
        super().__init__()
        self._polyccl = store

    def set(self, key: str, value: Any) -> None:
        """See torch's Store."""
        self._polyccl.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """See torch's Store."""
        return self._polyccl.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See torch's Store."""
        for key in keys:
            self._polyccl.get(key, None if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """See torch's Store."""
        try:
            for key in keys:
                self._polyccl.get(key, 0)
        except CommTimeout:
            return False
        return True

    def delete_key(self, key: str) -> bool:
        """See torch's Store; whether the key was there is not known."""
        self._polyccl.delete(key)
        return True

    def add(self, key: str, value: int) -> int:
        """Not supported: raises UnsupportedOperation."""
        raise UnsupportedOperation("add: PolyCCL's stores do not count; make the group with a store of torch")


__all__ = ["TorchsStore", "init_device_mesh"]
