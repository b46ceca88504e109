"""Scripts for torchcomms run on PolyCCL: with another import, with none changed, and through torch's own switch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs.pool import SharedPool, shared_pool
from tests.jobs.shapes import Shape

from . import calls, switched, training

HERE = Path(__file__).parent
SCRIPT = HERE / "torchcomms_script.py"
OURS = "polyccl.compat.torchcomms"
DEADLINE = 100

gloo = pytest.mark.backend("gloo")
ISLANDS = pytest.mark.parametrize("job", ["gloo=2", "gloo=1,gloo=1"])


def finish(*command: object, **how: Any) -> str:
    """Run a Python command to its end; what it printed."""
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=DEADLINE, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launched(job: str, *command: object) -> str:
    return finish("-m", "polyccl", "launch", "--islands", job, "--", sys.executable, *command)


def went_well(output: str, job: str) -> None:
    carrier = "bridge" if "," in job else "gloo"
    assert all(f"rank {rank} of 2 went well on {carrier}" in output for rank in range(2)), output


# ---- scripts -------------------------------------------------------------------------------------------------------------------


@gloo
@ISLANDS
def test_a_script_runs_with_only_its_imports_changed(job: str, tmp_path: Path) -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    changed = text.replace("import torchcomms\n", f"import {OURS} as torchcomms\n").replace("from torchcomms", f"from {OURS}")
    pairs = list(zip(text.splitlines(), changed.splitlines(), strict=True))
    assert all("import" in old for old, new in pairs if old != new)
    assert sum(old != new for old, new in pairs) == 3
    script = tmp_path / "script.py"
    script.write_text(changed, encoding="utf-8")
    went_well(launched(job, script), job)


@gloo
@ISLANDS
def test_a_script_runs_unchanged(job: str) -> None:
    went_well(launched(job, "-m", OURS, SCRIPT), job)


@gloo
def test_a_script_runs_unchanged_after_install(tmp_path: Path) -> None:
    code = f"import {OURS} as t; t.install(); import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    went_well(launched("gloo=1,gloo=1", "-c", code), "gloo=1,gloo=1")


@gloo
def test_a_script_runs_unchanged_under_torchrun() -> None:
    """Nothing says what the islands are here: the library that the script names carries it."""
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", OURS, SCRIPT)
    went_well(finish(*command), "gloo=2")


def test_a_script_gets_its_arguments_and_its_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, torchcomms, beside\nprint(__name__, sys.argv[1:], beside.VALUE, torchcomms.__name__)\n")
    assert finish("-m", OURS, script, "--steps", "3") == f"__main__ ['--steps', '3'] 7 {OURS}\n"
    assert finish("-m", OURS, "-m", "script", "more", cwd=tmp_path) == f"__main__ ['more'] 7 {OURS}\n"
    for wrong in ([], ["-x"], ["missing.py"]):
        failed = subprocess.run([sys.executable, "-m", OURS, *wrong], capture_output=True, text=True, timeout=DEADLINE)
        assert failed.returncode != 0
        assert "usage" in failed.stderr


def test_processes_that_a_script_spawns_run_unchanged_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, torch, torchcomms

            def rank(number, size, path):
                store = torch.distributed.FileStore(path, size)
                import os
                os.environ.update(TORCHCOMM_RANK=str(number), TORCHCOMM_SIZE=str(size))
                comm = torchcomms.new_comm("host", torch.device("cpu"), "spawned", store=store)
                tensor = torch.ones(3)
                comm.all_reduce(tensor, torchcomms.ReduceOp.SUM, False)
                assert tensor.tolist() == [2.0] * 3
                comm.finalize()

            if __name__ == "__main__":
                torch.multiprocessing.spawn(rank, (2, sys.argv[1]), nprocs=2)
                print("both went well")
            """
        )
    )
    assert "both went well" in finish("-m", OURS, script, tmp_path / "store")


# ---- install -------------------------------------------------------------------------------------------------------------------


def run(code: str, **how: Any) -> None:
    finish("-c", textwrap.dedent(code), **how)


def test_install_and_uninstall_leave_things_as_they_were() -> None:
    run(
        """
        import sys
        import polyccl.compat.torchcomms as ours
        assert "torch" not in sys.modules
        ours.uninstall()
        ours.install()
        ours.install()
        import torch, torchcomms
        import torchcomms.hooks, torchcomms.objcol, torchcomms.device_mesh, torchcomms._comms
        from torchcomms._backend_wrapper import _BackendWrapper
        from torch.distributed import distributed_c10d as c10d
        assert torchcomms is ours
        assert torchcomms.hooks is ours.hooks
        assert c10d._TORCHCOMM_AVAILABLE and c10d._BackendWrapper is _BackendWrapper is torchcomms._comms._BackendWrapper
        assert set(ours.__all__) <= set(dir(torchcomms))
        ours.uninstall()
        assert not c10d._TORCHCOMM_AVAILABLE
        assert not any(hasattr(c10d, name) for name in ("_BackendWrapper", "new_comm", "FlightRecorderHook"))
        try:
            import torchcomms
        except ModuleNotFoundError:
            pass
        else:
            raise SystemExit("torchcomms is still there")
        """
    )


@pytest.fixture
def another(tmp_path: Path) -> dict[str, Any]:
    """How to run where a package torchcomms is installed that is not PolyCCL's."""
    package = tmp_path / "torchcomms"
    package.mkdir()
    (package / "__init__.py").write_text("WHOSE = 'its own'\nnew_comm = is_backend_built = None\n")
    (package / "_comms.py").write_text("_BackendWrapper = _is_backend_registered = None\n")
    (package / "hooks.py").write_text("FlightRecorderHook = None\n")
    return {"env": {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}}


def test_install_refuses_where_torchcomms_itself_is_in_use(another: dict[str, Any]) -> None:
    run(
        """
        import torch, polyccl
        from torch.distributed import distributed_c10d as c10d
        import polyccl.compat.torchcomms as ours
        assert c10d._TORCHCOMM_AVAILABLE
        try:
            ours.install()
        except polyccl.CommError as error:
            assert "imported already" in str(error) and "python -m polyccl.compat.torchcomms" in str(error)
        else:
            raise SystemExit("it was replaced under its users")
        ours.uninstall()
        import torchcomms
        assert torchcomms.WHOSE == "its own"
        """,
        **another,
    )


def test_install_before_torch_goes_before_an_installed_torchcomms(another: dict[str, Any]) -> None:
    run(
        """
        import polyccl.compat.torchcomms as ours
        ours.install()
        import torch, torchcomms
        from torch.distributed import distributed_c10d as c10d
        assert torchcomms is ours
        assert c10d._BackendWrapper is torchcomms._comms._BackendWrapper
        """,
        **another,
    )


# ---- names ---------------------------------------------------------------------------------------------------------------------


def test_what_polyccl_has_not_says_so() -> None:
    run(
        """
        import datetime, polyccl, torch
        import polyccl.compat.torchcomms as t
        comm = t.new_comm("host", "cpu", rank=0, size=1)
        recorder = t.hooks.FlightRecorderHook()
        for call in (
            lambda: t.register_backend("mine", object),
            lambda: t.TorchCommBackend(),
            lambda: t.TorchCommWindow(),
            lambda: t.get_mem_allocator("nccl"),
            lambda: t.hooks.NanCheckHook(),
            lambda: t.hooks.clog("file"),
            lambda: recorder.dump_json(),
            lambda: recorder.dump_file(0),
            lambda: comm.new_window(),
            lambda: comm.get_backend_impl(),
            lambda: comm.unsafe_get_backend(),
            lambda: comm.get_mem_allocator(),
            lambda: comm.all_gather_p_init(torch.ones(1)),
            lambda: comm.register_pre_hook(print),
            lambda: comm.reconfigure(1, []),
        ):
            try:
                call()
            except polyccl.UnsupportedOperation as error:
                assert len(str(error)) > 40, error
            else:
                raise SystemExit("taken")
        assert t.ReduceOp(t.RedOpType.SUM) == t.ReduceOp.SUM
        assert t.is_backend_built("host") and not t.is_backend_built("mccl")
        assert comm.is_abort_supported() and isinstance(comm, polyccl.Comm)
        work = comm.all_reduce(torch.ones(1), t.ReduceOp.SUM, True)
        assert isinstance(work, t.TorchWork)
        assert t.Timeout(seconds=3) == datetime.timedelta(seconds=3)
        """
    )


def test_torchcomms_variables_and_hints_count() -> None:
    run(
        """
        import os, warnings, polyccl
        import polyccl.compat.torchcomms as t
        os.environ.update(TORCHCOMM_RANK="0", TORCHCOMM_SIZE="1", TORCHCOMM_TIMEOUT_SECONDS="5.5", TORCHCOMM_ABORT_ON_ERROR="true")
        os.environ.update(RANK="3", WORLD_SIZE="4")
        warnings.simplefilter("error")
        hints = {"persistent_store": "true", "is_high_priority_stream": "1"}
        comm = t.new_comm("host", "cpu", "a", hints=hints)
        assert (comm.get_rank(), comm.get_size()) == (0, 1)
        assert comm.get_options().timeout.total_seconds() == 5.5
        assert comm.get_options().abort_process_on_timeout_or_error
        assert comm._group.options.is_high_priority_stream
        assert t.new_comm("host", "cpu", "b", False, 7).get_options().timeout.total_seconds() == 7
        os.environ["TORCHCOMM_TIMEOUT_SECONDS"] = "soon"
        try:
            t.new_comm("host", "cpu", "c")
        except polyccl.InvalidArgument as error:
            assert "TORCHCOMM_TIMEOUT_SECONDS" in str(error)
        else:
            raise SystemExit("nonsense was taken")
        """
    )


def test_the_recorder_keeps_the_newest_steps() -> None:
    output = launched("host=1,host=1", HERE / "torchcomms_recorder.py")
    assert output.count("recorded") == 2, output


# ---- torch's switch ------------------------------------------------------------------------------------------------------------

Switched = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def own_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """Ranks that never ran without the switch: torch caches names of groups by their mesh, and under the switch they are others."""
    with shared_pool(tmp_path_factory.mktemp("store")) as pool:
        yield pool


@pytest.fixture
def switch(own_pool: SharedPool, tmp_path: Path) -> Switched:
    """``switch(function, islands)``: a function's results on each rank of ``init_process_group("gloo")`` under torch's switch."""

    def run(function: Callable[..., Any], islands: str, *arguments: Any, **init: Any) -> list[Any]:
        what = function.__module__, function.__name__, arguments
        return own_pool.each(switched.in_group, Shape(islands).size, islands, str(tmp_path / "store"), what, init, deadline=90.0)

    return run


@gloo
@pytest.mark.parametrize("islands", ["gloo=2", "gloo=1,host=2"])
@pytest.mark.parametrize(
    "call",
    [
        calls.reductions,
        calls.collectives,
        calls.single_tensors,
        calls.coalesced,
        calls.layouts,
        calls.messages,
        calls.objects,
        calls.works,
        calls.functional,
        calls.missing_rank,
        switched.groups,
        switched.groups_that_overlap,
    ],
    ids=lambda call: call.__name__,
)
def test_calls_under_the_switch(switch: Switched, islands: str, call: Callable[[], None]) -> None:
    switch(call, islands)


@gloo
@pytest.mark.parametrize("islands", ["gloo=4", "gloo=2,gloo=2"])
def test_meshes_under_the_switch(switch: Switched, islands: str) -> None:
    switch(switched.meshes, islands)


@gloo
@pytest.mark.parametrize(
    "kind", [training.ddp, training.fsdp2, training.hsdp, training.tensor_parallel], ids=lambda kind: kind.__name__
)
def test_trainings_under_the_switch(switch: Switched, kind: Callable[..., Any]) -> None:
    # torch refuses groups that only their members make under its switch: so no group of its own for FSDP2's reduce_scatter.
    arguments = [False] if kind is training.fsdp2 else []
    for parameters in switch(kind, "gloo=2,gloo=2", *arguments):
        for ours, theirs in zip(parameters, training.alone(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_options_and_devices_under_the_switch(switch: Switched) -> None:
    switch(
        switched.with_options,
        "host=2",
        backend="cpu:gloo,cuda:nccl",
        pg_options={"backend": "host", "hints": {"chunk_bytes": "4096"}},
    )
    switch(switched.of_polyccl, "host=2", backend="polyccl")


@gloo
def test_a_failure_under_the_switch_ends_cleanly(switch: Switched) -> None:
    assert switch(calls.aborted, "gloo=2,host=1") == ["Aborted"] * 3


@gloo
@ISLANDS
def test_a_script_with_the_switch_in_its_environment(job: str) -> None:
    code = """
import torch
from torch import distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(2)
dist.all_reduce(tensor)
assert tensor.tolist() == [2.0, 2.0]
comm = dist.group.WORLD.get_comm()
print(f"rank {dist.get_rank()} of 2 went well on {comm.get_backend()}")
dist.barrier()
dist.destroy_process_group()
"""
    environ = {**os.environ, "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "TORCH_FR_BUFFER_SIZE": "100"}
    command = ("-m", "polyccl", "launch", "--islands", job, "--", sys.executable, "-c", f"import {OURS} as t; t.install()\n{code}")
    went_well(finish(*command, env=environ), job)
