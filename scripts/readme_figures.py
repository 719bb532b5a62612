"""Write the README's tables and figure from result files; a test compares them.

usage: python scripts/readme_figures.py [--from runs/quickstart]

With --from, the smoke run's comparison and curves are copied into benchmarks/results first.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def rewritten(text: str) -> str:
    """The README's text with every generated part as the result files have it."""
    parts = {
        "speed": speed(),
        "smoke": smoke(),
        "slice": training(),
        "linear": linear(),
        "cli": cli(),
        "upstream": upstream(),
    }
    for name, part in parts.items():
        pattern = rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)"
        text, count = re.subn(pattern, lambda m, p=part: m[1] + p + m[2], text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"the README has {count} places for {name}, not one")
    return text


def speed() -> str:
    """The fastest run of the NAM56R slice on one GPU: released Megatron's, and the overlay's."""
    best: dict[bool, float] = {True: 0.0, False: 0.0}
    for path in RESULTS.glob("nam56r_h200_slice*.json"):
        for name, row in json.loads(path.read_text())["runs"].items():
            stock = name.startswith("stock")
            best[stock] = max(best[stock], row.get("tokens_per_second", 0.0))
    return (
        f"With it a slice of NAM56R trains at {best[False] / 1000:.1f}k tokens/s on one H200; the "
        f"release's best is {best[True] / 1000:.1f}k\n(`scripts/train.py`, real data; table below)."
        "\n"
    )


def smoke() -> str:
    """The smoke run: labels, losses, the picture."""
    rows = json.loads((RESULTS / "smoke_cpu.json").read_text())
    lines = [
        "",
        "| run | wrong MTP labels | held-out MTP loss on the true labels, by depth |",
        "|---|---|---|",
    ]
    for row in rows.values():
        name = "stock" if row["overlay"] == "stock" else "with the overlay"
        share = 100 * row["wrong_mtp_labels"] / row["mtp_labels"]
        losses = ", ".join(f"{loss:.3f}" for loss in row["true_mtp_loss"])
        wrong = f"{row['wrong_mtp_labels']} of {row['mtp_labels']} ({share:.1f} %)"
        lines.append(f"| {name} | {wrong} | {losses} |")
    picture = "![MTP loss of both runs](benchmarks/results/smoke_cpu.png)"
    return "\n".join([*lines, "", picture, ""])


def training() -> str:
    """The NAM56R slice on H200, run by run, from what `benchmarks/slice_training.py` wrote."""
    heads = ["recipe", "run", "GPUs", "step, ms", "tokens/s", "peak memory, GiB"]
    rows = []
    for path in sorted(RESULTS.glob("nam56r_*.json")):
        result = json.loads(path.read_text())
        told = [c for c in result["changes"] if not c.startswith(("train_iters", "global_batch"))]
        what = ", ".join([result["recipe"], *told])
        for name, row in result["runs"].items():
            cells = [f"[{what}](benchmarks/results/{path.stem}.md)", name, result["gpus"]]
            if "out_of_memory" in row:
                cells += ["out of memory", "", ""]
            else:
                cells += [row["milliseconds"], round(row["tokens_per_second"]), row["peak_gib"]]
            rows.append(f"| {' | '.join(map(str, cells))} |")
    first = "NAM56R's widths (6 layers, 2 MTP depths, sequence 4096) on H200, real data:"
    return "\n".join(
        ["", first, "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows, ""]
    )


def linear() -> str:
    """Linear cross-entropy beside Megatron's own choices, at 32768 tokens."""
    report = json.loads((RESULTS / "linear_cross_entropy_h200.json").read_text())
    rows = [row for row in report["rows"] if row["tokens"] == 32768]
    sizes = sorted({row["vocabulary"] for row in rows})
    shown = ("stock", "native", "te", "ours", "ours, masked tokens left out")
    lines, found = [], {}
    for row in rows:
        name = row["name"].partition(" (")[0]
        found[name, row["vocabulary"]] = row
    for name in shown:
        cells = [name]
        for size in sizes:
            row = found[name, size]
            cells += [f"{row['milliseconds']:.1f}", f"{row['above_gradients_gib']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    heads = [part for size in sizes for part in (f"V={size}, ms", "GiB above dX and dW")]
    every, left_out = (
        [found["te", size]["milliseconds"] / found[name, size]["milliseconds"] for size in sizes]
        for name in shown[3:]
    )
    memory = [
        found["te", size]["above_gradients_gib"] / found["ours", size]["above_gradients_gib"]
        for size in sizes
    ]
    said = (
        f"Forward and backward of 32768 tokens, a tenth masked, H=4096, bf16, one "
        f"{report['environment']['GPU']}, {report['environment']['date']}, all taking turns in one "
        f"process.\nAgainst Transformer Engine's loss, the fastest that Megatron offers: "
        f"{_range(every)} times as fast, with {_range(memory)} times less\nmemory; with the masked "
        f"tokens left out {_range(left_out)} times as fast."
    )
    head = f"| implementation | {' | '.join(heads)} |"
    return "\n".join(["", said, "", head, "|---" * (1 + len(heads)) + "|", *lines, ""])


def _range(values: list[float]) -> str:
    """`0.98 to 1.00`."""
    shown = sorted({f"{value:.2f}" if value < 2 else f"{value:.1f}" for value in values})
    return shown[0] if len(shown) == 1 else f"{shown[0]} to {shown[-1]}"


def upstream() -> str:
    """What Megatron's own unit tests say, on each device."""
    said = []
    for device in ("h200", "cpu"):
        name = f"upstream_unit_tests_{device}"
        result = json.loads((RESULTS / f"{name}.json").read_text())
        said.append(
            f"{result['passed_on_both']} pass on both trees on {device.upper()}, "
            f"{len(result['differences'])} differ ([result](benchmarks/results/{name}.md))"
        )
    return "; ".join(said) + ".\n"


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
    readme = RESULTS.parent.parent / "README.md"
    readme.write_text(rewritten(readme.read_text()))
