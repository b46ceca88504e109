"""What the calls of c10d come as: several forms of arguments, options objects, c10d's reductions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d

from .. import arguments
from ..errors import InvalidArgument
from ..reduce_op import ReduceOp

Tensors = Sequence[Tensor]

_REDUCTIONS: dict[int, ReduceOp] = {
    hash(c10d.ReduceOp.SUM): ReduceOp.SUM,
    hash(c10d.ReduceOp.AVG): ReduceOp.AVG,
    hash(c10d.ReduceOp.PRODUCT): ReduceOp.PRODUCT,
    hash(c10d.ReduceOp.MIN): ReduceOp.MIN,
    hash(c10d.ReduceOp.MAX): ReduceOp.MAX,
    hash(c10d.ReduceOp.BAND): ReduceOp.BAND,
    hash(c10d.ReduceOp.BOR): ReduceOp.BOR,
    hash(c10d.ReduceOp.BXOR): ReduceOp.BXOR,
}
_THEIRS = c10d.ReduceOp, c10d.ReduceOp.RedOpType
_PREMUL_SUM = hash(c10d.ReduceOp.PREMUL_SUM)


def reduction(op: Any) -> ReduceOp:
    """PolyCCL's reduction for one of c10d (or for PolyCCL's own)."""
    if isinstance(op, ReduceOp):
        return op
    code = hash(op) if isinstance(op, _THEIRS) else None  # the number
    if code == _PREMUL_SUM and isinstance(op, c10d.ReduceOp):
        return ReduceOp.PREMUL_SUM(op.__getstate__()[1])
    if code not in _REDUCTIONS:
        arguments.refuse("op", op, "dist.ReduceOp.SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or a PREMUL_SUM with its factor")
    return _REDUCTIONS[code]


def one(tensors: Sequence[Any], what: str) -> Any:
    """The only entry of a list that c10d made for several devices per process."""
    if len(tensors) != 1:
        raise InvalidArgument(f"{what}: one tensor is wanted, and {len(tensors)} were given; the coalesced forms take any number")
    return tensors[0]


class Gathered(list[Tensor]):
    """Tensors by rank. torch's quantization hooks index them as if they were stacked, as those of NCCL's futures are."""

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, tuple):
            return super().__getitem__(place[0])[place[1:]]
        return super().__getitem__(place)


def uneven(tensors: Tensors) -> bool:
    """Whether the tensors differ in their numbers of elements."""
    return len({tensor.numel() for tensor in tensors}) > 1


def listed(tensors: Any) -> Any:
    """A list of tensors: the one given, or one of the tensor given."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def inner(lists: Any, what: str) -> Tensors:
    """The list of tensors in c10d's list of such lists, or the list itself."""
    tensors: Tensors = lists if lists and isinstance(lists[0], Tensor) else one(lists, what)
    return tensors


def pairs(outputs: Tensors, inputs: Tensors, what: str) -> Iterable[tuple[Tensor, Tensor]]:
    """Outputs with their inputs. Raises InvalidArgument where there is not one of each."""
    if len(outputs) != len(inputs):
        raise InvalidArgument(f"{what}: {len(outputs)} outputs and {len(inputs)} inputs; one of each is wanted for every call")
    return zip(outputs, inputs, strict=True)


def terms(kind: type[Any], given: Any, timeout: timedelta | None, **fields: Any) -> Any:
    """c10d's options object: the one given, or one with the fields of the shorter calls, whose first stands in ``given``."""
    if isinstance(given, kind):
        return given
    opts = kind()
    for name, value in fields.items():
        value = given if value is None else value
        given = None
        if value is not None:
            setattr(opts, name, value)
    if isinstance(given, timedelta):
        timeout = given
    if timeout is not None:
        opts.timeout = timeout
    return opts


__all__ = ["Gathered", "Tensors", "inner", "listed", "one", "pairs", "reduction", "terms", "uneven"]
