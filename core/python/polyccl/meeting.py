"""The meeting of a communicator's ranks while it is created, and how each learns at once of whatever goes wrong on another.

The user's store serves for one key, ``<name>/lead``: there rank 0 says where its process's own store server listens. All else goes
by that server, in a room of its own (a key prefix that is never used again): hellos, roster, the libraries' ids. So every kind of
store gives the same service, and the user's store is free once the communicator is there.

Each rank *attends* the room: if its process ends, the server sets the room's alarm, ``failed``, and every wait of the others ends
with the error in it. A rank that fails in any other way sets the alarm itself. At last all confirm that they have built their
part, so that no rank gets a communicator that another failed to build.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from . import _native, environment, errors
from .deadlines import after, left
from .errors import Aborted, CommError, CommTimeout, InvalidArgument, Mismatch, PeerLost
from .store import MemoryStore, PrefixStore, Store
from .tcp_server import TcpServer
from .tcp_store import Alarmed, Attendance, Taken, TcpStore

PROTOCOL = 2
"""Version of the meeting and the rendezvous; ranks with another are refused."""
GRACE = 5.0
"""Seconds after its own deadline that a rank still waits for rank 0's verdict, so that it learns who is missing."""

_LOOK = 0.2
"""Seconds between two looks at the parent's state, and at an outdated ``lead``."""
_LINGER = 1.0
"""Seconds that a rank 0 that failed waits at most until the others know it."""
_CONSEQUENCES = (PeerLost, Aborted, CommTimeout)
"""Errors that another rank's failure brings about: theirs is the one to raise."""

Failure = Callable[[], CommError | None]
"""Tells what is known to have failed already, e.g. the communicator that is being split."""


class Meeting:
    """The meeting of ``size`` ranks for communicator ``name``; a context, entered by all ranks, that lasts as long as the creation.

    Entering blocks until rank 0 is there. An exception within the context is told to the other ranks, and one that only follows
    from another rank's failure becomes that rank's error. ``known_failure`` is looked at in every wait.
    """

    def __init__(
        self, store: Store, name: str, rank: int, size: int, deadline: float, known_failure: Failure | None = None
    ) -> None:
        self.name, self.rank, self.size, self.deadline = name, rank, size, deadline
        self._base, self._known_failure = store, known_failure
        self._client: TcpStore | None = None
        self._attendance: Attendance | None = None
        self._leader = "rank 0"
        self._room = ""
        self._said: dict[str, Any] = {}
        self._looked = 0.0
        self._found: CommError | None = None

    @property
    def who(self) -> str:
        """This rank, for messages to the others."""
        return f"rank {self.rank} (host {socket.gethostname()}, pid {os.getpid()})"

    def __enter__(self) -> Meeting:
        if self.size > 1:
            if self.rank == 0:
                self._open()
            else:
                self._join()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        theirs = None
        if error is not None:
            if isinstance(error, _CONSEQUENCES) or type(error) is CommError:
                theirs = self._failure()
            self._announce(error)
            if self.rank == 0:
                self._linger()
        self._leave()
        if theirs is not None:
            raise theirs from None

    def report(self, error: BaseException) -> None:
        """Tell the others of an error that came before this rank could enter. Blocks for at most `GRACE` seconds."""
        self.deadline = min(self.deadline, after(GRACE))
        with suppress(CommError), self:
            self._announce(error)

    def call(self, key: str, value: bytes, wanted: str, grace: float = 0.0) -> bytes:
        """Set ``key``, and wait for ``wanted``, which rank 0 sets. Raises Mismatch if another process set ``key`` already."""
        client, requests = self._in_room(), iter([TcpStore.call])

        def ask(span: float) -> bytes:
            if next(requests, None):  # set and wait in one request: rank 0 may end as soon as it has answered
                return client.call(self._key(key), value, self._key(wanted), span, "rank 0", self._alarm)
            return client.get(self._key(wanted), span, "rank 0", self._alarm)

        return self._wait(ask, grace)

    def get(self, key: str, who: str, limit: float | None = None) -> bytes:
        """Return what ``who`` sets; wait until the deadline, or ``limit`` seconds. Raises what has gone wrong on another rank."""
        client = self._in_room()
        return self._wait(lambda span: client.get(self._key(key), span, who, self._alarm), limit=limit)

    def set(self, key: str, value: bytes) -> None:
        """Set a key of the room."""
        try:
            self._in_room().set(self._key(key), value)
        except PeerLost:
            raise self._lost_leader() from None

    def close_door(self) -> None:
        """On rank 0, once all have come: free the name for the next meeting."""
        self._base.delete(self._lead)
        self._said = {}

    def announce(self, error: CommError) -> None:
        """Tell all ranks of an error in the same words."""
        self._set_alarm(type(error).__name__, str(error))

    def confirm(self) -> None:
        """Wait until all ranks have built their part. Raises on all of them if one has not."""
        if self.size == 1:
            return
        if self.rank != 0:
            self.call(f"built/{self.rank}", b"", "done", GRACE)
            return
        for other in range(1, self.size):
            try:
                self.get(f"built/{other}", f"rank {other}")
            except CommTimeout:
                late = CommTimeout(
                    f"communicator '{self.name}': rank {other} came, but did not build its part of it in time; see its log"
                )
                self.announce(late)
                raise late from None
        self.set("done", b"")

    def bootstrap(self, folder: str) -> Bootstrap:
        """Return the store for a library's bootstrap."""
        return Bootstrap(self, folder)

    def group_store(self, group: int) -> Store:
        """Return the store that the communicator keeps, for its splits: it lives in rank 0's process."""
        if self._client is None:
            return MemoryStore()
        return GroupStore(self._client, f"group/{group:016x}", f"communicator '{self.name}': {self._leader}")

    def failure(self) -> CommError | None:
        """Return what has gone wrong elsewhere, if anything; looks at most every 50 ms."""
        now = time.monotonic()
        if self._found is None and now - self._looked >= _LOOK / 4:
            self._looked, self._found = now, self._failure()
        return self._found

    # ---- finding each other -------------------------------------------------------------------------------------------------

    @property
    def _lead(self) -> str:
        return f"{self.name}/lead"

    def _key(self, key: str) -> str:
        return f"{self._room}/{key}"

    @property
    def _alarm(self) -> str:
        return f"{self._room}/failed"

    def _in_room(self) -> TcpStore:
        if self._client is None:
            raise CommError(f"communicator '{self.name}': this rank is at no meeting")  # a fault of PolyCCL's own
        return self._client

    def _open(self) -> None:
        server = _this_process()
        self._room, self._client = secrets.token_hex(8), server.client
        self._attend(self._client)
        self._client.set(self._key("open"), str(self.size).encode())
        self._said = {
            "protocol": PROTOCOL,
            "room": self._room,
            "address": server.client.host,
            "port": server.client.port,
            "salt": server.salt,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._base.set(self._lead, json.dumps(self._said).encode())

    def _join(self) -> None:
        """Enter the room that ``lead`` names. If that is left of a meeting that failed, wait a little for another first."""
        began = time.monotonic()
        lead = self._look_for_lead()
        outdated: bytes | None = None
        until = 0.0
        while True:
            if lead is None:
                lead, fresh = self._await_lead(began), True
            else:
                fresh = False
            if lead != outdated:
                try:
                    self._enter(lead)
                    return
                except Mismatch:
                    raise
                except CommError:
                    self._leave()
                    if fresh:
                        raise
                    if outdated is None:
                        until = min(after(GRACE), self.deadline)
                    outdated = lead
            if not left(until):
                self._enter(outdated)  # raises what it raised before
                return
            time.sleep(min(_LOOK / 4, left(until)))
            lead = self._look_for_lead()

    def _look_for_lead(self) -> bytes | None:
        try:
            return self._base.get(self._lead, 0, "rank 0")
        except CommTimeout:
            return None

    def _await_lead(self, began: float) -> bytes:
        try:
            return self._wait(lambda span: self._base.get(self._lead, span, "rank 0"))
        except CommTimeout:
            raise CommTimeout(
                f"communicator '{self.name}': {self.who} heard nothing from rank 0 within {time.monotonic() - began:.1f} s: it did "
                "not come, or uses another store. See its log; if ranks are only slow, raise the timeout (POLYCCL_TIMEOUT) on all"
            ) from None

    def _enter(self, data: bytes) -> None:
        lead = _parse_lead(data, self.name)
        self._leader = f"rank 0 (host {lead['host']}, pid {lead['pid']})"
        client = TcpStore(lead["address"], lead["port"], token=_secret(lead["salt"]), is_up=True)
        self._room = lead["room"]
        try:
            self._attend(client)
            size = int(client.get(self._key("open"), 0, "rank 0", self._alarm))
        except Alarmed as alarm:
            raise _error_of(alarm.value) from None
        except (PeerLost, CommTimeout) as error:
            latest = self._look_for_lead() or b"{}"
            with suppress(Mismatch):
                lead = _parse_lead(latest, self.name)
                if lead["room"] == self._room and "failure" in lead:
                    raise _error_of(str(lead["failure"]).encode()) from None
            raise PeerLost(
                f"communicator '{self.name}': {self._leader} is gone, or cannot be reached from {self.who} ({error})"
            ) from None
        if size != self.size:
            wrong = Mismatch(f"communicator '{self.name}': rank {self.rank} expects {self.size} ranks, rank 0 {size}")
            if self.rank < size:  # else this process is none of those that rank 0 waits for
                client.set_new(self._alarm, _encode(type(wrong).__name__, str(wrong)))
            self._leave()
            raise wrong
        self._client = client

    def _attend(self, client: TcpStore) -> None:
        will = _encode("PeerLost", f"communicator '{self.name}': {self.who} ended during the creation; see its log first")
        self._attendance = client.attend(self._alarm, will, max(left(self.deadline), 1.0))

    def _leave(self) -> None:
        if self._attendance is not None:
            self._attendance.leave()
            self._attendance = None
        if self._client is not None:
            self._client.rest()

    # ---- waiting, and failing -----------------------------------------------------------------------------------------------

    def _wait(self, ask: Callable[[float], bytes], grace: float = 0.0, limit: float | None = None) -> bytes:
        """Wait for what ``ask`` gets within a span of seconds; in slices if a failure may become known otherwise."""
        deadline = (self.deadline if limit is None else min(self.deadline, after(limit))) + grace
        while True:
            remaining = left(deadline)
            span = remaining if self._known_failure is None else min(remaining, _LOOK)
            try:
                return ask(span)
            except Alarmed as alarm:
                raise _error_of(alarm.value) from None
            except Taken as taken:
                raise Mismatch(self._twice(taken.value)) from None
            except PeerLost:
                if self._client is None:  # it was the user's store
                    raise
                raise self._lost_leader() from None
            except CommTimeout:
                if self._known_failure is not None and (known := self._known_failure()) is not None:
                    raise known from None
                if not left(deadline):
                    raise

    def _failure(self) -> CommError | None:
        if self._known_failure is not None and (known := self._known_failure()) is not None:
            return known
        if self._client is None:
            return None
        try:
            return _error_of(self._client.get(self._alarm, 0))
        except CommTimeout:
            return None
        except CommError:
            return self._lost_leader()

    def _announce(self, error: BaseException) -> None:
        """Tell the others of this rank's own failure, unless another's is known already."""
        said = str(error) or type(error).__name__
        if isinstance(error, Mismatch):  # it names the ranks itself
            self._set_alarm("Mismatch", said)
        elif isinstance(error, CommError) and not isinstance(error, InvalidArgument):
            self._set_alarm(type(error).__name__, f"communicator '{self.name}': {self.who} failed during the creation: {said}")
        else:
            self._set_alarm(
                "Aborted", f"communicator '{self.name}': {self.who} left the creation with {type(error).__name__}: {said}"
            )

    def _set_alarm(self, kind: str, text: str) -> None:
        if self._client is not None:
            with suppress(CommError):  # if the server is what failed, the others notice by themselves
                self._client.set_new(self._alarm, _encode(kind, text))
                if self._said:  # also for those who find this process's end before they find its server
                    cause = self._client.get(self._alarm, 0).decode()
                    self._base.set(self._lead, json.dumps(self._said | {"failure": cause}).encode())

    def _linger(self) -> None:
        """Let the others read what went wrong before this process, which keeps it, may end."""
        end = after(_LINGER)
        while self._room and left(end) and _this_process().server.attendance(self._alarm) > 1:
            time.sleep(0.005)

    def _lost_leader(self) -> PeerLost:
        return PeerLost(f"communicator '{self.name}': {self._leader} ended during the creation; see its log first")

    def _twice(self, first: bytes) -> str:
        hello: dict[str, Any] = {}
        with suppress(ValueError):
            hello = dict(json.loads(first))
        return (
            f"communicator '{self.name}': two processes came as rank {self.rank}: first pid {hello.get('pid')} on host "
            f"{hello.get('host')}, then pid {os.getpid()} on host {socket.gethostname()}. Start each rank once; if one was "
            "restarted, restart all"
        )


class GroupStore:
    """The store that a communicator keeps, in the process of its rank 0, which ``owner`` names."""

    def __init__(self, client: TcpStore, prefix: str, owner: str) -> None:
        self._owner = owner
        self._keys = PrefixStore(client, prefix)

    def set(self, key: str, value: bytes) -> None:
        """See `polyccl.store.Store`."""
        with self._told():
            self._keys.set(key, value)

    def get(self, key: str, timeout: float | None = None, awaiting: str = "") -> bytes:
        """See `polyccl.store.Store`."""
        with self._told():
            return self._keys.get(key, timeout, awaiting)

    def delete(self, key: str) -> None:
        """See `polyccl.store.Store`."""
        with self._told():
            self._keys.delete(key)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as error:
            raise PeerLost(f"{self._owner}, whose process holds the communicator's store, has ended; see its log first") from error


class Bootstrap:
    """What a library's plugin sees of the meeting: a store in a folder of the room."""

    def __init__(self, meeting: Meeting, folder: str) -> None:
        self._meeting, self._folder = meeting, folder

    def set(self, key: str, value: bytes) -> None:
        """See `polyccl.store.Store`."""
        self._meeting.set(f"{self._folder}/{key}", value)

    def get(self, key: str, timeout: float | None = None, awaiting: str = "") -> bytes:
        """See `polyccl.store.Store`. Raises what has gone wrong on another rank."""
        return self._meeting.get(f"{self._folder}/{key}", awaiting or "another rank", timeout)

    def delete(self, key: str) -> None:
        """Do nothing: the room's keys go with the room."""

    def cancelled(self) -> bool:
        """Return whether the creation has failed elsewhere."""
        return self._meeting.failure() is not None


class _Server:
    """This process's own store server, for the meetings in which it is rank 0."""

    def __init__(self) -> None:
        self.salt = secrets.token_hex(16)
        secret = _secret(self.salt)
        self.server = TcpServer("", 0, secret)
        self.client = TcpStore(_native.link_address()[1], self.server.port, token=secret, is_up=True)


_servers: dict[tuple[int, str], _Server] = {}
_making = threading.Lock()


def _this_process() -> _Server:
    key = (os.getpid(), environment.text("POLYCCL_JOB_TOKEN"))
    with _making:
        if key not in _servers:
            _servers[key] = _Server()
        return _servers[key]


def _secret(salt: str) -> str:
    """The secret of a server: the job's, where a launcher gave one; else as good as the store that the salt came through."""
    return f"{environment.text('POLYCCL_JOB_TOKEN')}/{salt}"


def _parse_lead(data: bytes, name: str) -> dict[str, Any]:
    try:
        lead = json.loads(data)
        protocol = lead["protocol"]
        kinds = {"room": str, "address": str, "port": int, "salt": str, "host": str, "pid": int}
        whole = protocol != PROTOCOL or all(type(lead[field]) is kind for field, kind in kinds.items())
    except (ValueError, RecursionError, TypeError, KeyError):
        whole = False
    if not whole:
        raise Mismatch(
            f"communicator '{name}': what rank 0 said is malformed ({data[:40]!r}...); does another program use this store?"
        )
    if protocol != PROTOCOL:
        raise Mismatch(
            f"communicator '{name}': rank 0 has version {protocol!r} of the rendezvous and this rank version {PROTOCOL}; "
            "install the same PolyCCL on all ranks"
        )
    return dict(lead)


def _encode(kind: str, text: str) -> bytes:
    return json.dumps({"error": kind, "text": text}).encode()


def _error_of(data: bytes) -> CommError:
    """Return the error that an alarm tells of."""
    try:
        value = json.loads(data)
        kind, text = getattr(errors, str(value["error"]), CommError), str(value["text"])
    except (ValueError, TypeError, KeyError):
        kind, text = CommError, f"another rank failed ({data[:80]!r})"
    return (kind if isinstance(kind, type) and issubclass(kind, CommError) else CommError)(text)


__all__ = ["GRACE", "PROTOCOL", "Bootstrap", "Meeting"]
