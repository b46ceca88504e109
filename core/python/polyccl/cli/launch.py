"""``polyccl launch``: the ranks of a job on this machine, in islands, with the stores that they meet in.

Each rank is a session of its own, and dies with the launcher, as does what it started there. Its output comes line by line, each
with the rank and the island before it. When a rank fails the others are ended: SIGTERM, then, after a grace time, SIGKILL.
"""

from __future__ import annotations

import os
import re
import secrets
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import IO, Any

from .. import backends
from ..deadlines import after, left, slice_of
from ..errors import BackendUnavailable
from ..store import TcpServer

GRACE = 5.0
"""Seconds that ranks have to end after SIGTERM, or after a signal that was passed on, before SIGKILL."""

_LINE_LIMIT = 1 << 20
_LAST_WORDS = 1.0
"""Seconds that output is still read after the last rank ended, if a process outside of its session holds it open."""
_COLOURS = (36, 33, 35, 32, 34, 31)
_FORGOTTEN = (
    "POLYCCL_RANK",
    "POLYCCL_SIZE",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
)
"""Variables of an outer launcher that would win over, or contradict, what this one sets."""


@dataclass(frozen=True)
class Island:
    """One island to start: its backend ("" for what its device brings), its number of ranks, and a label of its own."""

    backend: str
    size: int
    label: str


def parse_islands(text: str) -> list[Island]:
    """Return the islands that e.g. ``gloo=2,gloo=2``, ``nccl=8,host`` or ``2,2`` names. Raises ValueError, saying what is wrong."""
    islands = []
    for index, part in enumerate(text.split(",")):
        match = re.fullmatch(r"\s*(?:(?P<backend>[a-z][a-z0-9_]*)\s*(?:=\s*(?P<ranks>\d{1,6})\s*)?|(?P<only>\d{1,6})\s*)", part)
        size = int(match["ranks"] or match["only"] or 1) if match else 0
        if match is None or size == 0:
            raise ValueError(f"island {part.strip()!r} is not <backend>, <backend>=<ranks> or <ranks>; write e.g. gloo=2,gloo=2")
        backend = match["backend"] or ""
        islands.append(Island(backend, size, f"{index}:{backend}" if backend else str(index)))
    return islands


def require_backends(islands: Sequence[Island]) -> None:
    """Raise BackendUnavailable for the first backend that is not installed."""
    for name in dict.fromkeys(island.backend for island in islands):
        if name not in ("", backends.HOST):
            backends.find(name)


def seat(islands: Sequence[Island], interleave: bool) -> list[Island]:
    """The island of each rank: one island after the other, or dealt round (A B A B ...) until each is full."""
    if not interleave:
        return [island for island in islands for _ in range(island.size)]
    rounds = range(max(island.size for island in islands))
    return [island for turn in rounds for island in islands if turn < island.size]


def rank_environment(
    base: Mapping[str, str],
    seats: Sequence[Island],
    rank: int,
    store_port: int,
    master_port: int,
    token: str,
    check: bool | None = None,
    timeout: float | None = None,
    torchs_store: bool = False,
) -> dict[str, str]:
    """The environment of one rank: ``base``, with torchrun's variables and PolyCCL's.

    ``torchs_store`` says that the launcher, not rank 0, hosts the store of torch.distributed, as torchrun's agent does.
    """
    size = str(len(seats))
    environ = {name: value for name, value in base.items() if name not in _FORGOTTEN}
    environ.setdefault("OMP_NUM_THREADS", "1")
    environ.setdefault("PYTHONUNBUFFERED", "1")  # lines come when they are written, though they go to a pipe
    environ.update(
        RANK=str(rank),
        WORLD_SIZE=size,
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(master_port),
        POLYCCL_STORE=f"tcp://127.0.0.1:{store_port}",
        POLYCCL_ISLAND=seats[rank].label,
        POLYCCL_JOB_TOKEN=token,
    )
    if seats[rank].backend:
        environ["POLYCCL_LOCAL"] = seats[rank].backend
    if torchs_store:
        environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    if check is not None:
        environ["POLYCCL_CHECK"] = str(int(check))
    if timeout is not None:
        environ["POLYCCL_TIMEOUT"] = repr(timeout)
    return environ


def launch(
    islands: Sequence[Island],
    command: Sequence[str],
    interleave: bool = False,
    check: bool | None = None,
    timeout: float | None = None,
    grace: float = GRACE,
) -> int:
    """Run ``command`` as every rank and return the job's exit status: 0, or that of the first rank that failed.

    A rank that a signal ended counts as 128 + the signal's number. Must be called on the main thread. SIGINT, SIGTERM and
    SIGHUP go to all ranks, and a second one ends them by SIGKILL at once.
    """
    if shutil.which(command[0]) is None:
        print(f"polyccl launch: there is no program {command[0]!r}; the command comes after --", file=sys.stderr)
        return 127
    try:
        require_backends(islands)
    except BackendUnavailable as error:
        print(f"polyccl launch: {error}", file=sys.stderr)
        return 1
    seats, token = seat(islands, interleave), secrets.token_hex(32)
    server = TcpServer("127.0.0.1", 0, token)
    torchs = find_spec("torch") is not None
    job = _Job(grace)
    try:
        with job.signals():
            master_port = job.reserve_master_port(torchs)
            for rank, island in enumerate(seats):
                environ = rank_environment(os.environ, seats, rank, server.port, master_port, token, check, timeout, torchs)
                job.start(rank, island, islands.index(island), command, environ)
            return job.run()
    finally:
        job.kill()
        server.close()


@dataclass(eq=False)
class _Stream:
    """One output of one rank, on its way to the same output of the launcher."""

    source: IO[bytes]
    sink: int
    prefix: bytes
    of_rank: bool = True
    partial: bytearray = field(default_factory=bytearray)

    def lines(self, data: bytes) -> bytes:
        """What to write after ``data`` has come: the whole lines, prefixed; b"" ends the last one."""
        self.partial += data
        end = self.partial.rfind(b"\n") + 1
        if not data or len(self.partial) - end > _LINE_LIMIT:
            end = len(self.partial)
        whole = bytes(self.partial[:end])
        del self.partial[:end]
        return b"".join(self.prefix + line + b"\n" for line in whole.removesuffix(b"\n").split(b"\n")) if whole else b""


@dataclass(eq=False)
class _Rank:
    """One rank that was started. ``status`` is None while it runs, then 0 to 255."""

    number: int
    label: str
    process: subprocess.Popen[bytes]
    end: int
    """A descriptor (pidfd) that becomes readable when the process ends."""
    status: int | None = None


class _Job:
    """The running ranks, and the loop that serves them."""

    def __init__(self, grace: float) -> None:
        self._ending = False
        self._grace = grace
        self._deadline: float | None = None
        self._ranks: list[_Rank] = []
        self._failure: int | None = None
        self._passed_on: int | None = None
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._ends = select.epoll()  # tells the ends of ranks in the order of time, also if several came between two looks
        self._selector.register(self._ends, selectors.EVENT_READ)
        self._master: socket.socket | None = None
        self._store: subprocess.Popen[bytes] | None = None
        keeper = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_keeper.py"))]
        self._keeper = subprocess.Popen(keeper, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)

    def reserve_master_port(self, listen: bool) -> int:
        """Take a port for MASTER_PORT, which stays taken for the job's life.

        With ``listen`` the store of torch.distributed is started there when the first rank connects. Without, a rank may listen:
        the address is only bound here, in the way that lets one other socket bind it too.
        """
        self._master = socket.socket()
        self._master.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._master.bind(("127.0.0.1", 0))
        if listen:
            self._master.listen(4096)
            self._selector.register(self._master, selectors.EVENT_READ)
        return int(self._master.getsockname()[1])

    def signals(self) -> ExitStack:
        """While the context lasts, signals wake the loop, which acts on them."""
        stack = ExitStack()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            if number != signal.SIGCHLD and signal.getsignal(number) is signal.SIG_IGN:
                continue  # as under nohup
            stack.callback(signal.signal, number, signal.signal(number, _note))
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._ringer.fileno(), warn_on_full_buffer=False))
        return stack

    def start(self, number: int, island: Island, colour: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start a rank."""
        assert self._keeper.stdin is not None
        pipe = self._keeper.stdin.fileno()
        trampoline = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_rank.py")), str(os.getpid()), str(pipe)]
        process = subprocess.Popen(
            [*trampoline, *command],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=(pipe,),
        )
        rank = _Rank(number, island.label, process, os.pidfd_open(process.pid))
        self._ranks.append(rank)
        self._ends.register(rank.end, select.EPOLLIN)
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert source is not None
            os.set_blocking(source.fileno(), False)
            stream = _Stream(source, sink.fileno(), _prefix(number, island.label, colour, sink.isatty()))
            self._selector.register(source, selectors.EVENT_READ, stream)

    def run(self) -> int:
        """Serve until every rank has ended; the job's exit status."""
        while any(rank.status is None for rank in self._ranks):
            self._serve(None if self._deadline is None else slice_of(left(self._deadline)))
            self._reap()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._deadline = None
                self._signal(signal.SIGKILL)
        last = time.monotonic() + _LAST_WORDS
        while self._streams() and time.monotonic() < last:
            self._serve(last - time.monotonic())
        return self._failure or 0

    def _streams(self) -> bool:
        """Return whether any rank's output is still open."""
        return any(isinstance(key.data, _Stream) and key.data.of_rank for key in self._selector.get_map().values())

    def kill(self) -> None:
        """End what is left of every rank, at once, and release everything."""
        self._signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Stream):
                key.data.source.close()
        if self._store is not None:
            self._store.kill()
            self._store.wait()
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError):
            self._keeper.stdin.write(b"done\n")
        self._keeper.stdin.close()
        self._keeper.wait()
        if self._master is not None:
            self._master.close()
        self._ends.close()
        self._selector.close()
        self._bell.close()
        self._ringer.close()

    def _serve(self, patience: float | None) -> None:
        for key, _ in self._selector.select(patience):
            if isinstance(key.data, _Stream):
                self._forward(key.data)
                continue
            if key.fileobj is self._master:
                self._start_store()
                continue
            with suppress(BlockingIOError):
                for number in self._bell.recv(4096):
                    if number != signal.SIGCHLD:
                        self._pass_on(number)

    def _start_store(self) -> None:
        """Start the store of torch.distributed: a rank has connected to it."""
        assert self._master is not None
        self._selector.unregister(self._master)
        number = self._master.fileno()
        words = [sys.executable, str(Path(__file__).with_name("_torch_store.py")), str(number), str(self._master.getsockname()[1])]
        self._store = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(number,),
            bufsize=0,
            start_new_session=True,
        )
        assert self._store.stderr is not None
        os.set_blocking(self._store.stderr.fileno(), False)
        stream = _Stream(self._store.stderr, sys.stderr.fileno(), b"[torch's store] ", of_rank=False)
        self._selector.register(self._store.stderr, selectors.EVENT_READ, stream)

    def _forward(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.source.fileno(), 1 << 16)
        except BlockingIOError:
            return
        lines = stream.lines(data)
        if lines:
            self._write(stream.sink, lines)
        if not data:
            self._selector.unregister(stream.source)
            stream.source.close()

    def _write(self, sink: int, lines: bytes) -> None:
        """Write all of ``lines``: a signal may cut a long write short, and with PYTHONUNBUFFERED Python streams lose the rest."""
        left = memoryview(lines)
        while left:
            try:
                left = left[os.write(sink, left) :]
            except BlockingIOError:  # inherited in this mode, as from some shells and terminals
                select.select([], [sink], [])
            except BrokenPipeError:  # who read the output has left
                os.dup2(os.open(os.devnull, os.O_WRONLY), sink)
                self._end(128 + signal.SIGPIPE)
                return

    def _pass_on(self, number: int) -> None:
        again, self._passed_on = self._passed_on is not None, number
        self._ending = True
        if again:
            self._signal(signal.SIGKILL)
            return
        self._signal(number)
        self._deadline = after(self._grace)

    def _reap(self) -> None:
        """Note the ranks that have ended, and end what they left in their sessions."""
        by_end = {rank.end: rank for rank in self._ranks}
        for end, _ in self._ends.poll(0):
            rank = by_end[end]
            self._ends.unregister(end)
            os.close(end)
            _kill_group(rank.process.pid, signal.SIGKILL)  # before its number can be given to another process
            assert self._keeper.stdin is not None
            with suppress(BrokenPipeError):
                self._keeper.stdin.write(f"-{rank.process.pid}\n".encode())
            code = rank.process.wait()
            rank.status = code if code >= 0 else 128 - code
            if code == -signal.SIGKILL and self._passed_on is not None:
                rank.status = 128 + self._passed_on
            if rank.status:
                self._report(rank, code)
                self._end(rank.status)

    def _report(self, rank: _Rank, code: int) -> None:
        if self._ending:
            return
        how = f"exit status {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        others = "; ending the others" if any(each.status is None for each in self._ranks) else ""
        self._write(sys.stderr.fileno(), f"polyccl launch: rank {rank.number} [{rank.label}] ended with {how}{others}\n".encode())

    def _end(self, status: int) -> None:
        """The job fails with ``status``, unless it has failed before: end all ranks."""
        if self._failure is None:
            self._failure = status
        if not self._ending:
            self._ending = True
            self._signal(signal.SIGTERM)
            self._deadline = after(self._grace)

    def _signal(self, number: int) -> None:
        for rank in self._ranks:
            if rank.status is None:
                _kill_group(rank.process.pid, number)


def _kill_group(leader: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _note(number: int, frame: FrameType | None) -> Any:
    """A handler that does nothing: the interpreter has written the signal's number where the loop reads it."""


def _prefix(number: int, label: str, colour: int, coloured: bool) -> bytes:
    text = f"[{number} {label}]"
    if coloured and not os.environ.get("NO_COLOR"):
        text = f"\x1b[{_COLOURS[colour % len(_COLOURS)]}m{text}\x1b[0m"
    return f"{text} ".encode()


__all__ = ["GRACE", "Island", "launch", "parse_islands", "rank_environment", "require_backends", "seat"]
