"""torchcomms' names, on PolyCCL: a script for torchcomms runs once its import names this module, or unchanged after `install`.

Where only the import changes::

    import polyccl.compat.torchcomms as torchcomms
    from polyccl.compat.torchcomms import ReduceOp, new_comm

Where nothing changes, start the script by ``python -m polyccl.compat.torchcomms script.py``, or call `install` first: then
``import torchcomms`` gives this module, and torch's own switch (TORCH_DISTRIBUTED_USE_TORCHCOMMS=1) makes PolyCCL's groups.

A script names one library, since torchcomms joins no two. Where the job says what its islands are (POLYCCL_LOCAL, POLYCCL_ISLAND,
as ``polyccl launch`` does), each communicator spans them instead: its backend is then ``"auto"``, whatever the script names.

What torchcomms has and PolyCCL has not raises UnsupportedOperation. Importing this module does not import torch; using it does.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...reduce_op import ReduceOp
from . import hooks, objcol
from .aliases import install, uninstall
from .comm import BatchSendRecv, TorchComm, new_comm
from .names import (
    BatchP2POptions,
    CommOptions,
    OpName,
    P2POp,
    P2POpType,
    ReconfigureOptions,
    RedOpType,
    RemovableHandle,
    Timeout,
    TorchCommBackend,
    TorchCommWinAccessType,
    TorchCommWindow,
    TorchCommWindowAttr,
    TorchWork,
    WorkStatus,
    built_backends,
    get_mem_allocator,
    is_backend_built,
    register_backend,
)
from .names import is_backend_built as _is_backend_registered


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for."""
    if name in ("device_mesh", "_comms", "_backend_wrapper"):
        return import_module(f".{name}", __name__)
    if name == "_BackendWrapper":
        return import_module(".switch", __name__).BackendWrapper
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


__all__ = [
    "BatchP2POptions",
    "BatchSendRecv",
    "CommOptions",
    "OpName",
    "P2POp",
    "P2POpType",
    "ReconfigureOptions",
    "RedOpType",
    "ReduceOp",
    "RemovableHandle",
    "Timeout",
    "TorchComm",
    "TorchCommBackend",
    "TorchCommWinAccessType",
    "TorchCommWindow",
    "TorchCommWindowAttr",
    "TorchWork",
    "WorkStatus",
    "_is_backend_registered",
    "built_backends",
    "get_mem_allocator",
    "hooks",
    "install",
    "is_backend_built",
    "new_comm",
    "objcol",
    "register_backend",
    "uninstall",
]
