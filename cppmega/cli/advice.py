"""The answer of `cppmega advise`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host import console
from cppmega.host.table import Row, show, table
from cppmega.host.wording import counted
from cppmega.preflight import examine
from cppmega.preflight.advice import APPLY, Advice, Possibility, advise
from cppmega.preflight.context import Context

_CHECKS = ("one_root", "imported_process", "unknown_arguments", "line_parses")
"""What must hold before the arguments can be read."""
_OF_THE_PREFLIGHT = "arguments-invalid"
"""Megatron's validation, which also looks at this machine's environment."""


def asked(context: Context) -> Advice:
    """Advice on a command line that Megatron's parser accepts.

    Raises:
        CppmegaError: `no-arguments`, `page-failed`, and what the preflight's checks find.
    """
    for name in _CHECKS:
        for finding in examine.answers(name, context):
            if finding.state == "failed" and finding.name != _OF_THE_PREFLIGHT:
                raise finding.error
            if finding.state == "not-applicable" and name == "line_parses":
                raise CppmegaError(
                    "no-arguments",
                    f"There is no command line to advise on: {finding.what}.",
                    "Pages are chosen by Megatron's arguments.",
                    "cppmega advise -- --num-layers 32 ..., or cppmega advise RECIPE; cppmega "
                    "recipes lists them",
                )
    return advise(context)


def print_advice(context: Context, advice: Advice, verbose: bool) -> None:
    """Print a row for each page that serves, and for each possibility; then the next command."""
    show(table(_rows(context, advice, verbose)))
    if advice.pending:
        console.say(f"next: {APPLY}, then cppmega preflight with the same words")


def _rows(context: Context, advice: Advice, verbose: bool) -> Iterator[Row]:
    pages = context.session.pages
    for name in advice.serves:
        yield Row(("serves", name, f"{pages[name].patch.purpose}: {_title(context, name)}"), "good")
    for each in advice.possible:
        yield Row(("possible", _sentence(context, advice, each)), "waiting")
    for state, names in (("perhaps", advice.conditional), ("irrelevant", tuple(advice.irrelevant))):
        if verbose:
            yield from (Row((state, name, advice.irrelevant.get(name, _MAYBE))) for name in names)
        elif names:
            why = f": {_MAYBE}" if state == "perhaps" else ""
            yield Row((state, f"{counted(len(names), 'page')}{why} (-v lists them)"))


_MAYBE = "no argument tells whether a run reaches it"


def _sentence(context: Context, advice: Advice, one: Possibility) -> str:
    what = ", ".join(one.pages)
    if len(one.pages) == 1:
        what += f" ({_title(context, one.pages[0])})"
    saved = one.saves or 0.0
    if abs(saved) >= _SHOWN:
        effect = "saves" if saved > 0 else "costs"
        what += f"; {effect} {abs(saved):.1f} GiB of an estimated {advice.gib:.1f} per GPU"
    return f"{one.how}: {what}" + "; it is another model" * one.other_model


_SHOWN = 0.05
"""GiB below which a difference is not named."""


def _title(context: Context, name: str) -> str:
    return context.session.pages[name].title


def as_json(context: Context, advice: Advice) -> dict[str, Any]:
    """The object that `--json` prints."""
    tree, pages = context.session.read_tree(), context.session.pages
    return {
        "megatron": {"version": tree.version, "root": str(tree.root)},
        "ok": True,
        "estimated_gib": advice.gib,
        "serves": [
            {
                "name": name,
                "purpose": pages[name].patch.purpose,
                "state": context.plan.verdicts[name].state,
                "title": _title(context, name),
            }
            for name in advice.serves
        ],
        "possible": [
            {
                "how": one.how,
                "pages": list(one.pages),
                "saves_gib": one.saves,
                "other_model": one.other_model,
            }
            for one in advice.possible
        ],
        "perhaps": list(advice.conditional),
        "irrelevant": dict(advice.irrelevant),
    }
