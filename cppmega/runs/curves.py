"""The curves of runs in one picture: losses, gradient norm, throughput and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from cppmega.errors import CppmegaError
from cppmega.runs import metrics, plotting
from cppmega.runs.folder import Run
from cppmega.runs.metrics import HeldOutLoss, LoggedStep
from cppmega.runs.spikes import Spikes

Curve = dict[int, LoggedStep]
Points = list[tuple[int, float]]
_PANELS: Mapping[str, str] = {
    "loss": "loss, nats per token",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "peak_gib": "peak GPU memory, GiB",
}
"""Field of a logged step -> the title of its panel."""
_SPIKED = (_PANELS["loss"], _PANELS["grad_norm"])
_HEAD = "lm loss"
"""The head's name among the losses; `loss` is the same."""


class Drawn(NamedTuple):
    """One run in the picture."""

    label: str
    panels: dict[str, Points]
    """Title of a panel -> the points of this run, where it has any."""
    spikes: set[int]


def _drawn(run: Run, label: str) -> Drawn:
    steps = [step for _, step in sorted(curve(run).items())]
    panels: dict[str, Points] = {title: [] for title in _PANELS.values()}
    for step in steps:
        for name, title in _PANELS.items():
            if (value := getattr(step, name)) is not None:
                panels[title].append((step.step, value))
    for row in held_out(run):
        for name, loss in row.losses.items():
            panels.setdefault(f"held-out {name}", []).append((row.evaluated, loss))
    for step in steps:
        for name, loss in step.losses.items():
            if name != _HEAD:
                panels.setdefault(name, []).append((step.step, loss))
    seen = Spikes()
    spikes = {step.step for step in steps if seen.remark(step.loss, step.grad_norm)}
    return Drawn(label, {title: points for title, points in panels.items() if points}, spikes)


def curve(run: Run) -> Curve:
    """Step -> what was logged; of a repeated step, what was logged last."""
    return {row.step: row for row in run.steps()}


def held_out(run: Run) -> list[HeldOutLoss]:
    """The evaluations of a run, in the order of their steps."""
    return sorted(metrics.evaluations(run.logged), key=lambda row: row.evaluated)


def plot(runs: Sequence[Run], target: Path) -> None:
    """Draw the curves of runs, each panel over the steps; spikes are marked.

    A panel for which no run has values, such as the memory of runs on a CPU, is left out.

    Raises:
        CppmegaError: `nothing-to-do`, and those of `plotting`.
    """
    pyplot = plotting.pyplot()
    times = Counter(run.name for run in runs)
    labels = [run.name if times[run.name] == 1 else str(run.path) for run in runs]
    drawn = [_drawn(run, label) for label, run in zip(labels, runs, strict=True)]
    titles = dict.fromkeys([*_PANELS.values(), *(title for one in drawn for title in one.panels)])
    panels = [title for title in titles if any(title in one.panels for one in drawn)]
    if not panels:
        raise CppmegaError(
            "nothing-to-do",
            f"No step is logged by {', '.join(labels) or 'any run'}.",
            "The picture would be empty.",
            "wait for the first step (cppmega runs --watch), or name a run that has steps",
        )
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    figure, grid = pyplot.subplots(
        down, across, figsize=(5.5 * across, 0.5 + 3.5 * down), layout="constrained", squeeze=False
    )
    for axis, title in zip(grid.flat, panels, strict=False):
        _panel(axis, title, drawn)
    for axis in grid.flat[len(panels) :]:
        axis.axis("off")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center")
    plotting.write(figure, target)


def _panel(axis: Any, title: str, drawn: Sequence[Drawn]) -> None:
    for one, colour in zip(drawn, cycle(plotting.COLOURS), strict=False):
        points = dict(one.panels.get(title, []))
        marker = "o" if len(points) == 1 else ""  # a line needs two
        line = {"color": colour, "label": one.label, "linewidth": 1, "marker": marker}
        axis.plot([*points], [*points.values()], **line)
        if title in _SPIKED:
            spikes = [step for step in points if step in one.spikes]
            axis.plot(spikes, [points[step] for step in spikes], "v", color=colour, markersize=6)
    axis.set_xlabel("step")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
