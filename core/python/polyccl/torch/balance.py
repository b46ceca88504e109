"""Ranks of unlike speed: gradients weighed by the batch that each rank did, and batch sizes that end at the same time.

DDP averages gradients over ranks, which is the gradient of the whole batch only where all ranks' batches are equally large. With
`Balance`, rank r's gradient counts by its share b_r / (b_0 + b_1 + ...) of the batch::

    ddp = DistributedDataParallel(model)
    balance = polyccl.torch.balance(ddp, batch_size=24)
    for _ in range(steps):
        with balance.step(len(batch)):
            loss(ddp(batch), target).backward()   # loss: the mean over this rank's batch
        optimizer.step()
    balance.suggest()   # rows for each rank, by the times measured so far
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..comm import Comm
from ..errors import InvalidArgument
from ..graphs import untraced
from ..reduce_op import ReduceOp
from .process_group import ProcessGroup


@untraced
class Balance:
    """Weighs a DDP module's gradients, and measures its steps. Made by `balance`.

    ``group`` is the module's. The sums run as PREMUL_SUM, with a factor of each rank's own: the library scales where it can.
    """

    def __init__(self, group: ProcessGroup, batch_size: int) -> None:
        self._group = group
        self._comm: Comm = group.get_comm()
        self._batch_size = self._require(batch_size)
        self._share = 0.0
        self._seconds = 0.0
        self._rows = 0
        self._last_bucket = 0.0

    @contextmanager
    def step(self, batch_size: int | None = None) -> Iterator[None]:
        """Around a forward and backward pass over ``batch_size`` samples of this rank (None: as before). Collective.

        Ranks without samples give 0, and a loss of value 0 that reaches all parameters. Raises InvalidArgument where no rank has
        samples.
        """
        if batch_size is not None:
            self._batch_size = self._require(batch_size)
        own = torch.tensor([self._batch_size], dtype=torch.int64)
        total = own.clone()
        self._group.allreduce([total]).wait()
        if int(total) == 0:
            raise InvalidArgument("balance: no rank has samples in this step")
        self._share = self._batch_size / int(total)
        began, self._last_bucket = time.perf_counter(), 0.0
        yield
        # What a rank takes by itself ends with its last gradient; after that it waits for the others.
        ended = self._last_bucket or time.perf_counter()
        if self._batch_size:
            self._seconds += ended - began
            self._rows += self._batch_size

    def reduce(self, bucket: Any) -> Any:
        """What DDP's communication hook does: a Future of the weighed sum of the bucket's gradients, shape (n,)."""
        self._last_bucket = time.perf_counter()
        gradients = bucket.buffer()
        part = self._comm.all_reduce(gradients, ReduceOp.PREMUL_SUM(self._share), True)
        return self._group._work((part,), [gradients]).get_future().then(lambda future: future.value()[0])

    def suggest(self, total: int | None = None, smallest: int = 1) -> list[int]:
        """Batch sizes by rank that let all ranks end at the same time, by the times measured so far. Collective; blocks.

        They add up to ``total`` (None: what the ranks' present sizes add up to), are at least ``smallest``, and are the same on
        all ranks. A rank without measured steps gets the ranks' mean speed. Starts the measurement anew.
        """
        speed = self._rows / self._seconds if self._seconds else 0.0
        table = torch.empty(self._group.size(), 2, dtype=torch.float64)
        own = torch.tensor([speed, self._batch_size], dtype=torch.float64)
        self._group.all_gather_single(table, own).wait()
        self._seconds, self._rows = 0.0, 0
        return shares(table[:, 0].tolist(), int(table[:, 1].sum()) if total is None else total, smallest)

    def _require(self, batch_size: int) -> int:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 0:
            raise InvalidArgument(f"balance: a batch size is a whole number of samples, at least 0, and not {batch_size!r}")
        return batch_size


def shares(speeds: Sequence[float], total: int, smallest: int = 1) -> list[int]:
    """``total`` split in proportion to ``speeds`` into whole numbers of at least ``smallest``, by largest remainder.

    A speed of 0 is unknown, and stands for the mean of the others. Raises InvalidArgument where ``total`` is too small.
    """
    if total < smallest * len(speeds):
        raise InvalidArgument(f"balance: {total} samples are too few for {len(speeds)} ranks with at least {smallest} each")
    known = [speed for speed in speeds if speed > 0]
    mean = sum(known) / len(known) if known else 1.0
    weights = [speed if speed > 0 else mean for speed in speeds]
    spare = total - smallest * len(weights)
    exact = [max(0.0, total * weight / sum(weights) - smallest) for weight in weights]
    exact = [spare * part / sum(exact) if sum(exact) else spare / len(exact) for part in exact]
    result = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda rank: (result[rank] - exact[rank], rank))
    for rank in by_remainder[: spare - sum(result)]:
        result[rank] += 1
    return [smallest + part for part in result]


def balance(module: Any, batch_size: int) -> Balance:
    """Let ``module``, a DistributedDataParallel over a PolyCCL group, weigh gradients by each rank's batch size.

    Registers a communication hook, so that the module must not have one. Raises InvalidArgument where the module's group is
    another backend's.
    """
    group = getattr(module, "process_group", None)
    if not isinstance(module, torch.nn.parallel.DistributedDataParallel) or not isinstance(group, ProcessGroup):
        raise InvalidArgument("balance: a DistributedDataParallel over a process group of PolyCCL is wanted")
    result = Balance(group, batch_size)
    # torch reads a hook's annotations, and not as text: this one has none.
    module.register_comm_hook(None, lambda state, bucket: result.reduce(bucket))
    return result


__all__ = ["Balance", "balance", "shares"]
