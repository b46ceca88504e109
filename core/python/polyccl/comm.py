"""The communicator that users hold: `Comm`, with torchcomms' names, argument order and meaning.

Tensors are anything with DLPack (torch, NumPy, ...), contiguous, in host memory. Every operation takes ``async_op``: False blocks
until the result is there and raises the operation's error; True returns at once, and the `Work` has the rest. ``timeout`` (a
timedelta or seconds) counts from the call; None means the communicator's. An operation that times out breaks its communicator.
``hints`` are strings; operations know ``deterministic``. Inputs are never modified. A call that is refused (InvalidArgument,
UnsupportedOperation) has sent nothing, and the communicator stays usable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from . import arguments, create
from .arguments import Timeout
from .errors import CommError, InvalidArgument, PeerLost, UnsupportedOperation
from .graphs import untraced
from .options import CALL_HINTS, CommOptions, check_hints, is_strict, lasting
from .reduce_op import ReduceOp
from .spec import OPERATIONS, Kind
from .trace import TraceEvent, read_event

if TYPE_CHECKING:
    from ._native import Communicator, Work
    from .create import Group

Hints = Mapping[str, str] | None

_REDUCING = frozenset(row.kind for row in OPERATIONS if row.reduces)
_PEERS = {Kind.SEND: "dst", Kind.RECV: "src"} | {row.kind: "root" for row in OPERATIONS if row.rooted}
"""What the other rank, or the root, of an operation is called; the operations that have neither are missing."""

_TENSOR = ("tensor", "tensor")
"""What input and output are called where one argument is both, or the only one."""


@untraced
class Comm:
    """An ordered group of ranks. Made by `new_comm` and `split`."""

    def __init__(self, group: Group, native: Communicator) -> None:
        self._group = group
        self._native = native
        self._splits = 0
        self._strict = group.options.strict
        self._ends_process = group.options.abort_process_on_timeout_or_error
        self._aborted_here = False
        self._companion: Comm | None = None

    # ---- what it is ---------------------------------------------------------------------------------------------------------

    def get_rank(self) -> int:
        """This process's rank in the communicator."""
        return self._group.rank

    def get_size(self) -> int:
        """The number of ranks."""
        return self._group.size

    def get_name(self) -> str:
        """The name it was created with."""
        return self._group.name

    def get_device(self) -> str:
        """The device that tensors must be on, e.g. ``cpu``."""
        return self._group.device

    def get_backend(self) -> str:
        """``bridge``, or the one backend of all ranks."""
        return self._group.backend

    def get_backend_version(self) -> str:
        """The version of the library under this rank, in words."""
        return self._group.library_version

    def get_options(self) -> CommOptions:
        """The options it was created with."""
        return self._group.options

    @property
    def islands(self) -> list[list[int]]:
        """The ranks of each island, in the order of islands. One island where it is no bridge."""
        return [list(ranks) for ranks in self._group.islands]

    @property
    def island_labels(self) -> list[str]:
        """A name for each of `islands`."""
        return list(self._group.labels)

    def payload_sent(self) -> list[int]:
        """Bytes of payload (no headers) that this rank has sent to each rank over the link since creation."""
        return self._native.payload_sent()

    def trace(self, on: bool) -> None:
        """Start, or stop, to record what this rank's lanes do: plans only, not what a library does by itself. Up to 2^20 events."""
        self._native.trace(arguments.flag("on", on))

    def take_trace(self) -> list[TraceEvent]:
        """What was recorded since the last call, in the order in which steps ended."""
        return [read_event(event) for event in self._native.take_trace()]

    def __repr__(self) -> str:
        return f"<polyccl Comm '{self.get_name()}': rank {self.get_rank()} of {self.get_size()}, {self.get_backend()}>"

    def __copy__(self) -> Comm:
        return self

    def __deepcopy__(self, memo: Any) -> Comm:
        return self

    # ---- point to point -----------------------------------------------------------------------------------------------------

    def send(
        self, tensor: Any, dst: int, async_op: bool = False, hints: Hints = None, timeout: Timeout = None, *, tag: int = 0
    ) -> Work:
        """Send ``tensor`` to rank ``dst``; matched, in order, by that rank's `recv` of as many bytes with this ``tag``.

        Synchronous: blocks until the memory may be used again. Unequal sizes raise Mismatch on the receiver, and on the sender
        too where the message is longer than 64 KiB: a shorter one is on its way before sizes are compared. Messages of different
        tags, 0 to 2^32 - 1, overtake each other.
        """
        return self._issue(Kind.SEND, tensor, None, None, dst, async_op, hints, timeout, tag=tag)

    def recv(
        self, tensor: Any, src: int, async_op: bool = False, hints: Hints = None, timeout: Timeout = None, *, tag: int = 0
    ) -> Work:
        """Receive into ``tensor`` what rank ``src`` sends with this ``tag``. Blocks (unless asynchronous) until it is there."""
        return self._issue(Kind.RECV, None, tensor, None, src, async_op, hints, timeout, tag=tag)

    def find_sender(self, tag: int = 0, timeout: Timeout = None) -> int:
        """Block until a message with this ``tag`` has come that no `recv` was issued for, and tell the rank that sends it.

        The message stays where it is: `recv` from that rank gets it. Raises UnsupportedOperation where a device's library carries
        messages, CommTimeout where none comes; the communicator stays usable.
        """
        with self._refusals("find_sender"):
            tag, limit = arguments.tag(tag), arguments.optional_seconds(timeout)
        return self._native.find_sender(tag, limit)

    def batch_op_create(self) -> BatchSendRecv:
        """A batch of sends and receives that are issued together, so that their order among ranks cannot deadlock."""
        return BatchSendRecv(self)

    # ---- collectives --------------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Any, root: int, async_op: bool = False, hints: Hints = None, timeout: Timeout = None) -> Work:
        """Copy ``tensor`` of rank ``root`` into ``tensor`` of all ranks; shape (n,) everywhere, any dtype."""
        return self._issue(Kind.BROADCAST, tensor, tensor, None, root, async_op, hints, timeout)

    def all_reduce(
        self,
        tensor: Any,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Replace ``tensor``, shape (n,), by the reduction over all ranks. All ranks get the same bits.

        Algorithm: inside islands reduce_scatter and all_gather, between them an exchange of shards (see docs/algorithms.md).
        """
        plain = hints is None and timeout is None and type(op) is ReduceOp and type(async_op) is bool
        if not plain or self._strict or self._ends_process:
            return self._issue(Kind.ALL_REDUCE, tensor, tensor, op, -1, async_op, hints, timeout)
        return self._native.issue(4, tensor, tensor, op.code, op.factor, -1, None, None, async_op)

    def reduce(
        self,
        tensor: Any,
        root: int,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Replace ``tensor`` of rank ``root`` by the reduction over all ranks; other ranks' tensors stay as they are."""
        return self._issue(Kind.REDUCE, tensor, tensor, op, root, async_op, hints, timeout)

    def all_gather(
        self,
        tensor_list: Sequence[Any],
        tensor: Any,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Gather every rank's ``tensor``, shape (n,), into ``tensor_list``: one tensor of shape (n,) for each rank."""
        return self._issue(
            Kind.ALL_GATHER, tensor, tensor_list, None, -1, async_op, hints, timeout, names=("tensor", "tensor_list")
        )

    def all_gather_v(
        self,
        tensor_list: Sequence[Any],
        tensor: Any,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """As `all_gather`, with lengths that differ by rank; all ranks give lists of the same lengths."""
        return self._issue(
            Kind.ALL_GATHER_V, tensor, tensor_list, None, -1, async_op, hints, timeout, names=("tensor", "tensor_list")
        )

    def all_gather_single(
        self, output: Any, input: Any, async_op: bool = False, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        """Gather every rank's ``input``, shape (n,), into ``output``, shape (size * n,)."""
        return self._issue(Kind.ALL_GATHER, input, output, None, -1, async_op, hints, timeout, names=("input", "output"))

    def reduce_scatter(
        self,
        output: Any,
        input_list: Sequence[Any],
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Reduce entry r of every rank's ``input_list``, shape (n,) each, into ``output``, shape (n,), of rank r."""
        return self._issue(
            Kind.REDUCE_SCATTER, input_list, output, op, -1, async_op, hints, timeout, names=("input_list", "output")
        )

    def reduce_scatter_v(
        self,
        output: Any,
        input_list: Sequence[Any],
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """As `reduce_scatter`, with lengths that differ by entry; all ranks give lists of the same lengths."""
        return self._issue(
            Kind.REDUCE_SCATTER_V, input_list, output, op, -1, async_op, hints, timeout, names=("input_list", "output")
        )

    def reduce_scatter_single(
        self,
        output: Any,
        input: Any,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Reduce part r of every rank's ``input``, shape (size * n,), into ``output``, shape (n,), of rank r."""
        return self._issue(Kind.REDUCE_SCATTER, input, output, op, -1, async_op, hints, timeout, names=("input", "output"))

    def all_to_all(
        self,
        output_tensor_list: Sequence[Any],
        input_tensor_list: Sequence[Any],
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Send entry r of ``input_tensor_list`` to rank r, and receive entry r of ``output_tensor_list`` from it.

        Lengths may differ by pair of ranks; sender and receiver must agree, else both raise Mismatch.
        """
        return self._issue(
            Kind.ALL_TO_ALL_V,
            input_tensor_list,
            output_tensor_list,
            None,
            -1,
            async_op,
            hints,
            timeout,
            names=("input_tensor_list", "output_tensor_list"),
        )

    def all_to_all_single(
        self, output: Any, input: Any, async_op: bool = False, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        """Send part r of ``input``, shape (size * n,), to rank r, and receive part r of ``output`` from it."""
        return self._issue(Kind.ALL_TO_ALL, input, output, None, -1, async_op, hints, timeout, names=("input", "output"))

    def all_to_all_v_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """As `all_to_all_single`, with parts of unlike numbers of rows (of dimension 0), which add up to the tensor's."""
        splits = input_split_sizes, output_split_sizes
        return self._issue(
            Kind.ALL_TO_ALL_V, input, output, None, -1, async_op, hints, timeout, splits=splits, names=("input", "output")
        )

    def scatter(
        self,
        output_tensor: Any,
        input_tensor_list: Sequence[Any],
        root: int,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Send entry r of rank ``root``'s ``input_tensor_list`` into ``output_tensor``, shape (n,), of rank r."""
        return self._issue(
            Kind.SCATTER,
            input_tensor_list,
            output_tensor,
            None,
            root,
            async_op,
            hints,
            timeout,
            names=("input_tensor_list", "output_tensor"),
        )

    def gather(
        self,
        output_tensor_list: Sequence[Any],
        input_tensor: Any,
        root: int,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Gather every rank's ``input_tensor``, shape (n,), into ``output_tensor_list`` of rank ``root``; elsewhere it is empty."""
        return self._issue(
            Kind.GATHER,
            input_tensor,
            output_tensor_list,
            None,
            root,
            async_op,
            hints,
            timeout,
            names=("input_tensor", "output_tensor_list"),
        )

    def gather_single(
        self, output: Any, input: Any, root: int, async_op: bool = False, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        """Gather every rank's ``input``, shape (n,), into ``output``, shape (size * n,), of rank ``root``; elsewhere it is None."""
        return self._issue(Kind.GATHER, input, output, None, root, async_op, hints, timeout, names=("input", "output"))

    def barrier(self, async_op: bool = False, hints: Hints = None, timeout: Timeout = None) -> Work:
        """Wait until all ranks have come here."""
        return self._issue(Kind.BARRIER, None, None, None, -1, async_op, hints, timeout)

    # ---- its life -----------------------------------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int], name: str, hints: Hints = None, timeout: Timeout = None) -> Comm | None:
        """A communicator of some of this one's ranks. Collective over this communicator.

        Every rank gives the ranks of the group that it will be in, in their new order, or an empty list: then it gets None. The
        members of one group give the same list. Options and hints are this communicator's, but for those given. Members in
        one island get a plain communicator of its library, else a bridge.
        """
        self._splits += 1
        return create.split(self._group, self._splits, ranks, name, hints, timeout, self._lost)

    def _lost(self, ranks: Sequence[int]) -> CommError | None:
        """Return why a call with these ranks can no longer be answered; None if nothing is known against it."""
        gone = [rank for rank in self._native.departed() if rank in ranks]
        if self._native.failure is not None or not gone:
            return self._native.failure
        return PeerLost(
            f"communicator '{self.get_name()}': {'rank' if len(gone) == 1 else 'ranks'} {', '.join(map(str, gone))} left it, or "
            "ended, in good order. Let all ranks make the same calls before they end"
        )

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default timeout of operations that are issued from now on; None gives back the one of creation."""
        with self._refusals("set_timeout"):
            self._native.timeout = self._group.options.timeout if timeout is None else lasting(timeout)

    def set_hints(self, hints: Mapping[str, str]) -> None:
        """Set hints for operations from now on; on all ranks alike. Only those that operations take."""
        with self._refusals("set_hints"):
            self._strict = is_strict(check_hints(hints, CALL_HINTS))

    def finalize(self, timeout: Timeout = None) -> None:
        """Wait for what was issued, and end. Further calls raise InvalidArgument."""
        with self._refusals("finalize"):
            limit = arguments.optional_seconds(timeout)
        self._native.finalize(limit)
        if self._companion is not None:
            self._companion.finalize(timeout)

    def _on_host(self) -> Comm:
        """Return a communicator of the same ranks for tensors in host memory: this one, or a companion if this one's are elsewhere.

        The first call makes the companion, which sends nothing.
        """
        if self._group.on_host is None:
            return self
        if self._companion is None:
            self._companion = Comm(*self._group.on_host())
        self._companion._native.timeout = self._native.timeout
        return self._companion

    def abort(self) -> None:
        """End everything that runs or waits, from any thread, in bounded time, here and on the other ranks.

        Works end with Aborted. May be called again and again.
        """
        self._aborted_here = True
        self._native.abort()
        if self._companion is not None:
            self._companion.abort()

    def is_aborted(self) -> bool:
        """True once it is broken, by `abort` or by a failure."""
        return self._native.broken or (self._companion is not None and self._companion.is_aborted())

    # ---- to come ------------------------------------------------------------------------------------------------------------

    def new_window(self, tensor: Any = None) -> NoReturn:
        """One-sided windows are not there yet. Raises UnsupportedOperation."""
        self._not_yet("new_window")

    def reconfigure(self, uuid: int, init_handles: Any, timeout: Timeout = None, hints: Hints = None) -> NoReturn:
        """Rebuilding with other members is not there yet. Raises UnsupportedOperation."""
        self._not_yet("reconfigure")

    def get_init_handle(self) -> NoReturn:
        """Belongs to `reconfigure`. Raises UnsupportedOperation."""
        self._not_yet("get_init_handle")

    def register_pre_hook(self, callback: Callable[..., None]) -> NoReturn:
        """Hooks are not there yet. Raises UnsupportedOperation."""
        self._not_yet("register_pre_hook")

    def register_post_hook(self, callback: Callable[..., None]) -> NoReturn:
        """Hooks are not there yet. Raises UnsupportedOperation."""
        self._not_yet("register_post_hook")

    def register_abort_hook(self, callback: Callable[[], None]) -> NoReturn:
        """Hooks are not there yet. Raises UnsupportedOperation."""
        self._not_yet("register_abort_hook")

    def _not_yet(self, what: str) -> NoReturn:
        raise UnsupportedOperation(f"{what} on communicator '{self.get_name()}': not supported by this version of PolyCCL")

    # ---- the one way down ---------------------------------------------------------------------------------------------------

    def _issue(
        self,
        kind: Kind,
        input: Any,
        output: Any,
        op: ReduceOp | None,
        peer: int,
        async_op: bool,
        hints: Hints,
        timeout: Timeout,
        *,
        names: tuple[str, str] = _TENSOR,
        splits: tuple[Sequence[int], Sequence[int]] | None = None,
        tag: int = 0,
    ) -> Work:
        """Check what is no tensor, and issue. ``names`` are those of the arguments ``input`` and ``output``."""
        try:
            if kind in _PEERS:
                peer = arguments.rank(_PEERS[kind], peer, self._group.size)
            code, factor = _reduction(op) if kind in _REDUCING else (0, None)
            strict = (hints is not None and is_strict(check_hints(hints, CALL_HINTS))) or self._strict
            limit, async_op, tag = arguments.optional_seconds(timeout), arguments.flag("async_op", async_op), arguments.tag(tag)
            if names is not _TENSOR and peer in (-1, self._group.rank):
                self._check_sides(names, (input, output))
            inputs, outputs = (None, None) if splits is None else self._rows(*splits)
        except InvalidArgument as error:
            if kind not in (Kind.SEND, Kind.RECV):
                self._native.announce_refusal()
            raise self._refusal(kind.name.lower(), error) from None
        try:
            work = self._native.issue(
                kind, input, output, code, factor, peer, inputs, outputs, async_op, limit, strict, tag, *names
            )
        except Exception as error:
            self._end_process_after(error)
            raise
        return self._watched(work)

    def _check_sides(self, names: tuple[str, str], sides: tuple[Any, Any]) -> None:
        """Tell lists from tensors; both forms of an operation issue the same kind."""
        for name, side in zip(names, sides, strict=True):
            if name.endswith("_list"):
                arguments.tensor_list(name, side, self._group.size)
            elif isinstance(side, (list, tuple)):
                arguments.refuse(name, side, "one tensor")

    def _rows(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[list[int], list[int]]:
        size = self._group.size
        return arguments.split_sizes("input_split_sizes", inputs, size), arguments.split_sizes("output_split_sizes", outputs, size)

    @contextmanager
    def _refusals(self, method: str, announce: Callable[[], None] | None = None) -> Iterator[None]:
        """Say in refusals of the block which call on which communicator it is, and ``announce`` them to ranks that check."""
        try:
            yield
        except InvalidArgument as error:
            if announce is not None:
                announce()
            raise self._refusal(method, error) from None

    def _refusal(self, method: str, error: InvalidArgument) -> InvalidArgument:
        return InvalidArgument(f"{method} on communicator '{self.get_name()}': {error}")

    def _watched(self, work: Work) -> Work:
        """A work whose failure ends the process, where that is wanted."""
        if self._ends_process:
            work.add_done_callback(lambda: self._end_process_after(work.exception()))
        return work

    def _end_process_after(self, error: Exception | None) -> None:
        """End the process if it is to, and if the error broke the communicator, other than by this rank's own abort."""
        if self._ends_process and not self._aborted_here and error is not None and self._native.broken:
            _end_process(error)


@untraced
class BatchSendRecv:
    """Sends and receives that are issued together. Made by `Comm.batch_op_create`."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.ops: list[tuple[bool, Any, int, int]] = []
        """``(sends, tensor, peer, tag)`` for each operation."""

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        """Add a send to rank ``dst``."""
        self.ops.append(self._checked((True, tensor, dst, tag)))

    def recv(self, tensor: Any, src: int, tag: int = 0) -> None:
        """Add a receive from rank ``src``."""
        self.ops.append(self._checked((False, tensor, src, tag)))

    def issue(self, async_op: bool = False, hints: Hints = None, timeout: Timeout = None) -> Work:
        """Issue all of it. The work is done when every operation is. An empty batch raises InvalidArgument."""
        comm = self._comm
        with comm._refusals("batch"):
            async_op, limit = arguments.flag("async_op", async_op), arguments.optional_seconds(timeout)
            check_hints(hints, CALL_HINTS)
        items = [self._checked(entry) for entry in self.ops]  # the list is the caller's too
        try:
            work = comm._native.issue_batch(items, async_op, limit)
        except Exception as error:
            comm._end_process_after(error)
            raise
        return comm._watched(work)

    def _checked(self, entry: tuple[bool, Any, int, int]) -> tuple[bool, Any, int, int]:
        with self._comm._refusals("batch"):
            if not isinstance(entry, tuple) or len(entry) != 4:
                arguments.refuse("an entry of ops", entry, "a tuple (sends, tensor, peer, tag)")
            sends, tensor, peer, tag = entry
            sends = arguments.flag("sends", sends)
            return sends, tensor, arguments.rank("dst" if sends else "src", peer, self._comm.get_size()), arguments.tag(tag)


def _reduction(op: ReduceOp | None) -> tuple[int, Any]:
    """Return its number, and the factor."""
    if not isinstance(op, ReduceOp):
        arguments.refuse("op", op, "a ReduceOp, e.g. polyccl.ReduceOp.SUM")
    return op.code, op.factor


def _end_process(error: Exception) -> NoReturn:
    print(f"polyccl: ending the process, as its communicator was told to: {error}", file=sys.stderr, flush=True)
    os.abort()


__all__ = ["BatchSendRecv", "Comm", "Hints"]
