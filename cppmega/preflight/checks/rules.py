"""The run breaks no rule: of `cppmega.rules`, or of a page in the code."""

from __future__ import annotations

from cppmega.catalogue import page_rules
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Problems, Remark
from cppmega.rules import RULES, dsa
from cppmega.rules.rule import Run
from cppmega.sizes.megatron_args import uses_dsa

AFTER: tuple[str, ...] = ("line_parses", "checkpoint")

_OF_SCRIPTS = {"argument-without-effect", "precision-not-stated", "no-data"}
"""Rules that a script may keep by what it sets after parsing, or reads itself."""

_MOCK = "MOCK DATA, as --mock-data asks: its speed and its losses mean nothing"


def check(context: Context) -> Problems:
    """Ask every rule about the parsed line, its variables and the checkpoint that it resumes.

    Yields:
        The errors of the broken rules; `page-failed`.

    Raises:
        NotApplicable: nothing that Megatron parses is launched.
    """
    run, verdicts = context.run, context.plan.verdicts
    pages = [p for p in context.provided.present if verdicts[p.name].state != "upstreamed"]
    errors = page_rules.broken(pages, run)
    left = [e for e in errors if context.adds_arguments and e.name in _OF_SCRIPTS]
    yield from (error for error in errors if error not in left)
    count = len(RULES) + sum(len(page.patch.rules) for page in pages)
    detail = f"{count} rules hold"
    if uses_dsa(run):
        detail += f"; DSA by {_dsa(run)}"
    notes = [_MOCK] if run.mock_data else []
    if left:
        notes.append(f"unless the script sets or reads more: {' '.join(e.what for e in left)}")
    return Remark("; ".join([*notes, detail])) if notes else detail


def _dsa(run: Run) -> str:
    """What computes DSA's attention in this run."""
    if dsa.runs_own_kernels(run):
        return "cppmega's kernels"
    backend = run.dsa_kernel_backend
    return f"unfused Megatron, {dsa.scores(run)}" if backend in (None, "none") else str(backend)
