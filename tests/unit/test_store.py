"""Stores: one contract for all of them, and the ways in which each can fail."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from polyccl import store as stores
from polyccl import tcp_server, tcp_store
from polyccl.errors import CommError, CommTimeout, InvalidArgument, PeerLost
from polyccl.store import FileStore, MemoryStore, PrefixStore, Store, TcpServer, TcpStore, default_store, wrap


class FakeTorchStore:
    """The part of torch's stores that PolyCCL uses, with their habits: `clone` for each thread, errors of no particular class."""

    def __init__(self, values: dict[str, bytes] | None = None) -> None:
        self.values: dict[str, bytes] = {} if values is None else values
        self.clones: list[FakeTorchStore] = []
        self.broken = False

    def clone(self) -> FakeTorchStore:
        self.clones.append(FakeTorchStore(self.values))
        return self.clones[-1]

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        if "broken" in keys:
            raise RuntimeError("Connection reset by peer\nException raised from recvBytes at Utils.hpp")
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


@pytest.fixture(params=["memory", "file", "tcp", "torch", "prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """One store of each kind."""
    if request.param == "tcp":
        server = TcpServer("127.0.0.1", 0)
        yield TcpStore("127.0.0.1", server.port, token="", timeout=10)
        server.close()
        return
    made: dict[str, Callable[[], Store]] = {
        "memory": MemoryStore,
        "file": lambda: FileStore(tmp_path),
        "torch": lambda: wrap(FakeTorchStore()),
        "prefix": lambda: PrefixStore(MemoryStore(), "p"),
    }
    yield made[request.param]()


def test_a_value_comes_back_as_it_was_set(store: Store) -> None:
    for value in (b"", b"\x00\xff\n", os.urandom(3_000_000)):
        store.set("key", value)
        assert store.get("key", 5) == value


def test_odd_keys_are_kept_apart(store: Store) -> None:
    keys = ["a/b", "a%2Fb", "..", "ü" * 100, "x" * 300, "x" * 301, "key with spaces"]
    for number, key in enumerate(keys):
        store.set(key, bytes([number]))
    assert [store.get(key, 5) for key in keys] == [bytes([number]) for number in range(len(keys))]


def test_get_waits_until_the_key_is_set(store: Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(store.get, "late", 20) for _ in range(3)]
        pool.submit(store.set, "late", b"now")
        assert [each.result(20) for each in waiting] == [b"now"] * 3


def test_a_wait_ends_at_its_deadline_and_names_key_and_setter(store: Store) -> None:
    began = time.monotonic()
    with pytest.raises(CommTimeout, match=r"key '(p/)?never', which rank 3 sets, was not set within 0\.2 s"):
        store.get("never", 0.2, "rank 3")
    assert 0.19 <= time.monotonic() - began < 3


def test_a_store_serves_on_after_a_wait_timed_out(store: Store) -> None:
    with pytest.raises(CommTimeout):
        store.get("never", 0.01)
    store.set("never", b"after all")
    assert store.get("never", 5) == b"after all"


def test_no_time_left_still_finds_what_is_there(store: Store) -> None:
    store.set("key", b"x")
    assert store.get("key", 0) == b"x"
    with pytest.raises(CommTimeout):
        store.get("other", 0)


def test_a_deleted_key_is_gone_and_a_missing_one_is_no_error(store: Store) -> None:
    store.set("key", b"x")
    store.delete("key")
    store.delete("key")
    with pytest.raises(CommTimeout):
        store.get("key", 0.01)


def test_prefixes_keep_keys_apart() -> None:
    base = MemoryStore()
    PrefixStore(base, "a").set("key", b"1")
    PrefixStore(base, "b").set("key", b"2")
    assert (base.get("a/key", 1), base.get("b/key", 1)) == (b"1", b"2")


# --- TCP


@pytest.fixture
def server() -> Iterator[TcpServer]:
    """A server with a token."""
    with_token = TcpServer("127.0.0.1", 0, "secret")
    yield with_token
    with_token.close()


def client(server: TcpServer, token: str = "secret", timeout: float = 10) -> TcpStore:
    return TcpStore("127.0.0.1", server.port, token=token, timeout=timeout)


def test_a_waiting_get_holds_up_no_other_thread_of_the_client(server: TcpServer) -> None:
    mine = client(server)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(mine.get, "a", 20)
        for number in range(50):
            mine.set("b", bytes([number]))
        assert not waiting.done()
        mine.set("a", b"1")
        assert waiting.result(20) == b"1"


def test_many_clients_wait_for_one_key(server: TcpServer) -> None:
    with ThreadPoolExecutor(64) as pool:
        waiting = [pool.submit(client(server).get, "roster", 20) for _ in range(64)]
        client(server).set("roster", b"r" * 300_000)
        assert {each.result(20) for each in waiting} == {b"r" * 300_000}


def test_another_token_is_refused(server: TcpServer) -> None:
    with pytest.raises(CommError, match="job token differs"):
        client(server, token="guess").get("key", 5)


def test_a_client_waits_for_a_server_that_comes_up_later(reserve_port: Callable[[], int]) -> None:
    port = reserve_port()
    early = TcpStore("127.0.0.1", port, token="", timeout=20)
    tried = threading.Event()
    connect = socket.create_connection

    def note(*arguments: Any, **options: Any) -> socket.socket:
        try:
            return connect(*arguments, **options)
        finally:
            tried.set()

    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tcp_store.socket, "create_connection", note)
        waiting = pool.submit(early.set, "key", b"x")
        assert tried.wait(20)
        late = TcpServer("127.0.0.1", port)
        waiting.result(20)
    assert TcpStore("127.0.0.1", port, token="").get("key", 5) == b"x"
    late.close()


def test_no_server_is_a_timeout_that_says_where(reserve_port: Callable[[], int]) -> None:
    port = reserve_port()
    with pytest.raises(CommTimeout, match=rf"tcp://127\.0\.0\.1:{port}: no store came up within 0\.\d s"):
        TcpStore("127.0.0.1", port, token="").get("key", 0.2)


def test_a_server_that_goes_away_is_a_lost_peer_at_once(server: TcpServer) -> None:
    mine = client(server)
    mine.set("ready", b"")
    waiting_on_server = threading.Event()
    real = tcp_store._receive

    def note(*arguments: Any) -> bytes:
        waiting_on_server.set()
        return real(*arguments)

    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tcp_store, "_receive", note)
        waiting = pool.submit(mine.get, "never", 60)
        assert waiting_on_server.wait(20)
        server.close()
        with pytest.raises(PeerLost, match="the store was lost while 'never' was asked for"):
            waiting.result(20)


def test_a_server_that_says_nothing_is_no_polyccl_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "_GRACE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(CommError, match="not a PolyCCL store"):
        TcpStore("127.0.0.1", mute.getsockname()[1], token="").get("key", 0.1)


def _speak(server: TcpServer, *messages: bytes) -> bytes:
    """What the server answers, after its greeting, to a stranger who says this, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as stranger:
        answer = b""
        try:
            for message in messages:
                stranger.sendall(message)
            while data := stranger.recv(4096):
                answer += data
        except ConnectionResetError:
            pass
        return answer[40:]


def test_strangers_are_dropped_and_the_server_serves_on(server: TcpServer) -> None:
    assert b"token" in _speak(server, b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n")
    assert b"token" in _speak(server, bytes(40))
    client(server).set("key", b"x")
    assert client(server).get("key", 5) == b"x"


@pytest.mark.parametrize(
    "request_head",
    [
        struct.pack("!BIQQ", 9, 1, 0, 0),
        struct.pack("!BIQQ", 1, 1 << 30, 0, 0),
        struct.pack("!BIQQ", 1, 1, 1 << 60, 0),
    ],
    ids=["unknown operation", "long key", "long value"],
)
def test_a_request_beyond_the_bounds_ends_its_connection_only(request_head: bytes) -> None:
    import hmac

    server = TcpServer("127.0.0.1", 0, "secret")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as rogue:
        greeting = rogue.recv(40, socket.MSG_WAITALL)
        rogue.sendall(tcp_server.MAGIC + hmac.digest(b"secret", greeting[8:], "sha256"))
        assert rogue.recv(9, socket.MSG_WAITALL) == bytes(9)
        rogue.sendall(request_head)
        assert rogue.recv(1) == b""
    client(server).set("key", b"x")
    server.close()


@pytest.mark.parametrize("timeout", [2**31 // 1000 * 1000 + 5000, 2**33, 2**53, 2**64 - 1], ids="{} ms".format)
def test_a_request_with_any_timeout_waits_and_ends_nothing(server: TcpServer, timeout: int) -> None:
    connection = client(server)._connect(time.monotonic() + 10)
    with connection:
        connection.sendall(tcp_server.REQUEST.pack(tcp_server.GET, 4, 0, timeout) + b"late")
        other = client(server)
        other.set("key", b"x")
        assert other.get("key", 5) == b"x"
        other.set("late", b"now")
        assert tcp_store._receive(connection, 12, time.monotonic() + 10)[9:] == b"now"


@pytest.mark.parametrize("operation", [*range(10), 255], ids=str)
def test_no_request_ends_the_server(operation: int) -> None:
    """Each operation, with a key and a value that fit none of them."""
    with_token = TcpServer("127.0.0.1", 0, "secret")
    with client(with_token)._connect(time.monotonic() + 10) as rogue:
        rogue.sendall(tcp_server.REQUEST.pack(operation, 1, 1, 2**64 - 1) + b"\xff\x00")
    client(with_token).set("key", b"x")
    assert client(with_token).get("key", 5) == b"x"
    with_token.close()


def test_an_error_in_the_server_ends_one_connection(server: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TcpServer._handle

    def handle(self: TcpServer, who: Any, operation: int, key: str, value: bytes, timeout: int) -> None:
        if key == "bad":
            raise MemoryError
        real(self, who, operation, key, value, timeout)

    monkeypatch.setattr(TcpServer, "_handle", handle)
    with pytest.raises(PeerLost, match="closed the connection"):
        client(server).set("bad", b"")
    client(server).set("key", b"x")


def test_a_client_that_reads_no_answers_is_dropped(server: TcpServer) -> None:
    mine = client(server)
    mine.set("key", bytes(32 << 20))
    rogue = mine._connect(time.monotonic() + 10)
    with rogue:
        while True:
            try:
                rogue.sendall(tcp_server.REQUEST.pack(tcp_server.GET, 3, 0, 0) + b"key")
            except OSError:
                break
    assert mine.get("key", 10) == bytes(32 << 20)


# --- alarms: waits that end because something went wrong


def test_a_wait_ends_when_its_alarm_is_set_and_prefers_the_key(server: TcpServer) -> None:
    mine = client(server)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client(server).get, "room/key", 60, "rank 1", "room/failed")
        mine.set_new("room/failed", b"why")
        mine.set_new("room/failed", b"another reason")
        with pytest.raises(tcp_store.Alarmed) as caught:
            waiting.result(20)
    assert caught.value.value == b"why"
    mine.set("room/key", b"x")
    assert mine.get("room/key", 60, "", "room/failed") == b"x"


def test_a_call_sets_a_key_once_and_waits_for_another(server: TcpServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client(server).call, "mine", b"1", "yours", 60)
        assert client(server).get("mine", 20) == b"1"
        client(server).set("yours", b"2")
        assert waiting.result(20) == b"2"
    with pytest.raises(tcp_store.Taken) as caught:
        client(server).call("mine", b"3", "yours", 60)
    assert caught.value.value == b"1"


def test_who_attends_and_ends_sets_the_alarm_and_who_leaves_does_not(server: TcpServer) -> None:
    mine = client(server)
    stays, leaves, ends = (client(server).attend("room/failed", name, 10) for name in (b"stays", b"leaves", b"ends"))
    mine.set("room/key", b"x")
    leaves.leave()
    with pytest.raises(CommTimeout):
        mine.get("room/failed", 0.05)
    ends._connection.close()
    assert mine.get("room/failed", 20) == b"ends"
    assert mine.get("room/key", 0) == b"x"
    stays.leave()
    with pytest.raises(CommTimeout):  # the last has left: only the alarm is kept
        mine.get("room/key", 0)
    assert mine.get("room/failed", 0) == b"ends"


def test_a_forked_child_does_not_attend_for_its_parent(server: TcpServer) -> None:
    script = f"""
import os, signal
from polyccl.store import TcpStore
store = TcpStore("127.0.0.1", {server.port}, token="secret", timeout=10)
attendance = store.attend("failed", b"the parent ended", 10)
if os.fork() == 0:
    signal.pause()
os._exit(0)
"""
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], start_new_session=True) as parent:
        try:
            assert client(server).get("failed", 20) == b"the parent ended"
        finally:
            os.killpg(parent.pid, 9)


def test_strangers_that_take_all_descriptors_do_not_keep_others_out() -> None:
    script = """
import resource, socket, threading
from polyccl.store import TcpServer, TcpStore
server = TcpServer("127.0.0.1", 0, "secret")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
strangers = []
print(server.port, flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        strangers = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(100)]
        TcpStore("127.0.0.1", port, token="secret", timeout=20).set("key", b"x")
        for each in strangers:
            each.close()
        host.communicate("\n", timeout=20)


@pytest.mark.parametrize("length", [float("inf"), 1e300, 1e12, 4e9])
def test_a_wait_may_have_any_length(store: Store, length: float) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "late", length)
        with pytest.raises(CommTimeout):
            store.get("never", 0.05)
        store.set("late", b"now")
        assert waiting.result(20) == b"now"


def test_values_and_keys_beyond_the_bounds_are_refused_by_the_client(server: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "VALUE_LIMIT", 10)
    with pytest.raises(InvalidArgument, match="limits"):
        client(server).set("key", bytes(11))
    with pytest.raises(InvalidArgument, match="limits"):
        client(server).set("k" * 5000, b"")


def test_a_full_store_refuses_more_and_keeps_what_it_has(server: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "TOTAL_LIMIT", 100)
    mine = client(server)
    mine.set("a", bytes(90))
    with pytest.raises(CommError, match="full"):
        mine.set("b", bytes(11))
    mine.set("a", bytes(100))
    mine.delete("a")
    mine.set("b", bytes(100))
    assert mine.get("b", 5) == bytes(100)


def test_a_port_in_use_is_refused_with_advice(server: TcpServer) -> None:
    with pytest.raises(InvalidArgument, match=f":{server.port} .*choose another port"):
        TcpServer("127.0.0.1", server.port)


def test_a_forked_child_uses_connections_of_its_own(server: TcpServer) -> None:
    script = f"""
import os
from polyccl.store import TcpStore
store = TcpStore("127.0.0.1", {server.port}, token="secret", timeout=10)
store.set("parent", b"p")
child = os.fork()
for number in range(200):
    key = f"{{child == 0}}{{number}}"
    store.set(key, key.encode())
    assert store.get(key, 5) == key.encode()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=30, check=True)


def test_a_forked_child_does_not_hold_the_parents_server_open() -> None:
    script = """
import os, signal
from polyccl.store import TcpStore
store = TcpStore("127.0.0.1", 0, serve=True, token="", timeout=10)
store.set("key", b"x")
if os.fork() == 0:
    os.close(1)
    signal.pause()
print(store.port, os.getpgid(0), flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        timeout=30,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    port, group = map(int, done.stdout.split())
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=10)
    finally:
        os.killpg(group, 9)


# --- files


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="cannot be made"):
        FileStore(tmp_path / "file" / "store")


def test_a_directory_that_goes_away_is_a_lost_peer(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    (tmp_path / "store").rmdir()
    with pytest.raises(PeerLost, match="gone"):
        store.get("key", 20)
    with pytest.raises(PeerLost, match="written"):
        store.set("key", b"x")


def test_files_cross_processes(tmp_path: Path) -> None:
    script = f"from polyccl.store import FileStore; FileStore({str(tmp_path)!r}).set('from', b'another process')"
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        assert FileStore(tmp_path).get("from", 30) == b"another process"
        assert process.wait(30) == 0


# --- torch's


def test_each_thread_uses_a_clone_of_torchs_store() -> None:
    original = FakeTorchStore()
    store = wrap(original)
    with ThreadPoolExecutor(2) as pool:
        gate = threading.Barrier(2)

        def use(number: int) -> None:
            gate.wait(20)
            store.set(f"{number}", b"x")
            store.set(f"{number}", b"x")

        for each in [pool.submit(use, number) for number in range(2)]:
            each.result(20)
    assert len(original.clones) == 2


def test_a_failing_torch_store_is_a_lost_peer_with_the_first_line_of_its_words() -> None:
    with pytest.raises(PeerLost, match="Connection reset by peer") as caught:
        wrap(FakeTorchStore()).get("broken", 5)
    assert "Utils.hpp" not in str(caught.value)


def test_stores_of_ours_are_taken_as_they_are_and_strangers_refused() -> None:
    mine = MemoryStore()
    assert wrap(mine) is mine
    with pytest.raises(InvalidArgument, match=r"\(dict\)"):
        wrap({})


def test_every_real_torch_store_works(tmp_path: Path) -> None:
    distributed = pytest.importorskip("torch.distributed")
    real = [
        distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)),
        distributed.FileStore(str(tmp_path / "torch"), 1),
        distributed.HashStore(),
    ]
    for each in [*real, distributed.PrefixStore("p", real[0])]:
        store = wrap(each)
        with pytest.raises(CommTimeout):
            store.get("key", 0.05)
        store.set("key", b"\x00\xff")
        assert store.get("key", 5) == b"\x00\xff"
        store.delete("key")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "late", 10)
            store.set("late", b"1")
            assert waiting.result(20) == b"1"


# --- the job's


@pytest.fixture
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLYCCL_STORE", "POLYCCL_JOB_TOKEN", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(stores, "_kept", {})


@pytest.mark.usefixtures("_bare")
class TestDefaultStore:
    """`default_store`: which store the environment means."""

    def test_a_single_rank_needs_nothing(self) -> None:
        default_store("solo", 0, 1).set("key", b"x")

    def test_several_ranks_need_a_place_and_are_told_how_to_give_one(self) -> None:
        with pytest.raises(InvalidArgument, match="MASTER_ADDR and MASTER_PORT, or POLYCCL_STORE"):
            default_store("dp", 0, 2)

    def test_a_launchers_store_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        server = TcpServer("127.0.0.1", 0, "t")
        monkeypatch.setenv("POLYCCL_STORE", f"tcp://127.0.0.1:{server.port}")
        monkeypatch.setenv("POLYCCL_JOB_TOKEN", "t")
        default_store("dp", 0, 2).set("key", b"x")
        assert default_store("dp", 1, 2).get("key", 5) == b"x"
        with pytest.raises(CommTimeout):
            default_store("other", 1, 2).get("key", 0.01)
        server.close()

    def test_rank_0_hosts_where_the_address_says_so(self, monkeypatch: pytest.MonkeyPatch, reserve_port: Callable[[], int]) -> None:
        port = reserve_port()
        monkeypatch.setenv("POLYCCL_STORE", f"tcp://127.0.0.1:{port}?host=rank0")
        default_store("dp", 0, 2).set("key", b"x")
        assert TcpStore("127.0.0.1", port, token="").get("polyccl/dp/key", 5) == b"x"

    def test_a_directory_is_used_and_another_jobs_files_are_not(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("POLYCCL_STORE", f"file://{tmp_path}/a%20b")
        for token in ("one", "two"):
            monkeypatch.setenv("POLYCCL_JOB_TOKEN", token)
            with pytest.raises(CommTimeout):
                default_store("dp", 0, 2).get("key", 0.01)
            default_store("dp", 0, 2).set("key", b"x")
            assert default_store("dp", 1, 2).get("key", 5) == b"x"
        assert (tmp_path / "a b").is_dir()

    @pytest.mark.parametrize(
        "address",
        ["here", "tcp://host", "tcp://:1", "tcp://h:99999", "tcp://h:1?host=rank1", "file://relative", "http://h:1"],
    )
    def test_an_address_that_is_none_is_refused(self, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
        monkeypatch.setenv("POLYCCL_STORE", address)
        with pytest.raises(InvalidArgument, match="POLYCCL_STORE is"):
            default_store("dp", 0, 2)

    def test_without_torch_rank_0_hosts_at_the_master_address(
        self, monkeypatch: pytest.MonkeyPatch, reserve_port: Callable[[], int]
    ) -> None:
        monkeypatch.setattr(stores, "find_spec", lambda name: None)
        port = reserve_port()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        default_store("dp", 0, 2).set("key", b"x")
        assert TcpStore("127.0.0.1", port, token="").get("polyccl/dp/key", 5) == b"x"

    def test_torchruns_store_without_torch_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stores, "find_spec", lambda name: None)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "1")
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        with pytest.raises(InvalidArgument, match="torchrun hosts"):
            default_store("dp", 1, 2)

    def test_a_port_that_is_none_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "70000")
        with pytest.raises(InvalidArgument, match="MASTER_PORT"):
            default_store("dp", 0, 2)

    def test_with_torch_its_store_is_shared_with_torch_distributed(
        self, monkeypatch: pytest.MonkeyPatch, reserve_port: Callable[[], int]
    ) -> None:
        distributed = pytest.importorskip("torch.distributed")
        port = reserve_port()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        default_store("dp", 0, 2).set("key", b"x")
        # what init_process_group does in rank 0 after us, and in rank 1
        again = distributed.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=10), False, multi_tenant=True)
        other = distributed.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10), False)
        assert again.get("polyccl/dp/key") == other.get("polyccl/dp/key") == b"x"

    def test_torchruns_agent_hosts_and_attempts_are_kept_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        distributed = pytest.importorskip("torch.distributed")
        agent = distributed.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(agent.port))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        for attempt in ("0", "1"):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
            with pytest.raises(CommTimeout):
                default_store("dp", 0, 2).get("key", 0.01)
            default_store("dp", 0, 2).set("key", attempt.encode())
            assert agent.get(f"attempt_{attempt}/polyccl/dp/key") == attempt.encode()

    def test_a_process_keeps_one_store_per_address(self, monkeypatch: pytest.MonkeyPatch) -> None:
        server = TcpServer("127.0.0.1", 0)
        monkeypatch.setenv("POLYCCL_STORE", f"tcp://127.0.0.1:{server.port}")
        first, second = default_store("a", 0, 2), default_store("b", 0, 2)
        assert first._store is second._store  # type: ignore[attr-defined]
        server.close()
