"""What the ranks do in the tests of the link: ``python link_ranks.py BODY RANK SIZE`` is one rank, started by ``test_link.py``.

A rank talks to the test by lines on its standard input and output: its address, and "meet", which is answered once all ranks that
still run have said it. Bodies assert; a rank that ends with status 0 has proven its part.
"""

from __future__ import annotations

import hmac
import json
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from polyccl._native import link

SECONDS = 20.0
EAGER = 64 * 1024
SIZES = (0, 1, 4, EAGER, EAGER + 1, 8 << 20)
HELLO = b"PolyCCL\n" + struct.pack("<HHHH", 1, 0x0102, 64, 0)  # version, byte order, header size, stream
Tag = tuple[int, int, int, int]


def pattern(size: int, seed: int = 0) -> bytes:
    return random.Random(size * 31 + seed).randbytes(size)


def tag(sequence: int, chunk: int = 0, ordinal: int = 0, channel: int = 0) -> Tag:
    return (sequence, chunk, ordinal, channel)


class Rank:
    """One rank: its link, and the way to the test."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.address = link.address()
        self.members: list[Any] = [tuple(member) for member in self.ask(self.address)]

    @property
    def other(self) -> int:
        return 1 - self.rank

    @staticmethod
    def ask(message: Any) -> Any:
        print(json.dumps(message), flush=True)
        return json.loads(sys.stdin.readline())

    def meet(self) -> None:
        self.ask("meet")

    def group(self, number: int = 1, token: str = "a token", ranks: list[int] | None = None) -> Any:
        ranks = list(range(self.size)) if ranks is None else ranks
        names = [f"rank {rank} (island {'ab'[rank % 2]})" for rank in ranks]
        return link.create_group(number, ranks.index(self.rank), [self.members[rank] for rank in ranks], names, token)


def errors_of(*requests: Any, seconds: float = SECONDS) -> list[tuple[str, str] | None]:
    """The requests' errors, once all are done."""
    assert link.wait(list(requests), seconds), f"still pending: {[request.done for request in requests]}"
    return [request.error for request in requests]


def good(*requests: Any, seconds: float = SECONDS) -> None:
    errors = [error for error in errors_of(*requests, seconds=seconds) if error]
    assert not errors, errors


def until(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Drives the link until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        link.progress()


def still_works(me: Rank, group: Any, number: int) -> None:
    """Exchanges a small and a large message on the group."""
    for size in (100, EAGER * 3):
        into = bytearray(size)
        good(group.recv(me.other, tag(number, size), into), group.send(me.other, tag(number, size), pattern(size, me.rank)))
        assert into == pattern(size, me.other)


# ---- Delivery ----


def delivers_when_the_receive_is_posted_first(me: Rank) -> None:
    group = me.group()
    for number, size in enumerate(SIZES):
        into = bytearray(size)
        request = group.recv(0, tag(number), into) if me.rank == 1 else None
        me.meet()
        good(request or group.send(1, tag(number), pattern(size)))
        assert me.rank == 0 or into == pattern(size)


def delivers_when_the_send_is_posted_first(me: Rank) -> None:
    group = me.group()
    for number, size in enumerate(SIZES):
        into = bytearray(size)
        request = group.send(1, tag(number), pattern(size)) if me.rank == 0 else None
        if request and size <= EAGER:
            good(request)  # a small message is done before its receive is posted
        me.meet()
        good(request or group.recv(0, tag(number), into))
        assert me.rank == 0 or into == pattern(size)


def delivers_both_ways_at_once(me: Rank) -> None:
    group = me.group()
    into = [bytearray(8 << 20) for _ in range(4)]
    requests = [group.recv(me.other, tag(1, chunk), each) for chunk, each in enumerate(into)]
    requests += [group.send(me.other, tag(1, chunk), pattern(8 << 20, chunk + 10 * me.rank)) for chunk in range(4)]
    good(*requests)
    for chunk, each in enumerate(into):
        assert each == pattern(8 << 20, chunk + 10 * me.other)


def matches_by_tag_whatever_the_order(me: Rank) -> None:
    group = me.group()
    sizes = [random.Random(number).choice((0, 5, 3000, EAGER, EAGER + 7, 200_000)) for number in range(300)]
    tags = [tag(number // 7, number % 7, number % 3, number % 2) for number in range(300)]
    into = [bytearray(size) for size in sizes]
    order = list(range(600))
    random.Random(100 + me.rank).shuffle(order)
    requests = []
    for number in order:
        if number < 300:
            requests.append(group.recv(me.other, tags[number], into[number]))
        else:
            requests.append(group.send(me.other, tags[number - 300], pattern(sizes[number - 300], number - 300 + me.rank)))
    good(*requests)
    for number, each in enumerate(into):
        assert each == pattern(sizes[number], number + me.other)


def messages_to_oneself(me: Rank) -> None:
    group = me.group()
    for number, size in enumerate((0, 9, EAGER, EAGER + 1, 1 << 20)):
        for first in ("send", "recv"):
            into = bytearray(size)
            steps = [lambda n=number, f=first, s=size: group.send(0, tag(n, f == "send"), pattern(s))]
            steps.append(lambda n=number, f=first, b=into: group.recv(0, tag(n, f == "send"), b))
            good(*[step() for step in (steps if first == "send" else reversed(steps))])
            assert into == pattern(size)
    errors = errors_of(group.recv(0, tag(50), bytearray(8)), group.send(0, tag(50), bytes(4)))
    assert [error and error[0] for error in errors] == ["Mismatch", "Mismatch"]
    good(group.send(0, tag(51), b"abcd", 7), group.recv(0, tag(51), bytearray(4), 7))
    for number, size in enumerate((4, EAGER + 1)):
        send, recv = bytes(size), bytearray(size)
        errors = errors_of(group.recv(0, tag(60 + number), recv, 1), group.send(0, tag(60 + number), send, 2))
        assert all(error and error[0] == "Mismatch" and "unlike operations" in error[1] for error in errors)
        sent = group.send(0, tag(70 + number), send, 1)
        (error,) = errors_of(group.recv(0, tag(70 + number), recv, 2))
        assert error is not None
        assert "unlike operations" in error[1]
        assert errors_of(sent) == [error if size > EAGER else None]  # a small one was done before
    assert len(group.late_mismatches()) == 1


def goes_on_while_nobody_waits(me: Rank) -> None:
    """The background thread answers for a rank that computes."""
    group = me.group()
    into = bytearray(4 << 20)
    request = group.recv(0, tag(1), into) if me.rank == 1 else group.send(1, tag(1), pattern(4 << 20))
    deadline = time.monotonic() + SECONDS
    while not request.done:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert request.error is None
    assert me.rank == 0 or into == pattern(4 << 20)


def threads_wait_side_by_side(me: Rank) -> None:
    group = me.group()
    failures = []

    def one(number: int) -> None:
        try:
            for turn in range(50):
                into = bytearray(64)
                good(group.recv(me.other, tag(turn, number), into), group.send(me.other, tag(turn, number), pattern(64, turn)))
                assert into == pattern(64, turn)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert not failures, failures


# ---- Mismatch ----


def sizes_that_differ_fail_both_sides(me: Rank) -> None:
    group = me.group()
    pairs = ((4, 8), (8, 0), (EAGER + 1, EAGER + 2), (10, 1 << 20), (1 << 20, 10), (2 << 20, 1 << 20))
    number = 0
    for first in (0, 1):
        for sent, received in pairs:
            number += 1
            request = None
            for turn in (first, 1 - first):
                if turn == me.rank:
                    into = bytearray(received)
                    request = group.send(1, tag(number), bytes(sent)) if me.rank == 0 else group.recv(0, tag(number), into)
                me.meet()
            assert request is not None
            (error,) = errors_of(request)
            if me.rank == 0 and error is None:
                # A small message was gone before the receive was known; the notice comes later.
                assert sent <= EAGER
                expected = f"sends {sent} bytes"
                until(lambda text=f"sequence {number},": any(text in late for late in group.late_mismatches()))
                (text,) = [late for late in group.late_mismatches() if f"sequence {number}," in late]
                assert expected in text
            else:
                assert error is not None
                assert error[0] == "Mismatch"
                text = error[1]
            for part in (
                f"sends {sent} bytes",
                f"receives {received} ",
                "rank 0 (island a)",
                "rank 1 (island b)",
                "communicator 0x1",
            ):
                assert part in text, (part, text)
            assert group.failure() is None
            me.meet()
    still_works(me, group, 1000)


UNLIKE = ("unlike operations", "dtype", "POLYCCL_CHECK=1", "rank 0 (island a)", "rank 1 (island b)", "communicator 0x1")
FINGERPRINTS = (2**64 - 1, 2**63 - 1)


def post(me: Rank, group: Any, number: int, size: int) -> Any:
    """Rank 0 sends to rank 1, each as part of an operation of its own."""
    if me.rank == 0:
        return group.send(1, tag(number), bytes(size), FINGERPRINTS[0])
    return group.recv(0, tag(number), bytearray(size), FINGERPRINTS[1])


def told_unlike(me: Rank, group: Any, number: int, request: Any, done_before: bool) -> None:
    """The request ends with the error; that of a small message may be done before, and the notice comes later."""
    (error,) = errors_of(request)
    if error is None:
        assert me.rank == 0
        assert done_before
        until(lambda: any(f"sequence {number}," in late for late in group.late_mismatches()))
        (text,) = [late for late in group.late_mismatches() if f"sequence {number}," in late]
    else:
        assert error[0] == "Mismatch"
        text = error[1]
    for part in UNLIKE:
        assert part in text, (part, text)
    assert group.failure() is None


def operations_that_differ_fail_both_sides(me: Rank) -> None:
    group = me.group()
    number = 0
    for size in (0, 4, EAGER, EAGER + 1, 2 << 20):
        for first in (0, 1, None):  # who posts first; None: both at once
            number += 1
            request = None if first is not None else post(me, group, number, size)
            for turn in (0, 1):
                if first is not None and me.rank == (first, 1 - first)[turn]:
                    request = post(me, group, number, size)
                me.meet()
            told_unlike(me, group, number, request, size <= EAGER)
            me.meet()
    still_works(me, group, 1000)


def operations_that_differ_are_noticed_without_a_free_slot(me: Rank) -> None:
    group, flood = me.group(1), me.group(2)
    count = 64
    if me.rank == 0:
        good(*[flood.send(1, tag(number), pattern(10, number)) for number in range(count)])
    me.meet()
    for number, first in ((1, 0), (2, 1)):
        request = None
        for turn in (first, 1 - first):
            if me.rank == turn:
                request = post(me, group, number, 4)
            me.meet()
        told_unlike(me, group, number, request, False)
    me.meet()
    into = [bytearray(10) for _ in range(count)]
    if me.rank == 1:
        good(*[flood.recv(0, tag(number), each) for number, each in enumerate(into)])
        assert all(each == pattern(10, number) for number, each in enumerate(into))
    still_works(me, group, 1000)


def equal_operations_fit(me: Rank) -> None:
    group = me.group()
    for number, size in enumerate(SIZES):
        into = bytearray(size)
        receive = group.recv(me.other, tag(number), into, FINGERPRINTS[0])
        good(receive, group.send(me.other, tag(number), pattern(size, me.rank), FINGERPRINTS[0]))
        assert into == pattern(size, me.other)


def operations_that_share_no_message_fail_their_group(me: Rank) -> None:
    """As where each of two ranks takes itself for the root: both send, or both receive."""
    others = me.group(50)
    for number, (size, sends) in enumerate([(4, True), (EAGER + 1, True), (EAGER + 1, False)]):
        group = me.group(2 + number)
        mine, own = FINGERPRINTS[me.rank], tag(5, ordinal=me.rank)
        request = group.send(me.other, own, bytes(size), mine) if sends else group.recv(me.other, own, bytearray(size), mine)
        assert link.wait_failure(group, SECONDS)
        code, text = group.failure()
        assert code == "Mismatch"
        for part in UNLIKE[:-1]:
            assert part in text
        (error,) = errors_of(request)
        assert error == (code, text) or (error is None and size <= EAGER)
        me.meet()
    still_works(me, others, 1)


def equal_tags_are_refused(me: Rank) -> None:
    group = me.group()
    first = group.recv(me.other, tag(1), bytearray(4))
    (error,) = errors_of(group.recv(me.other, tag(1), bytearray(4)))
    assert error is not None
    assert error[0] == "CommError"
    assert "same tag" in error[1]
    me.meet()
    good(group.send(me.other, tag(1), b"abcd"), first)
    still_works(me, group, 5)


# ---- Credits and groups ----


def unmatched_messages_hold_nothing_up(me: Rank) -> None:
    flood, others = me.group(1), me.group(2)
    count, size = 1000, 300
    requests = []
    if me.rank == 0:
        requests = [flood.send(1, tag(number), pattern(size, number)) for number in range(count)]
        requests += [flood.send(1, tag(number, 1), pattern(EAGER, number)) for number in range(100)]
    me.meet()
    still_works(me, others, 1)  # small and large ones of another group, and large ones of this
    still_works(me, flood, 5000)
    me.meet()
    if me.rank == 1:
        into = [bytearray(size) for _ in range(count)]
        wide = [bytearray(EAGER) for _ in range(100)]
        requests = [flood.recv(0, tag(number, 1), wide[number]) for number in reversed(range(100))]
        requests += [flood.recv(0, tag(number), into[number]) for number in reversed(range(count))]
    good(*requests)
    if me.rank == 1:
        assert all(each == pattern(size, number) for number, each in enumerate(into))
        assert all(each == pattern(EAGER, number) for number, each in enumerate(wide))
    still_works(me, flood, 6000)


def slots_are_given_back(me: Rank) -> None:
    """A sender that never has more messages under way than there are slots needs nothing but them."""
    group = me.group()
    for turn in range(20):
        into = [bytearray(10) for _ in range(30)]
        if me.rank == 0:
            good(*[group.send(1, tag(turn, number), pattern(10, number)) for number in range(30)])
        else:
            good(*[group.recv(0, tag(turn, number), each) for number, each in enumerate(into)])
            assert all(each == pattern(10, number) for number, each in enumerate(into))
        me.meet()
        link.progress()  # takes in what was given back
    counters = link.counters()
    assert me.rank == 1 or counters["wire_bytes_sent"] == 600 * (64 + 10)


def groups_share_a_connection_in_any_order(me: Rank) -> None:
    groups = [me.group(1), me.group(2)]
    order = groups if me.rank == 0 else groups[::-1]
    for size in (10, EAGER * 4):
        into = {id(group): bytearray(size) for group in groups}
        # The sends of one rank come in the opposite order of the other's receives.
        requests = [group.send(me.other, tag(size), pattern(size, 1 + groups.index(group))) for group in order]
        me.meet()
        for group in order:
            requests.append(group.recv(me.other, tag(size), into[id(group)]))
        good(*requests)
        for number, group in enumerate(groups):
            assert into[id(group)] == pattern(size, 1 + number)
    assert link.counters()["bytes_sent"] == 2 * (10 + EAGER * 4)


def a_message_may_come_before_its_group(me: Rank) -> None:
    if me.rank == 1:
        link.add_token("a token")
        me.meet()
        me.meet()
    group = me.group()
    small, large = bytearray(10), bytearray(EAGER * 2)
    if me.rank == 0:
        me.meet()
        requests = [group.send(1, tag(1), pattern(10)), group.send(1, tag(2), pattern(EAGER * 2))]
        good(requests[0])  # it is with the other process, which has no such group yet
        me.meet()
    else:
        requests = [group.recv(0, tag(1), small), group.recv(0, tag(2), large)]
    good(*requests)
    assert me.rank == 0 or (small == pattern(10) and large == pattern(EAGER * 2))


def all_connect_at_once(me: Rank) -> None:
    group = me.group()
    others = [rank for rank in range(me.size) if rank != me.rank]
    into = {rank: bytearray(1000) for rank in others}
    me.meet()
    requests = [group.send(rank, tag(1), pattern(1000, me.rank)) for rank in others]
    requests += [group.recv(rank, tag(1), into[rank]) for rank in others]
    good(*requests)
    assert all(into[rank] == pattern(1000, rank) for rank in others)
    me.meet()
    assert group.failure() is None, group.failure()


def counters_tell_payload_from_headers(me: Rank) -> None:
    group = me.group()
    into = bytearray(1 << 20)
    good(group.send(me.other, tag(1), bytes(1 << 20)), group.recv(me.other, tag(1), into))
    good(group.send(me.other, tag(2), bytes(10)), group.recv(me.other, tag(2), bytearray(10)))
    good(group.send(me.rank, tag(2), bytes(10)), group.recv(me.rank, tag(2), bytearray(10)))
    for counters in (link.counters(), link.counters(me.members[me.other][:2])):
        assert counters["bytes_sent"] == counters["bytes_received"] == (1 << 20) + 10
        assert (1 << 20) + 10 < counters["wire_bytes_sent"] < (1 << 20) + 1000
    assert link.counters(me.members[me.rank][:2])["bytes_sent"] == 0


def a_wait_ends_at_its_deadline_or_by_a_signal(me: Rank) -> None:
    group = me.group()
    request = group.recv(me.other, tag(1), bytearray(4))
    start = time.monotonic()
    assert not link.wait([request], 0.2)
    assert 0.19 < time.monotonic() - start < 2

    class Rang(Exception):
        pass

    def ring(*_: object) -> None:
        raise Rang

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    start = time.monotonic()
    try:
        link.wait([request], SECONDS)
        raise AssertionError("the wait went on")
    except Rang:
        assert time.monotonic() - start < 1
    me.meet()
    good(group.send(me.other, tag(1), b"1234"), request)


# ---- Strangers ----


def a_wrong_token_is_refused(me: Rank) -> None:
    """Rank 1 has another token; ranks 0 and 2 go on."""
    link.set_connect_timeout(1.0)
    good_pair = me.group(2, ranks=[0, 2]) if me.rank != 1 else None
    group = me.group(1, token="another token" if me.rank == 1 else "a token")
    me.meet()
    if me.rank != 2:
        (error,) = errors_of(group.send(me.other, tag(1), b"1234"))
        assert error is not None
        assert error[0] == "PeerLost"
        assert "token" in error[1]
        assert f"rank {me.other} " in error[1]
    if good_pair:
        into = bytearray(4)
        good(good_pair.send(1 - me.rank // 2, tag(1), b"abcd"), good_pair.recv(1 - me.rank // 2, tag(1), into))
        assert into == b"abcd"
    me.meet()


def garbage_is_refused(me: Rank) -> None:
    group = me.group()
    still_works(me, group, 1)
    me.meet()
    if me.rank == 1:
        host, port = me.members[0][2:]
        hello = HELLO
        ids = [int.to_bytes(part, 8, "little") for part in (5, 6, *me.members[0][:2])]
        probes = {
            "random bytes": random.Random(1).randbytes(300),
            "a request of the web": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
            "another version": hello.replace(b"\n\x01", b"\n\x63") + b"".join(ids) + bytes(56),
            "another process's hello": hello + bytes(32) + bytes(56),
            "an unknown token": hello + b"".join(ids) + bytes(56),
            "a known token without proof": hello + b"".join(ids) + bytes(40) + link.token_name("a token") + bytes(32),
        }
        for name, probe in probes.items():
            with socket.create_connection((host, port), timeout=SECONDS) as stranger:
                stranger.sendall(probe)
                answer = b""
                try:
                    while part := stranger.recv(4096):
                        answer += part
                except ConnectionResetError:
                    pass  # closed with bytes unread
                assert len(answer) < 200, (name, answer)
        idle = [socket.create_connection((host, port), timeout=SECONDS) for _ in range(20)]
        for stranger in idle[::2]:
            stranger.close()
        assert all(stranger.fileno() >= 0 for stranger in idle[1::2])  # half of them stay open, silent
    still_works(me, group, 2)
    assert group.failure() is None
    me.meet()


def idle_strangers_keep_nobody_out(me: Rank) -> None:
    """More of them than the link waits for, before and while the members meet."""
    held: list[socket.socket] = []
    for _ in range(2 if me.rank == 0 else 0):
        held += [socket.create_connection(me.members[0][2:], timeout=SECONDS) for _ in range(200)]
    me.meet()
    group = me.group()
    still_works(me, group, 1)
    me.meet()
    for stranger in held:
        stranger.close()


def dial(me: Rank, connections: int, token: str = "a token") -> tuple[socket.socket, int]:
    """Rank 1's handshake with rank 0, by hand; the socket, and what the verdict says."""
    stranger = socket.create_connection(me.members[0][2:], timeout=SECONDS)
    ids = b"".join(int.to_bytes(part, 8, "little") for part in (*me.members[1][:2], *me.members[0][:2]))
    hello = HELLO + ids + bytes(32) + int.to_bytes(connections, 8, "little") + link.token_name(token)
    stranger.sendall(hello)
    challenge = stranger.recv(64, socket.MSG_WAITALL)
    stranger.sendall(hmac.digest(token.encode(), b"polyccl dialer" + hello + challenge, "sha256"))
    verdict = stranger.recv(34, socket.MSG_WAITALL)
    assert verdict[2:] == hmac.digest(token.encode(), b"polyccl acceptor" + verdict[:2] + hello + challenge, "sha256")
    return stranger, int.from_bytes(verdict[:2], "little")


def only_a_new_connection_replaces_the_old(me: Rank) -> None:
    group = me.group()
    still_works(me, group, 1)
    me.meet()
    if me.rank == 1:
        before_the_present_one, yields = dial(me, connections=0)
        assert yields == 6
        before_the_present_one.close()
    still_works(me, group, 2)
    me.meet()
    after_a_loss = None
    if me.rank == 1:
        after_a_loss, accepted = dial(me, connections=1)
        assert accepted == 0
    assert link.wait_failure(group, SECONDS)
    assert group.failure()[0] == "PeerLost"
    me.meet()
    if after_a_loss:
        after_a_loss.close()


def broken_frames_end_the_connection(me: Rank) -> None:
    """A process that proves the token and then breaks the protocol is named, and only its groups fail."""
    pair, broken = (me.group(2, ranks=[0, 2]) if me.rank != 1 else None), me.group(1, ranks=[0, 1]) if me.rank != 2 else None
    me.meet()
    if me.rank == 1:
        rogue, accepted = dial(me, connections=0)
        assert accepted == 0
        rogue.sendall(struct.pack("<HBxIHxxHHI4xQQQQQ", 0xCC1F, 1, 0, 0, 0, 0, 0, 1, 1, 1 << 40, 0, 0))  # 1 TiB at once
        assert rogue.recv(1) == b""
        rogue.close()
    if me.rank == 0:
        assert broken is not None
        assert link.wait_failure(broken, SECONDS)
        kind, text = broken.failure()
        assert kind == "PeerLost"
        assert "rank 1 (island b)" in text
        assert "announces 1099511627776 bytes" in text
    if pair:
        good(pair.send(1 - me.rank // 2, tag(1), b"abcd"), pair.recv(1 - me.rank // 2, tag(1), bytearray(4)))
    me.meet()


def a_member_whose_port_is_closed_is_lost_at_once(me: Rank) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    members = [me.address, (1, 2, "127.0.0.1", port)]
    group = link.create_group(1, 0, members, ["rank 0", "rank 1 (island b)"], "a token")
    start = time.monotonic()
    (error,) = errors_of(group.recv(1, tag(1), bytearray(4)))
    assert time.monotonic() - start < 5, "the link tries for 30 s where there is no answer"
    assert error is not None
    assert error[0] == "PeerLost"
    assert "rank 1 (island b)" in error[1]
    assert "refused" in error[1]
    assert group.failure() == error


def a_member_that_does_not_answer_is_lost_after_a_while(me: Rank) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # connections are made, and nobody takes them
        link.set_connect_timeout(0.5)
        members = [me.address, (1, 2, "127.0.0.1", silent.getsockname()[1])]
        group = link.create_group(1, 0, members, ["rank 0", "rank 1 (island b)"], "a token")
        start = time.monotonic()
        (error,) = errors_of(group.recv(1, tag(1), bytearray(4)))
        assert 0.4 < time.monotonic() - start < 10
        assert error is not None
        assert error[0] == "PeerLost"
        assert "rank 1 (island b)" in error[1]
        assert "no answer in time" in error[1]


# ---- Loss and end ----


def a_killed_peer_is_noticed_at_once(me: Rank) -> None:
    """Rank 1 dies; rank 0 waits for a message of it, rank 2 only has a connection."""
    group = me.group()
    into = bytearray(1 << 20)
    others = [rank for rank in range(me.size) if rank != me.rank]
    good(*[group.send(rank, tag(1), b"") for rank in others], *[group.recv(rank, tag(1), bytearray()) for rank in others])
    pair = me.group(2, ranks=[0, 2]) if me.rank != 1 else None
    pending = group.recv(1, tag(2), into) if me.rank == 0 else None
    me.meet()
    start = time.monotonic()
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if pending:
        errors_of(pending)
    assert link.wait_failure(group, SECONDS)
    assert time.monotonic() - start < 1
    failure = group.failure()
    assert failure[0] == "PeerLost"
    assert "rank 1 (island b)" in failure[1]
    assert "communicator 0x1" in failure[1]
    if pending:
        assert pending.error[0] == "PeerLost"
        assert "rank 1 (island b)" in pending.error[1]
    assert errors_of(group.send(1, tag(3), b"x"))[0] == failure
    assert pair is not None
    assert pair.failure() is None
    into = bytearray(4)
    good(pair.send(1 - me.rank // 2, tag(1), b"abcd"), pair.recv(1 - me.rank // 2, tag(1), into))


def an_orderly_end_is_no_loss(me: Rank) -> None:
    group = me.group()
    still_works(me, group, 1)
    if me.rank == 1:
        group.send(0, tag(9), b"last")
        me.meet()
        link.shutdown()
        me.meet()
        return
    me.meet()
    me.meet()
    into = bytearray(4)
    good(group.recv(1, tag(9), into))  # what was sent before the end can still be received
    assert into == b"last"
    assert group.failure() is None
    (error,) = errors_of(group.send(1, tag(2), b"late"))
    assert error is not None
    assert error[0] == "PeerLost"
    assert "good order" in error[1]
    assert "rank 1 (island b)" in error[1]
    assert group.failure() is None


def leaving_a_group_ends_what_waits_for_the_leaver(me: Rank) -> None:
    group, other = me.group(1), me.group(2)
    still_works(me, group, 1)
    pending = [group.recv(1, tag(5), bytearray(4)), group.send(1, tag(6), bytes(1 << 20))] if me.rank == 0 else []
    me.meet()
    if me.rank == 1:
        group.close()
    for error in errors_of(*pending):
        assert error is not None
        assert error[0] == "PeerLost"
        assert "left the communicator" in error[1]
    assert me.rank == 1 or group.failure() is None
    still_works(me, other, 1)
    me.meet()


def a_failure_is_told_to_the_members(me: Rank) -> None:
    group, other = me.group(1), me.group(2)
    good(
        *[group.send(rank, tag(1), b"") for rank in range(me.size)],
        *[group.recv(rank, tag(1), bytearray()) for rank in range(me.size)],
    )
    pending = group.recv((me.rank + 1) % me.size, tag(2), bytearray(8))
    me.meet()
    text = "rank 1 gave up: ünïcode " + "é" * 3000
    if me.rank == 1:
        group.fail("Aborted", text, True)
    assert link.wait_failure(group, SECONDS)
    failure = group.failure()
    assert failure[0] == "Aborted"
    assert text.startswith(failure[1])
    assert len(failure[1].encode()) > 4000
    assert pending.error == failure
    group.fail("CommError", "another", True)
    assert group.failure() == failure  # the first stays
    assert errors_of(group.send(0, tag(7), b"x"))[0] == failure
    good(
        *[other.send(rank, tag(1), b"") for rank in range(me.size)],
        *[other.recv(rank, tag(1), bytearray()) for rank in range(me.size)],
    )
    me.meet()


def a_failure_may_come_before_its_group(me: Rank) -> None:
    first = me.group(1)
    still_works(me, first, 1)
    if me.rank == 0:
        me.group(2).fail("Aborted", "too early", True)
    me.meet()
    still_works(me, first, 2)
    if me.rank == 1:
        assert me.group(2).failure() == ("Aborted", "too early")


def within_a_frame(wire_bytes: int) -> bool:
    """Whether the cut lies well inside one of the frames of a MiB that a large message goes in."""
    return wire_bytes > 1 << 20 and 200_000 < wire_bytes % (1 << 20) < 800_000


def a_cancelled_receive_leaves_its_memory_alone(me: Rank) -> None:
    group, other = me.group(1), me.group(2)
    size = 64 << 20
    into = bytearray(size)
    request = group.send(1, tag(1), b"\x01" * size) if me.rank == 0 else group.recv(0, tag(1), into)
    if me.rank == 1:
        until(lambda: within_a_frame(link.counters()["wire_bytes_received"]))
        assert not request.done
        group.fail("Aborted", "enough", False)
        assert request.error == ("Aborted", "enough")
        before = bytes(into)
        assert 0 in before
        still_works(me, other, 1)  # behind the rest of the data
        assert into == before
    else:
        still_works(me, other, 1)
        good(request)
    me.meet()


def a_cancelled_send_leaves_its_memory_alone(me: Rank) -> None:
    group, other = me.group(1), me.group(2)
    size = 64 << 20
    out, into = bytearray(b"\x01" * size), bytearray(size)
    request = group.send(1, tag(1), out) if me.rank == 0 else group.recv(0, tag(1), into)
    if me.rank == 0:
        twos = b"\x02" * (2 << 20)
        until(lambda: within_a_frame(link.counters()["wire_bytes_sent"]))
        frame = link.counters()["wire_bytes_sent"] >> 20 << 20
        assert not request.done
        group.fail("Aborted", "enough", False)
        assert request.error == ("Aborted", "enough")
        out[frame : frame + len(twos)] = twos  # before the link goes on
    still_works(me, other, 1)
    if me.rank == 1:
        assert not request.done
        assert 2 not in into
    me.meet()


# ---- Fork ----


def a_forked_child_is_dead_and_harmless(me: Rank) -> None:
    group = me.group()
    still_works(me, group, 1)
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            for call in (
                lambda: group.send(0, tag(1), b"x"),
                link.address,
                lambda: me.group(9),
                lambda: link.wait([], 1),
                group.failure,
            ):
                try:
                    call()
                    os._exit(2)
                except Exception as error:
                    if "fork" not in str(error):
                        os._exit(3)
            group.close()
            link.shutdown()
            failed = 0
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    still_works(me, group, 2)
    assert group.failure() is None
    me.meet()


def a_child_keeps_no_socket_open(me: Rank) -> None:
    """Rank 1 is killed while a child of it lives on."""
    group = me.group()
    still_works(me, group, 1)
    me.meet()
    if me.rank == 1:
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(1)
            os.write(writer, b"!")
            signal.alarm(5)
            signal.pause()
        os.read(reader, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    assert link.wait_failure(group, 3.0)
    assert group.failure()[0] == "PeerLost"


def main() -> None:
    body, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    signal.alarm(60)  # whatever happens
    globals()[body](Rank(rank, size))
    link.shutdown()


if __name__ == "__main__":
    main()
