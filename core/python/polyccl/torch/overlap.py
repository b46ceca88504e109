"""Which elements of strided tensors share memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return true if two elements of ``tensor`` share memory, as those of an expanded one do."""
    reach = 0  # of the dimensions so far, from the narrowest stride on
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride <= reach:
                return _is_crowded(tensor)
            reach += stride * (size - 1)
    return False


def _is_crowded(tensor: torch.Tensor) -> bool:
    """Count the places in memory: the answer for strides that do not nest."""
    if tensor.numel() == 0:
        return False
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return True
    places = torch.zeros(_extent(tensor), dtype=torch.bool)
    places.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return bool(places.sum() < tensor.numel())


def first_overlapping(tensors: Sequence[torch.Tensor]) -> int | None:
    """Return the place in ``tensors`` of one that shares memory with one before it in memory; None if there is none.

    Exact: the columns of a matrix share nothing. Costs a pass over the memory of tensors whose extents overlap.
    """
    group: list[int] = []
    end = 0
    for i in sorted((i for i, tensor in enumerate(tensors) if tensor.numel()), key=lambda i: tensors[i].data_ptr()):
        if tensors[i].data_ptr() >= end:
            if (found := _first_met(tensors, group)) is not None:
                return found
            group = []
        group.append(i)
        end = max(end, tensors[i].data_ptr() + _extent(tensors[i]) * tensors[i].element_size())
    return _first_met(tensors, group)


def _first_met(tensors: Sequence[torch.Tensor], group: Sequence[int]) -> int | None:
    """Mark the places of the ``group``, in the order of their memory, and return the first that finds a mark."""
    if len(group) < 2:
        return None
    begin = tensors[group[0]].data_ptr()
    offsets = {i: tensors[i].data_ptr() - begin for i in group}
    unit = math.gcd(*offsets.values(), *(tensors[i].element_size() for i in group))  # bytes
    end = max(offsets[i] + _extent(tensors[i]) * tensors[i].element_size() for i in group)
    places = torch.zeros(end // unit, dtype=torch.bool)
    for i in group:
        units = tensors[i].element_size() // unit
        strides = [stride * units for stride in tensors[i].stride()]
        mine = places.as_strided((*tensors[i].shape, units), (*strides, 1), offsets[i] // unit)
        if mine.any():
            return i
        mine.fill_(True)
    return None


def _extent(tensor: torch.Tensor) -> int:
    """The number of elements from the first to the last in memory, those between included."""
    between: int = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return 1 + between


__all__ = ["first_overlapping", "overlaps_itself"]
