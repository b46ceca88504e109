"""How tensors come in: what their memory is said to be, and which are refused, with which words.

Three sources: an extension of this test's own (``exchange_ext``) that offers DLPack's C exchange API, NumPy through ``__dlpack__``,
and torch, where it is installed.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyccl
from polyccl import _native
from polyccl.errors import InvalidArgument

CPU, CUDA, CUDA_HOST, ROCM, MANAGED = 1, 2, 3, 10, 13
READ_ONLY, IS_COPIED = 1, 2


def intake(tensor: object, write: bool = False) -> dict[str, Any]:
    fields = _native.intake(tensor, write, "all_reduce: tensor")
    assert isinstance(fields, dict)
    return fields


def refused(tensor: object, *words: str, write: bool = False) -> None:
    """It is refused by a single line that names the argument and says all of these."""
    with pytest.raises(InvalidArgument) as caught:
        intake(tensor, write)
    text = str(caught.value)
    assert text.startswith("all_reduce: tensor: ")
    assert "\n" not in text
    for word in words:
        assert word in text


def run_python(code: str) -> str:
    """Run in a fresh interpreter that finds the same polyccl, and give what it printed."""
    folder = str(Path(polyccl.__file__).parents[1])
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# ---- An extension of our own ----


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The extension ``exchange_ext``, compiled now."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    headers = sysconfig.get_paths()["include"]
    if shutil.which(compiler[0]) is None:
        compiler = ["cc"]
    if shutil.which(compiler[0]) is None or not Path(headers, "Python.h").exists():
        pytest.skip("compiling the test's extension takes a C compiler and Python's headers")
    source = Path(__file__).with_name("exchange_ext") / "exchange_ext.c"
    target = tmp_path_factory.mktemp("exchange_ext") / f"exchange_ext{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = [*compiler, "-std=c11", "-O1", "-fPIC", "-shared", f"-I{headers}", str(source), "-o", str(target)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert built.returncode == 0, built.stderr
    spec = importlib.util.spec_from_file_location("exchange_ext", target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_view_says_what_the_memory_is(exchange: Any) -> None:
    array = exchange.Array((3, 4), strides=(4, 1), byte_offset=8)
    assert intake(array) == {
        "data": array.address() + 8,
        "count": 12,
        "dtype": "float32",
        "device": (CPU, 0),
        "rows": 3,
        "stream": 0,
    }
    assert not hasattr(array, "__dlpack__")  # the exchange API was the only way in


@pytest.mark.parametrize("kind", ["Owning", "Chained"])
def test_older_tables_and_owned_tensors_are_understood(exchange: Any, kind: str) -> None:
    array = getattr(exchange, kind)((5,), strides=(1,))
    references = sys.getrefcount(array)
    assert intake(array, write=True)["data"] == array.address()
    assert exchange.live() == 0  # given back
    assert sys.getrefcount(array) == references


def test_a_subclass_comes_in_as_its_base_does(exchange: Any) -> None:
    class Mine(exchange.Array):  # type: ignore[misc]
        pass

    array = Mine((5,), strides=(1,))
    assert intake(array)["data"] == array.address()


def test_only_a_table_of_an_unknown_major_version_is_no_tensor(exchange: Any) -> None:
    refused(exchange.Unknown((5,)), "exchange_ext.Unknown is no tensor")


def test_an_owned_tensor_of_an_unknown_major_version_is_given_back_unread(exchange: Any) -> None:
    refused(exchange.Owning((5,), major=2), "speaks DLPack 2.", "update PolyCCL")
    assert exchange.live() == 0


def test_flags_forbid_writing(exchange: Any) -> None:
    for flags, words in ((READ_ONLY, "is read-only"), (IS_COPIED, "only a copy of its memory")):
        array = exchange.Owning((5,), flags=flags)
        assert intake(array)["count"] == 5
        refused(array, "exchange_ext.Owning", words, write=True)
        assert exchange.live() == 0


def test_devices_bring_their_current_stream(exchange: Any) -> None:
    for kind in (exchange.Array, exchange.Owning):
        fields = intake(kind((4,), device=(ROCM, 3)))
        assert (fields["device"], fields["stream"]) == ((ROCM, 3), 0x1003)


def test_pinned_memory_is_the_host_s_and_managed_memory_the_device_s(exchange: Any) -> None:
    pinned = intake(exchange.Array((4,), device=(CUDA_HOST, 2)))
    assert (pinned["device"], pinned["stream"]) == ((CPU, 0), 0)
    managed = intake(exchange.Array((4,), device=(MANAGED, 2)))
    assert (managed["device"], managed["stream"]) == ((CUDA, 2), 0x1002)


def test_a_library_s_own_error_keeps_its_first_line(exchange: Any) -> None:
    refused(exchange.Array((4,), device=(CUDA, 7)), "exchange_ext.Array", "(device 7 has no stream)")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ((6, 8, 1), "bool"),
        *[((0, bits, 1), f"int{bits}") for bits in (8, 16, 32, 64)],
        *[((1, bits, 1), f"uint{bits}") for bits in (8, 16, 32, 64)],
        *[((2, bits, 1), f"float{bits}") for bits in (16, 32, 64)],
        *[((5, bits, 1), f"complex{bits}") for bits in (64, 128)],
        ((4, 16, 1), "bfloat16"),
        ((10, 8, 1), "float8_e4m3fn"),
        ((11, 8, 1), "float8_e4m3fnuz"),
        ((12, 8, 1), "float8_e5m2"),
        ((13, 8, 1), "float8_e5m2fnuz"),
        ((14, 8, 1), "float8_e8m0fnu"),
    ],
)
def test_dtypes_are_read_by_code_and_bits(exchange: Any, dtype: tuple[int, int, int], name: str) -> None:
    assert intake(exchange.Array((2,), dtype=dtype))["dtype"] == name


@pytest.mark.parametrize("dtype", [(17, 4, 2), (0, 4, 1), (2, 32, 4), (2, 128, 1), (5, 32, 1), (3, 64, 1), (8, 8, 1), (99, 8, 1)])
def test_other_dtypes_are_refused(exchange: Any, dtype: tuple[int, int, int]) -> None:
    refused(exchange.Array((2,), dtype=dtype), f"code {dtype[0]}, {dtype[1]} bits, {dtype[2]} lane", "uint8")


def test_contiguity_ignores_sizes_of_one_and_of_zero(exchange: Any) -> None:
    assert intake(exchange.Array((1, 3, 1, 2), strides=(77, 2, 99, 1)))["count"] == 6
    assert intake(exchange.Array((2, 0, 3), strides=(1, 50, 9)))["count"] == 0
    assert intake(exchange.Array((2, 3)))["count"] == 6  # no strides, from before DLPack 1.2
    assert intake(exchange.Array(()))["rows"] == 1
    for shape, strides in (((3, 2), (1, 3)), ((4,), (2,)), ((4,), (0,)), ((4,), (-1,)), ((2, 2), (3, 1))):
        refused(exchange.Array(shape, strides=strides), "is not contiguous", ".contiguous()")


def test_memory_may_be_missing_only_without_elements(exchange: Any) -> None:
    empty = intake(exchange.Array((0, 3), strides=(3, 1), null=True, byte_offset=16))
    assert (empty["data"], empty["count"], empty["rows"]) == (0, 0, 0)
    refused(exchange.Array((2, 3), strides=(3, 1), null=True), "exchange_ext.Array has 6 elements but no memory")


def test_impossible_shapes_are_refused(exchange: Any) -> None:
    refused(exchange.Array((2**62, 2**3), strides=(8, 1)), "more elements than memory holds")
    refused(exchange.Array((-1,), strides=(1,)), "negative size")
    assert intake(exchange.Array((2**62, 2**3, 0)))["count"] == 0


# ---- NumPy, and __dlpack__ in general ----


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64", "complex64", "complex128"]
)
def test_numpy_arrays_come_in(dtype: str) -> None:
    array = np.zeros((3, 4), dtype)
    fields = intake(array, write=True)
    assert fields == {"data": array.ctypes.data, "count": 12, "dtype": dtype, "device": (CPU, 0), "rows": 3, "stream": 0}


def test_numpy_slices_keep_their_offset() -> None:
    array = np.arange(12, dtype=np.int64).reshape(4, 3)
    assert intake(array[1:3])["data"] == array.ctypes.data + 24
    refused(array[:, 1], "numpy.ndarray is not contiguous", "numpy.ascontiguousarray()")
    refused(array.T, "is not contiguous")


def test_numpy_scalars_and_0_d_arrays_are_one_element_of_one_row() -> None:
    for one in (np.float32(7), np.array(7, np.float32)):
        fields = intake(one)
        assert (fields["count"], fields["rows"], fields["dtype"]) == (1, 1, "float32")
    refused(np.float32(7), "numpy.float32 is read-only", "numpy.ndarray", write=True)
    assert intake(np.zeros((0, 5)))["rows"] == 0


def test_read_only_numpy_arrays_are_read_and_not_written() -> None:
    array = np.zeros(4)
    array.flags.writeable = False
    assert intake(array)["data"] == array.ctypes.data
    refused(array, "numpy.ndarray is read-only", "writable copy", write=True)


def test_numpy_dtypes_without_a_name_here_are_refused() -> None:
    refused(np.array(["text"]), "numpy.ndarray cannot be read through DLPack")
    refused(np.zeros(2, np.longdouble), "numpy.ndarray")


def test_intake_leaves_no_references_behind() -> None:
    array = np.zeros(4)
    references = sys.getrefcount(array)
    for _ in range(10):
        intake(array)
        refused(array[::2], "contiguous")
    gc.collect()
    assert sys.getrefcount(array) == references


class Exporter:
    """An object with a ``__dlpack__`` made of a function."""

    def __init__(self, export: Callable[..., object]) -> None:
        self.export = export

    def __dlpack__(self, **arguments: Any) -> object:
        return self.export(**arguments)


def test_capsules_from_before_dlpack_1_are_understood() -> None:
    array = np.arange(5.0)

    class Old:
        def __dlpack__(self, stream: None = None) -> object:
            return array.__dlpack__()

    assert intake(Old(), write=True)["data"] == array.ctypes.data


def test_what_export_returns_and_raises_is_judged() -> None:
    def fails(**arguments: object) -> object:
        raise BufferError("cannot do it.\nand a stack")

    refused(Exporter(lambda **arguments: 7), "Exporter gives no DLPack capsule")
    refused(Exporter(fails), "Exporter cannot be read through DLPack (cannot do it);")


def test_ctrl_c_passes_through_an_export() -> None:
    def interrupted(**arguments: object) -> object:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        intake(Exporter(interrupted))


@pytest.mark.parametrize("thing", [None, 7, 1.5, [1.0], (1,), "text", b"bytes", {}, object(), np.ndarray, np])
def test_what_is_no_tensor_is_refused_by_its_class(thing: object) -> None:
    refused(thing, f"{type(thing).__name__} is no tensor", "torch tensor")


def test_numpy_alone_needs_no_torch() -> None:
    code = """
import sys, numpy
from polyccl import _native
fields = _native.intake(numpy.zeros(6, numpy.int16), True)
_native.reduce(out := numpy.zeros(3), [numpy.ones(3), numpy.ones(3)], "SUM")
print(fields["count"], fields["dtype"], out.tolist(), "torch" in sys.modules)
"""
    assert run_python(code).split("\n")[0] == "6 int16 [2.0, 2.0, 2.0] False"


# ---- torch ----


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]
DTYPES += ["complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_come_in(torch: Any, dtype: str) -> None:
    tensor = torch.empty(3, 4, dtype=getattr(torch, dtype))
    fields = intake(tensor, write=True)
    assert fields == {"data": tensor.data_ptr(), "count": 12, "dtype": dtype, "device": (CPU, 0), "rows": 3, "stream": 0}


def test_torch_s_own_classes_come_in(torch: Any) -> None:
    class Mine(torch.Tensor):  # type: ignore[misc]
        pass

    leaf = torch.zeros(4, requires_grad=True)
    for tensor in (
        leaf,
        leaf * 2,
        torch.nn.Parameter(torch.zeros(4)),
        torch.nn.Buffer(torch.zeros(4)),
        torch.zeros(4).as_subclass(Mine),
    ):
        assert intake(tensor, write=True)["data"] == tensor.data_ptr()


def test_torch_views_keep_their_offset_and_shape(torch: Any) -> None:
    tensor = torch.zeros(4, 3)
    assert intake(tensor[1:])["data"] == tensor.data_ptr() + 12
    assert intake(tensor[1:])["rows"] == 3
    assert intake(torch.tensor(1.0))["rows"] == 1
    assert intake(torch.zeros(0, 3))["count"] == 0
    refused(tensor.t(), "torch.Tensor is not contiguous", ".contiguous()")
    refused(tensor[:, 0], "is not contiguous")
    refused(torch.zeros(1).expand(4), "is not contiguous")


@pytest.mark.filterwarnings("ignore")
def test_torch_layouts_without_plain_memory_are_refused_with_a_way_out(torch: Any) -> None:
    dense = torch.zeros(4, 4)
    for tensor, way in (
        (dense.to("meta"), ".to_empty("),
        (dense.to_sparse(), ".to_dense()"),
        (dense.to_sparse_csr(), ".to_dense()"),
        (torch.quantize_per_tensor(dense, 1.0, 0, torch.qint8), ".dequantize()"),
        (torch.nested.nested_tensor([dense, dense]), ".values()"),
        (torch.nested.nested_tensor([dense, dense], layout=torch.jagged), ".values()"),
    ):
        refused(tensor, "cannot be read through DLPack", way)
    if torch.backends.mkldnn.is_available():
        refused(dense.to_mkldnn(), ".to_dense()")


def test_tensors_inside_functorch_are_refused(torch: Any) -> None:
    seen = []

    def visit(tensor: Any) -> Any:
        refused(tensor, "torch.Tensor")
        seen.append(True)
        return tensor.sum()

    torch.vmap(visit)(torch.zeros(2, 3))
    torch.func.grad(visit)(torch.zeros(3))
    torch.func.functionalize(visit)(torch.zeros(3))
    assert len(seen) == 3


def test_lazy_conjugation_and_negation_are_refused(torch: Any) -> None:
    for dtype in (torch.complex64, torch.complex128):
        numbers = torch.ones(4, dtype=dtype)
        assert intake(numbers)["count"] == 4
        refused(numbers.conj(), "lazily conjugated", ".resolve_conj()")
        assert intake(numbers.conj().resolve_conj())["count"] == 4
        refused(numbers.conj()[:1].imag, "lazily negated", ".resolve_neg()")  # one element: looks contiguous
        refused(torch._neg_view(numbers), "lazily negated")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        refused(torch._neg_view(torch.ones(4, dtype=dtype)), "lazily negated", ".resolve_neg()")
    assert intake(torch._neg_view(torch.ones(4)).resolve_neg())["count"] == 4


def test_freed_storage_and_fake_tensors_have_no_memory(torch: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    freed = torch.zeros(4)
    freed.untyped_storage().resize_(0)
    refused(freed, "torch.Tensor has 4 elements but no memory of its own")
    with FakeTensorMode():
        fake = torch.zeros(3)
    refused(fake, "FakeTensor has 3 elements but no memory of its own", "outside of FakeTensorMode")


@pytest.mark.filterwarnings("ignore")
def test_torch_dtypes_without_a_name_here_are_refused(torch: Any) -> None:
    for name in ("int4", "uint2", "float4_e2m1fn_x2", "complex32"):
        if hasattr(torch, name):
            refused(torch.empty(4, dtype=getattr(torch, name)), "data type that PolyCCL does not know", "uint8")


def test_a_torch_without_the_exchange_api_comes_in_through_capsules(torch: Any) -> None:
    class Old(torch.Tensor):  # type: ignore[misc]
        __dlpack_c_exchange_api__ = None

    class OnDevice(Old):
        is_cpu = False

    tensor = torch.zeros(6, requires_grad=True).as_subclass(Old)
    assert intake(tensor, write=True)["data"] == tensor.data_ptr()
    refused(torch._neg_view(torch.zeros(6)).as_subclass(Old), "lazily negated")
    refused(torch.zeros(6).as_subclass(OnDevice), "cannot say which stream is current", "2.10")


def test_async_collective_tensors_are_waited_for_and_unwrapped(torch: Any) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    inner = torch.ones(5)
    outer = AsyncCollectiveTensor(inner)
    fields = intake(outer, write=True)
    assert (fields["data"], fields["count"]) == (inner.data_ptr(), 5)
    assert outer.completed


def test_intake_imports_nothing_of_torch_distributed(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed._functional_collectives", raising=False)

    class New(torch.Tensor):  # type: ignore[misc]
        """A class that intake has not seen."""

    before = set(sys.modules)
    assert intake(torch.zeros(3).as_subclass(New))["count"] == 3
    assert set(sys.modules) == before


def test_dtensors_are_refused_with_to_local(torch: Any) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    code = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from polyccl import _native
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = DTensor.from_local(torch.zeros(4), init_device_mesh("cpu", (1,)), [Shard(0)])
try:
    _native.intake(tensor)
except ValueError as error:
    print(error)
print(_native.intake(tensor.to_local())["count"])
dist.destroy_process_group()
"""
    text, count = run_python(code).strip().split("\n")
    assert "DTensor has 4 elements but no memory of its own" in text
    assert text.endswith("pass its .to_local()")
    assert count == "4"
