"""Plain text that fits the terminal: labelled paragraphs, folded so that no line is too long and nothing is cut off."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

_LOG = 68
"""Columns where the output is no terminal: with a launcher's prefix before each line it still fits 80."""


def width(log: int | None = None) -> int:
    """Return the columns of the terminal (COLUMNS where set), at least 40. ``log`` is the number where there is none; 80."""
    return max(40, shutil.get_terminal_size((80 if log is None else log, 24)).columns)


def log_width() -> int:
    """As `width`, for output that ranks write: where it is no terminal, a launcher puts a prefix before each line."""
    return width() if sys.stdout.isatty() else width(_LOG)


def fold(text: str, columns: int) -> list[str]:
    """Return ``text`` in lines of at most ``columns``. A word that is longer, a path say, is broken after a slash if it has one."""
    pieces = []
    for word in text.split():
        while len(word) > columns:
            cut = word.rfind("/", 1, columns) + 1 or columns
            pieces.append(word[:cut])
            word = word[cut:]
        pieces.append(word)
    return textwrap.wrap(" ".join(pieces), columns, break_on_hyphens=False) or [""]


def entry(console: Console, label: str, texts: Iterable[str], columns: int, indent: int, style: str = "bold") -> None:
    """Print paragraphs beside a label, ``indent`` columns to its right. ``style`` is the label's, as rich has it."""
    lines = [line for text in texts for line in fold(text, columns - indent)] or [""]
    for number, line in enumerate(lines):
        head = label.ljust(indent) if number == 0 else " " * indent
        marked = re.sub(r"\S.*\S|\S", lambda found: f"[{style}]{escape(found[0])}[/]", head, count=1) if number == 0 else head
        console.print(marked + escape(line), highlight=False, soft_wrap=True)


__all__ = ["entry", "fold", "log_width", "width"]
