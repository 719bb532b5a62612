"""Write what README, docs/production.md and the picture of kernels quote of the result files.

A test compares. Tables that the other pages of docs/ quote are put in when the site is built.

usage: python scripts/readme_figures.py [--from runs/quickstart]

With --from, the comparison and the curves of a smoke run are copied into benchmarks/results first;
SEEDS="1 2 3" scripts/quickstart.sh writes them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import kernel_plot
import production

from benchmarks.stacks import STEPS
from cppmega.recipe import index as recipes_index
from cppmega.recipe.arithmetic import parameters
from examples.smoke.records import Summary

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def rewritten(text: str) -> str:
    """Fill in every generated part of the README from the result files."""
    return filled(text, parts())


def filled(text: str, parts: Mapping[str, str]) -> str:
    """A document with what stands between the marks of each part replaced by the part."""
    for name, part in parts.items():
        pattern = rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)"
        text, count = re.subn(pattern, lambda m, p=part: m[1] + p + m[2], text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"the document has {count} places for {name}, expected one")
    return text


def parts() -> dict[str, str]:
    """The generated parts of the README by name."""
    return {"models": models(), "speed": speed(), "smoke": smoke(), "upstream": upstream()}


def speed() -> str:
    """Runs of NAM56R: its slice's fastest, released and patched, and the longest of all of it."""
    best: dict[bool, float] = {True: 0.0, False: 0.0}
    size = parameters(recipes_index.load("nam56r_h200_8gpu_bf16")).total
    whole = [
        run
        for run in production.runs()
        if parameters(run.recipe).total == size and run.result["benchmark"] == "whole_training"
    ]
    longest = max(whole, key=lambda run: run.row["steps"])
    assert longest.tokens is not None
    for run in production.runs():
        if run.recipe.name.startswith("nam56r_h200_slice"):
            stock = run.name.startswith("stock")
            best[stock] = max(best[stock], run.tokens or 0.0)
    return (
        f"On one H200, six layers of NAM56R (sparse attention, experts, MTP) train at "
        f"{best[False] / 1000:.1f}k tokens/s with the patches;\nthe release alone reaches "
        f"{best[True] / 1000:.1f}k ([table](docs/production.md)). The whole model, "
        f"{size / 1e9:.1f} billion parameters,\ntrains at "
        f"{longest.tokens / 1000:.1f}k tokens/s per GPU on "
        f"{longest.result['gpus']} H200 ([curves](benchmarks/results/{longest.file.stem}.png)). "
        "Its authors name 4.73 billion\nand another pattern of layers; what they launched is what "
        "trains here ([why](docs/production.md#reported-by-the-earlier-overlay)).\n"
    )


def models() -> str:
    """Cuts of public models on one GPU, stock and with the patches."""
    from benchmarks.models import MODELS, SIDES  # imports torch, which the site does without

    result = json.loads((RESULTS / "models_h200.json").read_text())
    heads = ["model", "stock, tokens/s", "with the patches", "ratio", "peak memory, GiB"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    added = [MODELS[recipe].title for recipe in result["models"] if MODELS[recipe].needs]
    for recipe, sides in result["models"].items():
        stock, ours = (sides[side]["run"] for side in SIDES)
        rates = [run["tokens_per_second"] for run in (stock, ours)]
        peaks = " to ".join(f"{run['peak_gib']:.1f}" for run in (stock, ours))
        cells = [MODELS[recipe].title, *(f"{rate:,.0f}" for rate in rates)]
        rows.append(f"| {' | '.join([*cells, f'{rates[1] / rates[0]:.2f}', peaks])} |")
    table = "\n".join(rows)
    return (
        f"\n{table}\n\nEach is cut to a few layers at its true widths, and trains on one H200 from "
        "the same weights, with micro-batches of its own on either side "
        "([settings and losses](benchmarks/results/models_h200.md)). "
        f"{', '.join(added)} on stock has the patches that add its layers.\n"
    )


def smoke() -> str:
    """The smoke run on either side, over its seeds: labels, losses, the plot."""
    summaries = msgspec.json.decode(
        (RESULTS / "smoke_cpu.json").read_bytes(), type=dict[str, Summary]
    ).values()
    depths = len(next(iter(summaries)).true_mtp_loss)
    heads = ["run", "wrong MTP labels"]
    heads += [f"held-out MTP loss, depth {depth}" for depth in range(1, depths + 1)]
    rows = []
    for stock in (True, False):
        side = [summary for summary in summaries if summary.is_stock == stock]
        wrong = sum(summary.wrong_mtp_labels for summary in side)
        labels = sum(summary.mtp_labels for summary in side)
        cells = ["stock" if stock else "with the patches", f"{100 * wrong / labels:.1f} %"]
        cells += map(_mean_and_range, zip(*(run.true_mtp_loss for run in side), strict=True))
        rows.append(f"| {' | '.join(cells)} |")
    table = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows]
    seeds = ", ".join(str(summary.seed) for summary in summaries if summary.is_stock)
    caption = f"Seeds {seeds}: mean (lowest to highest), in nats, on the true labels."
    picture = "![MTP losses of both sides](benchmarks/results/smoke_cpu.png)"
    return "\n".join(["", *table, "", caption, "", picture, ""])


def _mean_and_range(values: tuple[float, ...]) -> str:
    """`1.146 (1.138 to 1.151)`."""
    mean = sum(values) / len(values)
    return f"{mean:.3f} ({min(values):.3f} to {max(values):.3f})"


def kernels() -> str:
    """The picture of the kernels, and where its numbers are from."""
    picture = f"benchmarks/results/{kernel_plot.PICTURE.name}"
    link = "[{}](benchmarks/results/{}_h200.md)".format
    sources = (
        link("indexer", "dsa_indexer"),
        link("attention", "dsa_attention"),
        link("losses", "linear_cross_entropy"),
        link("hyper-connections", "mhc"),
        link("Hadamard transform", "hadamard"),
    )
    return (
        f"\n![Times of the kernels, and their share of what the GPU can do]({picture})\n\n"
        f"One H200; all shapes: {', '.join(sources)}.\n\n{attention()}\n{connections()}"
    )


def attention() -> str:
    """DSA's attention next to TileLang's, alone and in the NAM56R slice."""
    cases = json.loads((RESULTS / "dsa_attention_h200.json").read_text())["cases"]

    def faster(model: str) -> str:
        ways = [case for name, case in cases.items() if name.startswith(f"{model}, ")]
        times = [
            [case[way]["both"]["milliseconds"] for way in ("tilelang", "ours")] for case in ways
        ]
        return _range([tilelang / ours for tilelang, ours in times])

    slices = json.loads((RESULTS / "dsa_attention_slices_h200.json").read_text())["fused8"]["runs"]
    before, after = (slices[run]["tokens_per_second"] / 1000 for run in ("before1", "after1"))
    return (
        f"Forward and backward of the sparse attention are {faster('NAM56R')} times as fast as "
        f"TileLang's at NAM56R's widths,\nand {faster('DeepSeek-V3.2')} times at DeepSeek-V3.2's. "
        "In the slice at a micro-batch of 8 they raise\n"
        f"tokens/s from {before:.1f}k to {after:.1f}k "
        "([with and without](benchmarks/results/dsa_attention_slices_h200.md),\n"
        "[designs](benchmarks/results/dsa_attention_designs.md), "
        "[what FP8 could save](benchmarks/results/dsa_fp8.md)).\n"
    )


def connections() -> str:
    """A site of hyper-connections next to what else computes one."""
    sites = json.loads((RESULTS / "mhc_cutile_h200.json").read_text())["sites"]
    shape, times = next(iter(sites.items()))
    rivals = ("dev, cuTile beside Triton", "dev", "Transformer Engine")
    dev, without, rival = (times[way] / times["ours"] for way in rivals)
    step = json.loads((RESULTS / "mhc_training_h200.json").read_text())["dev"]["step"]
    base = step["without"]["milliseconds"]
    ours, others = (step[way]["milliseconds"] / base - 1 for way in ("ours", "dev"))
    return (
        f"A site of manifold-constrained hyper-connections ({shape}) takes {times['ours']:.1f} ms "
        "forward and backward,\n"
        f"{times['ours'] / times['least']:.2f} times the time of a copy of what it must read and "
        "write. The kernels that Megatron's branch dev chooses on an H200\n"
        f"take {dev:.1f} times as long with cuTile and {without:.1f} times without it, and those "
        f"of Transformer Engine {rival:.1f} times\n"
        "([by op](benchmarks/results/mhc_cutile_h200.md), "
        "[what limits them](benchmarks/results/mhc_designs.md)). Four streams make\n"
        f"forward and backward of a GPT of 8 layers {ours:.0%} longer, and {others:.0%} with dev's "
        "kernels ([training](benchmarks/results/mhc_training_h200.md)).\n"
    )


def linear() -> str:
    """Linear cross-entropy next to Megatron's own losses, at 32768 tokens."""
    report = json.loads((RESULTS / "linear_cross_entropy_h200.json").read_text())
    rows = [row for row in report["rows"] if row["tokens"] == 32768]
    sizes = sorted({row["vocabulary"] for row in rows})
    shown = {
        "stock": "Megatron, unfused",
        "native": "Megatron, `native`",
        "te": "Megatron, `te`",
        "ours": "cppmega, `linear`",
        "ours, masked tokens left out": "the same, masked tokens left out",
    }
    lines, measured = [], {}
    for row in rows:
        name = row["name"].partition(" (")[0]
        measured[name, row["vocabulary"]] = row
    for name, label in shown.items():
        cells = [label]
        for size in sizes:
            row = measured[name, size]
            cells += [f"{row['milliseconds']:.1f}", f"{row['above_gradients_gib']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    heads = [part for size in sizes for part in (f"V={size}, ms", "GiB above dX and dW")]
    times = {key: row["milliseconds"] for key, row in measured.items()}
    every, left_out = (
        [times["te", size] / times[name, size] for size in sizes] for name in list(shown)[3:]
    )
    memory = [
        measured["te", size]["above_gradients_gib"] / measured["ours", size]["above_gradients_gib"]
        for size in sizes
    ]
    environment = report["environment"]
    text = (
        f"Forward and backward of 32768 tokens, a tenth of them masked, H=4096, bf16, one "
        f"{environment['GPU']}, {environment['date']}, all taking turns\nin one process. Relative "
        f"to Transformer Engine's loss (`te`), the fastest that Megatron offers: {_range(every)} "
        f"times the speed\nwith {_range(memory)} times less memory, and {_range(left_out)} times "
        f"the speed with the masked tokens left out."
    )
    head = f"| implementation | {' | '.join(heads)} |"
    return "\n".join(["", text, "", head, "|---" * (1 + len(heads)) + "|", *lines, ""])


def _range(values: list[float]) -> str:
    """`0.98 to 1.00`."""
    shown = sorted({f"{value:.2f}" if value < 2 else f"{value:.1f}" for value in values})
    return shown[0] if len(shown) == 1 else f"{shown[0]} to {shown[-1]}"


def upstream() -> str:
    """The counts of Megatron's own unit tests, on each device."""
    counts = []
    for device in ("h200", "cpu"):
        name = f"upstream_unit_tests_{device}"
        result = json.loads((RESULTS / f"{name}.json").read_text())
        counts.append(
            f"{result['passed_on_both']} pass on both trees on {device.upper()}, "
            f"{len(result['meant'])} differ as a page intends and {len(result['differences'])} "
            f"otherwise, with the {len(result['pages'])} pages that were in the code on "
            f"{result['date']} ([result](benchmarks/results/{name}.md))"
        )
    return "; ".join(counts) + ".\n"


def tables() -> dict[str, str]:
    """What docs/stacks.md shows of results, by the name of its place."""
    return {"stacks": stacks(), "sizes": kernel_sizes(), "spills": kernel_spills()}


def stacks() -> str:
    """A row for each stack that was installed and tested, and a column for each step."""
    found = json.loads((RESULTS / "stacks.json").read_text())
    order = sorted(found.values(), key=lambda one: Version(one["versions"]["torch"]))
    steps = [step for step in STEPS if any(step in one["steps"] for one in order)]
    heads = ("torch", "triton", "python", "megatron-core")
    lines = [[*heads, *steps, "date"], ["---"] * (len(heads) + len(steps) + 1)]
    for one in order:
        told = [one["steps"].get(step, {"result": "not run"})["result"] for step in steps]
        dates = sorted({step["date"] for step in one["steps"].values()})
        lines.append([*(one["versions"][head] for head in heads), *told, ", ".join(dates)])
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


Cells = Mapping[str, Mapping[str, Any]]
"""What is known of kernels: by architecture and name."""


def kernel_sizes() -> str:
    """A row for each kernel: its shared memory on each architecture under each Triton."""
    found = _of_kernels("shared")
    names = {name for archs in found.values() for of in archs.values() for name in of}
    return f"\nKiB under {_by_kernel(found, names, lambda size: f'{size / 1024:.1f}')}"


def kernel_spills() -> str:
    """A row for each kernel that spills registers on some architecture under some Triton."""
    found = _of_kernels("spills")
    every = [item for archs in found.values() for of in archs.values() for item in of.items()]
    names = {name for name, (spilled, _) in every if spilled}
    told = "; ".join(
        f"{len({name for of in archs.values() for name in of})} under {triton}"
        for triton, archs in found.items()
    )
    table = _by_kernel(found, names, lambda spill: "{} ({})".format(*spill))
    return f"\nKernels assembled: {told}. Bytes (registers) under {table}"


def _of_kernels(what: str) -> dict[str, Cells]:
    found = json.loads((RESULTS / "kernel_sizes.json").read_text())
    return {triton: found[triton].get(what, {}) for triton in sorted(found, key=Version)}


def _by_kernel(found: Mapping[str, Cells], names: set[str], shown: Callable[[Any], str]) -> str:
    archs = sorted({arch for archs in found.values() for arch in archs}, key=int)
    lines = [["kernel", *(f"sm_{arch}" for arch in archs)], ["---"] * (1 + len(archs))]
    for name in sorted(names):
        of_archs = [[each.get(arch, {}).get(name) for each in found.values()] for arch in archs]
        cells = (" / ".join("-" if x is None else shown(x) for x in each) for each in of_archs)
        lines.append([f"`{name}`", *cells])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"Triton {' / '.join(found)}:\n\n{table}\n"


def cli() -> str:
    """Times of the commands."""
    return (RESULTS / "cli.md").read_text()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="source", type=Path)
    options = parser.parse_args()
    if options.source:
        shutil.copy(options.source / "comparison.json", RESULTS / "smoke_cpu.json")
        shutil.copy(options.source / "curves.png", RESULTS / "smoke_cpu.png")
    if kernel_plot.drawn() != kernel_plot.numbers():
        kernel_plot.draw()
    readme = RESULTS.parent.parent / "README.md"
    readme.write_text(rewritten(readme.read_text()))
    status = readme.parent / "docs" / "production.md"
    status.write_text(filled(status.read_text(), {"production": production.page()}))
    tested = status.with_name("stacks.md")
    tested.write_text(filled(tested.read_text(), tables()))
