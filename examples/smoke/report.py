"""Compare smoke runs: scores on the true labels, curves, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from cppmega.proof import cpu_shims
from cppmega.recipe import Recipe

from . import checkpoint as smoke_checkpoint
from . import model as smoke_model
from . import packs as smoke_packs
from . import records

_COLOURS = ("#c44e52", "#4c72b0", "#55a868", "#8172b3")


@dataclass(frozen=True, slots=True)
class Scored:
    """A run with its score and its curve."""

    name: str
    summary: records.Summary
    mtp: list[float]
    """MTP loss of each step, on the labels that the run was trained on."""


def compare(runs: Sequence[Path], out: Path, data: Path, recipe: Recipe, count: int) -> None:
    """Write `comparison.json` and `curves.png`, and print the numbers."""
    torch.set_num_threads(1)  # the matrices are too small to share
    cpu_shims.init_distributed()
    scored = [_scored(run, data, recipe, count) for run in runs]
    out.mkdir(parents=True, exist_ok=True)
    records.write(out / "comparison.json", {run.name: run.summary for run in scored})
    plot(by_overlay(scored), out / "curves.png")
    for run in scored:
        wrong, labels = run.summary.wrong_mtp_labels, run.summary.mtp_labels
        losses = ", ".join(f"{loss:.3f}" for loss in run.summary.true_mtp_loss)
        print(
            f"{run.name}: {wrong} of {labels} MTP labels wrong ({100 * wrong / labels:.1f} %); "
            f"held-out MTP loss on the true labels, by depth: {losses}"
        )
    print(f"curves: {out / 'curves.png'}")


def _scored(run: Path, data: Path, recipe: Recipe, count: int) -> Scored:
    summary = msgspec.structs.replace(
        records.read_summary(run), true_mtp_loss=tuple(score(run, data, recipe, count))
    )
    return Scored(run.name, summary, [point.mtp or 0.0 for point in records.read_curve(run)])


def by_overlay(scored: Sequence[Scored]) -> dict[str, list[Scored]]:
    """Group the runs that differ only in their seed."""
    groups: dict[str, list[Scored]] = {}
    for run in scored:
        side = "stock" if run.summary.is_stock else f"overlay {run.summary.overlay}"
        groups.setdefault(side, []).append(run)
    return groups


def score(run: Path, data: Path, recipe: Recipe, count: int) -> list[float]:
    """Mean MTP loss per depth on the true labels of held-out packs, in nats.

    All runs are scored by the same code and on the same packs, with inputs and labels shifted
    document by document.
    """
    model, _, optimizer = smoke_model.with_optimizer(recipe)
    smoke_checkpoint.load(run, model, optimizer)
    model.eval()
    packs = smoke_packs.packs(data / "held_out", recipe, recipe.seed)
    heads: list[torch.Tensor] = []
    # A copy: Megatron's cross entropy turns the logits into probabilities in place.
    hook = model.output_layer.register_forward_hook(lambda *a: heads.append(a[2][0].clone()))
    total = torch.zeros(recipe.mtp_num_layers, dtype=torch.float64)
    tokens = torch.zeros(recipe.mtp_num_layers, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(count):
            pack = next(packs)
            heads.clear()
            smoke_packs.loss_per_token(model, pack)
            # The MTP depths come first, the main head last.
            for depth, logits in enumerate(heads[: recipe.mtp_num_layers], start=1):
                labels, mask = smoke_packs.true_labels(pack, depth)
                per_token = torch.nn.functional.cross_entropy(
                    logits[:, 0].float(), labels[0], reduction="none"
                )
                total[depth - 1] += (per_token * mask[0]).sum()
                tokens[depth - 1] += mask.sum()
    hook.remove()
    return [float(value) for value in total / tokens]


def plot(groups: dict[str, list[Scored]], target: Path) -> None:
    """Draw the MTP loss over the steps as each run saw it, and the scores of each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 4), width_ratios=(2, 1), layout="constrained"
    )
    for (side, runs), colour in zip(groups.items(), _COLOURS, strict=False):
        _curves(left, side, runs, colour)
    left.set_xlabel("step")
    left.set_ylabel("MTP loss on the labels trained on, nats")
    left.legend()
    for at, (runs, colour) in enumerate(zip(groups.values(), _COLOURS, strict=False)):
        _scores(right, (at - (len(groups) - 1) / 2) * 0.35, runs, colour)
    right.set_xticks(range(1, 1 + len(next(iter(groups.values()))[0].summary.true_mtp_loss)))
    right.margins(y=0.1)
    right.set_xlabel("MTP depth (dots: seeds)")
    right.set_title("held-out loss on the true labels, nats", fontsize=10)
    figure.savefig(target, dpi=120)


def _curves(axes: Any, side: str, runs: list[Scored], colour: str) -> None:
    """One line for each seed, the side named once."""
    for number, run in enumerate(runs):
        steps = range(1, 1 + len(run.mtp))
        label = side if number == 0 else None
        axes.plot(steps, _smooth(run.mtp), color=colour, alpha=0.8, linewidth=1, label=label)


def _scores(axes: Any, offset: float, runs: list[Scored], colour: str) -> None:
    """A bar for the mean of each depth, with a dot for each seed."""
    for depth, losses in enumerate(zip(*(run.summary.true_mtp_loss for run in runs), strict=True)):
        place = 1 + depth + offset
        bars = axes.bar([place], [sum(losses) / len(losses)], 0.33, color=colour)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=4)
        axes.plot([place] * len(losses), losses, ".", color="black", markersize=4)


def _smooth(values: list[float], width: int = 10) -> list[float]:
    """The mean of each value and those before it."""
    windows = [values[max(0, at - width + 1) : at + 1] for at in range(len(values))]
    return [sum(window) / len(window) for window in windows]
