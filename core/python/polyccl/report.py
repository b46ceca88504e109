"""What this installation can do, as plain data: what ``polyccl info`` prints, and what a bug report should hold.

Plugins are loaded to ask them. One that fails to load is an entry with its error, never an exception.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

from . import backends
from ._version import __version__
from .errors import CommError
from .spec import OPERATIONS, Operation, Reduction

NATIVE, PLANNED, NONE = "native", "planned", "none"
"""The library does it; PolyCCL builds it from what the library does; nobody does."""

_MEMORIES = {"host": 1, "device": 2}
_CAN = 1


def collect() -> dict[str, Any]:
    """Everything, ready for JSON.

    ``backends`` has an entry for each backend of this project and each that was found: ``name``; ``state`` ("built in", "loaded",
    "failed" or "not built"); ``plugin``, ``abi``, ``library``, ``library_version``, ``devices`` and ``operations`` where it loaded;
    ``error`` where it did not. Where there are devices, ``waits_for_host`` is true if their streams can wait for the host, so that
    operations of a bridge are asynchronous, false if these block the host, and None if that could not be found out.
    ``operations`` maps operation, memory, dtype, and for reductions the reduction, to `NATIVE`,
    `PLANNED` or `NONE`.
    """
    native, problem = _native()
    try:
        number = backends.abi()
        abi: str | None = f"{number >> 16}.{number & 0xFFFF}"
    except CommError:
        abi = None
    try:
        found, path_problem = backends.available(), None
    except CommError as error:  # a wrong POLYCCL_BACKEND_PATH
        found, path_problem = [backends.HOST], str(error)
    names = [*backends.KNOWN, *(name for name in found if name not in backends.KNOWN)]
    return {
        "version": __version__,
        "abi": abi,
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": _torch_version(),
        "native": problem or "loaded",
        "build": backends.build_record(),
        "problems": [path_problem] if path_problem else [],
        "backends": [_describe(name, name in found, native, problem) for name in names],
    }


def _native() -> tuple[Any, str | None]:
    """The native module, or why it is not there."""
    try:
        return importlib.import_module("polyccl._native"), None
    except ImportError as error:
        return None, f"the native module does not load ({error}); install PolyCCL from a wheel or from source"


def _torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe(name: str, found: bool, native: Any, problem: str | None) -> dict[str, Any]:
    if name == backends.HOST:
        entry: dict[str, Any] = {"name": name, "state": "built in" if native else "failed"}
        return entry | ({"devices": 0, "operations": _host_operations(native)} if native else {"error": problem})
    entry = {"name": name, "state": "not built"}
    try:
        path = backends.find(name)
    except CommError as error:
        return entry | {"state": "failed" if found else "not built", "error": str(error)}
    entry["plugin"] = str(path)
    if native is None:
        return entry | {"state": "failed", "error": problem}
    try:
        plugin = native.Backend.load(str(path))
        return entry | {
            "state": "loaded",
            "abi": f"{plugin.abi >> 16}.{plugin.abi & 0xFFFF}",
            "library": plugin.library_file or None,
            "library_version": plugin.library_version,
            "devices": plugin.device_count,
            **_bridges(native, plugin),
            "operations": _operations(native, plugin),
        }
    except Exception as error:  # whatever a plugin does, the others are shown
        return entry | {"state": "failed", "error": str(error)}


def _bridges(native: Any, plugin: Any) -> dict[str, bool | None]:
    """Whether operations of a bridge are asynchronous on the plugin's first device, where there is one."""
    if not plugin.has_device or not plugin.device_count:
        return {}
    try:
        return {"waits_for_host": bool(native.Device(plugin, 0).waits_for_host)}
    except CommError:
        return {"waits_for_host": None}


def _operations(native: Any, plugin: Any) -> dict[str, Any]:
    """What the plugin does itself, and what is planned around it, for the memories that it serves."""

    def can(row: Operation, dtype: int, reduction: Reduction, memory: str) -> bool:
        return bool(plugin.supports(int(row.kind), dtype, int(reduction), _MEMORIES[memory]) & _CAN)

    dtypes = [number for number, _, _ in native.dtypes()]
    served = [
        memory
        for memory in _MEMORIES
        if any(can(row, dtype, _reductions(row)[0], memory) for row in OPERATIONS for dtype in dtypes)
    ]
    return _table(native, served, can)


def _host_operations(native: Any) -> dict[str, Any]:
    """Of the link: messages are native, every collective is planned, and PolyCCL's own kernels reduce."""
    return _table(native, ["host"], lambda row, dtype, reduction, memory: not row.collective)


def _table(native: Any, memories: list[str], can: Callable[[Operation, int, Reduction, str], bool]) -> dict[str, Any]:
    def answer(row: Operation, dtype: int, reduction: Reduction, memory: str) -> str:
        if can(row, dtype, reduction, memory):
            return NATIVE
        return PLANNED if not row.reduces or native.can_reduce(dtype, int(reduction)) else NONE

    def cell(row: Operation, dtype: int, memory: str) -> Any:
        answers = {each.name.lower(): answer(row, dtype, each, memory) for each in _reductions(row)}
        return answers if row.reduces else answers["none"]

    return {
        row.name: {memory: {name: cell(row, number, memory) for number, name, _ in native.dtypes()} for memory in memories}
        for row in OPERATIONS
    }


def _reductions(row: Operation) -> list[Reduction]:
    return [each for each in Reduction if each is not Reduction.NONE] if row.reduces else [Reduction.NONE]


__all__ = ["NATIVE", "NONE", "PLANNED", "collect"]
