"""The loader takes a plugin that keeps to the ABI, and refuses any other with the reason. The plugins are variants of one double,
`plugins/double.c`, that these tests compile."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

errors = pytest.importorskip("polyccl.errors", reason="polyccl is not installed")
native = pytest.importorskip("polyccl._native", reason="the native module of polyccl is not built")

ROOT = Path(__file__).parents[2]
PLUGINS = Path(__file__).parent / "plugins"
ALL_REDUCE, SEND, BARRIER = 4, 1, 14
FLOAT32, FLOAT8, SUM, AVG, HOST = 13, 16, 1, 8, 1
CAN, EQUAL_BITS = 1, 2

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler to build the doubles with")


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the path of a variant of the double."""
    folder = tmp_path_factory.mktemp("doubles")

    def build(variant: str) -> Path:
        path = folder / f"libdouble_{variant.lower()}.so"
        if not path.exists():
            flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", f"-DVARIANT={variant}"]
            command = ["cc", *flags, f"-I{ROOT / 'core/abi'}", str(PLUGINS / "double.c"), "-o", str(path)]
            subprocess.run(command, check=True, timeout=60)
        return path

    return build


def test_a_good_plugin_says_what_it_is(double: Callable[[str], Path]) -> None:
    path = double("GOOD")
    backend = native.Backend.load(str(path))
    assert backend.name == "double"
    assert backend.path == str(path.resolve())
    assert backend.flags == 1
    assert backend.abi == (1 << 16) + 2
    assert backend.device_count == 3
    assert backend.compatibility(5) == "double for device 5, host abi 1.2"
    assert backend.library_version.startswith("created 0")
    assert backend.library_file == ""
    assert backend.completion(SEND, HOST) == 2
    assert backend.completion(BARRIER, HOST) == 1


def test_a_plugin_can_use_the_hosts_arithmetic(double: Callable[[str], Path]) -> None:
    backend = native.Backend.load(str(double("GOOD")))
    assert backend.supports(ALL_REDUCE, FLOAT32, SUM, HOST) == CAN | EQUAL_BITS
    assert backend.supports(ALL_REDUCE, FLOAT32, AVG, HOST) == 0
    assert backend.supports(ALL_REDUCE, FLOAT8, SUM, HOST) == 0


def test_one_file_is_one_backend_under_all_its_names(
    double: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = double("GOOD")
    link = tmp_path / "link.so"
    link.symlink_to(path)
    monkeypatch.chdir(path.parent)
    backend = native.Backend.load(str(path))
    assert native.Backend.load(str(link)) is backend
    assert native.Backend.load(os.path.join(".", path.name)) is backend


@pytest.mark.parametrize("variant", ["NEWER_MINOR", "SHORTER"])
def test_a_table_of_another_length_is_taken_as_far_as_both_sides_know_it(double: Callable[[str], Path], variant: str) -> None:
    backend = native.Backend.load(str(double(variant)))
    assert backend.name == "double"
    assert backend.device_count == 3


def test_a_device_of_an_older_minor_works_without_what_was_appended(double: Callable[[str], Path]) -> None:
    backend = native.Backend.load(str(double("OLD_DEVICE")))
    assert native.Device(backend, 0).waits_for_host  # makes memory, a stream, an event, and waits on the device's default stream


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ("WRONG_MAJOR", "version 2.0 of the plugin ABI, and this PolyCCL speaks 1.2"),
        ("NO_SYMBOL", "does not export polyccl_backend_query"),
        ("NULL_TABLE", "gave no table"),
        ("MISSING_ENTRY", "no issue()"),
        ("NO_NAME", "no name"),
        ("REFUSES", "no such device on this machine"),
        ("TINY", "4 bytes"),
        ("HUGE_TABLE", "1048576 bytes"),
        ("MISSING_LIBRARY", "function_of_a_library_that_is_not_there"),
    ],
)
def test_a_wrong_plugin_is_refused_with_its_path_and_the_reason(double: Callable[[str], Path], variant: str, reason: str) -> None:
    path = double(variant)
    for _ in range(2):  # a failure is not remembered as success
        with pytest.raises(errors.BackendUnavailable) as caught:
            native.Backend.load(str(path))
        assert reason in str(caught.value)
        assert str(path.resolve()) in str(caught.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(errors.BackendUnavailable, match=r"/nowhere/libx\.so.*No such file"):
        native.Backend.load("/nowhere/libx.so")


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libtext.so"
    path.write_text("no library")
    with pytest.raises(errors.BackendUnavailable, match=r"libtext\.so"):
        native.Backend.load(str(path))


def test_a_plugins_failure_is_an_error_with_its_own_words(double: Callable[[str], Path]) -> None:
    backend = native.Backend.load(str(double("GOOD")))
    with pytest.raises(errors.InvalidArgument, match="backend 'double' refused an argument \\(the double's own words\\)"):
        backend.compatibility(100)


def test_words_that_are_not_utf8_are_made_so(double: Callable[[str], Path]) -> None:
    backend = native.Backend.load(str(double("GARBLED")))
    with pytest.raises(errors.InvalidArgument, match=r"\(café \?\?\(\)"):
        backend.compatibility(100)


# -- BackendComm, which has no Python face: a small program drives it ----------------------------------------------


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Runs the driver; gives its lines."""
    compiler = shutil.which("c++")
    if compiler is None or not (ROOT / "core/native/loader.cc").exists():
        pytest.skip("there is no C++ compiler, or no source tree, to build the driver from")
    program = tmp_path_factory.mktemp("drive") / "drive_comm"
    sources = [str(ROOT / "core/native" / name) for name in ("loader.cc", "log.cc", "results.cc", "call_thread.cc")] + [
        str(PLUGINS / "drive_comm.cc")
    ]
    includes = [f"-I{ROOT / 'core/abi'}", f"-I{ROOT / 'core/native'}"]
    command = [compiler, "-std=c++20", "-O0", *includes, *sources, "-ldl", "-pthread", "-o", str(program)]
    subprocess.run(command, check=True, timeout=110)

    def run(*arguments: str) -> list[str]:
        done = subprocess.run([str(program), *arguments], check=True, timeout=60, capture_output=True, text=True)
        return done.stdout.splitlines()

    return run


def test_each_result_becomes_its_error_and_each_request_is_waited_for(
    drive: Callable[..., list[str]], double: Callable[[str], Path]
) -> None:
    facts = dict(line.split(": ", 1) for line in drive("double", str(double("GOOD"))))
    assert facts["answer"] == "hello"
    codes = {1: 0, 2: 2, 3: 3, 4: 4, 5: 5, 6: 1, 7: 7, 8: 7, 9: 6}  # by result; see enum class Code
    for how, call in (("inline", "barrier"), ("posted", "send")):
        assert facts[f"{how} 0"] == "ok"
        for result, code in codes.items():
            assert facts[f"{how} {result}"].startswith(f"code {code}: {call} on communicator 'dp': backend 'double' ")
            assert "the double's own words" in facts[f"{how} {result}"]
    assert facts["counts"] == "created 1 destroyed 1 aborted 0 waited 10"


def test_a_stores_exception_does_not_cross_the_plugin_and_keeps_its_text(
    drive: Callable[..., list[str]], double: Callable[[str], Path]
) -> None:
    facts = dict(line.split(": ", 1) for line in drive("double", str(double("GOOD"))))
    assert facts["known"].startswith("code 4: creating communicator 'dp' (rank 0 of 1): the store could not get 'greeting'")
    assert "the store's server is gone" in facts["known"]
    assert facts["stranger"].startswith("code 7: ")
    assert "a stranger's exception" in facts["stranger"]


def test_a_call_that_does_not_return_is_given_up_by_its_deadline_and_by_an_abort(
    drive: Callable[..., list[str]], double: Callable[[str], Path]
) -> None:
    facts = dict(line.split(": ", 1) for line in drive("hangs", str(double("HANGS"))))
    assert facts["late"].startswith("code 3: all_reduce: backend 'double' did not return by the deadline")
    assert facts["next"].startswith("code 5: barrier: backend 'double' was aborted")
    assert facts["aborted"].startswith("code 5: all_reduce: backend 'double' was aborted")
    assert facts["creation"].startswith("code 3: creating communicator 'dp' (rank 0 of 1): backend 'double' did not return")
    assert facts["interrupted creation"].startswith("code 5: creating communicator 'dp' (rank 0 of 1): backend 'double' was interr")
    assert facts["good"] == "ok"
    assert facts["bad"].startswith("code 7: barrier: backend 'double' failed (the double's own words)")


def test_what_was_given_up_keeps_its_memory_and_is_never_destroyed(
    drive: Callable[..., list[str]], double: Callable[[str], Path]
) -> None:
    facts = dict(line.split(": ", 1) for line in drive("hangs", str(double("HANGS"))))
    assert facts["in use after a deadline"] == "1"
    assert facts["the call went on"] == "1", "its memory must stay, and did"
    assert facts["in use after an abort of nothing"] == "0"
    assert facts["counts"] == "created 4 destroyed 1 aborted 2 waited 0"
