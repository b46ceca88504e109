"""The plugin ABI's device side in ctypes: device memory, streams, and communicators whose operations are stream-ordered.

Data goes to and from device memory by the plugin's own copies, so that nothing here assumes where that memory lies.
"""

from __future__ import annotations

import ctypes as c
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from abi import (
    DEVICE_MEMORY,
    DTYPES,
    HOST_MEMORY,
    IN_PROGRESS,
    KINDS,
    OK,
    REDUCTIONS,
    Array,
    CommConfig,
    DirectoryStore,
    Op,
    Plugin,
    PluginError,
    after,
)

_P, _I32, _U32, _U64 = c.c_void_p, c.c_int32, c.c_uint32, c.c_uint64


def _entry(*arguments: Any) -> Any:
    return c.CFUNCTYPE(_I32, *arguments)


class DeviceTable(c.Structure):
    _fields_ = [
        ("struct_size", _U32), ("reserved", _U32),
        ("host_alloc", _entry(_I32, c.POINTER(_P), _U64)), ("host_free", _entry(_P)),
        ("alloc", _entry(_I32, c.POINTER(_P), _U64)), ("free", _entry(_P)),
        ("stream_create", _entry(_I32, _I32, c.POINTER(_P))), ("stream_destroy", _entry(_P)),
        ("stream_wait_event", _entry(_P, _P)),
        ("event_create", _entry(_I32, c.POINTER(_P))), ("event_destroy", _entry(_P)),
        ("event_record", _entry(_P, _P)), ("event_query", _entry(_P)),
        ("copy", _entry(_P, _P, _U64, _P, _U64, _U64, _U64)),
        ("wait_flag", _entry(_P, _P, _U32)), ("write_flag", _entry(_P, _P, _U32)),
        ("reduce", _P), ("scale", _P),
        ("stream_is_capturing", _entry(_P, c.POINTER(_I32))),
        ("enter", _entry(_I32, c.POINTER(c.c_int64))), ("leave", _entry(c.c_int64)),
    ]  # fmt: skip


def wait_until(condition: Any, seconds: float, what: str) -> None:
    """Until `condition()` holds; an AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.001)


class Device:
    """Device 0 of a plugin: every call raises PluginError."""

    def __init__(self, plugin: Plugin, index: int = 0) -> None:
        self.plugin, self.index = plugin, index
        self.table = c.cast(plugin.table.device, c.POINTER(DeviceTable)).contents
        self.stream = self.new_stream()

    def check(self, result: int) -> None:
        if result != OK:
            raise PluginError(result, self.plugin.text())

    def _made(self, entry: Any, *arguments: Any) -> int:
        made = _P()
        self.check(entry(self.index, *arguments, c.byref(made)))
        assert made.value is not None
        return made.value

    def new_stream(self, high: bool = False) -> int:
        return self._made(self.table.stream_create, int(high))

    def new_event(self) -> int:
        return self._made(self.table.event_create)

    def host_memory(self, size: int) -> int:
        """Pinned memory of that many bytes."""
        made = _P()
        self.check(self.table.host_alloc(self.index, c.byref(made), size))
        assert made.value is not None
        return made.value

    def memory(self, size: int) -> int:
        made = _P()
        self.check(self.table.alloc(self.index, c.byref(made), size))
        assert made.value is not None
        return made.value

    def is_done(self, event: int) -> bool:
        result = self.table.event_query(event)
        if result not in (OK, IN_PROGRESS):
            raise PluginError(result, self.plugin.text())
        return bool(result == OK)

    def synchronize(self, stream: int | None = None, seconds: float = 20) -> None:
        """Wait until all that was enqueued on the stream is done."""
        event = self.new_event()
        self.check(self.table.event_record(event, stream or self.stream))
        wait_until(lambda: self.is_done(event), seconds, "the stream's work")
        self.check(self.table.event_destroy(event))

    def copy(self, to: int, source: int, size: int, stream: int | None = None) -> None:
        self.check(self.table.copy(stream or self.stream, to, size, source, size, size, 1))


class Buffer:
    """Device memory that holds an array; freed with `free`."""

    def __init__(self, device: Device, content: Array) -> None:
        self.device, self.size, self.dtype = device, content.nbytes, content.dtype
        self.host = device.host_memory(max(self.size, 1))
        self.address = device.memory(max(self.size, 1))
        self.put(content)

    def put(self, content: Array) -> None:
        c.memmove(self.host, content.ctypes.data, self.size)
        if self.size:
            self.device.copy(self.address, self.host, self.size)

    def get(self) -> Array:
        """The content, once the stream has come so far."""
        if self.size:
            self.device.copy(self.host, self.address, self.size)
        self.device.synchronize()
        return np.frombuffer(c.string_at(self.host, self.size), dtype=self.dtype).copy()

    def free(self) -> None:
        self.device.check(self.device.table.free(self.address))
        self.device.check(self.device.table.host_free(self.host))


class DeviceComm:
    """A communicator of a plugin on device 0. Every call raises PluginError."""

    def __init__(
        self,
        device: Device,
        store: DirectoryStore,
        rank: int,
        size: int,
        *,
        seconds: float = 20,
        index: int | None = None,
        name: str = "c",
    ) -> None:
        self.device, self.plugin, self.rank, self.size = device, device.plugin, rank, size
        self._async = c.CFUNCTYPE(_I32, _P)(self.plugin.table.async_error)
        config = CommConfig(
            struct_size=c.sizeof(CommConfig),
            rank=rank,
            size=size,
            device=device.index if index is None else index,
            name=name.encode(),
            store=c.pointer(store.table),
            deadline=after(seconds),
        )
        handle = _P()
        result = self.plugin.table.comm_create(c.byref(config), c.byref(handle))
        if result != OK:
            raise PluginError(result, self.plugin.text())
        self.handle = handle

    def op(
        self,
        kind: str,
        dtype: str = "uint8",
        *,
        input: int | None = None,
        output: int | None = None,
        count: int = 0,
        reduction: str | None = None,
        peer: int = -1,
        counts: Sequence[int] | None = None,
        output_counts: Sequence[int] | None = None,
        factor: Array | None = None,
        stream: int | None = None,
        memory: int = DEVICE_MEMORY,
        seconds: float = 20,
    ) -> Op:
        """One operation on addresses; `factor` is a host array of one element."""

        def numbers(values: Sequence[int] | None) -> Any:
            return None if values is None else (c.c_uint64 * len(values))(*values)

        return Op(
            struct_size=c.sizeof(Op), kind=KINDS[kind], dtype=DTYPES[dtype], reduction=REDUCTIONS[reduction] if reduction else 0,
            peer=peer, input=input, output=output, count=count, counts=numbers(counts), output_counts=numbers(output_counts),
            factor=None if factor is None else factor.ctypes.data, factor_memory=HOST_MEMORY, memory=memory,
            stream=stream or self.device.stream, deadline=after(seconds) if seconds else 0,
        )  # fmt: skip

    def issue(self, *ops: Op) -> None:
        """Enqueue `ops` as one group."""
        pointers = (c.POINTER(Op) * len(ops))(*[c.pointer(op) for op in ops])
        request = _P()
        result = self.plugin.table.issue(self.handle, pointers, len(ops), c.byref(request))
        if result != OK:
            raise PluginError(result, self.plugin.text(self.handle))
        assert request.value is None, "stream-ordered operations give no request"

    def run(self, kind: str, dtype: str = "uint8", **arguments: Any) -> None:
        """Enqueue one operation; see `op`."""
        self.issue(self.op(kind, dtype, **arguments))

    def supports(self, kind: str, dtype: str, reduction: str | None = None, memory: int = DEVICE_MEMORY) -> int:
        bits = self.plugin.table.supports(KINDS[kind], DTYPES[dtype], REDUCTIONS[reduction] if reduction else 0, memory)
        return int(bits)

    def look(self) -> None:
        """Raise what went wrong since the last call."""
        result = self._async(self.handle)
        if result != OK:
            raise PluginError(result, self.plugin.text(self.handle))

    def abort(self) -> None:
        """Abort, from any thread."""
        self.plugin.table.abort(self.handle)

    def destroy(self) -> None:
        """Free the communicator."""
        self.plugin.table.comm_destroy(self.handle)


__all__ = ["Buffer", "Device", "DeviceComm", "DeviceTable", "wait_until"]
