"""What torch's profiler sees of a group: a record for each call, ``polyccl:all_reduce``, with the shapes of its inputs.

The names after the colon are c10d's own. A record spans the call: of one that blocks the whole operation, of an asynchronous one
its issue, since torch lets only C++ record what ends in another thread. `Comm`'s own trace has the operations from start to end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch import Tensor
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import _profiler_enabled

Words = ParamSpec("Words")
Given = TypeVar("Given")


class Named(Protocol):
    """A group, whose name is the first part of its records' names."""

    def name(self) -> str:
        """The backend's name."""


Group = TypeVar("Group", bound=Named)
Method = Callable[Concatenate[Group, Words], Given]


def recorded(call: str, inputs: int = 0) -> Callable[[Method[Group, Words, Given]], Method[Group, Words, Given]]:
    """Let a group's method leave a record named ``call`` while a profiler is on; ``inputs`` is the place of its input tensors."""

    def decorate(method: Method[Group, Words, Given]) -> Method[Group, Words, Given]:
        @wraps(method)
        def run(self: Group, /, *words: Words.args, **named: Words.kwargs) -> Given:
            if not _profiler_enabled():
                return method(self, *words, **named)
            tensors = _tensors(words[inputs]) if len(words) > inputs else []
            with _RecordFunctionFast(f"{self.name()}:{call}", tensors):
                return method(self, *words, **named)

        return run

    return decorate


def _tensors(given: Any) -> list[Tensor]:
    """The tensors in a tensor, a list, or a list of lists."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, (list, tuple)):
        return [tensor for each in given for tensor in _tensors(each)]
    return []


__all__ = ["recorded"]
