"""The command line: ``polyccl info``, ``launch``, ``doctor``, ``plan``, ``env``, and the paths that a vendor's build needs.

Only this package imports typer and rich; ``import polyccl`` does not.
"""

from __future__ import annotations

import json
import math
from typing import Annotated

import typer

from .. import backends, environment
from .._version import __version__
from ..errors import CommError
from . import doctor, info, launch, plan

app = typer.Typer(
    name="polyccl",
    help="Collectives across vendors: see what is installed, start jobs, look at plans.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command("info")
def run_info(
    name: Annotated[str | None, typer.Argument(help="A backend: it alone, with its operations.", show_default=False)] = None,
    operations: Annotated[bool, typer.Option("--operations", help="List the operations of every backend by type.")] = False,
    as_json: Json = False,
) -> None:
    """Show the version, the backends of this installation, and what each can do."""
    info.show(as_json, name, operations)


@app.command(
    "launch",
    context_settings={"allow_interspersed_args": False},
    epilog="Example: polyccl launch --islands gloo=2,gloo=2 -- python script.py",
)
def run_launch(
    command: Annotated[
        list[str], typer.Argument(help="The program of every rank, after --, with its arguments.", metavar="-- COMMAND...")
    ],
    islands: Annotated[
        str,
        typer.Option("--islands", help="Islands and their numbers of ranks: gloo=2,gloo=2 or nccl=8,host.", metavar="LIST"),
    ],
    interleave: Annotated[bool, typer.Option("--interleave", help="Deal ranks round the islands: A B A B.")] = False,
    check: Annotated[
        bool | None,
        typer.Option("--check/--no-check", help="Compare every operation between ranks (POLYCCL_CHECK).", show_default=False),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds that an operation may take (POLYCCL_TIMEOUT).", min=0.001)
    ] = None,
    grace: Annotated[
        float, typer.Option("--grace", help="Seconds that ranks have to end before they are killed.", min=0)
    ] = launch.GRACE,
) -> None:
    """Start the ranks of a job on this machine, in islands.

    Prints their output line by line, with rank and island. When a rank fails the others are ended, and its exit status is returned.
    """
    for name, length in (("--timeout", timeout), ("--grace", grace)):
        if length is not None and math.isnan(length):
            raise typer.BadParameter("it must be a number of seconds, or inf", param_hint=name)
    try:
        parsed = launch.parse_islands(islands)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--islands") from None
    raise typer.Exit(launch.launch(parsed, command, interleave, check, timeout, grace))


@app.command("doctor", epilog="Example: torchrun --nnodes 2 ... --no-python polyccl doctor")
def run_doctor(
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that each step may take.", min=0.1)] = 30.0,
    size: Annotated[str, typer.Option("--bytes", help="Size of the messages that rails are timed with.")] = "4MiB",
    device: Annotated[
        str | None, typer.Option("--device", help="As in new_comm; else that of POLYCCL_LOCAL's library, or the CPU.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Examine a job: run it as every rank, by any launcher. Exit status 1 where something is wrong, with who and what.

    Without a launcher it examines this process alone.

    Prints, on rank 0, what every rank has, checks that all can talk to each other, and times the links between islands.
    """
    try:
        count = environment.parse_bytes(size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--bytes") from None
    raise typer.Exit(doctor.run(timeout, count, device, as_json))


@app.command("plan")
def run_plan(
    op: Annotated[str, typer.Option("--op", help="The operation, e.g. all_reduce.")],
    size: Annotated[str, typer.Option("--bytes", help="Size of the full buffer (of all blocks), e.g. 64KiB or 1GiB.")],
    islands: Annotated[str, typer.Option("--islands", help="Ranks of each island, e.g. 8,8,4, or each rank's island, e.g. ABAB.")],
    rank: Annotated[int, typer.Option("--rank", help="Whose plan to list.")] = 0,
    dtype: Annotated[str, typer.Option("--dtype", help="Type of the elements.")] = "float32",
    reduction: Annotated[str, typer.Option("--reduction", help="For operations that reduce.")] = "sum",
    root: Annotated[int, typer.Option("--root", help="For operations with a root.")] = 0,
    as_json: Json = False,
) -> None:
    """Show a collective's plan, and what it sends between islands against the least that must be sent."""
    try:
        plan.show(op, size, islands, rank, dtype, reduction, root, as_json)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.command("env")
def run_env(as_json: Json = False) -> None:
    """Show the environment variables: meaning, default, and value where one is set."""
    if as_json:
        print(json.dumps(info.variables(), indent=2))
    else:
        info.show_variables()


@app.command("cmake-dir")
def run_cmake_dir() -> None:
    """Print the folder of the CMake package (polyccl_DIR)."""
    print(backends.cmake_dir())


@app.command("include-dir")
def run_include_dir() -> None:
    """Print the folder that holds polyccl/backend.h."""
    print(backends.include_dir())


def main() -> None:
    """Run the command line; errors of PolyCCL are one line on standard error and exit status 1."""
    environment.warn_unknown()
    try:
        app(prog_name="polyccl")
    except CommError as error:
        typer.echo(f"polyccl: {error}", err=True)
        raise SystemExit(1) from None


__all__ = ["app", "main"]
