"""One rank of a test of a plugin: `python ranks.py PLUGIN DIRECTORY SCENARIO RANK SIZE`.

Prints one JSON object for each case: {"case": name, "error": null or text}. Exits with 0 where the scenario ran to its end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from abi import (
    ABORTED,
    CAN,
    DTYPES,
    EQUAL_BITS,
    HOST_MEMORY,
    INVALID,
    KINDS,
    MISMATCH,
    PEER_LOST,
    REDUCTIONS,
    TIMEOUT,
    UNSUPPORTED,
    Array,
    Comm,
    DirectoryStore,
    Plugin,
    PluginError,
    after,
    can_reduce,
    combine,
    narrow,
    numpy_dtype,
)  # fmt: skip

LARGE = 300_007  # elements: odd, a ring's business even in bytes, and above 1 MiB in 4 bytes
PERIOD = 251  # of the data: no divisor of any block or piece, so that what is misplaced shows


def data(rank: int, count: int, dtype: str, salt: int = 0) -> Array:
    """`count` elements that every rank can compute: small whole numbers, exact in every type and order of sums."""
    values = (np.arange(PERIOD, dtype=np.int64) ** 2 + 5 * rank + salt) % 3 + 1
    if dtype == "bool":
        values = values % 2
    if dtype.startswith("float8"):
        values = values.astype(np.uint8)  # bytes: these types only move
    else:
        values = narrow(values.astype(np.float32) if dtype == "bfloat16" else values, dtype)
    return np.resize(values, count)


def empty(count: int, dtype: str) -> Array:
    """`count` elements of a pattern that no result has."""
    return np.frombuffer(b"\xa5" * (count * numpy_dtype(dtype).itemsize), dtype=numpy_dtype(dtype)).copy()


def same(found: Array, wanted: Array, what: str) -> None:
    if not np.array_equal(found.view(np.uint8), wanted.view(np.uint8)):
        raise AssertionError(f"{what}: got {found[:8]}..., wanted {wanted[:8]}...")


def raises(result: int, call: Callable[[], object]) -> PluginError:
    try:
        call()
    except PluginError as error:
        caught = error
    else:
        raise AssertionError(f"wanted result {result}, got success")
    assert caught.result == result, f"wanted result {result}, got {caught}"
    return caught


def reductions() -> Iterator[tuple[str, str, int, bool]]:
    """Dtype, reduction, count and whether in place: every pair that can be, small; some sums in all sizes."""
    for dtype in DTYPES:
        for reduction in REDUCTIONS:
            if not can_reduce(dtype, reduction):
                continue
            yield dtype, reduction, 7, False
            if reduction == "SUM":
                yield dtype, reduction, 7, True
    for dtype in ("int8", "bfloat16", "float32", "int64", "complex128"):  # each size of an element
        yield dtype, "SUM", LARGE, False
        yield dtype, "SUM", LARGE, True
    for count in (0, 1, 5_000_011):
        yield "float32", "SUM", count, False


class Rank:
    """A rank's plugin, store and communicator, with one method for each scenario."""

    def __init__(self, plugin: str, directory: str, rank: int, size: int) -> None:
        self.plugin, self.store, self.rank, self.size = Plugin(plugin), DirectoryStore(Path(directory)), rank, size

    def comm(self, name: str = "c") -> Comm:
        """A communicator of all ranks, with keys of its own in the store."""
        directory = self.store.directory / f"comm.{name}"
        directory.mkdir(exist_ok=True)
        return Comm(self.plugin, DirectoryStore(directory), self.rank, self.size, name=name)

    def meet(self, name: str) -> None:
        """Wait until every rank has come to this point."""
        self.store.put(f"meet.{name}.{self.rank}")
        for rank in range(self.size):
            assert self.store.wait(f"meet.{name}.{rank}", after(20)) is not None, f"rank {rank} did not come to '{name}'"

    # -- every kind -----------------------------------------------------------------------------------------------------

    def collectives(self) -> Iterator[tuple[str, Callable[[], None]]]:
        comm = self.comm()
        everything = [(dtype, 7) for dtype in DTYPES]
        everything += [("int16", 0), ("int16", 1), ("float32", LARGE), ("uint8", (1 << 20) + 3), ("uint8", (3 << 20) + 1)]
        for kind in ("broadcast", "all_gather", "all_gather_v"):
            for dtype, count in everything:
                for in_place in (False, True):
                    yield (
                        f"{kind}-{dtype}-{count}-{in_place}",
                        lambda k=kind, d=dtype, n=count, p=in_place: getattr(self, k)(comm, d, n, p),
                    )
        for kind in ("all_reduce", "reduce"):
            for dtype, reduction, count, in_place in reductions():
                yield (
                    f"{kind}-{dtype}-{reduction}-{count}-{in_place}",
                    lambda k=kind, d=dtype, r=reduction, n=count, p=in_place: getattr(self, k)(comm, d, n, p, r),
                )
        yield "barrier", lambda: comm.run("barrier")
        yield "equal-bits-exchange", lambda: self.equal_bits(comm, 501)
        yield "equal-bits-ring", lambda: self.equal_bits(comm, LARGE)
        comm.run("barrier")
        comm.destroy()

    def broadcast(self, comm: Comm, dtype: str, count: int, in_place: bool) -> None:
        root = count % self.size
        wanted = data(root, count, dtype)
        source = data(root, count, dtype) if self.rank == root else None
        output = source if in_place and source is not None else empty(count, dtype)
        comm.run("broadcast", dtype, input=source, output=output, count=count, peer=root)
        same(output, wanted, "output")
        if source is not None:
            same(source, wanted, "input")

    def all_reduce(self, comm: Comm, dtype: str, count: int, in_place: bool, reduction: str) -> None:
        parts = [data(rank, count, dtype) for rank in range(self.size)]
        wanted = parts[0]
        for part in parts[1:]:
            wanted = combine(wanted, part, dtype, reduction)
        source = data(self.rank, count, dtype)
        output = source if in_place else empty(count, dtype)
        comm.run("all_reduce", dtype, input=source, output=output, count=count, reduction=reduction)
        same(output, wanted, "output")
        if not in_place:
            same(source, parts[self.rank], "input")

    def reduce(self, comm: Comm, dtype: str, count: int, in_place: bool, reduction: str) -> None:
        root = (count + 1) % self.size
        parts = [data(rank, count, dtype) for rank in range(self.size)]
        wanted = parts[0]
        for part in parts[1:]:
            wanted = combine(wanted, part, dtype, reduction)
        source = data(self.rank, count, dtype)
        at_root = self.rank == root
        output = None if not at_root else source if in_place else empty(count, dtype)
        comm.run("reduce", dtype, input=source, output=output, count=count, reduction=reduction, peer=root)
        if output is not None:
            same(output, wanted, "output")
        if not (at_root and in_place):
            same(source, parts[self.rank], "input")

    def all_gather(self, comm: Comm, dtype: str, count: int, in_place: bool) -> None:
        wanted = np.concatenate([data(rank, count, dtype) for rank in range(self.size)])
        output = empty(count * self.size, dtype)
        own = data(self.rank, count, dtype)
        source = output[self.rank * count : (self.rank + 1) * count] if in_place else own.copy()
        source[:] = own
        comm.run("all_gather", dtype, input=source, output=output, count=count)
        same(output, wanted, "output")
        same(source, own, "input")

    def all_gather_v(self, comm: Comm, dtype: str, count: int, in_place: bool) -> None:
        counts = [count * (rank % 2) + rank for rank in range(self.size)]  # rank 0 has none
        wanted = np.concatenate([data(rank, n, dtype) for rank, n in enumerate(counts)])
        output = empty(sum(counts), dtype)
        own = data(self.rank, counts[self.rank], dtype)
        begin = sum(counts[: self.rank])
        source = output[begin : begin + counts[self.rank]] if in_place else own.copy()
        source[:] = own
        comm.run("all_gather_v", dtype, input=source, output=output, counts=counts)
        same(output, wanted, "output")
        same(source, own, "input")

    def scatter(self, comm: Comm, dtype: str, count: int, in_place: bool) -> None:
        root = count % self.size
        everything = np.concatenate([data(rank, count, dtype) for rank in range(self.size)])
        source = everything.copy() if self.rank == root else None
        output = source[:count] if in_place and source is not None else empty(count, dtype)
        comm.run("scatter", dtype, input=source, output=output, count=count, peer=root)
        same(output, data(self.rank, count, dtype), "output")
        if source is not None and not in_place:
            same(source, everything, "input")

    def all_to_all(self, comm: Comm, dtype: str, count: int, in_place: bool) -> None:
        sent = np.concatenate([data(self.rank, count, dtype, salt=peer) for peer in range(self.size)])
        wanted = np.concatenate([data(peer, count, dtype, salt=self.rank) for peer in range(self.size)])
        source = sent.copy()
        output = source if in_place else empty(count * self.size, dtype)
        comm.run("all_to_all", dtype, input=source, output=output, count=count)
        same(output, wanted, "output")
        if not in_place:
            same(source, sent, "input")

    def all_to_all_v(self, comm: Comm, dtype: str, count: int, in_place: bool) -> None:
        def between(a: int, b: int) -> int:
            return count * ((a + b) % 2) + (a + b if in_place else 2 * a + b)  # alike in both directions where in place

        to = [between(self.rank, peer) for peer in range(self.size)]
        counts = [between(peer, self.rank) for peer in range(self.size)]
        sent = np.concatenate([data(self.rank, n, dtype, salt=peer) for peer, n in enumerate(to)])
        wanted = np.concatenate([data(peer, n, dtype, salt=self.rank) for peer, n in enumerate(counts)])
        source = sent.copy()
        output = source if in_place else empty(sum(counts), dtype)
        comm.run("all_to_all_v", dtype, input=source, output=output, counts=to, output_counts=counts)
        same(output, wanted, "output")
        if not in_place:
            same(source, sent, "input")

    def messages(self, comm: Comm, dtype: str, count: int, _: bool) -> None:
        """In one group: two messages to every rank, this one included, and two from each, which arrive in order."""
        ops, arrays, checks = [], [], []
        for peer in range(self.size):
            for i in range(2):
                out = data(self.rank, count + i, dtype, salt=peer + i)
                arrays.append(out)
                ops.append(comm.op("send", dtype, input=out, count=count + i, peer=peer))
                into = empty(count + i, dtype)
                ops.append(comm.op("recv", dtype, output=into, count=count + i, peer=peer))
                checks.append((into, data(peer, count + i, dtype, salt=self.rank + i)))
        comm.issue(*ops)
        for into, wanted in checks:
            same(into, wanted, "message")

    def equal_bits(self, comm: Comm, count: int) -> None:
        kind, dtype, reduction = KINDS["all_reduce"], DTYPES["float32"], REDUCTIONS["SUM"]
        assert self.plugin.table.supports(kind, dtype, reduction, HOST_MEMORY) & EQUAL_BITS
        source = np.random.default_rng(self.rank).standard_normal(count).astype(np.float32)
        output = empty(count, "float32")
        comm.run("all_reduce", "float32", input=source, output=output, count=count, reduction="SUM")
        gathered = empty(count * self.size, "float32")
        comm.run("all_gather", "float32", input=output, output=gathered, count=count)
        for rank in range(self.size):
            same(gathered[rank * count : (rank + 1) * count], output, f"rank {rank}'s result")

    # -- refusals -------------------------------------------------------------------------------------------------------

    def refusals(self) -> Iterator[tuple[str, Callable[[], None]]]:
        comm = self.comm()
        x = np.ones(4, np.float32)

        def no_input() -> None:
            error = raises(INVALID, lambda: comm.run("all_reduce", "float32", output=x, count=4, reduction="SUM"))
            assert "NULL" in error.text
            assert f"rank {self.rank}" in error.text

        def unknown_feature() -> None:
            op = comm.op("broadcast", "float32", input=x, output=x, count=4, peer=0)
            op.required = 1 << 31
            raises(UNSUPPORTED, lambda: comm.issue(op))

        def overflow() -> None:
            raises(INVALID, lambda: comm.run("all_gather", "float64", input=x, output=x, count=1 << 61))

        def average() -> None:
            raises(UNSUPPORTED, lambda: comm.run("all_reduce", "float32", input=x, output=x, count=4, reduction="AVG"))

        def no_such_rank() -> None:
            raises(INVALID, lambda: comm.run("broadcast", "float32", input=x, output=x, count=4, peer=self.size))

        def messages() -> None:
            raises(UNSUPPORTED, lambda: comm.run("send", "float32", input=x, count=4, peer=1 - self.rank))

        def still_usable() -> None:
            output = empty(4, "float32")
            comm.run("all_reduce", "float32", input=x, output=output, count=4, reduction="SUM")
            same(output, x * self.size, "output")

        for case in (no_input, unknown_feature, overflow, average, no_such_rank, messages, still_usable):
            yield case.__name__, case
        yield "native_kinds", self.native_kinds
        comm.run("barrier")
        comm.destroy()

    def native_kinds(self) -> None:
        supports = self.plugin.table.supports
        native = {
            kind for kind, number in KINDS.items() if supports(number, DTYPES["float32"], REDUCTIONS["SUM"], HOST_MEMORY) & CAN
        }
        assert native == {"broadcast", "all_reduce", "reduce", "all_gather", "all_gather_v", "barrier"}, native
        assert supports(KINDS["broadcast"], 99, 0, HOST_MEMORY) == 0
        assert supports(KINDS["broadcast"], DTYPES["float32"], 0, 2) == 0
        assert supports(KINDS["all_reduce"], DTYPES["float8_e5m2"], REDUCTIONS["SUM"], HOST_MEMORY) == 0

    # -- ranks that differ ------------------------------------------------------------------------------------------------

    def differ(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Both ranks are told, whatever they differ in, and neither process ends."""
        for count in (10, 300_000):  # small and large: found by other parts of the link
            for name in ("count", "dtype", "reduction", "root", "kind"):
                yield f"{name}-{count}", lambda n=name, c=count: self.differ_in(n, c)

    def differ_in(self, name: str, count: int) -> None:
        comm = self.comm(name=f"{name}{count}")
        odd = self.rank == 1
        x, y = np.ones(2 * count, np.float64), np.ones(2 * count, np.float64)
        arguments: dict[str, object] = {"input": x, "output": y, "count": count, "reduction": "SUM"}
        kind, dtype = "all_reduce", "float32"
        if name == "count" and odd:
            arguments["count"] = count + 1
        elif name == "dtype" and odd:
            dtype = "int32"
        elif name == "reduction" and odd:
            arguments["reduction"] = "MAX"
        elif name == "root":
            kind, arguments = "broadcast", {"input": x, "output": y, "count": count, "peer": self.rank}
        elif name == "kind" and odd:
            kind, arguments = "all_gather", {"input": x, "output": np.ones(2 * count, np.float32), "count": count}

        def differing() -> None:
            comm.run(kind, dtype, **arguments)
            comm.run("barrier")  # of two small broadcasts from both ends each is sent before it is seen to be none

        error = raises(MISMATCH, differing)
        assert "rank 0" in error.text, error.text
        assert "rank 1" in error.text, error.text
        self.meet(f"{name}{count}")
        comm.destroy()

    # -- the end --------------------------------------------------------------------------------------------------------

    def abort(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for name, count in (("exchange", 100), ("ring", 1_000_000), ("barrier", 0)):
            for blocked in (True, False):
                yield f"{name}-{'blocked' if blocked else 'at once'}", lambda n=name, c=count, b=blocked: self.abort_one(n, c, b)

    def abort_one(self, name: str, count: int, blocked: bool) -> None:
        comm = self.comm(name=f"{name}{blocked}")
        label = f"{name}.{blocked}"
        self.meet(f"{label}.created")  # an abort before that would fail the creation on other ranks
        if self.rank == 0:
            self.abort_blocked(comm, name, count, blocked)
        self.meet(label)  # until then the others stay away from the operation, alive
        comm.abort()
        comm.destroy()
        self.meet(f"{label}.destroyed")

    def abort_blocked(self, comm: Comm, name: str, count: int, blocked: bool) -> None:
        x = np.ones(max(count, 1), np.float32)
        y = x.copy()
        caught: list[PluginError] = []
        thread_id: list[int] = []

        def operate() -> None:
            thread_id.append(threading.get_native_id())
            arguments: dict[str, object] = {"input": x, "output": y, "count": count, "seconds": 0}
            if name != "barrier":
                arguments |= {"reduction": "SUM"}
            try:
                comm.run(name if name in KINDS else "all_reduce", "float32", **arguments)
            except PluginError as error:
                caught.append(error)

        thread = threading.Thread(target=operate, daemon=True)
        thread.start()
        if blocked:
            wait_until_asleep(thread_id)
        begin = time.monotonic()
        comm.abort()
        thread.join(5)
        assert not thread.is_alive(), "the operation did not end"
        took = time.monotonic() - begin
        assert took < 2, f"abort took {took:.3f} s"
        assert caught, "the operation ended without an error"
        assert caught[0].result == ABORTED, caught[0]
        assert "abort" in caught[0].text
        raises(ABORTED, lambda: comm.run("barrier", seconds=1))

    def deadline(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for name, count in (("exchange", 100), ("ring", 1_000_000), ("barrier", 0)):
            yield name, lambda n=name, c=count: self.deadline_one(n, c)

    def deadline_one(self, name: str, count: int) -> None:
        comm = self.comm(name=name)
        if self.rank == 0:
            x = np.ones(max(count, 1), np.float32)
            kind = "barrier" if name == "barrier" else "all_reduce"
            reduction = None if name == "barrier" else "SUM"
            y = x.copy()
            begin = time.monotonic()
            op = comm.op(kind, "float32", input=x, output=y, count=count, reduction=reduction, seconds=0.4)
            error = raises(TIMEOUT, lambda: comm.issue(op))
            took = time.monotonic() - begin
            assert 0.39 < took < 1.5, f"a deadline of 0.4 s was honoured after {took:.3f} s"
            assert name in error.text, error.text
            raises(TIMEOUT, lambda: comm.run("barrier", seconds=5))  # the communicator has ended, and says why
        self.meet(name)
        comm.destroy()

    def killed(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Rank 1 is killed in the middle of a long operation; the others have no deadline."""
        comm = self.comm()
        x = np.zeros(128 << 20, np.uint8)
        if self.rank == 1:
            self.die_midway(comm, x)
        yield "survivor", lambda: self.survive(comm, x)
        comm.destroy()

    def die_midway(self, comm: Comm, x: Array) -> None:
        threading.Thread(target=lambda: self.transfer(comm, x), daemon=True).start()
        end = time.monotonic() + 20
        while not x[len(x) // 4] and time.monotonic() < end:
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def transfer(self, comm: Comm, x: Array) -> None:
        raise NotImplementedError

    def survive(self, comm: Comm, x: Array) -> None:
        begin = time.monotonic()
        error = raises(PEER_LOST, lambda: self.transfer(comm, x))
        assert time.monotonic() - begin < 10
        assert "rank 1" in error.text or self.rank > 1, error.text  # others may lose rank 0 first, which gives up at once

    def concurrent(self) -> Iterator[tuple[str, Callable[[], None]]]:
        first, second = self.comm("first"), self.comm("second")
        yield "two-communicators", lambda: self.use_both(first, second)
        first.run("barrier")
        first.destroy()
        second.destroy()

    def use_both(self, first: Comm, second: Comm) -> None:
        errors: list[BaseException] = []

        def work(comm: Comm, factor: int) -> None:
            try:
                for i in range(50):
                    x = np.full(1000 * (i % 4) + 1, factor * (self.rank + 1), np.int64)
                    y = np.zeros_like(x)
                    comm.run("all_reduce", "int64", input=x, output=y, count=len(x), reduction="SUM")
                    same(y, np.full_like(x, factor * self.size * (self.size + 1) // 2), f"round {i}")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(comm, factor)) for comm, factor in ((first, 1), (second, 1000))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not errors, errors
        assert not any(thread.is_alive() for thread in threads)

    # -- creation -------------------------------------------------------------------------------------------------------

    def creation(self) -> Iterator[tuple[str, Callable[[], None]]]:
        def no_such_rank() -> None:
            raises(INVALID, lambda: Comm(self.plugin, self.store, 2, 2))

        def alone() -> None:
            comm = Comm(self.plugin, self.store, 0, 1)
            x, y = np.ones(3, np.float32), np.zeros(3, np.float32)
            comm.run("all_reduce", "float32", input=x, output=y, count=3, reduction="SUM")
            same(y, x, "output")
            comm.run("barrier")
            comm.destroy()

        for case in (no_such_rank, alone):
            yield case.__name__, case


class KilledInBroadcast(Rank):
    def transfer(self, comm: Comm, x: Array) -> None:
        comm.run("broadcast", input=np.ones_like(x) if self.rank == 0 else None, output=x, count=len(x), peer=0, seconds=0)


class KilledInAllReduce(Rank):
    def transfer(self, comm: Comm, x: Array) -> None:
        comm.run("all_reduce", input=np.ones_like(x), output=x, count=len(x), reduction="SUM", seconds=0)


def wait_until_asleep(thread_id: list[int]) -> None:
    """Until the thread, once it runs, has slept in the kernel at several looks in a row."""
    end, looks = time.monotonic() + 10, 0
    while looks < 5 and time.monotonic() < end:
        time.sleep(0.01)
        state = Path(f"/proc/self/task/{thread_id[0]}/stat").read_text().rsplit(")", 1)[1].split()[0] if thread_id else "R"
        looks = looks + 1 if state == "S" else 0
    assert looks == 5, "the operation never blocked"


def main() -> None:
    plugin, directory, scenario, rank, size = sys.argv[1:]
    kinds = {
        "killed_in_broadcast": (KilledInBroadcast, "killed"),
        "killed_in_all_reduce": (KilledInAllReduce, "killed"),
    }
    cls, method = kinds.get(scenario, (Rank, scenario))
    cases = getattr(cls(plugin, directory, int(rank), int(size)), method)()
    for name, run in cases:
        error = None
        try:
            run()
        except (AssertionError, PluginError) as failure:
            error = str(failure) or repr(failure)
        print(json.dumps({"case": name, "error": error}), flush=True)


if __name__ == "__main__":
    main()
