"""A copy of a tree for one side of a proof: links, except for the files that pages edit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cppmega.guard.imports import PACKAGES
from cppmega.overlay.plan import Plan
from cppmega.proof import mutant
from cppmega.proof.messages import Side
from cppmega.rewriting.rewrite import Step, rewrite
from cppmega.tree.links import link


def build(plan: Plan, root: Path, side: Side) -> None:
    """Write a tree of links to the real one, with the edited files of one side."""
    # Including files that a page edited before and no longer does.
    changed = {p: v.pristine for p, v in plan.views.items() if v.patched and v.pristine is not None}
    for path, work in plan.work.items():
        file = plan.views[path]
        assert file.pristine is not None
        changed[path] = file.pristine
        if side != "stock":
            steps = [Step(p.name, e, p.patch.marks(e)) for p, e in work.edits]
            if side == "mutant":
                steps = _mutants(steps)
            changed[path] = rewrite(file.pristine, path, steps).data
    for package in PACKAGES:
        if (plan.tree.root / package).is_dir():
            link(plan.tree.root / package, root / package, changed)


def _mutants(steps: Sequence[Step]) -> list[Step]:
    """Return one step per symbol, with the text of all its pages and the behavior of stock."""
    by_symbol: dict[str, list[Step]] = {}
    for step in steps:
        by_symbol.setdefault(step.edit.symbol, []).append(step)
    return [
        replace(group[0], edit=mutant.of_sources([step.edit for step in group]))
        for group in by_symbol.values()
    ]
