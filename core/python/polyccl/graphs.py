"""Keeping torch.compile out of PolyCCL: Dynamo breaks its graph where it meets a call, and traces nothing of it.

c10d's own groups are C++, which Dynamo cannot look into: it breaks the graph there, or maps the call to a functional collective
before it comes to the group. Groups in Python are more code to trace, and Dynamo fails in it: torch registers every process group
as an opaque object whose fields may not be read, and native calls get what only stands for a tensor.

`untraced` has the effect of ``torch.compiler.disable``, but marks the function instead of wrapping it: a call costs what it did,
and ``torch._dynamo``, which takes long to import, stays out until something is compiled. Both marks are torch's own and private.
torch has had them since 2.7, and they were tried with 2.13:

- ``_torchdynamo_disable`` on a function breaks the graph where Dynamo comes to its call in code that it traces.
- The execution strategy of its code lets a call between two graphs run as it stands, with all that it calls.

This module does not import torch. What is marked before torch is there gets its strategy from `torch_is_there`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeVar

Marked = TypeVar("Marked")

CONSTANTS = ("get_rank", "get_size")
"""Methods that stay traceable: Dynamo takes their results as constants, as it takes a process group's rank and size."""

_PACKAGE = str(Path(__file__).parent)

_waiting: list[CodeType] = []
"""Code that was marked before torch was there."""


def untraced(what: Marked) -> Marked:
    """Mark a function, or every function in a class's body but `CONSTANTS`. Returns ``what``, so that it serves as a decorator.

    What a class inherits is marked with the class that it comes from.
    """
    for function in _functions(what):
        function._torchdynamo_disable = True
        function._torchdynamo_disable_msg = "PolyCCL's calls are not traced"
        # The code of a wrapper may be everyone's, as contextlib's is.
        if function.__code__.co_filename.startswith(_PACKAGE):
            _waiting.append(function.__code__)
    torch_is_there()
    return what


def torch_is_there() -> None:
    """Give what was marked so far its strategy, if torch is loaded. May be called again."""
    eval_frame: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    if hasattr(eval_frame, "_FrameExecStrategy"):
        skip = eval_frame._FrameAction.SKIP
        while _waiting:
            eval_frame.set_code_exec_strategy(_waiting.pop(), eval_frame._FrameExecStrategy(skip, skip))


def _functions(what: Any) -> Iterator[Any]:
    """The function and those that it wraps, or the same of all that a class's body defines."""
    if isinstance(what, type):
        for name, each in vars(what).items():
            if name not in CONSTANTS and not isinstance(each, type):
                yield from _functions(each)
    elif isinstance(what, property):
        for each in (what.fget, what.fset, what.fdel):
            yield from _functions(each)
    elif isinstance(what, (staticmethod, classmethod)):
        yield from _functions(what.__func__)
    elif isinstance(what, FunctionType):
        yield what
        yield from _functions(getattr(what, "__wrapped__", None))


__all__ = ["CONSTANTS", "torch_is_there", "untraced"]
