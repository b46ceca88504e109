"""The plugin ABI in ctypes, so that tests can drive a plugin alone, without PolyCCL's core.

Mirrors `core/abi/polyccl/backend.h`. The host services are Python's: arithmetic by NumPy, and a store that is a directory. The
transport that a plugin may ask for is PolyCCL's own link.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ABI = (1 << 16) + 2

OK, INVALID, UNSUPPORTED, TIMEOUT, PEER_LOST, ABORTED, UNAVAILABLE, INTERNAL, IN_PROGRESS, MISMATCH = range(10)
HOST_MEMORY, DEVICE_MEMORY = 1, 2
CAN, EQUAL_BITS, GROUP = 1, 2, 4
NEEDS_TRANSPORT = 32


def _numbered(names: str) -> dict[str, int]:
    """The names, numbered from 1."""
    return {name: number for number, name in enumerate(names.split(), start=1)}


KINDS = _numbered(
    "send recv broadcast all_reduce reduce all_gather all_gather_v reduce_scatter reduce_scatter_v all_to_all all_to_all_v "
    "scatter gather barrier"
)
DTYPES = _numbered(
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
REDUCTIONS = _numbered("SUM PRODUCT MIN MAX BAND BOR BXOR AVG PREMUL_SUM")

# How NumPy holds a type: bfloat16 as its 16 bits, the fp8 types as bytes.
_HELD: dict[str, npt.DTypeLike] = {"bfloat16": np.uint16} | {name: np.uint8 for name in DTYPES if name.startswith("float8")}
Array = npt.NDArray[Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy type that holds the dtype `name`."""
    return np.dtype(_HELD.get(name, name))


def widen(array: Array, dtype: str) -> Array:
    """bfloat16 bits as float32 values; anything else as it is."""
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array


def narrow(array: Array, dtype: str) -> Array:
    """float32 values as bfloat16 bits, rounded to nearest even; else a plain conversion."""
    if dtype != "bfloat16":
        return array.astype(numpy_dtype(dtype))
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def can_reduce(dtype: str, reduction: str) -> bool:
    """Whether NumPy's host arithmetic here combines `dtype` by `reduction`."""
    if dtype.startswith("float8") or reduction in ("AVG", "PREMUL_SUM"):
        return False
    if reduction.startswith("B"):
        return not dtype.startswith(("float", "bfloat", "complex"))
    return not (dtype.startswith("complex") and reduction in ("MIN", "MAX"))


def combine(a: Array, b: Array, dtype: str, reduction: str) -> Array:
    """`a` (reduction) `b`, in the type that holds `dtype`."""
    ufuncs = {
        "SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum,
        "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
    }  # fmt: skip
    with np.errstate(all="ignore"):
        return narrow(ufuncs[reduction](widen(a, dtype), widen(b, dtype)), dtype)


class Op(c.Structure):
    _fields_ = [
        ("struct_size", c.c_uint32), ("required", c.c_uint32), ("kind", c.c_uint32), ("dtype", c.c_uint32),
        ("reduction", c.c_uint32), ("peer", c.c_int32), ("input", c.c_void_p), ("output", c.c_void_p), ("count", c.c_uint64),
        ("counts", c.POINTER(c.c_uint64)), ("output_counts", c.POINTER(c.c_uint64)), ("factor", c.c_void_p),
        ("factor_memory", c.c_uint32), ("memory", c.c_uint32), ("stream", c.c_void_p), ("deadline", c.c_int64),
    ]  # fmt: skip


LogFn = c.CFUNCTYPE(None, c.c_void_p, c.c_int32, c.c_char_p)
ReduceFn = c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_void_p, c.c_void_p, c.c_void_p, c.c_uint64, c.c_uint32, c.c_uint32)
SetFn = c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_char_p, c.c_void_p, c.c_uint64)
GetFn = c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_char_p, c.c_void_p, c.c_uint64, c.POINTER(c.c_uint64), c.c_int64)
CancelledFn = c.CFUNCTYPE(c.c_int32, c.c_void_p)


class Host(c.Structure):
    _fields_ = [("struct_size", c.c_uint32), ("abi", c.c_uint32), ("ctx", c.c_void_p), ("log", LogFn), ("reduce", ReduceFn)]


class Store(c.Structure):
    _fields_ = [
        ("struct_size", c.c_uint32), ("reserved", c.c_uint32), ("ctx", c.c_void_p), ("set", SetFn), ("get", GetFn),
        ("cancelled", CancelledFn),
    ]  # fmt: skip


class CommConfig(c.Structure):
    _fields_ = [
        ("struct_size", c.c_uint32), ("rank", c.c_int32), ("size", c.c_int32), ("device", c.c_int32), ("name", c.c_char_p),
        ("store", c.POINTER(Store)), ("interface", c.c_char_p), ("address", c.c_char_p), ("hints", c.POINTER(c.c_char_p)),
        ("deadline", c.c_int64), ("transport", c.c_void_p),
    ]  # fmt: skip


_Text = c.POINTER(c.c_char)


class Table(c.Structure):
    _fields_ = [
        ("struct_size", c.c_uint32), ("abi", c.c_uint32), ("flags", c.c_uint32), ("reserved", c.c_uint32), ("name", c.c_char_p),
        ("library", c.CFUNCTYPE(c.c_int32, _Text, c.c_uint64, _Text, c.c_uint64)),
        ("compatibility", c.CFUNCTYPE(c.c_int32, c.c_int32, _Text, c.c_uint64)),
        ("device_count", c.CFUNCTYPE(c.c_int32, c.POINTER(c.c_int32))),
        ("supports", c.CFUNCTYPE(c.c_uint32, c.c_uint32, c.c_uint32, c.c_uint32, c.c_uint32)),
        ("completion", c.CFUNCTYPE(c.c_uint32, c.c_uint32, c.c_uint32)),
        ("comm_create", c.CFUNCTYPE(c.c_int32, c.POINTER(CommConfig), c.POINTER(c.c_void_p))),
        ("issue", c.CFUNCTYPE(c.c_int32, c.c_void_p, c.POINTER(c.POINTER(Op)), c.c_uint32, c.POINTER(c.c_void_p))),
        ("request_wait", c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_void_p)),
        ("request_test", c.c_void_p), ("async_error", c.c_void_p),
        ("abort", c.CFUNCTYPE(c.c_int32, c.c_void_p)),
        ("comm_destroy", c.CFUNCTYPE(c.c_int32, c.c_void_p)),
        ("last_error", c.CFUNCTYPE(None, c.c_void_p, _Text, c.c_uint64)),
        ("kind_name", c.c_void_p), ("device", c.c_void_p),
    ]  # fmt: skip


def after(seconds: float) -> int:
    """An absolute deadline that many seconds from now."""
    return time.monotonic_ns() + int(seconds * 1e9)


class DirectoryStore:
    """A key-value store of files. `ranks` share the directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cancel = False
        self.table = Store(c.sizeof(Store), 0, None, SetFn(self._set), GetFn(self._get), CancelledFn(lambda _: int(self.cancel)))

    def put(self, key: str, value: bytes = b"") -> None:
        """Set `key`, at once for all readers."""
        part = self.directory / f".{key.replace('/', '_')}.{os.getpid()}"
        part.write_bytes(value)
        part.replace(self.directory / key.replace("/", "_"))

    def wait(self, key: str, deadline: int) -> bytes | None:
        """The value of `key` once it is there, or None after the deadline."""
        path = self.directory / key.replace("/", "_")
        while not path.exists():
            if time.monotonic_ns() > deadline or self.cancel:
                return None
            time.sleep(0.002)
        return path.read_bytes()

    def _set(self, _: object, key: bytes, value: int, size: int) -> int:
        self.put(key.decode(), c.string_at(value, size) if size else b"")
        return OK

    def _get(self, _: object, key: bytes, value: int, capacity: int, size: Any, deadline: int) -> int:
        found = self.wait(key.decode(), deadline or after(60))
        if found is None:
            return ABORTED if self.cancel else TIMEOUT
        size[0] = len(found)
        c.memmove(value, found, min(len(found), capacity))
        return INVALID if len(found) > capacity else OK


def _reduce(_: object, output: int, a: int, b: int, n: int, dtype: int, reduction: int) -> int:
    names = [name for name, number in DTYPES.items() if number == dtype]
    operations = [name for name, number in REDUCTIONS.items() if number == reduction]
    if not names or not operations or not can_reduce(names[0], operations[0]):
        return UNSUPPORTED
    if n == 0:
        return OK
    held = numpy_dtype(names[0])

    def view(address: int) -> Array:
        return np.frombuffer((c.c_char * (n * held.itemsize)).from_address(address), dtype=held)

    view(output)[:] = combine(view(a), view(b), names[0], operations[0])
    return OK


class Plugin:
    """A plugin, opened as PolyCCL opens it."""

    def __init__(self, path: str) -> None:
        self.library = c.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        self._host = Host(c.sizeof(Host), ABI, None, LogFn(lambda *_: None), ReduceFn(_reduce))
        query = self.library.polyccl_backend_query
        query.argtypes = [c.c_uint32, c.POINTER(Host), c.POINTER(c.POINTER(Table))]
        found = c.POINTER(Table)()
        result = query(ABI, c.byref(self._host), c.byref(found))
        if result != OK:
            raise RuntimeError(f"polyccl_backend_query gave {result}")
        self.table = found.contents

    def text(self, comm: object = None) -> str:
        """The plugin's words for its last failure."""
        buffer = c.create_string_buffer(4096)
        self.table.last_error(comm, buffer, len(buffer))
        return buffer.value.decode()

    def library_file(self) -> str:
        """The file of the library behind the plugin."""
        version, file = c.create_string_buffer(256), c.create_string_buffer(4096)
        if self.table.library(version, 256, file, 4096) != OK:
            raise RuntimeError(self.text())
        return file.value.decode()

    def compatibility(self) -> str:
        """The plugin's compatibility key for the host."""
        key = c.create_string_buffer(256)
        if self.table.compatibility(-1, key, 256) != OK:
            raise RuntimeError(self.text())
        return key.value.decode()


class PluginError(Exception):
    """A result that is not OK."""

    def __init__(self, result: int, text: str) -> None:
        super().__init__(f"result {result}: {text}")
        self.result = result
        self.text = text


def lend_link(store: DirectoryStore, name: str, rank: int, size: int, seconds: float) -> Any:
    """A group of this process's link with all ranks, which meet at the store."""
    from polyccl import _native  # only for plugins that ask for it

    link = _native.link
    store.put(f"{name}.link.{rank}", json.dumps(link.address()).encode())
    members = []
    for peer in range(size):
        found = store.wait(f"{name}.link.{peer}", after(seconds))
        if found is None:
            raise TimeoutError(f"rank {peer} did not come")
        members.append(tuple(json.loads(found)))
    number = zlib.crc32(f"{store.directory}/{name}".encode())
    return link.create_group(number, rank, members, [f"rank {peer}" for peer in range(size)], "a test's token")


class Comm:
    """A communicator of a plugin. Every call blocks, raises PluginError, and releases the GIL."""

    def __init__(
        self,
        plugin: Plugin,
        store: DirectoryStore,
        rank: int,
        size: int,
        *,
        seconds: float = 20,
        interface: str = "lo",
        name: str = "c",
    ) -> None:
        self.plugin, self.rank, self.size = plugin, rank, size
        config = CommConfig(
            struct_size=c.sizeof(CommConfig),
            rank=rank,
            size=size,
            device=-1,
            name=name.encode(),
            store=c.pointer(store.table),
            interface=interface.encode(),
            deadline=after(seconds),
        )
        self._link: Any = None
        if plugin.table.flags & NEEDS_TRANSPORT and 0 <= rank < size > 1:
            self._link = lend_link(store, name, rank, size, seconds)
            config.transport = self._link.lend()
        handle = c.c_void_p()
        result = plugin.table.comm_create(c.byref(config), c.byref(handle))
        if result != OK:
            raise PluginError(result, plugin.text())
        self.handle = handle

    def op(
        self,
        kind: str,
        dtype: str = "uint8",
        *,
        input: Array | None = None,
        output: Array | None = None,
        count: int = 0,
        reduction: str | None = None,
        peer: int = -1,
        counts: Sequence[int] | None = None,
        output_counts: Sequence[int] | None = None,
        seconds: float = 20,
    ) -> Op:
        """One operation; `seconds` of 0 is no deadline. Arrays of 0 elements are passed as NULL."""

        def address(array: Array | None) -> int | None:
            return None if array is None or array.size == 0 else array.ctypes.data

        def numbers(values: Sequence[int] | None) -> Any:
            return None if values is None else (c.c_uint64 * len(values))(*values)

        return Op(
            struct_size=c.sizeof(Op), kind=KINDS[kind], dtype=DTYPES[dtype], reduction=REDUCTIONS[reduction] if reduction else 0,
            peer=peer, input=address(input), output=address(output), count=count, counts=numbers(counts),
            output_counts=numbers(output_counts), memory=HOST_MEMORY, deadline=after(seconds) if seconds else 0,
        )  # fmt: skip

    def issue(self, *ops: Op) -> None:
        """Issue `ops` as one group, and wait."""
        pointers = (c.POINTER(Op) * len(ops))(*[c.pointer(op) for op in ops])
        request = c.c_void_p()
        result = self.plugin.table.issue(self.handle, pointers, len(ops), c.byref(request))
        if result != OK:
            raise PluginError(result, self.plugin.text(self.handle))

    def run(self, kind: str, dtype: str = "uint8", **arguments: Any) -> None:
        """Issue one operation; see `op`."""
        self.issue(self.op(kind, dtype, **arguments))

    def abort(self) -> None:
        """Abort, from any thread."""
        self.plugin.table.abort(self.handle)

    def destroy(self) -> None:
        """Free the communicator."""
        self.plugin.table.comm_destroy(self.handle)
        if self._link is not None:
            self._link.close()
