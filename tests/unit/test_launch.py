"""`polyccl launch`, with real processes: environment, output, exit status, signals, and that nothing is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polyccl.cli.launch import Island, parse_islands, seat

DEADLINE = 30.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "polyccl", "launch", *arguments]


def environ(**more: str) -> dict[str, str]:
    """This process's environment, without what an outer launcher or a user may have set."""
    outer = ("POLYCCL_", "MASTER_", "OMP_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(outer) and name not in ("RANK", "WORLD_SIZE")}
    return kept | more


def run(islands: str, script: str, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Launch a shell script as every rank, to its end."""
    words = command("--islands", islands, *options, "--", "sh", "-c", script)
    return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=False, env=environ(**more))


class Job:
    """A launch that is under way."""

    def __init__(self, islands: str, script: str, *options: str) -> None:
        words = command("--islands", islands, *options, "--", "sh", "-c", script)
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ())

    def wait_for_lines(self, count: int) -> list[str]:
        """The next ``count`` lines of output; the test's own time limit ends a wait in vain."""
        assert self.process.stdout is not None
        return [self.process.stdout.readline().rstrip("\n") for _ in range(count)]

    def end(self) -> tuple[int, str, str]:
        """Exit status, the rest of the output, and the errors."""
        output, errors = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, output, errors


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    """Starts jobs, and ends those that the test leaves."""
    jobs: list[Job] = []

    def make(*arguments: str) -> Job:
        jobs.append(Job(*arguments))
        return jobs[-1]

    yield make
    for job in jobs:
        if job.process.poll() is None:
            job.process.terminate()
        job.process.communicate(timeout=DEADLINE)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    """Return once none of the processes runs; fail after a deadline."""
    deadline = time.monotonic() + 10
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"processes {left} are left over"
        time.sleep(0.01)


# --- what is started


def test_islands_are_read_from_their_list() -> None:
    assert parse_islands("gloo=2,gloo=1, host") == [
        Island("gloo", 2, "0:gloo"),
        Island("gloo", 1, "1:gloo"),
        Island("host", 1, "2:host"),
    ]
    assert parse_islands("2, 3") == [Island("", 2, "0"), Island("", 3, "1")]


@pytest.mark.parametrize("text", ["", "gloo=", "gloo=0", "=2", "gloo=2,", "gloo=-1", "gloo:2", "9=1"])
def test_what_is_no_list_of_islands_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not <backend>"):
        parse_islands(text)


def test_ranks_fill_one_island_after_the_other_or_are_dealt_round() -> None:
    islands = parse_islands("a=3,b=1,c=2")
    assert [island.backend for island in seat(islands, interleave=False)] == list("aaabcc")
    assert [island.backend for island in seat(islands, interleave=True)] == list("abcaca")


NAMES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR POLYCCL_LOCAL POLYCCL_ISLAND POLYCCL_CHECK POLYCCL_TIMEOUT "
    "OMP_NUM_THREADS POLYCCL_RANK"
)


def seen(islands: str, *options: str, **more: str) -> list[dict[str, str]]:
    """The variables that each rank saw, by rank."""
    script = f'for name in {NAMES}; do eval "printf \'%s=%s;\' $name \\"\\${{$name-}}\\""; done; echo'
    done = run(islands, script, *options, **more)
    assert done.returncode == 0, done.stderr
    lines = [line.split("] ", 1)[1] for line in done.stdout.splitlines()]
    ranks = [dict(part.split("=", 1) for part in line.split(";") if part) for line in lines]
    return sorted(ranks, key=lambda each: int(each["RANK"]))


def test_ranks_get_torchruns_variables_and_their_island() -> None:
    first, second, third = seen("gloo=2,host")
    assert first == {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "POLYCCL_LOCAL": "gloo",
        "POLYCCL_ISLAND": "0:gloo",
        "POLYCCL_CHECK": "",
        "POLYCCL_TIMEOUT": "",
        "OMP_NUM_THREADS": "1",
        "POLYCCL_RANK": "",
    }
    assert (second["RANK"], second["POLYCCL_ISLAND"]) == ("1", "0:gloo")
    assert (third["RANK"], third["POLYCCL_ISLAND"], third["POLYCCL_LOCAL"]) == ("2", "1:host", "host")


def test_interleaving_and_options_reach_the_ranks() -> None:
    ranks = seen(
        "gloo=2,gloo=2", "--interleave", "--check", "--timeout", "12.5", OMP_NUM_THREADS="3", POLYCCL_RANK="9", POLYCCL_SIZE="10"
    )
    assert [rank["POLYCCL_ISLAND"] for rank in ranks] == ["0:gloo", "1:gloo", "0:gloo", "1:gloo"]
    assert {rank["POLYCCL_CHECK"] for rank in ranks} == {"1"}
    assert {rank["POLYCCL_TIMEOUT"] for rank in ranks} == {"12.5"}
    assert {rank["OMP_NUM_THREADS"] for rank in ranks} == {"3"}
    assert {rank["POLYCCL_RANK"] for rank in ranks} == {""}


def test_the_check_can_be_switched_off() -> None:
    assert seen("host", "--no-check", POLYCCL_CHECK="1")[0]["POLYCCL_CHECK"] == "0"
    assert seen("host", POLYCCL_CHECK="1")[0]["POLYCCL_CHECK"] == "1"


def test_ranks_meet_in_the_launchers_store_under_a_fresh_token() -> None:
    script = """
import os
from polyccl.ranks import detect
from polyccl.store import default_store
place = detect()
store = default_store("dp", place.rank, place.size)
store.set(f"{place.rank}", os.environ["POLYCCL_JOB_TOKEN"].encode())
print(store.get(f"{1 - place.rank}", 20).decode())
"""
    tokens = set()
    for _ in range(2):
        words = command("--islands", "gloo,gloo", "--", sys.executable, "-c", script)
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=DEADLINE, check=False, env=environ(POLYCCL_JOB_TOKEN="stale")
        )
        assert done.returncode == 0, done.stderr
        of_job = {line.split("] ", 1)[1] for line in done.stdout.splitlines()}
        assert len(of_job) == 1
        tokens |= of_job
    assert len(tokens) == 2
    assert "stale" not in tokens


# --- output


def test_every_line_is_prefixed_by_rank_and_island_and_streams_stay_apart() -> None:
    done = run("gloo=2,host", "echo one; echo; echo two >&2; printf unfinished")
    expected = Counter(
        f"[{rank} {label}] {text}"
        for rank, label in enumerate(["0:gloo", "0:gloo", "1:host"])
        for text in ("one", "", "unfinished")
    )
    assert Counter(done.stdout.splitlines()) == expected
    assert sorted(done.stderr.splitlines()) == ["[0 0:gloo] two", "[1 0:gloo] two", "[2 1:host] two"]


def test_much_output_arrives_whole_and_in_order() -> None:
    done = run("host=2", "seq 1 30000")
    lines = done.stdout.splitlines()
    for rank in range(2):
        prefix = f"[{rank} 0:host] "
        assert [line.removeprefix(prefix) for line in lines if line.startswith(prefix)] == [str(n) for n in range(1, 30001)]


def test_output_is_coloured_on_a_terminal_only() -> None:
    ours, theirs = os.openpty()
    words = command("--islands", "host", "--", "echo", "hello")
    with subprocess.Popen(words, stdout=theirs, env={**environ(), "NO_COLOR": ""}) as process:
        os.close(theirs)
        shown = b""
        while b"hello" not in shown:
            shown += os.read(ours, 4096)
        assert process.wait(DEADLINE) == 0
    os.close(ours)
    assert b"\x1b[36m[0 0:host]\x1b[0m hello" in shown
    assert "\x1b" not in run("host", "echo hello").stdout


def test_a_reader_that_leaves_ends_the_job(start: Callable[..., Job]) -> None:
    job = start("host=2", "while :; do echo x; done")
    job.wait_for_lines(2)
    assert job.process.stdout is not None
    job.process.stdout.close()
    assert job.process.wait(DEADLINE) == 128 + signal.SIGPIPE


# --- how it ends


def test_success_is_zero() -> None:
    done = run("host=3", "exit 0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_first_failure_is_the_exit_status_and_ends_the_others() -> None:
    began = time.monotonic()
    done = run("host=3", "if [ $RANK = 1 ]; then exit 7; fi; exec sleep 1000", "--grace", "20")
    assert done.returncode == 7
    assert done.stderr == "polyccl launch: rank 1 [0:host] ended with exit status 7; ending the others\n"
    assert time.monotonic() - began < 15


def test_a_rank_that_a_signal_ends_counts_as_128_and_its_number() -> None:
    done = run("host=2", "if [ $RANK = 0 ]; then kill -SEGV $$; fi; exec sleep 1000")
    assert done.returncode == 128 + signal.SIGSEGV
    assert "rank 0 [0:host] ended with signal SIGSEGV" in done.stderr


def test_ranks_that_ignore_the_end_are_killed_after_the_grace_time() -> None:
    done = run("host=2", "trap '' TERM; [ $RANK = 0 ] && exit 3; while :; do sleep 1; done", "--grace", "0.2")
    assert done.returncode == 3


def test_a_program_that_is_not_there_is_refused() -> None:
    words = command("--islands", "host", "--", "no-such-program")
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=False, env=environ())
    assert done.returncode == 127
    assert "no program 'no-such-program'" in done.stderr


def test_a_backend_that_is_not_there_is_one_sentence() -> None:
    done = run("host=2,nosuch=2", "echo started")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("polyccl launch: there is no backend 'nosuch'")


def test_the_first_to_fail_in_time_is_named_first() -> None:
    """Rank 0 fails after rank 2 has, while the launcher, which is stopped, sees neither."""
    script = """
        [ $RANK = 1 ] && exec sleep 30
        read go < $FIFO-$RANK
        exit 1$RANK
    """
    with tempfile.TemporaryDirectory() as folder:
        fifo = f"{folder}/go"
        for rank in (0, 2):
            os.mkfifo(f"{fifo}-{rank}")
        words = command("--islands", "host=3", "--", "sh", "-c", "echo $$; " + script)
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ(FIFO=fifo)) as job:
            assert job.stdout is not None
            pids = {}
            for _ in range(3):
                line = job.stdout.readline()
                pids[int(line[1])] = int(line.split()[-1])
            job.send_signal(signal.SIGSTOP)
            for rank in (2, 0):
                Path(f"{fifo}-{rank}").write_text("now\n")
                wait_until_gone([pids[rank]])
            job.send_signal(signal.SIGCONT)
            _, errors = job.communicate(timeout=DEADLINE)
    assert job.returncode == 12
    assert "rank 2 [0:host] ended with exit status 12" in errors


TORCH_AGAIN = """
import torch
import torch.distributed as dist
for backend in ("polyccl", "gloo", "polyccl"):
    dist.init_process_group(backend)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    dist.destroy_process_group()
    print(backend, int(ones))
"""


def test_torchs_groups_can_be_made_again() -> None:
    """The store of torch.distributed is the launcher's, not a group's of rank 0."""
    pytest.importorskip("torch")
    words = command("--islands", "host=2,host=1", "--", sys.executable, "-c", TORCH_AGAIN)
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False, env=environ())
    assert done.returncode == 0, done.stderr
    assert Counter(line.split("] ", 1)[1] for line in done.stdout.splitlines()) == {"polyccl 3": 6, "gloo 3": 3}


def test_the_timeout_reaches_torchs_groups() -> None:
    pytest.importorskip("torch")
    script = """
import torch.distributed as dist
dist.init_process_group("polyccl")
print(dist.group.WORLD.get_comm().get_options().timeout)
"""
    for option, seen_by_ranks in ((("--timeout", "12.5"), "12.5"), ((), "1800.0")):
        words = command("--islands", "host=2", *option, "--", sys.executable, "-c", script)
        done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False, env=environ())
        assert done.returncode == 0, done.stderr
        assert {line.split()[-1] for line in done.stdout.splitlines()} == {seen_by_ranks}


@pytest.mark.parametrize("length", ["inf", "1e300", "5000000"])
def test_times_may_have_any_length(start: Callable[..., Job], length: str) -> None:
    job = start("host=2", "echo $POLYCCL_TIMEOUT; exec sleep 1000", "--grace", length, "--timeout", length)
    assert {float(line.split()[-1]) for line in job.wait_for_lines(2)} == {float(length)}
    job.process.terminate()
    assert job.end()[0] == 128 + signal.SIGTERM


def test_wrong_islands_are_refused() -> None:
    done = run("gloo=zero", "exit 0")
    assert done.returncode == 2
    assert "is not <backend>" in done.stderr


def test_the_commands_own_options_are_its_own() -> None:
    words = command("--islands", "host", "--", "echo", "--interleave", "--help", "--", "x")
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=True, env=environ())
    assert done.stdout == "[0 0:host] --interleave --help -- x\n"


# --- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_every_rank_and_decides_the_exit_status(start: Callable[..., Job], number: signal.Signals) -> None:
    job = start("host=2", "echo ready; exec sleep 1000")
    assert sorted(job.wait_for_lines(2)) == ["[0 0:host] ready", "[1 0:host] ready"]
    job.process.send_signal(number)
    assert job.end() == (128 + number, "", "")


def test_ranks_may_end_well_on_a_signal(start: Callable[..., Job]) -> None:
    script = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    job = start("host=2", script)
    job.wait_for_lines(2)
    job.process.terminate()
    status, output, _ = job.end()
    assert status == 0
    assert sorted(output.splitlines()) == ["[0 0:host] saved", "[1 0:host] saved"]


def test_ranks_that_ignore_a_signal_are_killed_after_the_grace_time(start: Callable[..., Job]) -> None:
    job = start("host", "trap '' INT; echo ready; while :; do sleep 1; done", "--grace", "0.2")
    job.wait_for_lines(1)
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 128 + signal.SIGINT


def test_a_second_signal_kills_at_once(start: Callable[..., Job]) -> None:
    job = start("host", "trap 'echo first' TERM; echo ready; while :; do sleep 0.05; done", "--grace", "1000")
    job.wait_for_lines(1)
    job.process.terminate()
    assert job.wait_for_lines(1) == ["[0 0:host] first"]
    job.process.terminate()
    assert job.end()[0] == 128 + signal.SIGTERM


# --- nothing is left


def test_what_a_rank_started_ends_with_it() -> None:
    done = run("host=2", "sleep 1000 & echo $!; exit 0")
    assert done.returncode == 0
    pids = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(pids) == 2
    wait_until_gone(pids)


def test_what_the_ranks_started_dies_with_a_launcher_that_is_killed(start: Callable[..., Job]) -> None:
    job = start("host=2", "sleep 1000 & echo $!; sh -c 'sleep 1000 & echo $!; wait' & wait")
    pids = [int(line.split()[-1]) for line in job.wait_for_lines(4)]
    assert all(alive(pid) for pid in pids)
    job.process.kill()
    wait_until_gone(pids)


def test_ranks_die_with_a_launcher_that_is_killed(start: Callable[..., Job]) -> None:
    job = start("host=2", "echo $$; exec sleep 1000")
    pids = [int(line.split()[-1]) for line in job.wait_for_lines(2)]
    assert all(alive(pid) for pid in pids)
    job.process.kill()
    wait_until_gone(pids)


def test_a_process_outside_of_the_ranks_session_does_not_hold_up_the_end(tmp_path: Path) -> None:
    done = run("host", f"setsid sleep 1000 & echo $! > {tmp_path}/pid; exit 0")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert done.returncode == 0
