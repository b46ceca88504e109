"""A user's side of a device, on the stand-ins for the vendors' runtimes: memory, streams, and tensors as torch's are to PolyCCL.

The host may not touch device memory (``FAKE_GUARD=1``), so values go in and come out by copies that a stream does in its order.
A gate holds up a stream until the host opens it: what is enqueued behind it has certainly not run before.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
SOURCE = Path(__file__).with_name("device_ext.c")
POISON = 0x5A  # what memory is filled with as soon as nobody needs it any more
CODES = {"i": 0, "u": 1, "f": 2}  # DLPack's, by NumPy's kinds


# The runtimes' functions, by the names that both have here: CUDA's, and HIP's.
NAMES = {
    "malloc": ("cuMemAlloc_v2", "hipMalloc"),
    "free_async": ("cuMemFreeAsync", "hipFreeAsync"),
    "fill": ("cuMemsetD8Async", "hipMemsetD8Async"),
    "upload": ("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync"),
    "download": ("cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync"),
    "stream_create": ("cuStreamCreate", "hipStreamCreateWithFlags"),
    "stream_query": ("cuStreamQuery", "hipStreamQuery"),
    "stream_synchronize": ("cuStreamSynchronize", "hipStreamSynchronize"),
    "host_function": ("cuLaunchHostFunc", "hipLaunchHostFunc"),
    "begin_capture": ("cuStreamBeginCapture_v2", "hipStreamBeginCapture"),
    "end_capture": ("cuStreamEndCapture", "hipStreamEndCapture"),
}


class CannotCompile(RuntimeError):
    """There is no C compiler, or no header of Python's."""


def compile_extension(folder: Path) -> str:
    """Compile the extension into ``folder``; its path. Blocks for about a second. Raises CannotCompile."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    headers = sysconfig.get_paths()["include"]
    if shutil.which(compiler[0]) is None:
        compiler = ["cc"]
    if shutil.which(compiler[0]) is None or not Path(headers, "Python.h").exists():
        raise CannotCompile("compiling the tests' extension takes a C compiler and Python's headers")
    target = folder / f"device_ext{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = [*compiler, "-std=gnu11", "-O1", "-fPIC", "-shared", "-pthread", f"-I{headers}", str(SOURCE), "-o", str(target)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert built.returncode == 0, built.stderr
    return str(target)


def load_extension(path: str) -> Any:
    """The compiled extension, loaded once in a process."""
    if "device_ext" not in sys.modules:
        spec = importlib.util.spec_from_file_location("device_ext", path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["device_ext"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["device_ext"])
    return sys.modules["device_ext"]


class Runtime:
    """CUDA's or HIP's calls, by the names that both share here. A call that fails is an AssertionError."""

    def __init__(self, backend: str, extension: Any, index: int = 0) -> None:
        self.amd = backend.startswith("rccl")
        self.extension = extension
        self.index = index
        self.device = f"{'hip' if self.amd else 'cuda'}:{index}"
        self.number = 10 if self.amd else 2  # DLPack's number of the kind of device
        self._library = c.CDLL(os.environ["POLYCCL_HIP_LIBRARY" if self.amd else "POLYCCL_CUDA_LIBRARY"])
        self._context = c.c_void_p()
        if not self.amd:
            assert self._library.cuInit(0) == 0
            assert self._library.cuDevicePrimaryCtxRetain(c.byref(self._context), index) == 0

    def enter(self) -> None:
        """Make the device this thread's."""
        chosen = self._library.hipSetDevice(self.index) if self.amd else self._library.cuCtxSetCurrent(self._context)
        assert chosen == 0

    def leave(self) -> None:
        """Leave this thread without a device. HIP's threads begin with device 0."""
        left = self._library.hipSetDevice(0) if self.amd else self._library.cuCtxSetCurrent(c.c_void_p())
        assert left == 0

    def status(self, name: str, *arguments: Any) -> int:
        """What the call gives, on this device."""
        self.enter()
        return int(getattr(self._library, NAMES[name][self.amd])(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """Make the call."""
        status = self.status(name, *arguments)
        assert status == 0, f"{NAMES[name][self.amd]} gives {status}"


class Memory:
    """Device memory. Once it is let go of it is filled with other values and freed, in the order of a stream: as by torch, whose
    allocator gives it to the next who asks."""

    def __init__(self, runtime: Runtime, size: int, stream: int) -> None:
        self._runtime, self._size, self._stream = runtime, size, stream
        self._address = c.c_void_p()
        runtime.call("malloc", c.byref(self._address), c.c_size_t(size))

    @property
    def address(self) -> int:
        """Where it begins."""
        return self._address.value or 0

    def __del__(self) -> None:
        stream = c.c_void_p(self._stream)
        self._runtime.call("fill", self._address, c.c_ubyte(POISON), c.c_size_t(self._size), stream)
        self._runtime.call("free_async", self._address, stream)


@dataclass
class Data:
    """A tensor to hand to PolyCCL, with the values that it was made with, and its device memory (None on the host)."""

    tensor: Any
    values: Array
    memory: Memory | None


class Stream:
    """A user's stream. It has nothing to do with the default stream."""

    def __init__(self, runtime: Runtime, handle: int | None = None) -> None:
        made = c.c_void_p(handle)
        if handle is None:
            runtime.call("stream_create", c.byref(made), 1)
        self.handle = made.value or 0
        self._runtime = runtime
        self._keep: list[Array] = []  # what copies read

    @property
    def _c(self) -> c.c_void_p:
        return c.c_void_p(self.handle)

    def use(self) -> Stream:
        """Make it the current one, for PolyCCL too."""
        self._runtime.extension.set_stream(self.handle)
        return self

    def tensor(self, values: Array) -> Data:
        """A new tensor, which the stream fills with ``values`` (1-d)."""
        values = np.ascontiguousarray(values)
        memory = Memory(self._runtime, max(1, values.nbytes), self.handle)
        dtype = (CODES[values.dtype.kind], values.itemsize * 8)
        device = (self._runtime.number, self._runtime.index)
        tensor = self._runtime.extension.Tensor(memory, memory.address, values.size, dtype, device)
        self._keep.append(values)
        self._runtime.call("upload", c.c_void_p(memory.address), c.c_void_p(values.ctypes.data), c.c_size_t(values.nbytes), self._c)
        return Data(tensor, values, memory)

    def read(self, data: Data) -> Array:
        """An array that the stream fills with what the tensor's memory then holds: look at it after `finish`."""
        result = np.zeros_like(data.values)
        size = c.c_size_t(result.nbytes)
        self._keep.append(result)
        assert data.memory is not None
        self._runtime.call("download", c.c_void_p(result.ctypes.data), c.c_void_p(data.memory.address), size, self._c)
        return result

    def hold(self) -> Any:
        """Hold up the stream here; `open()` of what this gives lets it go on."""
        gate = self._runtime.extension.Gate()
        self._runtime.call("host_function", self._c, c.c_void_p(gate.function), c.c_void_p(gate.address))
        return gate

    def busy(self) -> bool:
        """Whether not all is done that was enqueued."""
        return self._runtime.status("stream_query", self._c) != 0

    def finish(self) -> None:
        """Block until all is done that was enqueued. An AssertionError where a gate had to open itself."""
        self._runtime.call("stream_synchronize", self._c)
        self._keep.clear()
        assert self._runtime.extension.late() == 0, "a gate was not opened within 30 s: something blocked the host, or another rank"

    def begin_capture(self, mode: int = 0) -> None:
        """Capture into a graph from here. Mode 0 is global, 1 of this thread, 2 relaxed."""
        self._runtime.call("begin_capture", self._c, mode)

    def end_capture(self) -> int:
        """End the capture; the runtime's status, 0 where nothing disturbed it."""
        graph = c.c_void_p()
        return self._runtime.status("end_capture", self._c, c.byref(graph))


class HostGate:
    """What holds up nothing."""

    def open(self) -> None:
        """Do nothing."""


class HostStream:
    """A host rank's place of a `Stream`: whatever it is told is done at once."""

    def use(self) -> HostStream:
        """Do nothing."""
        return self

    def tensor(self, values: Array) -> Data:
        """A copy of ``values``, as a tensor."""
        copy = np.array(values)
        return Data(copy, copy, None)

    def read(self, data: Data) -> Array:
        """What the tensor holds now."""
        return np.array(data.tensor)

    def hold(self) -> HostGate:
        """Hold up nothing."""
        return HostGate()

    def finish(self) -> None:
        """Do nothing."""
