"""The report of `slice_turns.py`: ratios with their spread, profiles, and curves."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import results
from benchmarks.slices.report import GRAPH_POOLS
from benchmarks.slices.subjects import Subject
from cppmega.runs import json_file
from cppmega.runs import profile as run_profile
from cppmega.runs.profile import Profile

FACTOR = 2.0
"""Times the largest difference of the two stock runs that ours may differ from them."""
_REFERENCES = ("stock", "again")
DENSE = 0.9
"""tokens/s with the dense loss over those with the sparse one."""


def report(
    subject: Subject, parts: Mapping[str, dict[str, Any]], profiles: Mapping[str, dict[str, Path]]
) -> str:
    """The report as Markdown."""
    return "\n".join(_report(subject, parts, profiles)) + "\n"


def _report(
    subject: Subject, parts: Mapping[str, dict[str, Any]], profiles: Mapping[str, dict[str, Path]]
) -> Iterator[str]:
    first = next(iter(parts.values()), None)
    if first is None:
        yield "There is no result yet."
        return
    stack = ", ".join(f"{name} {version}" for name, version in first["stack"].items())
    yield f"# {subject.title} in the NAM56R slice, {first['date']}"
    yield ""
    yield f"{stack}."
    for name, part in parts.items():
        yield ""
        later = f", {part['date']}" if part["date"] != first["date"] else ""
        yield f"## {name}{later}"
        yield ""
        if name.startswith("curves"):
            yield from _curves(part)
        else:
            yield from _speed(part, subject.targets.get(name))
            yield from _profiles(profiles.get(name, {}))
    if "dense8" in parts and "fused8" in parts:
        yield ""
        yield _dense(parts["dense8"], parts["fused8"])


def of_side(part: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    """The runs of a side that have a result."""
    runs = [run for run in part["runs"].values() if run["side"] == side]
    return [run for run in runs if "out_of_memory" not in run]


def speeds(part: Mapping[str, Any], side: str) -> list[float]:
    """tokens/s of each run of a side."""
    return [run["tokens_per_second"] for run in of_side(part, side)]


def ratio(above: list[float], below: list[float]) -> tuple[float, float, float] | None:
    """The ratio of the medians, and the lowest and highest one of any two runs."""
    if not above or not below:
        return None
    each = [a / b for a in above for b in below]
    return statistics.median(above) / statistics.median(below), min(each), max(each)


def _speed(part: Mapping[str, Any], target: float | None) -> Iterator[str]:
    pools = any("graph_pool_gib" in row for row in part["runs"].values())
    columns = ["run", "overlay", "step, ms", "lowest", "highest", "tokens/s", "peak memory, GiB"]
    yield from results.table(
        [*columns, *[GRAPH_POOLS] * pools],
        ([run, *_cells(row), *[_pools(row)] * pools] for run, row in part["runs"].items()),
    )
    found = ratio(speeds(part, "after"), speeds(part, "before"))
    yield ""
    if found is None:
        yield "No ratio: one of the sides has no result."
        return
    yield f"tokens/s, after over before: {_shown(found)}{_against(found[0], target)}"
    peaks = [max(run["peak_gib"] for run in of_side(part, side)) for side in ("after", "before")]
    yield f"Peak memory: {peaks[0] - peaks[1]:+.2f} GiB."


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "out_of_memory" in row:
        return ["", "out of memory", "", "", "", ""]
    steps = [1000 * second for second in row["seconds"]]
    times = [f"{time:.1f}" for time in (row["milliseconds"], min(steps), max(steps))]
    return [row["overlay"], *times, f"{row['tokens_per_second']:.0f}", f"{row['peak_gib']:.2f}"]


def _pools(row: Mapping[str, Any]) -> str:
    return f"{row['graph_pool_gib']:.2f}" if "graph_pool_gib" in row else ""


def _shown(found: tuple[float, float, float]) -> str:
    return f"{found[0]:.3f} ({found[1]:.3f} to {found[2]:.3f})"


def _against(found: float, target: float | None) -> str:
    if target is None:
        return "."
    return f"; the target of {target} is {'met' if found >= target else 'missed'}."


def _dense(dense: Mapping[str, Any], sparse: Mapping[str, Any]) -> str:
    found = ratio(speeds(dense, "after"), speeds(sparse, "after"))
    if found is None:
        return "Dense over sparse loss: no result."
    return f"tokens/s, dense over sparse loss: {_shown(found)}{_against(found[0], DENSE)}"


def _profiles(files: Mapping[str, Path]) -> Iterator[str]:
    read = {side: json_file.read(file, Profile) for side, file in files.items()}
    found = {side: profile for side, profile in read.items() if profile is not None}
    for side, profile in found.items():
        yield ""
        yield f"Profile, {side}:"
        yield from _literally(run_profile.lines(profile))
    if {"before", "after"} <= found.keys():
        yield ""
        yield "A is before, B after:"
        yield from _literally(run_profile.side_by_side(found["before"], found["after"]))


def _literally(lines: Iterator[str]) -> Iterator[str]:
    yield ""
    yield "```"
    yield from lines
    yield "```"


def _curves(part: Mapping[str, Any]) -> Iterator[str]:
    runs = {run["side"]: run["losses"] for run in part["runs"].values() if "losses" in run}
    sides = [side for side in runs if side not in _REFERENCES]
    if not sides or not runs.keys() >= set(_REFERENCES):
        yield "Not all curves have a result."
        return
    yield (
        "A curve is within the noise where it is not further from the nearer stock run than "
        f"{FACTOR:g} times the largest difference of the two stock runs."
    )
    for side in sides:
        yield ""
        columns = [
            "loss",
            "first",
            "last",
            "noise of two stock runs",
            f"{side} from stock",
            "verdict",
        ]
        names = {
            name: [_by_step(runs[each].get(name, {})) for each in (*_REFERENCES, side)]
            for name in sorted(runs["stock"])
        }
        yield from results.table(columns, ([n, *_verdict(*curves)] for n, curves in names.items()))

    yield ""
    yield from _speed_of_curves(part)


def _speed_of_curves(part: Mapping[str, Any]) -> Iterator[str]:
    """What the runs of the curves also show, and which of them failed at their end."""
    runs = {name: run for name, run in part["runs"].items() if "tokens_per_second" in run}
    speeds = (
        f"{name} {run['tokens_per_second']:.0f} ({run['peak_gib']:.1f} GiB{_and_pools(run)})"
        for name, run in runs.items()
    )
    if runs:
        what = "tokens/s, medians of the second half of each run (peak memory)"
        yield f"{what}: {', '.join(speeds)}."
    for name, run in runs.items():
        if "failed" in run:
            yield ""
            yield f"{name} failed after its last step: {run['failed']}"


def _and_pools(run: Mapping[str, Any]) -> str:
    return f", CUDA graphs {run['graph_pool_gib']:.1f}" if "graph_pool_gib" in run else ""


def _by_step(curve: Mapping[str, float]) -> dict[int, float]:
    return {int(step): value for step, value in curve.items()}


def _verdict(
    stock: dict[int, float], again: dict[int, float], ours: dict[int, float]
) -> tuple[str, ...]:
    if not stock or stock.keys() != again.keys() or stock.keys() != ours.keys():
        return ("", "", "", "", "the runs have other steps")
    steps = sorted(stock)
    noise = max(abs(stock[step] - again[step]) for step in steps)
    gap = max(from_both(stock[step], again[step], ours[step]) for step in steps)
    within = "within the noise" if gap <= FACTOR * noise else "**beyond the noise**"
    first, last = f"{stock[steps[0]]:.5g}", f"{stock[steps[-1]]:.5g}"
    return (first, last, f"{noise:.2e}", f"{gap:.2e}", within)


def from_both(stock: float, again: float, ours: float) -> float:
    """How far ours is from the nearer one of two stock runs; NaN is infinitely far."""
    gap = min(abs(ours - stock), abs(ours - again))
    return gap if gap == gap else float("inf")
