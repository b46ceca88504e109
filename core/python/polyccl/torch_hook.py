"""How torch comes to know the backend ``polyccl``, whichever of the two packages is imported first.

An installed PolyCCL is known to every `import torch` by torch's own entry point (`polyccl_autoload`). This module serves where that
is turned off, or where PolyCCL lies on the path without being installed. It imports no torch: where torch.distributed is not
loaded yet, it watches imports, and registers the backend right after torch.distributed is there.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from polyccl_autoload import DEVICES, NAME, register

from . import graphs


def when_torch_is_there() -> None:
    """Register the backend now where torch.distributed is loaded, else as soon as it is."""
    if not _register_if_loaded() and not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register_if_loaded() -> bool:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not hasattr(dist, "Backend"):
        return False
    _introduce()
    return True


def _introduce() -> None:
    """Register the backend, and let torch.compile know what it is not to trace."""
    register()
    graphs.torch_is_there()


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
        _introduce()

    loader.exec_module = run_and_register


__all__ = ["DEVICES", "NAME", "register", "when_torch_is_there"]
