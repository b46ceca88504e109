"""The link between two ranks, tried and timed: what ``polyccl doctor`` learns of a pair.

Each pair has a group of its own on the link, so that one pair's failure says nothing of another's. Needs neither torch nor NumPy.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .. import _native, errors
from ..errors import CommError, CommTimeout

Member = tuple[int, int, str, int]
"""A process on the link: its id in two parts, its numeric address, its port."""

ROUND_TRIPS = 20
TRANSFERS = 3
_SIOCGIFADDR = 0x8915
_link: Any = vars(_native)["link"]


@dataclass(frozen=True)
class Rail:
    """What was measured between two ranks: the best of `ROUND_TRIPS` and of `TRANSFERS` in each direction.

    ``round_trip`` in seconds; ``there`` and ``back`` in bytes a second, from the lower rank and to it, each with one message of
    answer.
    """

    round_trip: float
    there: float
    back: float


class Wire:
    """This rank's end of the link to one other. Messages in each direction are numbered; each wait ends at ``deadline``."""

    def __init__(
        self, number: int, own: tuple[int, Member, str], other: tuple[int, Member, str], token: str, deadline: float
    ) -> None:
        """``own`` and ``other``: rank, place on the link, and name in error texts. ``deadline`` is of ``time.monotonic()``."""
        low, high = sorted((own, other))
        self._position = 0 if own == low else 1
        self._name, self._deadline = other[2], deadline
        self._sent, self._received = 0, 0
        self._group = _link.create_group(number, self._position, [low[1], high[1]], [low[2], high[2]], token)

    def start_send(self, data: bytes | bytearray) -> Any:
        """A request that is done once the peer has, or will have, ``data``."""
        self._sent += 1
        return self._group.send(1 - self._position, (self._sent, 0, 0, 0), data)

    def start_recv(self, into: bytearray) -> Any:
        """A request that is done once ``into`` is filled."""
        self._received += 1
        return self._group.recv(1 - self._position, (self._received, 0, 0, 0), into)

    def finish(self, *requests: Any) -> None:
        """Block until they are done. Raises CommTimeout at the deadline, and the error of the first that failed."""
        done = _link.wait(list(requests), max(0.0, self._deadline - time.monotonic()))
        for request in requests:
            if request.done and request.error:
                kind, text = request.error
                raise getattr(errors, kind, CommError)(text)
        if not done:
            raise CommTimeout(f"no answer from {self._name} by the deadline")

    def send(self, data: bytes | bytearray) -> None:
        """Send, and block until the memory may be used again."""
        self.finish(self.start_send(data))

    def recv(self, into: bytearray) -> None:
        """Receive, and block until it is there."""
        self.finish(self.start_recv(into))

    def close(self) -> None:
        """Give up what is pending."""
        self._group.close()


def reach(wires: Sequence[Wire]) -> list[str | None]:
    """Exchange one small message with each peer, all at once: what is wrong with each, or None. Blocks until their deadline."""
    messages = [(wire, wire.start_send(b"ping"), wire.start_recv(bytearray(4))) for wire in wires]
    found: list[str | None] = []
    for wire, sent, received in messages:
        try:
            wire.finish(sent, received)
            found.append(None)
        except CommError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def measure(wire: Wire, first: bool, size: int) -> Rail:
    """Time the pair, by messages of ``size`` bytes. Both ranks call it; the clock of the one that is ``first`` counts."""
    payload, small = bytearray(size), bytearray(8)
    times: list[float] = []
    for rounds, there, back in (
        (ROUND_TRIPS, small, small),
        (TRANSFERS, payload, small),
        (TRANSFERS, small, payload),
    ):
        taken = []
        for _ in range(rounds + 1):  # one more, to warm up
            began = time.perf_counter()
            if first:
                wire.send(there)
                wire.recv(back)
            else:
                wire.recv(there)
                wire.send(back)
            taken.append(time.perf_counter() - began)
        times.append(max(min(taken[1:]), 1e-9))
    return Rail(times[0], size / times[1], size / times[2])


def address() -> Member:
    """Where this process listens. Starts the link; raises InvalidArgument where POLYCCL_SOCKET_IFNAME names no interface."""
    host_id, process_id, host, port = _link.address()
    return int(host_id), int(process_id), str(host), int(port)


def set_patience(seconds: float) -> None:
    """How long the link tries to reach a process before it takes it for lost."""
    _link.set_connect_timeout(seconds)


def interface_of(numeric: str) -> str:
    """The name of the interface that has this address; empty where that cannot be found out."""
    if ":" in numeric:
        wanted = socket.inet_pton(socket.AF_INET6, numeric.partition("%")[0]).hex()
        with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
            return next((line.split()[5] for line in table if line.split()[0] == wanted), "")
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == numeric:
                    return name
    return ""


__all__ = ["Member", "Rail", "Wire", "address", "interface_of", "measure", "reach", "set_patience"]
