"""Write the tables of benchmarks/results/dsa_fp8.md: what FP8 could save of DSA at most.

usage: python scripts/dsa_fp8.py

Nothing here runs in FP8. Products are counted, divided by the rate that the benchmarks' floors
assume, and set beside the times of the bf16 kernels in the result files; a test compares.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cppmega.recipe import index
from tools.markdown import table

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
PAGE = RESULTS / "dsa_fp8.md"
PRODUCTS, COPY = 790e12, 4.26e12
"""Products of bf16 and bytes, a second, as the floors of `benchmarks/dsa_indexer.py` have them."""
SCORES = 0.83
"""Milliseconds of NAM56R's scores without the selection, from `dsa_indexer_designs.md`."""


@dataclass(frozen=True)
class Shape:
    """One layer's DSA, and its cases in the results of the indexer and of the attention."""

    title: str
    choice: str
    attention: str
    sequence: int
    batch: int
    index: tuple[int, int]
    heads: int
    widths: tuple[int, int]
    topk: int

    @property
    def causal(self) -> int:
        """The pairs of a query and a key that it sees."""
        return self.batch * self.sequence * (self.sequence + 1) // 2

    @property
    def chosen(self) -> int:
        """The pairs of a query and a key that it chose."""
        early = self.topk * (self.topk - 1) // 2  # the first queries see fewer keys
        return self.batch * (self.sequence * self.topk - early)

    @property
    def scores(self) -> int:
        """Operations of the index scores."""
        heads, width = self.index
        return 2 * self.causal * heads * width

    @property
    def forward(self) -> int:
        """Operations of the scores and of the output."""
        return 2 * self.chosen * self.heads * sum(self.widths)

    @property
    def backward(self) -> int:
        """Operations of the scores, dP, dQ, and of dK and dV, which are one gradient."""
        width, value = self.widths
        return 2 * self.chosen * self.heads * (3 * width + 2 * value)


NAM56R = Shape(
    "NAM56R, 4096 x 8", "choice, 4096 x 8, 32 x 64, top-k 256", "NAM56R, b 8",
    4096, 8, (32, 64), 32, (128, 64), 256,
)  # fmt: skip
DEEPSEEK = tuple(
    Shape(
        f"DeepSeek-V3.2, {sequence} x 1", f"choice, {sequence} x 1, 64 x 128, top-k 2048",
        f"DeepSeek-V3.2, {sequence // 1024}k",
        sequence, 1, (64, 128), 128, (576, 512), 2048,
    )
    for sequence in (4096, 32768)
)  # fmt: skip
SHAPES = (NAM56R, *DEEPSEEK)


def milliseconds(operations: float, rate: float = PRODUCTS) -> float:
    """The time of operations, or of bytes, at a rate."""
    return 1e3 * operations / rate


def rewritten(text: str) -> str:
    """Fill in the page's tables."""
    for name, part in {"products": products(), "saved": saved()}.items():
        pattern = rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)"
        text, count = re.subn(pattern, lambda m, t=part: m[1] + t + m[2], text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} places for {name}, expected one")
    return text


def products() -> str:
    """The products of one layer, next to what was measured."""
    heads = ("shape", "products of", "TFLOP", "bf16, ms", "FP8 saves at most, ms")
    lines = []
    for shape in SHAPES:
        taken = measured(shape)
        parts = {
            "index scores": (shape.scores, taken["choice"]),
            "attention, forward": (shape.forward, taken["forward"]),
            "attention, backward": (shape.backward, taken["backward"]),
        }
        for name, (operations, whole) in parts.items():
            time = milliseconds(operations)
            cells = (f"{operations / 1e12:.2f}", f"{time:.2f}", f"{time / 2:.2f}", f"{whole:.2f}")
            lines.append((shape.title, name, *cells, _percent(time / 2, whole)))
    return "\n" + table((*heads, "measured, ms", "saved, of the measured"), lines) + "\n\n"


def saved() -> str:
    """What FP8 could save of a step of the slice, and of a layer of DeepSeek-V3.2's dimensions."""
    layers = index.load("nam56r_h200_slice").pattern.count("D")
    slices = _result("dsa_attention_slices_h200")["fused8"]["runs"]
    step = slices["after1"]["milliseconds"]
    dense_step = _result("nam56r_h200_slice_fused_dense")["runs"]["overlay"]["milliseconds"]
    scores = layers * milliseconds(NAM56R.scores) / 2
    attention = layers * milliseconds(NAM56R.forward + NAM56R.backward) / 2
    gather = 2 * NAM56R.chosen * NAM56R.widths[0]
    gathers = layers * milliseconds(gather, COPY)  # half of each of two
    long = DEEPSEEK[-1]
    taken = measured(long)
    both = taken["choice"] + taken["both"]
    slice_, dense = f"NAM56R slice, {layers} layers", "the same with the dense loss"
    layer = f"{long.title}, one layer"
    at = f"{gather / 1e9:.1f} GB each at {COPY / 1e12:.2f} TB/s"
    parts = [
        (slice_, "index scores", scores, "step", step),
        (slice_, f"half of all of the scores' {SCORES} ms", layers * SCORES / 2, "step", step),
        (dense, "index scores, computed four times", 4 * scores, "step", dense_step),
        (slice_, "products of the attention", attention, "step", step),
        (slice_, f"half of two gathers, {at}", gathers, "step", step),
        (slice_, "scores, products and gathers", scores + attention + gathers, "step", step),
        (layer, "index scores", milliseconds(long.scores) / 2, "choice and attention", both),
        (
            layer, "products of the attention", milliseconds(long.forward + long.backward) / 2,
            "choice and attention", both,
        ),
    ]  # fmt: skip
    rows = [
        (where, what, f"{part:.2f}", f"{whole} of {of:.1f} ms", _percent(part, of))
        for where, what, part, whole, of in parts
    ]
    return "\n" + table(("where", "what", "saved at most, ms", "of", "share"), rows) + "\n\n"


def measured(shape: Shape) -> dict[str, float]:
    """Milliseconds of scores and top-k, and of the attention: forward, backward, both."""
    choice = _result("dsa_indexer_h200")["cases"][shape.choice]["ours"]
    attention = _result("dsa_attention_h200")["cases"][shape.attention]["ours"]
    parts = {name: attention[name]["milliseconds"] for name in ("forward", "backward", "both")}
    return {"choice": choice["milliseconds"], **parts}


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole
    return f"{share:.2f} %" if share < 1 else f"{share:.0f} %"


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
