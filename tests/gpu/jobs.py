"""What the ranks do in ``tests/gpu/run.sh``: jobs on real NVIDIA GPUs, with torch for CUDA. **It has not been run on any.**

``python tests/gpu/jobs.py NAME`` is one rank of job NAME, started by ``polyccl launch`` or by itself; it asserts, and ends with
status 0 where all held. Ranks with ``POLYCCL_LOCAL=nccl`` have their data on a GPU, the others in host memory. With
``GPU_REHEARSAL=1`` there is no GPU, and NCCL is a stand-in (tests/doubles) that works on host memory: that tries this file alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

import polyccl
from polyccl import _native, create, devices, rendezvous
from polyccl.meeting import Meeting
from polyccl.options import make_options
from polyccl.planner.topology import Topology
from polyccl.store import MemoryStore, PrefixStore

REHEARSAL = os.environ.get("GPU_REHEARSAL") == "1"
COUNTS = (1, 1000, 3_000_001)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64)
CYCLES = 400_000_000  # of a GPU's clock, so a few tenths of a second: a kernel that is long beside a collective
SECONDS = 60


def on_gpu() -> bool:
    """Whether this rank is one of NCCL's, and has a GPU."""
    return os.environ.get("POLYCCL_LOCAL", "nccl") == "nccl" and not REHEARSAL


def device() -> str:
    """Where this rank's tensors are. Ranks of one machine share its GPUs round."""
    if not on_gpu():
        return "cpu"
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def join() -> polyccl.Comm:
    """The job's communicator: NCCL alone, or a bridge."""
    if "RANK" not in os.environ:
        return alone()
    return polyccl.new_comm("auto", device(), "gpu", timeout=SECONDS)


def alone() -> polyccl.Comm:
    """A communicator of one rank that has a communicator of NCCL. `polyccl.new_comm` makes none for one rank."""
    options, store = make_options(None, SECONDS, None, False, None), MemoryStore()
    place, library = devices.parse(device()), create.find_library("nccl")
    opened = create.open_device("gpu", library, place)
    assert opened is not None
    hello = create.hello_of("nccl", device(), options, library, 0)
    deadline = time.monotonic() + SECONDS
    meeting = Meeting(store, "gpu", 0, 1, deadline)
    roster = rendezvous.exchange(meeting, hello)
    ends = PrefixStore(store, "gpu/nccl")
    own = _native.create_backend_comm(library.plugin, 0, 1, opened.index, "gpu", "", hello.address, ends, SECONDS)
    build = create._Builder("gpu", place, opened, options, meeting, 0, roster, library)
    native = build._native([0], roster.group, "gpu", [[0]], Topology.singletons(1), own)
    return polyccl.Comm(create.Group("gpu", 0, 1, device(), "nccl", "nccl", options, library, [[0]], ["nccl"], store), native)


def full(value: float, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of this rank's device."""
    return torch.full((count,), value, dtype=dtype, device=device())


def require(tensor: torch.Tensor, value: float, what: str) -> None:
    """All elements have this value. Waits for the current stream only, as a program would."""
    wrong = int((tensor != value).sum().item())
    assert wrong == 0, f"{what}: {wrong} of {tensor.numel()} elements are not {value}; the first ones are {tensor[:4].tolist()}"


def operations(comm: polyccl.Comm) -> None:
    """Each collective, and messages, by small integers, which every dtype here can hold."""
    rank, size = comm.get_rank(), comm.get_size()
    total = size * (size + 1) / 2
    for dtype in DTYPES:
        for count in COUNTS:
            what = f"{dtype}, {count} elements"
            data = full(rank + 1, count, dtype)
            comm.all_reduce(data)
            require(data, total, f"all_reduce, {what}")

            data = full(rank + 1, count, dtype)
            comm.broadcast(data, size - 1)
            require(data, size, f"broadcast, {what}")

            data = full(rank + 1, count, dtype)
            comm.reduce(data, 0, polyccl.ReduceOp.MAX)
            require(data, size if rank == 0 else rank + 1, f"reduce, {what}")

            gathered = full(0, size * count, dtype)
            comm.all_gather_single(gathered, full(rank + 1, count, dtype))
            for other, part in enumerate(gathered.chunk(size)):
                require(part, other + 1, f"all_gather, {what}")

            part = full(0, count, dtype)
            comm.reduce_scatter_single(part, full(rank + 1, size * count, dtype))
            require(part, total, f"reduce_scatter, {what}")

            swapped = full(0, size * count, dtype)
            comm.all_to_all_single(swapped, full(rank + 1, size * count, dtype))
            for other, part in enumerate(swapped.chunk(size)):
                require(part, other + 1, f"all_to_all, {what}")
    comm.barrier()
    pass_round(comm)


def pass_round(comm: polyccl.Comm) -> None:
    """A message from each rank to the next."""
    rank, size = comm.get_rank(), comm.get_size()
    if size == 1:
        return
    arrived, batch = full(0, 1000), comm.batch_op_create()
    batch.send(full(rank + 1, 1000), (rank + 1) % size)
    batch.recv(arrived, (rank - 1) % size)
    batch.issue().wait()
    require(arrived, (rank - 1) % size + 1, "send and recv")


def stream_order(comm: polyccl.Comm) -> None:
    """A collective starts after the kernels before it on the current stream, and what follows on that stream sees its result."""
    count, size = 1_000_000, comm.get_size()
    streams = [None, torch.cuda.Stream()] if on_gpu() else [None]
    for stream in streams:
        for is_async in (False, True):
            for turn in range(3):
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    ordered(comm, count, turn, size, is_async)


def ordered(comm: polyccl.Comm, count: int, turn: int, size: int, is_async: bool) -> None:
    """One collective between a long kernel and a copy. Without the order it would reduce -1, or the copy would hold that."""
    data = full(-1, count)
    if on_gpu():
        torch.cuda._sleep(CYCLES)
    data.fill_(turn + 1)
    work = comm.all_reduce(data, async_op=is_async)
    if is_async:
        work.wait()  # for the stream, on a GPU; not for the host
    seen = data.clone()
    data.fill_(-2)  # a later kernel must not overtake the collective either
    require(seen, size * (turn + 1), f"all_reduce {'asynchronous' if is_async else 'synchronous'}, turn {turn}")


def host_goes_on(comm: polyccl.Comm) -> None:
    """On NCCL alone an asynchronous collective behind a long kernel is issued while the kernel still runs."""
    data = full(1, 1000)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    behind = torch.cuda.Event()
    behind.record()
    work = comm.all_reduce(data, async_op=True)
    work.wait()
    assert not behind.query(), "issue() and wait() waited for the device, or the kernel was too short to tell"
    require(data, comm.get_size(), "all_reduce")


def staging(comm: polyccl.Comm) -> None:
    """Print, in MB/s, what an all_reduce of 64 MiB over the bridge gives, and a plain copy from and to pinned memory."""
    count = 16 << 20
    data, times = full(1, count), []
    for _ in range(6):
        data.fill_(1)
        comm.barrier()
        finish()
        began = time.perf_counter()
        comm.all_reduce(data)
        finish()
        times.append(time.perf_counter() - began)
    require(data, comm.get_size(), "all_reduce of 64 MiB")
    if on_gpu():
        pinned = torch.empty(count, pin_memory=True)
        numbers = {
            "bridge": data.nbytes / min(times[1:]) / 1e6,
            "to_pinned": copy_rate(pinned, data),
            "from_pinned": copy_rate(data, pinned),
        }
        print("MB/s " + json.dumps({name: round(value) for name, value in numbers.items()}), flush=True)


def copy_rate(into: torch.Tensor, source: torch.Tensor) -> float:
    """The best of five copies, in MB/s."""
    times = []
    for _ in range(6):
        finish()
        began = time.perf_counter()
        into.copy_(source)
        finish()
        times.append(time.perf_counter() - began)
    return source.nbytes / min(times[1:]) / 1e6


def finish() -> None:
    """Wait for the GPU, where there is one."""
    if on_gpu():
        torch.cuda.synchronize()


JOBS: dict[str, Callable[[polyccl.Comm], None]] = {
    "operations": operations,
    "stream_order": stream_order,
    "host_goes_on": host_goes_on,
    "staging": staging,
}


def main() -> None:
    """Be one rank of the job that the command line names."""
    if len(sys.argv) != 2 or sys.argv[1] not in JOBS:
        sys.exit(f"usage: jobs.py {'|'.join(JOBS)}")
    if on_gpu() and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here")
    comm = join()
    JOBS[sys.argv[1]](comm)
    comm.finalize()
    if comm.get_rank() == 0:
        print(f"{sys.argv[1]} on {comm}, {comm.get_backend_version()}", flush=True)


if __name__ == "__main__":
    main()
