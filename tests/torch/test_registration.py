"""torch knows the backend once both packages are imported, in either order, and PolyCCL imports no torch."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

GROUP = """
    from torch import distributed as dist
    dist.init_process_group("polyccl", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD.name() == "polyccl"
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "imports",
    ["import polyccl, torch", "import torch, polyccl", "import polyccl, torch.distributed, torch"],
    ids=["polyccl first", "torch first", "torch.distributed later"],
)
def test_either_import_may_come_first(imports: str) -> None:
    run(f"\n    {imports}\n{GROUP}")


def test_polyccl_imports_no_torch() -> None:
    run(
        """
        import sys, polyccl
        assert "torch" not in sys.modules
        import json, numpy
        assert "torch" not in sys.modules
        """
    )


def test_the_watch_ends_with_torch() -> None:
    run(
        """
        import sys, polyccl
        before = [type(finder).__name__ for finder in sys.meta_path]
        assert "_Watch" in before
        import torch
        assert "_Watch" not in [type(finder).__name__ for finder in sys.meta_path]
        assert "polyccl" in torch.distributed.Backend.backend_list
        """
    )


def test_a_failed_import_of_torch_stays_an_import_error() -> None:
    run(
        """
        import sys, polyccl
        sys.modules["torch"] = None
        try:
            import torch
        except ImportError:
            pass
        else:
            raise SystemExit("torch was imported")
        """
    )
