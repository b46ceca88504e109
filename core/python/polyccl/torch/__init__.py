"""PolyCCL as a backend of torch.distributed: ``dist.init_process_group("polyccl")``.

`Options` says what carries a group, `ProcessGroup` is the group, `init_device_mesh` makes a mesh of communicators, `balance` weighs
gradients of uneven batches. Importing this package imports torch; ``import polyccl`` alone does not.
"""

from __future__ import annotations

from ..torch_hook import register
from .balance import Balance, balance
from .mesh import init_device_mesh
from .options import Options
from .process_group import ProcessGroup
from .work import Work

register()

__all__ = ["Balance", "Options", "ProcessGroup", "Work", "balance", "init_device_mesh", "register"]
