"""Every argument of every public method, given values of a wrong type or range, is refused by InvalidArgument that names it.

The tables say which form an argument's name stands for, and what is wrong for a form. Methods are found by looking at the classes:
a new method, or a new argument, must be entered here. After each refusal the communicator works.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyccl
from polyccl import Comm, InvalidArgument, ReduceOp, Reduction, objects
from polyccl.store import FileStore, MemoryStore, PrefixStore, TcpServer, TcpStore, wrap

from .pool import SharedPool
from .ranks import usable
from .shapes import Shape

SHAPE = Shape("host=1,host=1")


class Odd:
    """An object of no use as an argument, whose repr() fails too."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __index__(self) -> int:
        raise ValueError("no index")


def f32(count: int = 4) -> Any:
    return np.ones(count, np.float32)


INTEGERS = [None, "0", 1.0, True, math.nan, -1, 2**40, 10**30, [0], f32(2), Odd(), b"0"]
WRONG: dict[str, list[Any]] = {
    "rank": INTEGERS,
    "tag": [*INTEGERS[:6], 2**32, 2**70, [0], Odd()],
    "timeout": ["1", True, math.nan, -1, -(10**400), [1], Odd(), timedelta(-1), f32(1), 1j],
    "hints": ["deterministic", 5, [("deterministic", "")], {"deterministic": 1}, {5: "x"}, {"deterministic": "no"}, Odd()],
    "flag": [None, 1, 0, "no", 0.0, [], Odd()],
    "optional flag": [1, "no", [], Odd()],
    "op": [None, "sum", 0, ReduceOp, Reduction.SUM, Odd()],
    "tensor": [None, "abc", 5, 1.5, [f32()], {}, Odd(), b"1234"],
    "tensors": [None, "ab", 5, f32(), [None, None], [f32(2)], ["a", "b"], {}, Odd()],
    "split sizes": [None, "22", 5, [4], [2.0, 2.0], [2**70, 0], [-1, 5], [None, None], ["2", "2"], [True, 3], {0: 2, 1: 2}, Odd()],
    "ranks": [None, 5, "01", [0, 0], [True], ["0"], [2], [2**40], [0.0], {0: 1}, Odd(), [Odd()]],
    "name": [5, b"x", "", "x" * 5000, "\udc80", ["x"], Odd()],
    "objects": [None, 5, "ab", b"ab", {}, Odd()],
}
FORMS = {
    **dict.fromkeys(("dst", "src", "root"), "rank"),
    **dict.fromkeys(("tensor", "output", "input", "output_tensor", "input_tensor"), "tensor"),
    **dict.fromkeys(("tensor_list", "input_list", "output_tensor_list", "input_tensor_list"), "tensors"),
    **dict.fromkeys(("output_split_sizes", "input_split_sizes"), "split sizes"),
    **dict.fromkeys(("object_list", "object_gather_list", "scatter_object_output_list", "scatter_object_input_list"), "objects"),
    **dict.fromkeys(("async_op", "on", "weights_only"), "flag"),
    **{name: name for name in ("tag", "timeout", "hints", "op", "ranks", "name")},
}
OF_THE_ROOT = {"input_tensor_list", "output_tensor_list", "object_gather_list", "scatter_object_input_list"}
"""Arguments that the other ranks need not give, where there is a root."""
LATER = {"new_window", "reconfigure", "register_pre_hook", "register_post_hook", "register_abort_hook"}
"""What raises UnsupportedOperation whatever it is given."""


def fitting(comm: Comm, method: str) -> dict[str, Any]:
    """Arguments that ``method`` takes."""
    size, peer = comm.get_size(), (comm.get_rank() + 1) % comm.get_size()
    single, blocks = f32(4), [f32(2) for _ in range(size)]
    values: dict[str, Any] = dict.fromkeys(("tensor_list", "input_list", "output_tensor_list", "input_tensor_list"), blocks)
    values |= dict.fromkeys(("object_list", "object_gather_list"), [None] * size)
    values |= {"scatter_object_output_list": [None], "scatter_object_input_list": [1] * size, "obj": 1, "weights_only": True}
    values |= {"dst": peer, "src": peer, "root": 0, "tag": 0, "op": ReduceOp.SUM, "timeout": None, "hints": None, "async_op": False}
    values |= {"output": single, "input": f32(4), "output_split_sizes": [2] * size, "input_split_sizes": [2] * size}
    values |= {
        "tensor": f32(2),
        "output_tensor": f32(2),
        "input_tensor": f32(2),
        "ranks": list(range(size)),
        "name": "x",
        "on": False,
    }
    values |= {"all_gather_single": {"input": f32(2)}, "gather_single": {"input": f32(2)}}.get(method, {})
    values |= {"reduce_scatter_single": {"output": f32(2)}}.get(method, {})
    return values


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "comm")]


METHODS = [name for name, each in vars(Comm).items() if inspect.isfunction(each) and not name.startswith("_") and parameters(each)]
CALLS = [("Comm", name) for name in METHODS if name not in LATER] + [("objects", name) for name in objects.__all__]


def callee(comm: Comm, owner: str, method: str) -> Callable[..., Any]:
    if owner == "Comm":
        return getattr(comm, method)  # type: ignore[no-any-return]
    function = getattr(objects, method)
    return lambda **named: function(comm, **named)


def refuses(call: Callable[[], Any], argument: str, *, elsewhere: bool = False) -> None:
    """``call`` is refused by a text that names the argument; ``elsewhere``: on another rank, which tells this one."""
    with pytest.raises(polyccl.CommError) as raised:
        call()
    text = str(raised.value)
    assert raised.type is (polyccl.Mismatch if elsewhere else InvalidArgument), text
    assert elsewhere or argument in text
    assert len(text) < 1000


def wrong_values(comm: Comm, owner: str, method: str) -> None:
    function = getattr(Comm, method) if owner == "Comm" else getattr(objects, method)
    valid = fitting(comm, method)
    names = parameters(function)
    for argument in names:
        if argument == "obj":
            continue  # anything; what cannot be written is below
        for value in WRONG[FORMS[argument]]:
            if value is None and (owner, method, argument) == ("Comm", "set_hints", "hints"):
                continue  # none at all: as an empty mapping
            named = {each: valid[each] for each in names} | {argument: value}
            optional = method in ("gather_single",) and argument == "output"
            elsewhere = "root" in names and (argument in OF_THE_ROOT or optional) and comm.get_rank() != 0
            try:
                refuses(lambda named=named: callee(comm, owner, method)(**named), argument, elsewhere=elsewhere)  # type: ignore[misc]
            except AssertionError as error:
                raise AssertionError(f"{method}({argument}={type(value).__name__}): {error}") from error
        usable(comm)


@pytest.mark.parametrize(("owner", "method"), CALLS)
def test_a_wrong_value_is_refused_by_name_and_the_communicator_works_on(jobs: SharedPool, owner: str, method: str) -> None:
    if owner == "objects":
        pytest.importorskip("torch")
    jobs.run(wrong_values, SHAPE, owner, method)


def batches_and_works(comm: Comm) -> None:
    for method, peer in (("send", "dst"), ("recv", "src")):
        for argument in (peer, "tag"):
            for value in WRONG[FORMS[argument]]:
                batch = comm.batch_op_create()
                named = {"tensor": f32(), peer: fitting(comm, "send")["dst"], "tag": 0} | {argument: value}
                refuses(lambda batch=batch, method=method, named=named: getattr(batch, method)(**named), argument)  # type: ignore[misc]
        for value in WRONG["tensor"]:
            batch = comm.batch_op_create()
            getattr(batch, method)(value, fitting(comm, "send")["dst"])
            refuses(batch.issue, "tensor")
    for argument in ("async_op", "hints", "timeout"):
        for value in WRONG[FORMS[argument]]:
            if argument == "hints" and value is None:
                continue
            refuses(lambda argument=argument, value=value: comm.batch_op_create().issue(**{argument: value}), argument)  # type: ignore[misc]
    batch = comm.batch_op_create()
    batch.ops.append("junk")  # type: ignore[arg-type]
    refuses(batch.issue, "ops")
    work = comm.barrier(async_op=True)
    for value in WRONG["timeout"]:
        refuses(lambda value=value: work.wait(value), "timeout")  # type: ignore[misc]
    for value in (None, 5, "callback", [print]):
        refuses(lambda value=value: work.add_done_callback(value), "callback")  # type: ignore[misc]
    work.wait()
    usable(comm)


def test_batches_and_works_refuse_wrong_values_too(jobs: SharedPool) -> None:
    jobs.run(batches_and_works, SHAPE)


def numpys_numbers(comm: Comm) -> None:
    size, rank = comm.get_size(), comm.get_rank()
    data = f32()
    comm.broadcast(data, np.int64(0), np.bool_(False), None, np.float32(20))  # type: ignore[arg-type]
    comm.all_reduce(data, async_op=np.bool_(True), timeout=np.int32(20)).wait(np.float64(20))  # type: ignore[arg-type]
    assert data.tolist() == [size] * 4
    sizes = np.full(size, 2, np.int32)
    comm.all_to_all_v_single(f32(), f32(), sizes, sizes)  # type: ignore[arg-type]
    if rank == 0:
        comm.send(data, np.uint8(1), tag=np.uint32(3))  # type: ignore[arg-type]
    else:
        comm.recv(data, np.int16(0), tag=np.int64(3))  # type: ignore[arg-type]
    child = comm.split(np.arange(size), "numpy")  # type: ignore[arg-type]
    assert child is not None
    usable(child)


def test_numbers_of_numpy_are_numbers(jobs: SharedPool) -> None:
    jobs.run(numpys_numbers, SHAPE)


def one_refused(comm: Comm, argument: str) -> str:
    """Rank 1 alone gives a wrong value."""
    named = {"tensor": f32(2), "root": 0} | ({argument: WRONG[FORMS[argument]][-1]} if comm.get_rank() == 1 else {})
    with pytest.raises(polyccl.CommError) as error:
        comm.broadcast(**named)
    usable(comm)
    return type(error.value).__name__


@pytest.mark.parametrize("argument", ["tensor", "root", "async_op", "hints", "timeout"])
def test_with_the_check_on_the_others_hear_of_a_wrong_value(jobs: SharedPool, argument: str) -> None:
    assert jobs.run(one_refused, Shape("host=2,host=1"), argument) == ["Mismatch", "InvalidArgument", "Mismatch"]


def unwritable(comm: Comm) -> str:
    rank = comm.get_rank()
    with pytest.raises(polyccl.CommError) as error:
        objects.all_gather_object(comm, [None] * comm.get_size(), (lambda: 0) if rank == 1 else rank)
    usable(comm)
    return f"{type(error.value).__name__}: {error.value}"


def test_an_object_that_cannot_be_written_is_refused_and_the_others_hear_of_it(jobs: SharedPool) -> None:
    pytest.importorskip("torch")
    texts = jobs.run(unwritable, SHAPE)
    assert texts[0].startswith("Mismatch")
    assert "obj must be an object that torch.save can write" in texts[1]


# ---- creation, stores, options: no other rank is needed ----------------------------------------------------------------------

CREATION: dict[str, list[Any]] = {
    "backend": [None, 5, "", b"host", Odd()],
    "device": [None, 5, b"cpu", [], "cuda:²", "cuda:99999999999999999999", Odd()],
    "name": [each for each in WRONG["name"] if each is not None],
    "abort_process_on_timeout_or_error": WRONG["optional flag"],
    "timeout": WRONG["timeout"],
    "is_high_priority_stream": WRONG["optional flag"],
    "store": [5, "tcp://x", {}, Odd()],
    "enable_reconfigure": WRONG["flag"],
    "hints": [*WRONG["hints"], {"chunk_bytes": 4096}, {"chunk_bytes": "many"}, {"latency_bytes": ""}, {"cross": "ucx"}],
    "check": WRONG["optional flag"],
    "rank": [each for each in WRONG["rank"] if each is not None] + [1],
    "size": [each for each in WRONG["rank"] if each is not None] + [0],
}


def creators() -> Iterable[Callable[..., Any]]:
    from polyccl.compat import torchcomms

    return polyccl.new_comm, torchcomms.new_comm


def test_new_comm_refuses_wrong_values_by_name() -> None:
    for create in creators():
        for argument in parameters(create):
            for value in CREATION[argument]:
                named: dict[str, Any] = {"backend": "host", "device": "cpu", "rank": 0, "size": 1, "timeout": 5} | {argument: value}
                shown = "hint" if argument == "hints" else argument
                refuses(lambda named=named, create=create: create(**named), shown)  # type: ignore[misc]
    usable(polyccl.new_comm("host", "cpu", rank=np.int64(0), size=np.int32(1)))  # type: ignore[arg-type]


KEYS: list[Any] = [None, 5, b"key", ["key"], Odd()]
VALUES: list[Any] = [None, 5, "value", [1], Odd()]
LIMITS: list[Any] = ["1", True, math.nan, [1], Odd()]


@pytest.mark.parametrize("kind", ["memory", "file", "prefix", "tcp", "torch"])
def test_stores_refuse_wrong_values_by_name(kind: str, tmp_path: Any) -> None:
    if kind == "torch":
        pytest.importorskip("torch.distributed")
    server = TcpServer("127.0.0.1", 0)
    store: Any = {
        "memory": MemoryStore,
        "file": lambda: FileStore(tmp_path),
        "prefix": lambda: PrefixStore(MemoryStore(), "p"),
        "tcp": lambda: TcpStore("127.0.0.1", server.port, token="", timeout=10),
        "torch": lambda: wrap(__import__("torch").distributed.HashStore()),
    }[kind]()
    for key in KEYS:
        refuses(lambda key=key: store.set(key, b""), "key")  # type: ignore[misc]
        refuses(lambda key=key: store.get(key, 1), "key")  # type: ignore[misc]
        refuses(lambda key=key: store.delete(key), "key")  # type: ignore[misc]
    for value in VALUES:
        refuses(lambda value=value: store.set("key", value), "value")  # type: ignore[misc]
    for limit in LIMITS:
        refuses(lambda limit=limit: store.get("key", limit), "timeout")  # type: ignore[misc]
    store.set("key", b"x")
    assert store.get("key", 10) == b"x"
    server.close()


def test_makers_of_stores_refuse_wrong_values_by_name() -> None:
    calls: list[tuple[Callable[[Any], Any], str, list[Any]]] = [
        (FileStore, "path", [None, 5, b"x", "", "a\0b", Odd()]),
        (wrap, "store", [None, 5, "x", Odd()]),
        (lambda value: PrefixStore(value, "p"), "store", [None, 5, Odd()]),
        (lambda value: PrefixStore(MemoryStore(), value), "prefix", [None, 5, b"p", "", Odd()]),
        (lambda value: TcpStore(value, 1), "host", [None, 5, "", Odd()]),
        (lambda value: TcpStore("localhost", value), "port", [None, "1", 0, 1.0, 65536, True, 2**40, Odd()]),
        (lambda value: TcpStore("localhost", 1, value), "serve", WRONG["flag"]),
        (lambda value: TcpStore("localhost", 1, token=value), "token", [5, b"x", Odd()]),
        (lambda value: TcpStore("localhost", 1, timeout=value), "timeout", WRONG["timeout"]),
        (lambda value: TcpServer(value), "host", [None, 5, Odd()]),
        (lambda value: TcpServer("127.0.0.1", value), "port", [None, "1", -1, 65536, True, Odd()]),
        (lambda value: TcpServer("127.0.0.1", 0, value), "token", [None, 5, b"x", Odd()]),
        (ReduceOp, "type", [None, "SUM", 1, Reduction.NONE, Odd()]),
    ]
    for call, argument, values in calls:
        for value in values:
            refuses(lambda call=call, value=value: call(value), argument)  # type: ignore[misc]


def test_options_for_torch_refuse_wrong_values_by_name() -> None:
    pytest.importorskip("torch")
    from polyccl.torch import Options
    from polyccl.torch import options as read

    wrong: dict[str, list[Any]] = {
        "backend": [5, b"host", Odd()],
        "device": [5, [], "moon", Odd()],
        "hints": ["x", 5, {"island": 1}, Odd()],
        "abort_process_on_timeout_or_error": WRONG["optional flag"],
        "is_high_priority_stream": WRONG["optional flag"],
    }
    assert set(wrong) == set(Options.__dataclass_fields__)
    for argument, values in wrong.items():
        for value in values:
            refuses(lambda argument=argument, value=value: read.read({argument: value}), argument)  # type: ignore[misc]
            refuses(lambda argument=argument, value=value: read.read(Options(**{argument: value})), argument)  # type: ignore[misc]
    for value in (5, ["x"], Odd(), {"colour": "red"}, {5: 6}):
        refuses(lambda value=value: read.read(value), "pg_options")  # type: ignore[misc]


def test_reductions_of_torch_refuse_wrong_values_by_name() -> None:
    pytest.importorskip("torch")
    from polyccl.torch.calls import reduction

    for value in (None, "sum", 0, [], {}, Odd()):
        refuses(lambda value=value: reduction(value), "op")  # type: ignore[misc]


def test_the_split_of_a_group_of_torch_refuses_wrong_values_by_name(alone: Comm) -> None:
    pytest.importorskip("torch")
    from polyccl.torch import ProcessGroup

    group = ProcessGroup(alone)
    for value in (None, 5, "0", [0, 0], [1], [True], ["0"], [0.0], Odd()):
        refuses(lambda value=value: group.split_group(value), "new_ranks")  # type: ignore[misc]
    for value in (5, ["x"], {"colour": "red"}, Odd()):
        refuses(lambda value=value: group.split_group([0], opts=value), "pg_options")  # type: ignore[misc]


def test_a_mesh_refuses_wrong_values_by_name(alone: Comm) -> None:
    pytest.importorskip("torch")
    for value in (None, 5, "ab", [None], ["comm"], Odd()):
        refuses(lambda value=value: polyccl.init_device_mesh(value, ("a",)), "mesh_dim_comms")  # type: ignore[misc]
    for value in (None, 5, "a", [5], [None], [""], Odd()):
        refuses(lambda value=value: polyccl.init_device_mesh([alone], value), "mesh_dim_names")  # type: ignore[misc]
    for value in (5, "comm", Odd()):
        refuses(lambda value=value: polyccl.init_device_mesh([alone], ("a",), value), "_global_comm")  # type: ignore[misc]


def test_batches_of_torchcomms_refuse_wrong_values_by_name() -> None:
    from polyccl.compat import torchcomms

    comm = torchcomms.new_comm("host", "cpu", "batches", rank=0, size=1, timeout=30)
    for value in (5, "options", {}, Odd()):
        refuses(lambda value=value: comm.batch_op_create().issue(False, value), "options")  # type: ignore[misc]
    for argument in ("timeout", "hints"):
        for value in WRONG[argument]:
            if value is None:
                continue
            options = torchcomms.BatchP2POptions(**{argument: value})
            refuses(lambda options=options: comm.batch_op_create().issue(False, options), argument)  # type: ignore[misc]
    for value in (None, "SEND", 1, True, Odd()):
        refuses(lambda value=value: torchcomms.P2POp(value, f32(), 0), "type")  # type: ignore[misc]
    usable(comm)


# ---- whatever there is -------------------------------------------------------------------------------------------------------

ANYTHING = st.one_of(
    st.none(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.floats(max_value=-0.1),
    st.complex_numbers(),
    st.integers(max_value=-1),
    st.integers(min_value=2**33),
    st.lists(st.one_of(st.none(), st.text(max_size=2), st.integers(min_value=2)), max_size=3),
    st.dictionaries(st.integers(), st.none(), min_size=1, max_size=2),
    st.sampled_from([Odd(), Odd, print, ..., NotImplemented, range(3), set(), np.ones((2, 2)), np.array(["a"]), np.array(None)]),
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([name for owner, name in CALLS if owner == "Comm" and name not in ("finalize", "set_timeout")]), st.data())
def test_no_value_at_all_raises_another_error(alone: Comm, method: str, data: st.DataObject) -> None:
    """On a communicator of one rank: a call with a drawn value of one argument works, or raises an error of PolyCCL's."""
    names = parameters(getattr(Comm, method))
    argument = data.draw(st.sampled_from(names))
    value = data.draw(ANYTHING)
    if argument == "timeout" and (value is None or (isinstance(value, int) and value > 0)):
        return  # right ones
    if method == "find_sender" and argument != "tag":
        return
    named = {name: fitting(alone, method)[name] for name in names} | {argument: value}
    with suppress(polyccl.CommError):
        getattr(alone, method)(**named)
    usable(alone)


@pytest.fixture(scope="module")
def alone() -> Comm:
    return polyccl.new_comm("host", "cpu", "alone", rank=0, size=1, timeout=30)
