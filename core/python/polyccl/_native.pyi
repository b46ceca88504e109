"""Types of the native core. Use the package polyccl; what is here may change."""

import datetime
from collections.abc import Sequence
from typing import Any, NoReturn

from .errors import CommError

def reduce(
    output: object,
    operands: Sequence[object],
    reduction: int | str,
    *,
    dtype: int | str | None = None,
    average: int = 0,
    factor: float | None = None,
) -> None:
    """
    Combine host tensors of one dtype and length, from left to right, into output, which may be one of them.
    """

def scale(output: object, input: object, *, dtype: int | str | None = None, average: int = 0, factor: float | None = None) -> None:
    """Write input times the factor into output."""

def scalar_bytes(value: float, dtype: int | str) -> bytes:
    """The number as one element of dtype, rounded once."""

def intake(object: object | None, write: bool = False, what: str = "tensor") -> dict[str, Any]:
    """
    What a tensor's memory is: data, count, dtype, device (DLPack type, index), rows, stream.
    """

def dtypes() -> list[Any]:
    """Rows (number, name, bytes of an element)."""

def reductions() -> list[Any]:
    """Names; the index is the number."""

def operations() -> list[Any]:
    """The rows of polyccl.operations, as C++ knows them."""

def can_reduce(dtype: int | str, reduction: int | str) -> bool:
    """Whether the host kernels combine this dtype so."""

def use_wide_vectors(wanted: bool) -> bool:
    """
    For tests: whether kernels may use what only some processors have. Returns the setting before.
    """

class Backend:
    """
    A loaded backend plugin. Lives as long as the process; make one with `Backend.load(path)`.
    """

    @staticmethod
    def load(path: str) -> Backend:
        """
        Load the plugin at `path`, or give the one that was loaded from that file. Raises BackendUnavailable with the path, what
        is wrong and what to do.
        """

    @property
    def name(self) -> str:
        """The backend's name, e.g. 'gloo'."""

    @property
    def path(self) -> str:
        """The plugin's file, with symbolic links resolved."""

    @property
    def flags(self) -> int:
        """Bits of POLYCCL_FLAG_*."""

    @property
    def abi(self) -> int:
        """The plugin ABI it was built from: major << 16 | minor."""

    @property
    def library_version(self) -> str:
        """The version of the library behind the plugin, in words."""

    @property
    def library_file(self) -> str:
        """
        The file the library was loaded from; empty where it is linked into the plugin.
        """

    @property
    def has_device(self) -> bool:
        """True where it works on device memory, in the order of streams."""

    @property
    def device_count(self) -> int:
        """How many devices it sees; 0 for a library of host memory."""

    def compatibility(self, device: int) -> str:
        """
        Ranks can be one island if and only if these strings (and the backends' names) are equal.
        """

    def supports(self, kind: int, dtype: int, reduction: int, memory: int) -> int:
        """Bits of POLYCCL_CAN_*; 0 where the operation is not native."""

    def completion(self, kind: int, memory: int) -> int:
        """POLYCCL_COMPLETION_* of a kind."""

    def __repr__(self) -> str: ...

class Work:
    """An operation that was issued."""

    def wait(self, timeout: datetime.timedelta | float | None = None) -> None:
        """
        Block until the operation is done; raise its error. With `timeout` (seconds), raise CommTimeout after it; the operation
        then goes on.
        """

    def wait_blocking(self) -> None:
        """As wait(), for operations of devices too."""

    def is_completed(self) -> bool:
        """
        True once the operation is done, with or without an error. Does not block.
        """

    def exception(self) -> CommError | None:
        """The operation's error, or None. Does not block."""

    def add_done_callback(self, callback: object) -> None:
        """
        Call `callback()` once the operation is done: at once, or from the thread that completes it.
        """

    def __repr__(self) -> str: ...

ABI: int = 65538

def log(level: int, text: str) -> None:
    """Write a line to standard error if POLYCCL_LOG asks for its level, POLYCCL_LOG_* of the ABI."""

def raise_error(error: Exception) -> NoReturn:
    """Raise error, without a traceback: torch would append that to the text."""

def link_address() -> tuple[str, str, int]:
    """
    Where this process's link listens: (process id in hex, host, port). Starts the link.
    """

class Device:
    """A device, through its backend."""

    def __init__(self, backend: Backend, index: int, high_priority: bool = False) -> None: ...
    @property
    def index(self) -> int: ...
    @property
    def is_host(self) -> bool:
        """True for a stand-in, whose memory is the host's."""

    @property
    def waits_for_host(self) -> bool:
        """True where a stream can wait for the host: then operations of a bridge do not block."""

class BackendComm:
    """A communicator of a backend's library."""

    def abort(self) -> None: ...

def create_backend_comm(
    backend: Backend,
    rank: int,
    size: int,
    device: int,
    name: str,
    interface: str,
    address: str,
    store: object,
    timeout: float,
    group: int,
    members: Sequence[tuple[str, str, int]],
    descriptions: Sequence[str],
    token: str,
) -> BackendComm:
    """
    Create a communicator of a backend's library through a store. Blocks until all ranks did, or `timeout` seconds. The last four
    are those of create_communicator, for a library whose messages the link carries; its group is none other's.
    """

class Communicator:
    """What polyccl.Comm wraps: all ranks, islands and members are given."""

    def issue(
        self,
        kind: int,
        input: object | None,
        output: object | None,
        reduction: int,
        factor: object | None,
        peer: int,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        async_op: bool,
        timeout: float | None = None,
        strict: bool = False,
        tag: int = 0,
        input_name: str = "tensor",
        output_name: str = "tensor",
    ) -> Work: ...
    def find_sender(self, tag: int, timeout: float | None = None) -> int:
        """
        Block until a message with this tag has come that no receive was issued for; the rank that sends it.
        """

    def issue_batch(self, items: Sequence[tuple[bool, object, int, int]], async_op: bool, timeout: float | None = None) -> Work: ...
    def announce_refusal(self) -> None: ...
    def abort(self) -> None: ...
    def finalize(self, timeout: float | None = None) -> None: ...
    @property
    def broken(self) -> bool: ...
    @property
    def failure(self) -> CommError | None:
        """What broke it, as an exception; None while it works."""
    @property
    def timeout(self) -> float: ...
    @timeout.setter
    def timeout(self, arg: float, /) -> None: ...
    def is_native(self, kind: int, dtype: int, reduction: int) -> bool: ...
    def departed(self) -> list[int]:
        """Ranks that have left it in good order, as far as this rank is told."""

    def payload_sent(self) -> list[int]: ...
    def trace(self, on: bool) -> None: ...
    def take_trace(self) -> list[Any]: ...

def create_communicator(
    name: str,
    group: int,
    rank: int,
    members: Sequence[tuple[str, str, int]],
    descriptions: Sequence[str],
    islands: Sequence[Sequence[int]],
    token: str,
    device: Device | None,
    device_name: str,
    device_type: int,
    native: BackendComm | None,
    pre: Communicator | None,
    post: Communicator | None,
    overlap: bool,
    planner: object,
    check: bool,
    timeout: float,
    latency_bytes: int,
    window: int,
) -> Communicator: ...
