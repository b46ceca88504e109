"""What torch itself calls when it is imported (its entry point ``torch.backends``): it makes ``polyccl`` a backend by name.

A package of its own, so that `import torch` neither takes the time to load PolyCCL nor fails where PolyCCL cannot be loaded: both
come with the first group that asks for it. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns it off; then `import polyccl` does the same.
"""

from __future__ import annotations

from typing import Any

NAME = "polyccl"
DEVICES = ["cpu", "cuda", "xpu"]
"""The device types that ``init_process_group("polyccl")`` is for; ``cuda`` is AMD's on a torch for ROCm."""


def register() -> None:
    """Make ``polyccl`` a backend of torch.distributed. May be called again. Does nothing where torch has no distributed part."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create_group, extended_api=True, devices=DEVICES)


def _create_group(base: Any, pg_options: Any = None) -> Any:
    from polyccl.torch.create import create_group

    return create_group(base, pg_options)


__all__ = ["DEVICES", "NAME", "register"]
