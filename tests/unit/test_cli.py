"""The command line, but for `polyccl launch`: what it prints, and how it degrades where parts are missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from polyccl import backends, environment, report
from polyccl.cli import app
from polyccl.errors import BackendUnavailable, InvalidArgument
from polyccl.spec import OPERATIONS

COLLECTIVES = [row.name for row in OPERATIONS if row.collective]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("POLYCCL_CHUNK_BYTES", raising=False)
    monkeypatch.delenv("POLYCCL_BACKEND_PATH", raising=False)


def run(*arguments: str, status: int = 0) -> str:
    """What a command prints, given that it ends with ``status``."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == status, (done.output, done.exception)
    return done.output


def run_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def assert_fits(shown: str) -> None:
    """No line has more than 80 columns, and none is cut."""
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert "…" not in shown


class FakeBackend:
    """A plugin that does all_reduce by SUM on float32 in host memory, and sends and receives."""

    path, abi, flags = "/x.so", 0x10000, 0
    library_file, library_version, device_count, has_device = "/lib/libx.so.2", "2.1", 3, True

    def supports(self, kind: int, dtype: int, reduction: int, memory: int) -> int:
        return int(memory == 1 and (kind in (1, 2) or (kind, dtype, reduction) == (4, 12, 1)))


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A native module that loads every plugin but those named broken."""

    def load(path: str) -> FakeBackend:
        if "broken" in path:
            raise BackendUnavailable(f"{path}: libx.so.2 is not there")
        return FakeBackend()

    module = SimpleNamespace(
        Backend=SimpleNamespace(load=load),
        Device=lambda plugin, index: SimpleNamespace(waits_for_host=False),
        dtypes=lambda: [(12, "float32", 4), (17, "float8_e4m3fn", 1)],
        can_reduce=lambda dtype, reduction: dtype == 12,
    )
    monkeypatch.setattr(report, "_native", lambda: (module, None))
    return module


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of plugin files that POLYCCL_BACKEND_PATH names, in an installation without any."""
    monkeypatch.setattr(backends, "_package_folders", lambda: [tmp_path / "package"])
    folder = tmp_path / "more"
    folder.mkdir()
    for name in ("mine", "broken"):
        (folder / f"libpolyccl_{name}.so").touch()
    (folder / "unrelated.so").touch()
    monkeypatch.setenv("POLYCCL_BACKEND_PATH", str(folder))
    return folder


# --- info


@pytest.mark.usefixtures("native", "plugins")
class TestInfo:
    """`polyccl info`."""

    def entries(self) -> dict[str, Any]:
        return {entry["name"]: entry for entry in run_json("info")["backends"]}

    def test_it_lists_every_known_backend_and_the_foreign_ones(self) -> None:
        assert list(self.entries()) == [*backends.KNOWN, "broken", "mine"]

    def test_a_plugin_that_loads_is_shown_with_its_library(self, plugins: Path) -> None:
        entry = self.entries()["mine"]
        assert entry["state"] == "loaded"
        assert entry["plugin"] == str(plugins / "libpolyccl_mine.so")
        assert (entry["library"], entry["library_version"], entry["devices"], entry["abi"]) == ("/lib/libx.so.2", "2.1", 3, "1.0")

    def test_a_backend_of_devices_says_whether_bridges_block_the_host(self, native: SimpleNamespace) -> None:
        assert self.entries()["mine"]["waits_for_host"] is False
        assert "bridges block the host" in run("info")
        native.Device = lambda plugin, index: SimpleNamespace(waits_for_host=True)
        assert "bridges are asynchronous" in run("info")
        assert "waits_for_host" not in self.entries()["host"]

    def test_operations_are_native_planned_or_undefined(self) -> None:
        operations = self.entries()["mine"]["operations"]
        assert set(operations) == {row.name for row in OPERATIONS}
        assert operations["all_reduce"]["host"]["float32"]["sum"] == "native"
        assert operations["all_reduce"]["host"]["float32"]["max"] == "planned"
        assert operations["all_reduce"]["host"]["float8_e4m3fn"]["sum"] == "none"
        assert operations["all_gather"]["host"]["float8_e4m3fn"] == "planned"
        assert operations["send"]["host"]["float8_e4m3fn"] == "native"
        assert "device" not in operations["all_reduce"]

    def test_a_plugin_that_does_not_load_is_shown_with_its_error(self) -> None:
        entry = self.entries()["broken"]
        assert entry["state"] == "failed"
        assert "libx.so.2 is not there" in entry["error"]

    def test_a_backend_that_is_not_built_says_how_to_build_it(self) -> None:
        entry = self.entries()["nccl"]
        assert entry["state"] == "not built"
        assert "-C cmake.define.POLYCCL_BACKEND_NCCL=ON" in entry["error"]

    def test_the_link_is_built_in(self) -> None:
        entry = self.entries()["host"]
        assert entry["state"] == "built in"
        assert entry["operations"]["send"]["host"]["float32"] == "native"
        assert entry["operations"]["all_reduce"]["host"]["float32"]["sum"] == "planned"

    def test_a_missing_native_module_leaves_the_rest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(report, "_native", lambda: (None, "the native module does not load"))
        entries = self.entries()
        assert (entries["host"]["state"], entries["mine"]["state"], entries["nccl"]["state"]) == ("failed", "failed", "not built")

    def test_a_wrong_backend_path_is_a_problem_in_the_report(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("POLYCCL_BACKEND_PATH", "/nowhere")
        assert "/nowhere does not exist" in run_json("info")["problems"][0]
        assert "/nowhere does not exist" in run("info")

    def test_the_tables_for_people_show_the_same(self) -> None:
        shown = run("info")
        assert "libx.so.2" in shown
        assert "POLYCCL_BACKEND_RCCLX=ON" in shown
        assert "all_reduce" not in shown
        for full in (run("info", "mine"), run("info", "--operations")):
            assert re.search(r"all_reduce +library: float32\n +undefined: float8_e4m3fn\n", full)
            assert re.search(r"send +library: all types\n", full)
        assert "rcclx" not in run("info", "mine")

    def test_a_name_that_no_backend_has_is_refused(self) -> None:
        done = CliRunner().invoke(app, ["info", "nosuch"])
        assert isinstance(done.exception, InvalidArgument)
        assert "there is no backend 'nosuch'; there are: host, gloo" in str(done.exception)

    @pytest.mark.parametrize("arguments", [["info"], ["info", "mine"], ["info", "--operations"], ["env"]])
    def test_it_fits_80_columns_and_cuts_no_word(
        self, arguments: list[str], plugins: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setenv("POLYCCL_ISLAND", "a/very/" * 20)
        deep = plugins.joinpath(*["a-folder-with-a-long-name"] * 5)
        deep.mkdir(parents=True)
        (deep / "libpolyccl_mine.so").touch()
        monkeypatch.setenv("POLYCCL_BACKEND_PATH", str(deep))
        shown = run(*arguments)
        assert_fits(shown)
        if arguments[0] == "info":
            assert "libx.so.2" in shown
            assert "".join(str(deep).split()) in "".join(shown.split())

    def test_the_build_record_is_part_of_it(self, tmp_path: Path) -> None:
        assert run_json("info")["build"] == {}
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "_build.json").write_text('{"version": "1"}')
        assert run_json("info")["build"] == {"version": "1"}


# --- finding plugins


def test_a_plugin_is_found_by_name(plugins: Path) -> None:
    assert backends.find("mine") == plugins / "libpolyccl_mine.so"
    assert backends.available() == ["host", "broken", "mine"]


def test_a_plugin_file_may_be_named_itself(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYCCL_BACKEND_PATH", str(plugins / "libpolyccl_mine.so"))
    assert backends.available() == ["host", "mine"]


def test_two_plugins_of_one_name_are_refused_with_both_paths(plugins: Path, tmp_path: Path) -> None:
    other = tmp_path / "package" / "backends" / "libpolyccl_mine.so"
    other.parent.mkdir(parents=True)
    other.touch()
    with pytest.raises(BackendUnavailable) as caught:
        backends.find("mine")
    assert str(other) in str(caught.value)
    assert str(plugins) in str(caught.value)


def test_one_plugin_reached_by_two_ways_is_no_clash(plugins: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(plugins)
    monkeypatch.setenv("POLYCCL_BACKEND_PATH", f"{plugins}:{tmp_path / 'link'}")
    assert backends.find("mine") == plugins / "libpolyccl_mine.so"


@pytest.mark.usefixtures("plugins")
def test_an_unknown_backend_is_refused_with_those_at_hand() -> None:
    with pytest.raises(BackendUnavailable, match=r"no backend 'mccl' \(at hand: host, broken, mine\)"):
        backends.find("mccl")


def test_the_built_in_backend_has_no_file() -> None:
    with pytest.raises(InvalidArgument, match="part of PolyCCL itself"):
        backends.find("host")


def test_a_file_with_another_name_is_refused(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYCCL_BACKEND_PATH", str(plugins / "unrelated.so"))
    with pytest.raises(BackendUnavailable, match=r"not named libpolyccl_<name>\.so"):
        backends.available()


# --- plan


@pytest.mark.parametrize("op", COLLECTIVES)
def test_every_collective_has_a_plan_whose_payload_is_shown_against_the_bound(op: str) -> None:
    shown = run_json("plan", "--op", op, "--bytes", "24MiB", "--islands", "4,4,2")
    assert shown["op"] == op
    assert shown["steps"]
    assert [len(island["ranks"]) for island in shown["islands"]] == [4, 4, 2]
    for index, island in enumerate(shown["islands"]):
        assert island["leave"] == sum(link["bytes"] for link in shown["links"] if link["from"] == index)
        if op != "barrier":
            assert island["leave"] == pytest.approx(island["leave_bound"], rel=0.02, abs=64)
            assert island["enter"] == pytest.approx(island["enter_bound"], rel=0.02, abs=64)


def test_a_plan_for_few_bytes_is_named_and_where_such_plans_end() -> None:
    shown = run_json("plan", "--op", "all_reduce", "--bytes", "1KiB", "--islands", "2,2")
    assert "latency" in shown["plan"]
    end = shown["latency_plan_up_to"]
    above = run_json("plan", "--op", "all_reduce", "--bytes", str(end + 4), "--islands", "2,2")
    assert "latency" not in above["plan"]
    assert f"end at {end:,} bytes" in run("plan", "--op", "all_reduce", "--bytes", "1KiB", "--islands", "2,2")


def test_islands_may_be_interleaved() -> None:
    shown = run_json("plan", "--op", "all_reduce", "--bytes", "1MiB", "--islands", "ABAB", "--rank", "1")
    assert [island["ranks"] for island in shown["islands"]] == [[0, 2], [1, 3]]


def test_islands_are_written_as_for_launch_too() -> None:
    by_sizes = run_json("plan", "--op", "all_reduce", "--bytes", "1MiB", "--islands", "3,1")
    assert run_json("plan", "--op", "all_reduce", "--bytes", "1MiB", "--islands", "gloo=3,host") == by_sizes


def test_a_plan_is_listed_for_people() -> None:
    shown = run("plan", "--op", "broadcast", "--bytes", "1GiB", "--islands", "8,8", "--root", "3", "--rank", "3")
    assert "1,073,741,824" in shown
    assert "The plan of rank 3:" in shown
    assert "send" in shown


def test_the_chunk_size_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["plan", "--op", "all_reduce", "--bytes", "1GiB", "--islands", "8,8"]
    before = run_json(*arguments)["steps"]
    monkeypatch.setenv("POLYCCL_CHUNK_BYTES", "4MiB")
    assert run_json(*arguments)["steps"] != before


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"--op": "alreduce"}, "there is no collective 'alreduce'"),
        ({"--op": "send"}, "there is no collective 'send'"),
        ({"--bytes": "many"}, "not a number of bytes"),
        ({"--islands": "8,0"}, "are no islands"),
        ({"--islands": "8"}, "one island"),
        ({"--rank": "16"}, "rank 16"),
        ({"--dtype": "float31"}, "there is no dtype"),
        ({"--reduction": "mean"}, "there is no reduction"),
        ({"--op": "broadcast", "--root": "99"}, "rank 99"),
    ],
)
def test_what_has_no_plan_is_refused_with_the_reason(changes: dict[str, str], text: str) -> None:
    arguments = {"--op": "all_reduce", "--bytes": "1MiB", "--islands": "8,8"} | changes
    shown = run("plan", *(word for pair in arguments.items() for word in pair), status=2)
    assert text in " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown).split())


# --- the rest


def test_env_shows_every_variable_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYCCL_JOB_TOKEN", "hush")
    monkeypatch.setenv("POLYCCL_TIMEOUT", "77")
    shown = run("env")
    assert all(row.name in shown for row in environment.VARIABLES)
    assert "77" in shown
    assert "hush" not in shown
    rows = {row["name"]: row for row in run_json("env")}
    assert rows["POLYCCL_JOB_TOKEN"]["value"] == "(set)"
    assert rows["POLYCCL_STAGING_BYTES"]["default"] == "32MiB"


def test_the_include_folder_holds_the_abi_header() -> None:
    folder = Path(run("include-dir").strip())
    assert (folder / "polyccl" / "backend.h").is_file()
    assert backends.abi() >> 16 == 1


def test_a_missing_cmake_package_is_one_line_on_standard_error(tmp_path: Path) -> None:
    script = (
        "import pathlib; from polyccl import backends; from polyccl.cli import main;"
        f"backends._package_folders = lambda: [pathlib.Path({str(tmp_path)!r})]; main()"
    )
    done = subprocess.run([sys.executable, "-c", script, "cmake-dir"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("polyccl: this installation has no cmake files")
    assert done.stderr.count("\n") == 1
    (tmp_path / "cmake").mkdir()
    (tmp_path / "cmake" / "polycclConfig.cmake").touch()
    done = subprocess.run([sys.executable, "-c", script, "cmake-dir"], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == str(tmp_path / "cmake")


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "polyccl", "--version"], capture_output=True, text=True, timeout=30, check=True)
    assert re.fullmatch(r"\d+\.\d+.*\n", done.stdout)


def test_a_plan_says_how_much_more_than_the_least_it_sends_and_why() -> None:
    shown = " ".join(run("plan", "--op", "all_reduce", "--bytes", "64MiB", "--islands", "6,2").split())
    assert "Up to 1,280 bytes above the least: the elements that the plan's unit does not divide" in shown
    assert "above the least" not in run("plan", "--op", "all_reduce", "--bytes", "96MiB", "--islands", "6,2")
