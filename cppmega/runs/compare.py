"""Two runs side by side: what differed in overlay, arguments, stack and data, and the curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.overlay import record as overlay_record
from cppmega.runs.folder import Run

_ROWS = 20
_WARM = 2
"""First steps that a mean throughput leaves out: they compile and fill caches."""
_OWN_PLACES = ("--save", "--load", "--metrics", "--data-cache-path", "--tensorboard-dir")
"""Arguments that every run has its own of."""
_OWN_OPTIONS = ("save", "load", "metrics", "changes")

Curve = dict[int, Mapping[str, Any]]


def compare(one: Run, other: Run) -> dict[str, Any]:
    """Everything that can be said, as data."""
    for run in (one, other):
        run.require_whole()
    curves = [curve(run) for run in (one, other)]
    common = sorted(curves[0].keys() & curves[1].keys())
    return {
        "schema": 1,
        "runs": [_head(one), _head(other)],
        "overlay": _overlay(one, other),
        "recipe": _recipe(one, other),
        "arguments": _arguments(one, other),
        "environment": _mapping(one, other, "environment"),
        "stack": _mapping(one, other, "stack"),
        "data": _data(one, other),
        "steps": [_step(step, *curves) for step in sorted(curves[0].keys() | curves[1].keys())],
        "common_steps": len(common),
        "largest_loss_difference": _largest(common, *curves),
        "tokens_per_second": [_throughput(found) for found in curves],
    }


def curve(run: Run) -> Curve:
    """Step -> what was logged; a step that was repeated counts as it was trained last."""
    return {int(row["step"]): row for row in run.rows()}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The same for people."""
    first, second = found["runs"]
    yield f"A  {_head_line(first)}"
    yield f"B  {_head_line(second)}"
    for part in ("overlay", "recipe", "arguments", "environment", "stack", "data"):
        changes = found[part]
        yield ""
        yield part + ("" if changes else ": the same")
        yield from (f"  {change}" for change in changes)
    yield ""
    if not found["steps"]:
        yield "curves: neither run has logged a step"
        return
    losses = f"{'loss A':>10} {'loss B':>10} {'B - A':>10}"
    yield f"{'step':>8}  {losses}  {'tok/s A':>10} {'tok/s B':>10}"
    for row in thinned(found["steps"]):
        loss, speed = row["loss"], row["tokens_per_second"]
        gap = "" if None in loss else f"{loss[1] - loss[0]:+.2e}"
        yield (
            f"{row['step']:>8}  {_number(loss[0], '.5f'):>10} {_number(loss[1], '.5f'):>10} "
            f"{gap:>10}  {_number(speed[0], '.0f'):>10} {_number(speed[1], '.0f'):>10}"
        )
    yield ""
    yield _verdict(found)


def _verdict(found: Mapping[str, Any]) -> str:
    common, largest = found["common_steps"], found["largest_loss_difference"]
    if not common:
        said = "no step is in both runs"
    elif largest == 0:
        said = f"{common} common steps: the losses are equal to the bit"
    else:
        said = f"{common} common steps: the losses differ by up to {largest:.3e}"
    a, b = found["tokens_per_second"]
    if a and b:
        said += f"; throughput {a:.0f} and {b:.0f} tokens/s ({100 * (b / a - 1):+.1f} %)"
    return said


def thinned(steps: Sequence[dict[str, Any]], count: int = _ROWS) -> list[dict[str, Any]]:
    """Evenly chosen steps, the first and the last among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(at * (len(steps) - 1) / (count - 1))] for at in range(count)]


def plot(one: Run, other: Run, target: Path) -> None:
    """Loss and throughput of both runs over the steps.

    Raises:
        CppmegaError: `package-missing`.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise CppmegaError(
            "package-missing",
            "matplotlib is not installed.",
            "It draws the picture; the table does not need it.",
            "pip install matplotlib, or leave --plot out",
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for run, colour in zip((one, other), ("#c44e52", "#4c72b0"), strict=True):
        rows = sorted(curve(run).items())
        for axis, key in zip(axes, ("loss", "tokens_per_second"), strict=True):
            points = [(step, row[key]) for step, row in rows if row.get(key) is not None]
            axis.plot(
                *zip(*points, strict=True) if points else ([], []), color=colour, label=run.name
            )
    for axis, title in zip(axes, ("loss, nats per token", "tokens per second"), strict=True):
        axis.set_xlabel("step")
        axis.set_title(title, fontsize=10)
    axes[0].legend()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def _head(run: Run) -> dict[str, Any]:
    manifest = run.manifest
    return {
        "name": run.name,
        "state": run.state(),
        "recipe": manifest.get("recipe", {}).get("name"),
        "overlay": manifest.get("overlay", {}).get("digest"),
        "megatron": manifest.get("megatron", {}).get("version"),
        "mock_data": manifest.get("data", {}).get("mock"),
    }


def _head_line(head: Mapping[str, Any]) -> str:
    mock = ", MOCK DATA" if head["mock_data"] else ""
    return (
        f"{head['name']} ({head['state']}): recipe {head['recipe']}, overlay {head['overlay']}, "
        f"megatron-core {head['megatron']}{mock}"
    )


def _overlay(one: Run, other: Run) -> list[str]:
    return overlay_record.differences(one.manifest["overlay"], other.manifest["overlay"])


def _recipe(one: Run, other: Run) -> list[str]:
    a, b = (run.manifest["recipe"] for run in (one, other))
    found = []
    for key, label in (("name", "recipe"), ("sha256", "text of the recipe file")):
        if a[key] != b[key]:
            found.append(f"{label}: {a[key][:16]} | {b[key][:16]}")
    changes = [" ".join(recipe["changes"]) or "nothing" for recipe in (a, b)]
    if changes[0] != changes[1]:
        found.append(f"changed with --set: {changes[0]} | {changes[1]}")
    return found


def _arguments(one: Run, other: Run) -> list[str]:
    a, b = (_named(run.manifest["arguments"]) for run in (one, other))
    found = [
        f"{name}: {_said(a, name)} | {_said(b, name)}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name) and name not in _OWN_PLACES
    ]
    options = [run.manifest["options"] for run in (one, other)]
    for name in sorted(options[0].keys() & options[1].keys()):
        if options[0][name] != options[1][name] and name not in (*_OWN_OPTIONS, "data"):
            flag = "--" + name.replace("_", "-")
            if flag not in {line.partition(":")[0] for line in found} and flag not in _OWN_PLACES:
                found.append(f"{flag}: {options[0][name]} | {options[1][name]}")
    for name in ("nodes", "nproc"):
        if one.manifest[name] != other.manifest[name]:
            found.append(f"{name}: {one.manifest[name]} | {other.manifest[name]}")
    return found


def _said(arguments: Mapping[str, str], name: str) -> str:
    return arguments[name] or "given" if name in arguments else "not given"


def _named(argv: Sequence[str]) -> dict[str, str]:
    """Argument -> its values; both `--a b` and `--a=b` are written."""
    found: dict[str, str] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = value if equals else ""
        elif name:
            found[name] = f"{found[name]} {word}".strip()
    return found


def _mapping(one: Run, other: Run, part: str) -> list[str]:
    a, b = one.manifest[part], other.manifest[part]
    return [
        f"{name}: {a.get(name, 'not there')} | {b.get(name, 'not there')}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def _data(one: Run, other: Run) -> list[str]:
    """By contents: two copies of the same tokens are the same data."""
    a, b = (run.manifest["data"] for run in (one, other))
    found = []
    if a["mock"] != b["mock"]:
        found.append(f"mock data: {a['mock']} | {b['mock']}")
    trained = [_trained_on(run) for run in (one, other)]
    if trained[0] != trained[1]:
        found.append(f"fingerprint: {trained[0]} | {trained[1]}")
        found.append(f"paths: {' '.join(a['paths'])} | {' '.join(b['paths'])}")
    return found


def _trained_on(run: Run) -> str:
    """What the ranks found when they started; before that, what the launch found."""
    header = next((row for row in run.all_rows() if "start" in row), {})
    return str(header.get("data") or run.manifest["data"]["fingerprint"])


def _step(step: int, a: Curve, b: Curve) -> dict[str, Any]:
    rows = [found.get(step, {}) for found in (a, b)]
    return {
        "step": step,
        **{k: [row.get(k) for row in rows] for k in ("loss", "tokens_per_second")},
    }


def _largest(common: Sequence[int], a: Curve, b: Curve) -> float | None:
    gaps = [abs(a[step]["loss"] - b[step]["loss"]) for step in common]
    return max(gaps, default=None, key=lambda gap: math.inf if math.isnan(gap) else gap)


def _throughput(found: Curve) -> float | None:
    """Mean over the steps after the first ones, weighted by time."""
    rows = [found[step] for step in sorted(found)][_WARM:]
    seconds = sum(row["seconds"] for row in rows)
    tokens = sum(row["seconds"] * row["tokens_per_second"] for row in rows)
    return tokens / seconds if seconds else None


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
