"""The commands of the CPU smoke run: `train` on stock or on patched megatron-core, and `compare`.

The loop is cppmega's own, on megatron-core's model, indexed data, DDP and distributed
checkpointing, with a torch optimizer: Megatron's `pretrain` and its optimizer require CUDA.
`scripts/smoke.py` runs these commands.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec

from cppmega.recipe import Recipe

from . import records


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
@click.option("--seed", type=int, default=None, help="Of weights and data (default: the recipe's).")
@click.option("--stock", is_flag=True, help="Train on the pristine text of the installed tree.")
def train(out: Path, data: Path, steps: int | None, seed: int | None, stock: bool) -> None:
    """Train, write `curve.json` and a checkpoint; resumes from the checkpoint if there is one."""
    changed = recipe() if seed is None else recipe().with_(seed=seed)
    if not stock:
        run(changed, out, data, steps)
        return
    from cppmega.guard import files
    from cppmega.overlay.verbs import Session
    from cppmega.proof import scratch_tree

    with tempfile.TemporaryDirectory(prefix="cppmega-stock-") as folder:
        session = Session()
        scratch_tree.build(session.plan(None, os.environ), Path(folder), "stock")
        files.only_from(Path(folder))
        run(changed, out, data, steps, unguarded=True)


def recipe() -> Recipe:
    """Load the shipped recipe `smoke_cpu`."""
    from cppmega.recipe.index import load

    return load("smoke_cpu")


def run(plan: Recipe, out: Path, data: Path, steps: int | None, *, unguarded: bool = False) -> None:
    """Train the recipe, and write its curve and its summary."""
    from cppmega.checkpoints import tracker as checkpoint_tracker

    from . import loop as smoke_loop

    out.mkdir(parents=True, exist_ok=True)
    resumed = checkpoint_tracker.exists(out)
    total = steps or plan.train_iters
    loop = smoke_loop.Loop(
        data=data, steps=total, save=out, load=out if resumed else None, unguarded=unguarded
    )
    outcome = smoke_loop.run(plan, loop)
    earlier = records.read_curve(out)[: outcome.first] if outcome.first else []
    curve = [*earlier, *outcome.curve]
    (out / records.CURVE).write_bytes(msgspec.json.encode(curve))
    records.write(out / records.SUMMARY, summary(plan, data, curve, outcome.compile_helpers))


def summary(plan: Recipe, data: Path, curve: list[Any], compile_helpers: str) -> records.Summary:
    """Sum up the run of this process."""
    from cppmega import guard

    from . import corpus

    guarded = guard.active()
    return records.Summary(
        overlay=guarded.receipt.digest or records.STOCK if guarded else records.STOCK,
        seed=plan.seed,
        corpus=corpus.fingerprint(data),
        steps=len(curve),
        final_loss=curve[-1].loss,
        final_mtp_loss=curve[-1].mtp,
        mtp_labels=sum(point.labels for point in curve),
        wrong_mtp_labels=sum(point.wrong for point in curve),
        compile_helpers=compile_helpers or "fine",
    )


@cli.command()
@click.argument(
    "runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False)
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the output.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=Path("runs/smoke_data"),
    show_default=True,
    help="Folder of the indexed dataset that the runs were trained on.",
)
@click.option(
    "--packs", "count", type=int, default=40, show_default=True, help="Held-out packs to score on."
)
def compare(runs: tuple[Path, ...], out: Path, data: Path, count: int) -> None:
    """Score runs on the true MTP labels of held-out documents, and plot their curves.

    Runs with the same overlay and different seeds are drawn as one, with their spread.
    """
    from . import report

    report.compare(runs, out, data, recipe(), count)
