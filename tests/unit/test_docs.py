"""The documentation is true: its examples run, its tables are those of the sources, its links lead somewhere.

A block of Python code runs as it stands, unless ``<!-- not run -->`` stands above it; below ``<!-- launch: host=2,host=2 -->`` it
runs as every rank of these islands. A block of shell commands runs where ``<!-- run -->`` stands above it. What stands between
``<!-- table: NAME -->`` and ``<!-- end -->`` is generated: ``python tests/unit/test_docs.py`` writes it anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.main import get_command

import polyccl
from polyccl import backends, environment, errors
from polyccl.cli import app
from polyccl.options import CALL_HINTS, HINTS
from polyccl.spec import OPERATIONS, Shape, Who

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "backends/*", "benchmarks", "examples", "tests/*")
PAGES = sorted([ROOT / "README.md", *(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md"))])
SECONDS = 90
"""A block's deadline."""


@dataclass(frozen=True)
class Block:
    """A fenced block of code, with the comment right above it, e.g. ``launch: host=2,host=2``."""

    page: Path
    line: int
    language: str
    mark: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"(?:^<!-- (?P<mark>[^\n]*) -->\n\n?)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", text, re.M | re.S)
    return [
        Block(page, text.count("\n", 0, match.start("language")) + 1, match["language"], match["mark"] or "", match["code"])
        for match in found
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python" and block.mark != "not run"]
SHELL = [block for block in BLOCKS if block.language == "sh" and block.mark == "run"]


def finish(command: list[str], folder: Path, environ: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_in_the_documentation_runs(block: Block, tmp_path: Path) -> None:
    if "import torch" in block.code:
        pytest.importorskip("torch")
    script = tmp_path / "example.py"
    script.write_text(block.code, encoding="utf-8")
    command = [sys.executable, str(script)]
    if block.mark.startswith("launch: "):
        command = [sys.executable, "-m", "polyccl", "launch", "--islands", block.mark.removeprefix("launch: "), "--", *command]
    finish(command, tmp_path)


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_in_the_documentation_run(block: Block, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, what in (("polyccl", f'"{sys.executable}" -m polyccl'), ("python", f'"{sys.executable}"')):
        (tools / name).write_text(f'#!/bin/sh\nexec {what} "$@"\n')
        (tools / name).chmod(0o755)
    finish(["sh", "-ec", block.code], tmp_path, {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"})


def test_there_are_examples_that_run() -> None:
    assert any(block.page.name == "README.md" and block.mark.startswith("launch") for block in PYTHON)
    assert SHELL


# ---- generated tables ----------------------------------------------------------------------------------------------------------


def operations_table() -> str:
    """The table of operations, in Markdown."""

    def side(shape: Shape, who: Who) -> str:
        what = {Shape.NONE: "", Shape.ONE: "a block", Shape.BLOCKS: "a block for each rank"}[shape]
        return f"{what}, at the root" if what and who is Who.ROOT else what

    lines = ["| operation | gives | gets | ranks agree on | in place, input is |", "|---|---|---|---|---|"]
    for row in OPERATIONS:
        in_place = {"": "", "same": "output", "output_block": "own block of output", "input_block": "own block is output"}[
            row.in_place
        ]
        gives, gets = side(row.input, row.input_at), side(row.output, row.output_at)
        lines.append(f"| `{row.name}` | {gives} | {gets} | {', '.join(row.agree)} | {in_place} |")
    return "\n".join(lines) + "\n"


def hints_table() -> str:
    """The table of hints, in Markdown."""
    lines = ["| hint | meaning | of a single call too |", "|---|---|---|"]
    lines += [f"| `{name}` | {meaning} | {'yes' if name in CALL_HINTS else ''} |" for name, meaning in HINTS.items()]
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "operations": operations_table,
    "hints": hints_table,
    "environment": environment.markdown,
}
_GENERATED = re.compile(r"(?<=<!-- table: )(\w+)( -->\n\n)(.*?)(?=\n<!-- end -->)", re.S)


def with_tables(text: str) -> str:
    """The page with its tables as they should be."""
    return _GENERATED.sub(lambda match: f"{match[1]}{match[2]}{TABLES[match[1]]()}", text)


def test_generated_tables_are_those_of_the_sources() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert with_tables(text) == text, f"{page} is out of date: run `python tests/unit/test_docs.py`"


def test_every_table_is_somewhere() -> None:
    names = [match[1] for page in PAGES for match in _GENERATED.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(TABLES)


# ---- links and names -----------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings make, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_pages_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page}: there is no {target}"
        assert not anchor or anchor in anchors(path), f"{page}: {path.name} has no heading #{anchor}"


def test_every_page_can_be_reached_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name


def test_every_error_class_is_explained() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert [name for name in errors.__all__ if f"`{name}`" not in text] == []


def test_every_command_and_option_is_explained() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    command = get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    for name, sub in command.commands.items():
        assert f"`polyccl {name}" in text, name
        for parameter in sub.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                assert not option.startswith("--") or option == "--help" or f"`{option}" in text, (name, option)


def test_changelog_of_the_abi_ends_with_the_present_version() -> None:
    text = (ROOT / "docs" / "abi-changelog.md").read_text(encoding="utf-8")
    abi = backends.abi()
    assert re.findall(r"^## (\d+\.\d+)", text, re.M)[0] == f"{abi >> 16}.{abi & 0xFFFF}"


def test_names_that_the_documentation_calls_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`polyccl\.(\w+)[`(]", page.read_text(encoding="utf-8")):
            assert hasattr(polyccl, name), f"{page}: there is no polyccl.{name}"
        for name in re.findall(r"`comm\.(\w+)\(", page.read_text(encoding="utf-8")):
            assert hasattr(polyccl.Comm, name), f"{page}: there is no Comm.{name}"


if __name__ == "__main__":
    for each in PAGES:
        before = each.read_text(encoding="utf-8")
        after = with_tables(before)
        if after != before:
            each.write_text(after, encoding="utf-8")
            print(f"wrote {each}")
