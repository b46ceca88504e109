"""What torch asks of the backend of a group for a device: here, the group itself, seen from there."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch

from ..graphs import untraced
from .options import Options

if TYPE_CHECKING:
    from .process_group import ProcessGroup


@untraced
class Backend:
    """The backend that ``group._get_backend(device)`` gives. c10d's own class cannot be subclassed in Python."""

    supports_splitting = True
    supports_coalescing = True
    supports_shrinking = False
    supports_time_estimate = False

    def __init__(self, group: ProcessGroup) -> None:
        self._group = weakref.ref(group)

    def __getattr__(self, name: str) -> Any:
        group = self._group()
        if group is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(group, name)

    @property
    def options(self) -> Options:
        """The options of the group."""
        return cast(Options, self.__getattr__("_options"))

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether the backend allocates tensors itself: no."""
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Groups are connected when they are made."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Ranks outside a new group have nothing to do."""


__all__ = ["Backend"]
