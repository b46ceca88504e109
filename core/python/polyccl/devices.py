"""Devices: what a device's name means, which backend it brings, and whether a library can work on it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

from . import arguments, ranks
from .errors import InvalidArgument

CPU = 1
_CUDA, _ROCM, _ONEAPI = 2, 10, 14


@dataclass(frozen=True)
class DeviceName:
    """A device as the user named it. ``type`` is DLPack's number; ``index`` is None where the name has none."""

    kind: str
    index: int | None
    type: int

    @property
    def on_host(self) -> bool:
        """True for host memory."""
        return self.type == CPU

    @property
    def backend(self) -> str:
        """The backend that the device brings where none is named; empty for host memory."""
        return {_CUDA: "nccl", _ROCM: "rccl", _ONEAPI: "xccl"}.get(self.type, "")

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


def parse(device: Any) -> DeviceName:
    """The device that ``cpu``, ``cuda:1``, ``xpu`` or a torch.device names. On a torch for ROCm, ``cuda`` is AMD's."""
    if not isinstance(device, str) and type(device).__name__ != "device":
        arguments.refuse("device", device, "a device's name, e.g. 'cpu' or 'cuda:0', or a torch.device")
    kind, _, number = str(device).partition(":")
    types = {"cpu": CPU, "cuda": _ROCM if _torch_is_rocm() else _CUDA, "hip": _ROCM, "xpu": _ONEAPI}
    if kind not in types or (number and not re.fullmatch(r"[0-9]{1,4}", number)):
        raise InvalidArgument(f"device '{device}' is unknown; use cpu, cuda, hip or xpu, with an index or without, e.g. cuda:0")
    return DeviceName(kind, int(number) if number else None, types[kind])


def choose_index(device: DeviceName, count: int) -> int:
    """The device's index: the given one, else the local rank's share, else torch's current device.

    Raises InvalidArgument for an index that the library does not see.
    """
    index = device.index
    if index is None:
        local = ranks.local_rank()
        index = local % max(1, count) if local is not None else _torch_current(device)
    if count and index >= count:
        raise InvalidArgument(f"device '{device.kind}:{index}': the library sees {count} device{'s' if count > 1 else ''}")
    return index


def _torch_is_rocm() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and getattr(torch.version, "hip", None) is not None


def _torch_current(device: DeviceName) -> int:
    torch: Any = sys.modules.get("torch")
    module = getattr(torch, "xpu" if device.type == _ONEAPI else "cuda", None)
    return int(module.current_device()) if module is not None and module.is_available() else 0


__all__ = ["CPU", "DeviceName", "choose_index", "parse"]
