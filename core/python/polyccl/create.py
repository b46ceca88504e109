"""Creation of communicators: who is there, which islands they form, and what carries each part.

`new_comm` and `split` end in the same place (`form`): the ranks meet at a store and get the roster (`polyccl.rendezvous`), from
which every rank draws the same conclusions. Ranks of one island get the island's library; several islands get a bridge, which
owns two communicators of this rank's island, one for each local lane.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from . import _native, arguments, backends, devices, environment, log, ranks, rendezvous
from . import store as stores
from ._version import __version__
from .arguments import Timeout
from .deadlines import after, left
from .errors import BackendUnavailable, CommError, InvalidArgument, Mismatch, UnsupportedOperation
from .graphs import untraced
from .meeting import Failure, Meeting
from .options import HINTS as KNOWN_HINTS
from .options import WINDOW, CommOptions, check_hints, lasting, make_options
from .planner import planner
from .planner.staging import Memory
from .planner.task import Request
from .planner.topology import Topology
from .rendezvous import Hello, Roster
from .spec import DTYPE_NUMBERS, Kind, Reduction
from .store import PrefixStore, Store

if TYPE_CHECKING:
    from .comm import Comm

BRIDGE, AUTO = "bridge", "auto"
"""Backends that are made of islands: always a bridge; a bridge only where there is more than one island."""

LARGEST = 2**20
"""The most ranks of a communicator."""

# Of the ABI: bits of a backend's flags, of an answer of supports(), and kinds of memory.
_ONE_MACHINE, _CONCURRENT = 1, 2
_EQUAL_BITS, _MESSAGES = 2, 1 | 4
_HOST_MEMORY, _DEVICE_MEMORY = 1, 2


@dataclass(frozen=True)
class Library:
    """What carries an island: a backend's plugin, or PolyCCL's own link for ``host``."""

    name: str
    plugin: Any = None

    @property
    def version(self) -> str:
        """The library's version, in words."""
        return f"PolyCCL {__version__}" if self.plugin is None else str(self.plugin.library_version)

    @property
    def compatibility(self) -> str:
        """Equal for ranks that can be one island."""
        return "" if self.plugin is None else str(self.plugin.compatibility(-1))

    @property
    def one_machine(self) -> bool:
        """Whether its islands end at the machine's border."""
        return self.plugin is not None and bool(self.plugin.flags & _ONE_MACHINE)

    @property
    def concurrent(self) -> bool:
        """Whether two communicators over the same ranks may be in use at once."""
        return self.plugin is None or bool(self.plugin.flags & _CONCURRENT)

    @property
    def equal_bits(self) -> bool:
        """Whether all_reduce gives all ranks the same bits. Plans do."""
        can = self.supports(Kind.ALL_REDUCE, "float32", Reduction.SUM)
        return not can or bool(can & _EQUAL_BITS)

    def messages(self, kind: Kind, dtype: str) -> bool:
        """Whether it has send (recv) of its own, in groups."""
        return self.supports(kind, dtype) & _MESSAGES == _MESSAGES

    def supports(self, kind: Kind, dtype: str, reduction: Reduction = Reduction.NONE) -> int:
        """POLYCCL_CAN_* of an operation, on the memory that the library works on."""
        if self.plugin is None:
            return 0
        memory = _DEVICE_MEMORY if self.plugin.has_device else _HOST_MEMORY
        return int(self.plugin.supports(int(kind), DTYPE_NUMBERS[dtype], int(reduction), memory))


Formed: TypeAlias = "tuple[Group, _native.Communicator]"


@dataclass(frozen=True)
class Group:
    """What a communicator is, beside its native part. ``store`` is its own, in rank 0's process: splits meet there."""

    name: str
    rank: int
    size: int
    device: str
    backend: str
    requested: str
    options: CommOptions
    library: Library
    islands: list[list[int]]
    labels: list[str]
    store: Store
    on_host: Callable[[], Formed] | None = None
    """Makes a communicator of the same ranks for tensors in host memory; None for one that takes these itself."""

    @property
    def library_version(self) -> str:
        """The version of the library under this rank."""
        return self.library.version


@untraced
def new_comm(
    backend: str,
    device: Any,
    name: str | None = None,
    abort_process_on_timeout_or_error: bool | None = None,
    timeout: Timeout = None,
    is_high_priority_stream: bool | None = None,
    store: Any = None,
    enable_reconfigure: bool = False,
    hints: Mapping[str, str] | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    check: bool | None = None,
) -> Comm:
    """Create a communicator. Collective over all its ranks; blocks until they are there, or the timeout.

    ``backend`` is a library that all ranks have (``"host"``, ``"gloo"``, ...), ``"bridge"`` (islands are discovered, then joined)
    or ``"auto"`` (the plain library where all ranks are one island, else a bridge). ``device`` is where tensors will be: ``cpu``,
    ``cuda``, ``hip`` or ``xpu``, with an index (``cuda:1``) or without (the local rank's). ``name`` (by default that of the
    backend) keeps communicators of one store apart; a name may be used again after its rendezvous. ``store`` is a torch Store,
    one of `polyccl.store`, or None for what the launcher left in the environment. ``rank`` and ``size`` come from there too,
    unless given. With ``is_high_priority_stream`` the streams that PolyCCL makes on a device, for asynchronous operations and
    copies, have the device's highest priority; in host memory there are none. ``check`` compares every call between ranks before
    it starts; None: POLYCCL_CHECK. ``hints`` are listed in `polyccl.options`.

    Raises InvalidArgument, BackendUnavailable, Mismatch (ranks differ in what they must share), CommTimeout (with the missing
    ranks), on all ranks alike where the cause is shared.
    """
    from .comm import Comm

    if ranks.local_rank() in (None, 0):  # once per machine, whose ranks have one environment
        environment.warn_unknown()
    environment.level()  # refuses a level that there is not, which the core would take for the default
    backend = arguments.text("backend", backend, 'a backend\'s name, e.g. "bridge"')
    rank, size = _checked_place(rank, size)
    options = make_options(abort_process_on_timeout_or_error, timeout, is_high_priority_stream, enable_reconfigure, hints, check)
    if enable_reconfigure:
        raise UnsupportedOperation("enable_reconfigure: not supported by this version of PolyCCL")
    place = ranks.detect(rank, size)
    name = arguments.text("name", name, "a string, or None for the backend's name") if name is not None else backend
    given = stores.default_store(name, place.rank, place.size) if store is None else stores.wrap(store)
    return Comm(*form(backend, str(devices.parse(device)), name, options, given, place.rank, place.size))


def _checked_place(rank: int | None, size: int | None) -> tuple[int | None, int | None]:
    """Return rank and size as ints; None stays. `ranks.detect` refuses one without the other."""
    if size is not None:
        size = arguments.integer("size", size, 1, LARGEST, f"a number of ranks, an integer from 1 to {LARGEST}")
    return None if rank is None else arguments.rank("rank", rank, size or LARGEST), size


def split(
    parent: Group,
    number: int,
    ranks: Sequence[int],
    name: str,
    hints: Mapping[str, str] | None,
    timeout: Timeout,
    loss: Callable[[Sequence[int]], CommError | None],
) -> Comm | None:
    """Do this rank's part of a split; see `Comm.split`. The members meet by way of the parent's own store.

    ``loss`` gives the reason if some of these ranks are known to be lost.
    """
    from .comm import Comm

    where = f"split of communicator '{parent.name}'"
    try:
        members = arguments.rank_list("ranks", ranks, parent.size)
        name = arguments.text("name", name)
        options = parent.options
        if hints is not None:
            options = replace(options, hints={**options.hints, **check_hints(hints, KNOWN_HINTS)})
        if timeout is not None:
            options = replace(options, timeout=lasting(timeout))
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from None
    if not members:
        return None
    if parent.rank not in members:
        raise InvalidArgument(f"{where}: this rank, {parent.rank}, is not in its own group, ranks={members}; give [] to stay out")
    # The list is in the key: groups of one split do not meet, and ranks that disagree about theirs time out with a text.
    digest = hashlib.sha256(",".join(map(str, members)).encode()).hexdigest()[:16]
    store = PrefixStore(parent.store, f"split{number}/{digest}")
    backend = AUTO if parent.requested in (AUTO, BRIDGE) else parent.requested
    rank, size = members.index(parent.rank), len(members)
    return Comm(*form(backend, parent.device, name, options, store, rank, size, lambda: loss(members)))


def form(
    backend: str,
    device: str,
    name: str,
    options: CommOptions,
    store: Store,
    rank: int,
    size: int,
    known_failure: Failure | None = None,
) -> Formed:
    """Meet the other ranks and build what this rank needs. The store is not used, nor held, any more afterwards."""
    began = time.monotonic()
    meeting = Meeting(store, name, rank, size, after(options.timeout), known_failure)
    try:
        place = devices.parse(device)
        library = find_library(local_backend(backend, place, options))
        opened = open_device(name, library, place, options.is_high_priority_stream)
        log.debug(f"communicator '{name}': rank {rank} of {size} brings {library.name} {library.version} for {place}")
        hello = hello_of(backend, device, options, library, rank)
    except BaseException as error:
        meeting.report(error)
        raise
    with meeting:
        roster = rendezvous.exchange(meeting, hello)
        if backend not in (BRIDGE, AUTO):
            _require_one_library(roster)
            islands, labels = [list(range(size))], [backend]
        else:
            islands, labels = roster.islands(), roster.labels()
        build = _Builder(name, place, opened, options, meeting, rank, roster, library)
        kind = BRIDGE if len(islands) > 1 else library.name if backend == AUTO else backend
        own_store = meeting.group_store(roster.group)
        group = Group(name, rank, size, device, kind, backend, options, library, islands, labels, own_store)
        if not place.on_host:
            group = replace(group, on_host=partial(_companion, group, replace(build, meeting=None)))
        native = build.bridge(islands) if len(islands) > 1 else build.plain(list(range(size)), roster.group, name)
        meeting.confirm()
    parts = ", ".join(f"{label} {members}" for label, members in zip(labels, islands, strict=True))
    log.info(f"communicator '{name}': rank {rank} of {size} on {kind}, islands {parts}; made in {time.monotonic() - began:.3f} s")
    return group, native


def _companion(group: Group, build: _Builder) -> Formed:
    """Create a communicator of the ranks of ``group`` over the link, for tensors in host memory. Sends nothing."""
    host = replace(build, place=devices.parse("cpu"), device=None, library=Library(backends.HOST))
    name = f"{group.name}/on_host"
    ranks = list(range(group.size))
    own = replace(
        group, name=name, device="cpu", backend=backends.HOST, library=host.library, islands=[ranks], labels=[backends.HOST]
    )
    return own, host.plain(ranks, _derived(build.roster.group, "on_host"), name)


def find_library(name: str) -> Library:
    """The library called ``name``. Raises BackendUnavailable with why it is not there and what to do."""
    if name == backends.HOST:
        return Library(name)
    return Library(name, _native.Backend.load(str(backends.find(name))))


def open_device(name: str, library: Library, place: devices.DeviceName, high_priority: bool = False) -> _native.Device | None:
    """The library's device, or None for a library of host memory. Raises InvalidArgument where it cannot use tensors there.

    With ``high_priority`` the streams that PolyCCL makes there have the highest priority, else the lowest.
    """
    works_on_device = library.plugin is not None and library.plugin.has_device
    if not works_on_device:
        if not place.on_host:
            raise InvalidArgument(
                f"communicator '{name}': backend '{library.name}' works on host memory, not on '{place}'; name the device's own "
                f'backend ({place.backend}), by hints={{"local": ...}} or POLYCCL_LOCAL in a bridge'
            )
        return None
    opened = _native.Device(library.plugin, devices.choose_index(place, library.plugin.device_count), high_priority)
    if place.on_host and not opened.is_host:
        raise InvalidArgument(
            f"communicator '{name}': backend '{library.name}' works on its device's memory; give that device, not 'cpu'"
        )
    return opened


def local_backend(backend: str, place: devices.DeviceName, options: CommOptions) -> str:
    """The backend of this rank's island."""
    if backend not in (BRIDGE, AUTO):
        return backend
    named = options.hints.get("local") or environment.text("POLYCCL_LOCAL") or place.backend
    if named:
        return named
    try:
        find_library("gloo")
    except BackendUnavailable:
        return backends.HOST
    return "gloo"


def hello_of(backend: str, device: str, options: CommOptions, library: Library, rank: int) -> Hello:
    """What this rank tells the others at rendezvous."""
    process, address, port = _native.link_address()
    plan = options.planner_options()
    joins = backend in (BRIDGE, AUTO)
    return Hello(
        rank=rank,
        abi=_native.ABI,
        version=__version__,
        backend=library.name,
        library_version=library.version,
        compatibility=library.compatibility,
        process=process,
        address=address,
        port=port,
        pid=os.getpid(),
        device=device,
        island=(options.hints.get("island") or environment.text("POLYCCL_ISLAND")) if joins else "",
        machine=rendezvous.machine_id() if library.one_machine else "",
        equal_bits=library.equal_bits,
        options={
            "backend": backend,
            "POLYCCL_CHECK": options.check,
            "chunk_bytes": plan.chunk_bytes,
            "latency_bytes": plan.latency_bytes,
            "scratch_bytes": plan.scratch_bytes,
            "deterministic": options.hints.get("deterministic", ""),
            "planner": planner_digest(),
        },
    )


@cache
def planner_digest() -> str:
    """A digest of everything that writes plans: ranks with another would plan otherwise."""
    digest = hashlib.sha256(__version__.encode())
    folder = Path(planner.__file__).parent
    for file in [*sorted(folder.glob("*.py")), folder.parent / "spec.py"]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _derived(group: int, part: str) -> int:
    """The link's number for a part of a communicator, which all ranks derive alike."""
    return int.from_bytes(hashlib.sha256(f"{group}/{part}".encode()).digest()[:8], "big")


def _require_one_library(roster: Roster) -> None:
    first = roster.hellos[0]
    for hello in roster.hellos:
        if (hello.backend, hello.compatibility) != (first.backend, first.compatibility):
            raise Mismatch(
                f"communicator '{roster.name}': {roster.member(0)} has {first.backend} ({first.compatibility or 'any'}) and "
                f"{roster.member(hello.rank)} {hello.backend} ({hello.compatibility or 'any'}), which are not one library; "
                'use backend "bridge"'
            )


@dataclass(frozen=True)
class _Builder:
    """Builds the native communicators of one rank."""

    name: str
    place: devices.DeviceName
    device: _native.Device | None
    options: CommOptions
    meeting: Meeting | None  # during creation only
    rank: int
    roster: Roster
    library: Library

    def plain(self, members: Sequence[int], group: int, name: str) -> _native.Communicator:
        """A communicator of ``members``, all of this rank's library."""
        position, size = list(members).index(self.rank), len(members)
        own = None
        if self.library.plugin is not None and size > 1:
            assert self.meeting is not None, "a library's communicator is made while the ranks meet"
            own = _native.create_backend_comm(
                self.library.plugin,
                position,
                size,
                -1 if self.device is None else self.device.index,
                name,
                "",
                self.roster.hellos[self.rank].address,
                self.meeting.bootstrap(f"{group:016x}"),
                left(self.meeting.deadline),
                _derived(group, "library"),
                *self._membership(members),
                self.roster.token,
            )
        topology = Topology.singletons(size)
        return self._native(members, group, name, [list(range(size))], topology, own)

    def bridge(self, islands: list[list[int]]) -> _native.Communicator:
        """The bridge over all ranks, which owns two communicators of this rank's island."""
        index = next(i for i, members in enumerate(islands) if self.rank in members)
        mine = islands[index]
        legs: list[_native.Communicator] = []
        if len(mine) > 1:
            for lane in ("pre", "post")[: 2 if self.library.concurrent else 1]:
                number = _derived(self.roster.group, f"{index}/{lane}")
                legs.append(self.plain(mine, number, f"{self.name}/{self.roster.labels()[index]}/{lane}"))
        bits = tuple(all(self.roster.hellos[rank].equal_bits for rank in members) for members in islands)
        topology = Topology(tuple(tuple(members) for members in islands), bits)
        everyone = list(range(self.roster.size))
        return self._native(everyone, self.roster.group, self.name, islands, topology, None, legs)

    def _native(
        self,
        members: Sequence[int],
        group: int,
        name: str,
        islands: list[list[int]],
        topology: Topology,
        own: _native.BackendComm | None,
        legs: Sequence[_native.Communicator] = (),
    ) -> _native.Communicator:
        addresses, descriptions = self._membership(members)
        return _native.create_communicator(
            name=name,
            group=group,
            rank=list(members).index(self.rank),
            members=addresses,
            descriptions=descriptions,
            islands=islands,
            token=self.roster.token,
            device=self.device,
            device_name=str(self.place),
            device_type=self.place.type,
            native=own,
            pre=legs[0] if legs else None,
            post=legs[-1] if legs else None,
            overlap=self.library.concurrent,
            planner=_plan_writer(name, topology, list(members).index(self.rank), self.options, self._memory(bool(own))),
            check=self.options.check,
            timeout=self.options.timeout,
            latency_bytes=self.options.planner_options().latency_bytes,
            window=WINDOW,
        )

    def _membership(self, members: Sequence[int]) -> tuple[list[tuple[str, str, int]], list[str]]:
        """Where each member's link listens, and words for it."""
        hellos, descriptions = [self.roster.hellos[rank] for rank in members], self.roster.members()
        return [(hello.process, hello.address, hello.port) for hello in hellos], [descriptions[rank] for rank in members]

    def _memory(self, plain: bool) -> Callable[[str], Memory]:
        """Where data lies and what carries messages, by dtype."""
        on_host, library = self.device is None, self.library  # the communicator keeps the function, and must not keep the meeting

        def where(dtype: str) -> Memory:
            if on_host:
                return Memory.HOST
            messages = plain and all(library.messages(kind, dtype) for kind in (Kind.SEND, Kind.RECV))
            return Memory.DEVICE_MESSAGES if messages else Memory.DEVICE

        return where


def _plan_writer(name: str, topology: Topology, rank: int, options: CommOptions, memory: Callable[[str], Memory]) -> Any:
    """What the executor calls for a plan that it does not have yet."""

    def write(kind: int, dtype: str, reduction: int, root: int, small: bool, strict: bool) -> bytes:
        request = Request(Kind(kind), dtype, Reduction(reduction), root, small)
        plan = planner.plan(request, topology, rank, options.planner_options(strict), memory(dtype))
        log.debug(
            f"communicator '{name}': rank {rank} plans {request.kind.name.lower()} of {dtype} as {plan.name}, chunks of "
            f"{plan.main.chunk} elements, {len(plan.main.steps)} steps"
        )
        return plan.encode()

    return write


__all__ = ["AUTO", "BRIDGE", "Group", "Library", "find_library", "form", "new_comm", "split"]
