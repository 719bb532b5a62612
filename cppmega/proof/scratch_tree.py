"""A copy of a tree for one side of a proof: links, except for the files that pages edit."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cppmega.overlay.plan import Plan
from cppmega.proof.messages import Side
from cppmega.tree.installed import PACKAGES
from cppmega.tree.links import link

if TYPE_CHECKING:
    from cppmega.rewriting.rewrite import Step


def build(plan: Plan, root: Path, side: Side, proved: Container[str] = ()) -> None:
    """Write a tree of links to the real one, with the edited files of one side.

    Args:
        proved: the files that the proved pages edit; where it matters, the others are stock's, or
            are taken as they come.
    """
    from cppmega.rewriting.rewrite import Step, rewrite  # libcst takes a while to import

    # Including files that a page edited before and no longer does.
    changed = {p: v.pristine for p, v in plan.views.items() if v.patched and v.pristine is not None}
    for path, work in plan.work.items():
        file = plan.views[path]
        assert file.pristine is not None
        changed[path] = file.pristine
        if side == "patched" and plan.up_to_date(path):
            changed[path] = file.current or b""
        elif side == "patched" or (side == "mutant" and path in proved):
            steps = [Step.of(page, edit) for page, edit in work.edits]
            steps = _mutants(steps) if side == "mutant" else steps
            parsed = plan.survey.parse(file.pristine, path)
            checked = side == "patched" and path in proved
            changed[path] = rewrite(file.pristine, path, steps, parsed, checked=checked).data
    for package in PACKAGES.values():
        if (plan.tree.root / package).is_dir():
            link(plan.tree.root / package, root / package, changed)


def _mutants(steps: Sequence[Step]) -> list[Step]:
    """Return one step per symbol, with the text of all its pages and the behavior of stock."""
    from cppmega.proof import mutant

    by_symbol: dict[str, list[Step]] = {}
    for step in steps:
        by_symbol.setdefault(step.edit.symbol, []).append(step)
    return [
        replace(group[0], edit=mutant.of_sources([step.edit for step in group]))
        for group in by_symbol.values()
    ]
