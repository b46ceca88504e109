"""How torch comes to know the backend ``polyccl``, whichever of the two packages is imported first.

This module imports no torch: where torch.distributed is not loaded yet, it watches imports, and registers the backend right after
torch.distributed is there. What makes the groups, `polyccl.torch`, is imported with the first group.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

NAME = "polyccl"
DEVICES = ["cpu", "cuda", "xpu"]
"""The device types that ``init_process_group("polyccl")`` is for; ``cuda`` is AMD's on a torch for ROCm."""


def when_torch_is_there() -> None:
    """Register the backend now where torch.distributed is loaded, else as soon as it is."""
    if not _register_if_loaded() and not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def register() -> None:
    """Make ``polyccl`` a backend of torch.distributed. May be called again. Does nothing where torch has no distributed part."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create_group, extended_api=True, devices=DEVICES)


def _create_group(base: Any, pg_options: Any = None) -> Any:
    from .torch.create import create_group

    return create_group(base, pg_options)


def _register_if_loaded() -> bool:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not hasattr(dist, "Backend"):
        return False
    register()
    return True


class _Watch(MetaPathFinder):
    """Sees imports, finds nothing itself: registers the backend right after torch.distributed was imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Leave the search to the others; for torch.distributed, add a step to what they find."""
        if fullname == "torch" or not fullname.startswith("torch."):
            return None
        if fullname != "torch.distributed":
            # Where PolyCCL was imported while torch.distributed was half there, the next import of torch's own tells.
            if _register_if_loaded():
                self._leave()
            return None
        self._leave()
        for finder in list(sys.meta_path):
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                _then_register(spec)
                return spec
        return None

    def _leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _then_register(spec: importlib.machinery.ModuleSpec) -> None:
    """Let the module's loader register the backend once the module has run."""
    loader: Any = spec.loader
    run = loader.exec_module

    def run_and_register(module: ModuleType) -> None:
        run(module)
        register()

    loader.exec_module = run_and_register


__all__ = ["DEVICES", "NAME", "register", "when_torch_is_there"]
