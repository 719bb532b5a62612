"""The report of `training.py`: speed, memory, curves, what the kill cost, saves, a plot."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import results, runs
from benchmarks.harness.runs import Row
from benchmarks.slices import report as slice_report
from benchmarks.slices.report import apart, losses, steps_of, title
from cppmega.host.markdown import table
from cppmega.host.wording import counted
from cppmega.recipe import index as recipes_index
from cppmega.training.step import untrained_loss

_SAVE = re.compile(r"^cppmega: (checkpoint of step .*)$", re.MULTILINE)


def measured(killed: list[Row], resumed: list[Row], saved: int) -> dict[str, Any]:
    """The run without the steps that were lost, and how those compare with their repetition.

    Raises:
        ClickException: it was not resumed from there, a step is missing, or one is not finite.
    """
    lost, again = losses(killed), losses(resumed)
    if not again:
        raise click.ClickException("the resumed part took no step: the kill came too late")
    if min(again) != saved + 1:
        raise click.ClickException(f"resumed at {min(again)}, the checkpoint was of step {saved}")
    rows = [row for row in killed if row.get("step", 0) <= saved] + steps_of(resumed)
    steps = steps_of(rows)
    if [row["step"] for row in steps] != list(range(1, len(steps) + 1)):
        raise click.ClickException("a step is missing")
    evaluated = {row["evaluated"]: row for row in killed + resumed if "evaluated" in row}
    both = sorted(set(lost) & set(again))
    return {
        "runs": {"overlay": {**slice_report.measured(rows), **curves(steps)}},
        "resume": {
            "killed_after_step": max(lost),
            "resumed_from_step": saved,
            "repeated_steps": [both[0], both[-1]],
            "largest_difference": apart(again, lost),
            "first_difference": abs(again[both[0]] - lost[both[0]]),
            "loss_span": max(again.values()) - min(again.values()),
        },
        "held_out_losses": [
            [step, row["losses"], row["tokens"], round(row["seconds"], 1)]
            for step, row in sorted(evaluated.items())
        ],
    }


def repeated(rows: list[Row], whole: list[Row], saved: int) -> dict[str, Any]:
    """Steps that another recipe trained from a checkpoint, and the run's own losses of them.

    Its steps are too few for a median: the seconds of each are kept.

    Raises:
        ClickException: the other recipe did not begin after the step that was saved.
    """
    again, own = losses(rows), losses(whole)
    if min(again, default=0) != saved + 1:
        raise click.ClickException(f"began at {min(again, default=0)}, not after step {saved}")
    steps = steps_of(rows)
    return {
        "from_step": saved,
        "losses": [[step, loss, own.get(step)] for step, loss in sorted(again.items())],
        "largest_difference": apart(again, own),
        "seconds": [round(row["seconds"], 3) for row in steps],
        "peak_gib": round(max(row["peak_gib"] for row in steps), 2),
    }


def curves(steps: list[Row]) -> dict[str, Any]:
    names, loads = steps[0]["losses"], (row.get("expert_load") for row in steps)
    return {
        "losses": {n: [float(f"{row['losses'][n]:.6g}") for row in steps] for n in names},
        "expert_load": [load_of(layers) for layers in loads if layers],
    }


def load_of(layers: list[list[float]]) -> list[float]:
    """The least load of an expert, the medians over layers of least and most, and the most."""
    least, most = (sorted(each) for each in zip(*layers, strict=True))
    middle = len(least) // 2
    return [least[0], least[middle], most[middle], most[-1]]


def saves(log: str) -> list[str]:
    return list(dict.fromkeys(_SAVE.findall(log)))


def heads_of(run: dict[str, Any]) -> list[str]:
    return [name for name in run["losses"] if name == "lm loss" or name.startswith("mtp")]


def page(result: dict[str, Any]) -> str:
    run, resume, data = result["runs"]["overlay"], result["resume"], result["data"]
    held, evaluated = result["held_out"], result["held_out_losses"]
    held_out = f"; held out {held['fingerprint']}: {held['documents']:,} documents" if held else ""
    heads = heads_of(run)
    at_first = ""  # which earlier results do not have
    if "first_difference" in resume:
        at_first = f", in the first of them by {resume['first_difference']:.2e}"
    columns = ["after step", *heads, "tokens", "seconds"]
    rows = (
        [str(step), *(f"{found[name]:.4f}" for name in heads), f"{tokens:,}", f"{took:.1f}"]
        for step, found, tokens, took in evaluated
    )
    return results.page(
        title(result),
        f"Written by `benchmarks/whole_training.py`. {runs.on(result)} "
        "Median of the steps after the tenth that were not profiled.",
        f"Data {data['fingerprint']}: {data['documents']:,} documents, {data['tokens']:,} tokens"
        f"{held_out}.",
        table(["", ""], _rows(result, run, heads)),
        f"Killed with SIGKILL after step {resume['killed_after_step']} and resumed from the "
        f"checkpoint of step {resume['resumed_from_step']}: over steps "
        f"{resume['repeated_steps'][0]} to {resume['repeated_steps'][1]}, trained before and after "
        f"the kill, the losses differ by at most {resume['largest_difference']:.2e}{at_first}.",
        (f"- {each}" for each in result["saves"]),
        *map(_reloaded, result.get("reloads", ())),
        result.get("note", ""),
        "## Held-out losses, nats per token" if evaluated else "Nothing was evaluated.",
        table(columns, rows) if evaluated else "",
    )


def _rows(result: dict[str, Any], run: dict[str, Any], heads: list[str]) -> Iterator[list[str]]:
    recipe = recipes_index.with_text(recipes_index.load(result["recipe"]), result["changes"])
    uniform, expected = math.log(recipe.padded_vocab_size), untrained_loss(recipe)
    first, last = (
        ", ".join(f"{name} {run['losses'][name][at]:.3f}" for name in heads) for at in (0, -1)
    )
    farthest = max(abs(run["losses"][name][0] / expected - 1) for name in heads)
    random = f"random weights are expected to have {expected:.3f} (ln V = {uniform:.3f})"
    yield ["overlay digest", str(run["overlay"])]
    yield ["steps", str(run["steps"])]
    yield ["step, ms", f"{run['milliseconds']:.1f}"]
    yield ["tokens/s per GPU", f"{run['tokens_per_second'] / result['gpus']:.0f}"]
    yield ["TFLOP/s per GPU, every layer counted", f"{run['tflops_per_gpu']:.1f}"]
    yield ["TFLOP/s per GPU, as Megatron reports", str(run["tflops_per_gpu_by_megatron"])]
    yield ["peak memory, GiB", f"{run['peak_gib']:.2f}"]
    yield ["first losses", f"{first}; {random}, from which the farthest is {farthest:.1%}"]
    yield ["last losses", last]
    if run["expert_load"]:
        least, _, most, extreme = run["expert_load"][-1]
        load = f"{least:.2f} to {extreme:.2f}, the most of the median layer {most:.2f}"
        yield ["experts' load in the last step, relative to the mean", load]
    seconds = "{:.0f}; resumed {:.0f}".format(*result["seconds_to_first_step"])
    yield ["seconds to the end of the first step", seconds]


def _reloaded(found: dict[str, Any]) -> str:
    difference, compared, took = found["largest_difference"], "", ""
    if difference is not None:
        compared = f", whose losses differ from the run's by at most {difference:.2e}"
    if "seconds" in found:  # which earlier results do not have
        steps = ", ".join(f"{seconds:.2f}" for seconds in found["seconds"])
        took = f" These steps took {steps} s, with at most {found['peak_gib']:.1f} GiB."
    return (
        f"`{found['recipe']}`, on {counted(found['gpus'], 'GPU')}, loaded the checkpoint of step "
        f"{found['from_step']} and trained steps {found['losses'][0][0]} to "
        f"{found['losses'][-1][0]}{compared}; its first step ended "
        f"{found['seconds_to_first_step']:.0f} s after its start.{took}"
    )


def draw(result: Path) -> Path:
    """Draw the curves of a result into a PNG next to it."""
    data, target = json.loads(result.read_text()), result.with_suffix(".png")
    run, held = data["runs"]["overlay"], data["held_out_losses"]
    steps, _, norms, _ = zip(*run["curve"], strict=True)
    with results.drawing(target, 2, 2, sharex=True) as ((loss, norm), (indexer, load)):
        for name in heads_of(run):
            (line,) = loss.plot(steps, run["losses"][name], lw=0.8, label=name)
            marks = [found[name] for _, found, _, _ in held]
            loss.plot([row[0] for row in held], marks, "o", color=line.get_color())
        loss.set(ylabel="nats per token", title="losses; held out: dots")
        loss.legend()
        norm.plot(steps, norms, lw=0.8)
        norm.set(yscale="log", title="gradient norm")
        for name in run["losses"]:
            if "indexer" in name:
                indexer.plot(steps, run["losses"][name], lw=0.8, label=name)
        indexer.set(xlabel="step", title="loss of the indexers")
        if run["expert_load"]:
            least, low, high, most = zip(*run["expert_load"], strict=True)
            load.fill_between(steps[: len(least)], least, most, alpha=0.25, label="all layers")
            load.fill_between(steps[: len(least)], low, high, alpha=0.5, label="median layer")
            load.legend()
        load.set(xlabel="step", title="tokens of the least and most used expert / mean")
        for axis in (loss, norm, indexer, load):
            axis.axvline(data["resume"]["killed_after_step"], color="gray", ls=":", lw=0.8)
        on = f"{data['gpus']} x {data['stack']['gpu']}"
        loss.figure.suptitle(f"{data['recipe']}, {on}, {data['date']}")
    return target
