"""PolyCCL: collectives across vendors.

Ranks that share a vendor's library form an island; a bridge joins islands, so that one `all_reduce` spans them::

    import polyccl

    comm = polyccl.new_comm("bridge", "cpu", name="dp")
    comm.all_reduce(tensor, polyccl.ReduceOp.SUM)

Importing this package imports neither torch nor NumPy. Where torch is there, it is a backend of torch.distributed: `polyccl.torch`.
"""

from importlib import import_module
from typing import Any

from . import errors, objects, torch_hook
from ._version import __version__
from .comm import BatchSendRecv, Comm
from .create import new_comm
from .errors import (
    Aborted,
    BackendUnavailable,
    CommError,
    CommTimeout,
    InvalidArgument,
    Mismatch,
    PeerLost,
    UnsupportedOperation,
)
from .options import CommOptions
from .reduce_op import ReduceOp
from .spec import Kind, Reduction
from .trace import TraceEvent

torch_hook.when_torch_is_there()


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for."""
    if name == "init_device_mesh":
        from .torch.mesh import init_device_mesh

        return init_device_mesh
    if name == "torch":
        return import_module(".torch", __name__)
    raise AttributeError(f"module 'polyccl' has no attribute '{name}'")


__all__ = [
    "Aborted",
    "BackendUnavailable",
    "BatchSendRecv",
    "Comm",
    "CommError",
    "CommOptions",
    "CommTimeout",
    "InvalidArgument",
    "Kind",
    "Mismatch",
    "PeerLost",
    "ReduceOp",
    "Reduction",
    "TraceEvent",
    "UnsupportedOperation",
    "__version__",
    "errors",
    "new_comm",
    "objects",
]
