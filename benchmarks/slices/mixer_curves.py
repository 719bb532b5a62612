"""Small models of our mixers in bf16: 50 steps by plain torch on a CPU, and by the kernels.

    python -m benchmarks.slices.mixer_curves --site SITE --work SCRATCH [--out benchmarks/results]

MIMO and SISO have Mamba-3 mixers of ranks 4 and 1, with heads and states of the sizes that the
kernels for Hopper compute; M2RNN has M2RNN mixers and both input embeddings. Every run is a process
and begins from the same weights, with the same batches: on the CPU, on the CPU from weights that
are one rounding away, and on the GPU, whose curve may not be further from the nearest of these two
than a few times their largest distance. Writes mixer_curves_DEVICE.json, .md and .png; models of an
earlier call that are in there are kept.
SITE holds a pristine `megatron/` with its dist-info, of which SCRATCH gets a copy.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from benchmarks.harness import results, runs, trees
from benchmarks.harness.gpu import card
from benchmarks.slices import curves
from benchmarks.slices.curves import FACTOR
from cppmega.features.embeddings import layer as input_embeddings
from cppmega.host import env
from cppmega.proof import cpu_shims, small_models
from cppmega.sizes import embeddings as embedding_sizes
from cppmega.sizes import mixers as mixer_sizes
from cppmega.sizes import stated as environment_sizes


class Model(NamedTuple):
    """The layers of a model, and the sizes of its parts by the variable that states them."""

    pattern: str
    sizes: dict[str, Any]


MIMO = mixer_sizes.Mamba3(groups=2)
MODELS = {
    "MIMO": Model("M*M-", {env.MAMBA3.name: MIMO}),
    "SISO": Model("M*M-", {env.MAMBA3.name: replace(MIMO, rank=1, chunk=64)}),
    "M2RNN": Model(
        "R*R-",
        {
            env.M2RNN.name: mixer_sizes.M2RNN(key_dim=32),
            env.NGRAM_HASH.name: embedding_sizes.NgramHash(heads=2, tables=(97, 101, 103, 107)),
            env.STRUCTURE.name: embedding_sizes.Structure(bottleneck=8),
        },
    ),
}
WIDTH, LENGTH, BATCH = 128, 72, 2
WAYS = ("reference", "nudged", "kernels")
NUDGE = 2.0**-8
"""The distance of 1 to the next number in bf16."""
PAGES = ("own_mixers", "input_embeddings")


def trained(name: str, way: str, steps: int) -> None:
    """Train a model in this process, which runs a tree; print its curves as JSON, last."""
    device = "cuda" if way == "kernels" else "cpu"
    if device == "cuda":
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    cpu_shims.init_distributed()
    if device == "cuda":
        from megatron.core.tensor_parallel import random

        random.model_parallel_cuda_manual_seed(1)
    model = small_models.hybrid(
        pattern=MODELS[name].pattern,
        hidden_size=WIDTH,
        ffn_hidden_size=4 * WIDTH,
        num_attention_heads=WIDTH // 32,
        init_method_std=0.02,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    model = model.bfloat16().to(device)
    nudge = NUDGE if way == "nudged" else 0.0
    print(json.dumps(curves.trained(model, lambda n: batch(n, device), steps, nudge, True)))


def batch(seed: int, device: str) -> dict[str, torch.Tensor]:
    """Tokens, the ones that follow them, and what input embeddings need beside them."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(small_models.V, (BATCH, LENGTH + 1), generator=drawn)
    kinds, depths = torch.randint(9, (2, BATCH, LENGTH), generator=drawn).to(device)
    ids = tokens[:, :-1].to(device)
    return {
        "input_ids": input_embeddings.feeding(ids, small_models.V - 1, kinds, depths),
        "labels": tokens[:, 1:].to(device),
        "position_ids": torch.arange(LENGTH, device=device).expand(BATCH, LENGTH),
        "attention_mask": torch.ones(LENGTH, LENGTH, device=device).triu(1).bool()[None, None],
    }


def table(report: dict[str, Any]) -> str:
    blocks: list[results.Page] = [
        "# Mixers in training: kernels and reference",
        f"Written by `benchmarks/mixer_curves.py`: {results.versions(report['stack'])}.",
        f"Models of width {WIDTH}, {BATCH} x {LENGTH} tokens, bf16. The noise is the "
        f"largest distance of two runs by plain torch on the CPU, the second from weights one "
        f"rounding away; a curve is within it up to {FACTOR:g} times.",
    ]
    columns = ["run", "first", "last", "noise", "from the nearest reference", "verdict"]
    for model, found in report["runs"].items():
        blocks.append(f"## {model}, {MODELS[model].pattern}")
        blocks.append(results.table(columns, curves.judged(found, WAYS[:2], ".5g")))
    return results.page(*blocks)


def draw(report: dict[str, Any], file: Path) -> None:
    with results.drawing(file, 1, len(report["runs"])) as (panels,):
        for panel, (model, found) in zip(panels, report["runs"].items(), strict=True):
            for way, curve in found.items():
                panel.plot(range(1, len(curve["loss"]) + 1), curve["loss"], label=way)
            panel.set(title=model, xlabel="step", ylabel="loss")
            panel.legend()


@click.command(help=__doc__)
@click.option("--site", type=results.FOLDER, required=True)
@click.option("--work", type=results.FOLDER, required=True)
@results.out_option()
@click.option("--steps", default=50, show_default=True)
@click.option("--only", type=click.Choice([*MODELS]), help="Train only this model.")
def main(site: Path, work: Path, out: Path, steps: int, only: str | None) -> None:
    root = trees.made(site.resolve(), work / "trees" / "mixer_curves", *trees.only(PAGES))
    name = f"mixer_curves_{card()}"
    report: dict[str, Any] = {"runs": results.read(out, name).get("runs", {})}
    report["stack"] = results.stack("triton", "megatron-core", "mamba-ssm")
    for model in [only] if only else MODELS:
        found = report["runs"][model] = {}
        for way in WAYS:
            started = time.monotonic()
            code = "from benchmarks.slices import mixer_curves as c\n"
            code += f"c.trained({model!r}, {way!r}, {steps})"
            sizes = MODELS[model].sizes
            variables = {name: environment_sizes.text(size) for name, size in sizes.items()}
            if way != "kernels":
                variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # small tensors
            found[way] = runs.said(root, code, variables, work / f"{model}-{way}.log")
            print(f"{model}, {way}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    results.write(out, name, report, table(report))
    draw(report, out / f"{name}.png")


if __name__ == "__main__":
    main()
