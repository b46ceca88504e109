"""The picture of `train_two_islands.py`: losses, bytes over the bridge, and a timeline of what the ranks did."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

INK, QUIET, BRIDGE_OUT, BRIDGE_IN = "#22303c", "#8a97a3", "#5b3fa3", "#b39be8"
ISLANDS = (("#0b6e8f", "#7cc3da"), ("#c2571a", "#f2b07e"), ("#3d7a2a", "#a8d294"), ("#a0305f", "#e79dbc"))
"""Of each island: a strong colour and a light one."""
SPANS = {"forward": "#dfe5ea", "backward": "#c3ccd4", "wait": "white", "optimizer": "#dfe5ea"}
LINE = 0.17
"""Height of one line of a rank's row, which is 1 high."""
PRE = 0
LOCAL, SEND, RECV = 0, 1, 2
"""Of `polyccl.TraceEvent`: the lane before the link, and the verbs."""


def draw(
    path: str,
    run: Any,
    reference: Any,
    islands: list[list[int]],
    labels: list[str],
    traffic: list[list[int]],
    bound: int,
    timelines: list[Any],
) -> None:
    """Write the picture. ``timelines`` has (events, spans) of each rank; ``traffic[i][j]`` the bytes from island i to island j."""
    size = sum(map(len, islands))
    plt.rcParams.update({"font.size": 9, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK})
    figure = plt.figure(figsize=(13, 4.6 + 1.15 * size), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[3.2, 1.4 + 1.15 * size])
    left, right = top.subplots(1, 2, width_ratios=[3, 2])
    draw_losses(left, run, reference, size)
    draw_bytes(right, labels, traffic, bound)
    draw_timeline(bottom.subplots(), islands, labels, timelines)
    figure.savefig(path, dpi=150)


def draw_losses(axes: Axes, run: Any, reference: Any, size: int) -> None:
    """Both losses by step: the second lies on the first."""
    steps = range(1, len(run.losses) + 1)
    axes.plot(steps, run.losses, color=ISLANDS[0][1], linewidth=5, label=f"{size} ranks over the bridge")
    axes.plot(steps, reference.losses, color=INK, linewidth=1.2, linestyle="--", label="one process, same batches")
    scale = "log" if max(run.losses) > 5 * min(run.losses) else "linear"
    axes.set(yscale=scale, xlabel="step", ylabel="loss")
    title(axes, f"The same training: {run.accuracy:.1%} of held-out images read right")
    axes.legend(frameon=False)
    tidy(axes)


def draw_bytes(axes: Axes, labels: list[str], traffic: list[list[int]], bound: int) -> None:
    """What each island sent and received, against the least that an all_reduce must carry."""
    count = len(labels)
    for index, label in enumerate(labels):
        sent, received = sum(traffic[index]), sum(row[index] for row in traffic)
        for offset, amount, colour, word in ((-0.2, sent, BRIDGE_OUT, "out"), (0.2, received, BRIDGE_IN, "in")):
            axes.barh(index + offset, amount / 1e6, height=0.34, color=colour)
            text = f" {word}: {amount / 1e6:,.1f} MB, {amount / bound:.4f} of the bound"
            axes.text(0, index + offset, text, va="center", color="white" if word == "out" else INK)
        axes.text(0, index - 0.43, f"island {label}", color=ISLANDS[index % len(ISLANDS)][0], va="bottom", weight="bold")
    axes.axvline(bound / 1e6, color=INK, linestyle="--", linewidth=1.2)
    axes.text(bound / 1e6, count - 0.45, "least possible ", ha="right", va="top", color=INK)
    axes.set(ylim=(count - 0.3, -0.6), yticks=[], xlabel="MB over the bridge, the whole training", xlim=(0, bound / 1e6 * 1.04))
    title(axes, "The bridge carries what it must, and no more")
    tidy(axes)


def draw_timeline(axes: Axes, islands: list[list[int]], labels: list[str], timelines: list[Any]) -> None:
    """For each rank five thin rows: compute, local legs before the bridge, messages out and in, local legs after it."""
    steps, first, last = quickest([spans for _, spans in timelines])
    clock = Clock(axes, first, (last - first) / 1e6)
    top, ticks = 0.0, {}
    for index, ranks in enumerate(islands):
        strong, light = ISLANDS[index % len(ISLANDS)]
        axes.axhspan(top, top + len(ranks) + 0.22, color=light, alpha=0.15, linewidth=0)
        axes.text(
            0.003,
            top + 0.13,
            f"island {labels[index]}",
            color=strong,
            weight="bold",
            va="center",
            transform=axes.get_yaxis_transform(),
        )
        for place, rank in enumerate(ranks):
            row = top + 0.26 + place
            events, spans = timelines[rank]
            own = [span[1:] for span in spans if span[0] in steps]
            begin, end = own[0][1], own[-1][2]
            draw_rank(clock, row, [event for event in events if begin <= event[-2] and event[-1] <= end], own, strong, light)
            ticks[f"rank {rank}"] = row + 0.42, strong
        top += len(ranks) + 0.36
    axes.set(ylim=(top - 0.14, 0), xlim=(-0.01 * clock.total, 1.1 * clock.total), xlabel="milliseconds")
    axes.set_yticks([at for at, _ in ticks.values()], list(ticks))
    for tick, (_, colour) in zip(axes.get_yticklabels(), ticks.values(), strict=True):
        tick.set_color(colour)
    title(
        axes,
        "Two steps: while one chunk crosses the bridge, the next is reduced inside the islands, and the one before is gathered",
    )
    legend(axes, len(islands))
    tidy(axes)


def quickest(spans: list[list[tuple[int, str, int, int]]]) -> tuple[range, int, int]:
    """Two steps in a row that took the least time over all ranks, so that other load on the machine shows least: begin and end."""
    known = [step for step, *_ in spans[0]]
    pairs = [range(step, step + 2) for step in range(known[0], max(known[0] + 1, known[-1]))]
    windows = []
    for steps in pairs:
        times = [time for rank in spans for step, _, *both in rank if step in steps for time in both]
        windows.append((max(times) - min(times), steps, min(times), max(times)))
    _, steps, first, last = min(windows, key=lambda window: window[0])
    return steps, first, last


class Clock:
    """Draws bars at nanoseconds of CLOCK_MONOTONIC, on an axis in milliseconds since ``first``."""

    def __init__(self, axes: Axes, first: int, total: float) -> None:
        self.axes, self.first, self.total = axes, first, total

    def bar(
        self, begin: int, end: int, row: float, line: int, colour: str, edge: str = "white", text: str = "", alpha: float = 1.0
    ) -> None:
        """A bar in one of the lines of a rank's row, with a text where there is room."""
        start, length = (begin - self.first) / 1e6, (end - begin) / 1e6
        y, height = row + line * LINE, 0.9 * LINE
        self.axes.barh(y, length, height, start, align="edge", color=colour, alpha=alpha, edgecolor=edge, linewidth=0.4)
        if length > 0.008 * self.total * len(text) > 0:
            self.axes.text(start + length / 2, y + 0.5 * LINE, text, ha="center", va="center", fontsize=6.5)


def draw_rank(clock: Clock, row: float, events: list[Any], spans: list[Any], strong: str, light: str) -> None:
    """One rank's lines."""
    for name, begin, end in spans:
        clock.bar(begin, end, row, 0, SPANS[name], QUIET, name)
    for _, _, lane, verb, _, _, _, begin, end in events:
        if verb == SEND:
            clock.bar(begin, end, row, 2, BRIDGE_OUT, alpha=0.65)
        elif verb == RECV:
            clock.bar(begin, end, row, 3, BRIDGE_IN, alpha=0.65)
        elif verb == LOCAL:
            clock.bar(begin, end, row, *((1, light) if lane == PRE else (4, strong)))
    for line, verb, word, colour in ((2, SEND, "out", BRIDGE_OUT), (3, RECV, "in", BRIDGE_IN)):
        amount = sum(event[6] for event in events if event[3] == verb) / 2**20
        clock.axes.text(
            1.01 * clock.total, row + (line + 0.5) * LINE, f"{amount:.2f} MiB {word}", va="center", color=colour, fontsize=8
        )


def legend(axes: Axes, islands: int) -> None:
    """What the colours mean."""
    colours = ISLANDS[: min(islands, len(ISLANDS))]
    patches: list[Any] = [Patch(facecolor=SPANS["backward"], edgecolor=QUIET, label="compute")]
    patches.append(tuple(Patch(facecolor=light) for _, light in colours))
    patches += [Patch(facecolor=BRIDGE_OUT, alpha=0.6), Patch(facecolor=BRIDGE_IN, alpha=0.6)]
    patches.append(tuple(Patch(facecolor=strong) for strong, _ in colours))
    names = ["compute", "inside an island, before the bridge", "over the bridge, out", "over the bridge, in", "inside, after it"]
    axes.legend(
        patches,
        names,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        ncols=5,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.07),
        frameon=False,
    )


def title(axes: Axes, text: str) -> None:
    """A title on the left."""
    axes.set_title(text, loc="left", weight="bold", color=INK)


def tidy(axes: Axes) -> None:
    """Take away what says nothing."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.tick_params(color=QUIET)


__all__ = ["draw"]
