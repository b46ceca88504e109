"""What is refused, is refused before anything is sent, with a sentence, and the communicator works on.

Every refusal of the table happens on all ranks at once. Below it, what happens where one rank alone is refused: with POLYCCL_CHECK
the others raise too, without it they end at their deadline.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import polyccl
from polyccl import Comm, InvalidArgument, ReduceOp, UnsupportedOperation, backends

from .marks import named
from .pool import SharedPool
from .ranks import Raised, caught, join, usable
from .shapes import Shape

Refusal = tuple[Callable[[Comm], Any], type[polyccl.CommError], str]


def f32(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def others(comm: Comm) -> int:
    return (comm.get_rank() + 1) % comm.get_size()


def frozen(count: int) -> Any:
    array = f32(count)
    array.flags.writeable = False
    return array


def shared_outputs(comm: Comm) -> Any:
    """A list of outputs in one piece of memory."""
    return [f32(4)] * comm.get_size()


def lists(comm: Comm, *counts: int) -> list[Any]:
    """One array for each rank; the last one has another length where a second count is given."""
    return [f32(counts[-1] if peer == comm.get_size() - 1 else counts[0]) for peer in range(comm.get_size())]


def overlapping(comm: Comm) -> Any:
    memory = f32(4 * comm.get_size() + 1)
    return comm.all_gather_single(memory[1:], memory[:4] if comm.get_rank() else memory[4:8])


def batch(comm: Comm, *operations: tuple[str, Any, int]) -> Any:
    made = comm.batch_op_create()
    for method, tensor, peer in operations:
        getattr(made, method)(tensor, peer)
    return made.issue()


def v_single(comm: Comm, output: list[int], input: list[int]) -> Any:
    return comm.all_to_all_v_single(f32(4), f32(4), output, input)


REFUSALS: dict[str, Refusal] = {
    "no tensor": (lambda c: c.all_reduce("abc"), InvalidArgument, "str is no tensor"),
    "None": (lambda c: c.all_reduce(None), InvalidArgument, "tensor is None; this rank must give a tensor"),
    "a list where a tensor is due": (lambda c: c.all_reduce([f32(2)]), InvalidArgument, "tensor must be one tensor, and is a list"),
    "a tensor where a list is due": (
        lambda c: c.all_gather(f32(4), f32(2)),
        InvalidArgument,
        "tensor_list must be a list of 2 tensors",
    ),
    "a text where a reduction is due": (lambda c: c.all_reduce(f32(2), "sum"), InvalidArgument, "ReduceOp"),
    "not contiguous": (lambda c: c.all_reduce(f32(4, 4).T[::2]), InvalidArgument, "is not contiguous"),
    "every second element": (lambda c: c.all_reduce(f32(8)[::2]), InvalidArgument, "is not contiguous"),
    "another byte order": (lambda c: c.all_reduce(np.zeros(4, ">f4")), InvalidArgument, "native byte order"),
    "objects": (lambda c: c.all_reduce(np.array([object()])), InvalidArgument, "cannot be read through DLPack"),
    "unlike dtypes": (
        lambda c: c.all_gather([np.zeros(2, np.float64) for _ in range(c.get_size())], f32(2)),
        InvalidArgument,
        "unlike dtypes, float32 and float64",
    ),
    "a list too short": (
        lambda c: c.all_gather([f32(2)], f32(2)),
        InvalidArgument,
        "tensor_list must be a list of 2 tensors, one for each rank, and is a list of 1",
    ),
    "a list too long": (
        lambda c: c.reduce_scatter(f32(2), [f32(2)] * 3),
        InvalidArgument,
        "input_list must be a list of 2 tensors",
    ),
    "an empty list": (lambda c: c.all_gather([], f32(2)), InvalidArgument, "one for each rank, and is a list of 0"),
    "an output of another length": (
        lambda c: c.all_gather_single(f32(5), f32(2)),
        InvalidArgument,
        "2 times 2 elements, and has 5",
    ),
    "an entry of another length": (
        lambda c: c.all_gather(lists(c, 2, 3), f32(2)),
        InvalidArgument,
        "must have 2 elements, and has 3",
    ),
    "a length that does not divide": (
        lambda c: c.all_to_all_single(f32(3), f32(3)),
        InvalidArgument,
        "do not divide among 2 ranks",
    ),
    "input and output of unlike lengths": (lambda c: c.all_to_all_single(f32(4), f32(2)), InvalidArgument, "elements, and has"),
    "a ragged input of another length": (
        lambda c: c.all_gather_v(lists(c, 2, 2), f32(3)),
        InvalidArgument,
        "as long as tensor_list",
    ),
    "a ragged output of another length": (
        lambda c: c.reduce_scatter_v(f32(3), lists(c, 2, 2)),
        InvalidArgument,
        "as long as input",
    ),
    "a block for oneself of unlike lengths": (
        lambda c: c.all_to_all(lists(c, 2, 2), lists(c, 3, 3)),
        InvalidArgument,
        "stays on this rank",
    ),
    "root too high": (lambda c: c.broadcast(f32(2), 2), InvalidArgument, "root must be a rank from 0 to 1, and is 2"),
    "root below 0": (lambda c: c.reduce(f32(2), -1), InvalidArgument, "root must be a rank from 0 to 1, and is -1"),
    "dst too high": (lambda c: c.send(f32(2), 7), InvalidArgument, "dst must be a rank from 0 to 1, and is 7"),
    "src below 0": (lambda c: c.recv(f32(2), -1), InvalidArgument, "src must be a rank from 0 to 1, and is -1"),
    "a send to oneself": (lambda c: c.send(f32(2), c.get_rank()), InvalidArgument, "this rank itself"),
    "a receive from oneself": (lambda c: c.recv(f32(2), c.get_rank()), InvalidArgument, "this rank itself"),
    "AVG on bool": (lambda c: c.all_reduce(np.ones(2, bool), ReduceOp.AVG), UnsupportedOperation, "AVG is not defined on bool"),
    "BAND on floats": (lambda c: c.all_reduce(f32(2), ReduceOp.BAND), UnsupportedOperation, "BAND is not defined on float32"),
    "MIN on complex": (lambda c: c.all_reduce(np.ones(2, np.complex64), ReduceOp.MIN), UnsupportedOperation, "MIN is not defined"),
    "PREMUL_SUM on integers": (
        lambda c: c.all_reduce(np.ones(2, np.int32), ReduceOp.PREMUL_SUM(2)),
        UnsupportedOperation,
        "PREMUL_SUM is not defined on int32",
    ),
    "a factor of another dtype": (
        lambda c: c.all_reduce(f32(2), ReduceOp.PREMUL_SUM(np.ones(1))),
        InvalidArgument,
        "factor of PREMUL",
    ),
    "a factor of two elements": (lambda c: c.all_reduce(f32(2), ReduceOp.PREMUL_SUM(f32(2))), InvalidArgument, "factor of PREMUL"),
    "a text for a factor": (lambda c: c.all_reduce(f32(2), ReduceOp.PREMUL_SUM("2")), InvalidArgument, "factor"),
    "a factor beyond any float": (lambda c: c.all_reduce(f32(2), ReduceOp.PREMUL_SUM(10**400)), InvalidArgument, "factor"),
    "a factor for SUM": (lambda c: ReduceOp(polyccl.Reduction.SUM, 2.0), InvalidArgument, "only to it"),
    "partial overlap": (overlapping, InvalidArgument, "overlap in part"),
    "outputs that share memory": (lambda c: c.all_gather(shared_outputs(c), f32(4)), InvalidArgument, "two outputs share memory"),
    "a read-only output": (lambda c: c.all_reduce(frozen(2)), InvalidArgument, "is read-only"),
    "splits that are missing": (
        lambda c: v_single(c, [2], [2, 2]),
        InvalidArgument,
        "output_split_sizes must be a list of 2",
    ),
    "splits that add up to less": (lambda c: v_single(c, [1, 2], [2, 2]), InvalidArgument, "add up to"),
    "splits that add up to more": (lambda c: v_single(c, [2, 2], [2, 3]), InvalidArgument, "add up to"),
    "a negative split": (lambda c: v_single(c, [2, 2], [5, -1]), InvalidArgument, "input_split_sizes[1] must be"),
    "splits that are no numbers": (
        lambda c: v_single(c, [2, 2], ["a", "b"]),
        InvalidArgument,
        "input_split_sizes[0] must be",
    ),  # type: ignore[list-item]
    "a negative timeout": (
        lambda c: c.all_reduce(f32(2), timeout=-1),
        InvalidArgument,
        "timeout must be a",
    ),
    "a negative timedelta": (
        lambda c: c.barrier(timeout=timedelta(seconds=-1)),
        InvalidArgument,
        "timeout must be a",
    ),
    "a timeout that is no number": (
        lambda c: c.barrier(timeout=float("nan")),
        InvalidArgument,
        "timeout must be a",
    ),
    "a default timeout below 0": (
        lambda c: c.set_timeout(-3),
        InvalidArgument,
        "timeout must be a",
    ),
    "a hint that is none": (lambda c: c.barrier(hints={"deterministic": "perhaps"}), InvalidArgument, "must be 'strict'"),
    "an empty batch": (batch, InvalidArgument, "nothing to issue"),
    "a batch with a wrong peer": (
        lambda c: batch(c, ("send", f32(2), others(c)), ("recv", f32(2), 5)),
        InvalidArgument,
        "src must be",
    ),
    "a batch without a tensor": (lambda c: batch(c, ("send", None, others(c))), InvalidArgument, "tensor is None"),
    "windows": (lambda c: c.new_window(f32(2)), UnsupportedOperation, "new_window"),
    "reconfigure": (lambda c: c.reconfigure(1, []), UnsupportedOperation, "reconfigure"),
    "an init handle": (lambda c: c.get_init_handle(), UnsupportedOperation, "get_init_handle"),
    "a pre hook": (lambda c: c.register_pre_hook(print), UnsupportedOperation, "register_pre_hook"),
    "a post hook": (lambda c: c.register_post_hook(print), UnsupportedOperation, "register_post_hook"),
    "an abort hook": (lambda c: c.register_abort_hook(print), UnsupportedOperation, "register_abort_hook"),
}


def refused(comm: Comm, name: str) -> None:
    call, kind, text = REFUSALS[name]
    with pytest.raises(kind, match=re.escape(text)) as error:
        call(comm)
    assert type(error.value) is kind
    usable(comm)


@pytest.mark.parametrize("name", REFUSALS)
def test_it_is_refused_with_a_sentence_and_the_communicator_works_on(jobs: SharedPool, name: str) -> None:
    jobs.run(refused, Shape("host=1,host=1"), name)


@pytest.mark.backend("gloo")
def test_refusals_are_the_same_on_a_plain_library(jobs: SharedPool) -> None:
    jobs.run(refused_all, Shape("gloo=2"))


def refused_all(comm: Comm) -> None:
    for name in REFUSALS:
        refused(comm, name)


# ---- one rank alone ----------------------------------------------------------------------------------------------------

ALONE: dict[str, Callable[[Comm, bool], Any]] = {
    "not contiguous": lambda c, bad: c.all_reduce(f32(8)[::2] if bad else f32(4)),
    "a root that is none": lambda c, bad: c.broadcast(f32(4), 9 if bad else 0),
    "a tensor for a list": lambda c, bad: c.all_gather(f32(3) if bad else lists(c, 1, 1), f32(1)),
    "a timeout that is none": lambda c, bad: c.all_reduce(f32(4), timeout=-1 if bad else None),
    "a hint that is none": lambda c, bad: c.all_reduce(f32(4), hints={"deterministic": "no" if bad else ""}),
    "a text for a reduction": lambda c, bad: c.all_reduce(f32(4), "sum" if bad else ReduceOp.SUM),
}


def one_refused(comm: Comm, name: str) -> Raised:
    raised = caught(lambda: ALONE[name](comm, comm.get_rank() == 1))
    usable(comm)
    return raised


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("shape", named("host=3", "gloo=3", "host=2,host=1", "gloo=2,host=1"))
def test_with_the_check_on_the_others_raise_as_well(jobs: SharedPool, shape: Shape, name: str) -> None:
    raised = jobs.run(one_refused, shape, name)
    assert [each.name for each in raised] == ["Mismatch", "InvalidArgument", "Mismatch"]
    for other in (raised[0], raised[2]):
        assert "rank 1" in other.text
        assert "refused" in other.text
        assert other.seconds < 5


def one_refused_unchecked(comm: Comm) -> Raised:
    bad = comm.get_rank() == 1
    return caught(lambda: comm.all_reduce(f32(8)[::2] if bad else f32(4), timeout=0.5))


@pytest.mark.parametrize("shape", named("host=3", "gloo=3", "host=2,host=1", "gloo=2,gloo=1"))
def test_with_the_check_off_the_others_end_at_their_deadline(jobs: SharedPool, shape: Shape) -> None:
    raised = jobs.run(one_refused_unchecked, shape, fresh=True, check=False)
    assert raised[1].name == "InvalidArgument"
    for other in (raised[0], raised[2]):
        assert other.name == "CommTimeout", other
        assert other.seconds < 3


def refused_message(comm: Comm) -> None:
    """A refused message of one rank concerns no other rank's collectives."""
    if comm.get_rank() == 0:
        with pytest.raises(InvalidArgument):
            comm.send(f32(2), 0)
    usable(comm)
    usable(comm)


@pytest.mark.parametrize("shape", named("host=2", "gloo=2", "host=1,host=1"))
def test_a_refused_message_leaves_collectives_alone(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(refused_message, shape)


# ---- creation ----------------------------------------------------------------------------------------------------


def creation(rank: int, directory: str) -> None:
    shape = Shape("host=1")

    def refusal(kind: type[BaseException], text: str, **options: Any) -> None:
        with pytest.raises(kind, match=text):
            join(directory, rank, shape, **options)

    for name in {"nccl", "rccl", "xccl"} - set(backends.available()):
        refusal(polyccl.BackendUnavailable, f"POLYCCL_BACKEND_{name.upper()}=ON", backend=name)
    refusal(polyccl.BackendUnavailable, "nosuch", backend="nosuch")
    refusal(polyccl.BackendUnavailable, "nosuch", backend="bridge", hints={"local": "nosuch"})
    refusal(InvalidArgument, "timeout must be a", timeout=-1)
    refusal(InvalidArgument, "must be 'strict'", hints={"deterministic": "yes"})
    refusal(InvalidArgument, "must be 'link'", hints={"cross": "ucx"})
    refusal(InvalidArgument, "not a number of bytes", hints={"chunk_bytes": "many"})
    refusal(InvalidArgument, "give a store", store=object())
    refusal(UnsupportedOperation, "enable_reconfigure", enable_reconfigure=True)
    for device in ("cuda", "cuda:0", "xpu"):
        with pytest.raises(InvalidArgument, match=f"works on host memory, not on '{device}'; name the device's own backend"):
            polyccl.new_comm("host", device, rank=0, size=1)
    for device in ("meta", "cuda:x", "cpu:-1", ""):
        with pytest.raises(InvalidArgument, match=f"device '{device}'"):
            polyccl.new_comm("host", device, rank=0, size=1)
    with pytest.raises(InvalidArgument, match="rank"):
        polyccl.new_comm("host", "cpu", rank=1, size=1)
    usable(join(directory, rank, shape))


def test_creation_refuses_what_is_not_there_with_what_to_do(jobs: SharedPool, directory: str) -> None:
    jobs.each(creation, 1, directory)


def finalized(comm: Comm) -> None:
    usable(comm)
    comm.finalize()
    with pytest.raises(InvalidArgument, match="finalized"):
        comm.all_reduce(f32(2))
    with pytest.raises(InvalidArgument, match="finalized"):
        comm.send(f32(2), others(comm))
    with pytest.raises(InvalidArgument, match="finalized"):
        comm.finalize()


@pytest.mark.parametrize("shape", named("host=2", "gloo=2", "host=1,host=1", "gloo=2,host=2"))
def test_a_finalized_communicator_refuses_calls(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(finalized, shape, fresh=True)


def unknown_hints(comm: Comm) -> None:
    with pytest.warns(UserWarning, match="hint 'colour' is unknown"):
        comm.all_reduce(f32(2), hints={"colour": "red"})
    with pytest.warns(UserWarning, match="hint 'chunk_bytes' is unknown"):  # one of creation
        comm.barrier(hints={"chunk_bytes": "1"})
    with pytest.warns(UserWarning, match="hint 'colour' is unknown"):
        comm.set_hints({"colour": "red"})
    usable(comm)


def test_an_unknown_hint_warns_and_changes_nothing(jobs: SharedPool) -> None:
    jobs.run(unknown_hints, Shape("host=1,host=1"))


def unknown_variable(rank: int, directory: str) -> list[str]:
    import os

    os.environ["POLYCCL_STAGING_BITES"] = "1"
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            usable(join(directory, rank, Shape("host=1")))
            usable(join(directory, rank, Shape("host=1")))
    finally:
        del os.environ["POLYCCL_STAGING_BITES"]
    return [str(each.message) for each in seen]


def test_an_unknown_variable_warns_once_and_says_which_was_meant(jobs: SharedPool, directory: str) -> None:
    ((text,),) = jobs.each(unknown_variable, 1, directory)
    assert "POLYCCL_STAGING_BITES" in text
    assert "did you mean POLYCCL_STAGING_BYTES?" in text
