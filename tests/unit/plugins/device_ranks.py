"""One rank of a test of a plugin for devices: `python device_ranks.py PLUGIN DIRECTORY SCENARIO RANK SIZE`.

Prints one JSON object for each case: {"case": name, "error": null or text}. Exits with 0 where the scenario ran to its end.
"""

from __future__ import annotations

import ctypes as c
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
    GROUP,
    HOST_MEMORY,
    INVALID,
    KINDS,
    OK,
    PEER_LOST,
    REDUCTIONS,
    TIMEOUT,
    UNSUPPORTED,
    Array,
    DirectoryStore,
    Plugin,
    PluginError,
    after,
    combine,
    narrow,
    widen,
)
from device_abi import Buffer, Device, DeviceComm, wait_until
from ranks import data, empty, raises, same

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
Cases = Iterator[tuple[str, Callable[[], None]]]


def reductions_of(dtype: str) -> set[str]:
    """The reductions that a plugin of this family has natively for a type other than fp8."""
    if dtype in FLOATS:
        return {"SUM", "PRODUCT", "MIN", "MAX", "AVG", "PREMUL_SUM"}
    if dtype in INTEGERS:
        return {"SUM", "PRODUCT", "MIN", "MAX", "AVG"}
    if dtype == "bool":
        return {"SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR"}
    return {"SUM"} if dtype.startswith("complex") else set()


def expected(parts: list[Array], dtype: str, reduction: str) -> Array:
    """The parts reduced, in exact values. The bytes of fp8 are so small that they add up like integers."""
    if reduction == "PREMUL_SUM":  # rank r's factor is r + 1
        parts = [narrow((rank + 1) * widen(part, dtype), dtype) for rank, part in enumerate(parts)]
    total = parts[0]
    for part in parts[1:]:
        if dtype.startswith("float8"):
            total = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum}[reduction](total, part)
        else:
            total = combine(total, part, dtype, "SUM" if reduction in ("AVG", "PREMUL_SUM") else reduction)
    if reduction == "AVG":
        total = narrow((widen(total, dtype) / len(parts)).astype(widen(total, dtype).dtype), dtype)
    return total


class Rank:
    """A rank's plugin, device and store, with one method for each scenario."""

    def __init__(self, plugin: str, directory: str, rank: int, size: int) -> None:
        self.plugin, self.store, self.rank, self.size = Plugin(plugin), DirectoryStore(Path(directory)), rank, size
        index = rank % self.devices()
        self.device = Device(self.plugin, index)

    def devices(self) -> int:
        count = c.c_int32()
        if self.plugin.table.device_count(c.byref(count)) != OK:
            raise RuntimeError(self.plugin.text())
        return count.value

    def comm(self, name: str = "c", **arguments: float) -> DeviceComm:
        """A communicator of all ranks, with keys of its own in the store."""
        directory = self.store.directory / f"comm.{name}"
        directory.mkdir(exist_ok=True)
        return DeviceComm(self.device, DirectoryStore(directory), self.rank, self.size, name=name, **arguments)  # type: ignore[arg-type]

    def meet(self, name: str) -> None:
        """Wait until every rank has come to this point."""
        self.store.put(f"meet.{name}.{self.rank}")
        for rank in range(self.size):
            assert self.store.wait(f"meet.{name}.{rank}", after(20)) is not None, f"rank {rank} did not come to '{name}'"

    def parts(self, count: int, dtype: str) -> list[Array]:
        return [data(rank, count, dtype) for rank in range(self.size)]

    def whole(self, count: int, dtype: str) -> Array:
        return np.concatenate(self.parts(count, dtype))

    # -- every kind -----------------------------------------------------------------------------------------------------

    def movement(self) -> Cases:
        comm = self.comm()
        everything = [(dtype, 7) for dtype in DTYPES]
        everything += [("int16", 0), ("int16", 1), ("float32", 100_003), ("uint8", (1 << 20) + 3)]
        for kind in ("broadcast", "all_gather", "all_gather_v", "all_to_all", "all_to_all_v", "scatter", "gather", "messages"):
            for dtype, count in everything:
                assert comm.supports(kind if kind != "messages" else "send", dtype) & CAN
                for in_place in (False, True) if kind not in ("messages", "all_to_all", "all_to_all_v") else (False,):
                    yield (
                        f"{kind}-{dtype}-{count}-{in_place}",
                        lambda k=kind, d=dtype, n=count, p=in_place: getattr(self, k)(comm, d, n, p),
                    )
        yield "barrier", lambda: self.barrier(comm)
        comm.destroy()

    def reduction(self) -> Cases:
        comm = self.comm()
        for dtype in DTYPES:
            for reduction in REDUCTIONS:
                native = comm.supports("all_reduce", dtype, reduction) & CAN
                if not dtype.startswith("float8"):
                    assert bool(native) == (reduction in reductions_of(dtype)), f"{dtype} {reduction}: {native}"
                if not native or (dtype.startswith("float8") and reduction == "PRODUCT"):
                    continue
                counts = (0, 1, 7, 100_003) if dtype == "float32" and reduction in ("SUM", "PREMUL_SUM") else (7,)
                for kind in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v"):
                    for count in counts:
                        for in_place in (False, True):
                            yield (
                                f"{kind}-{dtype}-{reduction}-{count}-{in_place}",
                                lambda k=kind, d=dtype, n=count, p=in_place, r=reduction: getattr(self, k)(comm, d, n, p, r),
                            )
        yield "a-factor-for-each-of-a-group", lambda: self.grouped_factors(comm)
        comm.destroy()

    def moves(
        self, comm: DeviceComm, kind: str, dtype: str, source: Array | None, result: Array | None, **arguments: object
    ) -> None:
        """Run an operation whose input and output lie apart; compares the output, and that the input stays."""
        given = None if source is None else Buffer(self.device, source)
        taken = None if result is None else Buffer(self.device, empty(len(result), dtype))
        addresses = {"input": given and given.address, "output": taken and taken.address}
        comm.run(kind, dtype, **addresses, **arguments)
        if taken is not None and result is not None:
            same(taken.get(), result, "output")
        if given is not None and source is not None:
            same(given.get(), source, "input")
        for buffer in (given, taken):
            if buffer is not None:
                buffer.free()

    def moves_in_place(
        self, comm: DeviceComm, kind: str, dtype: str, content: Array, at: tuple[int, int], result: Array, **arguments: object
    ) -> None:
        """The same in one buffer of `content`; `at` gives the elements where input and output begin, result is at the latter."""
        buffer = Buffer(self.device, content)
        input, output = (buffer.address + place * content.itemsize for place in at)
        comm.run(kind, dtype, input=input, output=output, **arguments)
        same(buffer.get()[at[1] : at[1] + len(result)], result, "output")
        buffer.free()

    def factor(self, dtype: str, reduction: str) -> Array | None:
        return narrow(np.array([self.rank + 1], np.float32), dtype) if reduction == "PREMUL_SUM" else None

    def broadcast(self, comm: DeviceComm, dtype: str, count: int, in_place: bool) -> None:
        root = count % self.size
        wanted = data(root, count, dtype)
        at_root = self.rank == root
        if in_place:
            self.moves_in_place(comm, "broadcast", dtype, data(self.rank, count, dtype), (0, 0), wanted, count=count, peer=root)
        else:
            self.moves(comm, "broadcast", dtype, wanted if at_root else None, None if at_root else wanted, count=count, peer=root)

    def all_reduce(self, comm: DeviceComm, dtype: str, count: int, in_place: bool, reduction: str) -> None:
        parts = self.parts(count, dtype)
        wanted = expected(parts, dtype, reduction)
        more = {"count": count, "reduction": reduction, "factor": self.factor(dtype, reduction)}
        if in_place:
            self.moves_in_place(comm, "all_reduce", dtype, parts[self.rank], (0, 0), wanted, **more)
        else:
            self.moves(comm, "all_reduce", dtype, parts[self.rank], wanted, **more)

    def reduce(self, comm: DeviceComm, dtype: str, count: int, in_place: bool, reduction: str) -> None:
        root = (count + 1) % self.size
        parts = self.parts(count, dtype)
        wanted = expected(parts, dtype, reduction)
        more = {"count": count, "reduction": reduction, "peer": root, "factor": self.factor(dtype, reduction)}
        if in_place and self.rank == root:
            self.moves_in_place(comm, "reduce", dtype, parts[self.rank], (0, 0), wanted, **more)
        else:
            self.moves(comm, "reduce", dtype, parts[self.rank], wanted if self.rank == root else None, **more)

    def reduce_scatter(self, comm: DeviceComm, dtype: str, count: int, in_place: bool, reduction: str) -> None:
        parts = self.parts(count * self.size, dtype)
        begin = self.rank * count
        wanted = expected(parts, dtype, reduction)[begin : begin + count]
        more = {"count": count, "reduction": reduction, "factor": self.factor(dtype, reduction)}
        if in_place:
            self.moves_in_place(comm, "reduce_scatter", dtype, parts[self.rank], (0, begin), wanted, **more)
        else:
            self.moves(comm, "reduce_scatter", dtype, parts[self.rank], wanted, **more)

    def ragged(self, count: int) -> tuple[list[int], int]:
        """Counts, of which rank 0's is 0, and where this rank's block begins."""
        counts = [count * (rank % 2) + rank for rank in range(self.size)]
        return counts, sum(counts[: self.rank])

    def reduce_scatter_v(self, comm: DeviceComm, dtype: str, count: int, in_place: bool, reduction: str) -> None:
        counts, begin = self.ragged(count)
        parts = self.parts(sum(counts), dtype)
        wanted = expected(parts, dtype, reduction)[begin : begin + counts[self.rank]]
        more = {"counts": counts, "reduction": reduction, "factor": self.factor(dtype, reduction)}
        if in_place:
            self.moves_in_place(comm, "reduce_scatter_v", dtype, parts[self.rank], (0, begin), wanted, **more)
        else:
            self.moves(comm, "reduce_scatter_v", dtype, parts[self.rank], wanted, **more)

    def all_gather(self, comm: DeviceComm, dtype: str, count: int, in_place: bool) -> None:
        wanted = self.whole(count, dtype)
        own = data(self.rank, count, dtype)
        begin = self.rank * count
        if in_place:
            content = empty(len(wanted), dtype)
            content[begin : begin + count] = own
            self.moves_in_place(comm, "all_gather", dtype, content, (begin, 0), wanted, count=count)
        else:
            self.moves(comm, "all_gather", dtype, own, wanted, count=count)

    def all_gather_v(self, comm: DeviceComm, dtype: str, count: int, in_place: bool) -> None:
        counts, begin = self.ragged(count)
        own = data(self.rank, counts[self.rank], dtype)
        wanted = np.concatenate([data(rank, n, dtype) for rank, n in enumerate(counts)])
        if in_place:
            content = empty(len(wanted), dtype)
            content[begin : begin + len(own)] = own
            self.moves_in_place(comm, "all_gather_v", dtype, content, (begin, 0), wanted, counts=counts)
        else:
            self.moves(comm, "all_gather_v", dtype, own, wanted, counts=counts)

    def scatter(self, comm: DeviceComm, dtype: str, count: int, in_place: bool) -> None:
        root = count % self.size
        everything = self.whole(count, dtype)
        wanted = data(self.rank, count, dtype)
        if in_place and self.rank == root:
            self.moves_in_place(comm, "scatter", dtype, everything, (0, root * count), wanted, count=count, peer=root)
        else:
            self.moves(comm, "scatter", dtype, everything if self.rank == root else None, wanted, count=count, peer=root)

    def gather(self, comm: DeviceComm, dtype: str, count: int, in_place: bool) -> None:
        root = count % self.size
        own = data(self.rank, count, dtype)
        wanted = self.whole(count, dtype)
        if in_place and self.rank == root:
            content = empty(len(wanted), dtype)
            content[root * count : (root + 1) * count] = own
            self.moves_in_place(comm, "gather", dtype, content, (root * count, 0), wanted, count=count, peer=root)
        else:
            self.moves(comm, "gather", dtype, own, wanted if self.rank == root else None, count=count, peer=root)

    def all_to_all(self, comm: DeviceComm, dtype: str, count: int, _: bool) -> None:
        sent = np.concatenate([data(self.rank, count, dtype, salt=peer) for peer in range(self.size)])
        wanted = np.concatenate([data(peer, count, dtype, salt=self.rank) for peer in range(self.size)])
        self.moves(comm, "all_to_all", dtype, sent, wanted, count=count)

    def all_to_all_v(self, comm: DeviceComm, dtype: str, count: int, _: bool) -> None:
        def between(a: int, b: int) -> int:
            return count * ((a + b) % 2) + 2 * a + b

        to = [between(self.rank, peer) for peer in range(self.size)]
        counts = [between(peer, self.rank) for peer in range(self.size)]
        sent = np.concatenate([data(self.rank, n, dtype, salt=peer) for peer, n in enumerate(to)])
        wanted = np.concatenate([data(peer, n, dtype, salt=self.rank) for peer, n in enumerate(counts)])
        self.moves(comm, "all_to_all_v", dtype, sent, wanted, counts=to, output_counts=counts)

    def messages(self, comm: DeviceComm, dtype: str, count: int, _: bool) -> None:
        """In one group: two messages to every rank, this one included, and two from each, which arrive in order."""
        ops, buffers, checks = [], [], []
        for peer in range(self.size):
            for i in range(2):
                out = Buffer(self.device, data(self.rank, count + i, dtype, salt=peer + i))
                into = Buffer(self.device, empty(count + i, dtype))
                buffers += [out, into]
                ops.append(comm.op("send", dtype, input=out.address, count=count + i, peer=peer))
                ops.append(comm.op("recv", dtype, output=into.address, count=count + i, peer=peer))
                checks.append((into, data(peer, count + i, dtype, salt=self.rank + i)))
        comm.issue(*ops)
        for into, wanted in checks:
            same(into.get(), wanted, "message")
        for buffer in buffers:
            buffer.free()

    def barrier(self, comm: DeviceComm) -> None:
        """No rank's barrier is over before the last rank has enqueued its own."""
        if self.rank != 0:
            comm.run("barrier")
            event = self.device.new_event()
            self.device.check(self.device.table.event_record(event, self.device.stream))
            time.sleep(0.2)
            assert not self.device.is_done(event)
            self.store.put(f"barrier.{self.rank}")
            wait_until(lambda: self.device.is_done(event), 20, "the barrier")
            return
        for rank in range(1, self.size):
            assert self.store.wait(f"barrier.{rank}", after(20)) is not None
        comm.run("barrier")
        self.device.synchronize()

    def grouped_factors(self, comm: DeviceComm) -> None:
        """Two PREMUL_SUM in one group, each with factors of its own."""
        parts = self.parts(5, "float32")
        outputs = [Buffer(self.device, empty(5, "float32")) for _ in range(2)]
        source = Buffer(self.device, parts[self.rank])
        factors = [np.array([self.rank + extra], np.float32) for extra in (1, 10)]
        comm.issue(*[
            comm.op("all_reduce", "float32", input=source.address, output=output.address, count=5, reduction="PREMUL_SUM", factor=f)
            for output, f in zip(outputs, factors, strict=True)
        ])  # fmt: skip
        for output, extra in zip(outputs, (1, 10), strict=True):
            same(output.get(), sum(((rank + extra) * part for rank, part in enumerate(parts)), np.zeros(5, np.float32)), "output")

    # -- order of streams -----------------------------------------------------------------------------------------------

    def streams(self) -> Cases:
        comm = self.comm()
        for case in (self.issue_does_not_wait, self.other_streams_wait_by_event, self.strided_copy, self.flags):
            yield case.__name__, lambda call=case: call(comm)
        self.device.synchronize()
        comm.destroy()

    def held_stream(self) -> tuple[int, c.Array[c.c_uint32], int]:
        """A stream that stands still until the flag is 1; gives the flag's address too."""
        stream = self.device.new_stream(high=True)
        address = self.device.host_memory(64)
        flag = (c.c_uint32 * 1).from_address(address)
        flag[0] = 0
        self.device.check(self.device.table.wait_flag(stream, address, 1))
        return stream, flag, address

    def issue_does_not_wait(self, comm: DeviceComm) -> None:
        stream, flag, _ = self.held_stream()
        parts = self.parts(9, "int32")
        buffer = Buffer(self.device, parts[self.rank])
        self.device.synchronize()
        comm.run("all_reduce", "int32", input=buffer.address, output=buffer.address, count=9, reduction="SUM", stream=stream)
        event = self.device.new_event()
        self.device.check(self.device.table.event_record(event, stream))
        assert not self.device.is_done(event), "the stream is held, and issue() has returned"
        flag[0] = 1
        wait_until(lambda: self.device.is_done(event), 20, "the held stream")
        same(buffer.get(), expected(parts, "int32", "SUM"), "output")

    def other_streams_wait_by_event(self, comm: DeviceComm) -> None:
        stream, flag, _ = self.held_stream()
        parts = self.parts(9, "int32")
        buffer, later = Buffer(self.device, parts[self.rank]), Buffer(self.device, empty(9, "int32"))
        self.device.synchronize()
        comm.run("all_reduce", "int32", input=buffer.address, output=buffer.address, count=9, reduction="SUM", stream=stream)
        event = self.device.new_event()
        self.device.check(self.device.table.event_record(event, stream))
        self.device.check(self.device.table.stream_wait_event(self.device.stream, event))
        self.device.copy(later.address, buffer.address, 36)
        flag[0] = 1
        same(later.get(), expected(parts, "int32", "SUM"), "what the second stream copied")

    def strided_copy(self, _: DeviceComm) -> None:
        rows = np.arange(4 * 8, dtype=np.uint8).reshape(4, 8)
        source, target = Buffer(self.device, rows.reshape(-1)), Buffer(self.device, np.zeros(4 * 5, np.uint8))
        table = self.device.table
        self.device.check(table.copy(self.device.stream, target.address + 1, 5, source.address + 2, 8, 3, 4))
        wanted = np.zeros((4, 5), np.uint8)
        wanted[:, 1:4] = rows[:, 2:5]
        same(target.get(), wanted.reshape(-1), "output")

    def flags(self, _: DeviceComm) -> None:
        stream, flag, address = self.held_stream()
        self.device.check(self.device.table.write_flag(stream, address, 7))
        flag[0] = 1
        wait_until(lambda: flag[0] == 7, 20, "the stream's word to the host")
        self.device.synchronize(stream)
        self.device.check(self.device.table.stream_destroy(stream))

    # -- refusals -------------------------------------------------------------------------------------------------------

    def refusals(self) -> Cases:
        comm = self.comm()
        x = Buffer(self.device, np.ones(4, np.float32))
        good = {"input": x.address, "output": x.address, "count": 4, "reduction": "SUM"}

        def no_input() -> None:
            error = raises(INVALID, lambda: comm.run("all_reduce", "float32", **{**good, "input": None}))
            assert "NULL" in error.text
            assert f"rank {self.rank} of {self.size} of communicator 'c'" in error.text

        def no_factor() -> None:
            assert (
                "factor" in raises(INVALID, lambda: comm.run("all_reduce", "float32", **{**good, "reduction": "PREMUL_SUM"})).text
            )

        def unknown_feature() -> None:
            op = comm.op("broadcast", "float32", input=x.address, output=x.address, count=4, peer=0)
            op.required = 1 << 31
            raises(UNSUPPORTED, lambda: comm.issue(op))

        def host_memory() -> None:
            assert comm.supports("all_reduce", "float32", "SUM", HOST_MEMORY) == 0
            raises(UNSUPPORTED, lambda: comm.run("all_reduce", "float32", memory=HOST_MEMORY, **good))

        def overflow() -> None:
            raises(INVALID, lambda: comm.run("all_gather", "float64", input=x.address, output=x.address, count=1 << 61))

        def bitwise() -> None:
            raises(UNSUPPORTED, lambda: comm.run("all_reduce", "int32", **{**good, "reduction": "BAND"}))

        def no_such_rank() -> None:
            raises(INVALID, lambda: comm.run("send", "float32", input=x.address, count=4, peer=self.size))

        def half_a_message_to_itself() -> None:
            raises(INVALID, lambda: comm.run("send", "float32", input=x.address, count=4, peer=self.rank))

        def exchange_in_place() -> None:
            error = raises(INVALID, lambda: comm.run("all_to_all", "float32", input=x.address, output=x.address, count=2))
            assert "in place" in error.text

        def still_usable() -> None:
            comm.look()
            comm.run("all_reduce", "float32", **good)
            same(x.get(), np.full(4, self.size, np.float32), "output")

        def capabilities() -> None:
            every = CAN | GROUP
            assert comm.supports("all_reduce", "int32", "SUM") == every | EQUAL_BITS
            assert comm.supports("barrier", "uint8") & every == every
            assert self.plugin.table.supports(0x8000, DTYPES["float32"], 0, 2) == 0
            assert self.plugin.table.supports(KINDS["send"], 99, 0, 2) == 0
            assert self.plugin.table.completion(KINDS["send"], 2) == 3
            assert self.plugin.table.completion(KINDS["send"], 1) == 0

        for case in (no_input, no_factor, unknown_feature, host_memory, overflow, bitwise, no_such_rank, half_a_message_to_itself,
                     exchange_in_place, still_usable, capabilities):  # fmt: skip
            yield case.__name__, case
        comm.destroy()

    # -- the end --------------------------------------------------------------------------------------------------------

    def abort(self) -> Cases:
        for name in ("recv", "all_reduce", "destroyed_at_once", "idle"):
            yield name, lambda n=name: self.abort_one(n)

    def abort_one(self, name: str) -> None:
        """Rank 0 aborts an operation that no other rank enters; it ends, and so does all that is enqueued after it."""
        comm = self.comm(name=name)
        self.meet(f"{name}.created")
        if self.rank == 0:
            stream = self.device.new_stream()
            x = Buffer(self.device, np.ones(64, np.float32))
            self.device.synchronize()
            if name == "recv":
                comm.run("recv", "float32", output=x.address, count=64, peer=1, stream=stream)
            elif name != "idle":
                comm.run("all_reduce", "float32", input=x.address, output=x.address, count=64, reduction="SUM", stream=stream)
            event = self.device.new_event()
            self.device.check(self.device.table.event_record(event, stream))
            begin = time.monotonic()
            thread = threading.Thread(target=comm.abort)
            thread.start()
            thread.join(15)
            assert not thread.is_alive(), "abort() has not returned"
            if name != "destroyed_at_once":
                wait_until(lambda: self.ended(event), 15, "the aborted operation")
                raises(ABORTED, lambda: comm.run("barrier"))
                raises(ABORTED, comm.look)
                comm.abort()
            comm.destroy()
            assert time.monotonic() - begin < 15
        self.meet(f"{name}.aborted")
        if self.rank != 0:
            comm.abort()
            comm.destroy()

    def ended(self, event: int) -> bool:
        """An event is reached, or what was before it failed."""
        try:
            return self.device.is_done(event)
        except PluginError:
            return True

    def killed(self) -> Cases:
        """Rank 1 is killed while the others wait for it on their devices: they learn that it is lost."""
        comm = self.comm()
        self.meet("created")
        if self.rank == 1:
            wait = [self.store.wait(f"in.{rank}", after(20)) for rank in range(self.size) if rank != 1]
            assert None not in wait
            os.kill(os.getpid(), signal.SIGKILL)

        def lost() -> None:
            x = Buffer(self.device, np.ones(64, np.float32))
            comm.run("all_reduce", "float32", input=x.address, output=x.address, count=64, reduction="SUM")
            self.store.put(f"in.{self.rank}")
            caught: list[PluginError] = []

            def noticed() -> bool:
                try:
                    comm.look()
                except PluginError as error:
                    caught.append(error)
                return bool(caught)

            wait_until(noticed, 15, "the loss of a rank")
            assert caught[0].result == PEER_LOST, caught[0]
            comm.abort()
            comm.destroy()

        yield "lost", lost

    # -- creation -------------------------------------------------------------------------------------------------------

    def creation(self) -> Cases:
        def missing_rank() -> None:
            """The id is there, and then a rank does not come."""
            begin = time.monotonic()
            error = raises(TIMEOUT, lambda: DeviceComm(self.device, self.fresh("missing"), 0, 2, seconds=0.5))
            assert 0.4 < time.monotonic() - begin < 12
            assert "another rank" in error.text, error.text

        def missing_root() -> None:
            error = raises(TIMEOUT, lambda: DeviceComm(self.device, self.fresh("root"), 1, 2, seconds=0.3))
            assert "rank 0" in error.text

        def cancelled() -> None:
            store = self.fresh("cancelled")
            timer = threading.Timer(0.2, lambda: setattr(store, "cancel", True))
            timer.start()
            begin = time.monotonic()
            raises(ABORTED, lambda: DeviceComm(self.device, store, 0, 2, seconds=60))
            assert time.monotonic() - begin < 12

        def other_version() -> None:
            store = self.fresh("version")
            store.put("unique_id", b"I" + (20000).to_bytes(4, "little") + bytes(128))
            error = raises(INVALID, lambda: DeviceComm(self.device, store, 1, 2))
            assert "20000" in error.text
            assert "all ranks need the same" in error.text

        def no_such_device() -> None:
            assert "99" in raises(INVALID, lambda: DeviceComm(self.device, self.fresh("device"), 0, 1, index=99)).text

        def no_such_rank() -> None:
            raises(INVALID, lambda: DeviceComm(self.device, self.fresh("rank"), 2, 2))

        def alone() -> None:
            comm = DeviceComm(self.device, self.fresh("alone"), 0, 1)
            x, y = Buffer(self.device, np.ones(3, np.float32)), Buffer(self.device, np.zeros(3, np.float32))
            comm.run("all_reduce", "float32", input=x.address, output=y.address, count=3, reduction="SUM")
            comm.run("barrier")
            same(y.get(), np.ones(3, np.float32), "output")
            comm.destroy()

        for case in (missing_rank, missing_root, cancelled, other_version, no_such_device, no_such_rank, alone):
            yield case.__name__, case

    def fresh(self, name: str) -> DirectoryStore:
        directory = self.store.directory / f"fresh.{name}"
        directory.mkdir()
        return DirectoryStore(directory)


def both(directory: str, rank: int, size: int, plugins: list[str]) -> Cases:
    """Communicators of several plugins at once in this process: each computes, again and again, beside the others."""
    ranks = []
    for plugin in plugins:
        folder = Path(directory) / Path(plugin).stem
        folder.mkdir(exist_ok=True)
        ranks.append(Rank(plugin, str(folder), rank, size))
    comms = [one.comm() for one in ranks]
    for turn in range(3):
        for one, comm in zip(ranks, comms, strict=True):
            yield f"{one.plugin.table.name.decode()}-{turn}", lambda o=one, k=comm: o.all_reduce(k, "float32", 1001, False, "SUM")
    for comm in comms:
        comm.destroy()


def main() -> None:
    plugins, directory, scenario, rank, size = sys.argv[1:]
    if scenario == "both":
        cases = both(directory, int(rank), int(size), plugins.split(","))
    else:
        cases = getattr(Rank(plugins, directory, int(rank), int(size)), scenario)()
    for name, run in cases:
        error = None
        try:
            run()
        except (AssertionError, PluginError) as failure:
            error = str(failure) or repr(failure)
        print(json.dumps({"case": name, "error": error}), flush=True)


if __name__ == "__main__":
    main()
