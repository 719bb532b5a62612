"""The report of `mhc_training.py`: curves judged by the noise, time, and memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import results
from benchmarks.slices.turns_report import FACTOR
from cppmega.recipe.memory import GIB
from cppmega.runs import plotting

REFERENCES = ("reference on the CPU", "reference", "again", "nudged")
"""Runs of plain torch, whose largest difference is the noise."""
STREAMS, MOST = 4, 1.1
"""Streams of the recipes, and what recomputation may keep above them."""
SHARE = 0.4
"""Of the time that dev's kernels add to a step: what ours may add."""
ROUNDING = 2.0**-22
"""Of a value in fp32: what curves may differ by whose references are equal to the bit."""
BLOCKS = {"recomputed": None, "recomputed by 2": 2}
"""Layers of a recomputed block; None: all."""

Curves = Mapping[str, Sequence[float]]


def table(report: Mapping[str, Any]) -> Iterator[str]:
    """The report as Markdown."""
    stack = ", ".join(f"{name} {report[name]}" for name in ("torch", "triton", "megatron-core"))
    yield "# Hyper-connections in training: kernels and reference"
    yield ""
    yield f"Written by `benchmarks/mhc_training.py`, {report['date']}: {report['device']}, {stack}."
    yield ""
    yield (
        f"A curve is within the noise where it is not further from the nearest reference than "
        f"{FACTOR:g} times the largest difference of any two references, or than one rounding."
    )
    for model in ("GPT", "hybrid"):
        runs = {run: found[model] for run, found in report["small"].items()}
        if runs:
            yield from ("", f"## A small {model}, fp32", "")
            yield from _curves(runs)
    titles = {
        "gpt": "A GPT of 8 layers, C 4096, 4 streams, bf16",
        "slice": "The fused NAM56R slice with 4 streams, bf16",
    }
    for part, title in titles.items():
        runs = report[part]
        if runs:
            yield from ("", f"## {title}", "")
            yield from _speed(runs)
            yield ""
            yield from _curves({name: run for name, run in runs.items() if _judged(name, run)})
    for step in report.get("dev", {}).values():
        yield from ("", "## The GPT in Megatron's branch dev, 4 streams, bf16", "")
        yield from in_dev(step)


def _judged(name: str, run: Mapping[str, Any]) -> bool:
    """Whether a run has a curve of the model with streams."""
    return name != "without" and "loss" in run


def _curves(runs: Mapping[str, Curves]) -> Iterator[str]:
    references = [runs[name] for name in REFERENCES if name in runs]
    steps = min((len(run["loss"]) for run in runs.values()), default=0)
    if len(references) < 2:
        yield "Curves: fewer than two references have a result, so there is no noise to judge by."
        return
    columns = [f"{steps} steps", "loss, first", "last", "noise", "from the nearest reference"]
    yield from results.table([*columns, "verdict"], _judgements(runs, references))


def _judgements(runs: Mapping[str, Curves], references: list[Curves]) -> Iterator[list[str]]:
    for name, run in runs.items():
        for what in ("loss", "grad norm"):
            curves = [each[what] for each in references]
            cells = ["", "", "reference"] if name in REFERENCES else verdict(run[what], curves)
            yield [f"{name}, {what}", *(f"{run[what][at]:.6g}" for at in (0, -1)), *cells]


def verdict(curve: Sequence[float], references: Sequence[Sequence[float]]) -> list[str]:
    """Noise of the references, distance of a curve from the nearest one, and what that means."""
    if any(len(each) != len(curve) for each in references):
        return ["", "", "the runs have other steps"]
    pairs = itertools.combinations(references, 2)
    noise = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
    gap = max(
        min(abs(value - each[step]) for each in references) for step, value in enumerate(curve)
    )
    finite = all(map(math.isfinite, (*curve, noise)))
    rounding = ROUNDING * max(map(abs, curve))
    within = finite and gap <= max(FACTOR * noise, rounding)
    return [f"{noise:.2e}", f"{gap:.2e}", "within the noise" if within else "**beyond the noise**"]


def _speed(runs: Mapping[str, Any]) -> Iterator[str]:
    """Milliseconds of a step and peak memory, and what the streams add to both."""
    base = runs.get("without", {})
    columns = ["run", "step, ms", "more than without", "tokens/s", "peak memory, GiB"]
    rows = ([name, *_cost(name, run, base)] for name, run in runs.items())
    yield from results.table([*columns, "more than without"], rows)
    for name, together in BLOCKS.items():
        if "peak_bytes" in runs.get(name, {}) and "peak_bytes" in base:
            yield ""
            yield kept(name, runs[name], base, together)


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


def in_dev(step: Mapping[str, Any]) -> Iterator[str]:
    """A step without streams, by dev's kernels and by ours, and the target."""
    ways, base = ("without", "dev", "ours"), step["without"]["milliseconds"]
    extra = {name: step[name]["milliseconds"] - base for name in ways}
    columns = [("forward + backward, ms", ".1f"), ("more than without", ".1f")]
    yield from results.table(
        ["kernels", *columns, ("peak memory, GiB", ".2f"), ("loss", ".4f")],
        (
            [name, run["milliseconds"], extra[name], run["peak_bytes"] / GIB, run["loss"]]
            for name, run in ((name, step[name]) for name in ways)
        ),
    )
    share = extra["ours"] / extra["dev"]
    yield ""
    yield (
        f"The streams take {share:.0%} of the time that they take with dev's kernels "
        f"({step['backends']}); the target of {SHARE:.0%} is "
        f"{'met' if share <= SHARE else 'missed'}."
    )


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
    groups = {
        f"small {model}": {run: found[model] for run, found in report["small"].items()}
        for model in ("GPT", "hybrid")
    }
    groups["GPT, C 4096"] = {n: run for n, run in report["gpt"].items() if _judged(n, run)}
    shown = {title: runs for title, runs in groups.items() if runs}
    if not shown:
        return
    pyplot = plotting.pyplot()
    figure, axes = pyplot.subplots(2, len(shown), figsize=(5 * len(shown), 6), squeeze=False)
    for column, (title, runs) in enumerate(shown.items()):
        first = next((runs[name] for name in REFERENCES if name in runs), None)
        for number, (name, run) in enumerate(runs.items()):
            steps, color = range(1, len(run["loss"]) + 1), f"C{number}"
            axes[0][column].plot(steps, run["loss"], color, label=name)
            if first is not None and run is not first:
                apart = [abs(a - b) for a, b in zip(run["loss"], first["loss"], strict=False)]
                axes[1][column].plot(steps[: len(apart)], apart, color)
        axes[0][column].set(title=title, ylabel="loss, nats")
        axes[1][column].set(xlabel="step", ylabel="from the first reference", yscale="symlog")
        axes[1][column].set_yscale("symlog", linthresh=1e-7)
        axes[0][column].legend(fontsize="small")
    figure.tight_layout()
    plotting.write(figure, target, "mhc_training", [])
