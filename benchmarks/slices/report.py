"""The report of `slices/training.py`: medians, the resumed curve, table, plot."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import results
from cppmega.host.wording import counted

WARM = 10
"""Steps left out of the medians."""
SAVE, KILL, END = 20, 25, 40
"""The resumed run saves every so many steps, is killed after that one, and ends at that one."""
GRAPH_POOLS = "reserved for CUDA graphs, GiB"
"""Title of `graph_pool_gib`; tables of the slices leave it out where no run has graphs."""
COLUMNS = {
    "stock": "stock, made to start",
    "stock-tilelang": "stock, made to start, TileLang",
    "overlay": "with the overlay",
    "tilelang": "with the overlay, TileLang",
    "linear": "and linear cross-entropy",
}


def measured(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Curves of one run, and medians of its steps that were not profiled.

    Raises:
        ClickException: a loss or gradient is not finite, so the throughput means nothing.
    """
    start = next(row for row in rows if "start" in row)
    steps = steps_of(rows)
    if start["mock_data"] or any(row["mock_data"] for row in steps):
        raise click.ClickException(
            "the run trained on mock data, which must not appear in a result"
        )
    for row in steps:
        if not all(math.isfinite(row[key] or math.nan) for key in ("loss", "grad_norm")):
            raise click.ClickException(f"step {row['step']}: {row['loss']=} {row['grad_norm']=}")
    warm = [row for row in steps[WARM:] if not row.get("profiled", False)]
    if not warm:
        raise click.ClickException(f"{len(steps)} steps are too few: {WARM} warm up")
    seconds = statistics.median(row["seconds"] for row in warm)
    middle = min(warm, key=lambda row: abs(row["seconds"] - seconds))
    return {
        "overlay": start["overlay"],
        "steps": len(steps),
        "milliseconds": round(1000 * seconds, 1),
        "tokens_per_second": round(middle["tokens_per_second"], 1),
        "tflops_per_gpu": round(middle["tflops_per_gpu"], 1),
        "tflops_per_gpu_by_megatron": middle["tflops_per_gpu_by_megatron"],
        "peak_gib": round(max(row["peak_gib"] for row in steps), 2),
        **graph_pools(steps),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "curve": [[row["step"], row["loss"], row["grad_norm"], row["seconds"]] for row in steps],
        "mtp": [[row["step"], *mtp(row)] for row in steps],
    }


def steps_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of steps, without those of starts."""
    return [row for row in rows if "step" in row]


def graph_pools(steps: list[dict[str, Any]]) -> dict[str, float]:
    """The most that a run's CUDA graphs kept reserved, GiB; empty for a run without."""
    found = [row["graph_pool_gib"] for row in steps if row.get("graph_pool_gib") is not None]
    return {"graph_pool_gib": round(max(found), 2)} if found else {}


def mtp(row: dict[str, Any]) -> list[float]:
    """The MTP losses of a step, by depth."""
    return [value for key, value in sorted(row["losses"].items()) if key.startswith("mtp")]


def losses(rows: list[dict[str, Any]]) -> dict[int, float]:
    """The loss by step."""
    return {row["step"]: row["loss"] for row in steps_of(rows)}


def apart(one: dict[int, float], other: dict[int, float]) -> float | None:
    """The largest difference of losses over the steps that both have; None without any."""
    both = set(one) & set(other)
    return max((abs(one[step] - other[step]) for step in both), default=None)


def compared(
    first: dict[int, float], again: dict[int, float], whole: dict[int, float]
) -> dict[str, Any]:
    """Compare a resumed run, and as a yardstick the killed one, with an uninterrupted run.

    Raises:
        ClickException: where it was not resumed from the checkpoint, or was not killed in time.
    """
    if min(again) != SAVE + 1:
        raise click.ClickException(f"resumed at {min(again)}, the checkpoint was of step {SAVE}")
    if max(first) >= END:
        raise click.ClickException(f"the kill came too late, at step {max(first)}")
    both = sorted(set(again) & set(whole))
    return {
        "killed_after_step": max(first),
        "resumed_from_step": SAVE,
        "compared_steps": [both[0], both[-1]],
        "largest_difference": apart(again, whole),
        "unkilled_difference": apart(first, whole),
        "loss_span": max(whole.values()) - min(whole.values()),
    }


def headline(result: dict[str, Any]) -> str:
    """The headline that `cppmega recipes` prints."""
    parts = [
        f"{name} out of memory"
        if "out_of_memory" in row
        else f"{name} {row['tokens_per_second']:.0f} tokens/s, {row['peak_gib']:.1f} GiB"
        for name, row in result["runs"].items()
    ]
    return f"{result['gpus']} x {result['stack']['gpu']}: " + "; ".join(parts)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    return "\n".join(_table(result)) + "\n"


def _table(result: dict[str, Any]) -> Iterator[str]:
    stack = ", ".join(f"{name} {version}" for name, version in result["stack"].items())
    changes = f" ({', '.join(result['changes'])})" if result["changes"] else ""
    yield f"# {result['recipe']}{changes}, {result['date']}"
    yield ""
    yield f"{counted(result['gpus'], 'GPU')}; {stack}."
    data = result["data"]
    yield f"Data {data['fingerprint']}: {data['documents']} documents, {data['tokens']} tokens."
    yield ""
    names = [name for name in COLUMNS if name in result["runs"]]
    rows = (
        ("overlay digest", "overlay"),
        ("step, ms", "milliseconds"),
        ("tokens/s", "tokens_per_second"),
        ("TFLOP/s per GPU, every layer counted", "tflops_per_gpu"),
        ("TFLOP/s per GPU, as Megatron reports", "tflops_per_gpu_by_megatron"),
        ("peak memory, GiB", "peak_gib"),
        (GRAPH_POOLS, "graph_pool_gib"),
        ("first loss", "first_loss"),
        ("last loss", "last_loss"),
    )
    kept = (
        [label, *(_cell(result["runs"][name], key) for name in names)]
        for label, key in rows
        if key == "tokens_per_second" or any(key in result["runs"][name] for name in names)
    )
    yield from results.table(["", *(COLUMNS[name] for name in names)], kept)
    if "resume" in result:
        row = result["resume"]
        yield ""
        yield (
            f"Killed after step {row['killed_after_step']}, resumed from step "
            f"{row['resumed_from_step']}: over steps {row['compared_steps'][0]} to "
            f"{row['compared_steps'][1]} the loss differs by at most "
            f"{row['largest_difference']:.2e} (it spans {row['loss_span']:.2f}; before the kill "
            f"the two differ by {row['unkilled_difference']:.2e}, the noise of equal runs)."
        )


def _cell(row: dict[str, Any], key: str) -> str:
    return str(row.get(key, "out of memory" if "out_of_memory" in row else ""))


def draw(result: Path) -> Path:
    """Draw the curves of a result into a PNG next to it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = json.loads(result.read_text())
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for name, row in data["runs"].items():
        if "out_of_memory" in row:
            continue
        steps = [point[0] for point in row["curve"]]
        left.plot(steps, [point[1] for point in row["curve"]], label=name)
        right.plot(steps, [1000 * point[3] for point in row["curve"]], label=name)
    left.set(xlabel="step", ylabel="loss, nats", title=f"{data['recipe']} on real data")
    right.set(xlabel="step", ylabel="step, ms", yscale="log", title=data["stack"]["gpu"])
    left.legend()
    figure.tight_layout()
    target = result.with_suffix(".png")
    figure.savefig(target, dpi=120)
    return target
