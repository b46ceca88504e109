"""What rank processes do: join torch's default group, run a test's function, leave."""

from __future__ import annotations

import importlib
from typing import Any

from tests.jobs.shapes import Shape


def in_group(rank: int, islands: str, store: str, what: tuple[str, str, tuple[Any, ...]], how: dict[str, Any]) -> Any:
    """Run the function ``what`` as rank ``rank`` of a default group over ``islands``."""
    import torch
    from torch import distributed as dist

    import polyccl.torch

    torch.set_num_threads(1)
    module, name, arguments = what
    shape = Shape(islands)
    local, label = shape.places[rank]
    bridge = "," in islands
    options = polyccl.torch.Options(
        backend="auto" if bridge else local, hints={"local": local, "island": label} if bridge else {}, **how.get("options", {})
    )
    init = {"backend": "polyccl", "pg_options": options, **how.get("init", {})}
    dist.init_process_group(store=dist.FileStore(store, shape.size), rank=rank, world_size=shape.size, **init)
    try:
        return getattr(importlib.import_module(module), name)(*arguments)
    finally:
        dist.destroy_process_group()
