"""A job among strangers: `python -m tests.jobs.strangers ISLANDS CREATIONS`, as root, on Linux.

Runs a job of `polyccl launch` in a network namespace of its own, and connects to every port that listens there while the ranks
create communicators: with junk, resets, half-closed and silent connections. Prints what the job printed, and how many connections
there were. Exits with the job's status, or with 77 if no namespace can be made.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
NO_NAMESPACE = 77
LISTEN = "0A"

CREATE = """
import sys
import numpy as np
import polyccl
made, raised = 0, {}
for i in range(int(sys.argv[1])):
    try:
        comm = polyccl.new_comm("auto", "cpu", name=f"c{i}", timeout=30)
        x = np.ones(1000, np.float32)
        comm.all_reduce(x)
        assert (x == comm.get_size()).all(), x
        comm.finalize()
        made += 1
    except polyccl.CommError as error:
        raised[type(error).__name__] = str(error)
print("made", made, "raised", raised, flush=True)
"""


def enter_namespace() -> bool:
    """Move this process to a network namespace of its own whose loopback is up; False where that is not allowed."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        return False
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
    return True


def listening() -> list[tuple[str, int]]:
    """Every port of this namespace that listens."""
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state = line.split()[:4]
        address, port = local.split(":")
        if state == LISTEN:
            host = socket.inet_ntoa(struct.pack("<I", int(address, 16)))
            found.append(("127.0.0.1" if host == "0.0.0.0" else host, int(port, 16)))
    return found


class Strangers:
    """A thread that connects to all ports until `stop`."""

    def __init__(self, seed: int) -> None:
        self.connections = 0
        self._random = random.Random(seed)
        self._held: list[socket.socket] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and close what it holds."""
        self._over.set()
        self._thread.join()
        for held in self._held:
            held.close()

    def _run(self) -> None:
        while not self._over.is_set():
            for place in listening():
                with contextlib.suppress(OSError):
                    self._visit(place)
            time.sleep(0.001)

    def _visit(self, place: tuple[str, int]) -> None:
        stranger = socket.create_connection(place, timeout=1)
        self.connections += 1
        how = self._random.choice(["reset", "junk", "junk then reset", "half-close", "silence"])
        if "junk" in how:
            stranger.sendall(self._random.randbytes(self._random.choice([1, 7, 64, 4096])))
        if "reset" in how:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "half-close":
            stranger.shutdown(socket.SHUT_WR)
        if how in ("half-close", "silence"):
            self._held.append(stranger)
            if len(self._held) > 100:
                self._held.pop(0).close()
        else:
            stranger.close()


def main() -> int:
    islands, creations = sys.argv[1:]
    if not enter_namespace():
        return NO_NAMESPACE
    words = [sys.executable, "-m", "polyccl", "launch", "--islands", islands, "--", sys.executable, "-c", CREATE, creations]
    job = subprocess.Popen(words)
    strangers = Strangers(seed=7)
    try:
        status = job.wait(timeout=600)
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            job.wait(30)
        strangers.stop()
    print("strangers came", strangers.connections, "times", flush=True)
    return status


if __name__ == "__main__":
    os.environ.pop("POLYCCL_JOB_TOKEN", None)
    sys.exit(main())
