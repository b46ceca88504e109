"""torchcomms' small types: options, enumerations, the entries of a batch, and what stands for things that PolyCCL has not."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from typing import Any, NoReturn

from ... import arguments, backends, environment
from ..._native import Work as TorchWork
from ...deadlines import bounded
from ...errors import UnsupportedOperation
from ...spec import Reduction as RedOpType


class Timeout(timedelta):
    """A length of time: a timedelta under torchcomms' name for it."""


def _default_timeout() -> timedelta:
    return timedelta(seconds=bounded(environment.seconds("POLYCCL_TIMEOUT")))


@dataclass
class CommOptions:
    """What a communicator was created with. `TorchComm.get_options` gives a copy: to change it changes no communicator."""

    abort_process_on_timeout_or_error: bool = False
    timeout: timedelta = field(default_factory=_default_timeout)
    store: Any = None
    enable_reconfigure: bool = False
    hints: dict[str, str] = field(default_factory=dict)


@dataclass
class BatchP2POptions:
    """The terms of a batch: how long it may take (None: the communicator's timeout), and hints."""

    timeout: timedelta | None = None
    hints: dict[str, str] = field(default_factory=dict)


@dataclass
class ReconfigureOptions:
    """The arguments of `TorchComm.reconfigure`, which PolyCCL refuses."""

    uuid: int = 0
    init_handles: Collection[str] = ()
    timeout: timedelta | None = None
    hints: dict[str, str] = field(default_factory=dict)


class P2POpType(Enum):
    """Which way an entry of a batch goes."""

    SEND = auto()
    RECV = auto()


class P2POp(tuple[bool, Any, int, int]):
    """An entry of `BatchSendRecv.ops`. It is what PolyCCL's batches hold, ``(sends, tensor, peer, tag)``, with names."""

    __slots__ = ()

    def __new__(cls, type: P2POpType, tensor: Any, peer: int, tag: int = 0) -> P2POp:
        arguments.instance("type", type, P2POpType, "P2POpType.SEND or P2POpType.RECV")
        return super().__new__(cls, (type is P2POpType.SEND, tensor, peer, tag))

    @property
    def type(self) -> P2POpType:
        """SEND or RECV."""
        return P2POpType.SEND if self[0] else P2POpType.RECV

    @property
    def tensor(self) -> Any:
        """What is sent, or received into."""
        return self[1]

    @property
    def peer(self) -> int:
        """The other rank."""
        return self[2]


class WorkStatus(Enum):
    """How far a work is. PolyCCL's works tell by ``is_completed()`` and ``exception()``."""

    NOT_STARTED = auto()
    INPROGRESS = auto()
    COMPLETED = auto()
    TIMEDOUT = auto()
    ERROR = auto()


class OpName(Enum):
    """The operations, as hooks name them."""

    send = auto()
    recv = auto()
    broadcast = auto()
    all_reduce = auto()
    reduce = auto()
    all_gather = auto()
    all_gather_v = auto()
    all_gather_single = auto()
    reduce_scatter = auto()
    reduce_scatter_v = auto()
    reduce_scatter_single = auto()
    all_to_all = auto()
    all_to_all_single = auto()
    all_to_all_v_single = auto()
    barrier = auto()
    scatter = auto()
    gather = auto()
    gather_single = auto()
    split = auto()
    new_window = auto()
    finalize = auto()


class TorchCommWinAccessType(Enum):
    """How a window's memory is reached. PolyCCL has no windows."""

    WIN_ACCESS_TYPE_UNIFIED = auto()
    WIN_ACCESS_TYPE_SEPARATE = auto()


class _Absent:
    """A class of torchcomms whose objects PolyCCL cannot make. It can be named, in annotations and in isinstance()."""

    _why = ""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        raise UnsupportedOperation(f"{type(self).__name__}: {self._why}")


class TorchCommWindow(_Absent):
    """Memory that other ranks write to by themselves."""

    _why = "one-sided windows are not supported by this version of PolyCCL; use send and recv"


class TorchCommWindowAttr(_Absent):
    """How a window is reached."""

    _why = TorchCommWindow._why


class RemovableHandle(_Absent):
    """A hook that was registered."""

    _why = "hooks are not supported by this version of PolyCCL"


class TorchCommBackend(_Absent):
    """The base of backends that are written in Python."""

    _why = (
        "PolyCCL's backends are plugins behind a C header (polyccl/backend.h; `polyccl info` says where it is), and not Python "
        "classes; POLYCCL_BACKEND_PATH names the folder of a plugin"
    )


def register_backend(name: str, backend: Callable[..., Any]) -> NoReturn:
    """Backends that are Python classes are not there. Raises UnsupportedOperation."""
    raise UnsupportedOperation(f"register_backend('{name}'): {TorchCommBackend._why}")


def get_mem_allocator(backend: str) -> NoReturn:
    """Allocators of a library's own are not there. Raises UnsupportedOperation."""
    raise UnsupportedOperation(f"get_mem_allocator('{backend}'): PolyCCL allocates no tensors; use those that torch allocates")


def built_backends() -> list[str]:
    """The backends of this installation: with a plugin, or without the need of one."""
    return backends.available()


def is_backend_built(name: str) -> bool:
    """Whether this installation has the backend; whether its library loads is another matter."""
    return name in built_backends()


__all__ = [
    "BatchP2POptions",
    "CommOptions",
    "OpName",
    "P2POp",
    "P2POpType",
    "ReconfigureOptions",
    "RedOpType",
    "RemovableHandle",
    "Timeout",
    "TorchCommBackend",
    "TorchCommWinAccessType",
    "TorchCommWindow",
    "TorchCommWindowAttr",
    "TorchWork",
    "WorkStatus",
    "built_backends",
    "get_mem_allocator",
    "is_backend_built",
    "register_backend",
]
