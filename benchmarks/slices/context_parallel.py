"""Context parallelism on two GPUs: the curve of one GPU, how fast, how much memory?

    python -m benchmarks.slices.context_parallel --site SITE --work SCRATCH --out DIR
        [--only MODEL,...] [--run NAME]...

\b
    nam56r   the recipe nam56r_small_cut: DSA, Mamba-3, M2RNN, experts, input embeddings and MTP
    mhc      the recipe gpt_mhc_h200, a GPT with 4 residual streams

Each model takes the same batches on one GPU, on two that share the sequences (DP 2), and on two
that share every sequence (CP 2). DP 2 adds up in another order as well, so how far it is from one
GPU is what CP 2 is measured by. A run that is in the result is not repeated, so a call that came to
the end of --minutes is continued by the same command. Writes context_parallel_GPU.json and .md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click

from benchmarks.harness import results, runs
from benchmarks.harness.results import Places
from benchmarks.slices import series
from benchmarks.slices.curves import FACTOR, verdict
from benchmarks.slices.series import Model, Series
from benchmarks.slices.training import curve

ONE, DATA, CONTEXT = "one GPU", "two GPUs, DP 2", "two GPUs, CP 2"


def _runs(whole: int) -> dict[str, tuple[str, ...]]:
    """The runs of a model whose step is `whole` sequences."""
    step = f"global_batch_size={whole}"
    return {
        ONE: ("gpus=1", f"micro_batch_size={whole}", step),
        DATA: ("gpus=2", f"micro_batch_size={whole // 2}", step),
        CONTEXT: ("gpus=2", "context_parallel_size=2", f"micro_batch_size={whole}", step),
    }


MODELS = {
    "nam56r": Model("nam56r_small_cut", ("eval_interval=0",), _runs(16)),
    "mhc": Model("gpt_mhc_h200", (), _runs(2)),
}


def page(result: Mapping[str, Any]) -> str:
    """Time and memory of the runs of each model, and how far their losses are from one GPU's."""
    return results.page(
        f"# Context parallelism on two GPUs, {result['date']}",
        f"Written by `benchmarks/slices/context_parallel.py`. {runs.on(result)} Times are medians "
        "after the tenth step; the peak is of the first GPU. Every run of a model takes the same "
        "batches. A curve is within the noise where it is not further from the nearer reference "
        f"than {FACTOR:g} times the difference of the two.",
        result.get("note", ""),
        *(block for name, model in result["models"].items() for block in _model(name, model)),
    )


def _model(name: str, model: Mapping[str, Any]) -> Iterator[results.Page]:
    changes = f" ({', '.join(model['changes'])})" if model["changes"] else ""
    yield f"## {name}: {model['recipe']}{changes}"
    yield results.table(
        [
            *("run", ("step, ms", ".1f"), ("of one GPU", ".3f"), ("peak, GiB", ".2f")),
            *(("first loss", ".4f"), ("last loss", ".4f")),
            *("noise of the references", "from the nearer one", "verdict"),
        ],
        _rows({label: of[0] for label, of in model["runs"].items()}),
    )


def _rows(every: Mapping[str, Mapping[str, Any]]) -> Iterator[list[Any]]:
    known = [every[label] for label in (ONE, DATA) if label in every]
    for label, run in every.items():
        found = ["", "", "reference" if label in (ONE, DATA) else "no two references"]
        if label == CONTEXT and len(known) == 2:
            found = verdict(
                [*curve(dict(run)).values()], [[*curve(dict(x)).values()] for x in known]
            )
        base = every[ONE]["milliseconds"] if ONE in every else None
        yield [
            *(label, run["milliseconds"], base and run["milliseconds"] / base, run["peak_gib"]),
            *(run["first_loss"], run["last_loss"], *found),
        ]


@click.command(help=__doc__)
@results.places("Prepared dataset [Python's own sources].", required=False)
@series.options
def main(
    places: Places, only: str | None, labels: tuple[str, ...], steps: int, minutes: float
) -> None:
    places.create()
    deadline = time.monotonic() + 60 * minutes
    every = Series(places, "context_parallel", page, steps, deadline, gpus=2)
    for name in results.chosen(only, MODELS, "models"):
        model = MODELS[name]
        every.model(name, model, series.turns(series.chosen(model, labels), 1))
    sys.exit(int(bool(every.failed)))


if __name__ == "__main__":
    main()
