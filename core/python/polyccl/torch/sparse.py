"""all_reduce of sparse tensors: every rank gathers all ranks' entries and sums them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from ..errors import InvalidArgument, UnsupportedOperation
from ..reduce_op import ReduceOp
from ..spec import Reduction

if TYPE_CHECKING:
    from ..comm import Comm


def all_reduce(comm: Comm, tensor: torch.Tensor, op: ReduceOp, timeout: timedelta | None) -> None:
    """Replace the sparse (COO) ``tensor`` by the sum over all ranks, which have other entries but the same shape. Blocks.

    Raises UnsupportedOperation for reductions but SUM, InvalidArgument where shapes or sparse dimensions differ.
    """
    if op.type is not Reduction.SUM:
        raise UnsupportedOperation(f"all_reduce of a sparse tensor: SUM is there, {op} is not; use .to_dense()")
    own = tensor.detach().coalesce()
    indices, values = own.indices().contiguous(), own.values().contiguous()
    shape = [own.sparse_dim(), *own.shape]
    facts = torch.tensor([len(shape), *shape, values.shape[0]], dtype=torch.int64, device=values.device)
    # Numbers of dimensions first: the rest of the facts differs in length with them.
    lengths = _gather(comm, facts[:1], timeout).flatten()
    if any(length != facts[0] for length in lengths):
        raise InvalidArgument(f"all_reduce of a sparse tensor: this rank's has {own.dim()} dimensions, another rank's not")
    table = _gather(comm, facts, timeout)
    if any(not torch.equal(row[:-1], facts[:-1]) for row in table):
        raise InvalidArgument(f"all_reduce of a sparse tensor: this rank's shape is {tuple(own.shape)}, another rank's not")
    entries = [int(row[-1]) for row in table]
    all_indices = [torch.empty(indices.shape[0], n, dtype=indices.dtype, device=indices.device) for n in entries]
    all_values = [torch.empty(n, *values.shape[1:], dtype=values.dtype, device=values.device) for n in entries]
    comm.all_gather_v(all_indices, indices, timeout=timeout)
    comm.all_gather_v(all_values, values, timeout=timeout)
    total = torch.sparse_coo_tensor(torch.cat(all_indices, 1), torch.cat(all_values), own.shape, check_invariants=False)
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def _gather(comm: Comm, row: torch.Tensor, timeout: timedelta | None) -> torch.Tensor:
    table = torch.empty(comm.get_size(), row.numel(), dtype=row.dtype, device=row.device)
    comm.all_gather_single(table, row.contiguous(), timeout=timeout)
    return table


__all__ = ["all_reduce"]
