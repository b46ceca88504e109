"""What the functions of ranks share: joining, seeing that a communicator still works, catching errors with their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np

import polyccl
from polyccl.store import FileStore

from .shapes import Shape


def join(directory: str, rank: int, shape: Shape, name: str = "own", **options: Any) -> polyccl.Comm:
    """This rank's communicator of ``shape``, by way of a store in ``directory``."""
    local, label = shape.places[rank]
    backend = options.pop("backend", "bridge" if "," in shape.islands else local)
    hints = {"local": local, "island": label} if backend in ("bridge", "auto") else {}
    hints |= options.pop("hints", {})
    options.setdefault("timeout", 20)
    return polyccl.new_comm(
        backend,
        options.pop("device", "cpu"),
        name,
        store=options.pop("store", None) or FileStore(directory),
        hints=hints,
        rank=rank,
        size=shape.size,
        **options,
    )


def usable(comm: polyccl.Comm) -> None:
    """The communicator works: a sum, and one that says so."""
    total = np.array([comm.get_rank() + 1.0])
    comm.all_reduce(total)
    assert total[0] == sum(range(1, comm.get_size() + 1)), f"the sum of the ranks is {total[0]}"


@dataclass(frozen=True)
class Raised:
    """An error that a rank caught: its class, its text, and how long it took, in seconds."""

    name: str
    text: str
    seconds: float


def caught(call: Callable[[], Any]) -> Raised:
    """What ``call`` raises. An AssertionError where it raises nothing of PolyCCL's."""
    began = monotonic()
    try:
        call()
    except polyccl.CommError as error:
        return Raised(type(error).__name__, str(error), monotonic() - began)
    raise AssertionError("nothing was raised")


@contextmanager
def takes_at_most(limit: float) -> Iterator[None]:
    """The block ends within ``limit`` seconds."""
    began = monotonic()
    yield
    took = monotonic() - began
    assert took <= limit, f"it took {took:.2f} s, and may take {limit} s"
