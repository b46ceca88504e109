"""One process that drives a stand-in through ctypes and compares its results with NumPy. Run as::

    client.py <scenario> cuda|hip <runtime library> <collective library>

All ranks live in this process, one for each device, made by ncclCommInitAll. Exits with 0 where all that the scenario says holds.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import sys
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
RANKS = 3
COUNT = 257
SUM, PRODUCT, MAX, MIN, AVERAGE = range(5)
NUMPY = {0: "i1", 1: "u1", 2: "i4", 3: "u4", 4: "i8", 5: "u8", 6: "f2", 7: "f4", 8: "f8", 9: "u2", 10: "u1", 11: "u1"}
BFLOAT16, E4M3, E5M2 = 9, 10, 11


class StandIn:
    """The calls of one vendor, and a communicator and a stream for each rank."""

    def __init__(self, vendor: str, runtime: str, collectives: str) -> None:
        self.hip = vendor == "hip"
        self.runtime = ctypes.CDLL(runtime)
        self.nccl = ctypes.CDLL(collectives)
        self.nccl.ncclGetLastError.restype = ctypes.c_char_p
        self.streams: list[ctypes.c_void_p] = []
        self.comms = (ctypes.c_void_p * RANKS)()
        if not self.hip:
            assert self.runtime.cuInit(0) == 0
        for device in range(RANKS):
            self.use(device)
            stream = ctypes.c_void_p()
            create = self.runtime.hipStreamCreateWithFlags if self.hip else self.runtime.cuStreamCreate
            assert create(ctypes.byref(stream), 1) == 0
            self.streams.append(stream)
        assert self.nccl.ncclCommInitAll(self.comms, RANKS, None) == 0

    def use(self, device: int) -> None:
        """Make a device the thread's current one."""
        if self.hip:
            assert self.runtime.hipSetDevice(device) == 0
            return
        context = ctypes.c_void_p()
        assert self.runtime.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert self.runtime.cuCtxSetCurrent(context) == 0

    def comm(self, rank: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.comms[rank])

    def synchronize(self) -> None:
        for stream in self.streams:
            assert (self.runtime.hipStreamSynchronize if self.hip else self.runtime.cuStreamSynchronize)(stream) == 0

    def together(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        """The same call on every rank, in one group; waits until it is done. Arguments end before the communicator."""
        assert self.nccl.ncclGroupStart() == 0
        for rank, arguments in enumerate(calls):
            function = getattr(self.nccl, name)
            assert function(*arguments, self.comm(rank), self.streams[rank]) == 0, self.nccl.ncclGetLastError(None)
        assert self.nccl.ncclGroupEnd() == 0, self.nccl.ncclGetLastError(None)
        self.synchronize()


def pointer(array: Array) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def size(count: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(count)


# -- 8-bit and 16-bit floats, from their definition --------------------------------------------------------------------------------


def values_of(dtype: int, fnuz: bool) -> Array:
    """Every value of a format with 8 or 16 bits, by its bits."""
    exponents, mantissas = {BFLOAT16: (8, 7), E4M3: (4, 3), E5M2: (5, 2)}[dtype]
    width = 1 + exponents + mantissas
    bias = 2 ** (exponents - 1) - 1 + fnuz
    bits = np.arange(2**width)
    sign = np.where(bits >> (width - 1), -1.0, 1.0)
    exponent, mantissa = (bits >> mantissas) & (2**exponents - 1), bits & (2**mantissas - 1)
    scale = 2.0 ** (np.maximum(exponent, 1) - bias - mantissas)
    values = sign * (np.where(exponent > 0, 2**mantissas, 0) + mantissa) * scale
    if fnuz:
        values[2 ** (width - 1)] = np.nan
    elif dtype == E4M3:
        values[(bits & 0x7F) == 0x7F] = np.nan
    else:
        top = exponent == 2**exponents - 1
        values[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    return values


def nearest(table: Array, wanted: Array) -> Array:
    """The bits of the value that is nearest, the even one of two; 8-bit formats stop at their largest value."""
    half = len(table) // 2
    sizes = table[:half][np.isfinite(table[:half])]  # a size's bits are its index, and sizes grow with them
    size = np.abs(wanted)
    above = np.clip(np.searchsorted(sizes, size), 1, len(sizes) - 1)
    low, high = size - sizes[above - 1], sizes[above] - size
    bits = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    overflows = size >= sizes[-1] + (sizes[-1] - sizes[-2]) / 2
    if len(table) > 256:
        bits = np.where(overflows, len(sizes), bits)
    negative = np.signbit(wanted) & ((bits > 0) | ~np.isnan(table[half]))  # FNUZ has no negative zero
    bits = np.where(negative, bits + half, bits)
    return np.where(np.isnan(wanted), np.flatnonzero(np.isnan(table))[0], bits)


class Format:
    """How an element type is computed with."""

    def __init__(self, dtype: int, fnuz: bool) -> None:
        self.dtype = dtype
        self.table = values_of(dtype, fnuz) if dtype >= BFLOAT16 else None

    def decode(self, bits: Array) -> Array:
        return bits if self.table is None else self.table[bits].astype(np.float32)

    def encode(self, values: Array) -> Array:
        if self.table is None:
            return values.astype(NUMPY[self.dtype])
        if self.dtype >= E4M3:  # the kernels compute these in half precision
            values = values.astype(np.float16)
        return nearest(self.table, values.astype(np.float64)).astype(NUMPY[self.dtype])

    def inputs(self, rank: int) -> Array:
        generator = np.random.default_rng(17 * self.dtype + rank)
        if self.table is not None or NUMPY[self.dtype][0] == "f":
            values = generator.uniform(-4, 4, COUNT).astype(np.float32)
            values[:3] = [np.nan if rank == 1 else 1, 0, 300]
            return self.encode(values) if self.table is not None else values.astype(NUMPY[self.dtype])
        limits = np.iinfo(NUMPY[self.dtype])
        return generator.integers(limits.min, limits.max, COUNT, dtype=NUMPY[self.dtype], endpoint=True)

    def is_integer(self) -> bool:
        return self.table is None and NUMPY[self.dtype][0] != "f"

    def scaled(self, bits: Array, factor: float) -> Array:
        """Multiplied by a factor of the same type."""
        one = self.decode(self.encode(np.array([factor], dtype="f4" if self.dtype != 8 else "f8")))
        return self.encode(self.decode(bits) * one)

    def reduced(self, op: int, inputs: list[Array]) -> Array:
        """In rank order, rounded after each step."""
        if op == AVERAGE and not self.is_integer():
            return self.reduced(SUM, [self.scaled(each, 1 / RANKS) for each in inputs])
        total = inputs[0]
        step = {SUM: np.add, PRODUCT: np.multiply, MAX: np.fmax, MIN: np.fmin, AVERAGE: np.add}[op]
        for each in inputs[1:]:
            total = self.encode(step(self.decode(total), self.decode(each)))
        if op == AVERAGE:  # truncated
            return np.array([int(abs(int(x)) // RANKS) * (1 if x >= 0 else -1) for x in total], dtype=NUMPY[self.dtype])
        return total


def same(format: Format, found: Array, wanted: Array) -> None:
    np.testing.assert_array_equal(format.decode(found), format.decode(wanted), err_msg=f"datatype {format.dtype}")


# -- scenarios -----------------------------------------------------------------------------------------------------------------


def reductions(stand_in: StandIn) -> None:
    """Every operator on every element type, in place and not."""
    fnuz = stand_in.hip and os.environ.get("FAKE_HIP_ARCH", "gfx942").startswith("gfx94")
    np.seterr(all="ignore")
    for dtype, op in itertools.product(range(12), range(5)):
        format = Format(dtype, fnuz and dtype >= E4M3)
        inputs = [format.inputs(rank) for rank in range(RANKS)]
        wanted = format.reduced(op, inputs)
        outputs = [np.zeros_like(each) for each in inputs]
        stand_in.together(
            "ncclAllReduce", [(pointer(i), pointer(o), size(COUNT), dtype, op) for i, o in zip(inputs, outputs, strict=True)]
        )
        for output in outputs:
            same(format, output, wanted)
            assert output.tobytes() == outputs[0].tobytes()
        stand_in.together(
            "ncclReduce", [(pointer(i), pointer(i) if r == 1 else None, size(COUNT), dtype, op, 1) for r, i in enumerate(inputs)]
        )
        same(format, inputs[1], wanted)
        same(format, inputs[0], format.inputs(0))
        whole = [np.concatenate([format.inputs(rank)] * RANKS) for rank in range(RANKS)]
        own = [each[rank * COUNT : (rank + 1) * COUNT] for rank, each in enumerate(whole)]
        stand_in.together(
            "ncclReduceScatter", [(pointer(w), pointer(o), size(COUNT), dtype, op) for w, o in zip(whole, own, strict=True)]
        )
        for each in own:
            same(format, each, wanted)


def movement(stand_in: StandIn) -> None:
    """What only moves bytes, by the calls that the library has."""

    def blocks(rank: int) -> Array:
        return np.arange(RANKS * COUNT, dtype=np.int32) + 100_000 * rank

    def empty(blocks: int) -> list[Array]:
        return [np.zeros(blocks * COUNT, dtype=np.int32) for _ in range(RANKS)]

    ranks = range(RANKS)
    sources = [blocks(rank) for rank in ranks]
    out = empty(RANKS)
    stand_in.together("ncclAllGather", [(pointer(sources[r]), pointer(out[r]), size(COUNT), 2) for r in ranks])
    for each in out:
        np.testing.assert_array_equal(each, np.concatenate([blocks(r)[:COUNT] for r in ranks]))
    out = empty(1)
    stand_in.together(
        "ncclBroadcast", [(pointer(sources[r]) if r == 2 else None, pointer(out[r]), size(COUNT), 2, 2) for r in ranks]
    )
    for each in out:
        np.testing.assert_array_equal(each, blocks(2)[:COUNT])
    if not hasattr(stand_in.nccl, "ncclAlltoAll"):
        return
    out = empty(RANKS)
    stand_in.together("ncclAlltoAll", [(pointer(sources[r]), pointer(out[r]), size(COUNT), 2) for r in ranks])
    for rank, each in enumerate(out):
        np.testing.assert_array_equal(each, np.concatenate([blocks(r)[rank * COUNT : (rank + 1) * COUNT] for r in ranks]))
    out = empty(RANKS)
    stand_in.together("ncclGather", [(pointer(sources[r]), pointer(out[r]) if r == 1 else None, size(COUNT), 2, 1) for r in ranks])
    np.testing.assert_array_equal(out[1], np.concatenate([blocks(r)[:COUNT] for r in ranks]))
    out = empty(1)
    stand_in.together("ncclScatter", [(pointer(sources[r]) if r == 0 else None, pointer(out[r]), size(COUNT), 2, 0) for r in ranks])
    for rank, each in enumerate(out):
        np.testing.assert_array_equal(each, blocks(0)[rank * COUNT : (rank + 1) * COUNT])
    if hasattr(stand_in.nccl, "ncclAllToAllv"):
        uneven_movement(stand_in, sources)


def uneven_movement(stand_in: StandIn, sources: list[Array]) -> None:
    """Rank r sends r + p + 1 elements to rank p, from the start of block p to the start of block r."""
    offsets = (ctypes.c_size_t * RANKS)(*[COUNT * r for r in range(RANKS)])
    counts = [(ctypes.c_size_t * RANKS)(*[r + p + 1 for p in range(RANKS)]) for r in range(RANKS)]
    out = [np.zeros(RANKS * COUNT, dtype=np.int32) for _ in range(RANKS)]
    calls = [(pointer(sources[r]), counts[r], offsets, pointer(out[r]), counts[r], offsets, 2) for r in range(RANKS)]
    stand_in.together("ncclAllToAllv", calls)
    for rank, peer in itertools.product(range(RANKS), range(RANKS)):
        n = rank + peer + 1
        start = rank * COUNT
        np.testing.assert_array_equal(out[rank][peer * COUNT : peer * COUNT + n], sources[peer][start : start + n])
        assert not out[rank][peer * COUNT + n : (peer + 1) * COUNT].any()


def splits(stand_in: StandIn) -> None:
    """Two parts, in the order of their keys; a rank without color gets no communicator."""
    parts = (ctypes.c_void_p * RANKS)()
    colors, keys = [4, -1, 4], [9, 0, 3]
    assert stand_in.nccl.ncclGroupStart() == 0
    for rank in range(RANKS):
        place = ctypes.byref(parts, rank * ctypes.sizeof(ctypes.c_void_p))
        assert stand_in.nccl.ncclCommSplit(stand_in.comm(rank), colors[rank], keys[rank], place, None) == 0
    assert stand_in.nccl.ncclGroupEnd() == 0, stand_in.nccl.ncclGetLastError(None)
    assert parts[1] is None
    for rank, place in {0: 1, 2: 0}.items():
        found, count = ctypes.c_int(), ctypes.c_int()
        assert stand_in.nccl.ncclCommUserRank(ctypes.c_void_p(parts[rank]), ctypes.byref(found)) == 0
        assert stand_in.nccl.ncclCommCount(ctypes.c_void_p(parts[rank]), ctypes.byref(count)) == 0
        assert (found.value, count.value) == (place, 2)


def configs(stand_in: StandIn) -> None:
    """Which configurations the library takes. The struct is built here byte by byte, as another version's header would."""
    undefined = -(2**31)

    def start(length: int, version: int, magic: int = 0xCAFEBEEF, blocking: int = undefined) -> bytes:
        head = struct.pack("=QIIiiiiQi", length, magic, version, blocking, undefined, undefined, undefined, 0, undefined)
        return head.ljust(48, b"\0")

    def make(config: bytes) -> int:
        unique = ctypes.create_string_buffer(128)
        assert stand_in.nccl.ncclGetUniqueId(unique) == 0
        comm = ctypes.c_void_p()
        by_value = type("UniqueId", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_char * 128)]})
        init = stand_in.nccl.ncclCommInitRankConfig
        result = int(init(ctypes.byref(comm), 1, by_value.from_buffer(unique), 0, config))
        if result == 0:
            assert stand_in.nccl.ncclCommDestroy(comm) == 0
        return result

    # Upstream's fields from trafficClass on, as 2.32 sends them: names are NULL, all else is undefined.
    middle = struct.pack("=iQiiiiiiiii", undefined, 0, *[undefined] * 9)[: 92 - 44]
    tail = struct.pack("=iiiiiii", *[undefined] * 7)
    upstream = start(120, 23203)[:44] + middle + tail
    assert len(upstream) == 120
    assert make(start(48, 21800)) == 0
    assert make(start(40, 21700)) == 0, "an older struct is shorter"
    assert make(start(48, 21800, magic=1)) == 4
    assert b"NCCL_CONFIG_INITIALIZER" in stand_in.nccl.ncclGetLastError(None)
    assert make(start(48, 21800, blocking=5)) == 4
    assert make(start(48, 21300, blocking=5)) == 0, "the field is newer than the version that the caller says"
    assert make(struct.pack("=Q", 92) + upstream[8:92].ljust(128, b"\xff")) == 0, "what lies behind the size is not read"
    assert make(struct.pack("=Q", 4096) + upstream[8:] + b"\xff" * 4000) == make(upstream), "a newer struct is clipped"
    fork = stand_in.nccl.polyccl_stand_in() == b"NCCLX"
    assert make(upstream) == (4 if fork else 0)
    if fork:
        assert b"commDesc" in stand_in.nccl.ncclGetLastError(None)


def main(scenario: str, vendor: str, runtime: str, collectives: str) -> None:
    stand_in = StandIn(vendor, runtime, collectives)
    stand_in.nccl.polyccl_stand_in.restype = ctypes.c_char_p
    {"reductions": reductions, "movement": movement, "splits": splits, "configs": configs}[scenario](stand_in)
    for rank in range(RANKS):
        assert stand_in.nccl.ncclCommDestroy(stand_in.comm(rank)) == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
