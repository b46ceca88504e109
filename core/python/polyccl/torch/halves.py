"""Objects of Python that torch's C++ would keep only half of, or could not read.

A work, a group or a store in Python is an object of C++ too. What C++ holds on to does not hold on to the half in Python, and
without it the other does nothing: a work never ends, a store raises. So torch gets works of C++ alone where it keeps them, and a
group holds the stores under its own. Nor can C++ read the list of tensors that a future of Python has: a hook of C++ that does so
gives way to its double in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from ..torch_hook import NAME
from .work import Work


def serve() -> None:
    """Let torch's functions that keep a work, or have C++ read a future, get what they can use. May be called again."""
    # DDP's join with divide_by_initial_world_size=False
    _wrap(c10d.Reducer, "_set_forward_pass_work_handle", partial(_given, Work.for_reading))
    # the functional collectives' wait_tensor
    _wrap(c10d, "_register_work", partial(_given, Work.for_waiting))
    _wrap(DistributedDataParallel, "_register_builtin_comm_hook", _registering_readable)


def _wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    function = getattr(owner, name, None)
    if function is not None and not hasattr(function, "__wrapped__"):
        setattr(owner, name, wrapper(function))


def _given(form: Callable[[Work], c10d.Work], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*(form(each) if isinstance(each, Work) else each for each in arguments))

    return call


def _registering_readable(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def register(module: Any, comm_hook_type: Any) -> Any:
        if comm_hook_type == c10d.BuiltinCommHookType.FP16_COMPRESS and module.process_group.name() == NAME:
            # Loads much that few scripts need.
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            return module.register_comm_hook(module.process_group, fp16_compress_hook)
        return function(module, comm_hook_type)

    return register


def layers(store: Any) -> list[Any]:
    """The stores that ``store`` wraps, itself included: what keeps all of it alive."""
    found = []
    while store is not None:
        found.append(store)
        store = getattr(store, "underlying_store", None)
    return found


__all__ = ["layers", "serve"]
