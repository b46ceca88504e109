"""The client of the key-value store over TCP; `polyccl.tcp_server` has the server and the protocol."""

from __future__ import annotations

import hmac
import os
import socket
import threading
import time
import weakref
from contextlib import suppress

from . import arguments, environment
from .deadlines import after, bounded, left, slice_of
from .errors import CommError, CommTimeout, InvalidArgument, PeerLost
from .tcp_server import (
    ALARM,
    ANSWER,
    ATTEND,
    CALL,
    CALL_HEAD,
    DELETE,
    GET,
    KEY_LIMIT,
    LEAVE,
    MAGIC,
    NONCE,
    OK,
    REQUEST,
    SET,
    SET_NEW,
    TAKEN,
    TIMED_OUT,
    VALUE_LIMIT,
    TcpServer,
    keep_alive,
)

_GRACE = 5.0
"""Seconds that an answer may be late before the server counts as lost."""


class Alarmed(CommError):
    """A wait that ended because its alarm key was set; ``value`` is the alarm's."""

    def __init__(self, value: bytes) -> None:
        super().__init__("the alarm was set")
        self.value = value


class Taken(CommError):
    """A key was to be set that has a value already; ``value`` is that one."""

    def __init__(self, value: bytes) -> None:
        super().__init__("the key is taken")
        self.value = value


class TcpStore:
    """A client of `TcpServer`, safe for use by many threads: each request in flight has a connection of its own.

    With ``serve`` it also runs the server, on all interfaces of this machine; the two end together. A request first waits,
    up to its own timeout, for the server to come up; with ``is_up`` it must be up already, and a refused connection means that it
    is gone. ``timeout`` is for requests that give none, in seconds (POLYCCL_TIMEOUT); ``token`` is the job's (POLYCCL_JOB_TOKEN).
    """

    def __init__(
        self,
        host: str,
        port: int,
        serve: bool = False,
        token: str | None = None,
        timeout: float | None = None,
        is_up: bool = False,
    ) -> None:
        host, serve = arguments.text("host", host), arguments.flag("serve", serve)
        port = arguments.port(port, 0 if serve else 1)
        self._token = environment.text("POLYCCL_JOB_TOKEN") if token is None else arguments.text("token", token, empty=True)
        self._timeout = environment.seconds("POLYCCL_TIMEOUT") if timeout is None else arguments.seconds(timeout)
        self._is_up = is_up
        self._server = TcpServer("", port, self._token) if serve else None
        self.host, self.port = host, self._server.port if self._server else port
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        _LIVE.add(self)

    def set(self, key: str, value: bytes) -> None:
        """Give ``key`` a value of at most `VALUE_LIMIT` bytes, and wake who waits for it."""
        self._request(SET, key, arguments.octets("value", value), self._timeout)

    def set_new(self, key: str, value: bytes) -> None:
        """Give ``key`` a value unless it has one."""
        self._request(SET_NEW, key, value, self._timeout)

    def get(self, key: str, timeout: float | None = None, awaiting: str = "", alarm: str = "") -> bytes:
        """Return the value of ``key``; wait until it is set, at most ``timeout`` seconds, then raise CommTimeout.

        ``awaiting`` says in the error who sets the key. If the key ``alarm`` is set, and this key not, raises Alarmed.
        """
        timeout = self._timeout if timeout is None else arguments.seconds(timeout)
        return self._request(GET, key, alarm.encode(errors="surrogateescape"), timeout, awaiting)

    def call(self, key: str, value: bytes, wanted: str, timeout: float, awaiting: str = "", alarm: str = "") -> bytes:
        """Set ``key``, and get ``wanted``, in one request. Raises Taken if ``key`` has a value already; else as `set` and `get`."""
        names = [each.encode(errors="surrogateescape") for each in (wanted, alarm)]
        data = CALL_HEAD.pack(*map(len, names)) + b"".join(names) + value
        return self._request(CALL, key, data, timeout, awaiting, wanted)

    def delete(self, key: str) -> None:
        """Forget ``key``, if it is set."""
        self._request(DELETE, key, b"", self._timeout)

    def attend(self, alarm: str, will: bytes, timeout: float) -> Attendance:
        """Be present at the store: if this process ends before `Attendance.leave`, the server sets key ``alarm`` to ``will``."""
        connection = self._connect(after(timeout))
        try:
            self._talk(connection, ATTEND, alarm, will, timeout)
        except BaseException:
            connection.close()
            raise
        return Attendance(self, connection)

    def close(self) -> None:
        """Close the connections, and the server where this store runs it. Idempotent."""
        _LIVE.discard(self)
        self.rest()
        if self._server:
            self._server.close()

    def rest(self) -> None:
        """Close the connections that are idle. The next request opens another."""
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def forget(self) -> None:
        """In a child after fork: close the copies of the parent's connections. The child's own requests open new ones."""
        self._lock = threading.Lock()
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _request(
        self, operation: int, key: str, value: bytes, timeout: float, awaiting: str = "", wanted: str | None = None
    ) -> bytes:
        deadline = after(timeout)
        connection = self._connect(deadline)
        try:
            status, answer = self._talk(connection, operation, key, value, left(deadline))
        except BaseException:  # an answer may still come on this connection, so that no one else may use it
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        if status == TIMED_OUT:
            raise timed_out(str(self), key if wanted is None else wanted, timeout, awaiting)
        if status == ALARM:
            raise Alarmed(answer)
        if status == TAKEN:
            raise Taken(answer)
        if status != OK:
            raise CommError(f"{self}: key '{key}' was refused: {answer.decode(errors='replace')}")
        return answer

    def _talk(self, connection: socket.socket, operation: int, key: str, value: bytes, timeout: float) -> tuple[int, bytes]:
        """Send one request and receive its answer."""
        name = arguments.key(key).encode(errors="surrogateescape")
        if len(name) > KEY_LIMIT or len(value) > VALUE_LIMIT:
            raise InvalidArgument(
                f"{self}: key '{key[:80]}' has {len(name)} bytes and its value {len(value)}; "
                f"the limits are {KEY_LIMIT} and {VALUE_LIMIT} bytes"
            )
        timeout = bounded(timeout)
        try:
            connection.settimeout(slice_of(timeout + _GRACE))
            connection.sendall(REQUEST.pack(operation, len(name), len(value), int(timeout * 1000)) + name + value)
            return self._receive_answer(connection, after(timeout + _GRACE))
        except OSError as error:
            raise PeerLost(f"{self}: the store was lost while '{key}' was asked for ({_words(error)}); {_HOST_HINT}") from None

    def _connect(self, deadline: float) -> socket.socket:
        """Return an idle connection, or a new one as soon as the server accepts it."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        pause, began = 0.005, time.monotonic()
        while True:
            try:
                connection = socket.create_connection((self.host, self.port), timeout=slice_of(max(0.05, left(deadline))))
                break
            except OSError as error:  # not up yet, or its name not known yet
                if self._is_up and isinstance(error, ConnectionError):
                    raise PeerLost(f"{self}: the store is gone ({_words(error)}); {_HOST_HINT}") from None
                if left(deadline) <= pause:
                    raise CommTimeout(
                        f"{self}: no store came up within {time.monotonic() - began:.1f} s ({_words(error)}); "
                        f"check that this address can be reached, and {_HOST_HINT}"
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        try:
            self._greet(connection, max(deadline, after(_GRACE)))
        except OSError as error:
            connection.close()
            raise PeerLost(f"{self}: the store was lost during the greeting ({_words(error)}); {_HOST_HINT}") from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, connection: socket.socket, deadline: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)
        stranger = CommError(
            f"{self}: whoever listens there is not a PolyCCL store (or of another version). Another program may use the port, or "
            "torch is installed on some ranks only, so that they chose unlike stores: set POLYCCL_STORE on all ranks"
        )
        try:
            greeting = _receive(connection, len(MAGIC) + NONCE, min(deadline, after(_GRACE)))
        except TimeoutError:  # e.g. a torch store, which waits for the client to begin
            raise stranger from None
        if greeting[: len(MAGIC)] != MAGIC:
            raise stranger
        connection.sendall(MAGIC + hmac.digest(self._token.encode(), greeting[len(MAGIC) :], "sha256"))
        status, text = self._receive_answer(connection, deadline)
        if status != OK:
            raise CommError(f"{self}: the store refuses this process: {text.decode(errors='replace')}")

    def _receive_answer(self, connection: socket.socket, deadline: float) -> tuple[int, bytes]:
        status, size = ANSWER.unpack(_receive(connection, ANSWER.size, deadline))
        if size > VALUE_LIMIT:
            raise ConnectionError(f"an answer of {size} bytes is not this protocol's")
        return status, _receive(connection, size, deadline)

    def __str__(self) -> str:
        return f"store tcp://{self.host}:{self.port}"


class Attendance:
    """This process's presence at a store, on a connection of its own; see `TcpStore.attend`."""

    def __init__(self, store: TcpStore, connection: socket.socket) -> None:
        self._store, self._connection = store, connection
        _LIVE.add(self)

    def leave(self) -> None:
        """Be present no more, of this process's own will. Idempotent; never raises."""
        with suppress(CommError, OSError):
            if self._connection.fileno() >= 0:
                self._store._talk(self._connection, LEAVE, "", b"", _GRACE)
        self._connection.close()

    def forget(self) -> None:
        """In a child after fork: close the copy of the connection, so that the parent's end is seen."""
        self._connection.close()


_HOST_HINT = "see the log of the process that hosts it (the launcher or rank 0) first"

_LIVE: weakref.WeakSet[TcpStore | Attendance] = weakref.WeakSet()


def _forget_all() -> None:
    for each in list(_LIVE):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)


def timed_out(store: str, key: str, timeout: float, awaiting: str) -> CommTimeout:
    """Return the error of a key that nobody set in time."""
    who = f", which {awaiting} sets" if awaiting else ""
    return CommTimeout(f"{store}: key '{key}'{who}, was not set within {timeout:.1f} s")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        connection.settimeout(slice_of(max(0.001, left(deadline))))
        try:
            part = connection.recv(min(size - len(data), 1 << 20))
        except TimeoutError:
            if left(deadline):
                continue
            raise
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return bytes(data)


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


__all__ = ["Alarmed", "Attendance", "Taken", "TcpStore", "timed_out"]
