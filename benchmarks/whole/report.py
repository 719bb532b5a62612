"""The report of `whole_training.py`: speed, memory, curves, what the kill cost, saves, a plot."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import click

from benchmarks.slices import report as slice_report
from benchmarks.slices.report import apart, losses, steps_of
from cppmega.host.markdown import table
from cppmega.host.wording import counted
from cppmega.recipe import index as recipes_index
from cppmega.training.step import untrained_loss

_SAVE = re.compile(r"^cppmega: (checkpoint of step .*)$", re.MULTILINE)


def measured(
    killed: list[dict[str, Any]], resumed: list[dict[str, Any]], saved: int
) -> dict[str, Any]:
    """The run without the steps that were lost, and how those compare with their repetition.

    Args:
        killed: the rows until the kill.
        resumed: the rows after it.
        saved: the step of the checkpoint.

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


def repeated(rows: list[dict[str, Any]], whole: list[dict[str, Any]], saved: int) -> dict[str, Any]:
    """Steps that another recipe trained from a checkpoint, and the run's own losses of them.

    Its steps are too few for a median: the seconds of each are kept.

    Args:
        rows: those of the other recipe.
        whole: those of the run.
        saved: the step of the checkpoint.

    Raises:
        ClickException: the other recipe did not begin there.
    """
    again, own = losses(rows), losses(whole)
    if min(again, default=0) != saved + 1:
        raise click.ClickException(f"began at {min(again, default=0)}, not after step {saved}")
    pairs = [[step, loss, own.get(step)] for step, loss in sorted(again.items())]
    steps = steps_of(rows)
    return {
        "from_step": saved,
        "losses": pairs,
        "largest_difference": apart(again, own),
        "seconds": [round(row["seconds"], 3) for row in steps],
        "peak_gib": round(max(row["peak_gib"] for row in steps), 2),
    }


def curves(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Every loss and the load of the experts, by step."""
    return {
        "losses": {
            name: [float(f"{row['losses'][name]:.6g}") for row in steps]
            for name in steps[0]["losses"]
        },
        "expert_load": [load_of(row["expert_load"]) for row in steps if row.get("expert_load")],
    }


def saves(log: str) -> list[str]:
    """What a log says of checkpoints."""
    return list(dict.fromkeys(_SAVE.findall(log)))


def load_of(layers: list[list[float]]) -> list[float]:
    """The least load of an expert, the medians over layers of least and most, and the most."""
    least, most = (sorted(each) for each in zip(*layers, strict=True))
    middle = len(least) // 2
    return [least[0], least[middle], most[middle], most[-1]]


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    run, resume = result["runs"]["overlay"], result["resume"]
    recipe = recipes_index.with_text(recipes_index.load(result["recipe"]), result["changes"])
    uniform = math.log(recipe.padded_vocab_size)
    expected = untrained_loss(recipe)
    stack = ", ".join(f"{name} {version}" for name, version in result["stack"].items())
    data = result["data"]
    heads = {name: of for name, of in run["losses"].items() if name in ("lm loss", *mtp(run))}
    first = ", ".join(f"{name} {of[0]:.3f}" for name, of in heads.items())
    farthest = max(abs(of[0] / expected - 1) for of in heads.values())
    rows = [
        ("overlay digest", str(run["overlay"])),
        ("steps", str(run["steps"])),
        ("step, ms", f"{run['milliseconds']:.1f}"),
        ("tokens/s per GPU", f"{run['tokens_per_second'] / result['gpus']:.0f}"),
        ("TFLOP/s per GPU, every layer counted", f"{run['tflops_per_gpu']:.1f}"),
        ("TFLOP/s per GPU, as Megatron reports", str(run["tflops_per_gpu_by_megatron"])),
        ("peak memory, GiB", f"{run['peak_gib']:.2f}"),
        (
            "first losses",
            f"{first}; random weights are expected to have {expected:.3f} (ln V = {uniform:.3f}), "
            f"from which the farthest is {farthest:.1%}",
        ),
        ("last losses", ", ".join(f"{name} {of[-1]:.3f}" for name, of in heads.items())),
        *_last_load(run["expert_load"]),
        (
            "seconds to the end of the first step",
            "{:.0f}; resumed {:.0f}".format(*result["seconds_to_first_step"]),
        ),
    ]
    changes = f" ({', '.join(result['changes'])})" if result["changes"] else ""
    lines = [
        f"# {result['recipe']}{changes}, {result['date']}",
        "",
        f"Written by `benchmarks/whole_training.py`. {counted(result['gpus'], 'GPU')}; {stack}. "
        "Median of the steps after the tenth that were not profiled.",
        "",
        f"Data {data['fingerprint']}: {data['documents']:,} documents, {data['tokens']:,} tokens"
        f"{_held_out_data(result['held_out'])}.",
        "",
        table(("", ""), rows),
        "",
        f"Killed with SIGKILL after step {resume['killed_after_step']} and resumed from the "
        f"checkpoint of step {resume['resumed_from_step']}: over steps "
        f"{resume['repeated_steps'][0]} to {resume['repeated_steps'][1]}, trained before and after "
        f"the kill, the losses differ by at most {resume['largest_difference']:.2e}"
        f"{_at_first(resume)}.",
        "",
        *(f"- {each}" for each in result["saves"]),
        "",
        *(line for found in result.get("reloads", ()) for line in (_reloaded(found), "")),
        *([result["note"], ""] if "note" in result else []),
        *(_evaluations(result["held_out_losses"], list(heads)) or ["Nothing was evaluated."]),
    ]
    return "\n".join(lines) + "\n"


def _last_load(loads: list[list[float]]) -> list[tuple[str, str]]:
    """The row about the experts; none for a model without."""
    if not loads:
        return []
    least, _, most, extreme = loads[-1]
    said = f"{least:.2f} to {extreme:.2f}, the most of the median layer {most:.2f}"
    return [("experts' load in the last step, relative to the mean", said)]


def _held_out_data(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return f"; held out {found['fingerprint']}: {found['documents']:,} documents"


def _evaluations(rows: list[list[Any]], heads: list[str]) -> list[str]:
    """The losses of every evaluation; empty for a run without."""
    if not rows:
        return []
    cells = (
        [str(step), *(f"{found[name]:.4f}" for name in heads), f"{tokens:,}", f"{took:.1f}"]
        for step, found, tokens, took in rows
    )
    return [
        "## Held-out losses, nats per token",
        "",
        table(("after step", *heads, "tokens", "seconds"), cells),
    ]


def _at_first(resume: dict[str, Any]) -> str:
    """What the first repeated step differs by, which earlier results do not have."""
    if "first_difference" not in resume:
        return ""
    return f", in the first of them by {resume['first_difference']:.2e}"


def _reloaded(found: dict[str, Any]) -> str:
    difference = found["largest_difference"]
    compared = ""
    if difference is not None:
        compared = f", whose losses differ from the run's by at most {difference:.2e}"
    return (
        f"`{found['recipe']}`, on {counted(found['gpus'], 'GPU')}, loaded the checkpoint of step "
        f"{found['from_step']} and trained steps {found['losses'][0][0]} to "
        f"{found['losses'][-1][0]}{compared}; its first step ended "
        f"{found['seconds_to_first_step']:.0f} s after its start.{_took(found)}"
    )


def _took(found: dict[str, Any]) -> str:
    """What the steps of a reload needed, which earlier results do not have."""
    if "seconds" not in found:
        return ""
    took = ", ".join(f"{seconds:.2f}" for seconds in found["seconds"])
    return f" These steps took {took} s, with at most {found['peak_gib']:.1f} GiB."


def mtp(run: dict[str, Any]) -> list[str]:
    """The names of the losses of MTP depths."""
    return [name for name in run["losses"] if name.startswith("mtp")]


def draw(result: Path) -> Path:
    """Draw the curves of a result into a PNG next to it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = json.loads(result.read_text())
    run = data["runs"]["overlay"]
    steps = [point[0] for point in run["curve"]]
    figure, ((loss, norm), (indexer, load)) = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True)
    held = data["held_out_losses"]
    for name in ("lm loss", *mtp(run)):
        (line,) = loss.plot(steps, run["losses"][name], lw=0.8, label=name)
        marks = [found[name] for _, found, _, _ in held]
        loss.plot([row[0] for row in held], marks, "o", color=line.get_color())
    loss.set(ylabel="nats per token", title="losses; held out: dots")
    loss.legend()
    norm.plot(steps, [point[2] for point in run["curve"]], lw=0.8)
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
    killed = data["resume"]["killed_after_step"]
    for axis in (loss, norm, indexer, load):
        axis.axvline(killed, color="gray", ls=":", lw=0.8)
    figure.suptitle(f"{data['recipe']}, {data['gpus']} x {data['stack']['gpu']}, {data['date']}")
    figure.tight_layout()
    target = result.with_suffix(".png")
    figure.savefig(target, dpi=120)
    return target
