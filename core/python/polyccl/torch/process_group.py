"""`ProcessGroup`: all calls of torch.distributed on a `polyccl.Comm`.

A pure Python subclass of c10d's ProcessGroup, so that PolyCCL's wheel links no libtorch. Python code reaches every method here;
C++ code (DDP's reducer, functional collectives) reaches those that c10d lets Python override: all_reduce, broadcast, all_gather,
reduce_scatter, all_to_all_single, barrier, send, recv and the coalesced forms.

Every call is one operation of the communicator (a coalesced one: one for each tensor), issued at once; calls with ``asyncOp`` set
return a `Work`, others block. Timeouts are the call's, else the group's. An error is that of the communicator (`polyccl.errors`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from .. import arguments
from ..comm import Comm
from ..completion import Queue
from ..deadlines import bounded
from ..errors import InvalidArgument, UnsupportedOperation
from ..graphs import untraced
from . import batches, halves, sparse
from .backend import Backend
from .batches import Batch
from .calls import Gathered, Tensors, inner, listed, one, pairs, reduction, terms, uneven
from .messages import AnySourceWork, FromAnyone, monitored_barrier
from .options import Options
from .options import read as read_options
from .profiling import recorded
from .tensors import Passage
from .work import Work


@untraced
class ProcessGroup(c10d.ProcessGroup):  # type: ignore[misc]
    """A process group of torch.distributed that ``comm`` carries.

    ``store`` is torch's store for the group, ``options`` what sub-groups inherit, ``device_types`` which tensors it is for.
    Tensors on another device than the communicator's are copied there and back.
    """

    def __init__(
        self,
        comm: Comm,
        store: Any = None,
        options: Options | None = None,
        device_types: Sequence[str] = ("cpu",),
        bound: torch.device | None = None,
    ) -> None:
        super().__init__(comm.get_rank(), comm.get_size())
        self._comm = comm
        self._store = store
        self._options = options or Options()
        self._types = [torch.device(kind) for kind in device_types]
        self._name = comm.get_name()
        self._desc = "undefined"
        self._sequence = 0
        self._split_count = self._barriers = 0
        self._ended = False
        self._together: list[Work] | None = None  # between the start and the end of coalescing
        self._batch: Batch | None = None  # while messages are gathered
        # By tag: the newest receive from any rank, for as long as it waits or somebody has it.
        self._anyone: WeakValueDictionary[int, FromAnyone] = WeakValueDictionary()
        self._backend = Backend(self)
        self._queue = Queue()
        device = torch.device(comm._group.device.replace("hip", "cuda"))
        self._device = device
        self._on_host = device.type == "cpu"
        if bound is not None:
            self.bound_device_id = bound
        self._kept = halves.layers(store)
        batches.serve()
        halves.serve()

    # ---- what it is ---------------------------------------------------------------------------------------------------------

    def get_comm(self) -> Comm:
        """The communicator under the group."""
        return self._comm

    def name(self) -> str:
        """The backend's name for torch: ``polyccl``. What carries the group is ``get_comm().get_backend()``."""
        return "polyccl"

    getBackendName = _get_backend_name = name

    @property
    def group_name(self) -> str:
        """The name under which torch finds the group."""
        return self._name

    def getGroupName(self) -> str:
        """As `group_name`, for C++."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        """What the user calls the group."""
        return self._desc

    def getGroupDesc(self) -> str:
        """As `group_desc`, for C++."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupDesc = _set_group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return list(self._types)

    def _get_backend(self, device: torch.device) -> Backend:
        if torch.device(torch.device(device).type) not in self._types:
            raise RuntimeError(f"process group '{self._name}': no backend for device type {torch.device(device).type}")
        return self._backend

    def _backend_id(self, backend_type: Any) -> int:
        return id(self._backend)

    def get_group_store(self) -> Any:
        """The store that the group was created with."""
        return self._store

    def boxed(self) -> Any:
        """The group as torch's operators take it."""
        _boxed.add(self)
        return super().boxed()

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """There are no hooks on completion that could be pending."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: every rank counts the group's collectives from 0."""

    # ---- one way down -------------------------------------------------------------------------------------------------------

    def _passage(self, call: str) -> Passage:
        return Passage(self._comm, call, self._device, self._on_host)

    def _terms(self, opts: Any) -> tuple[bool, timedelta | None]:
        """Whether the call is asynchronous, and its timeout; None is the group's. Counts the call."""
        self._sequence += 1
        limit = opts.timeout
        return opts.asyncOp, None if limit.days < 0 else limit

    def _issued(self, parts: Sequence[Any], outputs: Any, passage: Passage, asynchronous: bool) -> Work:
        work = self._work(parts, outputs, passage.finish)
        if not asynchronous:
            work.wait()
        return work

    def _work(
        self,
        parts: Sequence[Any],
        outputs: Any,
        finish: Callable[[], None] | None = None,
        kind: type[Work] = Work,
        on_host: bool = False,
        source: int = -1,
    ) -> Work:
        work = kind(parts, outputs, finish, on_host, source, self._queue)
        if self._together is not None:
            self._together.append(work)
        return work

    # ---- all_reduce, broadcast, reduce, barrier -----------------------------------------------------------------------------

    @recorded("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None) -> Work:
        """Reduce a tensor over all ranks, in place; also a sparse one, by SUM and on the caller's thread."""
        tensors = listed(tensors)
        opts = terms(c10d.AllreduceOptions, opts, timeout, reduceOp=op)
        asynchronous, limit = self._terms(opts)
        tensor = one(tensors, "all_reduce")
        factor = reduction(opts.reduceOp)
        if tensor.is_contiguous() and tensor.is_cpu is self._on_host:
            return self._work((self._comm.all_reduce(tensor, factor, asynchronous, None, limit),), tensors)
        if tensor.layout is torch.sparse_coo:
            sparse.all_reduce(self._comm, tensor, factor, limit)
            return Work((), tensors)
        passage = self._passage("all_reduce")
        part = self._comm.all_reduce(passage.both(tensor), factor, asynchronous, None, limit)
        return self._issued([part], tensors, passage, asynchronous)

    @recorded("all_reduce")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """`allreduce` of each tensor."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        asynchronous, limit = self._terms(opts)
        factor, passage = reduction(opts.reduceOp), self._passage("all_reduce_coalesced")
        taken = [passage.both(tensor, f"tensor {i}") for i, tensor in enumerate(tensors)]
        parts = [self._comm.all_reduce(tensor, factor, True, None, limit) for tensor in taken]
        return self._issued(parts, tensors, passage, asynchronous)

    @recorded("broadcast")
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None) -> Work:
        """Copy the root's tensor into the others'."""
        tensors = listed(tensors)
        opts = terms(c10d.BroadcastOptions, opts, timeout, rootRank=root)
        asynchronous, limit = self._terms(opts)
        tensor, passage = one(tensors, "broadcast"), self._passage("broadcast")
        part = self._comm.broadcast(passage.both(tensor), opts.rootRank, asynchronous, None, limit)
        return self._issued([part], tensors, passage, asynchronous)

    @recorded("reduce")
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, *, root: Any = None) -> Work:
        """Reduce into the root's tensor; the others' stay as they are."""
        tensors = listed(tensors)
        opts = terms(c10d.ReduceOptions, opts, timeout, rootRank=root, reduceOp=op)
        asynchronous, limit = self._terms(opts)
        tensor, passage = one(tensors, "reduce"), self._passage("reduce")
        taken = passage.both(tensor) if opts.rootRank == self.rank() else passage.input(tensor)
        part = self._comm.reduce(taken, opts.rootRank, reduction(opts.reduceOp), asynchronous, None, limit)
        return self._issued([part], tensors, passage, asynchronous)

    @recorded("barrier")
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Wait until all ranks are here. Blocks the host, at once or in the work's ``wait``."""
        asynchronous, limit = self._terms(terms(c10d.BarrierOptions, opts, timeout))
        return self._work((self._comm.barrier(asynchronous, None, limit),), [], on_host=True)

    # ---- gathering ----------------------------------------------------------------------------------------------------------

    @recorded("all_gather", 1)
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Gather every rank's tensor into a list; lengths may differ by rank, then alike in all lists."""
        outputs, tensor = inner(output_tensors, "all_gather"), one(listed(input_tensors), "all_gather")
        asynchronous, limit = self._terms(terms(c10d.AllgatherOptions, opts, timeout))
        passage = self._passage("all_gather")
        part = self._all_gather(passage.outputs(outputs), passage.input(tensor), asynchronous, limit)
        return self._issued([part], [Gathered(outputs)], passage, asynchronous)

    def _all_gather(self, outputs: Tensors, tensor: Tensor, asynchronous: bool, limit: timedelta | None) -> Any:
        gather = self._comm.all_gather_v if uneven(outputs) else self._comm.all_gather
        return gather(outputs, tensor, asynchronous, None, limit)

    @recorded("all_gather", 1)
    def allgather_coalesced(self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None) -> Work:
        """`allgather` of each input; ``output_lists[rank][i]`` is that rank's input i."""
        asynchronous, limit = self._terms(opts or c10d.AllgatherOptions())
        if len(output_lists) != self.size() or any(len(outputs) != len(input_list) for outputs in output_lists):
            raise InvalidArgument(
                f"all_gather_coalesced: a list of {len(input_list)} tensors is wanted for each of the {self.size()} ranks"
            )
        passage = self._passage("all_gather_coalesced")
        taken = [
            (passage.outputs([outputs[i] for outputs in output_lists]), passage.input(tensor, f"input {i}"))
            for i, tensor in enumerate(input_list)
        ]
        parts = [self._all_gather(outputs, tensor, True, limit) for outputs, tensor in taken]
        return self._issued(parts, output_lists, passage, asynchronous)

    @recorded("all_gather_into_tensor", 1)
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Gather every rank's tensor into one, rank by rank."""
        asynchronous, limit = self._terms(opts or c10d.AllgatherOptions())
        passage = self._passage("all_gather_single")
        part = self._comm.all_gather_single(passage.output(output), passage.input(input), asynchronous, None, limit)
        return self._issued([part], [output], passage, asynchronous)

    _allgather_base = all_gather_single

    @recorded("all_gather_into_tensor", 1)
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """`all_gather_single` of each pair."""
        asynchronous, limit = self._terms(opts or c10d.AllgatherOptions())
        passage = self._passage("all_gather_single_coalesced")
        taken = pairs(passage.outputs(outputs), passage.inputs(inputs), "all_gather_single_coalesced")
        parts = [self._comm.all_gather_single(output, input, True, None, limit) for output, input in taken]
        return self._issued(parts, outputs, passage, asynchronous)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @recorded("gather", 1)
    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: Any = None,
    ) -> Work:
        """Gather every rank's tensor into a list of the root's."""
        tensor = one(listed(input_tensors), "gather")
        opts = terms(c10d.GatherOptions, opts, timeout, rootRank=root)
        asynchronous, limit = self._terms(opts)
        passage, outputs = self._passage("gather"), []
        if opts.rootRank == self.rank():
            outputs = passage.outputs(inner(output_tensors, "gather"))
        part = self._comm.gather(outputs, passage.input(tensor), opts.rootRank, asynchronous, None, limit)
        return self._issued([part], output_tensors, passage, asynchronous)

    # ---- scattering ---------------------------------------------------------------------------------------------------------

    @recorded("scatter", 1)
    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: Any = None,
    ) -> Work:
        """Give each rank its entry of the root's list."""
        outputs = listed(output_tensors)
        opts = terms(c10d.ScatterOptions, opts, timeout, rootRank=root)
        asynchronous, limit = self._terms(opts)
        passage, inputs = self._passage("scatter"), []
        if opts.rootRank == self.rank():
            inputs = passage.inputs(inner(input_tensors, "scatter"))
        output = passage.output(one(outputs, "scatter"))
        part = self._comm.scatter(output, inputs, opts.rootRank, asynchronous, None, limit)
        return self._issued([part], outputs, passage, asynchronous)

    @recorded("reduce_scatter", 1)
    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Work:
        """Reduce entry r of all ranks' lists into rank r's tensor; lengths may differ by entry."""
        outputs, inputs = listed(output_tensors), inner(input_tensors, "reduce_scatter")
        opts = terms(c10d.ReduceScatterOptions, opts, timeout, reduceOp=op)
        asynchronous, limit = self._terms(opts)
        passage = self._passage("reduce_scatter")
        scatter = self._comm.reduce_scatter_v if uneven(inputs) else self._comm.reduce_scatter
        output, taken = passage.output(one(outputs, "reduce_scatter")), passage.inputs(inputs)
        part = scatter(output, taken, reduction(opts.reduceOp), asynchronous, None, limit)
        return self._issued([part], outputs, passage, asynchronous)

    @recorded("reduce_scatter_tensor", 1)
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Reduce part r of all ranks' tensors into rank r's."""
        opts = opts or c10d.ReduceScatterOptions()
        asynchronous, limit = self._terms(opts)
        passage, op = self._passage("reduce_scatter_single"), reduction(opts.reduceOp)
        part = self._comm.reduce_scatter_single(passage.output(output), passage.input(input), op, asynchronous, None, limit)
        return self._issued([part], [output], passage, asynchronous)

    _reduce_scatter_base = reduce_scatter_single

    @recorded("reduce_scatter_tensor", 1)
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """`reduce_scatter_single` of each pair."""
        opts = opts or c10d.ReduceScatterOptions()
        asynchronous, limit = self._terms(opts)
        passage, op = self._passage("reduce_scatter_single_coalesced"), reduction(opts.reduceOp)
        taken = pairs(passage.outputs(outputs), passage.inputs(inputs), "reduce_scatter_single_coalesced")
        parts = [self._comm.reduce_scatter_single(output, input, op, True, None, limit) for output, input in taken]
        return self._issued(parts, outputs, passage, asynchronous)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- all_to_all ---------------------------------------------------------------------------------------------------------

    @recorded("all_to_all", 1)
    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Send entry r to rank r, and receive entry r from it; lengths may differ by pair of ranks."""
        asynchronous, limit = self._terms(terms(c10d.AllToAllOptions, opts, timeout))
        passage = self._passage("all_to_all")
        outputs, inputs = passage.outputs(output_tensors), passage.inputs(input_tensors)
        part = self._comm.all_to_all(outputs, inputs, asynchronous, None, limit)
        return self._issued([part], output_tensors, passage, asynchronous)

    @recorded("all_to_all", 1)
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Send part r to rank r, and receive part r from it; parts are rows, equally many where no splits are given."""
        asynchronous, limit = self._terms(terms(c10d.AllToAllOptions, opts, timeout))
        passage = self._passage("all_to_all_single")
        target, source = passage.output(output), passage.input(input)
        if not output_split_sizes and not input_split_sizes:
            part = self._comm.all_to_all_single(target, source, asynchronous, None, limit)
        else:
            gets, gives = self._splits(output, output_split_sizes), self._splits(input, input_split_sizes)
            part = self._comm.all_to_all_v_single(target, source, gets, gives, asynchronous, None, limit)
        return self._issued([part], [output], passage, asynchronous)

    alltoall_base = all_to_all_single

    def _splits(self, tensor: Tensor, given: Sequence[int]) -> list[int]:
        if given:
            return list(given)
        rows, rest = divmod(tensor.shape[0] if tensor.dim() else 1, self.size())
        if rest:
            raise InvalidArgument(
                f"all_to_all_single: {tensor.shape[0]} rows cannot be split evenly over {self.size()} ranks; give split sizes"
            )
        return [rows] * self.size()

    # ---- messages -----------------------------------------------------------------------------------------------------------

    @recorded("send")
    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Send to a rank of the group; its `recv` with this tag gets it, in order."""
        tensors = listed(tensors)
        tensor, passage = one(tensors, "send"), self._passage("send")
        source = passage.input(tensor)
        if self._batch is None:
            return self._work((self._comm.send(source, dst, True, tag=tag),), tensors)
        self._batch.gathered.send(source, dst, tag)
        return self._work((self._batch,), tensors)

    @recorded("recv")
    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receive what a rank of the group sends with this tag."""
        tensors = listed(tensors)
        tensor, passage = one(tensors, "recv"), self._passage("recv")
        target = passage.output(tensor)
        if self._batch is None:
            part: Any = self._comm.recv(target, src, True, tag=tag)
        else:
            part = self._batch
            part.gathered.recv(target, src, tag)
        return self._work((part,), tensors, passage.finish, source=src)

    @recorded("recvAnySource")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive from whichever rank sends first with this tag; `Work.source_rank` tells which.

        A receive with the same tag from a rank by name must not be issued before this one has its message. Raises
        UnsupportedOperation, at ``wait``, where a device's library carries messages.
        """
        tensors = listed(tensors)
        tensor, passage = one(tensors, "recv"), self._passage("recv")
        part = FromAnyone(self._comm, passage.output(tensor), tag, self._anyone.get(tag))
        self._anyone[tag] = part
        return self._work((part,), tensors, passage.finish, kind=AnySourceWork)

    @property
    def gathers_messages(self) -> bool:
        """Whether a batch of messages must be issued as one: where a device's library carries them."""
        library = self._comm._group.library
        return library.plugin is not None and library.plugin.has_device

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Issue the messages that are sent and received meanwhile as one batch, in the end, unless an error is raised."""
        batch = self._batch = Batch(self._comm)
        try:
            yield
        except BaseException:
            batch.drop()
            raise
        finally:
            self._batch = None
        batch.issue()

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks are here, else raise CommTimeout with those that are not; breaks nothing."""
        limit = timedelta(seconds=bounded(self._comm._group.options.timeout)) if timeout is None else timeout
        monitored_barrier(self, limit, wait_all_ranks)

    # ---- several calls as one -----------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []
        self._batch = Batch(self._comm) if self.gathers_messages else None

    def _end_coalescing(self, device: torch.device) -> Work:
        """One work for all calls since `_start_coalescing`. They were issued as they came, but for a device's messages: none waits
        for another."""
        works, self._together = self._together or [], None
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.issue()
        parts = [part for work in works for part in work._parts]

        def finish() -> None:
            for work in works:
                work.wait()

        return Work(parts, [work.result() for work in works], finish, queue=self._queue)

    # ---- its life -----------------------------------------------------------------------------------------------------------

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """A group of some of this one's ranks, given as ranks in this group; None where this rank is not among them.

        Collective over this group. The new group inherits timeout and options; ``opts`` may change hints, and nothing else.
        """
        ranks = arguments.rank_list("new_ranks", new_ranks, self.size())
        options = read_options(opts, self._options)
        if replace(options, hints=self._options.hints) != self._options:
            raise UnsupportedOperation("split_group: only the hints of a group can be changed; make a new_group for other options")
        name = group_name or f"{self._name}:split:{self._split_count}"
        self._split_count += 1
        members = ranks if self.rank() in ranks else []
        comm = self._comm.split(members, f"group {name}", options.hints, timeout)
        if comm is None:
            return None
        kinds = [device.type for device in device_types or self._types]
        group = ProcessGroup(comm, c10d.PrefixStore(f"{name}/", self._store) if self._store else None, options, kinds)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self._desc}:split")
        return group

    def merge_remote_group(self, *arguments: Any, **named: Any) -> NoReturn:
        """Not supported: raises UnsupportedOperation."""
        raise UnsupportedOperation("merge_remote_group: not supported by this version of PolyCCL; make a new group")

    def shrink(self, *arguments: Any, **named: Any) -> NoReturn:
        """Not supported: raises UnsupportedOperation."""
        raise UnsupportedOperation("shrink: not supported by this version of PolyCCL; make a new group of the ranks that are left")

    def set_timeout(self, timeout: timedelta) -> None:
        """The timeout of calls from now on that give none."""
        self._comm.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """End what is under way, here and on the other ranks, in bounded time. The group cannot be used any more."""
        self._comm.abort()

    def shutdown(self) -> None:
        """Wait for what was issued, at most ten seconds, and end. May be called again."""
        _boxed.discard(self)
        if not self._ended:
            self._ended = True
            if not self._comm.is_aborted():
                self._comm.finalize(10)


_boxed: set[ProcessGroup] = set()
"""Groups that C++ holds by itself, until they end: without their half in Python it could not call them."""

__all__ = ["Backend", "ProcessGroup"]
