"""Stores: where ranks meet. A store maps keys to bytes for all ranks, and lets a rank wait for a key.

`default_store` finds the job's store in the environment, `wrap` takes one that the user made (any store of torch, or any object
with the methods of `Store`). Stores serve rendezvous and the libraries' own bootstrap only, never an operation. A job's keys are
meant to be set once.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, quote, unquote, urlsplit

from . import arguments, environment
from .deadlines import after, bounded, left
from .errors import CommError, InvalidArgument, PeerLost
from .tcp_server import TcpServer
from .tcp_store import TcpStore, timed_out


class Store(Protocol):
    """What PolyCCL needs of a store. All methods may be called from many threads."""

    def set(self, key: str, value: bytes) -> None:
        """Give ``key`` a value, and wake who waits for it."""

    def get(self, key: str, timeout: float | None = None, awaiting: str = "") -> bytes:
        """The value of ``key``; waits until it is set, at most ``timeout`` seconds (POLYCCL_TIMEOUT), then raises CommTimeout.

        ``awaiting`` says in the error who sets the key. Raises PeerLost when the store itself is gone.
        """

    def delete(self, key: str) -> None:
        """Forget ``key``, if it is set."""


class MemoryStore:
    """A store inside one process, for a single rank or for ranks that are threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """See `Store`."""
        with self._changed:
            self._values[arguments.key(key)] = arguments.octets("value", value)
            self._changed.notify_all()

    def get(self, key: str, timeout: float | None = None, awaiting: str = "") -> bytes:
        """See `Store`."""
        key, limit = arguments.key(key), _limit(timeout)
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, limit):
                raise timed_out("store in memory", key, limit, awaiting)
            return self._values[key]

    def delete(self, key: str) -> None:
        """See `Store`."""
        with self._changed:
            self._values.pop(arguments.key(key), None)


class FileStore:
    """A store in a directory that all ranks share: one file per key, put in place by an atomic rename.

    Waiting polls, every 1 ms at first and every 50 ms at last. The directory is made if need be, and must be fresh for each job.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(arguments.path("path", path))
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"{self}: the directory cannot be made ({error.strerror})") from None

    def set(self, key: str, value: bytes) -> None:
        """See `Store`."""
        place, value = self._file(key), arguments.octets("value", value)
        try:
            descriptor, name = tempfile.mkstemp(prefix=".new-", dir=self._path)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(value)
                os.replace(name, place)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise PeerLost(f"{self}: key '{key}' cannot be written ({error.strerror})") from None

    def get(self, key: str, timeout: float | None = None, awaiting: str = "") -> bytes:
        """See `Store`."""
        place, limit = self._file(key), _limit(timeout)
        deadline, pause = after(limit), 0.001
        while True:
            try:
                return place.read_bytes()
            except FileNotFoundError:
                if not self._path.is_dir():
                    raise PeerLost(f"{self}: the directory is gone; key '{key}' will not come") from None
            except OSError as error:
                raise PeerLost(f"{self}: key '{key}' cannot be read ({error.strerror})") from None
            remaining = left(deadline)
            if not remaining:
                raise timed_out(str(self), key, limit, awaiting)
            time.sleep(min(pause, remaining))
            pause = min(1.5 * pause, 0.05)

    def delete(self, key: str) -> None:
        """See `Store`."""
        place = self._file(key)
        with suppress(OSError):
            place.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        name = quote(arguments.key(key), safe="")
        if len(name) > 200:  # file systems allow 255 bytes
            name = f"{name[:100]}%%{hashlib.sha256(key.encode()).hexdigest()}"
        return self._path / f"key-{name}"

    def __str__(self) -> str:
        return f"store file://{self._path}"


class TorchStore:
    """A store of torch, as a `Store`. Each thread uses its own clone (hence its own connection) where the store has ``clone``.

    Waiting polls with torch's ``check``, every 1 ms at first and every 100 ms at last: unlike torch's ``wait`` it can be
    interrupted by Ctrl-C, lets other threads get through, and writes no warning when the time is up.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._clones = threading.local()

    def set(self, key: str, value: bytes) -> None:
        """See `Store`."""
        self._call("set", arguments.key(key), arguments.octets("value", value))

    def get(self, key: str, timeout: float | None = None, awaiting: str = "") -> bytes:
        """See `Store`."""
        key, limit = arguments.key(key), _limit(timeout)
        deadline, pause = after(limit), 0.001
        while not self._call("check", [key]):
            remaining = left(deadline)
            if not remaining:
                raise timed_out(str(self), key, limit, awaiting)
            time.sleep(min(pause, remaining))
            pause = min(1.5 * pause, 0.1)
        return bytes(self._call("get", key))

    def delete(self, key: str) -> None:
        """See `Store`; does nothing where torch's store cannot delete."""
        key = arguments.key(key)
        with suppress(CommError):
            self._call("delete_key", key)

    def _call(self, method: str, key: str | list[str], *arguments: bytes) -> Any:
        try:
            return getattr(self._mine(), method)(key, *arguments)
        except Exception as error:  # torch raises various classes here, of which older versions have fewer
            said = (str(error).splitlines() or [""])[0]
            raise PeerLost(
                f"{self}: {method}({key!r}) failed ({type(error).__name__}: {said}); "
                "the process that hosts the store, often rank 0 or the launcher, may be gone: see its log first"
            ) from None

    def _mine(self) -> Any:
        """This thread's clone; a process that was forked makes new ones, since it must not share a connection."""
        if getattr(self._clones, "owner", None) != os.getpid():
            try:
                self._clones.store = self._store.clone()
            except (AttributeError, NotImplementedError, RuntimeError):
                self._clones.store = self._store
            self._clones.owner = os.getpid()
        return self._clones.store

    def __str__(self) -> str:
        return f"torch's {type(self._store).__name__}"


class PrefixStore:
    """A store within a store: every key gets ``prefix/`` before it."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = wrap(store), arguments.text("prefix", prefix, limit=4096)

    def set(self, key: str, value: bytes) -> None:
        """See `Store`."""
        self._store.set(f"{self._prefix}/{arguments.key(key)}", value)

    def get(self, key: str, timeout: float | None = None, awaiting: str = "") -> bytes:
        """See `Store`."""
        return self._store.get(f"{self._prefix}/{arguments.key(key)}", timeout, awaiting)

    def delete(self, key: str) -> None:
        """See `Store`."""
        self._store.delete(f"{self._prefix}/{arguments.key(key)}")


def wrap(store: object) -> Store:
    """``store`` as a `Store`: as it is where it has our methods, through `TorchStore` where it is one of torch's (by its methods).

    Raises InvalidArgument for anything else.
    """
    if all(callable(getattr(store, name, None)) for name in ("set", "get", "check")):
        return TorchStore(store)
    if all(callable(getattr(store, name, None)) for name in ("set", "get", "delete")):
        return store  # type: ignore[return-value]
    raise InvalidArgument(
        f"store must be a store, and is {arguments.shown(store)}; give a store of torch.distributed "
        "(TCPStore, FileStore, ...) or of polyccl, or leave it out to use the job's"
    )


def default_store(name: str, rank: int, size: int) -> Store:
    """The job's store, for the communicator ``name`` of ``size`` ranks: connects, and hosts it where that falls to this rank.

    POLYCCL_STORE where set, else MASTER_ADDR and MASTER_PORT (torch's TCPStore where torch is installed, which then also serves
    ``torch.distributed``), else, for a single rank, a store in memory. A process keeps one store per address. Raises
    InvalidArgument where nothing says how ranks meet.
    """
    address = environment.text("POLYCCL_STORE")
    if address:
        base = _from_address(address, rank)
    elif os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        base = _from_torch_environment(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], rank)
    elif size == 1:
        base = MemoryStore()
    else:
        raise InvalidArgument(
            f"communicator '{name}': nothing says where its {size} ranks meet; start them with torchrun or `polyccl launch`, or "
            "set MASTER_ADDR and MASTER_PORT, or POLYCCL_STORE (tcp://host:port?host=rank0 or file:///directory), or give `store`"
        )
    return PrefixStore(base, f"polyccl/{name}")


_kept: dict[tuple[object, ...], Store] = {}
_keeping = threading.Lock()


def _from_address(address: str, rank: int) -> Store:
    url = urlsplit(address)
    if url.scheme == "file" and url.path.startswith("/") and url.netloc in ("", "localhost"):
        base = FileStore(unquote(url.path))
        token = environment.text("POLYCCL_JOB_TOKEN")
        if not token:
            return base
        return PrefixStore(base, hashlib.sha256(token.encode()).hexdigest()[:16])  # files of another job are not this one's
    options = parse_qs(url.query)
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host, port = None, None
    if url.scheme != "tcp" or not host or not port or options not in ({}, {"host": ["rank0"]}):
        raise InvalidArgument(
            f"environment variable POLYCCL_STORE is {address!r}; it must be tcp://host:port, tcp://host:port?host=rank0 (rank 0 "
            "hosts the store), or file:///directory"
        )
    return _own_tcp(host, port, serve=rank == 0 and bool(options))


def _own_tcp(host: str, port: int, serve: bool) -> Store:
    with _keeping:
        key = ("tcp", host, port, os.getpid())
        if key not in _kept:
            _kept[key] = TcpStore(host, port, serve)
        return _kept[key]


def _from_torch_environment(host: str, port_text: str, rank: int) -> Store:
    if not port_text.isdecimal() or not 0 < int(port_text) < 65536:
        raise InvalidArgument(f"environment variable MASTER_PORT is {port_text!r}; it must be a port, 1 to 65535")
    port = int(port_text)
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if find_spec("torch") is None:
        if by_agent:
            raise InvalidArgument(
                "torchrun hosts the job's store, but torch cannot be imported here; set POLYCCL_STORE on all ranks"
            )
        return _own_tcp(host, port, serve=rank == 0)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if by_agent else ""
    with _keeping:
        key = ("torch", host, port, attempt, os.getpid())
        if key not in _kept:
            store: Store = TorchStore(_torch_tcp(host, port, rank == 0 and not by_agent))
            _kept[key] = PrefixStore(store, f"attempt_{attempt}") if by_agent else store
        return _kept[key]


def _torch_tcp(host: str, port: int, host_it: bool) -> Any:
    """torch's TCPStore; several users in one process (``init_process_group``, say) share a server."""
    timeout = bounded(environment.seconds("POLYCCL_TIMEOUT"))
    try:
        return import_module("torch.distributed").TCPStore(
            host,
            port,
            is_master=host_it,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        what, advice = "be hosted", ""
        if not host_it:
            what = f"be reached within {timeout:.0f} s"
            advice = ". See the log of rank 0, which hosts it. Where torch is on some ranks only, set POLYCCL_STORE on all"
        raise PeerLost(f"the job's store at {host}:{port} (MASTER_ADDR, MASTER_PORT) cannot {what} ({said}){advice}") from None


def _limit(timeout: float | None) -> float:
    return bounded(environment.seconds("POLYCCL_TIMEOUT") if timeout is None else arguments.seconds(timeout))


__all__ = [
    "FileStore",
    "MemoryStore",
    "PrefixStore",
    "Store",
    "TcpServer",
    "TcpStore",
    "TorchStore",
    "default_store",
    "wrap",
]
