"""PolyCCL as a backend of torch.distributed: ``dist.init_process_group("polyccl")``.

`Options` says what carries a group, `ProcessGroup` is the group, `process_group` makes one of a `polyccl.Comm`, `init_device_mesh`
a mesh of several, `monitored_barrier` finds ranks that do not come, `balance` weighs gradients of uneven batches. Importing this
package imports torch; ``import polyccl`` alone does not.
"""

from __future__ import annotations

from ..torch_hook import register
from .options import Options
from .process_group import ProcessGroup
from .work import Work

register()

__all__ = ["Options", "ProcessGroup", "Work", "register"]
