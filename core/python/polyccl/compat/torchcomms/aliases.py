"""`install`: ``import torchcomms`` gives PolyCCL, and torch.distributed takes it for torchcomms."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from ...errors import CommError

NAME = "torchcomms"
OURS = __name__.rpartition(".")[0]
SUBMODULES = ("_backend_wrapper", "_comms", "device_mesh", "hooks", "objcol")

_MISSING = object()
_before: dict[str, Any] | None = None  # of torch's names: what they were before `install`; None: not installed


def install() -> None:
    """Let ``import torchcomms`` and its submodules give PolyCCL's, and torch's switch ``use_torchcomms`` make PolyCCL's groups.

    The switch itself (TORCH_DISTRIBUTED_USE_TORCHCOMMS, ``torch.distributed.config.use_torchcomms``) stays as it is. Imports torch.
    May be called again. torchcomms may be installed beside PolyCCL, as long as this comes before torch is imported, which imports
    it; where it is imported already, raises CommError.
    """
    global _before
    there = sys.modules.get(NAME)
    if there is not None and there is not sys.modules[OURS]:
        raise CommError(
            f"install: torchcomms itself is imported already, from {getattr(there, '__file__', None)} (torch imports it where it "
            "is installed), and its objects may be in use. Call install() before anything imports torch, or start the script by "
            f"`python -m {OURS} script.py`, or uninstall torchcomms"
        )
    if _before is not None:
        return
    _import_torch_alone()
    for name in SUBMODULES:
        sys.modules[f"{NAME}.{name}"] = import_module(f"{OURS}.{name}")
    sys.modules[NAME] = sys.modules[OURS]
    _before = {}
    c10d = _torchs_module()
    if c10d is not None:
        for name, value in _for_torch().items():
            _before[name] = getattr(c10d, name, _MISSING)
            setattr(c10d, name, value)


def uninstall() -> None:
    """Undo `install`. Groups and communicators that were made stay as they are. Does nothing where it is not installed."""
    global _before
    if _before is None:
        return
    c10d = _torchs_module()
    for name, value in _before.items():
        if value is _MISSING:
            delattr(c10d, name)
        else:
            setattr(c10d, name, value)
    _before = None
    for alias in (NAME, *(f"{NAME}.{name}" for name in SUBMODULES)):
        sys.modules.pop(alias, None)


def _import_torch_alone() -> None:
    """Import torch without letting it import torchcomms."""
    if "torch" in sys.modules:
        return
    sys.modules[NAME] = None  # type: ignore[assignment]  # this is how Python is told that there is no such module
    try:
        import_module("torch")
    finally:
        del sys.modules[NAME]


def _torchs_module() -> ModuleType | None:
    """The module of torch that uses torchcomms; None where this torch does not."""
    try:
        c10d = import_module("torch.distributed.distributed_c10d")
    except ImportError:  # a torch without its distributed part
        return None
    return c10d if hasattr(c10d, "_TORCHCOMM_AVAILABLE") else None


def _for_torch() -> dict[str, Any]:
    """What torch's module would have imported from torchcomms; the last two since torch 2.14."""
    from . import hooks, switch

    return {
        "_TORCHCOMM_AVAILABLE": True,
        "_BackendWrapper": switch.BackendWrapper,
        "new_comm": switch.new_comm,
        "FlightRecorderHook": hooks.FlightRecorderHook,
        "_torchcomms_is_backend_built": switch.takes,
        "_torchcomms_is_backend_registered": switch.takes,
    }


__all__ = ["install", "uninstall"]
