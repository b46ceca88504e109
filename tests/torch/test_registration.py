"""torch knows the backend where PolyCCL is installed, or once both packages are imported, in either order."""

from __future__ import annotations

import os
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


def run(code: str, autoload: bool = False) -> None:
    """Run it; without ``autoload`` torch does not look for installed backends by itself."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "imports",
    ["import polyccl, torch", "import torch, polyccl", "import polyccl, torch.distributed, torch"],
    ids=["polyccl first", "torch first", "torch.distributed later"],
)
def test_either_import_may_come_first(imports: str) -> None:
    run(f"\n    {imports}\n{GROUP}")


def test_a_script_for_plain_torch_need_not_import_polyccl() -> None:
    run(f"\n    import sys, torch\n    assert 'polyccl' not in sys.modules\n{GROUP}", autoload=True)


def test_torch_is_imported_where_polyccl_cannot_be() -> None:
    run(
        """
        import sys
        sys.modules["polyccl"] = None
        import torch
        try:
            torch.distributed.init_process_group("polyccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
        except ImportError:
            pass
        else:
            raise SystemExit("there is a group")
        """,
        autoload=True,
    )


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
