"""The link: messages arrive whole, by tag, in any order; strangers, wrong sizes, lost peers and forks harm nothing else.

What each rank does is in ``link_ranks.py``; a test here starts the ranks, lets them meet, and sees how they end.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

link = pytest.importorskip("polyccl._native").link

RANKS = Path(__file__).with_name("link_ranks.py")
SECONDS = 50.0


class Job:
    """Ranks as processes of their own, on loopback."""

    def __init__(self, body: str, size: int) -> None:
        environment = {
            **os.environ,
            "POLYCCL_SOCKET_IFNAME": "=lo",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(RANKS), body, str(rank), str(size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
            )
            for rank in range(size)
        ]
        self.deadline = time.monotonic() + SECONDS

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdin, rank.stdout, rank.stderr):
                assert pipe is not None
                pipe.close()

    def run(self) -> list[int]:
        """Answers the ranks until all have ended; their exit statuses."""
        waiting: dict[int, object] = {}
        running = set(range(len(self.ranks)))
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self.ranks):
                assert rank.stdout is not None
                selector.register(rank.stdout, selectors.EVENT_READ, number)
            while running:
                events = selector.select(max(self.deadline - time.monotonic(), 0))
                assert events, f"ranks {sorted(running)} still run; waiting at a meeting: {sorted(waiting)}"
                for key, _ in events:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if line:
                        waiting[key.data] = json.loads(line)
                    else:
                        selector.unregister(key.fileobj)
                        running.discard(key.data)
                if running and running == set(waiting):
                    self._answer(waiting)
        return [rank.wait(timeout=10) for rank in self.ranks]

    def _answer(self, waiting: dict[int, object]) -> None:
        answer = json.dumps([waiting[number] for number in sorted(waiting)]).encode() + b"\n"
        for number in list(waiting):
            pipe = self.ranks[number].stdin
            assert pipe is not None
            del waiting[number]
            try:
                pipe.write(answer)
                pipe.flush()
            except BrokenPipeError:
                pass  # it ended meanwhile; its status tells

    def errors(self) -> str:
        return "\n".join(
            f"rank {number}: {rank.stderr.read().decode()}" for number, rank in enumerate(self.ranks) if rank.stderr is not None
        )


def run(body: str, size: int = 2, killed: Sequence[int] = ()) -> None:
    with Job(body, size) as job:
        statuses = job.run()
        expected = [-signal.SIGKILL if rank in killed else 0 for rank in range(size)]
        assert statuses == expected, job.errors()


@pytest.mark.parametrize(
    "body",
    [
        "delivers_when_the_receive_is_posted_first",
        "delivers_when_the_send_is_posted_first",
        "delivers_both_ways_at_once",
        "matches_by_tag_whatever_the_order",
        "goes_on_while_nobody_waits",
        "threads_wait_side_by_side",
        "sizes_that_differ_fail_both_sides",
        "operations_that_differ_fail_both_sides",
        "operations_that_differ_are_noticed_without_a_free_slot",
        "operations_that_share_no_message_fail_their_group",
        "equal_operations_fit",
        "equal_tags_are_refused",
        "unmatched_messages_hold_nothing_up",
        "slots_are_given_back",
        "groups_share_a_connection_in_any_order",
        "a_message_may_come_before_its_group",
        "counters_tell_payload_from_headers",
        "a_wait_ends_at_its_deadline_or_by_a_signal",
        "garbage_is_refused",
        "idle_strangers_keep_nobody_out",
        "only_a_new_connection_replaces_the_old",
        "an_orderly_end_is_no_loss",
        "leaving_a_group_ends_what_waits_for_the_leaver",
        "a_failure_may_come_before_its_group",
        "a_cancelled_receive_leaves_its_memory_alone",
        "a_cancelled_send_leaves_its_memory_alone",
        "a_forked_child_is_dead_and_harmless",
    ],
)
def test_between_two_ranks(body: str) -> None:
    run(body)


@pytest.mark.parametrize(
    "body",
    [
        "messages_to_oneself",
        "a_member_whose_port_is_closed_is_lost_at_once",
        "a_member_that_does_not_answer_is_lost_after_a_while",
    ],
)
def test_of_one_rank(body: str) -> None:
    run(body, size=1)


@pytest.mark.parametrize(
    "body", ["a_wrong_token_is_refused", "broken_frames_end_the_connection", "a_failure_is_told_to_the_members"]
)
def test_between_three_ranks(body: str) -> None:
    run(body, size=3)


def test_all_pairs_of_six_ranks_connect_at_once() -> None:
    run("all_connect_at_once", size=6)


@pytest.mark.parametrize(("body", "size"), [("a_killed_peer_is_noticed_at_once", 3), ("a_child_keeps_no_socket_open", 2)])
def test_a_killed_rank_is_noticed(body: str, size: int) -> None:
    run(body, size, killed=[1])


HOST = [
    ("lo", "127.0.0.1", True, True),
    ("lo", "::1", True, True),
    ("docker0", "172.17.0.1", True, False),
    ("eth0", "fe80::1", True, False),
    ("eth0", "fd00::2", True, False),
    ("eth0", "10.0.0.2", True, False),
    ("eth1", "10.0.1.2", True, False),
    ("eth10", "10.0.10.2", True, False),
    ("ib0", "10.1.0.2", True, False),
    ("ib1", "10.1.1.2", False, False),
    ("v6", "fd00::6", True, False),
]


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("", "10.0.0.2"),
        ("lo", "127.0.0.1"),
        ("eth", "10.0.0.2"),
        ("eth1", "10.0.1.2"),
        ("=eth10", "10.0.10.2"),
        ("ib,eth", "10.1.0.2"),
        ("=nothing,eth1", "10.0.1.2"),
        ("^eth,docker", "10.1.0.2"),
        ("^=eth0,docker0", "10.0.1.2"),
        ("^eth,ib,v6", "172.17.0.1"),
        ("^eth,ib,v6,docker", "127.0.0.1"),
        ("v6", "fd00::6"),
        ("ib1", None),
        ("wlan", None),
    ],
)
def test_an_interface_is_chosen_as_nccl_does(value: str, address: str | None) -> None:
    if address is not None:
        assert link.choose_interface(HOST, value) == address
        return
    with pytest.raises((ValueError, RuntimeError), match=f"POLYCCL_SOCKET_IFNAME={value}") as caught:
        link.choose_interface(HOST, value)
    for name in ("eth0", "ib1", "10.0.0.2", "down"):
        assert name in str(caught.value)


def test_sha256_and_hmac_are_those_of_hashlib() -> None:
    random.seed(3)
    for size in [*range(150), 1000, 100_000]:
        data, key = random.randbytes(size), random.randbytes(size % 150)
        assert link.sha256(data) == hashlib.sha256(data).digest()
        assert link.hmac_sha256(key, data) == hmac.digest(key, data, "sha256")
