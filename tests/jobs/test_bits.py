"""All ranks hold the same bits, from run to run; with the strict hint whatever the size and the islands. NaN, infinities, AVG."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from polyccl import Comm, ReduceOp

from .marks import named
from .pool import SharedPool, same
from .shapes import Shape

SIZES = (1, 2, 3, 1000, 70001, 700001)
"""From one element to several chunks."""
STRICT = {"deterministic": "strict"}


def wild(rank: int, count: int, dtype: str) -> Any:
    """Floats of all magnitudes, so that every order of summation has a sum of its own."""
    chance = np.random.default_rng((rank, count))
    spread = 8 if dtype == "float16" else 20
    return np.ldexp(chance.random(count) - 0.5, chance.integers(-spread, spread, count)).astype(dtype)


def digest(array: Any) -> int:
    return zlib.crc32(array.tobytes())


def sums(comm: Comm, dtype: str) -> list[int]:
    """Digests of the sums of every size, each by all_reduce, asynchronous all_reduce, and reduce_scatter with all_gather."""
    rank, size = comm.get_rank(), comm.get_size()
    found = []
    with np.errstate(over="ignore"):
        for count in SIZES:
            for op in (ReduceOp.SUM, ReduceOp.AVG):
                data = wild(rank, count, dtype)
                comm.all_reduce(data, op)
                again = wild(rank, count, dtype)
                comm.all_reduce(again, op, async_op=True).wait()
                assert digest(data) == digest(again), f"{op} of {count}: two runs differ"
                found.append(digest(data))
            part = np.zeros(count, dtype)
            comm.reduce_scatter_single(part, wild(rank, count * size, dtype))
            whole = np.zeros(count * size, dtype)
            comm.all_gather_single(whole, part)
            found.append(digest(whole))
    return found


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", named("host=3,host=1", "host=2,host=1,host=1", "gloo=3", "gloo=3,gloo=1", "~gloo=2,host=2"))
def test_all_ranks_hold_the_same_bits_in_every_run(jobs: SharedPool, shape: Shape, dtype: str) -> None:
    first = jobs.run(sums, shape, dtype)
    assert same(first)
    assert jobs.run(sums, shape, dtype, fresh=True) == first


def bfloat_sums(comm: Comm) -> list[bytes]:
    import torch

    found = []
    for count in SIZES:
        data = torch.from_numpy(wild(comm.get_rank(), count, "float32")).bfloat16()
        comm.all_reduce(data)
        found.append(zlib.crc32(data.view(torch.int16).numpy().tobytes()))
    return found


@pytest.mark.parametrize("shape", named("host=3,host=1", "host=2,host=1,host=1", "gloo=3"))
def test_bfloat16_too(jobs: SharedPool, shape: Shape) -> None:
    pytest.importorskip("torch")
    first = jobs.run(bfloat_sums, shape)
    assert same(first)
    assert jobs.run(bfloat_sums, shape) == first


# ---- strict ----------------------------------------------------------------------------------------------------------


def strict_sums(comm: Comm, dtype: str) -> list[int]:
    found = []
    for count in SIZES:
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            data = wild(comm.get_rank(), count, dtype)
            comm.all_reduce(data, op, hints=STRICT)
            found.append(digest(data))
    return found


@pytest.mark.backend("gloo")
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_strict_sums_are_the_same_on_every_shape_of_four_ranks(jobs: SharedPool, dtype: str) -> None:
    shapes = [
        Shape("host=2,host=2"),
        Shape("host=4"),
        Shape("host=3,host=1"),
        Shape("host=2,host=2", interleave=True),
        Shape("gloo=4"),
        Shape("gloo=2,host=1,host=1"),
    ]
    results = [result for shape in shapes for result in jobs.run(strict_sums, shape, dtype)]
    assert same(results)


def elements_alone(comm: Comm) -> None:
    """Elements of a large sum, each summed alone as well."""
    rank, count = comm.get_rank(), 400000
    whole = wild(rank, count, "float32")
    given = whole.copy()
    comm.all_reduce(whole, hints=STRICT)
    for index in (0, 1, 12345, 131072, 262143, count - 1):
        single = given[index : index + 1].copy()
        comm.all_reduce(single, hints=STRICT)
        assert single.tobytes() == whole[index : index + 1].tobytes(), f"element {index}"
    shifted = given[777:90000].copy()
    comm.all_reduce(shifted, hints=STRICT)
    assert shifted.tobytes() == whole[777:90000].tobytes()


@pytest.mark.parametrize("shape", named("host=3,host=1", "~host=2,host=2", "gloo=2,gloo=1", "gloo=3"))
def test_a_strict_sum_of_an_element_is_the_same_alone_and_in_a_large_buffer(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(elements_alone, shape)


def strict_by_default(comm: Comm) -> None:
    data, other = wild(comm.get_rank(), 1000, "float32"), wild(comm.get_rank(), 1000, "float32")
    comm.all_reduce(data, hints=STRICT)
    comm.set_hints(STRICT)
    comm.all_reduce(other)
    comm.set_hints({})
    assert data.tobytes() == other.tobytes()


def test_set_hints_makes_sums_strict(jobs: SharedPool) -> None:
    jobs.run(strict_by_default, Shape("host=3,host=1"))


# ---- particular values -------------------------------------------------------------------------------------------------


def particular(comm: Comm, dtype: str) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    first = rank == 0
    nan, inf = float("nan"), float("inf")

    def reduced(mine: float, op: ReduceOp = ReduceOp.SUM) -> Any:
        data = np.full(5, mine, dtype)
        comm.all_reduce(data, op)
        assert same([element.tobytes() for element in data])
        return data[0]

    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG, ReduceOp.PREMUL_SUM(1.0)):
        assert np.isnan(reduced(nan if rank == size - 1 else 1.0, op)), f"{op}: NaN of the last rank"
        assert np.isnan(reduced(nan if first else 1.0, op)), f"{op}: NaN of the first rank"
    assert reduced(inf if first else 1.0) == inf
    assert reduced(-inf if first else 1.0) == -inf
    assert np.isnan(reduced(inf if first else -inf))
    assert reduced(-inf if first else inf, ReduceOp.MIN) == -inf
    assert reduced(-inf if first else inf, ReduceOp.MAX) == inf
    zero = reduced(-0.0)
    assert zero == 0
    assert np.signbit(zero), "the sum of negative zeros is one"
    assert not np.signbit(reduced(-0.0 if first else 0.0))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", named("host=3", "host=3,host=1", "host=1,host=1", "host=2,host=1,host=1"))
def test_nan_wins_and_infinities_and_zeros_keep_their_signs(jobs: SharedPool, shape: Shape, dtype: str) -> None:
    jobs.run(particular, shape, dtype)


def nan_bits(comm: Comm) -> list[int]:
    """Digests of sums of NaNs with payloads of their own."""
    found = []
    for count in (1, 1000, 300000):
        data = np.full(count, 0x7FC00000 + comm.get_rank() + 1, np.uint32).view(np.float32)
        for op in (ReduceOp.SUM, ReduceOp.MAX):
            mine = data.copy()
            comm.all_reduce(mine, op)
            assert np.isnan(mine).all()
            found.append(digest(mine))
    return found


@pytest.mark.parametrize("shape", named("host=3,host=1", "host=2,host=1,host=1", "gloo=2,gloo=1"))
def test_nans_have_the_same_bits_on_all_ranks(jobs: SharedPool, shape: Shape) -> None:
    assert same(jobs.run(nan_bits, shape))


# ---- AVG ---------------------------------------------------------------------------------------------------------------


def averages(comm: Comm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for count in (1, 300, 70001):
        large = np.full(count, 40000.0, np.float16)  # the sum of two is beyond float16
        comm.all_reduce(large, ReduceOp.AVG)
        assert np.allclose(large.astype(np.float64), 40000.0, rtol=2e-3), large[:3]
        data = np.full(count, rank, np.float64)
        comm.all_reduce(data, ReduceOp.AVG)
        assert np.allclose(data, sum(range(size)) / size, rtol=1e-15)  # not an average of averages
        for value, dtype in ((-7, np.int32), (7, np.int64), (3, np.uint8)):
            whole = np.full(count, value if rank == 0 else 0, dtype)
            comm.all_reduce(whole, ReduceOp.AVG)
            assert (whole == int(value / size)).all(), f"{value} of {dtype} among {size}: {whole[0]}"
        part = np.zeros(count, np.float16)
        comm.reduce_scatter_single(part, np.full(count * size, 40000.0, np.float16), ReduceOp.AVG)
        assert np.allclose(part.astype(np.float64), 40000.0, rtol=2e-3)
        at_root = np.full(count, 40000.0, np.float16)
        comm.reduce(at_root, size - 1, ReduceOp.AVG)
        assert np.allclose(at_root.astype(np.float64), 40000.0, rtol=2e-3)


@pytest.mark.parametrize("shape", named("host=4", "gloo=4", "host=3,host=1", "gloo=3,gloo=1", "host=2,host=1,host=1"))
def test_averages_do_not_overflow_truncate_integers_and_weigh_ranks_alike(jobs: SharedPool, shape: Shape) -> None:
    jobs.run(averages, shape)
