"""The one table of PolyCCL's environment variables, and typed access to them.

An empty variable counts as unset. A value that does not parse is an `InvalidArgument` that names the variable, and a
``POLYCCL_*`` variable that is not in the table draws a warning, since it is most likely a misspelt one.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum

from .errors import InvalidArgument

PREFIX = "POLYCCL_"


class Form(Enum):
    """How the text of a variable is read; the value is what documentation prints."""

    FLAG = "0 or 1"
    INTEGER = "integer"
    SECONDS = "seconds"
    BYTES = "bytes"
    TEXT = "text"
    PATHS = "paths"
    LEVEL = "error, warning, info or debug"


@dataclass(frozen=True)
class Variable:
    """One row of the table.

    ``default`` is the text that an unset variable stands for, "" where there is none; ``meaning`` is one sentence, which also says
    what happens without a default; ``used`` names the part that reads the variable.
    """

    name: str
    form: Form
    default: str
    meaning: str
    used: str


def _library(backend: str, what: str) -> Variable:
    return Variable(
        f"{PREFIX}{backend}_LIBRARY",
        Form.TEXT,
        "",
        f"The file of {what} to open, instead of the one that torch has loaded or the system finds.",
        "backends",
    )


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "POLYCCL_CHECK",
        Form.FLAG,
        "0",
        "Compare the arguments of every operation between ranks before it starts; a difference raises Mismatch on all of them.",
        "communicators",
    ),
    Variable(
        "POLYCCL_LOCAL",
        Form.TEXT,
        "",
        "The backend of this rank's island in a bridge; unset, it follows from the rank's device.",
        "communicators",
    ),
    Variable(
        "POLYCCL_ISLAND",
        Form.TEXT,
        "",
        "The label of this rank's island: ranks with one backend and different labels are in different islands.",
        "communicators",
    ),
    Variable(
        "POLYCCL_TORCH_BACKEND",
        Form.TEXT,
        "auto",
        "What carries process groups of torch.distributed whose options name no backend: auto, bridge, or a library.",
        "torch",
    ),
    Variable("POLYCCL_TIMEOUT", Form.SECONDS, "600", "How long an operation or a rendezvous may take.", "communicators, stores"),
    Variable(
        "POLYCCL_ABORT_ON_ERROR",
        Form.FLAG,
        "0",
        "End the process when an operation fails or times out, instead of raising only.",
        "communicators",
    ),
    Variable("POLYCCL_RANK", Form.INTEGER, "", "This process's rank, before what a launcher says; needs POLYCCL_SIZE.", "ranks"),
    Variable("POLYCCL_SIZE", Form.INTEGER, "", "The number of ranks, before what a launcher says; needs POLYCCL_RANK.", "ranks"),
    Variable(
        "POLYCCL_STORE",
        Form.TEXT,
        "",
        "Where ranks meet: tcp://host:port (hosted by a launcher, or by rank 0 with ?host=rank0) or file:///directory (shared, and "
        "fresh for each job); unset, MASTER_ADDR and MASTER_PORT.",
        "stores",
    ),
    Variable(
        "POLYCCL_JOB_TOKEN",
        Form.TEXT,
        "",
        "The secret that connections of one job prove to each other; unset, rank 0 draws one and shares it through the store.",
        "rendezvous, stores",
    ),
    Variable(
        "POLYCCL_SOCKET_IFNAME",
        Form.TEXT,
        "",
        "The network interfaces for connections between ranks: prefixes (eth,ib), exact names (=eth0) or exclusions (^docker,lo).",
        "link",
    ),
    Variable("POLYCCL_CHUNK_BYTES", Form.BYTES, "", "The length of a chunk of a plan; unset, the planner chooses.", "planner"),
    Variable("POLYCCL_STAGING_BYTES", Form.BYTES, "32MiB", "The size of a communicator's staging ring on the host.", "executor"),
    Variable(
        "POLYCCL_BACKEND_PATH",
        Form.PATHS,
        "",
        f"More places to look for backends: plugin files, or folders that hold them, separated by '{os.pathsep}'.",
        "backends",
    ),
    Variable("POLYCCL_LOG", Form.LEVEL, "warning", "The least severe messages that are written to standard error.", "everywhere"),
    Variable(
        "POLYCCL_BUILD_BACKENDS",
        Form.TEXT,
        "",
        "The backends that a build from source includes, separated by ','; unset, those that CMake turns on by itself.",
        "build",
    ),
    _library("CUDA", "the CUDA driver"),
    _library("HIP", "the HIP runtime"),
    _library("NCCL", "NCCL"),
    _library("NCCLX", "NCCLX"),
    _library("RCCL", "RCCL"),
    _library("RCCLX", "RCCLX"),
    _library("XCCL", "oneCCL"),
)

BY_NAME: dict[str, Variable] = {row.name: row for row in VARIABLES}

_LEVELS = ("error", "warning", "info", "debug")
_BYTE_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}


def text(name: str) -> str:
    """The value of variable ``name`` of the table, or its default; "" where it has neither."""
    row = BY_NAME[name]
    return os.environ.get(name, "").strip() or row.default


def flag(name: str) -> bool:
    """The value of a variable that is 0 or 1."""
    value = text(name)
    if value not in ("0", "1"):
        raise _refusal(name, value)
    return value == "1"


def integer(name: str) -> int | None:
    """The value of a variable that is a whole number; None where it is unset."""
    value = text(name)
    if not value:
        return None
    try:
        return int(value)
    except ValueError:
        raise _refusal(name, value) from None


def seconds(name: str) -> float:
    """The value of a variable that is a time: positive; infinity is allowed."""
    value = text(name)
    try:
        result = float(value)
    except ValueError:
        raise _refusal(name, value) from None
    if not result > 0:
        raise _refusal(name, value, "a positive number of seconds, or inf")
    return result


def size(name: str) -> int | None:
    """The value of a variable that is a number of bytes, at least 1; None where it is unset."""
    value = text(name)
    if not value:
        return None
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise InvalidArgument(f"environment variable {name}: {error}") from None


def paths(name: str) -> list[str]:
    """The value of a variable that is a list of paths."""
    return [path for path in text(name).split(os.pathsep) if path]


def level(name: str = "POLYCCL_LOG") -> str:
    """The value of a variable that is a log level: error, warning, info or debug."""
    value = text(name).lower()
    if value not in _LEVELS:
        raise _refusal(name, value)
    return value


def parse_bytes(value: str) -> int:
    """The number of bytes that e.g. ``4096``, ``32MiB``, ``32M`` (both binary) or ``1GB`` (decimal) names, at least 1.

    Raises ValueError.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
    units = {unit.lower(): factor for unit, factor in _BYTE_UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{value!r} is not a number of bytes; write e.g. 4096, 512KiB, 32MiB or 1GiB")
    result = float(match[1]) * units[match[2].lower()] if "." in match[1] else int(match[1]) * units[match[2].lower()]
    if result != int(result) or not 1 <= result < 2**63:
        raise ValueError(f"{value!r} is not a whole number of bytes from 1 to 2^63 - 1")
    return int(result)


def unknown(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The ``POLYCCL_*`` variables that are set but not in the table, each with the name most like it, or ""."""
    names = [name for name in (os.environ if environ is None else environ) if name.startswith(PREFIX) and name not in BY_NAME]
    return {name: next(iter(get_close_matches(name, BY_NAME, n=1, cutoff=0.75)), "") for name in sorted(names)}


_warned: set[str] = set()


def warn_unknown() -> None:
    """Warn, once per process and name, about each ``POLYCCL_*`` variable that PolyCCL does not know."""
    for name, near in unknown().items():
        if name in _warned:
            continue
        _warned.add(name)
        hint = f"did you mean {near}?" if near else "`polyccl env` lists those that it knows."
        warnings.warn(
            f"PolyCCL ignores the environment variable {name}, which it does not know; {hint}", RuntimeWarning, stacklevel=2
        )


def markdown() -> str:
    """The table for the documentation, in Markdown."""
    lines = ["| variable | value | default | meaning | used by |", "|---|---|---|---|---|"]
    for row in VARIABLES:
        default = f"`{row.default}`" if row.default else ""
        lines.append(f"| `{row.name}` | {row.form.value} | {default} | {row.meaning} | {row.used} |")
    return "\n".join(lines) + "\n"


def _refusal(name: str, value: str, wanted: str = "") -> InvalidArgument:
    return InvalidArgument(f"environment variable {name} is {value!r}; it must be {wanted or BY_NAME[name].form.value}")


__all__ = [
    "BY_NAME",
    "VARIABLES",
    "Form",
    "Variable",
    "flag",
    "integer",
    "level",
    "markdown",
    "parse_bytes",
    "paths",
    "seconds",
    "size",
    "text",
    "unknown",
    "warn_unknown",
]
