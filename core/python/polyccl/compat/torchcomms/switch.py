"""What torch.distributed makes its groups of where it is told to use torchcomms: PolyCCL's process groups.

torch asks for a communicator (`new_comm`) for each device type of a group, and for a wrapper of it (`BackendWrapper`). Here the
first communicator carries the whole group, as it does for the backend ``polyccl``. What torch does not hand on (the group's rank
and size, its timeout, options and device) is read where torch has it, up the stack.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ... import arguments, create
from ...arguments import Timeout
from ...backends import KNOWN
from ...comm import Comm, Hints
from ...errors import InvalidArgument
from ...graphs import untraced
from ...torch import options as opts
from ...torch.create import checks, inherited_options
from ...torch.mesh import TorchsStore
from ...torch.process_group import ProcessGroup
from ...torch_hook import NAME
from . import comm as plain
from .comm import TorchComm, carrier
from .names import is_backend_built

PATIENCE = 10.0
"""Seconds that a group waits for what was issued, when torch ends it."""


@untraced
class GroupComm(TorchComm):
    """The communicator of a group that torch makes, splits and ends."""

    def __init__(self, group: create.Group, native: Any) -> None:
        super().__init__(group, native)
        self._times: Counter[tuple[int, ...]] = Counter()
        self._over = False

    def split(self, ranks: Sequence[int], name: str, hints: Hints = None, timeout: Timeout = None) -> GroupComm | None:
        """See `polyccl.Comm.split`; only the ranks of the new group need to come.

        torch calls it more often on other ranks than on the members, and its names for a group differ by rank where the ranks are
        in different numbers of groups: so both go by the members alone.
        """
        members = tuple(arguments.rank_list("ranks", ranks, self.get_size()))
        if not members:
            return None
        self._times[members] += 1
        shown = ",".join(map(str, members))
        if len(shown) > 40:
            shown = f"{len(members)} ranks {hashlib.sha256(shown.encode()).hexdigest()[:8]}"
        own = f"{self.get_name()}/{shown}#{self._times[members]}"
        child = create.split(self._group, self._times[members], list(members), own, hints, timeout, self._lost)
        return None if child is None else self.of(child)

    def finalize(self, timeout: Timeout = None) -> None:
        """Wait for what was issued, at most ten seconds, and end. May be called again, and after a failure: torch does."""
        if not self._over:
            self._over = True
            if not self.is_aborted():
                super().finalize(PATIENCE if timeout is None else timeout)


@untraced
class BackendWrapper(ProcessGroup):
    """A process group of torch.distributed over ``comm``: torchcomms' ``_BackendWrapper``.

    It is a whole group, and not one device's part of a group: hand it to whatever takes a group (DDP, FSDP2), or let torch make it;
    ``ProcessGroup._register_backend`` does not take it.
    """

    def __init__(self, comm: Comm) -> None:
        call = _torchs_call()
        if call is None:
            kind = torch.device(comm._group.device.replace("hip", "cuda")).type
            super().__init__(comm, TorchsStore(comm._group.store), device_types=sorted({"cpu", kind}))
        else:
            store, bound = call["backend_prefix_store"], call.get("device_id")
            super().__init__(comm, store, _options(call), list(_backends(call)), bound)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """See `polyccl.torch.ProcessGroup.split_group`. The store goes by the communicator's name, which all ranks share."""
        group = super().split_group(new_ranks, timeout, opts, group_name, group_desc, device_types)
        if group is not None and self._store is not None:
            group._store = c10d.PrefixStore(f"{group.get_comm().get_name()}/", self._store)
        return group


def new_comm(
    backend: str, device: Any, name: str | None = None, store: Any = None, hints: Mapping[str, str] | None = None
) -> TorchComm:
    """The communicator of a group that torch makes; where it is not torch that asks, as torchcomms' ``new_comm``."""
    call = _torchs_call()
    if call is None:
        return plain.new_comm(backend, device, name, store=store, hints=hints)
    options, backends = _options(call), _backends(call)
    if options.backend is None:
        options = replace(options, backend=_carrier(backends))
    made = create.new_comm(
        opts.backend_of(options),
        opts.device_of(options, list(backends), call.get("device_id")),
        f"group {name}",
        options.abort_process_on_timeout_or_error,
        call["timeout"],
        options.is_high_priority_stream,
        store,
        hints=options.hints,
        rank=call["group_rank"],
        size=call["group_size"],
        check=checks(),
    )
    return GroupComm.of(made)


def takes(backend: str) -> bool:
    """Whether groups of ``backend`` are PolyCCL's: of every library that it knows, also where this rank's own is another one."""
    return backend in KNOWN or is_backend_built(backend)


def _carrier(backends: Mapping[str, str]) -> str | None:
    """What carries a group with these backends, by device type: the accelerator's where there is one, else the first.

    None: what PolyCCL's options and environment say.
    """
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    name = backends.get(here.type if here is not None else "", next(iter(backends.values())))
    if name == NAME:
        return None
    if torch.version.hip is not None:  # torch calls AMD's libraries by NVIDIA's names
        name = {"nccl": "rccl", "ncclx": "rcclx"}.get(name, name)
    return carrier(name)


def _backends(call: Mapping[str, Any]) -> dict[str, str]:
    return {str(kind): str(name) for kind, name in call["backend_config"].get_device_backend_map().items()}


def _options(call: Mapping[str, Any]) -> opts.Options:
    """The options of the group: PolyCCL's where they are given, else those of the default group."""
    given = call.get("backend_options")
    try:
        return opts.read(given, inherited_options())
    except InvalidArgument:
        warnings.warn(
            f"pg_options of the class {type(given).__qualname__} change nothing where torch uses torchcomms; give "
            "polyccl.torch.Options",
            stacklevel=2,
        )
        return inherited_options() or opts.Options()


def _torchs_call() -> dict[str, Any] | None:
    """What torch knows of the group that it is making: the variables of its function that does. None where it makes none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    return None if frame is None else frame.f_locals


__all__ = ["BackendWrapper", "GroupComm", "new_comm", "takes"]
