"""The table of environment variables: a name is there once, values parse or are refused by name, misspelt ones draw a warning."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import polyccl
from polyccl import environment, errors
from polyccl.errors import CommError, InvalidArgument


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in environment.VARIABLES:
        monkeypatch.delenv(row.name, raising=False)
    monkeypatch.setattr(environment, "_warned", set())


def test_every_variable_stands_in_the_table_once() -> None:
    names = [row.name for row in environment.VARIABLES]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"POLYCCL_[A-Z_]+", name) for name in names)


def test_every_row_has_one_sentence() -> None:
    for row in environment.VARIABLES:
        assert row.meaning.endswith("."), row.name
        assert row.used, row.name


def test_no_python_source_reads_a_variable_that_the_table_lacks() -> None:
    prefixes = ("POLYCCL_BACKEND_",)  # options of the build
    for path in Path(polyccl.__file__).parent.rglob("*.py"):
        for name in re.findall(r"\bPOLYCCL_[A-Z][A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")):
            macro = name.startswith(("POLYCCL_ABI", "POLYCCL_KIND", "POLYCCL_REDUCTION", "POLYCCL_DTYPE", "POLYCCL_OPERATION"))
            option = name == "POLYCCL_BACKEND" or name.startswith(prefixes)
            assert macro or option or name.startswith(("POLYCCL_CAN", "POLYCCL_FLAG")) or name in environment.BY_NAME, (path, name)


def test_unset_and_empty_variables_have_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYCCL_TIMEOUT", "")
    assert environment.flag("POLYCCL_CHECK") is False
    assert environment.seconds("POLYCCL_TIMEOUT") == 600
    assert environment.size("POLYCCL_STAGING_BYTES") == 32 << 20
    assert environment.size("POLYCCL_CHUNK_BYTES") is None
    assert environment.integer("POLYCCL_RANK") is None
    assert environment.level() == "warning"
    assert environment.paths("POLYCCL_BACKEND_PATH") == []
    assert environment.text("POLYCCL_LOCAL") == ""


def test_values_are_read_by_their_form(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "POLYCCL_CHECK": "1",
        "POLYCCL_TIMEOUT": "2.5",
        "POLYCCL_CHUNK_BYTES": "512KiB",
        "POLYCCL_RANK": " 3 ",
        "POLYCCL_LOG": "DEBUG",
        "POLYCCL_BACKEND_PATH": "/a::/b",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert environment.flag("POLYCCL_CHECK") is True
    assert environment.seconds("POLYCCL_TIMEOUT") == 2.5
    assert environment.size("POLYCCL_CHUNK_BYTES") == 512 << 10
    assert environment.integer("POLYCCL_RANK") == 3
    assert environment.level() == "debug"
    assert environment.paths("POLYCCL_BACKEND_PATH") == ["/a", "/b"]


@pytest.mark.parametrize(
    ("name", "read", "value"),
    [
        ("POLYCCL_CHECK", environment.flag, "yes"),
        ("POLYCCL_TIMEOUT", environment.seconds, "0"),
        ("POLYCCL_TIMEOUT", environment.seconds, "-1"),
        ("POLYCCL_TIMEOUT", environment.seconds, "nan"),
        ("POLYCCL_TIMEOUT", environment.seconds, "soon"),
        ("POLYCCL_RANK", environment.integer, "1.5"),
        ("POLYCCL_LOG", environment.level, "loud"),
        ("POLYCCL_CHUNK_BYTES", environment.size, "0"),
        ("POLYCCL_CHUNK_BYTES", environment.size, "12 parsecs"),
    ],
)
def test_a_value_that_does_not_parse_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, read: object, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match=name) as caught:
        read(name)  # type: ignore[operator]
    assert value in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("1K", 1024),
        ("1KiB", 1024),
        ("1kib", 1024),
        ("1KB", 1000),
        ("1.5MiB", 3 << 19),
        ("2 GiB", 2 << 30),
        ("1T", 1 << 40),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert environment.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "0", "1XB", "KiB", "1.0001K", "8388608T", "0x10", "1e3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="bytes"):
        environment.parse_bytes(text)


def test_an_unknown_variable_draws_one_warning_with_the_likely_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYCCL_TIMEOT", "3")
    with pytest.warns(RuntimeWarning, match="POLYCCL_TIMEOT, .* did you mean POLYCCL_TIMEOUT"):
        environment.warn_unknown()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment.warn_unknown()


def test_an_unknown_variable_that_is_like_no_other_points_to_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYCCL_XYZZY", "3")
    with pytest.warns(RuntimeWarning, match="polyccl env"):
        environment.warn_unknown()


def test_known_variables_draw_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in environment.VARIABLES:
        monkeypatch.setenv(row.name, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment.warn_unknown()


def test_the_markdown_table_has_a_row_for_each_variable() -> None:
    lines = environment.markdown().splitlines()
    assert len(lines) == len(environment.VARIABLES) + 2
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("InvalidArgument", ValueError),
        ("BackendUnavailable", ImportError),
        ("UnsupportedOperation", NotImplementedError),
        ("CommTimeout", TimeoutError),
        ("PeerLost", RuntimeError),
        ("Aborted", RuntimeError),
        ("Mismatch", RuntimeError),
    ],
)
def test_every_error_is_a_comm_error_and_the_builtin_that_programs_catch(name: str, builtin: type[Exception]) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, CommError)
    assert issubclass(kind, builtin)
    assert str(kind("the text")) == "the text"
    assert kind.__doc__


def test_importing_polyccl_brings_in_no_heavy_package() -> None:
    modules = "polyccl, polyccl.store, polyccl.ranks, polyccl.rendezvous, polyccl.backends, polyccl.report"
    script = f"import sys, {modules}; print([name for name in ('torch', 'numpy', 'typer', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
