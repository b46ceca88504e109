"""The examples run over two islands, and say that they went well."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


LAUNCH = [sys.executable, "-m", "polyccl", "launch", "--islands"]
ISLANDS = [*LAUNCH, "gloo=2,host=2", "--", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


def output(*command: str) -> str:
    """What the command prints, when all is well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.backend("gloo")
@pytest.mark.parametrize(
    ("name", "words"), [("ddp", "the same parameters"), ("hsdp", "dimension 'bridge': 2 ranks on bridge")], ids=["ddp", "hsdp"]
)
def test_example(name: str, words: str) -> None:
    assert words in output(*ISLANDS, str(EXAMPLES / f"{name}.py"))


@pytest.mark.only_in_full
@pytest.mark.usefixtures("oneccl")
@pytest.mark.backend("xccl")
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "hsdp"])
def test_example_over_two_vendors_libraries(name: str) -> None:
    output(*LAUNCH, "gloo=2,xccl=2", "--", sys.executable, str(EXAMPLES / f"{name}.py"))


@pytest.mark.backend("gloo")
def test_a_script_for_plain_torch_runs_over_a_bridge_with_another_backends_name() -> None:
    def losses(text: str) -> list[float]:
        return [float(number) for number in re.findall(r"loss ([\d.]+) to ([\d.]+)", text)[0]]

    script = str(EXAMPLES / "fsdp2.py")
    assert "polyccl" not in "".join(line for line in Path(script).read_text().splitlines() if "import" in line)
    bridge, plain = output(*ISLANDS, script, "polyccl"), output(*TORCHRUN, script, "gloo")
    assert losses(bridge) == pytest.approx(losses(plain), abs=2e-4)
