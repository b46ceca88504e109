"""What each rank does in the tests of works and futures."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

import polyccl
from polyccl.torch.create import make_group

from .calls import equal, me, row

DEADLINE = 30.0


def started(tensor: Tensor) -> Any:
    return dist.all_reduce(tensor, async_op=True)


def settled(future: Any) -> Any:
    """A future's value; raises after the deadline, where its own wait would stand for ever."""
    over = threading.Event()
    future.add_done_callback(lambda _: over.set())
    assert over.wait(DEADLINE), "the future does not complete"
    return future.wait()


# ---- callbacks that wait ------------------------------------------------------------------------------------------------------


def nested() -> None:
    """A callback waits for the future of a collective that it has started, and this one's callback for another."""
    _, size = me()

    def deeper(future: Any) -> Tensor:
        found: Tensor = future.value()[0]
        if found[0] >= size**4:
            return found
        return started(found).get_future().then(deeper).wait()  # type: ignore[no-any-return]

    equal(settled(started(row(1, 100_000)).get_future().then(deeper)), row(size**4, 100_000))


def crosswise() -> None:
    """A callback waits for a later future of the same group, and whatever was there before is done."""
    _, size = me()
    ready = threading.Event()
    later: list[Any] = []

    def wait_for_later(future: Any) -> Tensor:
        assert ready.wait(DEADLINE)
        second: Tensor = later[0].wait()[0]
        return future.value()[0] + second  # type: ignore[no-any-return]

    total = started(row(1)).get_future().then(wait_for_later)
    later.append(started(row(2)).get_future())
    ready.set()
    equal(settled(total), row(3 * size))


def in_order() -> None:
    """Callbacks of a group run in the order of its calls."""
    seen: list[int] = []
    futures = [started(row(i)).get_future().then(lambda _, i=i: seen.append(i)) for i in range(100)]
    for future in futures:
        settled(future)
    assert seen == list(range(100))


def blocking_calls() -> None:
    """A callback makes calls of every kind that block."""
    rank, size = me()

    def calls(future: Any) -> Tensor:
        tensor: Tensor = future.value()[0]
        dist.all_reduce(tensor)
        started(tensor).wait()
        dist.barrier()
        if rank == 0:
            dist.send(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
        return tensor

    equal(settled(started(row(1)).get_future().then(calls)), row(size**3))


# ---- errors ---------------------------------------------------------------------------------------------------------------------


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as found:
        call()
    return str(found.value)


def left_by_one() -> bool:
    """Let rank 1 abort once the others have come here. Whether this is one of those."""
    rank, size = me()
    group: Any = dist.group.WORLD
    store = group.get_group_store()
    if rank == 1:
        store.wait([f"here/{other}" for other in range(size) if other != 1], timedelta(seconds=DEADLINE))
        group.abort()
        return False
    store.set(f"here/{rank}", "")
    return True


def failed() -> str:
    """One rank leaves; the others' works and futures say so, however often they are asked, in C++ too."""
    settled(started(row(1)).get_future())
    dist.barrier()
    work = started(row(1)) if dist.get_rank() != 1 else None
    if not left_by_one():
        return ""
    pending = [work.get_future(), work.get_future().then(lambda future: future.value())]
    texts = [raised(lambda future=future: settled(future)) for future in pending]
    said = raised(work.wait)
    assert raised(work.wait) == said
    assert work.is_completed()
    assert not work.is_success()
    error = work.exception()
    assert isinstance(error, polyccl.CommError)
    assert str(error) == said
    assert work.get_future_result().wait() == int(c10d.WorkResult.COMM_ERROR)
    texts.append(raised(lambda: settled(work.get_future())))
    texts.append(raised(lambda: work.for_reading().get_future().wait()))
    assert all(type(error).__name__ in text for text in texts)
    assert "At:" not in texts[0]  # a stack of torch's and ours says nothing to a user
    texts.append(raised(work.for_waiting().wait))
    assert all(said in text for text in texts)
    return said


def failed_in_backward() -> str:
    """A rank leaves while torch's reducer waits for its gradients: the reducer raises, and the process goes on."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    if dist.get_rank() == 1:
        left_by_one()
        return ""
    model.module.weight.register_hook(lambda _: left_by_one() and None)
    return raised(loss.backward)


# ---- halves ---------------------------------------------------------------------------------------------------------------------


def kept_by_torch() -> None:
    """What only C++ holds on to does all that it did."""
    _, size = me()
    group: Any = dist.group.WORLD
    tensor = row(1, 100_000)
    c10d._register_work(tensor, started(tensor))
    gc.collect()
    equal(torch.ops._c10d_functional.wait_tensor(tensor), row(size, 100_000))
    boxed = started(tensor).boxed()
    gc.collect()
    assert c10d.Work.unbox(boxed).wait()
    equal(tensor, row(size**2, 100_000))
    boxed = group.split_group(list(range(size))).boxed()
    gc.collect()
    again = c10d.ProcessGroup.unbox(boxed)
    tensor = row(1)
    again.allreduce([tensor]).wait()
    equal(tensor, row(size))
    again.shutdown()


class Notes(dist.Store):
    """A store in Python."""

    def __init__(self, path: str, size: int) -> None:
        super().__init__()
        self.inner = dist.FileStore(path, size)

    def set(self, key: str, value: Any) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self.inner.wait(keys, *timeout)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def add(self, key: str, value: int) -> int:
        return self.inner.add(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self.inner.compare_set(key, expected, desired)

    def set_timeout(self, timeout: Any) -> None:
        self.inner.set_timeout(timeout)


def store_in_python(path: str) -> None:
    """A group's store goes on when nobody else holds it."""
    rank, size = me()
    options = dist.group.WORLD._options  # type: ignore[union-attr]
    notes = Notes(path, size)
    store = c10d.PrefixStore("a", c10d.PrefixStore("b", notes))
    group = make_group(store, rank, size, timedelta(seconds=DEADLINE), "notes", options, ["cpu"])
    del notes, store
    gc.collect()
    group.monitored_barrier()
    group.shutdown()


# ---- layouts --------------------------------------------------------------------------------------------------------------------


def not_to_be_written(bad: Tensor) -> None:
    """Every call with an output refuses ``bad``, a (2, 2), on all ranks, and the group goes on."""
    rank, size = me()
    group: Any = dist.group.WORLD
    good = torch.ones(2, 2)
    many = torch.ones(2 * size, 2)
    one_bad = [good.clone() for _ in range(size - 1)] + [bad]
    whole_bad = torch.ones(1, 2).expand(2 * size, 2)
    calls: dict[str, tuple[str, Callable[[], Any]]] = {
        "all_reduce": ("tensor", lambda: dist.all_reduce(bad)),
        "broadcast": ("tensor", lambda: dist.broadcast(bad, 0)),
        "reduce": ("tensor", lambda: group.reduce([bad], rank)),
        "all_gather": (f"output {size - 1}", lambda: dist.all_gather(one_bad, good)),
        "all_gather_into_tensor": ("output", lambda: dist.all_gather_into_tensor(whole_bad, good)),
        "gather": (f"output {size - 1}", lambda: group.gather([one_bad], [good], rank)),
        "scatter": ("output", lambda: dist.scatter(bad, [good] * size if rank == 0 else None, 0)),
        "reduce_scatter": ("output", lambda: dist.reduce_scatter(bad, [good] * size)),
        "reduce_scatter_tensor": ("output", lambda: dist.reduce_scatter_tensor(bad, many)),
        "all_to_all": (f"output {size - 1}", lambda: dist.all_to_all(one_bad, [good] * size)),
        "all_to_all_single": ("output", lambda: dist.all_to_all_single(whole_bad, many)),
        "recv": ("output", lambda: dist.recv(bad, (rank + 1) % size)),
        "recv from anyone": ("output", lambda: dist.recv(bad)),
        "allreduce_coalesced": ("tensor 1", lambda: group.allreduce_coalesced([good.clone(), bad])),
        "allgather_coalesced": (f"output {size - 1}", lambda: group.allgather_coalesced([[each] for each in one_bad], [good])),
        "all_gather_single_coalesced": ("output 0", lambda: group.allgather_into_tensor_coalesced([whole_bad], [good])),
        "reduce_scatter_single_coalesced": ("output 0", lambda: group.reduce_scatter_tensor_coalesced([bad], [many])),
    }
    before = bad.clone()
    for name, (argument, call) in calls.items():
        with pytest.raises(polyccl.InvalidArgument) as refusal:
            call()
        assert f": {argument} " in str(refusal.value), f"{name}: {refusal.value}"
    equal(bad, before)
    tensor = row(1)
    dist.all_reduce(tensor)
    equal(tensor, row(size))


def unwritable() -> None:
    not_to_be_written(torch.ones(1).expand(2, 2))
    not_to_be_written(torch.arange(3.0).as_strided((2, 2), (1, 1)))


def of_inference_mode() -> None:
    """Outputs of inference mode are written in it, whichever thread brings them home."""
    _, size = me()
    with torch.inference_mode():
        inside = torch.ones(2, 2).t()
        settled(started(inside).get_future())
        equal(inside, torch.full((2, 2), float(size)))
    with pytest.raises(polyccl.InvalidArgument, match="inference mode"):
        dist.all_reduce(inside)


def shared_outputs() -> None:
    """Columns of a matrix share no memory; the same column twice does."""
    rank, size = me()
    table = torch.zeros(4, size)
    dist.all_gather(list(table.unbind(1)), row(rank, 4))
    equal(table, torch.arange(size).expand(4, size))
    with pytest.raises(polyccl.InvalidArgument, match="shares memory"):
        dist.all_gather([table[:, 0]] * size, row(rank, 4))


def waits_while_brought_home() -> None:
    """Two threads wait for one work, whose result comes home late: neither returns before."""
    _, size = me()
    tensor = torch.ones(8)[::2]
    work = started(tensor)
    bring, begun = work._finish, threading.Event()

    def slowly() -> None:
        begun.set()
        time.sleep(0.1)
        bring()

    work._finish = slowly
    other = threading.Thread(target=work.wait)
    other.start()
    assert begun.wait(DEADLINE)
    work.wait()
    equal(tensor, row(size, 4))
    other.join()


def dropped() -> None:
    """Messages of a batch that an error ends were never issued, and say so however often they are asked."""
    rank, size = me()
    group: Any = dist.group.WORLD
    with suppress(ZeroDivisionError), group.gathering():
        work = dist.isend(row(1), (rank + 1) % size)
        assert work is not None
        future = work.get_future()
        assert not work.is_completed()
        with pytest.raises(polyccl.InvalidArgument, match="end of its batch"):
            work.wait()
        _ = 1 / 0
    for _ in range(2):
        assert "never issued" in raised(work.wait)
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), polyccl.Aborted)
    assert "never issued" in raised(lambda: settled(future))
