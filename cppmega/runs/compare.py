"""Compare two runs: differences in overlay, arguments, stack and data, and the curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from cppmega.host import command_words
from cppmega.host import table as host_table
from cppmega.host.wording import counted
from cppmega.overlay import record as overlay_record
from cppmega.runs import json_file, metrics
from cppmega.runs.curves import Curve, curve, held_out
from cppmega.runs.folder import Run, RunState
from cppmega.runs.manifest import Manifest

_ROWS = 20
_EVALUATIONS = 5
_WARM = 2
"""First steps that are left out of a mean throughput: they compile and fill caches."""
_OWN_PLACES = ("--save", "--load", "--metrics", "--data-cache-path", "--tensorboard-dir")
"""Arguments that are different for every run."""
_OWN_OPTIONS = ("save", "load", "metrics", "changes", "data", "held_out", "profile_folder")
"""Options that are different for every run, or are compared elsewhere."""

Pair = tuple[float | None, float | None]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of one of the two runs."""

    name: str
    state: RunState
    recipe: str
    overlay: str
    megatron: str
    mock_data: bool
    profiled_steps: int = 0

    def line(self) -> str:
        """One line of text."""
        mock = ", MOCK DATA" if self.mock_data else ""
        mock += f", {counted(self.profiled_steps, 'step')} profiled" if self.profiled_steps else ""
        return (
            f"{self.name} ({self.state}): recipe {self.recipe}, overlay {self.overlay}, "
            f"megatron-core {self.megatron}{mock}"
        )


class StepPair(msgspec.Struct, frozen=True, kw_only=True):
    """One step of both runs; None: that run has not logged it."""

    step: int
    loss: Pair
    tokens_per_second: Pair


class HeldOutPair(msgspec.Struct, frozen=True, kw_only=True):
    """One loss of one evaluation in both runs; None: that run does not have it."""

    step: int
    name: str
    """`lm loss` for the head, `mtp_1 loss` for the first MTP depth."""
    loss: Pair


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs, as `cppmega compare --json` prints them. Lists name what differs."""

    schema: int = 1
    runs: tuple[Head, Head]
    overlay: list[str]
    recipe: list[str]
    arguments: list[str]
    environment: list[str]
    stack: list[str]
    data: list[str]
    steps: list[StepPair]
    common_steps: int
    largest_loss_difference: float | None
    tokens_per_second: Pair
    peak_gib: Pair = (None, None)
    """The most GPU memory that a rank has logged."""
    held_out: list[HeldOutPair] = []


def compare(one: Run, other: Run) -> Comparison:
    """Compare two runs.

    Raises:
        RunDamagedError: `run-damaged`.
    """
    a, b = one.manifest, other.manifest
    curves = curve(one), curve(other)
    common = sorted(curves[0].keys() & curves[1].keys())
    return Comparison(
        runs=(_head(one), _head(other)),
        overlay=overlay_record.differences(a.overlay, b.overlay),
        recipe=_different(_recipe(a), _recipe(b)),
        arguments=sorted(_different(_arguments(a), _arguments(b), "not given")),
        environment=sorted(_different(a.environment, b.environment)),
        stack=sorted(_different(a.stack, b.stack)),
        data=_data(one, other),
        steps=[_step(step, *curves) for step in sorted(curves[0].keys() | curves[1].keys())],
        common_steps=len(common),
        largest_loss_difference=_largest(common, *curves),
        tokens_per_second=(_throughput(curves[0]), _throughput(curves[1])),
        peak_gib=(_peak(curves[0]), _peak(curves[1])),
        held_out=_held_out(one, other),
    )


def lines(comparison: Comparison) -> Iterator[str]:
    """The comparison as text."""
    yield f"A  {comparison.runs[0].line()}"
    yield f"B  {comparison.runs[1].line()}"
    for part in ("overlay", "recipe", "arguments", "environment", "stack", "data"):
        changes = getattr(comparison, part)
        yield ""
        yield part + ("" if changes else ": the same")
        yield from (f"  {change}" for change in changes)
    yield ""
    if not comparison.steps:
        yield "curves: neither run has logged a step"
        return
    yield from _table(thinned(comparison.steps))
    yield ""
    if comparison.held_out:
        yield from _held_out_table(comparison.held_out)
        yield ""
    yield _verdict(comparison)


def _table(steps: Sequence[StepPair]) -> Iterator[str]:
    head = ("step", "loss A", "loss B", "tok/s A", "tok/s B", "B - A")
    rows = [head, *map(_cells, steps)]
    return host_table.table([host_table.Row(cells) for cells in rows], right=range(5))


def _cells(row: StepPair) -> tuple[str, ...]:
    losses = [_number(loss, ".5f") for loss in row.loss]
    speeds = [_number(speed, ".0f") for speed in row.tokens_per_second]
    return (str(row.step), *losses, *speeds, _gap(*row.loss))


def _held_out_table(pairs: Sequence[HeldOutPair]) -> Iterator[str]:
    """Every loss of the last evaluations: those of the head first, then each MTP depth."""
    names = list(dict.fromkeys(pair.name for pair in pairs))
    head = ("step", "A", "B", "B - A", "held-out loss")
    rows = [
        (str(pair.step), *(_number(loss, ".5f") for loss in pair.loss), _gap(*pair.loss), name)
        for name in names
        for pair in [pair for pair in pairs if pair.name == name][-_EVALUATIONS:]
    ]
    return host_table.table([host_table.Row(cells) for cells in [head, *rows]], right=range(4))


def _gap(a: float | None, b: float | None) -> str:
    return "" if a is None or b is None else f"{b - a:+.2e}"


def _verdict(comparison: Comparison) -> str:
    common, largest = comparison.common_steps, comparison.largest_loss_difference
    if not common:
        verdict = "no step is in both runs"
    elif largest == 0:
        verdict = f"{common} common steps: the losses are bitwise equal"
    elif largest is None:
        verdict = f"{common} common steps, none with a loss in both runs"
    else:
        verdict = f"{common} common steps: the losses differ by up to {largest:.3e}"
    a, b = comparison.tokens_per_second
    if a and b:
        verdict += f"; throughput {a:.0f} and {b:.0f} tokens/s ({100 * (b / a - 1):+.1f} %)"
    a, b = comparison.peak_gib
    if a and b:
        verdict += f"; peak memory {a:.1f} and {b:.1f} GiB ({b - a:+.1f})"
    return verdict


def thinned(steps: Sequence[StepPair], count: int = _ROWS) -> list[StepPair]:
    """Evenly chosen steps, the first and the last among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(at * (len(steps) - 1) / (count - 1))] for at in range(count)]


def _head(run: Run) -> Head:
    manifest = run.manifest
    return Head(
        name=run.name,
        state=run.state(),
        recipe=manifest.recipe.name,
        overlay=manifest.digest,
        megatron=manifest.megatron.version,
        mock_data=manifest.data.mock,
        profiled_steps=run.profiled_steps,
    )


def _different(
    one: Mapping[str, object], other: Mapping[str, object], absent: str = "not there"
) -> list[str]:
    """`name: value of one | value of the other`, where they differ."""
    return [
        f"{name}: {one.get(name, absent)} | {other.get(name, absent)}"
        for name in dict.fromkeys((*one, *other))
        if one.get(name) != other.get(name)
    ]


def _recipe(manifest: Manifest) -> dict[str, str]:
    recipe = manifest.recipe
    return {
        "recipe": recipe.name,
        "text of the recipe file": recipe.sha256[:16],
        "changed with --set": " ".join(recipe.changes) or "nothing",
    }


def _arguments(manifest: Manifest) -> dict[str, object]:
    """Arguments and options -> values, without those that are different for every run.

    Of an argument that recurs, Megatron uses the last.
    """
    words = command_words.read(manifest.arguments)
    named = {option.name: " ".join(option.values) or "given" for option in words}
    options = {
        "--" + name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
        for name, value in json_file.plain(manifest.options).items()
        if name not in _OWN_OPTIONS
    }
    stated = {**options, **named, "nodes": manifest.nodes, "nproc": manifest.nproc}
    return {name: value for name, value in stated.items() if name not in _OWN_PLACES}


def _data(one: Run, other: Run) -> list[str]:
    """Compare by content: two copies of the same tokens are the same data."""
    facts: list[dict[str, object]] = []
    for run in (one, other):
        data, start = run.manifest.data, metrics.first_start(run.logged)
        facts.append(
            {
                "mock data": data.mock,
                # The one that the ranks found at their start; before that, the launch's.
                "fingerprint": (start and start.data) or data.fingerprint,
                "paths": " ".join(data.paths),
                "held-out fingerprint": (start and start.held_out) or "none",
            }
        )
    if facts[0]["fingerprint"] == facts[1]["fingerprint"]:
        facts[0]["paths"] = facts[1]["paths"]
    return _different(facts[0], facts[1])


def _held_out(one: Run, other: Run) -> list[HeldOutPair]:
    losses = [
        {(row.evaluated, name): loss for row in held_out(run) for name, loss in row.losses.items()}
        for run in (one, other)
    ]
    return [
        HeldOutPair(step=step, name=name, loss=(losses[0].get(key), losses[1].get(key)))
        for key in sorted(losses[0].keys() | losses[1].keys())
        for step, name in [key]
    ]


def _step(step: int, *curves: Curve) -> StepPair:
    rows = [curve.get(step) for curve in curves]
    loss = [None if row is None else row.loss for row in rows]
    speed = [None if row is None else row.tokens_per_second for row in rows]
    return StepPair(step=step, loss=(loss[0], loss[1]), tokens_per_second=(speed[0], speed[1]))


def _largest(common: Sequence[int], a: Curve, b: Curve) -> float | None:
    pairs = [(a[step].loss, b[step].loss) for step in common]
    gaps = [abs(x - y) for x, y in pairs if x is not None and y is not None]
    return max(gaps, default=None, key=lambda gap: math.inf if math.isnan(gap) else gap)


def _throughput(steps: Curve) -> float | None:
    """Mean over all steps except the first and the profiled ones, weighted by time."""
    rows = [steps[step] for step in sorted(steps)][_WARM:]
    rows = [row for row in rows if not row.profiled]
    seconds = sum(row.seconds for row in rows)
    tokens = sum(row.seconds * (row.tokens_per_second or 0.0) for row in rows)
    return tokens / seconds if seconds else None


def _peak(steps: Curve) -> float | None:
    return max((row.peak_gib for row in steps.values() if row.peak_gib is not None), default=None)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
