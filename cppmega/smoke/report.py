"""Two smoke runs side by side: scores on the true labels, curves, a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from cppmega.proof import cpu_shims
from cppmega.recipe import Recipe
from cppmega.smoke import checkpoint as smoke_state
from cppmega.smoke import loop as smoke_loop
from cppmega.smoke import model as smoke_model
from cppmega.smoke import packs as smoke_data


def compare(runs: tuple[Path, Path], out: Path, data: Path, recipe: Recipe, count: int) -> None:
    """Write `comparison.json` and `curves.png`, and print the numbers."""
    torch.set_num_threads(1)  # the matrices are too small to share
    cpu_shims.init_distributed()
    rows = {}
    for run in runs:
        summary = json.loads((run / "summary.json").read_text())
        summary["true_mtp_loss"] = score(run, data, recipe, count)
        rows[run.name] = summary
    out.mkdir(parents=True, exist_ok=True)
    (out / "comparison.json").write_text(json.dumps(rows, indent=1) + "\n")
    plot(runs, rows, out / "curves.png")
    for name, row in rows.items():
        share = 100 * row["wrong_mtp_labels"] / row["mtp_labels"]
        losses = ", ".join(f"{loss:.3f}" for loss in row["true_mtp_loss"])
        print(
            f"{name}: {row['wrong_mtp_labels']} of {row['mtp_labels']} MTP labels wrong"
            f" ({share:.1f} %); MTP loss on the true labels, by depth: {losses}"
        )
    print(f"curves: {out / 'curves.png'}")


def score(run: Path, data: Path, recipe: Recipe, count: int) -> list[float]:
    """Mean MTP loss per depth on the true labels of held-out packs, in nats.

    Both runs are scored by the same code, with inputs and labels shifted document by document.
    """
    model, _, optimizer = smoke_model.with_optimizer(recipe)
    smoke_state.load(run, model, optimizer)
    model.eval()
    packs = smoke_data.packs(data / "held_out", recipe, smoke_loop.SEED)
    heads: list[torch.Tensor] = []
    # A copy: Megatron's cross entropy turns the logits into probabilities in place.
    hook = model.output_layer.register_forward_hook(lambda *a: heads.append(a[2][0].clone()))
    total = torch.zeros(recipe.mtp_num_layers, dtype=torch.float64)
    tokens = torch.zeros(recipe.mtp_num_layers, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(count):
            pack = next(packs)
            heads.clear()
            pack.through(model)
            # The MTP depths come first, the main head last.
            for depth, logits in enumerate(heads[: recipe.mtp_num_layers], start=1):
                labels, mask = pack.true_labels(depth)
                per_token = torch.nn.functional.cross_entropy(
                    logits[:, 0].float(), labels[0], reduction="none"
                )
                total[depth - 1] += (per_token * mask[0]).sum()
                tokens[depth - 1] += mask.sum()
    hook.remove()
    return [float(value) for value in total / tokens]


def plot(runs: tuple[Path, Path], rows: dict[str, Any], target: Path) -> None:
    """MTP loss of both runs over the steps, as each run saw it, and the scores."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 4), width_ratios=(2, 1), layout="constrained"
    )
    for run, colour in zip(runs, ("#c44e52", "#4c72b0"), strict=True):
        curve = json.loads((run / "curve.json").read_text())
        steps = [row["step"] for row in curve]
        left.plot(steps, _smooth([row["mtp"] for row in curve]), color=colour, label=run.name)
        left.plot(
            steps, _smooth([row["loss"] for row in curve]), color=colour, alpha=0.35, linestyle="--"
        )
    left.set_xlabel("step")
    left.set_ylabel("loss, nats (solid: MTP as trained, dashed: main head)")
    left.legend()
    depths = range(1, 1 + len(next(iter(rows.values()))["true_mtp_loss"]))
    for at, (run, colour) in enumerate(zip(runs, ("#c44e52", "#4c72b0"), strict=True)):
        places = [depth + (at - 0.5) * 0.35 for depth in depths]
        bars = right.bar(places, rows[run.name]["true_mtp_loss"], 0.35, color=colour)
        right.bar_label(bars, fmt="%.2f", fontsize=8)
    right.set_xticks(list(depths))
    right.set_xlabel("MTP depth")
    right.set_title("held-out loss on the true labels", fontsize=10)
    figure.savefig(target, dpi=120)


def _smooth(values: list[float], width: int = 10) -> list[float]:
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / len(values[max(0, i - width + 1) : i + 1])
        for i in range(len(values))
    ]
