"""A key-value store over TCP in pure Python: the server, one thread in a launcher or in rank 0, and its client.

The server greets with ``MAGIC`` and a nonce, the client answers with ``MAGIC`` and the HMAC of the nonce under the job token, so
that a stranger, or another job, is refused before it can say anything. Then the client sends requests, one at a time on a
connection, and the server answers each:

    request   operation (1 byte), length of the key (4), length of the value (8), timeout in ms (8), key, value
    answer    status (1 byte), length of the value (8), value

All integers are big-endian; every length is bounded before memory is taken for it.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import hmac
import itertools
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from dataclasses import dataclass, field

from . import arguments, environment
from .errors import CommError, CommTimeout, InvalidArgument, PeerLost

MAGIC = b"PCSTORE1"
KEY_LIMIT = 4096
VALUE_LIMIT = 64 << 20
"""The largest value, in bytes."""
TOTAL_LIMIT = 1 << 30
"""The most bytes that a server holds."""

_NONCE = 32
_HELLO = len(MAGIC) + hashlib.sha256().digest_size
_REQUEST = struct.Struct("!BIQQ")
_ANSWER = struct.Struct("!BQ")
_SET, _GET, _DELETE = 1, 2, 3
_OK, _TIMED_OUT, _REFUSED = 0, 1, 2
_GRACE = 5.0
"""Seconds that an answer may be late before the server counts as lost."""


@dataclass(eq=False)
class _Client:
    """What the server knows of one connection."""

    socket: socket.socket
    nonce: bytes
    proven: bool = False
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    awaited: str | None = None
    turn: int = 0
    """Counts the waits of this connection, so that the deadline of an earlier one is known to be void."""


class TcpServer:
    """A store server: listens at once, serves on a daemon thread until `close`.

    ``host`` "" is all interfaces; ``port`` 0 is any free port, which ``port`` then tells. Clients must prove ``token``. Raises
    InvalidArgument where the address cannot be listened on.
    """

    def __init__(self, host: str = "", port: int = 0, token: str = "") -> None:
        self._token = arguments.text("token", token, empty=True).encode()
        self._listener = _listen(arguments.text("host", host, empty=True), arguments.port(port))
        self.port: int = self._listener.getsockname()[1]
        self._values: dict[str, bytes] = {}
        self._held = 0
        self._waiting: dict[str, list[_Client]] = {}
        self._deadlines: list[tuple[float, int, int, _Client]] = []
        self._numbers = itertools.count()
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._bell, self._ringer = socket.socketpair()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="polyccl-store", daemon=True)
        self._thread.start()
        _LIVE.add(self)

    def close(self) -> None:
        """Stop serving and drop every connection. Idempotent."""
        _LIVE.discard(self)
        if self._ringer.fileno() >= 0:
            self._ringer.close()
            self._thread.join()

    def forget(self) -> None:
        """In a child after fork: close the copies of the parent's sockets, without a word to their other ends."""
        for each in (self._listener, self._bell, self._ringer, *(client.socket for client in self._clients)):
            each.close()
        self._selector.close()

    def _serve(self) -> None:
        try:
            while True:
                for key, events in self._selector.select(self._patience()):
                    if key.fileobj is self._bell:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._attend(key.data, events)
                self._expire()
        finally:
            for each in (self._listener, self._bell, *(client.socket for client in self._clients)):
                each.close()
            self._selector.close()

    def _patience(self) -> float | None:
        return max(0.0, self._deadlines[0][0] - time.monotonic()) if self._deadlines else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client is gone already, or this process is out of descriptors: others must be served on
            time.sleep(0.01)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(connection, secrets.token_bytes(_NONCE))
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._send(client, MAGIC + client.nonce)

    def _attend(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ:
                data = client.socket.recv(1 << 20)
                if not data or client.awaited is not None:  # closed, or speaking out of turn
                    self._drop(client)
                    return
                client.received += data
                self._read(client)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)

    def _read(self, client: _Client) -> None:
        """Handle the request that is complete, if one is."""
        if not client.proven:
            if len(client.received) < _HELLO:
                return
            proof = hmac.digest(self._token, client.nonce, "sha256")
            hello = bytes(client.received[:_HELLO])
            del client.received[:_HELLO]
            if not hmac.compare_digest(hello, MAGIC + proof):
                self._answer(client, _REFUSED, b"the job token differs (POLYCCL_JOB_TOKEN)")
                self._drop(client)
                return
            client.proven = True
            self._answer(client, _OK)
        if len(client.received) < _REQUEST.size:
            return
        operation, key_size, value_size, timeout = _REQUEST.unpack_from(client.received)
        if operation not in (_SET, _GET, _DELETE) or key_size > KEY_LIMIT or value_size > VALUE_LIMIT:
            self._drop(client)
            return
        end = _REQUEST.size + key_size + value_size
        if len(client.received) < end:
            return
        key = client.received[_REQUEST.size : _REQUEST.size + key_size].decode(errors="surrogateescape")
        value = bytes(client.received[_REQUEST.size + key_size : end])
        del client.received[:]
        self._handle(client, operation, key, value, timeout)

    def _handle(self, client: _Client, operation: int, key: str, value: bytes, timeout: int) -> None:
        if operation == _GET:
            if key in self._values:
                self._answer(client, _OK, self._values[key])
            else:
                self._await(client, key, timeout)
            return
        old = len(self._values.get(key, b""))
        if operation == _DELETE:
            self._values.pop(key, None)
            self._held -= old
        elif self._held - old + len(value) > TOTAL_LIMIT:
            self._answer(client, _REFUSED, f"the store is full ({TOTAL_LIMIT} bytes)".encode())
            return
        else:
            self._values[key] = value
            self._held += len(value) - old
            for waiter in self._waiting.pop(key, []):
                waiter.awaited = None
                self._answer(waiter, _OK, value)
        self._answer(client, _OK)

    def _await(self, client: _Client, key: str, timeout: int) -> None:
        client.awaited = key
        client.turn += 1
        self._waiting.setdefault(key, []).append(client)
        heapq.heappush(self._deadlines, (time.monotonic() + timeout / 1000, next(self._numbers), client.turn, client))

    def _expire(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, turn, client = heapq.heappop(self._deadlines)
            if client.awaited is not None and client.turn == turn:
                self._stop_waiting(client)
                self._answer(client, _TIMED_OUT)

    def _stop_waiting(self, client: _Client) -> None:
        if client.awaited is None:
            return
        waiters = self._waiting[client.awaited]
        waiters.remove(client)
        if not waiters:
            del self._waiting[client.awaited]
        client.awaited = None

    def _answer(self, client: _Client, status: int, value: bytes = b"") -> None:
        self._send(client, _ANSWER.pack(status, len(value)) + value)

    def _send(self, client: _Client, data: bytes) -> None:
        client.unsent += data
        try:
            self._flush(client)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)

    def _flush(self, client: _Client) -> None:
        while client.unsent:
            try:
                sent = client.socket.send(client.unsent[: 1 << 20])
            except BlockingIOError:
                self._selector.modify(client.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, client)
                raise
            del client.unsent[:sent]
        if client in self._clients:
            self._selector.modify(client.socket, selectors.EVENT_READ, client)

    def _drop(self, client: _Client) -> None:
        if client not in self._clients:
            return
        self._stop_waiting(client)
        client.turn += 1
        self._clients.discard(client)
        self._selector.unregister(client.socket)
        client.socket.close()


class TcpStore:
    """A client of `TcpServer`, safe for use by many threads: each request in flight has a connection of its own.

    With ``serve`` it also runs the server, on all interfaces of this machine; the two end together. A request first waits,
    up to its own timeout, for the server to come up. ``timeout`` is for requests that give none, in seconds (POLYCCL_TIMEOUT);
    ``token`` is the job's (POLYCCL_JOB_TOKEN).
    """

    def __init__(
        self,
        host: str,
        port: int,
        serve: bool = False,
        token: str | None = None,
        timeout: float | None = None,
    ) -> None:
        host, serve = arguments.text("host", host), arguments.flag("serve", serve)
        port = arguments.port(port, 0 if serve else 1)
        self._token = environment.text("POLYCCL_JOB_TOKEN") if token is None else arguments.text("token", token, empty=True)
        self._timeout = environment.seconds("POLYCCL_TIMEOUT") if timeout is None else arguments.seconds(timeout)
        self._server = TcpServer("", port, self._token) if serve else None
        self.host, self.port = host, self._server.port if self._server else port
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        _LIVE.add(self)

    def set(self, key: str, value: bytes) -> None:
        """Give ``key`` a value of at most `VALUE_LIMIT` bytes, and wake who waits for it."""
        self._request(_SET, key, arguments.octets("value", value), self._timeout)

    def get(self, key: str, timeout: float | None = None, awaiting: str = "") -> bytes:
        """The value of ``key``; waits until it is set, at most ``timeout`` seconds, then raises CommTimeout.

        ``awaiting`` says in the error who sets the key.
        """
        limit = self._timeout if timeout is None else arguments.seconds(timeout)
        return self._request(_GET, key, b"", limit, awaiting)

    def delete(self, key: str) -> None:
        """Forget ``key``, if it is set."""
        self._request(_DELETE, key, b"", self._timeout)

    def close(self) -> None:
        """Close the connections, and the server where this store runs it. Idempotent."""
        _LIVE.discard(self)
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()
        if self._server:
            self._server.close()

    def forget(self) -> None:
        """In a child after fork: close the copies of the parent's connections. The child's own requests open new ones."""
        self._lock = threading.Lock()
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _request(self, operation: int, key: str, value: bytes, timeout: float, awaiting: str = "") -> bytes:
        name = arguments.key(key).encode(errors="surrogateescape")
        if len(name) > KEY_LIMIT or len(value) > VALUE_LIMIT:
            raise InvalidArgument(
                f"{self}: key '{key[:80]}' has {len(name)} bytes and its value {len(value)}; "
                f"the limits are {KEY_LIMIT} and {VALUE_LIMIT} bytes"
            )
        deadline = time.monotonic() + timeout
        connection = self._connect(deadline)
        left = max(0.0, deadline - time.monotonic())
        try:
            connection.settimeout(left + _GRACE)
            connection.sendall(_REQUEST.pack(operation, len(name), len(value), int(left * 1000)) + name + value)
            status, answer = self._receive_answer(connection, deadline + _GRACE)
        except OSError as error:
            connection.close()
            raise PeerLost(f"{self}: the store was lost while '{key}' was asked for ({_words(error)}); {_HOST_HINT}") from None
        except BaseException:  # an answer is still to come on this connection, so that no one else may use it
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        if status == _TIMED_OUT:
            raise timed_out(str(self), key, timeout, awaiting)
        if status != _OK:
            raise CommError(f"{self}: key '{key}' was refused: {answer.decode(errors='replace')}")
        return answer

    def _connect(self, deadline: float) -> socket.socket:
        """An idle connection, or a new one as soon as the server accepts it."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        pause, began = 0.005, time.monotonic()
        while True:
            left = max(0.05, deadline - time.monotonic())
            try:
                connection = socket.create_connection((self.host, self.port), timeout=left)
                break
            except OSError as error:  # not up yet, or its name not known yet
                if time.monotonic() + pause >= deadline:
                    raise CommTimeout(
                        f"{self}: no store came up within {time.monotonic() - began:.1f} s ({_words(error)}); "
                        f"check that this address can be reached, and {_HOST_HINT}"
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        try:
            self._greet(connection, max(deadline, time.monotonic() + _GRACE))
        except OSError as error:
            connection.close()
            raise PeerLost(f"{self}: the store was lost during the greeting ({_words(error)}); {_HOST_HINT}") from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, connection: socket.socket, deadline: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stranger = CommError(
            f"{self}: whoever listens there is not a PolyCCL store (or of another version). Another program may use the port, or "
            "torch is installed on some ranks only, so that they chose unlike stores: set POLYCCL_STORE on all ranks"
        )
        try:
            greeting = _receive(connection, len(MAGIC) + _NONCE, min(deadline, time.monotonic() + _GRACE))
        except TimeoutError:  # e.g. a torch store, which waits for the client to begin
            raise stranger from None
        if greeting[: len(MAGIC)] != MAGIC:
            raise stranger
        connection.sendall(MAGIC + hmac.digest(self._token.encode(), greeting[len(MAGIC) :], "sha256"))
        status, text = self._receive_answer(connection, deadline)
        if status != _OK:
            raise CommError(f"{self}: the store refuses this process: {text.decode(errors='replace')}")

    def _receive_answer(self, connection: socket.socket, deadline: float) -> tuple[int, bytes]:
        status, size = _ANSWER.unpack(_receive(connection, _ANSWER.size, deadline))
        if size > VALUE_LIMIT:
            raise ConnectionError(f"an answer of {size} bytes is not this protocol's")
        return status, _receive(connection, size, deadline)

    def __str__(self) -> str:
        return f"store tcp://{self.host}:{self.port}"


_HOST_HINT = "see the log of the process that hosts it (the launcher or rank 0) first"

_LIVE: weakref.WeakSet[TcpServer | TcpStore] = weakref.WeakSet()


def _forget_all() -> None:
    for each in list(_LIVE):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)


def timed_out(store: str, key: str, timeout: float, awaiting: str) -> CommTimeout:
    """The error of a key that nobody set in time."""
    who = f", which {awaiting} sets" if awaiting else ""
    return CommTimeout(f"{store}: key '{key}'{who}, was not set within {timeout:.1f} s")


def _listen(host: str, port: int) -> socket.socket:
    try:
        if not host and socket.has_dualstack_ipv6():
            try:
                return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):  # taken or forbidden: IPv4 alone would be no better
                    raise
        return socket.create_server((host, port), backlog=4096)
    except OSError as error:
        raise InvalidArgument(
            f"no store can listen on {host or '*'}:{port} ({_words(error)}); choose another port (MASTER_PORT or POLYCCL_STORE)"
        ) from None


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return bytes(data)


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


__all__ = ["KEY_LIMIT", "MAGIC", "TOTAL_LIMIT", "VALUE_LIMIT", "TcpServer", "TcpStore", "timed_out"]
