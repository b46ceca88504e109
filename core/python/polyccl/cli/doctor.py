"""``polyccl doctor``: run by every rank of a job, says what each has, and which of them cannot work together.

The ranks meet at the job's store, in steps that all end by a deadline:

1. every rank hands rank 0 what it has, or why it has nothing; rank 0 names who is missing and who differs;
2. each pair of ranks exchanges a small message over the link;
3. all of them make a communicator of their islands' libraries, and pass one barrier;
4. one rail (a pair of ranks of two islands that share the data between these) after the other is timed, alone on the network.

Rank 0 prints. All ranks end with one exit status: 0, or 1 where something is wrong with any.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from .. import create, devices, environment, ranks
from .. import store as stores
from .._version import __version__
from ..deadlines import bounded
from ..errors import CommError, CommTimeout
from ..meeting import GRACE
from ..options import make_options
from ..planner.all_reduce import segments
from ..rendezvous import Hello, Roster, rank_list
from ..store import Store
from . import wire
from .doctor_report import show

NAME = "polyccl-doctor"
_DEVICES = {"nccl": "cuda", "ncclx": "cuda", "rccl": "hip", "rcclx": "hip", "xccl": "xpu"}


@dataclass(frozen=True)
class Problem:
    """Something wrong: the ranks that it is about, as far as that is known, and a sentence."""

    ranks: list[int]
    text: str


@dataclass
class Report:
    """What rank 0 finds, ready for JSON."""

    size: int
    ranks: list[dict[str, Any]] = field(default_factory=list)
    islands: list[dict[str, Any]] = field(default_factory=list)
    backend: str = ""
    rails: list[dict[str, Any]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def blame(self, ranks: list[int], text: str) -> None:
        """Note something wrong."""
        self.problems.append(Problem(ranks, text))


def run(timeout: float, size: int, device: str | None, as_json: bool) -> int:
    """Be one rank of the examination; the exit status. Blocks for a few ``timeout`` (seconds) at most where ranks are slow.

    ``size``: bytes of the messages that rails are timed with. ``device``: as in `polyccl.new_comm`; None for that of
    POLYCCL_LOCAL, or the CPU. Without a launcher this process is the only rank. Raises InvalidArgument where only a rank or only a
    size is told, PeerLost where there is no store.
    """
    timeout = bounded(timeout)
    os.environ.setdefault("POLYCCL_TIMEOUT", repr(timeout))  # for the connection to the store
    place = ranks.detect() if ranks.are_told() else ranks.ALONE
    store = stores.default_store(NAME, place.rank, place.size)
    patient = _Patient(store, place.rank, place.size, timeout, size, device or "")
    if place.rank > 0:
        return patient.follow()
    report = patient.lead(lambda report: show(asdict(report), as_json))
    return 1 if report.problems else 0


def facts(rank: int, size: int, device: str, patience: float) -> dict[str, Any]:
    """What this rank has: plain data. ``error`` says why it cannot take part, ``hello`` is what it would tell at a rendezvous.

    Starts the link, which tries for ``patience`` seconds to reach a process.
    """
    found: dict[str, Any] = {
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "polyccl": __version__,
        "nonce": secrets.token_hex(8),
        "error": None,
    }
    try:
        wire.set_patience(patience)
        found["link"] = wire.address()
        found["address"], found["port"] = found["link"][2:]
        found["interface"] = wire.interface_of(found["address"])
        found |= _library(rank, device)
    except CommError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _library(rank: int, named: str) -> dict[str, Any]:
    options = make_options(None, None, None, False, None)
    device = named or _usual_device()
    place = devices.parse(device)
    library = create.find_library(create.local_backend(create.AUTO, place, options))
    found = {
        "device": device,
        "backend": library.name,
        "library": library.version,
        "file": "" if library.plugin is None else library.plugin.library_file,
    }
    create.open_device(NAME, library, place)
    return found | {"hello": asdict(create.hello_of(create.AUTO, device, options, library, rank))}


def _usual_device() -> str:
    """The device that the library named by POLYCCL_LOCAL works on."""
    named = environment.text("POLYCCL_LOCAL")
    library = create.find_library(named) if named else None
    on_device = library is not None and library.plugin is not None and library.plugin.has_device
    return _DEVICES.get(named, "cuda") if on_device else "cpu"


def _version(package: str) -> str | None:
    """The installed version, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class _Patient:
    """One rank under examination."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float, message: int, device: str) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout, self._message = timeout, message
        self._facts = facts(rank, size, device, timeout)
        self._roster: Roster | None = None
        self._links: list[wire.Member] = []
        self._bad_pairs: set[tuple[int, int]] = set()
        self._asked: dict[str, int] = {}

    # ---- rank 0 ---------------------------------------------------------------------------------------------------------------

    def lead(self, show: Callable[[Report], None]) -> Report:
        """Examine all ranks, show the report, and let them go."""
        report = Report(self._size)
        there: dict[int, str] = {}
        try:
            there = self._call_roll(report)
            if not report.problems:
                self._examine(report, there)
        except CommError as error:
            report.blame([], f"{type(error).__name__}: {error}")
        show(report)  # before the others end: a launcher may end this rank when another fails
        for rank, nonce in there.items():
            with suppress(CommError):
                self._put(f"{nonce}/verdict", {"ok": not report.problems, "stop": True})
                self._take(f"{nonce}/bye", GRACE, rank)  # this rank may host the store
        return report

    def _call_roll(self, report: Report) -> dict[int, str]:
        """Collect what ranks have. Gives the nonces of those that came."""
        deadline, there = time.monotonic() + self._timeout, {}
        report.ranks.append(self._facts)
        for rank in range(1, self._size):
            try:
                told = self._take(f"facts/{rank}", max(0.0, deadline - time.monotonic()), rank)
            except CommTimeout:
                continue
            report.ranks.append(told)
            there[rank] = str(told["nonce"])
        missing = sorted(set(range(self._size)) - {0, *there})
        if missing:
            report.blame(
                missing,
                f"rank{'s' if len(missing) > 1 else ''} {rank_list(missing)} did not come within {self._timeout:g} s: see the log "
                "there; the store must be reachable from that host (MASTER_ADDR and MASTER_PORT, or POLYCCL_STORE)",
            )
        for told in report.ranks:
            if told["size"] != self._size:
                report.blame([told["rank"]], f"{_who(told)} was started as one of {told['size']} ranks, rank 0 of {self._size}")
            if told["error"]:
                report.blame([told["rank"]], f"{_who(told)}: {told['error']}")
        self._compare(report)
        return there

    def _compare(self, report: Report) -> None:
        """Check what must be equal, and find the islands, as a rendezvous does."""
        _compare_versions(report)
        if report.problems:
            return
        try:
            hellos = tuple(Hello.from_object(told["hello"], f"rank {told['rank']}") for told in report.ranks)
            token = environment.text("POLYCCL_JOB_TOKEN") or secrets.token_hex(32)
            roster = Roster(NAME, hellos, secrets.randbits(62) + 1, token)
            roster.validate()
        except CommError as error:
            report.blame([], f"{type(error).__name__}: {error}")
            return
        self._roster = roster
        self._links = [_member(told["link"]) for told in report.ranks]
        for label, members in zip(roster.labels(), roster.islands(), strict=True):
            report.islands.append({"label": label, "backend": hellos[members[0]].backend, "ranks": members})
            for rank in members:
                report.ranks[rank]["island"] = label

    def _examine(self, report: Report, nonces: Mapping[int, str]) -> None:
        assert self._roster is not None
        roster = json.loads(self._roster.encode())
        for nonce in nonces.values():
            self._put(f"{nonce}/go", {"roster": roster, "links": self._links})
        self._judge_pairs(report, {0: self._reach()} | self._gather("reached", nonces, report))
        creates = not report.problems
        for nonce in nonces.values():
            self._put(f"{nonce}/create", {"create": creates})
        if creates:
            made = {0: self._create()} | self._gather("created", nonces, report)
            report.backend = str(made[0]["backend"])
            texts = {str(made[rank]["error"]): rank for rank in sorted(made, reverse=True) if made[rank]["error"]}
            for text, rank in texts.items():  # once where all say the same
                report.blame([], f"{self._name(rank)} could not make a communicator: {text}")
        self._time_rails(report, nonces)

    def _judge_pairs(self, report: Report, reached: Mapping[int, Mapping[str, Any]]) -> None:
        """Name the ranks that no other rank can talk to, then the pairs that are left."""
        bad: dict[tuple[int, int], str] = {}
        for rank, found in reached.items():
            for peer, text in found["peers"].items():
                if text:
                    bad.setdefault((min(rank, int(peer)), max(rank, int(peer))), text)
        lost = [rank for rank in range(self._size) if sum(rank in pair for pair in bad) == self._size - 1]
        if len(lost) == self._size:  # nobody reaches anybody: no one of them is the culprit
            lost = []
        advice = "check POLYCCL_SOCKET_IFNAME, routes, and that firewalls let the ranks' ports through"
        for rank in lost:
            told = report.ranks[rank]
            where = f"{told['address']} port {told['port']}, interface {told['interface'] or 'unknown'}"
            text = next(text for pair, text in bad.items() if rank in pair)
            report.blame([rank], f"{self._name(rank)} cannot be reached by any other rank ({where}): {advice}. {text}")
        for (a, b), text in bad.items():
            if a not in lost and b not in lost:
                report.blame([a, b], f"{self._name(a)} and {self._name(b)} cannot talk: {advice}. {text}")
        self._bad_pairs = set(bad)

    def _time_rails(self, report: Report, nonces: Mapping[int, str]) -> None:
        """Let the rails be timed, one after the other; those that are left when the time is up are skipped."""
        assert self._roster is not None
        end = time.monotonic() + 3 * self._timeout
        for a, b in _rails(self._roster.islands()):
            if (a, b) in self._bad_pairs:
                continue
            entry: dict[str, Any] = {"from": a, "to": b, "bytes": self._message}
            report.rails.append(entry)
            if time.monotonic() > end:
                entry["skipped"] = True
                continue
            for rank in {a, b} - {0}:
                self._put(f"{nonces[rank]}/turn", {"pair": [a, b]})
            found = {rank: self._measure(a, b) for rank in {a, b} & {0}}
            found |= self._gather("timed", {rank: nonces[rank] for rank in {a, b} - {0}}, report)
            if a in found:
                entry |= found[a]
            errors = [text for text in (found[rank].get("error") for rank in sorted(found)) if text]
            if errors:
                report.blame([a, b], f"{self._name(a)} and {self._name(b)}, while they were timed: {errors[0]}")

    def _gather(self, what: str, nonces: Mapping[int, str], report: Report) -> dict[int, dict[str, Any]]:
        """What every other rank answers to a step."""
        answers, deadline = {}, time.monotonic() + self._timeout + GRACE
        for rank, nonce in nonces.items():
            try:
                answers[rank] = self._take(f"{nonce}/{what}", max(0.0, deadline - time.monotonic()), rank)
            except CommTimeout:
                report.blame([rank], f"{self._name(rank)} came and then fell silent (step '{what}'): see its log")
        return answers

    # ---- the others -----------------------------------------------------------------------------------------------------------

    def follow(self) -> int:
        """Do what rank 0 says until it has its verdict."""
        nonce = str(self._facts["nonce"])
        self._put(f"facts/{self._rank}", self._facts)
        if self._facts["error"]:
            print(f"polyccl doctor: rank {self._rank}: {self._facts['error']}", file=sys.stderr, flush=True)
        ok = False
        for step, words in self._steps(nonce):
            if step == "go":
                self._roster = Roster.decode(json.dumps(words["roster"]).encode())
                self._links = [_member(each) for each in words["links"]]
                self._put(f"{nonce}/reached", self._reach())
            elif step == "create" and words["create"]:
                self._put(f"{nonce}/created", self._create())
            elif step == "turn":
                self._put(f"{nonce}/timed", self._measure(*words["pair"]))
            elif step == "verdict":
                ok = bool(words["ok"])
        return 0 if ok else 1

    def _steps(self, nonce: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """What rank 0 asks, in its order, until the verdict. Raises CommTimeout where it falls silent."""
        number, limit = 0, 2 * self._timeout + 3 * GRACE
        while True:
            try:
                words = json.loads(self._store.get(f"{nonce}/step/{number}", limit, "rank 0"))
            except CommTimeout:
                self._store.delete(f"facts/{self._rank}")  # a later examination must not find it
                raise CommTimeout(
                    f"polyccl doctor: rank {self._rank} heard nothing from rank 0 within {limit:g} s: rank 0 did not come, or uses "
                    "another store (MASTER_ADDR and MASTER_PORT, or POLYCCL_STORE); see its log"
                ) from None
            self._store.delete(f"{nonce}/step/{number}")
            yield words["step"], words
            number, limit = number + 1, 5 * self._timeout + GRACE
            if words.get("stop"):
                self._store.set(f"{nonce}/bye", b"{}")
                return

    # ---- what all ranks do ----------------------------------------------------------------------------------------------------

    def _reach(self) -> dict[str, Any]:
        """Exchange a message with every other rank: by rank, what is wrong, or None."""
        deadline = time.monotonic() + self._timeout
        peers = [rank for rank in range(self._size) if rank != self._rank]
        wires = [self._wire(peer, 1, deadline) for peer in peers]
        found = {str(peer): text for peer, text in zip(peers, wire.reach(wires), strict=True)}
        for each in wires:
            each.close()
        return {"peers": found}

    def _create(self) -> dict[str, Any]:
        """Make a communicator as a program would, and pass a barrier."""
        roster = self._roster
        assert roster is not None
        name = f"{NAME}/{roster.group:x}"
        try:
            comm = create.new_comm(
                create.AUTO, self._facts["device"], name, None, self._timeout, store=self._store, rank=self._rank, size=self._size
            )
            comm.barrier()
            backend = comm.get_backend()
            comm.finalize(self._timeout)
        except CommError as error:
            return {"backend": "", "error": f"{type(error).__name__}: {error}"}
        return {"backend": backend, "error": None}

    def _measure(self, a: int, b: int) -> dict[str, Any]:
        """Time the rail; its numbers, or an error."""
        line = self._wire(b if self._rank == a else a, 2, time.monotonic() + self._timeout)
        try:
            return asdict(wire.measure(line, self._rank == a, self._message))
        except CommError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            line.close()

    def _wire(self, peer: int, use: int, deadline: float) -> wire.Wire:
        roster = self._roster
        assert roster is not None
        low, high = sorted((self._rank, peer))
        number = (roster.group + 2 * (low * self._size + high) + use) % 2**64
        own, other = ((rank, self._links[rank], roster.member(rank)) for rank in (self._rank, peer))
        return wire.Wire(number, own, other, roster.token, deadline)

    def _name(self, rank: int) -> str:
        return self._roster.member(rank) if self._roster is not None else f"rank {rank}"

    def _put(self, key: str, value: Mapping[str, Any]) -> None:
        """Hand over ``value``. What rank 0 asks of a rank is numbered, so that it comes in order."""
        nonce, _, step = key.partition("/")
        if self._rank == 0:
            number = self._asked[nonce] = self._asked.get(nonce, -1) + 1
            key, value = f"{nonce}/step/{number}", {"step": step, **value}
        self._store.set(key, json.dumps(value).encode())

    def _take(self, key: str, timeout: float, rank: int) -> dict[str, Any]:
        data = self._store.get(key, timeout, f"rank {rank}")
        self._store.delete(key)
        value = json.loads(data)
        assert isinstance(value, dict)
        return value


def _rails(islands: list[list[int]]) -> list[tuple[int, int]]:
    """The pairs of ranks that share the data between each two islands, as all_reduce pairs them."""
    found = []
    for i, left in enumerate(islands):
        for right in islands[i + 1 :]:
            for lo, _ in segments((len(left), len(right))):
                a, b = left[int(lo * len(left))], right[int(lo * len(right))]
                found.append((min(a, b), max(a, b)))
    return list(dict.fromkeys(found))


def _compare_versions(report: Report) -> None:
    """Name the ranks whose PolyCCL is not that of most."""
    versions: dict[str, list[int]] = {}
    for told in report.ranks:
        versions.setdefault(told["polyccl"], []).append(told["rank"])
    usual = max(versions, key=lambda version: len(versions[version]))
    for version, members in versions.items():
        if version != usual:
            there = ", ".join(_who(told) for told in report.ranks if told["rank"] in members)
            report.blame(
                members, f"{there}: PolyCCL {version}, while ranks {rank_list(versions[usual])} have {usual}; install one version"
            )


def _who(told: Mapping[str, Any]) -> str:
    return f"rank {told['rank']} (host {told['host']})"


def _member(value: Any) -> wire.Member:
    one, two, host, port = value
    return int(one), int(two), str(host), int(port)


__all__ = ["Problem", "Report", "facts", "run"]
