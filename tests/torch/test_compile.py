"""Compiled code does on PolyCCL's groups what it does on c10d's Gloo: the same values, from the same graphs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from . import compiled

Ranks = Callable[..., list[Any]]
BRIDGE = "gloo=1,host=1"

pytestmark = pytest.mark.backend("gloo")


def run(code: str) -> None:
    """Run it in a process of its own, in which torch does not look for PolyCCL."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("eager", marks=pytest.mark.only_in_full)])
@pytest.mark.parametrize("call", [call.__name__ for call in compiled.CALLS])
def test_a_compiled_call_is_as_on_c10ds_gloo(ranks: Ranks, call: str, backend: str) -> None:
    ranks(compiled.as_on_c10d, BRIDGE, call, backend)


@pytest.mark.parametrize("model", ["ddp", "fsdp2"])
def test_a_compiled_model_learns_as_on_c10ds_gloo(ranks: Ranks, model: str) -> None:
    ranks(compiled.trained_as_on_c10d, BRIDGE, model)


def test_a_compiled_function_takes_works(ranks: Ranks) -> None:
    ranks(compiled.works_as_arguments, BRIDGE)


def test_a_compiled_call_raises_its_own_error(ranks: Ranks) -> None:
    ranks(compiled.errors, BRIDGE)


def test_a_communicators_call_breaks_the_graph(ranks: Ranks) -> None:
    ranks(compiled.communicators, BRIDGE)


def test_a_balanced_step_may_be_compiled(ranks: Ranks) -> None:
    ranks(compiled.balanced, BRIDGE)


@pytest.mark.parametrize("imports", ["import polyccl, torch", "import torch, polyccl"], ids=["polyccl first", "torch first"])
def test_communicators_stay_untraced_whichever_import_comes_first(imports: str) -> None:
    run(f"""
        {imports}
        comm = polyccl.new_comm("host", "cpu", rank=0, size=1)

        def total(x):
            comm.all_reduce(x, polyccl.ReduceOp.SUM)
            return x + 1

        assert torch.compile(total, backend="eager")(torch.ones(2)).tolist() == [2, 2]
    """)


def test_calls_do_not_import_the_compiler() -> None:
    run("""
        import sys, torch, polyccl.torch
        from torch import distributed as dist
        dist.init_process_group("polyccl", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(2))
        assert "torch._dynamo" not in sys.modules
        dist.destroy_process_group()
    """)


def test_only_polyccls_own_code_is_left_alone() -> None:
    run("""
        from pathlib import Path
        import torch
        from torch._C._dynamo import eval_frame
        marked = []
        eval_frame.set_code_exec_strategy = lambda code, strategy: marked.append(Path(code.co_filename))
        import polyccl.torch
        package = Path(polyccl.__file__).parent
        assert marked
        assert all(package in file.parents for file in marked), marked
    """)
