"""Train a small network on two islands at once, and check it against one process that never communicates.

    python examples/train_two_islands.py
    python examples/train_two_islands.py --islands gloo=3,host=1 --interleave --epochs 4

Started plainly, this program starts itself again as the ranks of two islands on this machine: ranks 0 and 1 share the library
Gloo, ranks 2 and 3 Intel's oneCCL where that has been fetched (backends/xccl), else PolyCCL's own link, and a bridge makes one
communicator of them. Started by a launcher (torchrun, `polyccl launch`), it is one rank. Every rank sees its part of each batch
of handwritten digits; the ranks average their gradients.

Afterwards it checks that (a) all ranks hold the same parameters, bit for bit, (b) one process gets the same model from the same
batches, up to rounding, and (c) no more bytes crossed the bridge than an all_reduce over two islands must send. The exit status is
0 if all of it holds. A picture shows the losses, the bytes, and what the ranks did during two steps.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import polyccl
from polyccl import Comm, ReduceOp, objects
from polyccl.cli.launch import launch, parse_islands
from polyccl.create import find_library

SEED = 11
HELD_OUT = 360
TERMINAL = "TRAIN_TWO_ISLANDS_TERMINAL"
"""Names the terminal for rank 0's progress bar; its own output passes through the launcher, line by line."""


# ---- the data and the model ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digits:
    """Images of shape (n, 1, 8, 8), float32 in [0, 1], and the digits that they show, shape (n,), int64."""

    images: Tensor
    labels: Tensor

    def __getitem__(self, index: Tensor | slice) -> Digits:
        return Digits(self.images[index], self.labels[index])

    def __len__(self) -> int:
        return len(self.labels)


def load() -> tuple[Digits, Digits]:
    """1797 handwritten digits that scikit-learn ships, to learn from and to test with."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().reshape(-1, 1, 8, 8) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    digits = Digits(images, torch.from_numpy(bunch.target).long())[order]
    return digits[slice(HELD_OUT, None)], digits[slice(HELD_OUT)]


def make_model() -> nn.Sequential:
    """A convolutional network of 620 thousand parameters: 2.5 MB of gradients in each step.

    It is smooth (no kinks as in ReLU), so that the rounding of sums in another order stays as small as it is, and (b) says much.
    """
    body = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.Tanh()),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.Tanh(), nn.Flatten()),
    )
    head = nn.Sequential(nn.Linear(128 * 4 * 4, 256), nn.Tanh(), nn.Linear(256, 10))
    return nn.Sequential(body, head)


# ---- data parallelism ----------------------------------------------------------------------------------------------------------


class Bucket:
    """The gradients of some layers, in one flat tensor that is averaged over all ranks as soon as backward has filled it."""

    def __init__(self, layers: nn.Module, comm: Comm | None) -> None:
        self._comm = comm
        self._parameters = list(layers.parameters())
        sizes = [parameter.numel() for parameter in self._parameters]
        self._gradients = torch.zeros(sum(sizes))
        for parameter, part in zip(self._parameters, self._gradients.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._on_gradient) for parameter in self._parameters]
        self.clear()

    @property
    def bytes(self) -> int:
        """Size of the gradients."""
        return self._gradients.nbytes

    def clear(self) -> None:
        """Make ready for the next backward."""
        self._gradients.zero_()
        self._missing = len(self._parameters)

    def _on_gradient(self, _: Tensor) -> None:
        self._missing -= 1
        if self._missing == 0 and self._comm is not None:  # the rest of backward goes on meanwhile
            self._work = self._comm.all_reduce(self._gradients, ReduceOp.AVG, async_op=True)

    def wait(self) -> None:
        """Block until the average is there."""
        if self._comm is not None:
            self._work.wait()

    def close(self) -> None:
        """Leave the layers alone again."""
        for hook in self._hooks:
            hook.remove()


@dataclass
class Run:
    """What a training gives."""

    parameters: Tensor
    losses: list[float]
    """Mean over the global batch, for each step."""
    accuracy: float = 0.0
    gradient_bytes: int = 0
    """Per step: what one all_reduce has to carry."""
    events: list[tuple[int, ...]] = field(default_factory=list)
    spans: list[tuple[int, str, int, int]] = field(default_factory=list)
    """Of an epoch: what the communicator traced, and (step, what, begin, end) of this rank's own work, in nanoseconds."""


Report = Callable[[int, int, float, float], None]
"""Takes step, steps, loss and accuracy."""


def train(model: nn.Sequential, batch: int, steps: int, comm: Comm | None = None, report: Report | None = None) -> Run:
    """Train with batches of ``batch`` images over all ranks; every rank of ``comm`` takes its part of each."""
    rank, size = (comm.get_rank(), comm.get_size()) if comm else (0, 1)
    digits, held_out = load()
    shuffle = torch.Generator().manual_seed(SEED)
    buckets = [Bucket(layers, comm) for layers in reversed(model)]  # in the order in which backward fills them
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = Run(torch.empty(0), [], gradient_bytes=sum(bucket.bytes for bucket in buckets))
    per_epoch = len(digits) // batch
    traced = range((steps - 1) // per_epoch // 2 * per_epoch, steps)[:per_epoch]  # an epoch in the middle
    own_losses: list[float] = []

    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(len(digits), generator=shuffle)  # the same on all ranks
        if comm:
            comm.trace(step in traced)
        start = step % per_epoch * batch + rank * (batch // size)
        part = digits[order[start : start + batch // size]]
        times = [time.monotonic_ns()]
        loss = cross_entropy(model(part.images), part.labels)
        times.append(time.monotonic_ns())
        loss.backward()
        times.append(time.monotonic_ns())
        for bucket in buckets:
            bucket.wait()
        times.append(time.monotonic_ns())
        optimizer.step()
        times.append(time.monotonic_ns())
        for bucket in buckets:
            bucket.clear()
        own_losses.append(loss.item())
        if step in traced:
            names = ("forward", "backward", "wait", "optimizer")
            run.spans += [(step, *span) for span in zip(names, times, times[1:], strict=False)]
        if (step + 1) % per_epoch == 0 or step + 1 == steps:
            run.losses += average(own_losses, comm)
            own_losses.clear()
            run.accuracy = accuracy(model, held_out)
        if report:
            report(step + 1, steps, run.losses[-1] if run.losses else loss.item(), run.accuracy)

    for bucket in buckets:
        bucket.close()
    run.parameters = parameters_to_vector(model.parameters()).detach()
    if comm:
        run.events = [tuple(int(-1 if value is None else value) for value in event) for event in comm.take_trace()]
    return run


def average(values: list[float], comm: Comm | None) -> list[float]:
    """Each value's mean over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if comm:
        comm.all_reduce(tensor, ReduceOp.AVG)
    return tensor.tolist()


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of images that the model reads right."""
    return (model(digits.images).argmax(1) == digits.labels).float().mean().item()


# ---- one rank of the job -------------------------------------------------------------------------------------------------------


def bytes_between_islands(comm: Comm) -> Tensor:
    """Payload that island i has sent to island j over the bridge so far, shape (islands, islands)."""
    islands = comm.islands
    home = next(i for i, ranks in enumerate(islands) if comm.get_rank() in ranks)
    sent = comm.payload_sent()
    traffic = torch.zeros(len(islands), len(islands), dtype=torch.int64)
    for other, ranks in enumerate(islands):
        traffic[home, other] = sum(sent[rank] for rank in ranks)
    comm.all_reduce(traffic)
    return traffic


def same_everywhere(comm: Comm, tensor: Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    digest = hashlib.sha256(tensor.numpy().tobytes()).digest()
    all_digests = torch.empty(comm.get_size() * len(digest), dtype=torch.uint8)
    comm.all_gather_single(all_digests, torch.tensor(list(digest), dtype=torch.uint8))
    return bool((all_digests.reshape(comm.get_size(), -1) == all_digests[: len(digest)]).all())


def run_rank(options: argparse.Namespace) -> int:
    """Train and check as one rank; the exit status. Rank 0 also trains alone, and draws."""
    comm = polyccl.new_comm("bridge", "cpu", name="training", timeout=120)
    rank, size, islands = comm.get_rank(), comm.get_size(), comm.islands
    images = len(load()[0])
    batch = max(1, min(options.batch, images) // size) * size
    steps = options.steps or options.epochs * (images // batch)

    torch.manual_seed(SEED + rank)  # ranks begin unlike, and take rank 0's parameters
    model = make_model()
    begin = parameters_to_vector(model.parameters()).detach()
    comm.broadcast(begin, root=0)
    vector_to_parameters(begin.clone(), model.parameters())

    before = bytes_between_islands(comm)
    with Display(rank, images // batch) as display:
        run = train(model, batch, steps, comm, display.report)
    traffic = bytes_between_islands(comm) - before
    equal = same_everywhere(comm, run.parameters)
    timelines: list[object] = [None] * size
    objects.gather_object(comm, (run.events, run.spans), 0, timelines if rank == 0 else None)
    labels = comm.island_labels
    comm.finalize()
    if rank != 0:
        return 0 if equal else 1

    print(f"{steps} steps of {batch} images on {size} ranks are done; now the same in one process", flush=True)
    alone = make_model()
    vector_to_parameters(begin.clone(), alone.parameters())
    reference = train(alone, batch, steps)

    moved = (reference.parameters - begin).norm().item()
    apart = (run.parameters - reference.parameters).norm().item() / moved
    bound = 2 * (len(islands) - 1) * run.gradient_bytes // len(islands) * steps  # for two islands: what there is, each way
    most = max(int(traffic.sum(0).max()), int(traffic.sum(1).max()))
    checks = {
        f"all {size} ranks hold the same parameters, bit for bit": equal,
        f"one process gets the same parameters: they differ by {apart:.1e} of the way that training moved them": apart < 1e-4,
        f"the bridge carried {most / bound:.4f} times the bytes that it must": most <= 1.02 * bound,
    }
    for text, holds in checks.items():
        print(f"{'ok    ' if holds else 'FAILED'} {text}")
    for i, j in ((i, j) for i in range(len(islands)) for j in range(len(islands)) if i != j):
        print(f"       {labels[i]} -> {labels[j]}: {traffic[i, j]:,} bytes")
    print(f"       least possible out of, and into, each island: {bound:,} bytes")
    print(f"       {run.accuracy:.1%} of {HELD_OUT} held-out images are read right ({reference.accuracy:.1%} by the one process)")

    from two_islands_figure import draw

    draw(options.out, run, reference, islands, labels, traffic.tolist(), bound, timelines)
    print(f"picture: {Path(options.out).resolve()}", flush=True)
    return 0 if all(checks.values()) else 1


class Display:
    """Rank 0's progress: a bar where there is a terminal, else a line for each epoch. Other ranks are quiet."""

    def __init__(self, rank: int, per_epoch: int) -> None:
        self._quiet = rank != 0
        self._per_epoch = per_epoch
        self._progress: Progress | None = None
        terminal = os.environ.get(TERMINAL)
        if terminal and not self._quiet:
            columns = TextColumn("epoch {task.fields[epoch]}"), BarColumn(), MofNCompleteColumn()
            results = TextColumn("loss {task.fields[loss]:.3f}  accuracy {task.fields[accuracy]:.1%}"), TimeElapsedColumn()
            self._file = open(terminal, "w", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
            self._progress = Progress(*columns, *results, console=Console(file=self._file, force_terminal=True))

    def __enter__(self) -> Display:
        if self._progress:
            self._progress.start()
            self._task = self._progress.add_task("", epoch=1, loss=float("nan"), accuracy=0.0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()
            self._file.close()

    def report(self, step: int, steps: int, loss: float, accuracy: float) -> None:
        """Show where training is."""
        epoch = (step - 1) // self._per_epoch + 1
        if self._progress:
            self._progress.update(self._task, completed=step, total=steps, epoch=epoch, loss=loss, accuracy=accuracy)
        elif not self._quiet and (step % self._per_epoch == 0 or step == steps):
            print(f"epoch {epoch:2}  step {step:3} of {steps}  loss {loss:.4f}  accuracy {accuracy:.1%}", flush=True)


# ---- the start -----------------------------------------------------------------------------------------------------------------


def default_islands() -> str:
    """Two islands of two ranks, each on a vendor's library where there is one: oneCCL where it has been fetched, and Gloo."""
    found = [name for name in ("gloo", "xccl") if is_there(name)]
    first, second = [*found, "host", "host"][:2]
    words = {"gloo": "Gloo", "xccl": "Intel's oneCCL", "host": "PolyCCL's own link"}
    print(f"two islands, on {words[first]} and {words[second]}")
    return f"{first}=2,{second}=2"


def is_there(backend: str) -> bool:
    """Whether a backend is part of this installation, and its library opens; prints why not."""
    try:
        library = find_library(backend)
        print(f"{backend}: {library.version}")
    except polyccl.BackendUnavailable as error:
        print(f"no {backend}: {error}")
        return False
    return True


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--islands", metavar="LIST", help="e.g. gloo=2,xccl=2 or host=3,host=1; by default what is there")
    parser.add_argument("--interleave", action="store_true", help="deal the ranks round the islands")
    parser.add_argument("--epochs", type=int, default=8, help="how often to see all images")
    parser.add_argument("--steps", type=int, help="how many batches to see, instead of --epochs")
    parser.add_argument("--batch", type=int, default=128, help="images in a step, over all ranks")
    parser.add_argument("--out", default="train_two_islands.png", help="the picture to write")
    options = parser.parse_args()
    if "RANK" in os.environ:
        return run_rank(options)
    islands = options.islands or default_islands()
    print(f"islands: {islands}{', interleaved' if options.interleave else ''}", flush=True)
    if sys.stdout.isatty():
        os.environ[TERMINAL] = os.ttyname(sys.stdout.fileno())
    try:
        parsed = parse_islands(islands)
    except ValueError as error:
        parser.error(f"--islands: {error}")
    if len(parsed) < 2:
        parser.error("--islands: a bridge needs two islands or more")
    return launch(parsed, [sys.executable, *sys.argv], options.interleave)


if __name__ == "__main__":
    sys.exit(main())
