"""What each rank does in the tests of calls: every call of torch.distributed, compared with what it must give."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed._functional_collectives as fc
from torch import distributed as dist

import polyccl


def me() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def row(value: float, n: int = 3) -> torch.Tensor:
    return torch.full((n,), float(value))


def equal(tensor: torch.Tensor, wanted: Any) -> None:
    torch.testing.assert_close(tensor, torch.as_tensor(wanted, dtype=tensor.dtype))


def reductions() -> None:
    rank, size = me()
    for op, wanted in {
        dist.ReduceOp.SUM: sum(range(1, size + 1)),
        dist.ReduceOp.AVG: (size + 1) / 2,
        dist.ReduceOp.MIN: 1,
        dist.ReduceOp.MAX: size,
        dist.ReduceOp.PRODUCT: torch.arange(1, size + 1).prod().item(),
    }.items():
        tensor = row(rank + 1)
        dist.all_reduce(tensor, op)
        equal(tensor, row(wanted))
    for op, wanted in {dist.ReduceOp.BOR: 2**size - 1, dist.ReduceOp.BAND: 0, dist.ReduceOp.BXOR: 2**size - 1}.items():
        bits = torch.tensor([1 << rank])
        dist.all_reduce(bits, op)
        equal(bits, [wanted])
    tensor = row(1)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    equal(tensor, row(size / 2))
    numbers = torch.full((2,), 1j * (rank + 1))
    dist.all_reduce(numbers)
    equal(numbers, torch.full((2,), 1j * sum(range(1, size + 1))))


def collectives() -> None:
    rank, size = me()
    tensor = row(rank)
    dist.broadcast(tensor, 1)
    equal(tensor, row(1))
    tensor = row(rank + 1)
    dist.reduce(tensor, 1)
    equal(tensor, row(sum(range(1, size + 1)) if rank == 1 else rank + 1))
    parts = [row(-1) for _ in range(size)]
    dist.all_gather(parts, row(rank))
    equal(torch.stack(parts), torch.stack([row(r) for r in range(size)]))
    uneven = [row(-1, r) for r in range(size)]
    dist.all_gather(uneven, row(rank, rank))
    equal(torch.cat(uneven), torch.cat([row(r, r) for r in range(size)]))
    gathered = [row(-1) for _ in range(size)] if rank == 1 else None
    dist.gather(row(rank), gathered, dst=1)
    if gathered is not None:
        equal(torch.stack(gathered), torch.stack([row(r) for r in range(size)]))
    mine = row(-1)
    dist.scatter(mine, [row(r) for r in range(size)] if rank == 1 else None, src=1)
    equal(mine, row(rank))
    inputs = [row(r + rank) for r in range(size)]
    before = [each.clone() for each in inputs]
    dist.reduce_scatter(mine, inputs)
    equal(mine, row(sum(rank + r for r in range(size))))
    equal(torch.stack(inputs), torch.stack(before))
    outputs = [row(-1) for _ in range(size)]
    dist.all_to_all(outputs, [row(10 * rank + r) for r in range(size)])
    equal(torch.stack(outputs), torch.stack([row(10 * r + rank) for r in range(size)]))
    dist.barrier()


def single_tensors() -> None:
    rank, size = me()
    names = {
        "all_gather": ["all_gather_into_tensor", "all_gather_single"],
        "scatter": ["reduce_scatter_tensor", "reduce_scatter_single"],
    }
    for name in filter(lambda name: hasattr(dist, name), names["all_gather"]):
        for shape in ((size * 2,), (size, 2)):
            whole = torch.zeros(*shape)
            getattr(dist, name)(whole, row(rank, 2))
            equal(whole.flatten(), torch.arange(size).repeat_interleave(2))
    for name in filter(lambda name: hasattr(dist, name), names["scatter"]):
        part = row(-1, 2)
        getattr(dist, name)(part, torch.arange(2.0 * size))
        equal(part, size * torch.tensor([2.0 * rank, 2.0 * rank + 1]))
    output = torch.zeros(size)
    dist.all_to_all_single(output, torch.arange(float(size)) + 10 * rank)
    equal(output, 10 * torch.arange(size) + rank)
    gives = [r + 1 for r in range(size)]
    gets = [rank + 1] * size
    output = torch.zeros(sum(gets), 2)
    dist.all_to_all_single(output, torch.full((sum(gives), 2), float(rank)), gets, gives)
    equal(output[:, 0], torch.arange(size).repeat_interleave(rank + 1))


def coalesced() -> None:
    rank, size = me()
    total = sum(range(1, size + 1))
    tensors = [row(rank + 1, n) for n in (1, 4, 2)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    equal(torch.cat(tensors), row(total, 7))
    tensors = [row(rank + 1, n) for n in (1, 4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    equal(torch.cat(tensors), row(total, 5))
    outputs = [torch.zeros(size * n) for n in (1, 2)]
    with dist._coalescing_manager():
        for n, output in enumerate(outputs, 1):
            dist.all_gather_into_tensor(output, row(rank, n))
    equal(outputs[1], torch.arange(size).repeat_interleave(2))
    parts = [row(-1, n) for n in (1, 2)]
    with dist._coalescing_manager():
        for n, part in enumerate(parts, 1):
            dist.reduce_scatter_tensor(part, torch.ones(size * n))
    equal(torch.cat(parts), row(size))
    group = dist.group.WORLD
    tensors = [row(rank + 1, n) for n in (1, 2)]
    group.allreduce_coalesced(tensors).wait()
    equal(torch.cat(tensors), row(total))
    lists = [[row(-1, n) for n in (1, 2)] for _ in range(size)]
    group.allgather_coalesced(lists, [row(rank, n) for n in (1, 2)]).wait()
    equal(torch.stack([torch.cat(each) for each in lists]), torch.stack([row(r) for r in range(size)]))
    tensor = row(rank + 1)
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
        sent = dist.isend(row(rank), (rank + 1) % size)
        received = row(-1)
        dist.irecv(received, (rank - 1) % size)
        assert sent is not None
    manager.wait()
    equal(received, row((rank - 1) % size))


def layouts() -> None:
    """Tensors that are not contiguous, and whose layout differs by rank, keep their meaning."""
    rank, size = me()
    values = torch.arange(6.0).reshape(2, 3)
    tensor = values.clone() if rank % 2 else values.t().contiguous().t()
    dist.all_reduce(tensor)
    equal(tensor, size * values)
    work = dist.broadcast(tensor.t(), 0, async_op=True)
    work.get_future().wait()
    equal(tensor, size * values)
    parts = [torch.zeros(3, 2).t() for _ in range(size)]
    source = values.t()[:, ::1].t()
    dist.all_gather(parts, source + rank if rank % 2 else (values + rank).t().contiguous().t())
    equal(torch.stack(parts), torch.stack([values + r for r in range(size)]))
    inputs = [(values + r).t().contiguous().t() for r in range(size)]
    part = torch.zeros(3, 2).t()
    dist.reduce_scatter(part, inputs)
    equal(part, size * (values + rank))
    strided = torch.zeros(8)[::2]
    if rank == 0:
        dist.send(torch.arange(8.0)[::2], 1)
    elif rank == 1:
        dist.recv(strided, 0)
        equal(strided, [0, 2, 4, 6])
    frozen = row(rank + 1).requires_grad_()
    dist.all_reduce(frozen.detach())
    equal(frozen.detach(), row(sum(range(1, size + 1))))


def sparse() -> None:
    rank, size = me()
    tensor = torch.sparse_coo_tensor([[rank, size]], [1.0, 2.0], (size + 2,), check_invariants=True)
    dist.all_reduce(tensor)
    equal(tensor.to_dense(), [1.0] * size + [2.0 * size, 0.0])
    assert "SUM" in refused(lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX), polyccl.UnsupportedOperation)


def messages() -> None:
    rank, size = me()
    if rank == 0:
        works = [dist.isend(row(tag, n), 1, tag=tag) for tag, n in ((1, 3), (2, 100_000), (3, 3), (1, 2))]
        for work in works:
            work.wait()
    elif rank == 1:
        for tag, n in ((3, 3), (2, 100_000), (1, 3), (1, 2)):  # tags overtake, messages of one tag do not
            tensor = row(-1, n)
            dist.recv(tensor, 0, tag=tag)
            equal(tensor, row(tag, n))
    received = row(-1)
    operations = [dist.P2POp(dist.isend, row(rank), (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    equal(received, row((rank - 1) % size))
    assert "copy the tensor" in refused(lambda: dist.isend(row(7), rank))


def batches() -> None:
    """All ranks send first: one by one, a device's library would run no receive before the sends were over."""
    rank, size = me()
    for n in (1, 300_000):
        given, taken, copied = row(rank, n), row(-1, n), row(-1, 2 * n)[::2]
        after, before = (rank + 1) % size, (rank - 1) % size
        operations = [dist.P2POp(dist.isend, given, after), dist.P2POp(dist.isend, given + 1, after)]
        operations += [dist.P2POp(dist.irecv, taken, before), dist.P2POp(dist.irecv, copied, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        equal(taken, row(before, n))
        equal(copied, row(before + 1, n))


def from_anyone() -> None:
    rank, size = me()
    if rank == 0:
        seen = []
        for _ in range(size - 1):
            tensor = row(-1)
            seen.append(dist.recv(tensor, tag=5))
            equal(tensor, row(seen[-1]))
        assert sorted(seen) == list(range(1, size))
        first, second = row(-1), row(-1)
        works = [dist.irecv(first, tag=6), dist.irecv(second, tag=6)]
        futures = [work.get_future() for work in works]
        dist.barrier()
        for future in futures:
            future.wait()
        equal(torch.cat([first, second]), torch.cat([row(1), row(2)]))
        assert [work._source_rank() for work in works] == [1, 1]
    else:
        dist.send(row(rank), 0, tag=5)
        dist.barrier()
        if rank == 1:
            dist.send(row(1), 0, tag=6)
            dist.send(row(2), 0, tag=6)


def objects() -> None:
    rank, size = me()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "long": "x" * rank})
    assert [each["rank"] for each in gathered] == list(range(size))
    shared: list[Any] = [rank, {"a": torch.ones(2)}] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    assert shared[0] == 1
    target: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(("mine", rank), target, dst=0)
    assert target is None or target == [("mine", r) for r in range(size)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list(["hello"], 1)
    elif rank == 1:
        heard: list[Any] = [None]
        dist.recv_object_list(heard, 0)
        assert heard == ["hello"]


def works() -> None:
    rank, size = me()
    total = row(sum(range(1, size + 1)))
    tensor = row(rank + 1)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    equal(doubled.wait(), 2 * total)
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    assert work.wait()
    assert work.wait(timedelta(seconds=5))
    assert work.get_future_result().wait() == 0
    many = [dist.all_reduce(row(rank), async_op=True).get_future() for _ in range(50)]
    torch.futures.wait_all(many)
    before = dist.group.WORLD._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(tensor)
    assert dist.group.WORLD._get_sequence_number_for_group() == before + 3
    dist.barrier()
    if rank == 0:
        late = dist.irecv(tensor, 1)
        began = time.monotonic()
        try:
            late.wait(timedelta(milliseconds=50))
        except polyccl.CommTimeout:
            assert time.monotonic() - began < 5
        else:
            raise AssertionError("the wait had no timeout")
        assert not late.is_completed()
        dist.send(row(0, 1), 1)
        late.wait()
        equal(tensor, row(9))
    elif rank == 1:
        dist.recv(row(0, 1), 0)
        dist.send(row(9), 0)


def functional() -> None:
    rank, size = me()
    group = dist.group.WORLD
    equal(fc.all_reduce(row(rank), "sum", group), row(sum(range(size))))
    equal(fc.all_gather_single(row(rank), 0, group), torch.arange(size).repeat_interleave(3))
    equal(fc.reduce_scatter_single(torch.ones(size * 2), "avg", 0, group), row(1, 2))
    equal(fc.all_to_all_single(torch.full((size,), float(rank)), None, None, group), torch.arange(size))
    equal(fc.broadcast(row(rank), 1, group), row(1))
    first, second = fc.all_reduce_coalesced([row(rank), row(1)], "sum", group)
    equal(torch.cat([first, second]), torch.cat([row(sum(range(size))), row(size)]))


def groups() -> None:
    rank, size = me()
    group = dist.group.WORLD
    assert dist.get_backend() == "polyccl"
    assert group.name() == "polyccl"
    assert group.group_name == dist.distributed_c10d._get_process_group_name(group)
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=50), group_desc="pair")
    if rank < 2:
        tensor = row(rank)
        dist.all_reduce(tensor, group=pair)
        equal(tensor, row(1))
        assert pair.get_comm().get_options().timeout == 50
        assert pair.group_desc == "pair"
        # The options of the default group hold here too: the same islands.
        labels = [
            group.get_comm().island_labels[next(i for i, ranks in enumerate(group.get_comm().islands) if r in ranks)]
            for r in (0, 1)
        ]
        assert (len(pair.get_comm().islands) > 1) == (labels[0] != labels[1])
    else:
        assert pair == dist.GroupMember.NON_GROUP_MEMBER
    half = list(range(rank % 2, size, 2))
    part = group.split_group(half, group_name=f"half{rank % 2}")
    assert part.size() == len(half)
    tensor = row(rank)
    part.allreduce(tensor).wait()
    equal(tensor, row(sum(half)))
    assert (group.split_group([0]) is None) == (rank != 0)
    for call in (lambda: group.shrink([0]), lambda: group.merge_remote_group(None, 1)):
        try:
            call()
        except polyccl.UnsupportedOperation:
            continue
        raise AssertionError("an unsupported call was taken")
    group.set_timeout(timedelta(seconds=20))
    if rank < 2:
        dist.destroy_process_group(pair)
    dist.all_reduce(tensor)


def refused(call: Any, error: type[Exception] | tuple[type[Exception], ...] = polyccl.InvalidArgument) -> str:
    try:
        call()
    except error as raised:
        return str(raised)
    raise AssertionError("it was taken")


def refusals() -> None:
    """What is refused on all ranks breaks nothing."""
    size = dist.get_world_size()
    group = dist.group.WORLD
    assert "coalesced" in refused(lambda: group.allreduce([row(0), row(0)]))
    refused(lambda: dist.new_group(pg_options=object()))
    # torch makes its own part of this one first, which ranks that are refused sooner may tear down: that fails as well.
    refused(lambda: dist.new_group(backend="cpu:gloo,cuda:polyccl"), (polyccl.InvalidArgument, RuntimeError))
    refused(lambda: dist.new_group(pg_options={"bakend": "gloo"}))
    tensor = row(1)
    dist.all_reduce(tensor)
    equal(tensor, row(size))


def missing_rank() -> None:
    rank, size = me()
    group = dist.group.WORLD
    for _ in range(3):
        group.monitored_barrier(timedelta(seconds=20))
    kept = group.get_comm()._group.store
    for key in ("1/1", "2/1", "3/1", "1/verdict", "2/verdict"):  # it leaves no more than its last word in the store
        refused(lambda key=key: kept.get(f"monitored_barrier/{key}", 0), polyccl.CommTimeout)  # type: ignore[misc]
    if rank != size - 1:
        text = refused(lambda: group.monitored_barrier(timedelta(milliseconds=300), True), polyccl.CommTimeout)
        assert f"Rank {size - 1} failed to pass monitoredBarrier in 300 ms" in text
    dist.barrier()


def aborted() -> str:
    """One rank aborts; the others' pending call ends, and says so."""
    rank, _ = me()
    group = dist.group.WORLD
    if rank == 0:
        group.abort()
        return "Aborted"
    try:
        dist.all_reduce(row(1))
    except polyccl.CommError as error:
        return type(error).__name__
    raise AssertionError("the call ended well")
