"""The generated parts of the README: each comes from a result file in the repository."""

from __future__ import annotations

import json
import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def rewritten(text: str) -> str:
    """The README's text with every generated part as the result files have it."""
    for name, part in (("smoke", smoke()), ("cli", cli())):
        pattern = rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)"
        text, count = re.subn(pattern, lambda m, p=part: m[1] + p + m[2], text, flags=re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"the README has {count} places for {name}, not one")
    return text


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


def cli() -> str:
    """Times of the commands."""
    return (RESULTS / "cli.md").read_text()
