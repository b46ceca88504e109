"""What a rank does in the tests of streams: a program that uses its device as users of torch do, with streams of its own.

Every function is ``function(rank, *job)`` and makes its own communicator. On ranks of the host a stream does nothing, and
their calls block; those ranks are there to complete the operation.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import polyccl
from polyccl.store import FileStore

from .device_side import Array, Data, HostGate, HostStream, Runtime, Stream, load_extension
from .ranks import join, takes_at_most
from .shapes import Shape

SIZES = (1000, 70_000)  # elements of a block: less and more than one chunk
PATIENCE = 20.0  # seconds


class User:
    """This rank's communicator and device."""

    def __init__(self, rank: int, directory: str, shape: Shape, extension: str, index: int = 0) -> None:
        backend = shape.places[rank][0]
        self.on_device = backend != "host"
        self.extension = load_extension(extension)
        self.runtime = Runtime(backend, self.extension, index) if self.on_device else None
        device = self.runtime.device if self.runtime else "cpu"
        self.comm = join(directory, rank, shape, device=device, hints={"chunk_bytes": "65536"} if "," in shape.islands else {})
        self.rank, self.size = rank, shape.size
        self._signals = FileStore(directory + "-signals")
        self.waits_for_host = self.on_device and os.environ.get("FAKE_NO_WAIT_VALUE") != "1"

    def stay(self) -> None:
        """Leave this thread's device as it is."""

    def enter_another_device(self) -> None:
        """Make device 0 this thread's."""
        if self.runtime:
            Runtime("rccl" if self.runtime.amd else "nccl", self.extension, 0).enter()

    def enter_no_device(self) -> None:
        """Leave this thread without a device, as it began. HIP's begin with device 0."""
        if self.runtime:
            self.runtime.leave()

    def stream(self) -> Any:
        """A new stream of the user's."""
        return Stream(self.runtime) if self.runtime else HostStream()

    def tell(self, what: str) -> None:
        """Say it to the other ranks."""
        self._signals.set(what, b"")

    def hear(self, what: str) -> None:
        """Block until a rank has said it."""
        self._signals.get(what, PATIENCE)

    def total(self, of: Callable[[int], float]) -> float:
        """The sum over ranks."""
        return float(sum(of(rank) for rank in range(self.size)))


def full(value: float, count: int = SIZES[0]) -> Array:
    """An array of ``count`` float32 of this value."""
    return np.full(count, value, np.float32)


# ---- the operations, with what they are to give ---------------------------------------------------------------------------------


def own(rank: int, count: int) -> Array:
    """A rank's block: other values on each rank, and along the block; sums are exact."""
    return (np.arange(count) % 100 + 1000 * (rank + 1)).astype(np.float32)


def blocks(rank: int, size: int, count: int) -> Array:
    """A rank's blocks, one for each rank."""
    return np.concatenate([own(rank, count) + 10 * to for to in range(size)]).astype(np.float32)


class Operation:
    """One operation of a user: tensors made on a stream, the call, and what its result must be."""

    def __init__(self, user: User, stream: Any, name: str, count: int) -> None:
        rank, size = user.rank, user.size
        whole, part, empty = blocks(rank, size, count), own(rank, count), np.zeros
        ranks = range(size)
        inputs: dict[str, tuple[Array, Array, Array]] = {  # input, output before, output after
            "all_reduce": (part, part, np.sum([own(r, count) for r in ranks], axis=0)),
            "broadcast": (part, part, own(1, count)),
            "all_gather": (part, empty(size * count, np.float32), np.concatenate([own(r, count) for r in ranks])),
            "reduce_scatter": (whole, empty(count, np.float32), np.sum([own(r, count) + 10 * rank for r in ranks], axis=0)),
            "all_to_all": (whole, empty(size * count, np.float32), np.concatenate([own(r, count) + 10 * rank for r in ranks])),
        }
        given, before, self.expected = inputs[name]
        self._user, self._stream, self._name = user, stream, name
        self.output: Data = stream.tensor(before)
        self.input: Data = self.output if given is before else stream.tensor(given)

    def call(self, async_op: bool) -> polyccl.Work:
        """Make the call."""
        comm, out, given = self._user.comm, self.output.tensor, self.input.tensor
        if self._name == "all_reduce":
            return comm.all_reduce(out, async_op=async_op)
        if self._name == "broadcast":
            return comm.broadcast(out, 1, async_op)
        if self._name == "all_gather":
            return comm.all_gather_single(out, given, async_op)
        if self._name == "reduce_scatter":
            return comm.reduce_scatter_single(out, given, async_op=async_op)
        return comm.all_to_all_single(out, given, async_op)

    def forget(self) -> None:
        """Let go of the input, as a user does who needs it no more."""
        if self.input is not self.output:
            del self.input


OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


def check(operation: Operation, seen: Array) -> None:
    """The result is right."""
    np.testing.assert_array_equal(seen, operation.expected.astype(np.float32), operation._name)


# ---- order on streams -----------------------------------------------------------------------------------------------------------


def call_between_writer_and_reader(rank: int, *job: Any) -> None:
    """The call returns while its stream stands still; what is enqueued before it is seen, and what comes after sees the result."""
    user = User(rank, *job)
    stream = user.stream().use()
    for name in OPERATIONS:
        for count in SIZES:
            gate = stream.hold()
            operation = Operation(user, stream, name, count)
            operation.call(async_op=False)
            seen = stream.read(operation.output)
            assert not user.on_device or stream.busy(), "the gate is shut"
            gate.open()
            stream.finish()
            check(operation, seen)


def go_on_meanwhile(rank: int, *job: Any) -> None:
    """Rank 0's stream does other work while rank 1 is late; `wait` makes the stream wait, `wait_blocking` the host."""
    user = User(rank, *job)
    for turn, name in enumerate(("all_reduce", "all_gather")):
        stream = user.stream().use()
        gate = stream.hold() if rank == 1 else None
        operation = Operation(user, stream, name, SIZES[1])
        work = operation.call(async_op=True)
        if rank == 0:
            other = stream.read(stream.tensor(own(7, 10)))
            stream.finish()  # nothing that the stream was told waits for the operation
            np.testing.assert_array_equal(other, own(7, 10))
            assert not work.is_completed()
            work.wait()
            assert not work.is_completed(), "the host did not wait"
            seen = stream.read(operation.output)
            assert stream.busy(), "the stream does wait"
            with pytest.raises(polyccl.CommTimeout):
                work.wait(timeout=0.05)  # a wait with a timeout is the host's
            user.tell(f"go on {turn}")
            work.wait_blocking()
            assert work.is_completed()
        elif rank == 1:
            assert gate is not None
            user.hear(f"go on {turn}")
            gate.open()
        if rank != 0:
            work.wait()
            seen = stream.read(operation.output)
        stream.finish()
        check(operation, seen)


def use_two_streams(rank: int, *job: Any) -> None:
    """Operations of two streams: each is ordered on its own, and a third that joins an operation sees its result."""
    user = User(rank, *job)
    first, second, third = user.stream(), user.stream(), user.stream()
    gates = first.hold(), second.hold()
    operations = [Operation(user, stream, name, SIZES[1]) for stream, name in ((first, "all_reduce"), (second, "all_gather"))]
    seen = []
    for stream, operation in zip((first, second), operations, strict=True):
        stream.use()
        operation.call(async_op=False)
        seen.append(stream.read(operation.output))
    joined = Operation(user, second, "all_to_all", SIZES[0])
    work = joined.call(async_op=True)
    third.use()
    if user.on_device:
        work.wait()
        seen.append(third.read(joined.output))
    for gate in reversed(gates):
        gate.open()
    if not user.on_device:
        work.wait()
        seen.append(third.read(joined.output))
    for stream in (first, second, third):
        stream.finish()
    for operation, result in zip([*operations, joined], seen, strict=True):
        check(operation, result)


def have_several_in_flight(rank: int, *job: Any) -> None:
    """Operations of all kinds at once, from two streams by turns, joined in the reverse order."""
    user = User(rank, *job)
    streams = [user.stream(), user.stream()]
    issued = []
    for turn, name in enumerate(OPERATIONS * 2):
        stream = streams[turn % 2].use()
        operation = Operation(user, stream, name, SIZES[turn % 3 == 0])
        issued.append((stream, operation, operation.call(async_op=turn % 4 != 3)))
    seen = []
    for stream, operation, work in reversed(issued):
        stream.use()
        work.wait()
        seen.append(stream.read(operation.output))
    for stream in streams:
        stream.finish()
    for (_, operation, _), result in zip(reversed(issued), seen, strict=True):
        check(operation, result)


def wait_on_the_host(rank: int, *job: Any) -> None:
    """Where no stream can wait for the host the host waits in its place: results are the same."""
    user = User(rank, *job)
    stream = user.stream().use()
    for name in OPERATIONS:
        operation = Operation(user, stream, name, SIZES[1])
        operation.call(async_op=False)
        seen = stream.read(operation.output)
        stream.finish()
        check(operation, seen)
        gate = stream.hold()
        operation = Operation(user, stream, name, SIZES[1])
        work = operation.call(async_op=True)
        gate.open()
        work.wait()
        assert work.is_completed()
        seen = stream.read(operation.output)
        stream.finish()
        check(operation, seen)


def use_the_default_stream(rank: int, directory: str, shape: Shape, extension: str) -> None:
    """The stream is the default one of device 1, which has no handle of its own, while the thread's device is another, or none."""
    user = User(rank, directory, shape, extension, index=1)
    stream: Any = Stream(user.runtime, 0).use() if user.runtime else HostStream()
    for leave in (user.stay, user.enter_another_device, user.enter_no_device):
        for async_op in (False, True):
            gate = stream.hold()
            operations = [Operation(user, stream, name, SIZES[1]) for name in OPERATIONS]
            into, out = stream.tensor(full(0)), stream.tensor(own(rank, SIZES[0]))
            works = []
            leave()
            if not user.waits_for_host:
                gate.open()
            for operation in operations:
                works.append(operation.call(async_op))
                leave()
            if user.on_device and user.waits_for_host:
                assert stream.busy()
            gate.open()
            leave()
            works += exchange_in_a_batch(user, out, into, async_op)
            for work in works:
                leave()
                work.wait()
            seen = [stream.read(operation.output) for operation in operations]
            came = stream.read(into)
            stream.finish()
            for operation, result in zip(operations, seen, strict=True):
                check(operation, result)
            np.testing.assert_array_equal(came, own((rank - 1) % user.size, SIZES[0]))


# ---- messages -------------------------------------------------------------------------------------------------------------------


def exchange(user: User, out: Data, into: Data, async_op: bool) -> list[polyccl.Work]:
    """Send to the next rank and receive from the one before, by two calls; even ranks send first."""
    to, source = (user.rank + 1) % user.size, (user.rank - 1) % user.size
    if user.rank % 2 == 0:
        return [user.comm.send(out.tensor, to, async_op), user.comm.recv(into.tensor, source, async_op)]
    return [user.comm.recv(into.tensor, source, async_op), user.comm.send(out.tensor, to, async_op)]


def exchange_in_a_batch(user: User, out: Data, into: Data, async_op: bool) -> list[polyccl.Work]:
    """The same as one batch."""
    batch = user.comm.batch_op_create()
    batch.recv(into.tensor, (user.rank - 1) % user.size)
    batch.send(out.tensor, (user.rank + 1) % user.size)
    return [batch.issue(async_op)]


def send_round(rank: int, *job: Any) -> None:
    """A ring of messages: what was written before is sent, and what reads after has what came.

    An asynchronous call returns while its stream stands still, and so does a synchronous one where the device's library does it.
    """
    user = User(rank, *job)
    for way in (exchange, exchange_in_a_batch):
        for async_op in (True, False):
            for count in SIZES:
                stream = user.stream().use()
                returns = async_op or user.comm.get_backend() != "bridge"
                gate = stream.hold() if returns else HostGate()
                out, into = stream.tensor(own(rank, count)), stream.tensor(full(0, count))
                works = way(user, out, into, async_op)
                assert not user.on_device or not returns or stream.busy(), "the gate is shut"
                joins_on_stream = user.on_device and user.waits_for_host
                if not joins_on_stream:
                    gate.open()
                for work in works:
                    work.wait()
                seen = stream.read(into)
                gate.open()
                stream.finish()
                np.testing.assert_array_equal(seen, own((rank - 1) % user.size, count))


def leave_a_receive_behind(rank: int, *job: Any) -> None:
    """A receive that nothing matches, and that no stream waits for, does not hold up the communicator's end."""
    user = User(rank, *job)
    stream = user.stream().use()
    into = stream.tensor(full(0))
    work = user.comm.recv(into.tensor, (rank + 1) % user.size, async_op=True, tag=7)
    user.tell(f"receives {rank}")
    for other in range(user.size):
        user.hear(f"receives {other}")
    with takes_at_most(5.0):
        user.comm.abort()
        del user.comm
        gc.collect()
        with pytest.raises(polyccl.CommError):
            work.wait_blocking()


# ---- memory ---------------------------------------------------------------------------------------------------------------------


def forget_the_input(rank: int, *job: Any) -> None:
    """An input that the user lets go of lives until the operation is done, and not longer."""
    user = User(rank, *job)
    stream = user.stream().use()
    for turn, name in enumerate(("all_gather", "reduce_scatter", "all_to_all")):
        gate = stream.hold() if rank == 1 else None
        operation = Operation(user, stream, name, SIZES[1])
        memory: weakref.ref[Any] = weakref.ref(operation.input.memory if user.on_device else operation.input.tensor)
        work = operation.call(async_op=True)
        operation.forget()
        gc.collect()
        if rank == 0:
            assert not user.on_device or memory() is not None, "rank 1 is late"
            user.tell(f"go on {turn}")
        elif gate is not None:
            user.hear(f"go on {turn}")
            gate.open()
        work.wait()
        seen = stream.read(operation.output)
        stream.finish()
        check(operation, seen)
        work.wait_blocking()
        gone = threading.Event()
        kept = memory()
        if kept is not None:  # until another thread has let go of it
            weakref.finalize(kept, gone.set)
            del kept
            assert gone.wait(PATIENCE), "the memory is kept"


def end_before_the_join(rank: int, *job: Any) -> None:
    """A `wait` after the communicator is gone is no use of its memory."""
    user = User(rank, *job)
    stream = user.stream().use()
    operation = Operation(user, stream, "all_reduce", SIZES[1])
    work = operation.call(async_op=True)
    work.wait_blocking()
    user.comm.finalize()
    del operation._user.comm
    gc.collect()
    work.wait()
    seen = stream.read(operation.output)
    stream.finish()
    check(operation, seen)


# ---- refusals -------------------------------------------------------------------------------------------------------------------


def give_tensors_of_other_places(rank: int, *job: Any) -> None:
    """They are refused with a sentence, and the communicator stays usable."""
    user = User(rank, *job)
    stream = user.stream().use()
    operation = Operation(user, stream, "all_reduce", SIZES[0])
    if user.runtime:
        memory = operation.output.memory
        assert memory is not None
        elsewhere = user.extension.Tensor(memory, memory.address, 4, (2, 32), (user.runtime.number, 1))
        with pytest.raises(
            polyccl.InvalidArgument, match=rf"index 1\) than the communicator, whose device is {user.runtime.device}"
        ):
            user.comm.send(elsewhere, 0 if rank else 1)
        with pytest.raises(
            polyccl.InvalidArgument, match=f"in host memory, but the communicator's device is {user.runtime.device}"
        ):
            user.comm.send(full(1), 0 if rank else 1)
    else:
        elsewhere = user.extension.Tensor(user, operation.output.tensor.ctypes.data, 4, (2, 32), (2, 0))
        with pytest.raises(polyccl.InvalidArgument, match=r"not in host memory, .* move it with .cpu\(\)"):
            user.comm.send(elsewhere, 0)
    operation.call(async_op=False)
    seen = stream.read(operation.output)
    stream.finish()
    check(operation, seen)


def call_in_a_capture(rank: int, *job: Any) -> None:
    """Every call on a stream that is being captured is refused before anything is enqueued: the capture stays valid, and the
    communicator usable."""
    user = User(rank, *job)
    stream = user.stream().use()
    peer = 0 if rank else 1
    for name in OPERATIONS:
        for async_op in (False, True):
            operation = Operation(user, stream, name, SIZES[0])
            stream.finish()
            stream.begin_capture()
            with pytest.raises(polyccl.UnsupportedOperation, match="being captured into a graph"):
                operation.call(async_op)
            assert stream.end_capture() == 0
    data = stream.tensor(full(1))
    batch = user.comm.batch_op_create()
    batch.send(data.tensor, peer)
    stream.begin_capture()
    for message in (user.comm.send, user.comm.recv):
        with pytest.raises(polyccl.UnsupportedOperation, match="being captured into a graph"):
            message(data.tensor, peer)
    with pytest.raises(polyccl.UnsupportedOperation, match="being captured into a graph"):
        batch.issue()
    assert stream.end_capture() == 0
    operation = Operation(user, stream, "all_reduce", SIZES[0])
    operation.call(async_op=False)
    seen = stream.read(operation.output)
    stream.finish()
    check(operation, seen)


def capture_beside_an_operation(rank: int, *job: Any) -> None:
    """An operation on its way harms no capture of another stream, which must not join it."""
    user = User(rank, *job)
    stream, captured = user.stream().use(), user.stream()
    gate = stream.hold() if rank == 1 else None
    operation = Operation(user, stream, "all_gather", SIZES[1])
    work = operation.call(async_op=True)
    captured.use()
    captured.begin_capture()
    if rank == 0 and (user.waits_for_host or user.comm.get_backend() != "bridge"):  # else the host waits
        with pytest.raises(polyccl.UnsupportedOperation, match="wait before the capture begins"):
            work.wait()
    user.tell(f"captures {rank}")
    for other in range(user.size):
        user.hear(f"captures {other}")
    if gate is not None:
        gate.open()
    work.wait_blocking()
    work.wait()  # what is done needs no wait of the stream
    assert captured.end_capture() == 0
    seen = stream.use().read(operation.output)
    stream.finish()
    check(operation, seen)
