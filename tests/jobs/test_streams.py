"""Device tensors as torch's, on the user's streams: the nccl and rccl plugins, unmodified, on stand-ins for the vendors' libraries.

The host may not touch device memory here, streams dawdle, and what a stream is to wait for is held up until it was seen to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import polyccl.backends

from . import stream_ranks as ranks
from .device_side import CannotCompile, compile_extension
from .marks import where_installed
from .pool import SharedPool, shared_pool
from .shapes import Shape

pytestmark = [
    pytest.mark.backend("nccl", "rccl"),
    pytest.mark.skipif(
        not {"nccl", "rccl"} <= set(polyccl.backends.available()), reason="the installed polyccl lacks the nccl or the rccl plugin"
    ),
    pytest.mark.timeout(120, func_only=True),  # not of the stand-ins' build
]

PLAIN = ("nccl=2", "rccl=2")
BRIDGES = ("nccl=2,rccl=2", "nccl=2,host=2")
SHAPES = (*PLAIN, *BRIDGES)
DELAY_US = 200  # that streams dawdle at most, before each thing they do

Run = Callable[..., None]


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The compiled extension of `device_side`."""
    try:
        return compile_extension(tmp_path_factory.mktemp("device_ext"))
    except CannotCompile as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=[True, False], ids=["streams-wait-for-the-host", "streams-cannot"])
def waiting(request: pytest.FixtureRequest) -> bool:
    """Whether streams can wait for a word of host memory."""
    return bool(request.param)


@pytest.fixture(scope="module")
def pool(waiting: bool, stand_ins: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """Ranks whose devices are stand-ins."""
    variables = stand_ins | {"FAKE_DELAY_US": str(DELAY_US), "FAKE_GUARD": "1", "FAKE_NO_WAIT_VALUE": str(int(not waiting))}
    with shared_pool(tmp_path_factory.mktemp("store"), variables) as pool:
        yield pool


@pytest.fixture
def run(pool: SharedPool, extension: str, tmp_path: Path) -> Run:
    """``run(function, shape)`` runs a function of `stream_ranks` on every rank of ``shape``."""

    def run_on(function: Callable[..., None], shape: Shape, *more: Any) -> None:
        pool.each(function, shape.size, str(tmp_path / "job"), shape, extension, *more)

    return run_on


def blocks(shape: Shape, waiting: bool) -> bool:
    """Whether calls wait on the host: those of a bridge do, where streams cannot."""
    return not waiting and "," in shape.islands


@pytest.mark.parametrize("shape", where_installed(*SHAPES))
def test_a_call_is_in_the_order_of_its_stream_and_does_not_wait(run: Run, shape: Shape, waiting: bool) -> None:
    run(ranks.wait_on_the_host if blocks(shape, waiting) else ranks.call_between_writer_and_reader, shape)


@pytest.mark.parametrize("shape", where_installed(*SHAPES))
def test_an_asynchronous_call_lets_stream_and_host_go_on(run: Run, shape: Shape, waiting: bool) -> None:
    if blocks(shape, waiting):
        pytest.skip("there wait() is the host's, as the test above has it")
    run(ranks.go_on_meanwhile, shape)


@pytest.mark.parametrize("shape", where_installed(*SHAPES))
def test_streams_of_one_user_are_ordered_each_on_its_own(run: Run, shape: Shape, waiting: bool) -> None:
    if blocks(shape, waiting):
        pytest.skip("there a call on a stream that stands still does not return")
    run(ranks.use_two_streams, shape)


@pytest.mark.parametrize("shape", where_installed(*SHAPES))
def test_a_default_stream_is_that_of_the_tensor_s_device(run: Run, shape: Shape) -> None:
    run(ranks.use_the_default_stream, shape)


@pytest.mark.parametrize("shape", where_installed(*SHAPES))
def test_several_operations_are_on_their_way_at_once(run: Run, shape: Shape) -> None:
    run(ranks.have_several_in_flight, shape)


@pytest.mark.parametrize("shape", where_installed(*SHAPES))
def test_messages_are_in_the_order_of_their_stream(run: Run, shape: Shape) -> None:
    run(ranks.send_round, shape)


@pytest.mark.parametrize("shape", where_installed(*SHAPES))
def test_a_receive_that_nothing_matches_does_not_hold_up_the_end(run: Run, shape: Shape) -> None:
    run(ranks.leave_a_receive_behind, shape)


@pytest.mark.parametrize("shape", where_installed(*SHAPES))
def test_memory_that_the_user_lets_go_of_lives_until_the_operation_is_done(run: Run, shape: Shape) -> None:
    run(ranks.forget_the_input, shape)


@pytest.mark.parametrize("shape", where_installed(*SHAPES))
def test_a_wait_after_the_end_of_the_communicator_is_nothing(run: Run, shape: Shape) -> None:
    run(ranks.end_before_the_join, shape)


@pytest.mark.parametrize("shape", where_installed(*SHAPES))
def test_tensors_of_other_devices_and_of_the_host_are_refused(run: Run, shape: Shape) -> None:
    run(ranks.give_tensors_of_other_places, shape)


@pytest.mark.parametrize("shape", where_installed(*PLAIN, "nccl=2,rccl=2"))
def test_calls_on_a_stream_that_is_captured_are_refused(run: Run, shape: Shape) -> None:
    run(ranks.call_in_a_capture, shape)


@pytest.mark.parametrize("shape", where_installed(*PLAIN, "nccl=2,rccl=2"))
def test_operations_on_their_way_do_not_disturb_a_capture(run: Run, shape: Shape) -> None:
    run(ranks.capture_beside_an_operation, shape)
