"""Lines on standard error about what PolyCCL does, as far as POLYCCL_LOG asks for them. The native core writes them."""

from __future__ import annotations

from . import _native

_INFO, _DEBUG = 3, 4  # of the ABI


def info(text: str) -> None:
    """Write what happens once in the life of a communicator."""
    _native.log(_INFO, text)


def debug(text: str) -> None:
    """Write what helps to find out why something is as it is."""
    _native.log(_DEBUG, text)


__all__ = ["debug", "info"]
