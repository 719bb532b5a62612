"""Hyper-connections with CUDA graphs and FP8, in turns: the same curve, how fast, how much memory?

    python -m benchmarks.slices.mhc_with --site SITE --work SCRATCH --out DIR [--only MODEL,...]
        [--run NAME]...

\b
    gpt      8 layers, C 1024, 4 streams, two micro-batches per step: so small that the host, which
             launches kernels one by one, sets the pace
    hybrid   the recipe nam56r_h200_slice_mhc, with graphs of its attention layers and routers

Every run is a process. All runs of a model take turns, the eager one first, and then once more in
the other order. A run that is in the result is not repeated, so a call that came to the end of
--minutes is continued by the same command. A run that fails does not end the others. Writes
mhc_with_GPU.json and .md.
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
from benchmarks.slices.training import GRAPH_POOLS, curve

_LOCAL, _ENGINE = ("cuda_graph_impl=local",), ("cuda_graph_impl=transformer_engine",)
_ATTENTION = ("cuda_graph_modules=('attn',)",)
_ROUTERS = ("cuda_graph_modules=('attn', 'moe_router')",)
_FP8 = ("precision=fp8", "fp8_recipe=tensorwise")
_SMALL = (
    *("hidden_size=1024", "ffn_hidden_size=4096", "num_attention_heads=16", "seq_length=2048"),
    *("micro_batch_size=1", "global_batch_size=2"),
)
MODELS = {
    "gpt": Model(
        "gpt_mhc_h200",
        _SMALL,
        {
            "eager": (),
            "local graphs of layers": _LOCAL,
            "local graphs of attention": _LOCAL + _ATTENTION,
            "Transformer Engine's graphs of layers": _ENGINE,
            "Transformer Engine's graphs of attention": _ENGINE + _ATTENTION,
            "FP8, eager": _FP8,
            "FP8, local graphs of layers": _FP8 + _LOCAL,
            "FP8, Transformer Engine's graphs of layers": _FP8 + _ENGINE,
            "FP8, recomputed streams": (*_FP8, "recompute_modules=('mhc',)"),
        },
    ),
    "hybrid": Model(
        "nam56r_h200_slice_mhc",
        (),
        {
            "eager": (),
            "local graphs of attention": _LOCAL + _ATTENTION,
            "Transformer Engine's graphs of attention": _ENGINE + _ATTENTION,
            "Transformer Engine's graphs of attention and routers": _ENGINE + _ROUTERS,
            "FP8, eager": _FP8,
        },
    ),
}


def page(result: Mapping[str, Any]) -> str:
    """Times and memory of the runs of each model, and how far their losses are from the eager."""
    return results.page(
        f"# Hyper-connections with CUDA graphs and FP8, {result['date']}",
        f"Written by `benchmarks/slices/mhc_with.py`. {runs.on(result)} Times are medians after "
        "the tenth step, in the order of the runs. A curve is within the noise where it is not "
        f"further from the nearer eager run of its precision than {FACTOR:g} times the difference "
        "of the two.",
        result.get("note", ""),
        *(block for name, model in result["models"].items() for block in _model(name, model)),
    )


def _model(name: str, model: Mapping[str, Any]) -> Iterator[results.Page]:
    changes = f" ({', '.join(model['changes'])})" if model["changes"] else ""
    yield f"## {name}: {model['recipe']}{changes}"
    yield results.table(
        [
            *("run", "step, ms", ("of eager", ".3f"), ("peak, GiB", ".2f"), (GRAPH_POOLS, ".2f")),
            *(("first loss", ".4f"), ("last loss", ".4f")),
            *("noise of eager runs", "from the nearer one", "verdict"),
        ],
        _rows(model["runs"]),
    )


def _rows(every: Mapping[str, list[dict[str, Any]]]) -> Iterator[list[Any]]:
    eager, in_fp8 = every.get("eager", []), every.get("FP8, eager", [])
    for label, of in every.items():
        reference = in_fp8 if label.startswith("FP8") and of is not in_fp8 else eager
        found = ["", "", "reference" if of is eager else "no two eager runs"]
        if of is not eager and len(reference) > 1:
            curves = [[*curve(run).values()] for run in (of[0], *reference)]
            found = verdict(curves[0], curves[1:])
        if of is in_fp8:
            found[-1] = "reference in FP8"
        times = [run["milliseconds"] for run in of]
        base = sum(run["milliseconds"] for run in eager) / len(eager) if eager else None
        yield [
            *(label, ", ".join(f"{time:.1f}" for time in times)),
            *(base and sum(times) / len(times) / base, of[0]["peak_gib"]),
            *(of[0].get("graph_pool_gib"), of[0]["first_loss"], of[0]["last_loss"], *found),
        ]


@click.command(help=__doc__)
@results.places("Prepared dataset [Python's own sources].", required=False)
@series.options
@click.option("--turns", default=2, show_default=True, help="Runs of each kind.")
def main(
    places: Places,
    only: str | None,
    labels: tuple[str, ...],
    steps: int,
    minutes: float,
    turns: int,
) -> None:
    places.create()
    every = Series(places, "mhc_with", page, steps, time.monotonic() + 60 * minutes)
    for name in results.chosen(only, MODELS, "models"):
        model = MODELS[name]
        every.model(name, model, series.turns(series.chosen(model, labels), turns))
    sys.exit(int(bool(every.failed)))


if __name__ == "__main__":
    main()
