"""Keeping torch's storages from being resized under an operation that is on its way.

``untyped_storage().resize_()`` frees the memory of every tensor on that storage, whoever uses it. An operation marks the storages
of its tensors in host memory by a weak reference, and torch's method refuses those that are marked. On devices memory is freed in
the order of streams, so nothing is refused there.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any
from weakref import getweakrefs


def in_use(reference: object) -> None:
    """The callback of the references that mark a storage; it does nothing when one ends."""


def guard() -> object:
    """Have torch's method refuse marked storages, and return the callback that marks them. torch is loaded; may be called again."""
    storage: Any = sys.modules["torch"].UntypedStorage
    resize = storage.resize_
    if not hasattr(resize, "__wrapped__"):

        @wraps(resize)
        def resize_(self: Any, size: int) -> Any:
            if any(reference.__callback__ is in_use for reference in getweakrefs(self)):
                raise RuntimeError(
                    "this storage cannot be resized: an operation of polyccl that is on its way uses its memory; wait for it first"
                )
            return resize(self, size)

        storage.resize_ = resize_
    return in_use


__all__ = ["guard", "in_use"]
