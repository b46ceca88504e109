"""Tensors on their way into a call: what a communicator cannot take as it is travels as a copy.

Communicators take contiguous tensors on one device. Here, inputs that are not become copies, and outputs that are not are received
into copies, which `Passage.finish` brings home once the operation is done; so memory layouts may differ by rank, as long as the
shapes agree. Inputs are never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import InvalidArgument


class Passage:
    """The copies of one call. ``device`` is the communicator's, ``on_host`` whether that is host memory."""

    __slots__ = ("_device", "_home", "_on_host")

    def __init__(self, device: torch.device, on_host: bool) -> None:
        self._device = device
        self._on_host = on_host
        self._home: list[tuple[torch.Tensor, torch.Tensor]] = []

    def input(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, or a copy with the same values."""
        if tensor.is_contiguous() and tensor.is_cpu is self._on_host:
            return tensor
        return self._copy(tensor)

    def output(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, or memory for it whose values come home at the end."""
        if tensor.is_contiguous() and tensor.is_cpu is self._on_host:
            return tensor
        _require_dense(tensor)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device if _is_elsewhere(tensor, self._on_host) else None)
        self._home.append((tensor, copy))
        return copy

    def both(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, or a copy with its values, which come home at the end."""
        if tensor.is_contiguous() and tensor.is_cpu is self._on_host:
            return tensor
        copy = self._copy(tensor)
        self._home.append((tensor, copy))
        return copy

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`input` of each."""
        return [self.input(tensor) for tensor in tensors]

    def outputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`output` of each."""
        return [self.output(tensor) for tensor in tensors]

    @property
    def finish(self) -> Callable[[], None] | None:
        """Brings the results home; None where all are there already."""
        return self._bring_home if self._home else None

    def _bring_home(self) -> None:
        for tensor, copy in self._home:
            tensor.copy_(copy)
        self._home.clear()

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        _require_dense(tensor)
        plain = tensor.detach()
        if _is_elsewhere(plain, self._on_host):
            plain = plain.to(self._device)
        return plain.clone(memory_format=torch.contiguous_format) if not plain.is_contiguous() else plain


def _is_elsewhere(tensor: torch.Tensor, on_host: bool) -> bool:
    return tensor.is_cpu is not on_host and not tensor.is_meta


def _require_dense(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise InvalidArgument(
            f"a tensor of layout {tensor.layout} is given, and only all_reduce takes sparse ones; use .to_dense()"
        )


__all__ = ["Passage"]
