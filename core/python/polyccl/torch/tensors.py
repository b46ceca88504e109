"""Tensors on their way into a call: what a communicator cannot take as it is travels as a copy.

Communicators take contiguous tensors on one device. Here, inputs that are not become copies, and outputs that are not are received
into copies, which `Passage.finish` brings home once the operation is done; so memory layouts may differ by rank, as long as the
shapes agree. Inputs are never changed. Outputs that a result cannot be written to are refused before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from ..errors import InvalidArgument
from .overlap import first_overlapping, overlaps_itself

if TYPE_CHECKING:
    from ..comm import Comm


class Passage:
    """The copies of one ``call`` on ``comm``, whose device is ``device``; ``on_host`` says whether that is host memory."""

    __slots__ = ("_call", "_comm", "_device", "_home", "_on_host")

    def __init__(self, comm: Comm, call: str, device: torch.device, on_host: bool) -> None:
        self._comm = comm
        self._call = call
        self._device = device
        self._on_host = on_host
        self._home: list[tuple[torch.Tensor, torch.Tensor]] = []

    def input(self, tensor: torch.Tensor, name: str = "input") -> torch.Tensor:
        """Return ``tensor``, or a copy with the same values."""
        if self._is_here(tensor):
            return tensor
        return self._copy(tensor, name)

    def output(self, tensor: torch.Tensor, name: str = "output") -> torch.Tensor:
        """Return ``tensor``, or memory for it whose values come home at the end."""
        if self._is_here(tensor):
            return tensor
        self._require_writable(tensor, name)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device if self._is_elsewhere(tensor) else None)
        self._home.append((tensor, copy))
        return copy

    def both(self, tensor: torch.Tensor, name: str = "tensor") -> torch.Tensor:
        """Return ``tensor``, or a copy with its values, which come home at the end."""
        if self._is_here(tensor):
            return tensor
        self._require_writable(tensor, name)
        copy = self._copy(tensor, name)
        self._home.append((tensor, copy))
        return copy

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`input` of each."""
        return [self.input(tensor, f"input {i}") for i, tensor in enumerate(tensors)]

    def outputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`output` of each; none may share memory with another."""
        taken = [self.output(tensor, f"output {i}") for i, tensor in enumerate(tensors)]
        if self._home and (shared := first_overlapping(tensors)) is not None:
            self._refuse(f"output {shared} shares memory with another output; give each its own")
        return taken

    @property
    def finish(self) -> Callable[[], None] | None:
        """Brings the results home; None if all are there already."""
        return self._bring_home if self._home else None

    def _bring_home(self) -> None:
        for tensor, copy in self._home:
            # The thread may be another than that of the call, which was in inference mode.
            with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
                tensor.copy_(copy)
        self._home.clear()

    def _copy(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        self._require_dense(tensor, name)
        plain = tensor.detach()
        if self._is_elsewhere(plain):
            plain = plain.to(self._device)
        return plain.clone(memory_format=torch.contiguous_format) if not plain.is_contiguous() else plain

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.is_contiguous() and tensor.is_cpu is self._on_host

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu is not self._on_host and not tensor.is_meta

    # ---- what is refused ----------------------------------------------------------------------------------------------------

    def _require_dense(self, tensor: torch.Tensor, name: str) -> None:
        if tensor.layout is not torch.strided:
            self._refuse(f"{name} has layout {tensor.layout}, and only all_reduce takes sparse tensors; use .to_dense()")

    def _require_writable(self, tensor: torch.Tensor, name: str) -> None:
        self._require_dense(tensor, name)
        if overlaps_itself(tensor):
            self._refuse(
                f"{name} has elements that share memory (shape {tuple(tensor.shape)}, strides {tensor.stride()}), so that no "
                "result can be written to it; pass memory of its own, e.g. its .contiguous()"
            )
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            self._refuse(f"{name} was made in inference mode and can be written to only there; call this in inference mode")

    def _refuse(self, why: str) -> NoReturn:
        if self._call not in ("send", "recv"):  # a message concerns no one but its peer
            self._comm._native.announce_refusal()
        raise InvalidArgument(f"{self._call} on communicator '{self._comm.get_name()}': {why}")


__all__ = ["Passage"]
