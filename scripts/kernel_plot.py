"""Draw the kernels next to what Megatron has, from the result files.

`scripts/readme_figures.py` calls it. The picture carries its numbers, and a test compares those
with the result files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import dsa_fp8

from cppmega.runs import plotting

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
PICTURE = RESULTS / "kernels_h200.svg"
_SIDES = {"Megatron": "#c44e52", "Megatron with TileLang": "#ccb974", "cppmega": "#4c72b0"}
_INDEXER = {
    "scores and top-k\n(Megatron: scores)": "choice, 4096 x 1, 32 x 64, top-k 256",
    "sparse loss\nand gradients": "sparse loss, 4096 x 1",
    "dense loss\nand gradients": "dense loss, 4096 x 1",
    "prologue, both ways,\n16 documents": "prologue, 4096 x 1, 32 x 64, 16 documents",
}
"""Label -> case of the indexer's results."""
_ATTENTION = {
    "attention, both ways": "NAM56R, b 1",
    "attention, both ways,\nDeepSeek-V3.2": "DeepSeek-V3.2, 4k",
}
"""Label -> case of the attention's results."""
_MEASURED = {
    "Megatron": ("reference path", "reference path, scores alone", "stock"),
    "Megatron with TileLang": ("TileLang", "TileLang, scores and top-k", "tilelang"),
    "cppmega": ("ours",),
}
_LOSSES = {
    "stock": "unfused",
    "native": "native",
    "te": "te",
    "Liger none": "Liger",
    "ours": "cppmega",
    "ours, masked tokens left out": "cppmega, masked\ntokens left out",
}
TOKENS, VOCABULARY = 32768, 131072

Numbers = dict[str, dict[str, Any]]


def numbers() -> Numbers:
    """What the picture shows: panel -> label -> values."""
    indexer, attention, losses, transform, connections = (
        _result(f"{name}_h200")
        for name in ("dsa_indexer", "dsa_attention", "linear_cross_entropy", "hadamard", "mhc")
    )
    cases = {label: indexer["cases"][case] for label, case in _INDEXER.items()}
    for label, case in _ATTENTION.items():
        cases[label] = {way: row["both"] for way, row in attention["cases"][case].items()}
    return {
        "dsa": {label: _sides(case) for label, case in cases.items()},
        "losses": {
            _LOSSES[name]: [row["milliseconds"], row["above_gradients_gib"]]
            for row in losses["rows"]
            if (row["tokens"], row["vocabulary"]) == (TOKENS, VOCABULARY)
            and (name := row["name"].partition(" (")[0]) in _LOSSES
        },
        "limits": {
            **_limits(indexer["cases"], losses, transform["milliseconds"]),
            "hyper-connections, of a copy": _site(connections["sites"]),
        },
    }


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _sides(case: dict[str, Any]) -> dict[str, float]:
    return {
        side: case[name]["milliseconds"]
        for side, names in _MEASURED.items()
        for name in names
        if name in case
    }


def _limits(
    cases: dict[str, Any], losses: dict[str, Any], transform: dict[str, Any]
) -> dict[str, float]:
    """The share of what the GPU can do: the time of a copy, or the rate of its matrix product."""
    (loss,) = (
        row["tflops"]
        for row in losses["rows"]
        if (row["name"], row["tokens"], row["vocabulary"]) == ("ours", TOKENS, VOCABULARY)
    )
    product = losses["environment"]["bf16 matrix product 8192^3, TFLOP/s, in a burst"]
    queries = transform["queries, 64 heads, s=4096, b=8"]
    choice = cases["choice, 32768 x 1, 64 x 128, top-k 2048"]
    dense = cases["dense loss, 4096 x 8"]
    attention = dsa_fp8.DEEPSEEK[-1]
    return {
        "Hadamard transform, of a copy": queries["copy"] / queries["kernel"],
        "linear cross-entropy, of a matrix product": loss / float(product),
        "scores and top-k, 32768 tokens, of a matrix product": _share(choice),
        "dense loss, 8 x 4096 tokens, of a matrix product": _share(dense),
        f"sparse attention, {attention.sequence} tokens, of a matrix product": (
            dsa_fp8.milliseconds(attention.forward + attention.backward)
            / dsa_fp8.measured(attention)["both"]
        ),
    }


def _share(case: dict[str, Any]) -> float:
    return case["floor"] / case["ours"]["milliseconds"]


def _site(sites: dict[str, dict[str, float]]) -> float:
    """Of a site's first shape, the largest."""
    times = next(iter(sites.values()))
    return times["least"] / times["ours"]


def drawn(picture: Path = PICTURE) -> Numbers:
    """The numbers that a picture shows."""
    description = Xml.parse(picture).find(".//{http://purl.org/dc/elements/1.1/}description")
    return json.loads(description.text if description is not None else "{}")


def draw(target: Path = PICTURE) -> None:
    """Write the picture."""
    shown, pyplot = numbers(), plotting.pyplot()
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cppmega", "font.size": 9}):
        figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
        _draw_dsa(axes[0], shown["dsa"])
        _draw_losses(axes[1], shown["losses"])
        _draw_limits(axes[2], shown["limits"])
        carried = {"Date": None, "Description": json.dumps(shown)}
        figure.savefig(target, metadata=carried)
        pyplot.close(figure)


def _draw_dsa(axis: Any, cases: dict[str, dict[str, float]]) -> None:
    height = 0.8 / len(_SIDES)
    for at, (side, colour) in enumerate(_SIDES.items()):
        rows = [row for row, sides in enumerate(cases.values()) if side in sides]
        values = [sides[side] for sides in cases.values() if side in sides]
        places = [row + (at - (len(_SIDES) - 1) / 2) * height for row in rows]
        bars = axis.barh(places, values, height * 0.9, color=colour, label=side)
        axis.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    axis.set_yticks(range(len(cases)), list(cases))
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.margins(x=0.15)
    axis.set_title("DSA, 4096 tokens: ms", fontsize=10)
    axis.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.08))


def _draw_losses(axis: Any, losses: dict[str, list[float]]) -> None:
    for name, (milliseconds, gib) in losses.items():
        side = "cppmega" if name.startswith("cppmega") else "Megatron"
        axis.plot([milliseconds], [gib], "o", color=_SIDES[side] if name != "Liger" else "#8c8c8c")
        below = name == "cppmega"  # its neighbor's name is above
        place = (5, -12) if below else (5, 4)
        axis.annotate(name, (milliseconds, gib), place, textcoords="offset points", fontsize=8)
    axis.margins(0.15)
    axis.set_xlabel("ms, forward and backward")
    axis.set_ylabel("GiB above the gradients")
    axis.set_title(f"Loss of the LM head, {TOKENS} tokens, V={VOCABULARY}", fontsize=10)
    axis.grid(alpha=0.3)


def _draw_limits(axis: Any, limits: dict[str, float]) -> None:
    labels = [label.replace(", of", ",\nof") for label in limits]
    percent = [100 * share for share in limits.values()]
    bars = axis.barh(labels, percent, 0.5, color=_SIDES["cppmega"])
    axis.bar_label(bars, fmt="%.0f %%", padding=2, fontsize=8)
    axis.set_xlim(0, 110)
    axis.invert_yaxis()
    axis.set_title("cppmega's kernels: % of the GPU's rate", fontsize=10)
