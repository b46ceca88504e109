"""What is built and installed: what plugins export and need, the ABI header, the CMake package, and the choice of backends."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUERY = "polyccl_backend_query"

# The C and C++ runtime: all that our native files may need, but for a plugin's own library.
RUNTIME = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux.*\.so\.\d+")
LINKED = {"libpolyccl_gloo.so": {"libgloo.so.0"}}

C_PLUGIN = """
#include <polyccl/backend.h>

int helper_that_must_stay_inside(void);
int helper_that_must_stay_inside(void) { return 7; }

static polyccl_backend table = {.struct_size = sizeof(polyccl_backend), .abi = POLYCCL_ABI, .name = "tiny"};

polyccl_result polyccl_backend_query(uint32_t host_abi, const polyccl_host *host, const polyccl_backend **backend) {
  (void)host_abi;
  (void)host;
  *backend = &table;
  return helper_that_must_stay_inside() == 7 ? POLYCCL_OK : POLYCCL_ERROR_INTERNAL;
}
"""


def run(*command: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a tool with a deadline; the caller judges the result. Variables of the build do not leak in."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("POLYCCL_")}
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=90, check=False, env={**clean, **(env or {})}
    )


def must(*command: str | Path) -> str:
    """Run a tool that has to succeed, and give what it printed."""
    result = run(*command)
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
    return result.stdout


def package() -> Path:
    """The installed package's folder: where the native module lies."""
    spec = importlib.util.find_spec("polyccl._native")
    assert spec is not None, "polyccl is not installed: there is no native module (pip install .)"
    assert spec.origin is not None
    return Path(spec.origin).parent


def plugins() -> list[Path]:
    return sorted((package() / "backends").glob("*.so"))


def record() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((package() / "_build.json").read_text())
    return loaded


def exported(file: Path) -> set[str]:
    return {line.split()[-1] for line in must("nm", "-D", "--defined-only", file).splitlines()}


def needed(file: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+?)\]", must("readelf", "-d", file)))


needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")


# --- Native files


def test_a_plugin_exports_the_query_and_nothing_else() -> None:
    for plugin in plugins():
        assert exported(plugin) == {QUERY}, plugin


def test_the_module_exports_its_entry_and_nothing_else() -> None:
    (module,) = package().glob("_native*.so")
    assert exported(module) == {"PyInit__native"}


def test_native_files_need_neither_torch_nor_a_vendor_library() -> None:
    for file in [*package().glob("_native*.so"), *plugins()]:
        others = {library for library in needed(file) if not RUNTIME.fullmatch(library)}
        assert others == LINKED.get(file.name, set()), file


def test_the_record_names_exactly_the_plugins_that_are_installed() -> None:
    assert sorted(record()["backends"]) == [plugin.stem.removeprefix("libpolyccl_") for plugin in plugins()]


def test_a_build_on_the_systems_gloo_is_recorded_and_tagged_as_not_portable() -> None:
    kinds = {library["kind"] for library in record()["libraries"].values()}
    assert record()["portable"] is ("system" not in kinds)
    wheel = importlib.metadata.distribution("polyccl").read_text("WHEEL")
    assert wheel is not None
    assert "manylinux" not in wheel


def test_all_parts_state_one_version() -> None:
    import polyccl

    assert polyccl.__version__ == importlib.metadata.version("polyccl") == record()["version"]


# --- The ABI header and the CMake package, as a vendor sees them


@needs_compiler
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize(("language", "standard"), [("c", "c11"), ("c++", "c++17")])
def test_the_header_compiles_alone_without_a_warning(compiler: str, language: str, standard: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    header = package() / "include/polyccl/backend.h"
    must(compiler, "-x", language, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", header)


def test_the_installed_header_is_the_sources() -> None:
    assert (package() / "include/polyccl/backend.h").read_bytes() == (ROOT / "core/abi/polyccl/backend.h").read_bytes()


@needs_compiler
@needs_cmake
def test_a_plugin_outside_the_tree_builds_with_find_package_and_loads(tmp_path: Path) -> None:
    (tmp_path / "tiny.c").write_text(C_PLUGIN)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\n"
        "project(tiny LANGUAGES C)\n"
        "find_package(polyccl REQUIRED)\n"
        "polyccl_add_backend(polyccl_tiny tiny.c)\n"
    )
    build = tmp_path / "build"
    must(
        "cmake",
        *generator(),
        "-S",
        tmp_path,
        "-B",
        build,
        f"-Dpolyccl_DIR={package() / 'cmake'}",
        "-DCMAKE_C_FLAGS=-Wall -Wextra -Werror",
    )
    must("cmake", "--build", build)
    plugin = build / "libpolyccl_tiny.so"
    assert exported(plugin) == {QUERY}
    table = ctypes.c_void_p()
    query = getattr(ctypes.CDLL(str(plugin)), QUERY)
    assert query(ctypes.c_uint32(1 << 16), None, ctypes.byref(table)) == 0
    assert table.value is not None


# --- The choice of backends, in a project that has a gloo folder and no other


def generator() -> list[str]:
    return ["-G", "Ninja"] if shutil.which("ninja") else []


def choose(tmp_path: Path, *defines: str, env: str | None = None) -> tuple[dict[str, str], str]:
    """Configure; give the choice by backend, and the words of a refusal on one line ('' where there was none)."""
    (tmp_path / "backends/gloo").mkdir(parents=True, exist_ok=True)
    (tmp_path / "backends/gloo/CMakeLists.txt").touch()
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\n"
        "project(choice LANGUAGES NONE)\n"
        f'list(APPEND CMAKE_MODULE_PATH "{ROOT / "cmake"}")\n'
        "include(PolycclBackends)\n"
        "polyccl_choose_backends()\n"
    )
    build = tmp_path / "build"
    environment = {} if env is None else {"POLYCCL_BUILD_BACKENDS": env}
    result = run("cmake", *generator(), "-S", tmp_path, "-B", build, *[f"-D{define}" for define in defines], env=environment)
    if result.returncode != 0:
        return {}, " ".join(result.stderr.split())
    cache = (build / "CMakeCache.txt").read_text()
    return {name.lower(): value for name, value in re.findall(r"^POLYCCL_BACKEND_(\w+):STRING=(\w+)$", cache, re.MULTILINE)}, ""


@needs_cmake
def test_gloo_is_built_where_it_is_found_and_the_others_are_off(tmp_path: Path) -> None:
    chosen, _ = choose(tmp_path)
    assert chosen == {"gloo": "AUTO", "nccl": "OFF", "ncclx": "OFF", "rccl": "OFF", "rcclx": "OFF", "xccl": "OFF"}


@needs_cmake
def test_the_environment_turns_the_named_on_and_the_rest_off(tmp_path: Path) -> None:
    chosen, _ = choose(tmp_path, env="gloo")
    assert {name for name, choice in chosen.items() if choice == "ON"} == {"gloo"}
    assert "AUTO" not in chosen.values()


@needs_cmake
def test_an_empty_list_in_the_environment_means_no_backend(tmp_path: Path) -> None:
    chosen, _ = choose(tmp_path, env="")
    assert set(chosen.values()) == {"OFF"}


@needs_cmake
def test_a_define_wins_over_the_environment(tmp_path: Path) -> None:
    chosen, _ = choose(tmp_path, "POLYCCL_BACKEND_GLOO=OFF", env="gloo")
    assert chosen["gloo"] == "OFF"


@needs_cmake
def test_a_later_configure_keeps_a_define_and_follows_the_environment_elsewhere(tmp_path: Path) -> None:
    choose(tmp_path, "POLYCCL_BACKEND_XCCL=AUTO")
    chosen, _ = choose(tmp_path, env="gloo")
    assert (chosen["xccl"], chosen["gloo"]) == ("AUTO", "ON")


@needs_cmake
def test_a_backend_that_this_version_lacks_is_refused_with_what_to_do(tmp_path: Path) -> None:
    _, refusal = choose(tmp_path, "POLYCCL_BACKEND_NCCLX=ON")
    assert "POLYCCL_BACKEND_NCCLX is ON, but this version of PolyCCL has no ncclx backend" in refusal
    assert "there is no backends/nccl/CMakeLists.txt" in refusal
    assert "Turn it OFF" in refusal


@needs_cmake
def test_an_unknown_name_in_the_environment_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    _, refusal = choose(tmp_path, env="gloo,nickel")
    assert "POLYCCL_BUILD_BACKENDS names 'nickel', which is no backend. Known are: gloo, nccl, ncclx, rccl, rcclx, xccl." in refusal


@needs_cmake
def test_an_unknown_option_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    _, refusal = choose(tmp_path, "POLYCCL_BACKEND_NICKEL=ON")
    assert "POLYCCL_BACKEND_NICKEL is set, but 'nickel' is no backend. Known are: gloo, nccl" in refusal


@needs_cmake
def test_a_value_that_is_no_choice_is_refused_by_the_real_build(tmp_path: Path) -> None:
    result = run("cmake", *generator(), "-S", ROOT, "-B", tmp_path / "build", "-DPOLYCCL_BACKEND_GLOO=perhaps")
    assert result.returncode != 0
    assert "POLYCCL_BACKEND_GLOO is 'perhaps'. It must be ON, OFF or AUTO." in " ".join(result.stderr.split())
