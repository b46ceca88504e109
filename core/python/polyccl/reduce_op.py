"""How operands are combined: `ReduceOp`, with torchcomms' names."""

from __future__ import annotations

from typing import Any, ClassVar

from . import arguments
from .errors import InvalidArgument
from .spec import Reduction


class ReduceOp:
    """A reduction. Use the constants, or `PREMUL_SUM`.

    SUM, PRODUCT, MIN and MAX take every integer and float type; bool counts SUM and MAX as *or*, PRODUCT and MIN as *and*. MIN
    and MAX let NaN win. BAND, BOR and BXOR take integers and bool. AVG is the sum divided by the number of ranks: float16 is
    scaled before the sum, so that it does not overflow, integers are divided with truncation.
    """

    __slots__ = ("code", "factor", "type")

    SUM: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]

    def __init__(self, type: Reduction, factor: Any = None) -> None:
        if not isinstance(type, Reduction) or type is Reduction.NONE:
            arguments.refuse("type", type, "a Reduction, e.g. polyccl.Reduction.SUM")
        self.type = type
        self.code = int(self.type)
        self.factor = factor
        if (self.type is Reduction.PREMUL_SUM) != (factor is not None):
            raise InvalidArgument("a factor belongs to PREMUL_SUM, and only to it: ReduceOp.PREMUL_SUM(factor)")

    @classmethod
    def PREMUL_SUM(cls, factor: Any) -> ReduceOp:
        """The sum of each rank's operand times that rank's ``factor``: a number, or one element of the operand's dtype.

        Factors may differ by rank. For float16, bfloat16, float32 and float64.
        """
        return cls(Reduction.PREMUL_SUM, factor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReduceOp) and self.type is other.type and self.factor is other.factor

    def __hash__(self) -> int:
        return hash((self.type, id(self.factor)))

    def __repr__(self) -> str:
        return f"ReduceOp.{self.type.name}" + (f"({self.factor!r})" if self.factor is not None else "")


for _reduction in Reduction:
    if _reduction not in (Reduction.NONE, Reduction.PREMUL_SUM):
        setattr(ReduceOp, _reduction.name, ReduceOp(_reduction))

__all__ = ["ReduceOp"]
