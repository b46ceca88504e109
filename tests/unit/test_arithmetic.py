"""The host kernels against NumPy, bit by bit: every dtype and reduction, any number of operands, any length and alignment."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from polyccl import _native
from polyccl.spec import OPERATIONS, Reduction

Array = np.ndarray[Any, np.dtype[Any]]

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
FP8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
DTYPES = ["bool", *INTEGERS, *FLOATS, *COMPLEX, *FP8]
SIZES = dict(zip(DTYPES, [1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16, 1, 1, 1, 1, 1], strict=True))
BITWISE = ["BAND", "BOR", "BXOR"]
CASES = (
    [(dtype, reduction) for dtype in ["bool", *INTEGERS] for reduction in ["SUM", "PRODUCT", "MIN", "MAX", *BITWISE]]
    + [(dtype, reduction) for dtype in FLOATS for reduction in ["SUM", "PRODUCT", "MIN", "MAX"]]
    + [(dtype, reduction) for dtype in COMPLEX for reduction in ["SUM", "PRODUCT"]]
)
CANONICAL_NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8000000000000}
# Longer than a block of any dtype, and no multiple of a vector.
LONG = 8192 + 1000 + 3


@pytest.fixture(params=["wide", "plain"])
def vectors(request: pytest.FixtureRequest) -> Iterator[str]:
    """Once with the processor's own vectors and conversions, once with what every processor has."""
    before = _native.use_wide_vectors(request.param == "wide")
    yield request.param
    _native.use_wide_vectors(before)


def storage(dtype: str) -> np.dtype[Any]:
    """NumPy's type for the memory: bfloat16 is kept as its bits."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def bits(array: Array) -> Array:
    return array.view(np.uint8)


def bfloat16_bits(values: Array) -> Array:
    """float32 rounded to nearest even, as bits."""
    raw = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def widen(stored: Array, dtype: str) -> Array:
    """What the kernels compute in."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32) if dtype == "float16" else stored


def canonical(array: Array) -> Array:
    if array.dtype.kind == "c":
        return canonical(array.view(array.real.dtype)).view(array.dtype)
    return np.where(np.isnan(array), array.dtype.type("nan"), array) if array.dtype.kind == "f" else array


def narrow(wide: Array, dtype: str) -> Array:
    return bfloat16_bits(wide) if dtype == "bfloat16" else canonical(wide.astype(storage(dtype)))


def combine(a: Array, b: Array, reduction: str) -> Array:
    if a.dtype == np.bool_:
        names = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
        reduction = names.get(reduction, reduction)
    if reduction == "PRODUCT" and a.dtype.kind == "c":
        product = np.empty_like(a)
        product.real = a.real * b.real - a.imag * b.imag
        product.imag = a.real * b.imag + a.imag * b.real
        return product
    if reduction in ("MIN", "MAX"):
        wins = b < a if reduction == "MIN" else b > a
        return np.where(wins | (b != b), b, a)
    functions = {"SUM": np.add, "PRODUCT": np.multiply, "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
    return np.asarray(functions[reduction](a, b))


def expected(operands: Sequence[Array], dtype: str, reduction: str) -> Array:
    """From left to right, in the wide type, rounded once."""
    with np.errstate(all="ignore"):
        total = widen(operands[0], dtype)
        for operand in operands[1:]:
            total = combine(total, widen(operand, dtype), reduction)
        return narrow(total, dtype)


def random_operands(dtype: str, count: int, length: int, seed: int = 1) -> list[Array]:
    """Every bit pattern may come up for integers; floats mix plain values with infinities, NaNs, zeros and denormals."""
    rng = np.random.default_rng(seed)
    return [_random(dtype, length, rng) for _ in range(count)]


def _random(dtype: str, length: int, rng: np.random.Generator) -> Array:
    kind = storage(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, length).astype(np.bool_)
    if dtype in INTEGERS:
        return rng.integers(np.iinfo(kind).min, np.iinfo(kind).max, length, dtype=kind, endpoint=True)
    if dtype in COMPLEX:
        part = np.dtype("float32" if dtype == "complex64" else "float64")
        return _floats(2 * length, rng).astype(part).view(kind)
    values = _floats(length, rng)
    return bfloat16_bits(values) if dtype == "bfloat16" else values.astype(kind)


def _floats(length: int, rng: np.random.Generator) -> Array:
    values = rng.normal(size=length) * 10.0 ** rng.integers(-4, 4, length)
    special = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 6e-8, -1e-40, 65504.0], length)
    with np.errstate(over="ignore"):
        return np.asarray(np.where(rng.random(length) < 0.1, special, values), dtype=np.float32)


def run(operands: Sequence[Array], dtype: str, reduction: str, output: Array | None = None, **factor: Any) -> Array:
    output = np.empty_like(operands[0]) if output is None else output
    _native.reduce(output, list(operands), reduction, dtype=dtype, **factor)
    return output


def truncating_division(values: Array, ranks: int) -> Array:
    """As C divides. Wide enough that ranks need not fit the dtype."""
    wide = values.astype(np.uint64 if values.dtype.kind == "u" else np.int64)
    divisor = wide.dtype.type(ranks)
    return np.asarray(((wide - np.fmod(wide, divisor)) // divisor).astype(values.dtype))


# ---- Tables ----


def test_dtypes_have_the_names_and_sizes_of_torch_and_numpy() -> None:
    assert [(name, size) for _, name, size in _native.dtypes()] == list(SIZES.items())
    assert [number for number, _, _ in _native.dtypes()] == list(range(1, len(SIZES) + 1))


def test_cpp_and_python_know_the_same_reductions_and_operations() -> None:
    assert _native.reductions() == [reduction.name for reduction in Reduction]
    assert _native.operations() == [
        (row.kind, row.name, row.input, row.output, row.input_at, row.output_at, row.rooted, row.reduces, row.ragged)
        for row in OPERATIONS
    ]


def test_can_reduce_is_exactly_what_the_kernels_do() -> None:
    scaled = [(dtype, "AVG") for dtype in [*INTEGERS, *FLOATS, *COMPLEX]] + [(dtype, "PREMUL_SUM") for dtype in FLOATS]
    allowed = {*CASES, *scaled}
    for dtype in SIZES:
        for reduction in _native.reductions():
            assert _native.can_reduce(dtype, reduction) == ((dtype, reduction) in allowed), (dtype, reduction)
    assert not _native.can_reduce(99, "SUM")


# ---- Reductions ----


@pytest.mark.parametrize(("dtype", "reduction"), CASES)
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_reduce_equals_numpy_bit_by_bit(dtype: str, reduction: str, count: int, vectors: str) -> None:
    for length in (0, 1, 13, LONG):
        operands = random_operands(dtype, count, length, seed=count)
        got = run(operands, dtype, reduction)
        np.testing.assert_array_equal(bits(got), bits(expected(operands, dtype, reduction)))


@pytest.mark.parametrize(("dtype", "big"), [("bfloat16", 2.0**24), ("float32", 2.0**24), ("float64", 2.0**53)])
def test_operands_are_combined_from_left_to_right(dtype: str, big: float) -> None:
    large, one, minus_large = (
        narrow(np.full(5, value, np.float64 if dtype == "float64" else np.float32), dtype) for value in (big, 1, -big)
    )
    assert not widen(run([large, one, one, minus_large], dtype, "SUM"), dtype).any()  # each 1 is lost in turn
    assert set(widen(run([one, one, large, minus_large], dtype, "SUM"), dtype).tolist()) == {2.0}


def test_16_bit_floats_accumulate_in_float32_and_round_once() -> None:
    halves = [np.array([2048], np.float16), np.array([1], np.float16), np.array([1], np.float16)]  # 2049 is not a float16, 2050 is
    assert run(halves, "float16", "SUM")[0] == 2050
    assert (
        run([np.array([60000], np.float16), np.array([60000], np.float16), np.array([-60000], np.float16)], "float16", "SUM")[0]
        == 60000
    )
    brains = [bfloat16_bits(np.array([value], np.float32)) for value in (256, 1, 1)]  # 257 is not a bfloat16, 258 is
    assert widen(run(brains, "bfloat16", "SUM"), "bfloat16")[0] == 258


def test_bfloat16_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    a, b = (torch.randn(4099, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    output = torch.empty_like(a)
    _native.reduce(output, [a, b], "SUM")
    assert torch.equal(output, a + b)
    _native.reduce(output, [a, b], "PRODUCT")
    assert torch.equal(output, a * b)


def test_every_float16_survives_widening_and_narrowing(vectors: str) -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    np.testing.assert_array_equal(bits(run([every], "float16", "SUM")), bits(canonical(every)))


def test_float16_products_round_to_nearest_even_everywhere(vectors: str) -> None:
    rng = np.random.default_rng(7)
    a, b = (rng.integers(0, 65536, 400_000).astype(np.uint16).view(np.float16) for _ in range(2))
    np.testing.assert_array_equal(bits(run([a, b], "float16", "PRODUCT")), bits(expected([a, b], "float16", "PRODUCT")))


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_is_canonical_wherever_it_comes_from(dtype: str, vectors: str) -> None:
    raw = np.dtype(f"uint{8 * SIZES[dtype]}")
    sign = 1 << (8 * SIZES[dtype] - 1)
    odd_nan = np.full(37, CANONICAL_NAN[dtype] | sign | 1, raw).view(storage(dtype))
    infinity = narrow(np.full(37, np.inf, np.float32), dtype)
    minus_infinity = narrow(np.full(37, -np.inf, np.float32), dtype)
    one = narrow(np.full(37, 1, np.float32), dtype)
    zero = narrow(np.full(37, 0, np.float32), dtype)
    sources: list[tuple[list[Array], str]] = [
        ([odd_nan], "SUM"),
        ([infinity, minus_infinity], "SUM"),
        ([infinity, zero], "PRODUCT"),
    ]
    sources += [(operands, name) for name in ("MIN", "MAX", "SUM") for operands in ([one, odd_nan, one], [odd_nan, one, one])]
    for operands, reduction in sources:
        assert set(run(operands, dtype, reduction).view(raw).tolist()) == {CANONICAL_NAN[dtype]}
    scaled = np.empty_like(odd_nan)
    _native.scale(scaled, odd_nan, dtype=dtype, average=3)
    assert set(scaled.view(raw).tolist()) == {CANONICAL_NAN[dtype]}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", ["MIN", "MAX"])
def test_of_two_zeros_the_left_one_stays(dtype: str, reduction: str, vectors: str) -> None:
    plus, minus = (narrow(np.full(41, value, np.float32), dtype) for value in (0.0, -0.0))
    np.testing.assert_array_equal(bits(run([plus, minus], dtype, reduction)), bits(plus))
    np.testing.assert_array_equal(bits(run([minus, plus], dtype, reduction)), bits(minus))


@pytest.mark.parametrize("dtype", COMPLEX)
def test_products_are_not_fused_into_sums(dtype: str, vectors: str) -> None:
    z = np.random.default_rng(3).normal(size=999) + 1j * np.random.default_rng(4).normal(size=999)
    z = z.astype(dtype)
    product = run([z, z.conj()], dtype, "PRODUCT")
    assert not product.imag.any()  # a*b - b*a: a fused multiply-add leaves the rounding error of one product


def test_bytes_other_than_0_and_1_are_true() -> None:
    strange = np.array([0, 1, 2, 255], np.uint8)
    assert run([strange, np.zeros(4, np.uint8)], "bool", "SUM").tolist() == [0, 1, 1, 1]
    assert run([strange, np.full(4, 4, np.uint8)], "bool", "BAND").tolist() == [0, 1, 1, 1]
    assert run([strange, np.full(4, 4, np.uint8)], "bool", "BXOR").tolist() == [1, 0, 0, 0]


# ---- Memory ----


@pytest.mark.parametrize(("dtype", "reduction"), CASES)
def test_output_may_be_any_operand(dtype: str, reduction: str, vectors: str) -> None:
    for count in (1, 2, 4):
        operands = random_operands(dtype, count, LONG)
        want = expected(operands, dtype, reduction)
        for place in range(count):
            mine = [operand.copy() for operand in operands]
            run(mine, dtype, reduction, output=mine[place])
            np.testing.assert_array_equal(bits(mine[place]), bits(want))
            for other in set(range(count)) - {place}:
                np.testing.assert_array_equal(bits(mine[other]), bits(operands[other]))


@pytest.mark.parametrize(("dtype", "reduction"), CASES)
def test_bits_do_not_depend_on_alignment_or_on_how_a_tensor_is_cut(dtype: str, reduction: str, vectors: str) -> None:
    operands = random_operands(dtype, 3, LONG)
    want = expected(operands, dtype, reduction)
    shifted = [at_odd_address(operand, shift) for shift, operand in enumerate(operands, start=1)]
    output = at_odd_address(np.zeros_like(want), 5)
    run(shifted, dtype, reduction, output=output)
    np.testing.assert_array_equal(output.tobytes(), want.tobytes())
    for start, stop in ((0, 1), (1, 4), (4, 1501), (1501, LONG)):
        piece = run([operand[start:stop] for operand in operands], dtype, reduction)
        np.testing.assert_array_equal(bits(piece), bits(want[start:stop]))


def at_odd_address(values: Array, shift: int) -> Array:
    """A copy of bytes whose address is no multiple of the element's size, as a tensor of the same dtype."""
    memory = np.zeros(values.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64 + shift
    copy = np.frombuffer(memory, values.dtype, values.size, begin) if values.size else values
    copy[:] = values
    return copy


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets the rounding mode by x86's numbers")
def test_the_thread_s_rounding_mode_changes_nothing(vectors: str) -> None:
    libm = ctypes.CDLL("libm.so.6")
    upward = 0x800
    a, b = np.full(33, 1, np.float32), np.full(33, 2**-40, np.float32)
    assert libm.fesetround(upward) == 0
    try:
        got = run([a, b], "float32", "SUM")
        kept = libm.fegetround()
    finally:
        libm.fesetround(0)
    assert kept == upward
    np.testing.assert_array_equal(got, a)


def test_denormals_are_kept_where_torch_flushes_them(vectors: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        tiny = np.full(33, 1, np.uint32).view(np.float32)
        got = run([tiny, tiny], "float32", "SUM")
    finally:
        torch.set_flush_denormal(False)
    assert set(got.view(np.uint32).tolist()) == {2}


# ---- Factors ----


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 200, 70_000])
def test_averages_of_integers_truncate_toward_zero(dtype: str, ranks: int, vectors: str) -> None:
    operands = random_operands(dtype, 2, LONG)
    operands[0][:2] = np.iinfo(dtype).min, np.iinfo(dtype).max
    operands[1][:2] = 0
    want = truncating_division(expected(operands, dtype, "SUM"), ranks)
    np.testing.assert_array_equal(run(operands, dtype, "SUM", average=ranks), want)


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_averages_of_floats_are_one_multiplication_before_rounding(dtype: str, ranks: int, vectors: str) -> None:
    for count in (1, 2, 5):
        operands = random_operands(dtype, count, LONG)
        with np.errstate(all="ignore"):
            total = widen(operands[0], dtype)
            for operand in operands[1:]:
                total = total + widen(operand, dtype)
            part = total.view(total.real.dtype)  # re and im are scaled apart
            inverse = part.dtype.type(1) / part.dtype.type(ranks)
            want = narrow((part * inverse).view(total.dtype), dtype)
        np.testing.assert_array_equal(bits(run(operands, dtype, "SUM", average=ranks)), bits(want))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_scale_multiplies_by_the_factor_rounded_to_the_dtype(dtype: str, vectors: str) -> None:
    (values,) = random_operands(dtype, 1, LONG)
    factor = 3.0 if dtype in INTEGERS else 0.1
    stored = np.frombuffer(_native.scalar_bytes(factor, dtype), storage(dtype))
    want = expected([values, np.broadcast_to(stored, values.shape)], dtype, "PRODUCT")
    got = np.empty_like(values)
    _native.scale(got, values, dtype=dtype, factor=factor)
    np.testing.assert_array_equal(bits(got), bits(want))
    _native.scale(values, values, dtype=dtype, factor=factor)
    np.testing.assert_array_equal(bits(values), bits(want))


def test_scalars_are_rounded_once() -> None:
    for value in (0.1, -2.5, 1e300, 1e-300, 2**-25, 2**-24 * 1.5, 65519.999999, 65520.0, float("inf"), float("nan")):
        with np.errstate(over="ignore"):
            assert _native.scalar_bytes(value, "float16") == np.float16(value).tobytes(), value
            assert _native.scalar_bytes(value, "float32") == np.float32(value).tobytes(), value
            assert _native.scalar_bytes(value, "float64") == np.float64(value).tobytes(), value
    just_above_a_tie = 1 + 2**-8 + 2**-40  # float32 drops the last bit and makes it a tie
    assert _native.scalar_bytes(just_above_a_tie, "bfloat16") == np.uint16(0x3F81).tobytes()
    assert _native.scalar_bytes(1 + 2**-11 + 2**-40, "float16") == np.float16(1 + 2**-10).tobytes()
    assert _native.scalar_bytes(1.5, "complex64") == np.complex64(1.5).tobytes()


def test_scalars_of_integers_are_rounded_and_bounded() -> None:
    assert _native.scalar_bytes(2.5, "int8") == np.int8(2).tobytes()
    assert _native.scalar_bytes(-3.7, "int32") == np.int32(-4).tobytes()
    for dtype in INTEGERS:
        limits = np.iinfo(dtype)
        assert _native.scalar_bytes(1e30, dtype) == np.array(limits.max, dtype).tobytes()
        assert _native.scalar_bytes(-1e30, dtype) == np.array(limits.min, dtype).tobytes()
        assert _native.scalar_bytes(float("nan"), dtype) == np.array(0, dtype).tobytes()
    assert _native.scalar_bytes(0.25, "bool") == b"\1"


# ---- Refusals ----


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [("complex64", "MAX"), ("float32", "BAND"), ("float8_e4m3fn", "SUM"), ("float32", "AVG"), ("int32", "NONE")],
)
def test_what_cannot_be_reduced_is_refused_by_name(dtype: str, reduction: str) -> None:
    memory = np.zeros(4, {1: np.uint8, 4: np.uint32, 8: np.uint64}[SIZES[dtype]])
    with pytest.raises(NotImplementedError, match=f"{dtype} cannot be combined by {reduction}"):
        run([memory, memory], dtype, reduction)


def test_bool_and_fp8_are_not_scaled() -> None:
    flags = np.ones(3, np.bool_)
    with pytest.raises(NotImplementedError, match="bool cannot be scaled or averaged"):
        run([flags], "bool", "SUM", average=2)
    with pytest.raises(NotImplementedError, match="float8_e5m2 cannot be scaled"):
        _native.scale(np.ones(3, np.uint8), np.ones(3, np.uint8), dtype="float8_e5m2", average=2)
    with pytest.raises(NotImplementedError, match="float8_e5m2"):
        _native.scalar_bytes(1.0, "float8_e5m2")
