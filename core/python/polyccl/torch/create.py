"""How torch.distributed gets its groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout

from .. import new_comm
from ..errors import InvalidArgument
from ..graphs import untraced
from ..torch_hook import DEVICES, NAME
from . import options as opts
from .process_group import ProcessGroup


@untraced
def create_group(base: Any, pg_options: Any = None) -> ProcessGroup:
    """Make a group, when torch asks for one: ``base`` is c10d's DistributedBackendOptions. Collective over the group's ranks.

    Raises what `polyccl.new_comm` does, and InvalidArgument for options that cannot be honoured.
    """
    types, bound = _asked_of_torch()
    options = opts.read(pg_options, inherited_options())
    # torch has put its default in place of a timeout that was not given; then the user's variable counts.
    chosen = base.timeout != default_pg_timeout or not os.environ.get("POLYCCL_TIMEOUT")
    timeout = base.timeout if chosen else None
    return make_group(base.store, base.group_rank, base.group_size, timeout, base.group_id, options, types, bound)


def make_group(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta | None,
    name: str,
    options: opts.Options,
    types: Sequence[str],
    bound: torch.device | None = None,
) -> ProcessGroup:
    """Make a group of ``size`` ranks that meet at torch's ``store``, for tensors of the device types. Raises what new_comm does."""
    comm = new_comm(
        opts.backend_of(options),
        opts.device_of(options, types, bound),
        f"group {name}",
        options.abort_process_on_timeout_or_error,
        timeout,
        options.is_high_priority_stream,
        store,
        hints=options.hints,
        rank=rank,
        size=size,
        check=checks(),
    )
    return ProcessGroup(comm, store, options, types, bound)


def checks() -> bool | None:
    """Whether groups compare their calls: with TORCH_DISTRIBUTED_DEBUG=DETAIL, as c10d's do, unless POLYCCL_CHECK is set."""
    if os.environ.get("POLYCCL_CHECK", "").strip():
        return None
    return True if dist.get_debug_level() == dist.DebugLevel.DETAIL else None


def inherited_options() -> opts.Options | None:
    """The options of the default group: its sub-groups lie on the same islands."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return world._options if isinstance(world, ProcessGroup) else None


def _asked_of_torch() -> tuple[list[str], Any]:
    """The device types that the group is to be for, and its ``device_id``.

    torch does not tell a Python group these two. It makes the group for all device types or for none, and drops what else the
    user named; so they are read where torch has them, up the stack, and another backend beside this one is refused.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    if frame is None:
        return DEVICES, None
    backends = {str(kind): str(name) for kind, name in frame.f_locals["backend_config"].get_device_backend_map().items()}
    others = sorted({name for name in backends.values() if name != NAME})
    if others:
        raise InvalidArgument(
            f"a group cannot have the backends {', '.join(others)} and {NAME} side by side: torch would drop one of them without "
            f'a word; make two groups, or use "{NAME}" for all devices (it copies tensors to its own device and back)'
        )
    return list(backends), frame.f_locals.get("device_id")


__all__ = ["checks", "create_group", "inherited_options", "make_group"]
