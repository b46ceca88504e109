"""Rank detection: what wins, what is refused."""

from __future__ import annotations

import pytest

from polyccl.errors import InvalidArgument
from polyccl.ranks import Place, detect

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "7", "MPI_LOCALRANKID": "1"}
OWN = {"POLYCCL_RANK": "0", "POLYCCL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (TORCHRUN, Place(1, 4, 1, "torchrun's environment")),
        (SLURM, Place(2, 8, 0, "Slurm's environment")),
        (OPEN_MPI, Place(3, 6, 2, "Open MPI's environment")),
        (PMI, Place(5, 7, 1, "PMI's environment")),
        (OWN, Place(0, 2, None, "the environment")),
    ],
)
def test_each_launcher_is_understood(environ: dict[str, str], place: Place) -> None:
    assert detect(environ=environ) == place


def test_arguments_win_over_everything() -> None:
    assert detect(0, 3, environ=OWN | TORCHRUN | SLURM) == Place(0, 3, 1, "the arguments")


def test_our_own_variables_win_over_launchers() -> None:
    assert detect(environ=OWN | TORCHRUN | SLURM).size == 2


def test_a_launcher_inside_a_slurm_allocation_wins_over_the_allocation() -> None:
    for inner, size in ((TORCHRUN, 4), (OPEN_MPI, 6), (PMI, 7)):
        assert detect(environ=SLURM | inner).size == size


def test_the_shell_of_a_slurm_allocation_is_no_rank() -> None:
    with pytest.raises(InvalidArgument, match="nothing says which rank"):
        detect(environ={"SLURM_NTASKS": "8"})


@pytest.mark.parametrize("launcher", [OWN, TORCHRUN, OPEN_MPI, PMI])
def test_half_a_pair_is_refused_and_the_missing_half_named(launcher: dict[str, str]) -> None:
    rank, size = list(launcher)[:2]
    with pytest.raises(InvalidArgument, match=f"{rank} is set, but {size} is missing"):
        detect(environ={rank: "0"})
    with pytest.raises(InvalidArgument, match=f"{size} is set, but {rank} is missing"):
        detect(environ={size: "2"})


def test_slurms_rank_without_its_size_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="SLURM_NTASKS is missing"):
        detect(environ={"SLURM_PROCID": "0"})


def test_half_a_pair_of_arguments_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="`rank` is given without `size`"):
        detect(rank=0, environ=TORCHRUN)
    with pytest.raises(InvalidArgument, match="`size` is given without `rank`"):
        detect(size=2, environ=TORCHRUN)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (0, -3)])
def test_what_is_out_of_range_is_refused(rank: int, size: int) -> None:
    with pytest.raises(InvalidArgument, match="in the arguments"):
        detect(rank, size, environ={})
    with pytest.raises(InvalidArgument, match="in torchrun's environment"):
        detect(environ={"RANK": str(rank), "WORLD_SIZE": str(size)})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_what_is_no_number_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is 'x'"):
        detect(environ=TORCHRUN | {name: "x"})


def test_a_negative_local_rank_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="local rank is -1"):
        detect(environ=TORCHRUN | {"LOCAL_RANK": "-1"})


def test_nothing_set_says_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match="torchrun"):
        detect(environ={})
