"""However a process ends, its groups end with it: no signal, no hang, the exit status of the script."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

START = """
import atexit, os, sys, threading
def at_exit():
    import torch, torch.distributed as dist
    total = torch.ones(2)
    dist.barrier()
    dist.all_reduce(total)
    dist.destroy_process_group()
    print("handled", total.tolist(), flush=True)
if sys.argv[1] == "handler":
    atexit.register(at_exit)  # before PolyCCL was loaded, so that it runs last
import torch, torch.distributed as dist
dist.init_process_group("polyccl")
rank, size = dist.get_rank(), dist.get_world_size()
peer = (rank + 1) % size
dist.all_reduce(torch.ones(1000))
"""

WAYS = {
    "nothing is pending": "",
    "asynchronous collectives": "works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(20)]",
    "a receive": "work = dist.irecv(torch.zeros(3), peer)",
    "a receive from any rank": "work = dist.irecv(torch.zeros(3))",
    "a future": "dist.irecv(torch.zeros(3), peer).get_future().then(print)",
    "a thread in a receive": """
        thread = threading.Thread(target=lambda: dist.recv(torch.zeros(3), peer), daemon=True)
        thread.start()
        while (frame := sys._current_frames().get(thread.ident)) is None or frame.f_code.co_name != "wait":
            pass
    """,
    "a callback": "dist.group.WORLD.get_comm().recv(torch.zeros(3), peer, True).add_done_callback(lambda: None)",
    "a communicator dropped with work": """
        comm = dist.group.WORLD.get_comm().split([0, 1], "part")
        work = comm.recv(torch.zeros(3), peer, True)
        del comm
    """,
}
IN_SAMPLE = ("a receive from any rank", "a thread in a receive", "a communicator dropped with work")
SHAPES = [
    pytest.param("host=2", marks=pytest.mark.only_in_full),
    pytest.param("host=1,host=1", marks=pytest.mark.only_in_full),
    pytest.param("gloo=1,host=1", marks=pytest.mark.backend("gloo")),
]


def run(islands: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "polyccl", "launch", "--islands", islands, "--", sys.executable, "-c", script, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in IN_SAMPLE else [pytest.mark.only_in_full]) for way in WAYS])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_script_that_ends_with_work_on_its_way_ends_cleanly(shape: str, way: str) -> None:
    done = run(shape, START + textwrap.dedent(WAYS[way]), "plain")
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stdout + done.stderr


@pytest.mark.parametrize("shape", SHAPES)
def test_a_script_that_raises_with_work_on_its_way_ends_with_its_status(shape: str) -> None:
    done = run(shape, START + "work = dist.irecv(torch.zeros(3), peer)\nsys.exit(7)\n", "plain")
    assert done.returncode == 7, done.stderr


@pytest.mark.parametrize("shape", SHAPES)
def test_an_exit_handler_from_before_polyccl_may_use_a_group(shape: str) -> None:
    done = run(shape, START, "handler")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("handled [2.0, 2.0]") == 2, done.stdout + done.stderr


FORK = """
works = {
    "a receive": dist.irecv(torch.zeros(3), peer, tag=1),
    "a receive from any rank": dist.irecv(torch.zeros(3), tag=2),
}
child = os.fork()
if child == 0:
    for what, work in works.items():
        try:
            work.wait()
        except Exception as error:
            if "belongs to the parent process" not in str(error):
                print(what, error, file=sys.stderr, flush=True)
                os._exit(3)
        else:
            os._exit(4)
        if not work.is_completed():
            os._exit(5)
    os._exit(6)
dist.barrier()  # all ranks have forked
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 6, os.waitstatus_to_exitcode(status)
dist.barrier()
for tag in (1, 2):
    dist.send(torch.ones(3), peer, tag=tag)
for work in works.values():
    work.wait()
dist.destroy_process_group()
print("unharmed")
"""


@pytest.mark.parametrize("shape", SHAPES)
def test_work_on_its_way_at_a_fork_raises_in_the_child(shape: str) -> None:
    done = run(shape, START + FORK, "plain")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("unharmed") == 2
