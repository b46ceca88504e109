"""The rendezvous: the roster reaches all ranks, and what is wrong reaches them with one text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from polyccl.errors import CommError, CommTimeout, InvalidArgument, Mismatch
from polyccl.rendezvous import HELLO_LIMIT, Hello, Roster, exchange, machine_id, rank_list
from polyccl.store import FileStore, MemoryStore, TcpStore


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


def together(store: Any, ranks: list[int], size: int, timeout: float = 20.0, **changes: dict[int, Any]) -> list[Any]:
    """What `exchange` returns or raises on each of the ranks, each in a thread; ``changes`` maps fields to values by rank."""

    def one(rank: int) -> Any:
        mine = hello(rank, **{name: values[rank] for name, values in changes.items() if rank in values})
        try:
            return exchange(store, "dp", mine, size, time.monotonic() + timeout)
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
    assert exchange(MemoryStore(), "solo", hello(0), 1, time.monotonic()).size == 1


def test_the_job_token_of_the_environment_is_taken_else_each_rendezvous_draws_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {exchange(MemoryStore(), "solo", hello(0), 1, time.monotonic()).token for _ in range(2)}
    assert len(drawn) == 2
    monkeypatch.setenv("POLYCCL_JOB_TOKEN", "mine")
    assert exchange(MemoryStore(), "solo", hello(0), 1, time.monotonic()).token == "mine"


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


def test_a_missing_rank_0_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyccl.rendezvous.GRACE", 0.1)
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


def test_an_interrupted_rank_0_tells_the_others() -> None:
    class Interrupted(MemoryStore):
        def get(self, key: str, timeout: float | None = None, awaiting: str = "") -> bytes:
            if key.endswith("hello/2"):
                raise KeyboardInterrupt
            return super().get(key, timeout, awaiting)

    store = Interrupted()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(exchange, store, "dp", hello(1), 3, time.monotonic() + 20)
        with pytest.raises(KeyboardInterrupt):
            exchange(store, "dp", hello(0), 3, time.monotonic() + 20)
        with pytest.raises(CommError, match="rank 0 left the rendezvous"):
            other.result(20)


def test_ranks_other_than_0_make_a_fixed_number_of_store_operations() -> None:
    counts: Counter[int] = Counter()

    class Counting(MemoryStore):
        def __init__(self, rank: int, shared: MemoryStore) -> None:
            super().__init__()
            self._values, self._changed, self._rank = shared._values, shared._changed, rank

        def set(self, key: str, value: bytes) -> None:
            counts[self._rank] += 1
            super().set(key, value)

        def get(self, key: str, timeout: float | None = None, awaiting: str = "") -> bytes:
            counts[self._rank] += 1
            return super().get(key, timeout, awaiting)

        def delete(self, key: str) -> None:
            counts[self._rank] += 1
            super().delete(key)

    for size in (2, 16):
        shared = MemoryStore()
        counts.clear()
        with ThreadPoolExecutor(size) as pool:
            jobs = [
                pool.submit(exchange, Counting(rank, shared), "dp", hello(rank), size, time.monotonic() + 20)
                for rank in range(size)
            ]
            assert all(job.result(20).size == size for job in jobs)
        assert {counts[rank] for rank in range(1, size)} == {4}


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
