"""Every operation gives the right result: dtypes, reductions, counts, roots, lists, in place, asynchronous, on all shapes.

A sample by default; ``--full`` runs all of it. A failure names its case.
"""

from __future__ import annotations

import itertools

import pytest

from .cases import all_cases, run_cases, sample
from .marks import named, params
from .pool import SharedPool
from .shapes import BRIDGES, PLAIN, Shape

SAMPLE = 120
CHUNK = 500


def run(jobs: SharedPool, shape: Shape, number: int, seed: int, full: bool) -> None:
    if not full:
        jobs.run(run_cases, shape, sample(shape.size, number, seed))
        return
    cases = all_cases(shape.size)
    while chunk := list(itertools.islice(cases, CHUNK)):
        jobs.run(run_cases, shape, chunk, deadline=300)


@pytest.mark.parametrize("shape", params(BRIDGES))
def test_on_bridges(jobs: SharedPool, shape: Shape, full: bool) -> None:
    run(jobs, shape, SAMPLE, 1, full)


@pytest.mark.parametrize("shape", params(PLAIN))
def test_on_one_backend(jobs: SharedPool, shape: Shape, full: bool) -> None:
    run(jobs, shape, SAMPLE, 2, full)


@pytest.mark.parametrize("shape", named("host=3,host=3,host=2", "host=6,host=2", "gloo=3,host=3,gloo=2"))
def test_on_eight_ranks(jobs: SharedPool, shape: Shape, full: bool) -> None:
    run(jobs, shape, SAMPLE // 4, 3, full)
