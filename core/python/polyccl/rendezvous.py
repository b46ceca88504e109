"""The rendezvous: every rank says hello, and every rank gets the roster of all hellos.

Rank r sets ``hello/r``. Rank 0 gathers these, publishes one ``roster``, and tells each rank under ``go/r/nonce``, where the nonce
is that of the rank's hello: so nobody can take an earlier rendezvous of the same name for this one. Ranks other than 0 make a
fixed number of store operations. Whatever goes wrong goes to everybody the same way, so that all ranks raise the same text.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from . import environment, errors
from .errors import Aborted, CommError, CommTimeout, Mismatch
from .store import Store

MAGIC = "polyccl-hello"
PROTOCOL = 1
"""Version of the rendezvous; ranks with another are refused."""
HELLO_LIMIT = 16 << 10
"""The largest hello, in bytes."""
GRACE = 5.0
"""Seconds after its own deadline that a rank still waits for rank 0's verdict, so that it learns who is missing."""

Option = str | int | float | bool | None


@dataclass(frozen=True)
class Hello:
    """What a rank tells the others.

    ``abi`` is the ABI number (major << 16 | minor), ``version`` PolyCCL's. ``backend``, ``library_version`` and ``compatibility``
    describe the island's library; ``island`` is the user's label, or ""; ``machine`` is `machine_id` for backends that are bound
    to one machine, else "". ``equal_bits`` says that the island's all_reduce gives all of its ranks the same bits. ``process``,
    ``address`` and ``port`` are where the link listens (the process's id in hex). ``options`` must be equal on all ranks.
    """

    rank: int
    abi: int
    version: str
    backend: str
    library_version: str
    compatibility: str
    process: str
    address: str
    port: int
    pid: int
    device: str
    island: str = ""
    machine: str = ""
    equal_bits: bool = True
    host: str = field(default_factory=socket.gethostname)
    byte_order: str = sys.byteorder
    options: Mapping[str, Option] = field(default_factory=dict)
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    protocol: int = PROTOCOL
    magic: str = MAGIC

    def encode(self) -> bytes:
        """The hello as JSON. Raises InvalidArgument beyond `HELLO_LIMIT`."""
        data = json.dumps(asdict(self)).encode()
        if len(data) > HELLO_LIMIT:
            raise errors.InvalidArgument(
                f"rank {self.rank} has {len(data)} bytes to say at rendezvous; the limit is {HELLO_LIMIT}: shorten labels and hints"
            )
        return data

    @classmethod
    def decode(cls, data: bytes, who: str) -> Hello:
        """The hello of ``who``. Raises Mismatch for another protocol, CommError for anything that is not a whole hello."""
        return cls.from_object(_parse(data, HELLO_LIMIT, f"the hello of {who}"), who)

    @classmethod
    def from_object(cls, value: Any, who: str) -> Hello:
        """As `decode`, from parsed JSON."""
        what = f"the hello of {who}"
        _check_origin(value, what)
        for each in fields(cls):
            wanted = {"int": int, "str": str, "bool": bool}.get(str(each.type), dict)
            if type(value.get(each.name)) is not wanted:
                raise CommError(f"{what} is malformed: its field '{each.name}' is {value.get(each.name)!r}")
        unknown = sorted(set(value) - {each.name for each in fields(cls)})
        if unknown:
            raise CommError(f"{what} is malformed: it has unknown fields {unknown}")
        for name, option in value["options"].items():
            if not isinstance(option, (str, int, float, bool, type(None))):
                raise CommError(f"{what} is malformed: its option '{name}' is {option!r}")
        return cls(**value)


@dataclass(frozen=True)
class Roster:
    """All ranks' hellos, in rank order, and what rank 0 drew for the group.

    ``group`` is the communicator's 64-bit number, the same on all ranks and never 0; ``token`` is the secret that connections of
    the job prove to each other.
    """

    name: str
    hellos: tuple[Hello, ...]
    group: int
    token: str

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.hellos)

    def validate(self) -> None:
        """Raise Mismatch, with the same text on every rank, where hellos contradict each other."""
        for rank, hello in enumerate(self.hellos):
            if hello.rank != rank:
                raise Mismatch(f"communicator '{self.name}': a process came as rank {rank} and says that it is rank {hello.rank}")
        self._agree("PolyCCL's version", lambda hello: hello.version)
        self._agree("the ABI's version", lambda hello: f"{hello.abi >> 16}.{hello.abi & 0xFFFF}")
        self._agree("the byte order", lambda hello: hello.byte_order)
        for name in sorted({name for hello in self.hellos for name in hello.options}):
            self._agree(f"option '{name}'", lambda hello, name=name: _shown(hello.options, name))  # type: ignore[misc]
        processes: dict[str, int] = {}
        for hello in self.hellos:
            other = processes.setdefault(hello.process, hello.rank)
            if other != hello.rank:
                raise Mismatch(
                    f"communicator '{self.name}': {self.member(other)} and {self.member(hello.rank)} are one process "
                    f"(pid {hello.pid}); each rank needs a process of its own"
                )

    def islands(self) -> list[list[int]]:
        """The ranks of each island, ascending; islands are ordered by their lowest rank."""
        members: dict[tuple[str, ...], list[int]] = {}
        for rank, hello in enumerate(self.hellos):
            members.setdefault(_island_key(hello), []).append(rank)
        return list(members.values())

    def labels(self) -> list[str]:
        """A distinct name for each of `islands`: the user's label, else e.g. ``0:gloo``."""
        firsts = [self.hellos[ranks[0]] for ranks in self.islands()]
        names = [hello.island or f"{index}:{hello.backend}" for index, hello in enumerate(firsts)]
        return [
            name if names.count(name) == 1 else f"{name}#{index}:{hello.backend}"
            for index, (name, hello) in enumerate(zip(names, firsts, strict=True))
        ]

    def member(self, rank: int) -> str:
        """How messages name a rank: ``rank 3 (island amd, host b)``."""
        index = next(index for index, ranks in enumerate(self.islands()) if rank in ranks)
        return f"rank {rank} (island {self.labels()[index]}, host {self.hellos[rank].host})"

    def members(self) -> list[str]:
        """`member` of every rank."""
        names = [""] * self.size
        for label, ranks in zip(self.labels(), self.islands(), strict=True):
            for rank in ranks:
                names[rank] = f"rank {rank} (island {label}, host {self.hellos[rank].host})"
        return names

    def encode(self) -> bytes:
        """The roster as JSON."""
        return json.dumps({"magic": MAGIC, "protocol": PROTOCOL} | asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Roster:
        """The roster that `encode` wrote. Raises CommError for anything else."""
        value = _parse(data, len(data), "the roster")
        _check_origin(value, "the roster")
        try:
            name, hellos, group, token = value["name"], value["hellos"], value["group"], value["token"]
            if not (isinstance(name, str) and isinstance(token, str) and isinstance(group, int) and isinstance(hellos, list)):
                raise TypeError("a field has another type")
        except (KeyError, TypeError) as error:
            raise CommError(f"the roster is malformed: {error!r}") from None
        return cls(name, tuple(Hello.from_object(each, f"rank {rank}") for rank, each in enumerate(hellos)), group, token)

    def _agree(self, what: str, value: Callable[[Hello], str]) -> None:
        ranks: dict[str, list[int]] = {}
        for rank, hello in enumerate(self.hellos):
            ranks.setdefault(value(hello), []).append(rank)
        if len(ranks) > 1:
            names = self.members()
            cases = (
                f"{shown} on {names[each[0]] if len(each) == 1 else f'ranks {rank_list(each)}'}" for shown, each in ranks.items()
            )
            raise Mismatch(
                f"communicator '{self.name}': ranks disagree on {what}: {'; '.join(cases)}. It must be the same on all ranks"
            )


def exchange(store: Store, name: str, hello: Hello, size: int, deadline: float) -> Roster:
    """Say ``hello`` as one of ``size`` ranks of communicator ``name``, and get the roster, validated.

    Blocks until all ranks came, or until ``deadline`` (of ``time.monotonic()``). Raises, with the same text on all ranks that are
    there, CommTimeout naming the missing ranks, or Mismatch; PeerLost when the store is gone. ``name`` may be used again once
    a rendezvous is over, but not by two groups of one store at a time.
    """
    data = hello.encode()
    if size == 1:
        roster = _draw(name, [hello])
    elif hello.rank == 0:
        roster = _gather(store, name, hello, size, deadline)
    else:
        roster = _follow(store, name, hello, data, deadline)
        if roster.size != size:
            raise Mismatch(f"communicator '{name}': rank {hello.rank} expects {size} ranks, rank 0 {roster.size}")
    roster.validate()
    return roster


def machine_id() -> str:
    """A string that is the same for all processes on one machine and differs between machines."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def rank_list(ranks: Iterable[int]) -> str:
    """Ranks in short: ``0-3, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _draw(name: str, hellos: Sequence[Hello]) -> Roster:
    token = environment.text("POLYCCL_JOB_TOKEN") or secrets.token_hex(32)
    return Roster(name, tuple(hellos), secrets.randbits(63) + 1, token)


def _gather(store: Store, name: str, own: Hello, size: int, deadline: float) -> Roster:
    """Rank 0: collect the hellos, then tell everybody who came either the roster or what is wrong."""
    began = time.monotonic()
    came: dict[int, Hello] = {0: own}
    nonces: dict[int, str] = {}
    try:
        wrong = _collect(store, name, came, nonces, size, deadline)
        if len(came) < size and wrong is None:
            wrong = _missing(name, came, size, time.monotonic() - began)
        if wrong is not None:
            raise wrong
        roster = _draw(name, [came[rank] for rank in range(size)])
        place = f"{name}/roster/{roster.group:016x}"
        store.set(place, roster.encode())
        _tell(store, name, nonces, {"roster": place})
    except BaseException as error:
        verdict = (
            error if isinstance(error, CommError) else Aborted(f"communicator '{name}': rank 0 left the rendezvous ({error!r})")
        )
        with suppress(CommError):  # where the store is what failed, the others notice by themselves
            _tell(store, name, nonces, {"error": type(verdict).__name__, "text": str(verdict)})
        raise
    return roster


def _collect(
    store: Store, name: str, came: dict[int, Hello], nonces: dict[int, str], size: int, deadline: float
) -> CommError | None:
    """Fill ``came`` with every hello that is there by the deadline, and ``nonces`` with where their ranks wait for a verdict.

    The first hello that cannot be read is returned as an error; its rank is told too, if its nonce at least can be read.
    """
    wrong: CommError | None = None
    for rank in range(1, size):
        try:
            data = store.get(f"{name}/hello/{rank}", max(0.0, deadline - time.monotonic()), f"rank {rank}")
        except CommTimeout:
            continue
        store.delete(f"{name}/hello/{rank}")
        try:
            nonces[rank] = str(_parse(data, HELLO_LIMIT, f"the hello of rank {rank}").get("nonce"))
            came[rank] = Hello.decode(data, f"rank {rank}")
        except CommError as error:
            wrong = wrong or type(error)(f"communicator '{name}': {error}")
    return wrong


def _missing(name: str, came: Mapping[int, Hello], size: int, waited: float) -> CommTimeout:
    missing = [rank for rank in range(size) if rank not in came]
    hosts = sorted({hello.host for hello in came.values()})
    return CommTimeout(
        f"communicator '{name}': {len(missing)} of {size} ranks did not come to the rendezvous within {waited:.1f} s: "
        f"rank{'s' if len(missing) > 1 else ''} {rank_list(missing)} (there: {rank_list(came)}, on {', '.join(hosts[:8])}"
        f"{', ...' if len(hosts) > 8 else ''}). See the log of the missing; where they are only slow, raise the timeout "
        "(POLYCCL_TIMEOUT)"
    )


def _tell(store: Store, name: str, nonces: Mapping[int, str], verdict: Mapping[str, str]) -> None:
    data = json.dumps(verdict).encode()
    for rank, nonce in nonces.items():
        store.set(f"{name}/go/{rank}/{nonce}", data)


def _follow(store: Store, name: str, own: Hello, data: bytes, deadline: float) -> Roster:
    """Any other rank: set the hello, and wait for what rank 0 says."""
    began = time.monotonic()
    hello_key, go_key = f"{name}/hello/{own.rank}", f"{name}/go/{own.rank}/{own.nonce}"
    store.set(hello_key, data)
    try:
        verdict = _parse(store.get(go_key, max(0.0, deadline - time.monotonic()) + GRACE, "rank 0"), 1 << 20, "rank 0's verdict")
    except CommTimeout:
        store.delete(hello_key)  # a later rendezvous of this name must not find it
        raise CommTimeout(
            f"communicator '{name}': rank {own.rank} on {own.host} heard nothing from rank 0 within "
            f"{time.monotonic() - began:.1f} s: rank 0 did not come, waits longer than this rank, or uses another store. "
            "See its log; where ranks are only slow, raise the timeout (POLYCCL_TIMEOUT) on all of them"
        ) from None
    store.delete(go_key)
    if "roster" not in verdict:
        kind = getattr(errors, str(verdict.get("error")), CommError)
        raise (kind if isinstance(kind, type) and issubclass(kind, CommError) else CommError)(str(verdict.get("text")))
    return Roster.decode(store.get(str(verdict["roster"]), GRACE, "rank 0"))


def _island_key(hello: Hello) -> tuple[str, ...]:
    return hello.backend, hello.compatibility, hello.island, hello.machine


def _shown(options: Mapping[str, Option], name: str) -> str:
    return repr(options[name]) if name in options else "nothing"


def _parse(data: bytes, limit: int, what: str) -> dict[str, Any]:
    if len(data) > limit:
        raise CommError(f"{what} is malformed: it has {len(data)} bytes, of at most {limit}")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise CommError(f"{what} is malformed: it is not JSON ({data[:40]!r}...); does another program use this store?") from None
    if not isinstance(value, dict):
        raise CommError(f"{what} is malformed: it is a {type(value).__name__}, not an object")
    return value


def _check_origin(value: Any, what: str) -> None:
    if not isinstance(value, dict) or value.get("magic") != MAGIC:
        raise CommError(f"{what} is malformed: it is not PolyCCL's; does another program use this store?")
    if value.get("protocol") != PROTOCOL:
        raise Mismatch(
            f"{what} has version {value.get('protocol')!r} of the rendezvous and this rank version {PROTOCOL}; "
            "install the same PolyCCL on all ranks"
        )


__all__ = ["GRACE", "HELLO_LIMIT", "MAGIC", "PROTOCOL", "Hello", "Option", "Roster", "exchange", "machine_id", "rank_list"]
