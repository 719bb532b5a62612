"""The CPU smoke run: a small GPT with MTP trains on stock and on patched megatron-core.

A loop of our own on megatron-core's model, indexed data, DDP and distributed checkpointing, with
a torch optimizer: Megatron's `pretrain` and its optimizer insist on CUDA. `scripts/smoke.py`
wraps it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from cppmega.recipe import Recipe

SEED = 1234


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
    from cppmega import imported, verify
    from cppmega.overlay import Session

    with tempfile.TemporaryDirectory(prefix="cppmega-stock-") as folder:
        session = Session()
        verify.build(session.plan(None, os.environ), Path(folder), "stock")
        imported.only_from(Path(folder))
        run(out, data, steps)


def recipe() -> Recipe:
    """The shipped recipe `smoke_cpu`."""
    from cppmega.recipes_index import load

    return load("smoke_cpu")


def run(out: Path, data: Path, steps: int | None) -> None:
    """Train the recipe and keep what happened."""
    import torch

    from cppmega import cpu, guard, smoke_data

    torch.set_num_threads(1)  # the matrices are too small to share
    torch.manual_seed(SEED)
    cpu.init_distributed()
    plan = recipe()
    total = steps or plan.train_iters
    stock_ends = _compile_helpers()
    out.mkdir(parents=True, exist_ok=True)
    smoke_data.build(data)
    model, ddp, optimizer = build(plan)
    first = load(out, model, optimizer)
    curve: list[dict[str, Any]] = json.loads((out / "curve.json").read_text()) if first else []
    packs = smoke_data.packs(data / "train", plan, SEED)
    for _ in range(first):
        next(packs)
    started = time.monotonic()
    args = SimpleNamespace(**_arguments(plan))
    for step in guard.steps(range(first, total), args):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * min(1.0, (step + 1) / plan.lr_warmup_iters)
        pack = next(packs)
        row = _step(plan, model, ddp, optimizer, pack)
        curve.append({"step": step, **row})
        if step == first:
            _check_first_loss(row["loss"], plan, first)
        if (step + 1) % 20 == 0 or step + 1 == total:
            speed = (step + 1 - first) / (time.monotonic() - started)
            line = f"step {step + 1}/{total}  loss {row['loss']:.3f}  mtp {row['mtp']:.3f}"
            print(f"{line}  wrong MTP labels {row['wrong']}  {speed:.1f} steps/s", flush=True)
    _save(out, model, optimizer, total)
    (out / "curve.json").write_text(json.dumps(curve))
    guarded = guard.active()
    summary = {
        "overlay": guarded.receipt.digest if guarded else "stock",
        "steps": total,
        "final_loss": curve[-1]["loss"],
        "final_mtp_loss": curve[-1]["mtp"],
        "mtp_labels": sum(row["labels"] for row in curve),
        "wrong_mtp_labels": sum(row["wrong"] for row in curve),
        "compile_helpers": stock_ends or "fine",
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def _arguments(plan: Recipe) -> dict[str, Any]:
    """What the pages are asked about: Megatron's names."""
    return {
        "mtp_num_layers": plan.mtp_num_layers,
        "context_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "bf16": False,
        "fp16": False,
        "position_embedding_type": "learned_absolute",
        "cross_entropy_loss_fusion": False,
    }


def _compile_helpers() -> str:
    """What Megatron's trainer calls first. Stock ends the process here; we note it and go on."""
    from megatron.core.datasets.utils import compile_helpers

    try:
        compile_helpers()
    except SystemExit as error:
        print(f"stock: compile_helpers ended with exit status {error.code}; a real run stops here")
        return f"exit {error.code}"
    return ""


def build(plan: Recipe) -> tuple[Any, Any, Any]:
    """The model, DDP around it, and the optimizer."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from cppmega import smoke_model

    model = smoke_model.build(plan)
    ddp = DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(overlap_grad_reduce=False),
        module=model,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=plan.weight_decay
    )
    return model, ddp, optimizer


def _step(plan: Recipe, model: Any, ddp: Any, optimizer: Any, pack: Any) -> dict[str, Any]:
    """Forward, backward, update; the losses as Megatron sees them, and its wrong MTP labels."""
    import torch
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    ddp.zero_grad_buffer()
    MTPLossLoggingHelper.tracker.clear()
    per_token = ddp(
        pack.tokens,
        pack.position_ids,
        None,
        labels=pack.labels,
        loss_mask=pack.loss_mask,
        packed_seq_params=pack.params(),
    )
    loss = (per_token * pack.loss_mask).sum() / pack.loss_mask.sum()
    loss.backward()
    ddp.finish_grad_sync()
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not math.isfinite(loss.item()) or not math.isfinite(norm.item()):
        sys.exit(f"loss {loss.item()} or gradient norm {norm.item()} is not finite")
    optimizer.step()
    # DDP adds what it finds in `grad` to `main_grad`: they must not stay one tensor.
    optimizer.zero_grad(set_to_none=True)
    tracker = MTPLossLoggingHelper.tracker
    mtp = tracker.get("loss_values", tracker.get("values"))  # renamed in 0.19
    wrong, labels = _wrong_labels(plan, pack)
    return {
        "loss": loss.item(),
        "mtp": float(mtp.mean()) if mtp is not None else math.nan,
        "grad_norm": norm.item(),
        "wrong": wrong,
        "labels": labels,
    }


def _wrong_labels(plan: Recipe, pack: Any) -> tuple[int, int]:
    """MTP labels that Megatron trains on, against the truth: (wrong or missing, all true ones)."""
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    labels, mask, wrong, true = pack.labels, pack.loss_mask, 0, 0
    for depth in range(1, plan.mtp_num_layers + 1):
        labels, _ = roll_tensor(labels, -1, -1, None, pack.params())
        mask, _ = roll_tensor(mask, -1, -1, None, pack.params())
        true_labels, true_mask = pack.true_labels(depth)
        differs = (mask != true_mask) | ((labels != true_labels) & (true_mask > 0))
        wrong += int(differs.sum())
        true += int(true_mask.sum())
    return wrong, true


def _check_first_loss(loss: float, plan: Recipe, resumed_at: int) -> None:
    expected = math.log(plan.vocab_size)
    if not resumed_at and abs(loss - expected) > 1:
        sys.exit(f"the first loss is {loss:.2f}, a fresh model has ln V = {expected:.2f}")


def _state(model: Any, optimizer: Any, step: int) -> dict[str, Any]:
    return {
        "model": model.sharded_state_dict(prefix="model."),
        "optimizer": optimizer.state_dict(),
        "step": step,
    }


def _save(out: Path, model: Any, optimizer: Any, step: int) -> None:
    from megatron.core import dist_checkpointing

    place = out / f"checkpoint-{step}"
    place.mkdir()
    dist_checkpointing.save(_state(model, optimizer, step), str(place))
    (out / "latest").write_text(str(step))


def load(out: Path, model: Any, optimizer: Any) -> int:
    """Load the newest checkpoint of the folder; the step to go on at, 0 for a fresh run."""
    from megatron.core import dist_checkpointing

    latest = out / "latest"
    if not latest.exists():
        return 0
    step = int(latest.read_text())
    template = {"model": model.sharded_state_dict(prefix="model."), "step": 0}
    state = dist_checkpointing.load(template, str(out / f"checkpoint-{step}"))
    model.load_state_dict({k.removeprefix("model."): v for k, v in state["model"].items()})
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


@cli.command()
@click.argument("runs", nargs=2, type=click.Path(path_type=Path, exists=True))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the answer.")
@click.option("--data", type=click.Path(path_type=Path), default=Path("runs/smoke_data"))
@click.option("--packs", "count", type=int, default=40, help="Held-out packs to score on.")
def compare(runs: tuple[Path, Path], out: Path, data: Path, count: int) -> None:
    """Score two runs on the true MTP labels of held-out documents, and plot both curves."""
    from cppmega import smoke_report

    smoke_report.compare(runs, out, data, recipe(), count)
