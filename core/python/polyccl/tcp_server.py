"""The server of the key-value store over TCP: one thread in a launcher or a rank. `polyccl.tcp_store` is its client.

The server greets with ``MAGIC`` and a nonce, the client answers with ``MAGIC`` and the HMAC of the nonce under the job token, so
that a stranger, or another job, is refused before it can say anything. Then the client sends requests, one at a time on a
connection, and the server answers each:

    request   operation (1 byte), length of the key (4), length of the value (8), timeout in ms (8), key, value
    answer    status (1 byte), length of the value (8), value

All integers are big-endian; every length is bounded before memory is taken for it. The operations:

    SET       give the key the value
    SET_NEW   the same, unless the key has a value already
    GET       the value of the key, once it is there; the request's value may name an alarm, another key: then whichever is there
              first ends the wait (status ALARM for that one)
    CALL      SET_NEW, then GET of another key, in one (status TAKEN, and the old value, if the key has one already)
    DELETE    forget the key
    ATTEND    until LEAVE, be present: if this connection ends before, the server sets the key, an alarm, to the value, unless it is
              set already. When the last who attends a key has gone, the other keys of the alarm's folder are forgotten
    LEAVE     attend no more

Whatever a client sends ends its own connection at most, never the server.
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

from . import arguments
from .deadlines import LONGEST, slice_of
from .errors import InvalidArgument

MAGIC = b"PCSTORE2"
KEY_LIMIT = 4096
VALUE_LIMIT = 64 << 20
"""The largest value, in bytes."""
TOTAL_LIMIT = 1 << 30
"""The most bytes that a server holds."""
NONCE = 32
"""Bytes of the nonce in the greeting."""

REQUEST = struct.Struct("!BIQQ")
ANSWER = struct.Struct("!BQ")
CALL_HEAD = struct.Struct("!HH")
"""How the value of a CALL begins: lengths of the wanted key and of the alarm, which follow; the rest is the value to set."""
SET, GET, DELETE, SET_NEW, CALL, ATTEND, LEAVE = 1, 2, 3, 4, 5, 6, 7
OK, TIMED_OUT, REFUSED, ALARM, TAKEN = 0, 1, 2, 3, 4

_HELLO = len(MAGIC) + hashlib.sha256().digest_size


@dataclass(eq=False)
class _Client:
    """What the server knows of one connection."""

    socket: socket.socket
    nonce: bytes
    proven: bool = False
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    awaited: tuple[str, ...] = ()
    """The key that it waits for, then the alarm if it gave one."""
    turn: int = 0
    """Counts the waits of this connection, so that the deadline of an earlier one is known to be void."""
    attends: str | None = None
    will: bytes = b""


class TcpServer:
    """A store server: listens at once, serves on a daemon thread until `close`.

    ``host`` "" is all interfaces; ``port`` 0 is any free port, which ``port`` then tells. Clients must prove ``token``. Raises
    InvalidArgument if the address cannot be listened on.
    """

    def __init__(self, host: str = "", port: int = 0, token: str = "") -> None:
        self._token = arguments.text("token", token, empty=True).encode()
        self._listener = _listen(arguments.text("host", host, empty=True), arguments.port(port))
        self.port: int = self._listener.getsockname()[1]
        self._values: dict[str, bytes] = {}
        self._held = 0
        self._waiting: dict[str, list[_Client]] = {}
        self._attending: dict[str, int] = {}
        self._deadlines: list[tuple[float, int, int, _Client]] = []
        self._numbers = itertools.count()
        self._clients: dict[_Client, None] = {}  # in the order of their coming
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._bell, self._ringer = socket.socketpair()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="polyccl-store", daemon=True)
        self._thread.start()
        _LIVE.add(self)

    def attendance(self, alarm: str) -> int:
        """Return how many attend this key."""
        return self._attending.get(alarm, 0)

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
                        self._attend_to(key.data, events)
                self._expire()
        finally:
            for each in (self._listener, self._bell, *(client.socket for client in self._clients)):
                each.close()
            self._selector.close()

    def _patience(self) -> float | None:
        return slice_of(max(0.0, self._deadlines[0][0] - time.monotonic())) if self._deadlines else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client is gone already, or this process is out of descriptors: others must be served on
            if not self._drop_a_stranger():
                time.sleep(0.01)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)
        client = _Client(connection, secrets.token_bytes(NONCE))
        self._clients[client] = None
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._send(client, MAGIC + client.nonce)

    def _drop_a_stranger(self) -> bool:
        """Drop the oldest connection that has not proven the token, so that strangers cannot take all descriptors."""
        stranger = next((client for client in self._clients if not client.proven), None)
        if stranger is None:
            return False
        self._drop(stranger)
        return True

    def _attend_to(self, client: _Client, events: int) -> None:
        if client not in self._clients:  # dropped since the selector looked
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ:
                data = client.socket.recv(1 << 20)
                if not data or client.awaited or client.unsent:  # closed, or speaking out of turn
                    self._drop(client)
                    return
                client.received += data
                self._read(client)
        except BlockingIOError:
            pass
        except Exception:  # whatever it is, MemoryError too: one client's trouble must not end the others' store
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
                self._answer(client, REFUSED, b"the job token differs (POLYCCL_JOB_TOKEN)")
                self._drop(client)
                return
            client.proven = True
            self._answer(client, OK)
        if len(client.received) < REQUEST.size:
            return
        operation, key_size, value_size, timeout = REQUEST.unpack_from(client.received)
        if not SET <= operation <= LEAVE or key_size > KEY_LIMIT or value_size > VALUE_LIMIT:
            self._drop(client)
            return
        end = REQUEST.size + key_size + value_size
        if len(client.received) < end:
            return
        key = client.received[REQUEST.size : REQUEST.size + key_size].decode(errors="surrogateescape")
        value = bytes(client.received[REQUEST.size + key_size : end])
        del client.received[:]
        self._handle(client, operation, key, value, timeout)

    def _handle(self, client: _Client, operation: int, key: str, value: bytes, timeout: int) -> None:
        if operation == GET:
            self._get(client, key, value.decode(errors="surrogateescape"), timeout)
            return
        if operation == CALL and key in self._values:
            self._answer(client, TAKEN, self._values[key])
            return
        wanted = alarm = ""
        if operation == CALL:
            wanted, alarm, value = _parts_of_call(value)
        if operation == DELETE:
            self._forget_key(key)
        elif operation == ATTEND:
            self._leave(client)
            client.attends, client.will = key, value
            self._attending[key] = self._attending.get(key, 0) + 1
        elif operation == LEAVE:
            self._leave(client)
        elif not (operation == SET_NEW and key in self._values) and not self._set(key, value):
            self._answer(client, REFUSED, f"the store is full ({TOTAL_LIMIT} bytes)".encode())
            return
        if operation == CALL:
            self._get(client, wanted, alarm, timeout)
        else:
            self._answer(client, OK)

    def _get(self, client: _Client, key: str, alarm: str, timeout: int) -> None:
        if key in self._values:
            self._answer(client, OK, self._values[key])
        elif alarm and alarm in self._values:
            self._answer(client, ALARM, self._values[alarm])
        else:
            client.awaited = (key, alarm) if alarm else (key,)
            client.turn += 1
            for each in client.awaited:
                self._waiting.setdefault(each, []).append(client)
            deadline = time.monotonic() + min(timeout / 1000, LONGEST)
            heapq.heappush(self._deadlines, (deadline, next(self._numbers), client.turn, client))

    def _set(self, key: str, value: bytes) -> bool:
        old = len(self._values.get(key, b""))
        if self._held - old + len(value) > TOTAL_LIMIT:
            return False
        self._values[key] = value
        self._held += len(value) - old
        for waiter in list(self._waiting.get(key, ())):
            status = OK if waiter.awaited[0] == key else ALARM
            self._stop_waiting(waiter)
            self._answer(waiter, status, value)
        return True

    def _forget_key(self, key: str) -> None:
        self._held -= len(self._values.pop(key, b""))

    def _leave(self, client: _Client) -> None:
        alarm, client.attends = client.attends, None
        if alarm is None:
            return
        self._attending[alarm] -= 1
        if not self._attending[alarm]:
            del self._attending[alarm]
            folder = alarm.rpartition("/")[0] + "/"
            for key in [key for key in self._values if key.startswith(folder) and key != alarm]:
                self._forget_key(key)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, turn, client = heapq.heappop(self._deadlines)
            if client.awaited and client.turn == turn:
                self._stop_waiting(client)
                self._answer(client, TIMED_OUT)

    def _stop_waiting(self, client: _Client) -> None:
        for key in client.awaited:
            waiters = self._waiting[key]
            waiters.remove(client)
            if not waiters:
                del self._waiting[key]
        client.awaited = ()

    def _answer(self, client: _Client, status: int, value: bytes = b"") -> None:
        self._send(client, ANSWER.pack(status, len(value)) + value)

    def _send(self, client: _Client, data: bytes) -> None:
        if client not in self._clients:
            return
        try:
            client.unsent += data
            self._flush(client)
        except BlockingIOError:
            pass
        except (OSError, MemoryError):
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
        del self._clients[client]
        self._stop_waiting(client)
        client.turn += 1
        self._selector.unregister(client.socket)
        client.socket.close()
        if client.attends is not None:
            if client.attends not in self._values:
                self._set(client.attends, client.will)
            self._leave(client)


_LIVE: weakref.WeakSet[TcpServer] = weakref.WeakSet()


def _forget_all() -> None:
    for each in list(_LIVE):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)


def _parts_of_call(value: bytes) -> tuple[str, str, bytes]:
    wanted, alarm = CALL_HEAD.unpack_from(value)  # struct.error, for a value that is too short, ends the connection
    first, second = CALL_HEAD.size + wanted, CALL_HEAD.size + wanted + alarm
    keys = [part.decode(errors="surrogateescape") for part in (value[CALL_HEAD.size : first], value[first:second])]
    return keys[0], keys[1], value[second:]


def keep_alive(connection: socket.socket) -> None:
    """Notice within half a minute that the other end's machine fell silent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


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
            f"no store can listen on {host or '*'}:{port} ({error.strerror or error}); choose another port (MASTER_PORT or "
            "POLYCCL_STORE)"
        ) from None


__all__ = ["KEY_LIMIT", "MAGIC", "TOTAL_LIMIT", "VALUE_LIMIT", "TcpServer", "keep_alive"]
