"""The report of `parts.py`: held-out losses of every variant, beside those of the whole model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cppmega.host import markdown
from cppmega.recipe import arithmetic
from cppmega.recipe import index as recipes_index
from cppmega.runs import plotting

RECIPE = "nam56r_small_cut"
WHOLE = "whole"
LOSSES = ("lm loss", "mtp_1 loss", "mtp_2 loss")


@dataclass(frozen=True)
class Variant:
    """A model that lacks a part, or has another in its place."""

    title: str
    changes: tuple[str, ...] = ()
    """Of the recipe, as `--set` takes them."""


VARIANTS = {
    WHOLE: Variant("the whole model"),
    "no_ngram": Variant("without n-gram hash", ("ngram_hash=None",)),
    "no_structure": Variant("without structure", ("structure=None",)),
    "shuffled": Variant("structure ids of other documents"),
    "m_for_r": Variant("Mamba-3 for M2RNN", ("pattern=+EMEDEMEDEMM/+-/+-",)),
    "mla_for_dsa": Variant("full MLA for DSA", ("pattern=+EME+EME+EMR/+-/+-",)),
}


def curve(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The held-out losses of a run by step, and the overlay it was trained with.

    Raises:
        ClickException: it saw mock data, or a loss is not finite, or it was never evaluated.
    """
    start = next(row for row in rows if "start" in row)
    held_out = {str(row["evaluated"]): row["losses"] for row in rows if "evaluated" in row}
    if any(row.get("mock_data") for row in rows):
        raise click.ClickException("the run saw mock data, which must not appear in a result")
    if not held_out or not all(
        math.isfinite(losses[name]) for losses in held_out.values() for name in LOSSES
    ):
        raise click.ClickException(f"held-out losses of {start['start']}: {held_out}")
    return {"overlay": start["overlay"], "held_out": held_out}


def report(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    return "\n\n".join(_report(result)) + "\n"


def _report(result: Mapping[str, Any]) -> Iterator[str]:
    stack = ", ".join(f"{name} {version}" for name, version in result["stack"].items())
    yield f"# What the parts of NAM56R do, {result['date']}"
    data = result["data"]
    yield (
        f"{result['recipe']}, {stack}. Data {data['fingerprint']}: {data['documents']} documents, "
        f"{data['tokens']} tokens. Losses of held-out samples after the last step, in nats a token."
    )
    seeds = _seeds(result, WHOLE)
    rows = []
    for name, variant in VARIANTS.items():
        if own := _seeds(result, name):
            cells = [_spread([_last(result, name, seed)[loss] for seed in own]) for loss in LOSSES]
            rows.append([variant.title, _millions(variant), str(len(own)), *cells])
    heads = ["head", "MTP depth 1", "MTP depth 2"]
    yield markdown.table(["variant", "parameters, million", "seeds", *heads], rows)
    yield "Mean, and in parentheses the lowest and the highest of the seeds."
    rows = []
    for name, variant in VARIANTS.items():
        both = [seed for seed in _seeds(result, name) if seed in seeds]
        if name != WHOLE and both:
            worse = [_differences(result, name, loss, both) for loss in LOSSES]
            rows.append([variant.title, *map(_spread, worse), _verdict(worse[0])])
    if rows:
        yield markdown.table(["variant", *heads, "the head's loss"], rows)
        yield (
            "The variant's loss less the whole model's, seed by seed: both see the same samples in "
            "the same order. A difference counts if it has one sign with every seed, and its mean "
            "is twice its standard error or more; fewer than three seeds cannot tell."
        )
    missing = [variant.title for name, variant in VARIANTS.items() if not _seeds(result, name)]
    if missing:
        yield f"Not run: {', '.join(missing)}."


def _verdict(worse: list[float]) -> str:
    """What the differences of all seeds show."""
    if len(worse) < 3:
        return "too few seeds"
    mean = statistics.mean(worse)
    if min(worse) * max(worse) <= 0:
        return "no measurable difference"
    if abs(mean) < 2 * statistics.stdev(worse) / math.sqrt(len(worse)):
        return "no measurable difference"
    return "higher" if mean > 0 else "lower"


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def _seeds(result: Mapping[str, Any], name: str) -> list[int]:
    """The seeds from which a variant was trained."""
    found = (run.rpartition("-") for run in result["runs"])
    return sorted(int(seed) for variant, _, seed in found if variant == name)


def _last(result: Mapping[str, Any], name: str, seed: int) -> dict[str, float]:
    """The losses of a run's last evaluation."""
    held_out: dict[str, dict[str, float]] = result["runs"][f"{name}-{seed}"]["held_out"]
    return held_out[max(held_out, key=int)]


def _differences(result: Mapping[str, Any], name: str, loss: str, seeds: list[int]) -> list[float]:
    return [_last(result, name, seed)[loss] - _last(result, WHOLE, seed)[loss] for seed in seeds]


def _millions(variant: Variant) -> str:
    recipe = recipes_index.with_text(recipes_index.load(RECIPE), variant.changes)
    return f"{arithmetic.parameters(recipe).total / 1e6:.1f}"


def draw(result: Mapping[str, Any], target: Path) -> None:
    """Draw the head's held-out losses, and how far they are from the whole model's."""
    pyplot = plotting.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    whole = {seed: _curve(result, WHOLE, seed) for seed in _seeds(result, WHOLE)}
    for colour, (name, variant) in zip(plotting.COLOURS, VARIANTS.items(), strict=False):
        own = {seed: _curve(result, name, seed) for seed in _seeds(result, name)}
        if not own:
            continue
        losses = _by_step(list(own.values()))
        means = list(map(statistics.mean, losses.values()))
        left.plot(list(losses), means, color=colour, label=variant.title)
        pairs = [(own[seed], whole[seed]) for seed in own.keys() & whole.keys()]
        worse = _by_step(
            [{step: a[step] - b[step] for step in a.keys() & b.keys()} for a, b in pairs]
        )
        if name != WHOLE and worse:
            steps, values = list(worse), worse.values()
            right.plot(steps, list(map(statistics.mean, values)), color=colour)
            band = list(map(min, values)), list(map(max, values))
            right.fill_between(steps, *band, color=colour, alpha=0.2, linewidth=0)
    right.axhline(0, color="black", linewidth=0.8)
    left.set(xlabel="step", ylabel="held-out loss, nats", title="head, mean of the seeds")
    right.set(xlabel="step", title="difference from the whole model (band: all seeds)")
    left.legend()
    plotting.write(figure, target, "parts", [])


def _curve(result: Mapping[str, Any], name: str, seed: int) -> dict[int, float]:
    """The head's held-out loss by step."""
    held_out = result["runs"][f"{name}-{seed}"]["held_out"]
    return {int(step): losses["lm loss"] for step, losses in held_out.items()}


def _by_step(curves: list[dict[int, float]]) -> dict[int, list[float]]:
    """The values of all curves at each step that all of them have."""
    if not curves:
        return {}
    steps = sorted(set.intersection(*(set(each) for each in curves)))
    return {step: [each[step] for each in curves] for step in steps}
