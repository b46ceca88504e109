"""The sources of the nccl and rccl families: how little stands in each folder, and that their declarations are the vendors' own.

The declarations are compared with the vendors' headers where these can be had: `nccl.h` of the package nvidia-nccl-cu12 (or the
folder in TEST_NCCL), `cuda.h` of a CUDA toolkit, `hip_runtime_api.h` of a HIP development package.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKENDS = ROOT / "backends"
PLUGINS = Path(__file__).parent / "plugins"
SUFFIXES = {".c", ".cc", ".h"}


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (BACKENDS / folder).rglob("*") if path.suffix in SUFFIXES)


def lines_of(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]


def longest_common_run(first: list[str], second: list[str]) -> int:
    """The length of the longest run of consecutive lines that stands in both."""
    best = 0
    previous = [0] * (len(second) + 1)
    for line in first:
        current = [0] * (len(second) + 1)
        for i, other in enumerate(second, start=1):
            if line == other:
                current[i] = previous[i - 1] + 1
                best = max(best, current[i])
        previous = current
    return best


@pytest.mark.parametrize("folder", ["nccl", "rccl"])
def test_each_folder_holds_fewer_than_400_lines_of_c(folder: str) -> None:
    assert sources(folder)
    assert sum(len(lines_of(path)) for path in sources(folder)) < 400


def test_a_common_run_is_found() -> None:
    assert longest_common_run(list("abcdef"), list("xbcdy")) == 3


def test_no_run_of_12_lines_stands_in_both_folders() -> None:
    runs = {
        (first.name, second.name): longest_common_run(lines_of(first), lines_of(second))
        for first in sources("nccl")
        for second in sources("rccl")
    }
    assert runs
    assert max(runs.values()) < 12, runs


# -- the vendors' headers --------------------------------------------------------------------------------------------------------


def nccl_folder() -> Path:
    """The folder of NCCL's package, with include/ and lib/."""
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    found = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    for folder in [Path(os.environ.get("TEST_NCCL", "/nonexistent")), *found]:
        if (folder / "include/nccl.h").is_file():
            return folder
    pytest.skip("there is no nccl.h: install nvidia-nccl-cu12, or name its folder nvidia/nccl in TEST_NCCL")


def compile_check(folder: Path, source: str, *flags: str) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    file = folder / "check.cc"
    file.write_text(source)
    includes = [f"-I{place}" for place in (BACKENDS / "common", ROOT / "core/abi", PLUGINS)]
    command = ["c++", "-std=c++20", "-fsyntax-only", "-Wno-deprecated-declarations", *includes, *flags, str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr[-4000:]


def looked_up(path: Path) -> list[tuple[str, str]]:
    """Each name that a source looks up in a library, with the slot that it fills."""
    found = re.findall(r'\w+\.(?:require|optional)\("(\w+)", (\w+\.\w+)\)', path.read_text(encoding="utf-8"))
    assert len(found) > 20
    return found


def asserts(names: list[tuple[str, str]], slots: dict[str, str]) -> str:
    """A static_assert for each name; `slots` gives the expression for what stands before the slot's dot."""
    lines = []
    for name, slot in names:
        base, member = slot.split(".")
        lines.append(f'static_assert(signatures::alike<decltype({name}), decltype({slots[base]}.{member})>, "{name}");')
    return "\n".join(lines)


def test_numbers_layouts_and_signatures_are_those_of_nccl_h(tmp_path: Path) -> None:
    handles = "typedef struct CUstream_st* cudaStream_t;\ntypedef struct CUevent_st* cudaEvent_t;\n"
    (tmp_path / "cuda_runtime.h").write_text(f"#pragma once\n#include <stddef.h>\n{handles}")
    (tmp_path / "cuda_fp16.h").write_text("#pragma once\n")
    names = [pair for pair in looked_up(BACKENDS / "common/nccl_api.cc") if pair[0] != "ncclAllToAll"]  # RCCL's old spelling
    types = ["Int8", "Uint8", "Int32", "Uint32", "Int64", "Uint64", "Float16", "Float32", "Float64", "Bfloat16"]
    numbers = [(f"nccl{name}", f"k{name}") for name in types]
    numbers += [("ncclFloat8e4m3", "kFloat8E4m3"), ("ncclFloat8e5m2", "kFloat8E5m2")]
    numbers += [(f"nccl{name}", f"k{name}") for name in ["Sum", "Prod", "Max", "Min", "Avg"]]
    results = ["Success", "UnhandledCudaError", "InvalidArgument", "InvalidUsage", "RemoteError", "InProgress", "Timeout"]
    numbers += [(f"nccl{name}", f"k{name}") for name in [*results, "ScalarDevice", "ScalarHostImmediate"]]
    fields = [
        ("size", "size"), ("magic", "magic"), ("version", "version"), ("blocking", "blocking"),
        ("cgaClusterSize", "cga_cluster_size"), ("minCTAs", "min_ctas"), ("maxCTAs", "max_ctas"), ("netName", "net_name"),
        ("splitShare", "split_share"), ("trafficClass", "traffic_class"), ("commName", "comm_name"),
        ("collnetEnable", "collnet_enable"), ("CTAPolicy", "cta_policy"), ("shrinkShare", "shrink_share"),
        ("nvlsCTAs", "nvls_ctas"),
        ("nChannelsPerNetPeer", "channels_per_net_peer"), ("nvlinkCentricSched", "nvlink_centric_sched"),
    ]  # fmt: skip
    checks = [f"static_assert(static_cast<int>({theirs}) == polyccl_ccl::{ours});" for theirs, ours in numbers]
    checks += [
        f"static_assert(offsetof(ncclConfig_t, {theirs}) == offsetof(polyccl_ccl::Config, {ours}));\n"
        f"static_assert(sizeof(ncclConfig_t::{theirs}) == sizeof(polyccl_ccl::Config::{ours}));"
        for theirs, ours in fields
    ]
    checks.append(asserts(names, {"api": "polyccl_ccl::Api{}"}))
    checks.append("constexpr ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;")
    checks.append(
        "static_assert(initial.magic == polyccl_ccl::Config{}.magic && initial.blocking == polyccl_ccl::Config::kUndefined);"
    )
    checks.append("static_assert(sizeof(ncclUniqueId) == sizeof(polyccl_ccl::UniqueId));")
    head = '#include <nccl.h>\n#include "nccl_api.h"\n#include "signatures.h"\n'
    compile_check(tmp_path, head + "\n".join(checks), f"-I{tmp_path}", f"-isystem{nccl_folder() / 'include'}")


def test_the_driver_is_called_as_cuda_h_declares_it(tmp_path: Path) -> None:
    folders = [Path(place) for place in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda") if place]
    include = next((folder / "include" for folder in folders if (folder / "include/cuda.h").is_file()), None)
    if include is None:
        pytest.skip("there is no cuda.h: install a CUDA toolkit, or name it in CUDA_HOME")
    checks = asserts(looked_up(BACKENDS / "nccl/family.cc"), {"driver": "driver", "runtime": "Runtime{}"})
    sides = [("x", "XInBytes"), ("y", "Y"), ("memory", "MemoryType"), ("host", "Host"), ("device", "Device"), ("array", "Array"),
             ("pitch", "Pitch")]  # fmt: skip
    layout = [
        f"static_assert(offsetof(Copy2d, {ours}) + offsetof(Copy2d::Side, {field}) == offsetof(CUDA_MEMCPY2D, {theirs}{name}));"
        for ours, theirs in (("from", "src"), ("to", "dst"))
        for field, name in sides
    ]
    layout += ["static_assert(offsetof(Copy2d, width) == offsetof(CUDA_MEMCPY2D, WidthInBytes));",
               "static_assert(Copy2d::Side{}.memory == CU_MEMORYTYPE_UNIFIED && sizeof(Copy2d) == sizeof(CUDA_MEMCPY2D));",
               "static_assert(kMajorAttribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);",
               "static_assert(kMinorAttribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);",
               "static_assert(kGreaterOrEqual == CU_STREAM_WAIT_VALUE_GEQ && kNotReady == CUDA_ERROR_NOT_READY);",
               "static_assert(kNonBlocking == CU_STREAM_NON_BLOCKING && kNoTiming == CU_EVENT_DISABLE_TIMING);",
               "static_assert(kPortableMapped == (CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));",
               "static_assert(kNotSupported == CUDA_ERROR_NOT_SUPPORTED);",
               "static_assert(kInvalidValue == CUDA_ERROR_INVALID_VALUE);"]  # fmt: skip
    body = "namespace polyccl_ccl { namespace {\n" + checks + "\n" + "\n".join(layout) + "\n} }\n"
    head = f'#include <cuda.h>\n#include "signatures.h"\n#include "{BACKENDS / "nccl/family.cc"}"\n'
    compile_check(tmp_path, head + body, f"-isystem{include}", f"-I{BACKENDS / 'nccl'}")


def test_hip_is_called_as_its_header_declares_it(tmp_path: Path) -> None:
    header = "hip/hip_runtime_api.h"
    include = next((folder for folder in (Path("/opt/rocm/include"), Path("/usr/include")) if (folder / header).is_file()), None)
    if include is None:
        pytest.skip("there is no HIP header: install ROCm, or on Debian and Ubuntu: apt-get install libamdhip64-dev")
    names = looked_up(BACKENDS / "rccl/family.cc")
    declared = (include / header).read_text(encoding="utf-8")
    old = {name for name, _ in names if not re.search(rf"\b{name}\(", declared)}
    assert old <= {"hipStreamGetDevice"}, "newer HIPs have it"
    # In C++ the header overloads these with templates, which leaves no one type to compare.
    overloaded = {name for name, _ in names if re.search(rf"inline hipError_t {name}\(", declared)}
    checks = asserts([pair for pair in names if pair[0] not in old | overloaded], {"hip": "hip", "table": "Runtime{}"})
    checks += "\nstatic_assert(kAnyDirection == hipMemcpyDefault && kAtLeast == hipStreamWaitValueGte);"
    checks += "\nstatic_assert(kNonBlocking == hipStreamNonBlocking && kNoTiming == hipEventDisableTiming);"
    checks += "\nstatic_assert(kPortableMapped == (hipHostMallocPortable | hipHostMallocMapped) && kNotReady == hipErrorNotReady);"
    checks += "\nstatic_assert(kNotSupported == hipErrorNotSupported && kInvalidValue == hipErrorInvalidValue);"
    body = "namespace polyccl_ccl { namespace {\n" + checks + "\n} }\n"
    head = f'#include <{header}>\n#include "signatures.h"\n#include "{BACKENDS / "rccl/family.cc"}"\n'
    system = [] if str(include) == "/usr/include" else [f"-isystem{include}"]
    compile_check(tmp_path, head + body, "-D__HIP_PLATFORM_AMD__", *system)
