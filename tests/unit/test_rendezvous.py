"""The rendezvous: the roster reaches all ranks, and what is wrong reaches them with one text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyccl import rendezvous
from polyccl.errors import Aborted, BackendUnavailable, CommError, CommTimeout, InvalidArgument, Mismatch, PeerLost
from polyccl.meeting import Meeting
from polyccl.rendezvous import HELLO_LIMIT, Hello, Roster, exchange, machine_id, rank_list
from polyccl.store import FileStore, MemoryStore, Store, TcpStore


def hello(rank: int, /, **changes: Any) -> Hello:
    first = Hello(
        rank=rank,
        abi=0x10000,
        version="0.1",
        backend="gloo",
        library_version="1.0",
        compatibility="gloo-1",
        process=f"{rank:016x}",
        address="10.0.0.1",
        port=4000 + rank,
        pid=100 + rank,
        device="cpu",
        host="here",
        options={"check": True, "chunk_bytes": 1 << 20},
    )
    return replace(first, **changes)


def roster(*hellos: Hello) -> Roster:
    return Roster("dp", hellos, 7, "token")


def meet(store: Store, mine: Hello, size: int, timeout: float = 20.0, build: Callable[[], None] = lambda: None) -> Roster:
    """One rank's creation: the rendezvous, its own part, the confirmation."""
    with Meeting(store, "dp", mine.rank, size, time.monotonic() + timeout) as meeting:
        found = exchange(meeting, mine)
        build()
        meeting.confirm()
    return found


def together(store: Any, ranks: list[int], size: int, timeout: float = 20.0, **changes: dict[int, Any]) -> list[Any]:
    """What each of the ranks gets or raises, each in a thread; ``changes`` maps fields to values by rank."""

    def one(rank: int) -> Any:
        mine = hello(rank, **{name: values[rank] for name, values in changes.items() if rank in values})
        try:
            return meet(store, mine, size, timeout)
        except CommError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks, timeout=30))


@pytest.mark.parametrize("make", [lambda path: MemoryStore(), FileStore, lambda path: TcpStore("127.0.0.1", 0, serve=True)])
def test_all_ranks_get_the_same_roster(make: Callable[[Any], Any], tmp_path: Any) -> None:
    store = make(tmp_path)
    first, *others = together(store, [0, 1, 2, 3], 4)
    assert [each.rank for each in first.hellos] == [0, 1, 2, 3]
    assert first.hellos[3].port == 4003
    assert first.group
    assert first.token
    assert all(other == first for other in others)


def test_a_single_rank_needs_no_store_and_no_others() -> None:
    assert meet(MemoryStore(), hello(0), 1, 0).size == 1


def test_the_job_token_of_the_environment_is_taken_else_each_process_draws_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (drawn,) = {meet(MemoryStore(), hello(0), 1).token for _ in range(2)}
    assert len(drawn) == 64
    assert rendezvous._drawn_token(-1) != drawn, "another process, another token"
    monkeypatch.setenv("POLYCCL_JOB_TOKEN", "mine")
    assert meet(MemoryStore(), hello(0), 1).token == "mine"
    assert {each.token for each in together(MemoryStore(), [0, 1], 2)} == {"mine"}


def test_a_token_of_the_environment_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYCCL_JOB_TOKEN", "the-job-s-secret")
    sent: list[bytes] = []
    real = Meeting.set
    monkeypatch.setattr(Meeting, "set", lambda self, key, value: (sent.append(value), real(self, key, value))[1])
    store = MemoryStore()
    together(store, [0, 1], 2)
    assert len(sent) == 2
    assert all(b"the-job-s-secret" not in value for value in [*sent, *store._values.values()])


def test_a_name_can_be_used_again_and_gives_another_group() -> None:
    store = MemoryStore()
    groups = []
    for _ in range(3):
        rosters = together(store, [0, 1, 2], 3)
        assert len({each.group for each in rosters}) == 1
        groups.append(rosters[0].group)
    assert len(set(groups)) == 3


def test_missing_ranks_are_named_with_one_text_on_all_that_came() -> None:
    first, *others = together(MemoryStore(), [0, 2, 5], 6, timeout=0.3)
    assert type(first) is CommTimeout
    assert "3 of 6 ranks did not come" in str(first)
    assert "ranks 1, 3-4 (there: 0, 2, 5, on here)" in str(first)
    assert [(type(each), str(each)) for each in others] == [(CommTimeout, str(first))] * 2


def test_a_missing_rank_0_is_named() -> None:
    (error,) = together(MemoryStore(), [1], 2, timeout=0.1)
    assert type(error) is CommTimeout
    assert "heard nothing from rank 0" in str(error)


def test_a_failed_rendezvous_leaves_nothing_that_the_next_one_trips_over() -> None:
    store = MemoryStore()
    assert all(type(each) is CommTimeout for each in together(store, [0, 1], 3, timeout=0.2))
    assert all(type(each) is Roster for each in together(store, [0, 1, 2], 3))


def test_a_disagreement_is_raised_on_all_ranks_with_one_text() -> None:
    options = {1: {"check": True, "chunk_bytes": 4096}}
    errors = together(MemoryStore(), [0, 1, 2], 3, options=options)
    assert {type(each) for each in errors} == {Mismatch}
    assert len({str(each) for each in errors}) == 1
    assert "option 'chunk_bytes': 1048576 on ranks 0, 2; 4096 on rank 1 (island 0:gloo, host here)" in str(errors[0])


def test_a_hello_of_another_protocol_or_none_is_refused_on_all_ranks() -> None:
    errors = together(MemoryStore(), [0, 1, 2], 3, protocol={2: 99})
    assert {type(each) for each in errors} == {Mismatch}
    assert len({str(each) for each in errors}) == 1
    assert "the hello of rank 2 has version 99" in str(errors[0])


def failing(error: BaseException) -> Callable[[], None]:
    def build() -> None:
        raise error

    return build


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize(
    ("cause", "told", "text"),
    [
        (OSError(24, "Too many open files"), Aborted, "left the creation with OSError: .*Too many open files"),
        (MemoryError(), Aborted, "left the creation with MemoryError"),
        (KeyboardInterrupt(), Aborted, "left the creation with KeyboardInterrupt"),
        (BackendUnavailable("no library"), BackendUnavailable, "failed during the creation: no library"),
    ],
)
def test_a_rank_that_fails_after_its_hello_is_told_to_all_at_once(who: int, cause: BaseException, told: type, text: str) -> None:
    store, began = MemoryStore(), time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(meet, store, hello(rank), 3, 60, failing(cause) if rank == who else lambda: None) for rank in range(3)]
        for rank, job in enumerate(jobs):
            if rank == who:
                with pytest.raises(type(cause)):
                    job.result(20)
            else:
                with pytest.raises(told, match=rf"communicator 'dp': rank {who} .*{text}"):
                    job.result(20)
    assert time.monotonic() - began < 20


def test_a_rank_that_fails_before_its_hello_is_told_to_all_at_once() -> None:
    store = MemoryStore()
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(meet, store, hello(rank), 3, 60) for rank in (0, 1)]
        Meeting(store, "dp", 2, 3, time.monotonic() + 60).report(BackendUnavailable("there is no plugin for 'gloo'"))
        for other in others:
            with pytest.raises(BackendUnavailable, match=r"rank 2 .* failed during the creation: there is no plugin for 'gloo'"):
                other.result(20)


def test_nobody_gets_a_communicator_before_all_have_built_theirs() -> None:
    store, built = MemoryStore(), []
    rest = threading.Event()

    def build(rank: int) -> None:
        assert rank < 2 or rest.wait(20)
        built.append(rank)
        if len(built) == 2:
            rest.set()

    def one(rank: int) -> list[int]:
        meet(store, hello(rank), 3, build=lambda: build(rank))
        return list(built)

    with ThreadPoolExecutor(3) as pool:
        assert [sorted(each) for each in pool.map(one, range(3), timeout=20)] == [[0, 1, 2]] * 3


RANK = """
import os, signal, sys, time
from test_rendezvous import hello
from polyccl.meeting import Meeting
from polyccl.rendezvous import exchange
from polyccl.store import FileStore
directory, rank, size, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
mine = hello(rank, pid=os.getpid())
with Meeting(FileStore(directory), "dp", rank, size, time.monotonic() + 60) as meeting:
    if how == "before":
        meeting.set(f"in/{rank}", b"")
        print("here", flush=True)
        signal.pause()
    exchange(meeting, mine)
    print("here", flush=True)
    signal.pause()
"""


@contextmanager
def process(directory: Path, rank: int, size: int, how: str) -> Iterator[subprocess.Popen[str]]:
    """A rank in a process of its own, which says "here" and then waits to be ended."""
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    words = [sys.executable, "-c", RANK, str(directory), str(rank), str(size), how]
    with subprocess.Popen(words, env=paths, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_ends_during_the_creation_is_named_at_once(tmp_path: Path, victim: int, how: str) -> None:
    """By way of a store of files, which itself cannot tell."""
    others = [rank for rank in range(3) if rank != victim]
    with process(tmp_path, victim, 3, how) as lost, ThreadPoolExecutor(2) as pool:

        def one(rank: int) -> str:
            with pytest.raises(PeerLost) as caught:
                meet(FileStore(tmp_path), hello(rank), 3, 60)
            return str(caught.value)

        waiting = [pool.submit(one, rank) for rank in others]
        assert lost.stdout is not None
        assert lost.stdout.readline() == "here\n"
        lost.kill()
        for each in waiting:
            assert re.search(rf"rank {victim} \(host [^,]+, pid {lost.pid}\) (ended during the creation|is gone)", each.result(20))


def test_a_rank_that_comes_twice_is_told_to_all(tmp_path: Path) -> None:
    with process(tmp_path, 1, 3, "after") as first, ThreadPoolExecutor(1) as pool:
        leader = pool.submit(meet, FileStore(tmp_path), hello(0), 3, 60)
        found = FileStore(tmp_path).get("dp/lead", 20)
        watching = Meeting(FileStore(tmp_path), "dp", 2, 3, time.monotonic() + 20)
        watching._enter(found)
        watching.get("hello/1", "rank 1")
        with pytest.raises(Mismatch, match=rf"two processes came as rank 1: first pid {first.pid} on host here, then pid"):
            meet(FileStore(tmp_path), hello(1), 3, 20)
        with pytest.raises(Mismatch, match="two processes came as rank 1"):
            leader.result(20)
        watching._leave()


def test_a_restarted_rank_0_starts_a_meeting_that_the_others_find(tmp_path: Path) -> None:
    """What an ended process left in the store is not taken for the meeting."""
    with process(tmp_path, 0, 2, "before") as first:
        FileStore(tmp_path).get("dp/lead", 20)
        first.kill()
        first.wait(20)
    with ThreadPoolExecutor(2) as pool:
        looked = threading.Event()

        class Watched(FileStore):
            def get(self, key: str, timeout: float | None = None, awaiting: str = "") -> bytes:
                found = super().get(key, timeout, awaiting)
                looked.set()
                return found

        early = pool.submit(meet, Watched(tmp_path), hello(1), 2, 20)
        assert looked.wait(20)
        assert meet(FileStore(tmp_path), hello(0), 2, 20) == early.result(20)


def test_a_failure_that_is_known_otherwise_ends_the_wait() -> None:
    known = PeerLost("rank 7 of the parent is gone")
    meeting = Meeting(MemoryStore(), "dp", 1, 2, time.monotonic() + 60, lambda: known)
    with pytest.raises(PeerLost, match="rank 7 of the parent"):
        meeting.__enter__()


def test_the_users_store_holds_nothing_after_a_creation() -> None:
    store = MemoryStore()
    together(store, [0, 1, 2], 3)
    assert store._values == {}


def test_ranks_other_than_0_make_a_fixed_number_of_store_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: Counter[int] = Counter()
    real = TcpStore._talk

    def count(self: TcpStore, *arguments: Any) -> Any:
        requests[id(self)] += 1
        return real(self, *arguments)

    monkeypatch.setattr(TcpStore, "_talk", count)
    for size in (2, 16):
        requests.clear()
        together(MemoryStore(), list(range(size)), size)
        *others, leader = sorted(requests.values())
        assert set(others) == {5}  # attend, look, say hello for the roster, confirm, leave
        assert leader <= 2 * size + 4


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("version", "0.2", "PolyCCL's version: 0.1 on rank 0 .*; 0.2 on rank 1"),
        ("abi", 0x20000, "the ABI's version: 1.0 on rank 0 .*; 2.0 on rank 1"),
        ("byte_order", "big", "the byte order"),
        ("options", {"check": True}, "'chunk_bytes': 1048576 on rank 0 .*; nothing on rank 1"),
        ("process", f"{0:016x}", "are one process"),
        ("rank", 0, "came as rank 1 and says that it is rank 0"),
    ],
)
def test_what_must_agree_is_refused_where_it_differs(field: str, value: Any, text: str) -> None:
    roster(hello(0), hello(1)).validate()
    with pytest.raises(Mismatch, match=text):
        roster(hello(0), hello(1, **{field: value})).validate()


def test_what_may_differ_is_accepted() -> None:
    roster(hello(0), hello(1, backend="nccl", library_version="2.28", compatibility="n", device="cuda:0", host="b")).validate()


def test_islands_are_ordered_by_their_lowest_rank_and_named() -> None:
    interleaved = roster(hello(0, backend="nccl"), hello(1), hello(2, backend="nccl"), hello(3))
    assert interleaved.islands() == [[0, 2], [1, 3]]
    assert interleaved.labels() == ["0:nccl", "1:gloo"]
    assert interleaved.member(3) == "rank 3 (island 1:gloo, host here)"
    assert interleaved.members()[2] == "rank 2 (island 0:nccl, host here)"


@pytest.mark.parametrize("field", ["backend", "compatibility", "island", "machine"])
def test_each_part_of_the_key_separates_islands(field: str) -> None:
    assert roster(hello(0), hello(1)).islands() == [[0, 1]]
    assert roster(hello(0), hello(1, **{field: "other"})).islands() == [[0], [1]]


def test_islands_with_one_label_get_distinct_names() -> None:
    assert roster(hello(0, island="a"), hello(1, island="a", backend="nccl"), hello(2, island="b")).labels() == [
        "a#0:gloo",
        "a#1:nccl",
        "b",
    ]


def test_a_hello_survives_encoding() -> None:
    mine = hello(3, island="é")
    assert Hello.decode(mine.encode(), "rank 3") == mine
    assert Roster.decode(roster(hello(0), mine).encode()).hellos[1] == mine


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"[" * 5000,
        hello(1).encode().replace(b'"port": 4001', b'"port": "4001"'),
        hello(1).encode().replace(b'"port": 4001, ', b""),
        hello(1).encode().replace(b'"port": 4001', b'"port": true'),
        hello(1).encode().replace(b'"port": 4001', b'"port": 4001, "more": 1'),
        hello(1).encode().replace(b'"check": true', b'"check": [1]'),
        hello(1).encode() + b" " * HELLO_LIMIT,
    ],
)
def test_a_malformed_hello_is_refused(data: bytes) -> None:
    with pytest.raises(CommError, match="the hello of rank 1 is malformed"):
        Hello.decode(data, "rank 1")


def test_a_hello_beyond_the_bound_is_refused_before_it_is_sent() -> None:
    with pytest.raises(InvalidArgument, match="shorten"):
        hello(0, island="x" * HELLO_LIMIT).encode()


def test_ranks_are_listed_in_short() -> None:
    assert rank_list([5, 0, 1, 2]) == "0-2, 5"
    assert rank_list([]) == ""


def test_a_machine_has_one_identity() -> None:
    assert machine_id() == machine_id() != ""
