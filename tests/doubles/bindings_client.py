"""One rank of an AllReduce that a vendor's own Python bindings make on a stand-in: they are written against the real library's ABI,
so what they read and write shows that the stand-in has it. Run as::

    bindings_client.py nvidia|amd <folder of the stand-in> <folder to meet in> <rank> <ranks>

Needs nccl4py, or rocm-bindings-systems. Exits with 0 where the result is right.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

COUNT = 1000


def exchange(meeting: Path, rank: int, made: bytes | None) -> bytes:
    """Rank 0's bytes, on every rank. Waits up to 20 s."""
    place = meeting / "id"
    if rank == 0:
        assert made is not None
        (meeting / "id.part").write_bytes(made)
        (meeting / "id.part").rename(place)
    end = time.monotonic() + 20
    while not place.exists():
        assert time.monotonic() < end, "rank 0 made no unique id"
        time.sleep(0.005)
    return place.read_bytes()


def nvidia(folder: Path, meeting: Path, rank: int, ranks: int) -> np.ndarray[Any, Any]:
    """AllReduce through nccl4py; its memory and stream come from the CUDA runtime, as with PyTorch."""
    cudart = ctypes.CDLL(str(folder / "libcudart.so.13"))
    ctypes.CDLL(str(folder / "libnccl.so.2"))  # the bindings take the copy that is loaded
    from nccl.bindings import nccl

    assert Path(str(nccl.get_library_path())).parent.samefile(folder), nccl.get_library_path()
    assert cudart.cudaSetDevice(rank) == 0
    stream, device = ctypes.c_void_p(), ctypes.c_void_p()
    assert cudart.cudaStreamCreate(ctypes.byref(stream)) == 0
    assert cudart.cudaMalloc(ctypes.byref(device), ctypes.c_size_t(4 * COUNT)) == 0
    unique = bytearray(exchange(meeting, rank, bytes(nccl.get_unique_id()) if rank == 0 else None))
    comm = nccl.comm_init_rank_scalable(ranks, rank, 1, unique, 0)
    assert nccl.comm_count(comm) == ranks
    assert nccl.comm_cu_device(comm) == rank
    data = np.arange(COUNT, dtype=np.float32) * (rank + 1)
    size = ctypes.c_size_t(data.nbytes)
    assert cudart.cudaMemcpy(device, data.ctypes.data_as(ctypes.c_void_p), size, 1) == 0
    nccl.all_reduce(device.value, device.value, COUNT, int(nccl.DataType.Float32), int(nccl.RedOp.Sum), comm, stream.value)
    assert cudart.cudaStreamSynchronize(stream) == 0
    assert cudart.cudaMemcpy(data.ctypes.data_as(ctypes.c_void_p), device, size, 2) == 0
    assert nccl.comm_get_async_error(comm) == 0
    nccl.comm_destroy(comm)
    return data


def done(answer: Any) -> Any:
    """What an AMD binding gave beside its result code, which must be success."""
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) > 1 else None


def amd(folder: Path, meeting: Path, rank: int, ranks: int) -> np.ndarray[Any, Any]:
    """AllReduce through rocm.bindings; they look for names without a version."""
    for name, file in {"librccl.so": "librccl.so.1", "libamdhip64.so": "libamdhip64.so.7"}.items():
        assert (Path(os.environ["ROCM_PATH"]) / "lib" / name).resolve().samefile(folder / file)
    from rocm.bindings import hip, rccl

    done(hip.hipSetDevice(rank))
    properties = done(hip.hipGetDeviceProperties(rank))
    assert properties.gcnArchName.startswith(os.environ.get("FAKE_HIP_ARCH", "gfx942"))
    assert (properties.major, properties.minor, properties.warpSize) == (9, 4, 64)
    stream, device = done(hip.hipStreamCreate()), done(hip.hipMalloc(4 * COUNT))
    unique = rccl.ncclUniqueId() if rank else done(rccl.ncclGetUniqueId())
    there = np.frombuffer((ctypes.c_char * 128).from_address(int(unique)), dtype=np.uint8)
    there[:] = np.frombuffer(exchange(meeting, rank, there.tobytes()), dtype=np.uint8)
    comm = done(rccl.ncclCommInitRank(ranks, unique, rank))
    assert done(rccl.ncclCommCount(comm)) == ranks
    data = np.arange(COUNT, dtype=np.float32) * (rank + 1)
    done(hip.hipMemcpy(device, data, data.nbytes, hip.hipMemcpyKind.hipMemcpyHostToDevice))
    operation, kind = rccl.ncclRedOp_t.ncclSum, rccl.ncclDataType_t.ncclFloat32
    done(rccl.ncclAllReduce(device, device, COUNT, kind, operation, comm, stream))
    done(hip.hipStreamSynchronize(stream))
    done(hip.hipMemcpy(data, device, data.nbytes, hip.hipMemcpyKind.hipMemcpyDeviceToHost))
    done(rccl.ncclCommDestroy(comm))
    return data


def main(vendor: str, folder: str, meeting: str, rank: str, ranks: str) -> None:
    client = {"nvidia": nvidia, "amd": amd}[vendor]
    total = client(Path(folder), Path(meeting), int(rank), int(ranks))
    factor = sum(range(1, int(ranks) + 1))
    np.testing.assert_array_equal(total, np.arange(COUNT, dtype=np.float32) * factor)


if __name__ == "__main__":
    main(*sys.argv[1:])
