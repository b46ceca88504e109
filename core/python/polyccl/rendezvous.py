"""The rendezvous: every rank says hello, and every rank gets the roster of all hellos.

Rank r sets ``hello/r`` in the meeting's room. Rank 0 gathers these and publishes one ``roster``. A rank may come once to a meeting:
one that was restarted, or started twice, is told of as such. Ranks other than 0 make a fixed number of store operations. Whatever
goes wrong goes to everybody the same way, so that all ranks raise the same text.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from . import environment, errors
from .errors import CommError, CommTimeout, Mismatch
from .meeting import GRACE, PROTOCOL, Meeting

MAGIC = "polyccl-hello"
HELLO_LIMIT = 16 << 10
"""The largest hello, in bytes."""
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


def exchange(meeting: Meeting, hello: Hello) -> Roster:
    """Say ``hello`` at the meeting, and get the roster, validated.

    Blocks until all ranks came, or until the meeting's deadline. Raises, with the same text on all ranks that are there,
    CommTimeout naming the missing ranks, or Mismatch, or what ended the creation on another rank.
    """
    data = hello.encode()
    if meeting.size == 1:
        roster = _draw(meeting.name, [hello])
        roster.validate()
        return roster
    if hello.rank == 0:
        return _gather(meeting, hello)
    try:
        roster = Roster.decode(meeting.call(f"hello/{hello.rank}", data, "roster", GRACE))
    except CommTimeout:
        raise CommTimeout(
            f"communicator '{meeting.name}': {meeting.who} met rank 0, but got no roster from it in time: rank 0 waits longer than "
            "this rank; give all ranks the same timeout (POLYCCL_TIMEOUT)"
        ) from None
    return replace(roster, token=roster.token or environment.text("POLYCCL_JOB_TOKEN"))


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


@cache
def _drawn_token(process: int) -> str:
    """Return the secret of the communicators that this process leads: one for all, since the link keeps every token."""
    return secrets.token_hex(32)


def _draw(name: str, hellos: Sequence[Hello]) -> Roster:
    token = environment.text("POLYCCL_JOB_TOKEN") or _drawn_token(os.getpid())
    return Roster(name, tuple(hellos), secrets.randbits(63) + 1, token)


def _gather(meeting: Meeting, own: Hello) -> Roster:
    """Rank 0: collect the hellos, then tell everybody who came either the roster or what is wrong."""
    began = time.monotonic()
    came: dict[int, Hello] = {0: own}
    try:
        _collect(meeting, came)
        if len(came) < meeting.size:
            raise _missing(meeting.name, came, meeting.size, time.monotonic() - began)
        roster = _draw(meeting.name, [came[rank] for rank in range(meeting.size)])
        roster.validate()
    except (CommTimeout, Mismatch) as error:
        meeting.announce(error)
        raise
    meeting.close_door()
    # A secret that all have from their launcher does not cross the network.
    published = replace(roster, token="") if environment.text("POLYCCL_JOB_TOKEN") else roster
    meeting.set("roster", published.encode())
    return roster


def _collect(meeting: Meeting, came: dict[int, Hello]) -> None:
    """Fill ``came`` with every hello that is there by the deadline. Raises what is wrong with the first that cannot be read."""
    for rank in range(1, meeting.size):
        try:
            data = meeting.get(f"hello/{rank}", f"rank {rank}")
        except CommTimeout:
            continue
        try:
            came[rank] = Hello.decode(data, f"rank {rank}")
        except CommError as error:
            wrong = type(error)(f"communicator '{meeting.name}': {error}")
            meeting.announce(wrong)
            raise wrong from None


def _missing(name: str, came: Mapping[int, Hello], size: int, waited: float) -> CommTimeout:
    missing = [rank for rank in range(size) if rank not in came]
    hosts = sorted({hello.host for hello in came.values()})
    return CommTimeout(
        f"communicator '{name}': {len(missing)} of {size} ranks did not come to the rendezvous within {waited:.1f} s: "
        f"rank{'s' if len(missing) > 1 else ''} {rank_list(missing)} (there: {rank_list(came)}, on {', '.join(hosts[:8])}"
        f"{', ...' if len(hosts) > 8 else ''}). See the log of the missing; where they are only slow, raise the timeout "
        "(POLYCCL_TIMEOUT)"
    )


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


__all__ = ["HELLO_LIMIT", "MAGIC", "Hello", "Option", "Roster", "exchange", "machine_id", "rank_list"]
