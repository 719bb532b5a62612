"""The CPU smoke run: a small GPT with MTP trains on stock and on patched megatron-core.

A loop of our own on megatron-core's model, indexed data, DDP and distributed checkpointing, with
a torch optimizer: Megatron's `pretrain` and its optimizer insist on CUDA. `scripts/smoke.py`
wraps it.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click

from cppmega.recipe import Recipe


@click.group()
def cli() -> None:
    """Train a small GPT with MTP on CPU, and compare stock with patched."""


@cli.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the run.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=Path("runs/smoke_data"),
    show_default=True,
    help="Folder of the indexed dataset; built there if it is missing.",
)
@click.option("--steps", type=int, default=None, help="Training steps (default: the recipe's).")
@click.option("--stock", is_flag=True, help="Train on the pristine text of the installed tree.")
def train(out: Path, data: Path, steps: int | None, stock: bool) -> None:
    """Train, write `curve.json` and a checkpoint; resumes from the checkpoint if there is one."""
    if not stock:
        run(out, data, steps)
        return
    from cppmega.overlay.verbs import Session
    from cppmega.proof import scratch_tree
    from cppmega.rank import imported

    with tempfile.TemporaryDirectory(prefix="cppmega-stock-") as folder:
        session = Session()
        scratch_tree.build(session.plan(None, os.environ), Path(folder), "stock")
        imported.only_from(Path(folder))
        run(out, data, steps)


def recipe() -> Recipe:
    """The shipped recipe `smoke_cpu`."""
    from cppmega.recipe.index import load

    return load("smoke_cpu")


def run(out: Path, data: Path, steps: int | None) -> None:
    """Train the recipe and keep what happened."""
    from cppmega import guard
    from cppmega.checkpoints import tracker as checkpoint_tracker
    from cppmega.smoke import loop as smoke_loop

    plan = recipe()
    total = steps or plan.train_iters
    out.mkdir(parents=True, exist_ok=True)
    resumed = checkpoint_tracker.exists(out)
    loop = smoke_loop.Loop(data=data, steps=total, save=out, load=out if resumed else None)
    outcome = smoke_loop.run(plan, loop)
    curve: list[dict[str, Any]] = []
    if outcome.first:
        curve = json.loads((out / "curve.json").read_text())[: outcome.first]
    curve += [{"step": step, **row} for step, row in enumerate(outcome.rows, start=outcome.first)]
    (out / "curve.json").write_text(json.dumps(curve))
    guarded = guard.active()
    summary = {
        "overlay": guarded.receipt.digest if guarded else "stock",
        "steps": len(curve),
        "final_loss": curve[-1]["loss"],
        "final_mtp_loss": curve[-1]["mtp"],
        "mtp_labels": sum(row["labels"] for row in curve),
        "wrong_mtp_labels": sum(row["wrong"] for row in curve),
        "compile_helpers": outcome.compile_helpers or "fine",
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


@cli.command()
@click.argument("runs", nargs=2, type=click.Path(path_type=Path, exists=True))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the answer.")
@click.option("--data", type=click.Path(path_type=Path), default=Path("runs/smoke_data"))
@click.option("--packs", "count", type=int, default=40, help="Held-out packs to score on.")
def compare(runs: tuple[Path, Path], out: Path, data: Path, count: int) -> None:
    """Score two runs on the true MTP labels of held-out documents, and plot both curves."""
    from cppmega.smoke import report as smoke_report

    smoke_report.compare(runs, out, data, recipe(), count)
