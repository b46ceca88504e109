"""What the benchmarks share: a rank's place, a bridge, and the counters of a network interface."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import polyccl
from polyccl.ranks import detect


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--local", default=os.environ.get("POLYCCL_LOCAL", "host"), help="the backend of this rank's island")
    options.add_argument("--island-variable", default="POLYCCL_ISLAND", help="the variable with the label of this rank's island")
    return options


def bridge(arguments: argparse.Namespace, name: str) -> polyccl.Comm:
    """A bridge over all ranks."""
    hints = {"local": arguments.local, "island": os.environ[arguments.island_variable]}
    return polyccl.new_comm("bridge", "cpu", name, hints=hints, timeout=120)


def rank() -> int:
    """This process's rank."""
    return detect().rank


def interface_bytes(name: str) -> tuple[int, int]:
    """(received, sent) by a network interface since it came up, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        label, _, numbers = line.partition(":")
        if label.strip() == name:
            fields = numbers.split()
            return int(fields[0]), int(fields[8])
    raise SystemExit(f"there is no interface {name!r}")


def say(comm: polyccl.Comm, *words: Any) -> None:
    """Print, on rank 0."""
    if comm.get_rank() == 0:
        print(*words, flush=True)
