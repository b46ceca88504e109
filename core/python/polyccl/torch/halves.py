"""Objects of Python of which torch's C++ would keep only its own half.

A work, a group or a store in Python is an object of C++ too. What C++ holds on to does not hold on to the half in Python, and
without it the other does nothing: a work never ends, a store raises. So torch gets works of C++ alone where it keeps them, and
what must outlive its last name in Python is held here, or by the group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch._C import _distributed_c10d as c10d

from .work import Work

KEEPERS: list[tuple[Any, str]] = [
    (c10d.Reducer, "_set_forward_pass_work_handle"),  # DDP's join with divide_by_initial_world_size=False
    (c10d, "_register_work"),  # the functional collectives' wait_tensor
]
"""Functions of torch that keep a work that they are given."""


def serve() -> None:
    """Let torch's `KEEPERS` keep works of C++ alone. May be called again."""
    for owner, name in KEEPERS:
        function = getattr(owner, name, None)
        if function is not None and not hasattr(function, "__wrapped__"):
            setattr(owner, name, _keeping_whole(function))


def _keeping_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def keep(*arguments: Any) -> Any:
        return function(*(each.in_native() if isinstance(each, Work) else each for each in arguments))

    return keep


def layers(store: Any) -> list[Any]:
    """The stores that ``store`` wraps, itself included: what keeps all of it alive."""
    found = []
    while store is not None:
        found.append(store)
        store = getattr(store, "underlying_store", None)
    return found


__all__ = ["layers", "serve"]
