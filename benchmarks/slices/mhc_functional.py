"""Megatron dev's functional test of hyper-connections, TP 2 and PP 2, on CPU ranks: dev and ours.

    python -m benchmarks.slices.mhc_functional --dev ROOT --site SITE --work SCRATCH --out DIR

ROOT has `megatron/` of dev's commit d48bd6be0a. The model is that of gpt3_mcore_te_tp2_pp2_mhc with
Megatron's own layers instead of Transformer Engine's, in fp32, without torch.compile, and without
dropout, of which each rank would draw its own. Dev's tree, and SITE with the pages of PAGES, train
it on one rank and on four, from the same weights and on the same words. A run that is in the result
is not repeated. Writes mhc_functional_cpu.json and .md.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.harness import results, trees
from benchmarks.harness.results import Places
from tests.support import python

NAME = "mhc_functional_cpu"
CASE, COMMIT = "gpt3_mcore_te_tp2_pp2_mhc", "d48bd6be0a"
PAGES = ("mhc_connections", "float16_keep_fp32")
SIZES = {
    **{"layers": 12, "width": 512, "heads": 8, "length": 1024, "steps": 5, "batch": 2},
    **{"words": 50257, "padded": 50432},  # GPT-2's, and up to a multiple of 128 x TP 2
    **{"lr": 1.5e-4, "std": 0.02},
}
"""Of the case; its batch is 32 sequences, and its rate grows from 0 to this in 3200 steps."""
DEV, OURS, ONE, FOUR = "dev", "0.19.2 with the pages", "one rank", "TP 2, PP 2"
RANKS = {ONE: 1, FOUR: 4}
RUNS = {f"{tree}, {layout}": (tree, layout) for layout in RANKS for tree in (DEV, OURS)}
FIRST = f"{DEV}, {ONE}"
"""The run that draws the weights, and from which the distances of the others are counted."""
OTHERS = tuple(name for name in RUNS if name != FIRST)
GOLDEN = (
    *(10.86153, 10.85469, 10.86695, 10.84622, 10.88466),
    *(10.89686, 10.8728, 10.86581, 10.86986, 10.83762),
)
"""The first losses of the case on 4 H100 in bf16, as that commit of dev records them."""
MEMORY = 554_939_392
"""Bytes that its last rank, which writes the log, has allocated after a step."""
TIMEOUT = 3600.0
"""Seconds that a run may take."""


def trained(root: Path, layout: str, weights: Path) -> dict[str, Any]:
    """What `mhc_functional_ranks.main` says of a tree."""
    code = "from benchmarks.slices import mhc_functional_ranks as ranks\n"
    code += f"ranks.main({layout == FOUR}, {SIZES!r}, {str(weights)!r})"
    # Dev compiles the parts of a site, which takes minutes on a CPU.
    env = {"TORCHDYNAMO_DISABLE": "1"}
    done = python(root, code, RANKS[layout], env, TIMEOUT, fresh=True)
    if done.returncode:
        raise click.ClickException(f"{root.name}, {layout}:\n{done.stderr[-3000:]}")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    return dict(json.loads(line))


def page(report: Mapping[str, Any]) -> str:
    """The runs' curves beside each other, and beside the golden values."""
    runs = report["runs"]
    return results.page(
        "# Dev's functional test of hyper-connections on CPU ranks",
        f"Written by `benchmarks/slices/mhc_functional.py`, {report['date']}, torch "
        f"{report['torch']}, gloo, {report['threads']} thread a rank, fp32. The model of dev's "
        f"`{CASE}` at {COMMIT}: 12 layers, hidden size 512, sequences of 1024, 4 streams, "
        "recomputed by blocks of 2 layers, TP 2 with sequence parallelism and PP 2, AdamW at "
        f"{SIZES['lr']}, weight decay 0.01, clipped at 1. Other than there: {SIZES['batch']} "
        "sequences a step instead of 32, the full rate from the first step instead of a warm-up of "
        "3200, Megatron's own layers instead of Transformer Engine's, no dropout, no torch.compile,"
        " and words of Python's own sources. All runs begin with the weights that dev has drawn, "
        "from its checkpoint; of the same seed, 0.19.2 draws others.",
        results.table(
            [
                *("run", ("parameters of the last rank", "d"), ("first loss", ".6f")),
                *(("last loss", ".6f"), ("first gradient norm", ".4f"), ("last", ".4f")),
                *(("losses apart", ".1e"), ("norms apart, relative", ".1e")),
                "equal to dev in this layout",
            ],
            _rows(runs),
        ),
        f"Apart: the largest distance of any step from `{FIRST}`. Equal: losses, gradient norms, "
        "and numbers of zero gradients of every step. A norm that torch sums up in fp32 on a CPU "
        "is less exact the more numbers a weight has, and halves of the embeddings have other "
        "errors than all of them; gradients are clipped by it.",
        f"Losses of `{FIRST}`, and how far those of the other runs are from them:",
        results.table(
            ["step", (f"loss of {FIRST}", ".6f"), *((name, ".1e") for name in OTHERS)],
            _steps(runs),
        ),
        "## Golden values",
        *_golden(runs),
    )


def _rows(runs: Mapping[str, Any]) -> Iterator[list[Any]]:
    for name, run in runs.items():
        loss, norm, first = run["loss"], run["grad norm"], runs[FIRST]
        yield [
            *(name, run["parameters"], loss[0], loss[-1], norm[0], norm[-1]),
            max(_apart(loss, first["loss"])),
            max(a / b for a, b in zip(_apart(norm, first["grad norm"]), norm, strict=True)),
            _equal(run, runs.get(f"{DEV}, {RUNS[name][1]}", {})),
        ]


def _equal(run: Mapping[str, Any], of_dev: Mapping[str, Any]) -> str:
    same = all(run[what] == of_dev.get(what) for what in ("loss", "grad norm", "zeros"))
    return "" if run is of_dev else "to the bit" if same else "no"


def _apart(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def _steps(runs: Mapping[str, Any]) -> Iterator[list[Any]]:
    first = runs[FIRST]["loss"]
    every = [_apart(runs[name]["loss"], first) if name in runs else None for name in OTHERS]
    for at, loss in enumerate(first):
        yield [str(at + 1), loss, *(apart and apart[at] for apart in every)]


def _golden(runs: Mapping[str, Any]) -> Iterator[str]:
    """What can be said of them without their data."""
    padded, width = int(SIZES["padded"]), SIZES["width"]
    expected = math.log(padded) + width * SIZES["std"] ** 2 / 2
    alone = {name: run for name, run in runs.items() if "renumbered" in run}
    random = ", ".join(f"{run['random words']:.6f} ({name})" for name, run in alone.items())
    seen = runs[FIRST]["renumbered"]
    yield (
        "The data of the case are not public, so that only its model at initialization can be "
        f"compared. It is at most {SIZES['lr'] * (len(GOLDEN) - 1) / 3200:.1e} that the warm-up's "
        f"rate reaches in the first {len(GOLDEN)} steps, so that all of them are of that model."
    )
    yield "\n".join(
        (
            f"- Golden losses of these steps: {GOLDEN[0]:.5f} in the first, {min(GOLDEN):.4f} to "
            f"{max(GOLDEN):.4f}, on average {statistics.mean(GOLDEN):.4f}.",
            f"- Expected of random words: {expected:.4f}, which is ln {padded} and half of the "
            f"logits' variance, {width} x {SIZES['std']}^2. Measured: {random}.",
            f"- A text has few frequent words, whose weights are one draw. With its words numbered "
            f"in {len(seen)} other ways, a text's first loss is {min(seen):.4f} to {max(seen):.4f} "
            f"in `{FIRST}`: the golden losses are {_place(seen)}.",
            f"- Golden memory of the last rank: {MEMORY / 1e6:.1f} MB in bf16. Weights, gradients "
            f"and AdamW's states of the parameters above are {_states(runs) / 1e6:.1f} MB of it, "
            "at 18 bytes a parameter, and 16 for those of sites, which are fp32. What the rest is, "
            "it does not say, and a number of parameters is not recorded.",
            "- Golden counts of zero gradients are those of a backward in bf16; here it is fp32.",
        )
    )


def _place(seen: Sequence[float]) -> str:
    within = min(seen) <= min(GOLDEN) and max(GOLDEN) <= max(seen)
    return "in that range" if within else "**outside of that range**"


def _states(runs: Mapping[str, Any]) -> float:
    """Bytes of the states of the last of four ranks in Megatron's mixed precision."""
    run = next((run for name, run in runs.items() if RUNS[name][1] == FOUR), runs[FIRST])
    return float(18 * run["parameters"] - 2 * run["of sites"])


@click.command(help=__doc__)
@results.places("Not read.", required=False)
@results.folder_option("--dev", "Folder with the megatron/ of dev.", required=True)
def main(places: Places, dev: Path) -> None:
    places.create()
    ours = trees.made(places.site, places.work / "ours", *trees.only(PAGES))
    for name, (tree, layout) in RUNS.items():
        report = {
            **{"benchmark": NAME, "date": date.today().isoformat(), "threads": 1},
            **{"torch": torch.__version__, "commit": COMMIT, "sizes": SIZES, "runs": {}},
            **results.read(places.out, NAME),
        }
        if name not in report["runs"]:
            root = dev.resolve() if tree == DEV else ours
            report["runs"][name] = trained(root, layout, places.work / "weights")
            results.write(places.out, NAME, report, page(report))


if __name__ == "__main__":
    main()
