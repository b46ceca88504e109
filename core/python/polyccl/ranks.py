"""Which rank this process is: from the caller, else from what the launcher left in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import InvalidArgument


@dataclass(frozen=True)
class Place:
    """This process's place in the job.

    ``local_rank`` counts the ranks of one machine and is None where no launcher says it. ``source`` tells, for messages, where
    rank and size come from.
    """

    rank: int
    size: int
    local_rank: int | None
    source: str


@dataclass(frozen=True)
class _Launcher:
    """The variables by which one launcher tells a process its place.

    ``shell_sets_size`` marks launchers whose size is set in an allocation's shell too, where it does not say that this process
    is one of the ranks.
    """

    name: str
    rank: str
    size: str
    shell_sets_size: bool = False


ALONE = Place(0, 1, None, "no launcher")
"""The place of a process that is its whole job."""

# Slurm comes last: mpirun and torchrun inside an allocation inherit the place of the one process that started them.
_LAUNCHERS = (
    _Launcher("the environment", "POLYCCL_RANK", "POLYCCL_SIZE"),
    _Launcher("torchrun's environment", "RANK", "WORLD_SIZE"),
    _Launcher("Open MPI's environment", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    _Launcher("PMI's environment", "PMI_RANK", "PMI_SIZE"),
    _Launcher("Slurm's environment", "SLURM_PROCID", "SLURM_NTASKS", shell_sets_size=True),
)

_LOCAL = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID")


def detect(rank: int | None = None, size: int | None = None, environ: Mapping[str, str] | None = None) -> Place:
    """The place of this process.

    ``rank`` and ``size`` win when given; then POLYCCL_RANK and POLYCCL_SIZE, torchrun, Open MPI, PMI, Slurm. Raises
    InvalidArgument when only one of a pair is there, a value is no number, the rank is not in ``range(size)``, or nothing is set.
    """
    environ = os.environ if environ is None else environ
    local = local_rank(environ)
    if rank is not None or size is not None:
        if rank is None or size is None:
            given, missing = ("size", "rank") if rank is None else ("rank", "size")
            raise InvalidArgument(f"argument `{given}` is given without `{missing}`; give both, or neither to take the launcher's")
        return _place(rank, size, local, "the arguments")
    for launcher in _LAUNCHERS:
        has_rank, has_size = bool(environ.get(launcher.rank)), bool(environ.get(launcher.size))
        if has_rank and has_size:
            return _place(_number(environ, launcher.rank), _number(environ, launcher.size), local, launcher.name)
        if has_rank or (has_size and not launcher.shell_sets_size):
            given, missing = (launcher.rank, launcher.size) if has_rank else (launcher.size, launcher.rank)
            raise InvalidArgument(f"environment variable {given} is set, but {missing} is missing; set both, or neither")
    raise InvalidArgument(
        "nothing says which rank this process is: start it with torchrun, `polyccl launch`, mpirun or srun, set POLYCCL_RANK and "
        "POLYCCL_SIZE, or give `rank` and `size`"
    )


def are_told(environ: Mapping[str, str] | None = None) -> bool:
    """Whether anything in the environment says which rank this process is, or of how many."""
    environ = os.environ if environ is None else environ
    return any(
        environ.get(launcher.rank) or (environ.get(launcher.size) and not launcher.shell_sets_size) for launcher in _LAUNCHERS
    )


def local_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """The number of this process among those of its machine, where a launcher says it. Raises InvalidArgument for nonsense."""
    environ = os.environ if environ is None else environ
    local = next((_number(environ, name) for name in _LOCAL if environ.get(name)), None)
    if local is not None and local < 0:
        raise InvalidArgument(f"the local rank is {local} in the environment; it must be 0 or more")
    return local


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise InvalidArgument(f"environment variable {name} is {environ[name]!r}; it must be a whole number") from None


def _place(rank: int, size: int, local: int | None, source: str) -> Place:
    if size < 1:
        raise InvalidArgument(f"the number of ranks is {size} in {source}; it must be 1 or more")
    if not 0 <= rank < size:
        raise InvalidArgument(f"the rank is {rank} in {source}; with {size} ranks it must be 0 to {size - 1}")
    return Place(rank, size, local, source)


__all__ = ["ALONE", "Place", "are_told", "detect", "local_rank"]
