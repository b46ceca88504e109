"""Communicators are created over torch's stores and PolyCCL's, and from what launchers leave in the environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polyccl
from polyccl.store import MemoryStore, PrefixStore, TcpServer, TcpStore

from .pool import SharedPool
from .ranks import join, usable
from .shapes import Shape

SHAPE = Shape("host=2,host=1")
needs_torch = pytest.mark.skipif("not __import__('importlib.util').util.find_spec('torch')", reason="torch is not installed")


def over_store(rank: int, kind: str, directory: str, port: int) -> None:
    store: Any
    if kind == "polyccl tcp":
        store = TcpStore("127.0.0.1", port)
    elif kind == "polyccl prefix":
        store = PrefixStore(polyccl.store.FileStore(directory), "deep/down")
    else:
        import torch.distributed as dist

        if kind == "torch file":
            store = dist.FileStore(directory, 3)
        else:
            store = dist.TCPStore("127.0.0.1", port, 3, rank == 0, wait_for_workers=False)
        if kind == "torch prefix":
            store = dist.PrefixStore("deep", store)
    comm = join(directory, rank, SHAPE, store=store)
    usable(comm)
    part = comm.split([0, 1] if rank < 2 else [2], "part")
    assert part is not None
    usable(part)
    comm.barrier()


@needs_torch
@pytest.mark.parametrize("kind", ["torch tcp", "torch prefix", "torch file"])
def test_a_store_of_torch_serves(jobs: SharedPool, directory: str, kind: str, reserve_port: Callable[[], int]) -> None:
    jobs.each(over_store, 3, kind, directory, reserve_port())


def test_polyccls_own_stores_serve(jobs: SharedPool, directory: str) -> None:
    jobs.each(over_store, 3, "polyccl prefix", directory, 0)
    server = TcpServer("127.0.0.1", 0)
    try:
        jobs.each(over_store, 3, "polyccl tcp", directory, server.port)
    finally:
        server.close()


def in_memory(rank: int) -> None:
    import torch.distributed as dist

    for store in (dist.HashStore(), MemoryStore(), None):
        usable(polyccl.new_comm("host", "cpu", store=store, rank=0, size=1))


@needs_torch
def test_one_rank_needs_no_more_than_a_store_in_memory(jobs: SharedPool) -> None:
    jobs.each(in_memory, 1)


SCRIPT = """
import numpy as np
import polyccl
comm = polyccl.new_comm("bridge", "cpu", timeout=30, hints={"local": "host"})
other = polyccl.new_comm("host", "cpu", timeout=30)
for each in (comm, other):
    data = np.array([comm.get_rank() + 1.0])
    each.all_reduce(data)
    assert data[0] == sum(range(1, comm.get_size() + 1))
    each.finalize()
print(f"rank {comm.get_rank()} of {comm.get_size()}", flush=True)
"""


def clean_environment(**more: str) -> dict[str, str]:
    outer = ("POLYCCL_", "MASTER_", "RANK", "WORLD_", "LOCAL_", "TORCHELASTIC_", "OMPI_", "PMI_", "SLURM_")
    return {name: value for name, value in os.environ.items() if not name.startswith(outer)} | more


def run_ranks(environments: list[dict[str, str]]) -> list[str]:
    """The output of one process for each environment; all must end well."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for environment in environments
    ]
    killer = threading.Timer(60, lambda: [process.kill() for process in ranks])
    killer.start()
    try:
        outputs = [process.communicate() for process in ranks]
    finally:
        killer.cancel()
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, errors
    return [output.strip() for output, _ in outputs]


@needs_torch
def test_torchruns_environment_is_enough(reserve_port: Callable[[], int]) -> None:
    port = str(reserve_port())
    environments = [
        clean_environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in range(2)
    ]
    assert run_ranks(environments) == ["rank 0 of 2", "rank 1 of 2"]


@needs_torch
def test_torchrun_itself_starts_a_job(tmp_path: Path, reserve_port: Callable[[], int]) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(reserve_port()),
        str(script),
    ]
    done = subprocess.run(words, env=clean_environment(), capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d of 2", done.stdout)) == ["rank 0 of 2", "rank 1 of 2"]


def test_a_file_store_in_the_environment_is_enough(directory: str) -> None:
    environments = [
        clean_environment(POLYCCL_RANK=str(rank), POLYCCL_SIZE="3", POLYCCL_STORE=f"file://{directory}") for rank in range(3)
    ]
    assert run_ranks(environments) == [f"rank {rank} of 3" for rank in range(3)]


def test_rank_0_may_host_the_store(reserve_port: Callable[[], int]) -> None:
    store = f"tcp://127.0.0.1:{reserve_port()}?host=rank0"
    environments = [
        clean_environment(OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE="2", POLYCCL_STORE=store) for rank in range(2)
    ]
    assert run_ranks(environments) == ["rank 0 of 2", "rank 1 of 2"]
