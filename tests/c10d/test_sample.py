"""A sample of torch's own suite passes on PolyCCL, over one library and over a bridge; `nox -s tests_c10d` runs all of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from .results import PASSED, Difference, Result, faults, read

pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="torch's suite needs expecttest")

ROOT = Path(__file__).parents[2]
DEADLINE = 240.0  # seconds of one column
COLUMNS = ("gloo", "gloo=1,gloo=rest")
SAMPLE = (
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_complex",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_group_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_group_max",
    "test_all_reduce_sum_async",
    "test_barrier_full_group",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_group",
    "test_destroy_group",
    "test_gather_checks",
    "test_gather_object_subgroup",
    "test_get_future",
    "test_isend",
    "test_monitored_barrier_wait_all_ranks",
    "test_new_subgroups_with_group_param",
    "test_reduce_full_group_product",
    "test_scatter_group",
    "test_scatter_object_list",
    "test_send_recv_any_source_autograd_profiler",
    "test_send_recv_with_tag_torch_profiler",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
)
Found = Callable[..., dict[str, Result]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of tests on a column, the sample's if not said; the first test of a column lets them be made."""
    folder = tmp_path_factory.mktemp("c10d")

    @cache
    def run(column: str, tests: tuple[str, ...] = SAMPLE) -> dict[str, Result]:
        command = [
            sys.executable,
            "-m",
            "tests.c10d",
            "--column",
            column,
            "--results",
            str(folder),
            "--jobs",
            "2",
            "--only",
            *tests,
        ]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                printed, _ = process.communicate(timeout=DEADLINE)
            finally:
                process.terminate()  # it ends the tests' processes
        results = read(folder / f"{column}.tsv")
        assert set(results) == set(tests), printed
        return results

    return run


@pytest.mark.backend("gloo")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("test", SAMPLE)
def test_torchs_test_passes(found: Found, column: str, test: str) -> None:
    result = found(column)[test]
    assert result.outcome == PASSED, result.reason
    assert result.polyccl > 0
    assert result.gloo == 0


@pytest.mark.timeout(300)
def test_c10ds_own_gloo_is_counted(found: Found) -> None:
    result = found("c10d", ("test_get_rank",))["test_get_rank"]
    assert (result.gloo, result.polyccl) == (4, 0)


OWN = {"test": Result("test", PASSED, gloo=4)}
GOOD = Result("test", PASSED, polyccl=4)
BAD = Result("test", "failed", "a reason", polyccl=4)
KNOWN = Difference("test", "all", "failed", "why")


@pytest.mark.parametrize(
    ("result", "known", "words"),
    [
        pytest.param(GOOD, [], "", id="as on c10d's Gloo"),
        pytest.param(BAD, [KNOWN], "", id="a known difference"),
        pytest.param(BAD, [], "failed, and passed on c10d's Gloo: a reason", id="an unknown difference"),
        pytest.param(GOOD, [KNOWN], "passed as on c10d's Gloo; take it from", id="a known difference is gone"),
        pytest.param(Result("test", "timed out", polyccl=4), [KNOWN], "timed out, not failed as known", id="another difference"),
        pytest.param(Result("test", "skipped"), [], "skipped, and passed on c10d's Gloo", id="it does not run"),
        pytest.param(Result("test", PASSED, polyccl=4, gloo=1), [], "Gloo was created 1 times", id="Gloo was used"),
        pytest.param(Result("test", PASSED), [], "made no group of PolyCCL's", id="PolyCCL was not used"),
        pytest.param(Result("other", PASSED, polyccl=4), [], "c10d's column does not have it", id="c10d has no result"),
    ],
)
def test_a_column_is_held_against_c10ds(result: Result, known: list[Difference], words: str) -> None:
    found = faults({result.test: result}, OWN, known)
    assert (words in found[0]) if words else not found
