"""Creation in real processes: whatever goes wrong on one rank is told to all at once, by the name of that rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from polyccl.backends import available

PATIENCE = 60.0
"""Seconds that the ranks of a job may take in all; its communicators wait for three times as long."""

needs_torch = pytest.mark.skipif("not __import__('importlib.util').util.find_spec('torch')", reason="torch is not installed")

BEGIN = """
import os, resource, signal, sys, time
import numpy as np
import polyccl
from polyccl import create, meeting
from polyccl.store import FileStore
directory, rank, size, victim = sys.argv[1], *map(int, sys.argv[2:5])
def join(backend, name="dp", **options):
    return polyccl.new_comm(backend, "cpu", name, store=FileStore(directory), rank=rank, size=size, timeout=180, **options)
def end():
    os.kill(os.getpid(), signal.SIGKILL)
def told(call):
    began = time.monotonic()
    try:
        call()
    except BaseException as error:
        print(f"{time.monotonic() - began:.1f} s, {type(error).__name__}: {error}", flush=True)
"""

WHILE_IT_BUILDS = """
if rank == victim:
    create._Builder.plain = lambda *arguments: end()
told(lambda: join("gloo"))
"""

BEFORE_ITS_SPLIT = """
comm = join("bridge")
if rank == victim:
    end()
told(lambda: comm.split(list(range(size)), "part"))
"""

LEAVES_BEFORE_ITS_SPLIT = """
comm = join("bridge", hints={"island": str(rank % 2)})
comm.barrier()
if rank == victim:
    sys.exit()
told(lambda: comm.split(list(range(size)), "part"))
"""

NO_DESCRIPTORS = """
def build(self, *arguments, real=create._Builder._native):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        os.open("/dev/null", os.O_RDONLY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
if rank == victim:
    create._Builder._native = build
told(lambda: join("bridge"))
"""

NO_LIBRARY = """
told(lambda: join("bridge", hints={"local": "nosuch" if rank == victim else "host"}))
"""


def run(script: str, directory: str, size: int, victim: int, local: str = "host") -> list[str]:
    """What each rank says."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("POLYCCL_")} | {"POLYCCL_LOCAL": local}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN + script, directory, str(rank), str(size), str(victim)],
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        return [process.communicate(timeout=PATIENCE)[0].strip() for process in ranks]
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.parametrize("victim", range(3))
def test_a_rank_that_dies_while_ranks_build_their_parts_is_named(directory: str, victim: int) -> None:
    if "gloo" not in available():
        pytest.skip("Gloo is not built")
    said = run(WHILE_IT_BUILDS, directory, 3, victim, "gloo")
    for rank in {0, 1, 2} - {victim}:
        assert re.search(rf"PeerLost: communicator 'dp': rank {victim} \(host .* ended during the creation", said[rank])


@pytest.mark.parametrize("victim", range(3))
def test_a_rank_that_dies_before_a_split_is_named(directory: str, victim: int) -> None:
    said = run(BEFORE_ITS_SPLIT, directory, 3, victim)
    for rank in {0, 1, 2} - {victim}:
        assert re.search(rf"(PeerLost|Error): .*rank {victim} \(.*(is lost|has ended|ended during)", said[rank])


@pytest.mark.parametrize("victim", range(4))
def test_a_rank_that_leaves_before_a_split_is_named(directory: str, victim: int) -> None:
    said = run(LEAVES_BEFORE_ITS_SPLIT, directory, 4, victim)
    for rank in {0, 1, 2, 3} - {victim}:
        assert re.search(rf"^\d\.\d s, PeerLost: .*rank {victim}\b", said[rank]), said


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_runs_out_of_descriptors_is_named(directory: str, victim: int) -> None:
    said = run(NO_DESCRIPTORS, directory, 3, victim)
    assert "OSError: [Errno 24]" in said[victim]
    for rank in {0, 1, 2} - {victim}:
        assert re.search(rf"Aborted: communicator 'dp': rank {victim} \(.* left the creation with OSError", said[rank])


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_without_its_library_is_named(directory: str, victim: int) -> None:
    said = run(NO_LIBRARY, directory, 3, victim)
    assert re.search("BackendUnavailable: .*nosuch", said[victim])
    for rank in {0, 1, 2} - {victim}:
        assert re.search(
            rf"BackendUnavailable: communicator 'dp': rank {victim} .* failed during the creation: .*nosuch", said[rank]
        )


LENGTHS = """
import datetime
for length in (float("inf"), 1e300, 10**30, 10**400, datetime.timedelta.max, datetime.timedelta(days=30), 1e9):
    comm = polyccl.new_comm("auto", "cpu", "long", store=FileStore(directory), rank=rank, size=size, timeout=length)
    comm.barrier()
    comm.split(list(range(size)), "part").barrier(timeout=length)
    comm.barrier(async_op=True).wait(length)
    comm.set_timeout(length)
    comm.barrier()
    comm.finalize(timeout=length)
comm = polyccl.new_comm("auto", "cpu", "last", store=FileStore(directory), rank=rank, size=size, timeout=30)
for length in (0, -1, -(10**400), float("nan"), "soon", True):
    for call in (
        lambda: polyccl.new_comm("auto", "cpu", "none", store=FileStore(directory), rank=rank, size=size, timeout=length),
        lambda: comm.split(list(range(size)), "none", timeout=length),
        lambda: comm.set_timeout(length),
    ):
        try:
            call()
        except polyccl.InvalidArgument as error:
            assert "timeout" in str(error), error
        else:
            raise AssertionError(length)
comm.barrier()
print("all of them")
"""


def test_a_timeout_may_have_any_length_but_none(directory: str) -> None:
    assert run(LENGTHS, directory, 2, -1) == ["all of them"] * 2


SAME_PORT = """
import gc
import torch.distributed as dist
from datetime import timedelta
place = FileStore(directory)
store = None
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)
    place.set("port", str(store.port).encode())
port = int(place.get("port", 30))
comms = []
for number in range(3):
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=30))
    comms.append(polyccl.new_comm("host", "cpu", "dp", store=store, rank=rank, size=size, timeout=30))
    comms[0].barrier()
    store = None
    gc.collect()
    comms[0].barrier()
for comm in comms:
    comm.split(list(range(size)), "part").barrier()
print("three communicators")
"""


@needs_torch
def test_a_users_store_may_close_after_the_creation_and_its_port_serve_the_next(directory: str) -> None:
    assert run(SAME_PORT, directory, 2, -1) == ["three communicators"] * 2
