"""Hyper-connections in training: curves of the kernels and of the reference, time and memory.

    python -m benchmarks.slices.mhc_training --site SITE --work SCRATCH --out DIR [--only PART,...]

\b
    small   a small GPT and a hybrid in fp32: by the reference on the CPU, twice on the GPU and from
            weights one rounding away, and by the kernels, also recomputed (`mhc_curves.py`)
    gpt     the recipe gpt_mhc_h200 (8 layers, C 4096): without streams, by the kernels, recomputed
            as one block and by blocks of 2 layers, and twice by the reference
    slice   the recipe nam56r_h200_slice_mhc, and the same without streams

DIR/mhc_training_DEVICE.json and .md are written after each run, which is a process, and a .png with
the curves at the end. A run that is in there is not repeated (`--again` does), so a call that came
to the end of --minutes is continued by the same command. What has no result is named as not run.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.harness import results, trees
from benchmarks.harness import runs as training_runs
from benchmarks.harness.gpu import card
from benchmarks.harness.results import Places
from benchmarks.harness.runs import Bench, header, prepare, said
from benchmarks.slices import training as recipe_report
from benchmarks.slices.curves import FACTOR, Curves, judged
from benchmarks.slices.training import measured, steps_of
from cppmega.host.packages import version
from cppmega.recipe import index as recipes_index
from cppmega.recipe import memory
from cppmega.recipe.memory import GIB

PAGES = ("mhc_connections", "float16_keep_fp32")
"""Of the small models, beside which no other page may bend a curve."""
_FIRST_GUESS = {"small": 60.0, "gpt": 120.0, "slice": 150.0}
"""Seconds that a run may take, until one of its part has shown how many."""
_ONE_STREAM = ("mhc_num_residual_streams=1",)
_RECOMPUTED = ("recompute_modules=('mhc',)",)
_PLAIN = ("use_fused_mhc=False",)
RECIPES = {"gpt": "gpt_mhc_h200", "slice": "nam56r_h200_slice_mhc"}
RUNS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt": {
        "without": _ONE_STREAM,
        "ours": (),
        "recomputed": _RECOMPUTED,
        "recomputed by 2": (*_RECOMPUTED, "mhc_recompute_layer_num=2"),
        "reference": _PLAIN,
        "again": _PLAIN,
    },
    "slice": {"without": _ONE_STREAM, "ours": ()},
}
"""Part -> run -> changes of its recipe."""
SMALL = {
    "reference on the CPU": ("reference", "cpu"),
    **{way: (way, "") for way in ("reference", "again", "nudged", "fused", "recomputed")},
}
"""Run -> its way, and its device, if that is not the GPU."""
OF_RECIPE = (
    *("overlay", "steps", "milliseconds", "tokens_per_second", "tflops_per_gpu"),
    *("tflops_per_gpu_by_megatron", "peak_gib", "first_loss", "last_loss"),
)
"""What a recipe's result has of its run; the curves are in the log."""
LABELS = {"small": tuple(SMALL), **{part: tuple(runs) for part, runs in RUNS.items()}}
"""Part -> its runs, in their order."""
REFERENCES = ("reference on the CPU", "reference", "again", "nudged")
"""Runs of plain torch, whose largest difference is the noise."""
STREAMS, MOST = 4, 1.1
"""Streams of the recipes, and what recomputation may keep above them."""
BLOCKS = {"recomputed": None, "recomputed by 2": 2}
"""Layers of a recomputed block; None: all."""


@dataclass
class Training:
    """One call: the runs that are left, as long as there is time."""

    site: Path
    work: Path
    out: Path
    data: Path | None
    steps: int
    deadline: float
    again: bool = False

    def __post_init__(self) -> None:
        self.name = f"mhc_training_{card()}"
        self.taken: dict[str, list[float]] = {}
        self.call = datetime.now(UTC).isoformat(timespec="minutes")
        """When this call began: hosts differ, so times of two calls have no ratio."""
        self.report: dict[str, Any] = {
            **{part: {} for part in LABELS},
            **({} if self.again else results.read(self.out, self.name)),
            **{"benchmark": "mhc_training", "date": date.today().isoformat()},
            **{"device": torch.cuda.get_device_name(), "torch": torch.__version__},
            **{name: version(name) for name in ("triton", "megatron-core")},
        }

    def left(self) -> float:
        return max(1.0, self.deadline - time.monotonic())

    def part(self, name: str) -> None:
        """Run what is left of a part, and write after each run."""
        for label in LABELS[name]:
            if label in self.report[name]:
                continue
            taken = self.taken.setdefault(name, [])
            if self.left() < 1.2 * max(taken, default=_FIRST_GUESS[name]):
                print(f"{name} {label}: {self.left():.0f} s are left, not started", file=sys.stderr)
                return
            print(f"{name}: {label}", file=sys.stderr, flush=True)
            started = time.monotonic()
            found = self.small(label) if name == "small" else self.trained(name, label)
            base = self.report[name].get("without", {})
            if base.get("call") == self.call and "milliseconds" in base:
                found["milliseconds_without"] = base["milliseconds"]
            self.report[name][label] = {**found, "call": self.call}
            taken.append(time.monotonic() - started)
            self.write()

    def small(self, label: str) -> dict[str, Any]:
        way, device = SMALL[label]
        code = "from benchmarks.slices import mhc_curves as c\n"
        code += f"c.main({way!r}, {self.steps}, c.SIZES)"
        # With more threads than idle cores, each small product would wait for the last one.
        on_cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
        variables = on_cpu if device == "cpu" else {}
        root = self.work / "trees" / "small"
        if not root.is_dir():
            trees.made(self.site, root, *trees.only(PAGES))
        log = self.out / f"small-{label.replace(' ', '-')}.log"
        return said(root, code, variables, log, self.left())

    def trained(self, part: str, label: str) -> dict[str, Any]:
        """A recipe's run with some changes, measured; out of memory is a result, too."""
        changes = (*RUNS[part][label], f"train_iters={self.steps}")
        recipe = recipes_index.load(RECIPES[part])
        data = self.data or prepare(self.work / "data" / "corpus", self.site)
        bench = Bench(recipe, changes, self.site, self.work, self.out, data, self.left())
        file = f"{part}-{label.replace(' ', '-')}"
        rows = training_runs.trained(bench, file, bench.tree("overlay"))
        if rows is None:
            return {"out_of_memory": True}
        steps = steps_of(rows)
        changed = recipes_index.with_text(recipe, changes)
        tokens = changed.micro_batch_size * changed.seq_length
        return {
            **({"facts": header(bench)} if label == "ours" else {}),
            **recipe_report.without_curves(measured(rows)),
            "loss": [row["loss"] for row in steps],
            "grad norm": [row["grad_norm"] for row in steps],
            "peak_bytes": max(row["peak_gib"] for row in steps) * GIB,
            "states_bytes": memory.estimate(changed).states,
            "stream_bytes": 2 * tokens * changed.hidden_size,
            "layers": changed.num_layers or len(changed.layout.main),
        }

    def write(self) -> str:
        """Write what there is; the page."""
        for part, recipe in RECIPES.items():
            run = self.report[part].get("ours", {})
            if "facts" in run:  # as `slices/training.py` writes a recipe's result
                kept = {key: value for key, value in run.items() if key in OF_RECIPE}
                facts = {**run["facts"], "benchmark": "mhc_training", "log": f"{self.name}.json"}
                recipe_report.save(self.out, recipe, {**facts, "runs": {"overlay": kept}})
        every = [(part, label) for part, labels in LABELS.items() for label in labels]
        missing = [f"{part}, {label}" for part, label in every if label not in self.report[part]]
        page = "\n".join(table(self.report)) + "\n"
        page += f"\nNot run: {'; '.join(missing)}.\n" if missing else ""
        return results.save(self.out, self.name, self.report, page)


def table(report: Mapping[str, Any]) -> Iterator[str]:
    stack = results.versions(report, "torch", "triton", "megatron-core")
    yield from ("# Hyper-connections in training: kernels and reference", "")
    yield f"Written by `benchmarks/mhc_training.py`, {report['date']}: {report['device']}, {stack}."
    yield (
        f"\nA curve is within the noise where it is not further from the nearest reference than "
        f"{FACTOR:g} times the largest difference of any two references, or than one rounding."
    )
    for model in ("GPT", "hybrid"):
        if runs := small(report, model):
            yield from ("", f"## A small {model}, fp32", "", *_curves(runs))
    for part, title in {
        "gpt": "A GPT of 8 layers, C 4096, 4 streams, bf16",
        "slice": "The fused NAM56R slice with 4 streams, bf16",
    }.items():
        if runs := report[part]:
            yield from ("", f"## {title}", "", *_speed(runs), "", *_curves(with_streams(runs)))


def small(report: Mapping[str, Any], model: str) -> dict[str, Any]:
    return {run: found[model] for run, found in report["small"].items()}


def with_streams(runs: Mapping[str, Any]) -> dict[str, Any]:
    """The runs that have a curve of the model with streams."""
    return {name: run for name, run in runs.items() if name != "without" and "loss" in run}


def _curves(runs: Mapping[str, Curves]) -> Iterator[str]:
    steps = min((len(run["loss"]) for run in runs.values()), default=0)
    if sum(name in runs for name in REFERENCES) < 2:
        yield "Curves: fewer than two references have a result, so there is no noise to judge by."
        return
    columns = [f"{steps} steps", "loss, first", "last", "noise", "from the nearest reference"]
    yield from results.table([*columns, "verdict"], judged(runs, REFERENCES, ".6g"))


def _speed(runs: Mapping[str, Any]) -> Iterator[str]:
    """Milliseconds of a step and peak memory, and what the streams add to both."""
    base = runs.get("without", {})
    columns = ["run", "step, ms", "more than without", "tokens/s", "peak memory, GiB"]
    rows = ([name, *_cost(name, run, base)] for name, run in runs.items())
    yield from results.table([*columns, "more than without"], rows)
    for name, together in BLOCKS.items():
        if "peak_bytes" in runs.get(name, {}) and "peak_bytes" in base:
            yield from ("", kept(name, runs[name], base, together))


def _cost(name: str, run: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    if "out_of_memory" in run:
        return ["", "", "", "out of memory", ""]
    more = ["", ""]
    if name != "without" and "milliseconds" in base:
        # Hosts differ: a time is compared with that of its own call.
        time = run["milliseconds"] / run.get("milliseconds_without", math.nan) - 1
        memory = (run["peak_bytes"] - base["peak_bytes"]) / GIB
        more = ["another call" if math.isnan(time) else f"{time:+.1%}", f"{memory:+.2f}"]
    rate, peak = f"{run['tokens_per_second']:.0f}", f"{run['peak_bytes'] / GIB:.2f}"
    return [f"{run['milliseconds']:.1f}", more[0], rate, peak, more[1]]


def kept(name: str, run: Mapping[str, Any], base: Mapping[str, Any], together: int | None) -> str:
    """What a recomputed run keeps above the model without streams, and the target."""
    states = run["states_bytes"] - base["states_bytes"]
    extra = run["peak_bytes"] - base["peak_bytes"] - states
    blocks = -(-run["layers"] // (together or run["layers"]))
    streams = blocks * STREAMS * run["stream_bytes"]
    met = "met" if extra <= MOST * streams else "missed"
    return (
        f"{name}: {extra / GIB:.3f} GiB more than without, apart from {states / GIB:.3f} GiB of "
        f"parameters and their states (by their number); {blocks} times {STREAMS} streams are "
        f"{streams / GIB:.3f} GiB: {extra / streams:.2f} times them; the target of {MOST} is {met}."
    )


def draw(report: Mapping[str, Any], target: Path) -> None:
    """Draw the losses of all runs, and how far each is from the first reference."""
    groups = {f"small {model}": small(report, model) for model in ("GPT", "hybrid")}
    groups["GPT, C 4096"] = with_streams(report["gpt"])
    shown = {title: runs for title, runs in groups.items() if runs}
    if not shown:
        return
    with results.drawing(target, 2, len(shown)) as panels:
        for losses, gaps, (title, runs) in zip(*panels, shown.items(), strict=True):
            first = next((runs[name] for name in REFERENCES if name in runs), None)
            for number, (name, run) in enumerate(runs.items()):
                steps, color = range(1, len(run["loss"]) + 1), f"C{number}"
                losses.plot(steps, run["loss"], color, label=name)
                if first is not None and run is not first:
                    apart = [abs(a - b) for a, b in zip(run["loss"], first["loss"], strict=False)]
                    gaps.plot(steps[: len(apart)], apart, color)
            losses.set(title=title, ylabel="loss, nats")
            losses.legend(fontsize="small")
            gaps.set(xlabel="step", ylabel="from the first reference")
            gaps.set_yscale("symlog", linthresh=1e-7)


@click.command(help=__doc__)
@results.places("Prepared dataset [Python's own sources].", required=False)
@click.option("--only", help=f"Parts, in this order [{','.join(LABELS)}].")
@click.option("--minutes", default=28.0, show_default=True, help="Time limit of this call.")
@click.option("--steps", default=50, show_default=True, help="Of every run.")
@click.option("--again", is_flag=True, help="Repeat the runs that have a result.")
def main(places: Places, only: str | None, minutes: float, steps: int, again: bool) -> None:
    deadline = time.monotonic() + 60 * minutes
    chosen = results.chosen(only, LABELS, "parts")
    places.create()
    training = Training(*places, steps, deadline, again)
    failed = False
    for name in chosen:
        try:
            training.part(name)
        except (click.ClickException, subprocess.TimeoutExpired) as error:
            failed = True  # the other parts may still have their time
            print(f"{name}: {error}", file=sys.stderr)
    page = training.write()
    draw(training.report, places.out / f"{training.name}.png")
    print(page)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
